"""A table of runs as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from advanced.experiments.grid import Row, Table, Trial, path_of, size_in_words
from advanced.experiments.models import Model
from advanced.experiments.results import Difference, compare, interval
from engine.data import create_data, has_gold_labels, majority_accuracy
from engine.figures import entry_of
from utils import UserError, atomic_write, read_text

PAGE_COLUMNS = (
    "method", "trained", "seeds", "dev acc", "dev macro-F1", "against the baseline",
    "test acc", "test macro-F1", "against the baseline", "seconds",
)  # fmt: skip


NOTATION = """ ± is the standard deviation over seeds, [low, high] a 95 % interval over sentences and seeds. A
difference is bold where its interval leaves 0 out and, of what is trained, there are three seeds or more."""


class Cell(NamedTuple):
    """A row on one data set and size. runs: by seed. missing: how many are not done. chosen: the tuned values."""

    row: Row
    runs: dict[int, Mapping[str, Any]]
    missing: int
    chosen: str


Results = Mapping[str, Mapping[str, Any]]  # by key


def cells_of(table: Table, model: Model, done: Results, data: str, shots: int | None) -> list[Cell]:
    cells = []
    for row, of_data, of_shots in table.cells():
        if (of_data, of_shots) != (data, shots):
            continue
        trials = table.final(row, data, shots, model, done)
        if not trials:
            cells.append(Cell(row, {}, len(table.seeds_of(row)), "to be chosen"))
            continue
        runs = {trial.seed: done[key] for trial in trials if (key := trial.key(model)) in done}
        for run in runs.values():
            entry_of(run, "dev")
        cells.append(Cell(row, runs, len(trials) - len(runs), _values(row, trials[0])))
    return cells


def render(table: Table, model: Model, done: Results) -> str:
    """The page of a table: all runs that are done, and the number of missing ones."""
    lines = [f"# {table.title}", "", f"Checkpoint: `{model.name}`.{NOTATION if table.seeds else ''}", ""]
    for data, shots in table.sizes() if table.seeds else ():
        lines += _section(table, model, done, data, shots)
    lines += [*makes_of(done), *sources_of(table)]
    seeds, purpose = ", ".join(map(str, table.tune_seeds)), PURPOSE if table.seeds else ""
    if choices := render_choices(table, model, done):
        lines += ["## What was tried", "", CHOICES.format(seeds=seeds, purpose=purpose), "", *choices]
    return "\n".join(lines) + "\n"


def sources_of(table: Table) -> list[str]:
    """The section with the sources of rows; no lines if no row has one."""
    said = [f"| {row.name} | {row.source} |" for row in table.rows if row.source]
    return ["## Sources", "", "| method | source |", "|---|---|", *said, ""] if said else []


def write_page(path: Path, text: str, flag: str) -> None:
    """Write a page, also over an earlier one of the same title. Raises `UserError` over any other file.

    flag: the flag that gave the name, for the message.
    """
    if path.exists() and read_text(path).split("\n")[0] != text.split("\n")[0]:
        raise UserError(f"{path} is there already and has another title; move it, or give another {flag}")
    with atomic_write(path) as file:
        file.write(text)


def makes_of(done: Results) -> list[str]:
    """A line for every checkpoint that was made more than once (see `engine.lineage`)."""
    weights: dict[str, set[str]] = {}
    for result in done.values():
        if "weights" in result:
            weights.setdefault(result["model"], set()).add(result["weights"])
    lines = []
    for name, each in weights.items():
        if len(each) > 1:
            lines += [f"`{name}` was made {len(each)} times by the same command; weights differ by rounding.", ""]
    return lines


def labels_of(data: str, split: str) -> list[int]:
    return [example.label for example in create_data(path_of(data, split), is_test=split == "test")]


CHOICES = """Accuracies on data held out of train (zero-shot: macro-F1 on a sample of train){purpose}.
Seeds: {seeds}. Dev was not looked at."""
PURPOSE = ", by which the values above were chosen"


def render_choices(table: Table, model: Model, done: Results) -> list[str]:
    """The lines of a table of the combinations that were tried, as far as their runs are done."""
    lines, seeds = [], len(table.tune_seeds)
    for row, data, shots in table.cells():
        scores: dict[str, list[float]] = {}
        for trial in table.tuning(row, data, shots):
            if result := done.get(trial.key(model)):
                scores.setdefault(_values(row, trial), []).append(entry_of(result, "selection"))
        tried = ", ".join(f"{values}: {spread(found)}{_seeds(len(found), seeds)}" for values, found in scores.items())
        if tried:
            lines.append(f"| {row.name} | {data}, {size_in_words(shots)} | {tried} |")
    return ["| method | data | tried |", "|---|---|---|", *lines] if lines else []


def _seeds(done: int, planned: int) -> str:
    return "" if done == planned else f" ({done} of {planned} seeds)"


def _values(row: Row, trial: Trial) -> str:
    """The values of a run for the keys that the row tunes, in words."""
    settings = dict(trial.settings)
    chosen = [f"{key} {_shown(settings[key])}" for key in row.tune if key in settings]
    return ", ".join(chosen + [argument for argument in trial.arguments if argument not in row.arguments])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _section(table: Table, model: Model, done: Results, data: str, shots: int | None) -> list[str]:
    cells = cells_of(table, model, done, data, shots)
    baseline = next((cell.runs for cell in cells if cell.row.name == table.baseline), {})
    title = f"## {data.upper()}{_size_in_words(cells, shots)}"
    lines = [title, "", *render_cells(cells, baseline, data, table.baseline)]
    missing = {cell.row.name: cell.missing for cell in cells if cell.missing}
    if missing:
        names = ", ".join(f"{name} {count}" for name, count in missing.items())
        lines += ["", f"Missing: {sum(missing.values())} runs ({names})."]
    return [*lines, ""]


def _size_in_words(cells: list[Cell], shots: int | None) -> str:
    if all(cell.row.option == "prompt" for cell in cells):
        return ""
    return ", all training sentences" if shots is None else f", {shots} training sentences of each class"


def render_cells(cells: list[Cell], baseline: dict[int, Mapping[str, Any]], data: str, base_name: str) -> list[str]:
    """The lines of a table of the rows that have runs; below it a line about the majority class."""
    labels = {split: labels_of(data, split) for split in ("dev", "test")}
    lines = [f"| {' | '.join(PAGE_COLUMNS)} |", "|---" * len(PAGE_COLUMNS) + "|"]
    lines += [f"| {' | '.join(_columns(cell, baseline, labels, base_name))} |" for cell in cells if cell.runs]
    majority = f"Majority class: dev {plain(majority_accuracy(labels['dev']))}"
    is_labelled = has_gold_labels(labels["test"])
    majority += f", test {plain(majority_accuracy(labels['test']))}." if is_labelled else ". Test has no labels."
    alone = [cell for cell in cells if cell.runs and (cell.row.name == base_name or not baseline)]
    return [*lines, "", " ".join([majority, *(words for cell in alone if (words := _interval_of(cell, labels)))])]


def _interval_of(cell: Cell, labels: dict[str, list[int]]) -> str:
    """The intervals of a row that is not compared with another one; "" for too few seeds."""
    lines = []
    for figure, words in (("accuracy", "accuracy"), ("macro_f1", "macro-F1")):
        found = ((split, interval(cell.runs, split, labels[split], figure)) for split in ("dev", "test"))
        parts = [f"{split} [{plain(each.low)}, {plain(each.high)}]" for split, each in found if each is not None]
        lines += [f"{words} {', '.join(parts)}"] * bool(parts)
    return f"Of {cell.row.name}: {'; '.join(lines)}." if lines else ""


def _columns(cell: Cell, baseline: dict[int, Any], labels: dict[str, list[int]], base_name: str) -> list[str]:
    runs = [*cell.runs.values()]
    columns = [cell.row.name + (f" ({cell.chosen})" if cell.chosen else "")]
    columns += [f"{runs[0]['trainable']:,}" if "trainable" in runs[0] else "0", str(len(runs))]
    for split in ("dev", "test"):
        if not any(split in run for run in runs):
            columns += ["-", "-", "-"]
            continue
        columns += [spread([entry_of(run, split)[figure] for run in runs]) for figure in ("accuracy", "macro_f1")]
        is_base = cell.row.name == base_name
        difference = None if is_base else compare(cell.runs, baseline, split, labels[split])
        columns.append("" if difference is None else difference_in_words(difference))
    return [*columns, f"{fmean(run.get('seconds', run.get('wall_seconds', 0.0)) for run in runs):.0f}"]


def plain(value: float) -> str:
    """An accuracy with three digits, without the 0 before the point."""
    return f"{value:.3f}".removeprefix("0")


def spread(values: list[float]) -> str:
    """Mean ± standard deviation; of a single value the value alone."""
    return plain(fmean(values)) + (f" ± {plain(stdev(values))}" if len(values) > 1 else "")


def difference_in_words(difference: Difference) -> str:
    """Mean and interval, bold if the difference is beyond noise."""
    text = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"**{text}**" if difference.is_beyond_noise else text
