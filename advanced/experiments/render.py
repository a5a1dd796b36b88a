"""A table of runs as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from advanced.experiments.grid import Done, Table
from advanced.experiments.models import Model, remark_on
from advanced.experiments.panel import (
    Cell,
    Panel,
    Verdict,
    cells_of,
    each_seed,
    majority_f1,
    panels_of,
    title_of,
    uniform_guess,
    values_of,
)
from advanced.experiments.results import compare
from advanced.experiments.rows import size_in_words
from advanced.experiments.statistics import POWER, Difference
from engine.data import majority_accuracy, unpack
from engine.metrics import entry_of
from utils import UserError, atomic_write, join_names, read_text

PIPE = "\\|"  # within a cell of a table
COLUMNS = (
    "method", "seeds", "dev", "test", "macro-F1", "gain in accuracy", "p", "gain in macro-F1", "could be found",
    "trained", "seconds",
)  # fmt: skip
NOTATION = f""" Accuracies; ± is the standard deviation over seeds. A gain is the difference from *{{baseline}}* on the
same sentences and seeds, on {{judges}}, with its 95 % interval over both; p
is corrected for all rows of its table (Holm), and a gain is bold where it is below .05. Of one or two seeds of what
depends on them a gain has no interval, as they say too little about others. "Could be found" is the smallest true
gain that such a comparison finds with a probability of {POWER:g}. Where the loss of the training sentences stays
above .9 of that of a guess, in a row or in *{{baseline}}*, training did not fit and there is no verdict. A checkpoint
was pretrained once: what holds for another one is not in these intervals. Seconds are the median
of runs on one processor, the one that most rows ran on."""
TOGETHER = "dev and test together where dev has chosen nothing"
OF_MEMBERS = """ Some runs of votes and
soups do not say whether each of their models fitted; the first model of each is a run of *{baseline}*."""


def render(table: Table, model: Model, done: Done) -> str:
    """The page of a table: all runs that are done, and the number of missing ones."""
    is_unsaid = any(run.get("members", 1) > 1 and "fit_loss" not in run for run in done.values())
    judges = TOGETHER if len(table.judges) > 1 else f"{table.judges[0]} alone"
    notation = NOTATION + OF_MEMBERS * is_unsaid if table.seeds else ""
    notation = notation.format(baseline=table.baseline, judges=judges)
    lines = [f"# {table.title}", "", f"Checkpoint: `{model.name}`{remark_on(model.name)}.{notation}", ""]
    if table.registered:
        lines += [f"What is compared was fixed before its figures were known, in commit {table.registered}.", ""]
    for panel in panels_of(table, model, done):
        lines += [f"## {panel.title}", "", *render_panel(panel), "", *standing(panel), *across(panel), ""]
    count, words = missing_of(table, model, done)
    lines += [f"Missing: {count} runs ({words}).", ""] if count else []
    lines += made_with(done)
    command = f"python -m advanced.experiments {table.name} --pretrained-model-path {model.given_as}"
    lines += [f"`{command}` does what is missing; with `--render` it writes this page.", "", *sources_of(table)]
    if choices := render_choices(table, model, done):
        lines += ["## What was tried", "", f"{CHOICES}. Dev was not looked at.", "", *choices]
    return "\n".join(lines) + "\n"


def render_panel(panel: Panel) -> list[str]:
    """The lines of a panel's table: what needs no training, then the rows that have runs."""
    first = next(iter(panel.cells[0].runs.values()))
    each = {split: unpack(first[split]["labels"]) for split in ("dev", "test") if split in first}
    guesses = (
        ("majority class", majority_accuracy, plain(majority_f1(panel.labels))),
        ("a class at random", uniform_guess, ""),
    )
    rows = []
    for name, guess, macro in guesses:
        found = [plain(guess(each[split])) if split in each else "-" for split in ("dev", "test")]
        rows.append([f"*{name}*", "", *found, macro, *[""] * (len(COLUMNS) - 5)])
    verdicts = panel.verdicts()
    return markdown_table(COLUMNS, rows + [_columns(cell, panel, verdicts.get(cell.name)) for cell in panel.cells])


def _columns(cell: Cell, panel: Panel, verdict: Verdict | None) -> list[str]:
    runs = [*cell.runs.values()]
    columns = [cell.name + (f" ({cell.chosen})" if cell.chosen else ""), str(len(runs))]
    for split in ("dev", "test"):
        columns.append(spread([run[split]["accuracy"] for run in runs]) if split in runs[0] else "-")
    columns.append(spread(each_seed(cell.runs, panel.splits, "macro_f1")))
    if cell.unfitted:
        columns += [f"did not fit ({cell.unfitted} of {len(runs)})", "", "", ""]
    elif verdict is None:
        columns += [""] * 4
    else:
        macro = compare(cell.runs, panel.baseline, panel.splits, "macro_f1")
        is_few = verdict.gain.has_few_seeds
        columns += [verdict_in_words(verdict), "" if is_few else p_in_words(verdict.p), difference_in_words(macro)]
        columns.append("" if is_few else plain(verdict.gain.detectable))
    trained = f"{runs[0]['trainable']:,}" if "trainable" in runs[0] else "0"
    processor = panel.processor
    on_one = [run for run in runs if run.get("processor") == processor]
    seconds = [run.get("seconds", run.get("wall_seconds", 0.0)) for run in on_one]
    return [*columns, trained, f"{median(seconds):.0f}" if seconds else "-"]


def standing(panel: Panel) -> list[str]:
    """What beats neither the majority class nor the bag of words, in a sentence each."""
    not_above = ", ".join(name for name, is_above in panel.above_majority().items() if not is_above) or "none"
    said = f"not above the majority class ({plain(panel.majority)}): {not_above}"
    judges = f"{' and '.join(panel.splits)} ({len(panel.labels):,} sentences)"
    lines = [f"On {judges}, beyond noise, {said}."]
    if words := panel.bag_of_words():
        beyond = {name: each.gain.mean for name, each in panel.verdicts(words).items() if each.is_beyond_noise}
        above = ", ".join(name for name, mean in beyond.items() if mean > 0) or "none"
        below = ", ".join(name for name, mean in beyond.items() if mean < 0) or "none"
        lines.append(f"Above the bag of words: {above}; below it: {below}.")
    return lines


def across(panel: Panel) -> list[str]:
    """How many runs were trained on another processor than the run of the baseline that they are compared with."""
    trained = {run["key"]: run for cell in panel.comparable(panel.baseline) for run in cell.runs.values()}
    pairs = [(run, panel.baseline[run["seed"]]) for run in trained.values() if run["seed"] in panel.baseline]
    kinds = [[run["processor"] for run in pair] for pair in pairs if all("trainable" in run for run in pair)]
    if count := sum(one != other for one, other in kinds):
        said = f"Of {len(kinds)} pairs of trained runs {count} are of two kinds of processor"
        return [f"{said}, on which training with one seed ends elsewhere."]
    return []


def missing_of(table: Table, model: Model, done: Done) -> tuple[int, str]:
    """How many runs are not done, and in words how many of which rows, panel by panel."""
    total, each = 0, []
    for data, shots in table.sizes() if table.seeds else ():
        title = title_of(table, data, "" if shots is None else size_in_words(shots))
        left = {cell.row.name: cell.missing for cell in cells_of(table, model, done, data, shots)}
        words = ", ".join(f"{name} {count}" for name, count in left.items() if count)
        if len(left) > 1 and len({*left.values()}) == 1 and words:
            words = f"{next(iter(left.values()))} of each row"
        total += sum(left.values())
        each += [f"{title}: {words}"] if words else []
    return total, "; ".join(each)


def sources_of(table: Table) -> list[str]:
    """The section with the sources of rows; no lines if no row has one."""
    said = [(row.name, row.source) for row in table.rows if row.source]
    return ["## Sources", "", *markdown_table(("method", "source"), said), ""] if said else []


def made_with(done: Done) -> list[str]:
    """What the runs were computed with, and from which weights: a checkpoint may have been made more than once."""
    runs = [*done.values()]
    if not runs:
        return []
    hours = sum(entry_of(run, "wall_seconds") for run in runs) / 3600
    dates = sorted({entry_of(run, "date") for run in runs})
    processors = _each(runs, "{processor} ({machine})", "processor", "machine")
    versions = _each(runs, "PyTorch {torch}", "torch"), _each(runs, "kernels: {kernels}", "kernels")
    makes = _each(runs, "`{model}` {weights:.12}", "model", "weights")
    lines = [
        f"{len(runs)} runs, {hours:.1f} hours, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {processors};",
        f"{'; '.join(versions)}. Weights (SHA-256): {makes}.",
        "",
    ]
    made = Counter(name for name, _ in {(run["model"], str(run["weights"])) for run in runs})
    for name, times in made.items():
        if times > 1:
            lines += [f"`{name}` was made {times} times by the same command; pairs are of one make.", ""]
    return lines


def _each(runs: Sequence[Mapping[str, Any]], form: str, *names: str) -> str:
    """What runs say of `names`, in the words of `form`; what is equal once."""
    each = ({name: str(entry_of(run, name)) for name in names} for run in runs)
    return join_names(dict.fromkeys(form.format(**said) for said in each))


CHOICES = "Accuracies on data held out of train (zero-shot: macro-F1 on a sample of train), means over seeds"


def render_choices(table: Table, model: Model, done: Done) -> list[str]:
    """The lines of a table of the combinations that were tried, as far as their runs are done."""
    found = []
    for row, data, shots in table.cells():
        scores: dict[str, list[float]] = {}
        for seeds in table.choosing_seeds(row, shots):
            for one in table.tuning(row, data, shots, seeds, model, done):
                results = [done[key] for run in one.runs if (key := run.key(model)) in done]
                kept = scores.setdefault(values_of(row, one.runs[0]), [])
                kept += [entry_of(result, "selection") for result in results]
        tried = ", ".join(f"{values}: {spread(each)} ({len(each)})" for values, each in scores.items() if each)
        if tried:
            found.append((row.name, f"{data}, {size_in_words(shots)}", tried))
    return markdown_table(("method", "data", "tried (seeds)"), found) if found else []


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table. rows: a text for each head."""
    return [markdown_row(heads), "|---" * len(heads) + "|", *map(markdown_row, rows)]


def markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', PIPE) for text in texts)} |"


def write_page(path: Path, text: str, flag: str) -> None:
    """Write a page, also over an earlier one of the same title. Raises `UserError` over any other file.

    flag: the flag that gave the name, for the message.
    """
    if path.exists() and read_text(path).split("\n")[0] != text.split("\n")[0]:
        raise UserError(f"{path} is there already and has another title; move it, or give another {flag}")
    with atomic_write(path) as file:
        file.write(text)


def plain(value: float) -> str:
    """An accuracy with three digits, without the 0 before the point."""
    return f"{value:.3f}".removeprefix("0")


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation; of a single value the value alone."""
    return plain(fmean(values)) + (f" ± {plain(stdev(values))}" if len(values) > 1 else "")


def difference_in_words(difference: Difference) -> str:
    """Mean and interval; of too few seeds the mean alone."""
    if difference.has_few_seeds:
        return f"{difference.mean:+.3f}"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def verdict_in_words(verdict: Verdict) -> str:
    """Mean and interval, bold if the gain is beyond noise after the correction."""
    text = difference_in_words(verdict.gain)
    return f"**{text}**" if verdict.is_beyond_noise else text


def p_in_words(p: float) -> str:
    return "<.001" if p < 0.001 else plain(p)
