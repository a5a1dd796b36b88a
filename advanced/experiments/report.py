"""The report of one to three pages that the assignment wants with an advanced method, made of the runs of a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from advanced import METHODS, choose
from advanced.experiments.grid import Done, Table
from advanced.experiments.judging import test_of
from advanced.experiments.models import Model
from advanced.experiments.panel import Panel, Verdict, panels_of
from advanced.experiments.render import (
    CHOICES,
    across,
    difference_in_words,
    made_with,
    markdown_table,
    missing_of,
    p_in_words,
    plain,
    render_choices,
    render_panel,
    sources_of,
    standing,
)
from advanced.experiments.results import FEWEST_SEEDS, compare
from advanced.experiments.rows import DATA_SETTINGS, PLAN_SETTINGS, Row, path_of
from advanced.experiments.schema import SOLVED
from engine.data import read_label_names, unpack
from engine.flags import OUTPUT_WORDS
from engine.metrics import entry_of
from utils import UserError, join_names

MOST_ROWS = 7  # of a table beside those that are solved, so that the report keeps to three pages
WIDTH = 84  # of a line of a command
OF_ASKING = ("attention", "batch_size", "precision", "max_sentence_len")  # settings that matter without training


def text_of(table: Table, model: Model, done: Done, command: Sequence[str]) -> str:
    """The report. command: makes the runs again. Raises `UserError` if there are no results or too many rows."""
    if (count := sum(row.option not in SOLVED for row in table.rows)) > MOST_ROWS:
        raise UserError(f"a report has room for {MOST_ROWS} rows, not for {count}; name them with --only")
    parts = [f"# {table.title}", *_what(table), *_how(table, model), *sources_of(table)]
    panels = panels_of(table, model, done)
    panels = [panel for panel in panels if any(cell.name != table.baseline for cell in panel.cells)]
    if not panels:
        names = join_names(row.name for row in table.rows)
        raise UserError(f"none of these rows has a final run: {names}; run them first")
    for panel in panels:
        parts += [f"## Results: {panel.title}", "", *render_panel(panel), ""]
        parts += [*standing(panel), *across(panel), "", *_reading(panel), *_predictions(panel)]
    parts += [*_tried(table, model, done), *_limits(table, model, done, panels), *_again(command, panels, model)]
    return "\n".join(parts) + "\n"


def _what(table: Table) -> list[str]:
    lines = ["", "## What was done beyond the base", ""]
    for name in dict.fromkeys(name for row in table.rows for name in row.methods):
        entry, found = METHODS[name], dict.fromkeys(_arguments(row, name) for row in table.rows if name in row.methods)
        values = f"; here {' or '.join(found)}" if any(found) else ""
        lines.append(f"- **{name}** {entry.summary} ({entry.paper}){values}.")
    return [*lines, ""]


def _arguments(row: Row, name: str) -> str:
    """The arguments of one method of a row, in words, without those that the table tunes."""
    (chosen,) = (each for each in choose(row.method, row.arguments, row.option) if each.name == name)
    tuned = {key.rpartition(".")[-1] for key in row.tune}
    return ", ".join(f"{key}={value}" for key, value in chosen.settings if key not in tuned and value != "")


CHOSEN_ON_HELD_OUT = """\
Where a row has something to choose, it is chosen on a part that is held out of the training data (seeds
{tuning}); the epoch is chosen there, too. Dev and test were looked at once, by the final runs (seeds {seeds})."""
CHOSEN_ON_DEV = """\
The epoch is chosen on dev, as the assignment does, so that accuracies on dev are a little too high (seeds
{seeds})."""
PARTLY_ON_DEV = """ Where `hold_out` is 0, the epoch is chosen on dev, whose accuracies are then a little too high."""
CHOSEN_BY_SAMPLE = """\
Nothing is trained. Where a row has something to choose, it is chosen on a sample of the training sentences
(seeds {tuning}); dev and test were looked at once (seeds {seeds})."""
HOW = """All runs start from `{model}`. Settings: {settings}. {choice} Means are given with the standard deviation over
seeds. Differences from *{baseline}* are paired over seeds and sentences, with 95 % intervals (of what depends on a seed
from {fewest} seeds on); p is corrected for all rows of a table (Holm); bold ones are below .05."""


def _how(table: Table, model: Model) -> list[str]:
    choice = _choice(table).format(tuning=_listed(table.tune_seeds), seeds=_seeds(table))
    words = HOW.format(
        model=model.name, settings=_settings(table), choice=choice, baseline=table.baseline, fewest=FEWEST_SEEDS
    )
    return ["## How it was measured", "", words, ""]


def _choice(table: Table) -> str:
    trained = [(row, data) for row, data, _ in table.cells() if row.option == "finetune"]
    hold_out = {bool(table.settings_of(row, data)["hold_out"]) for row, data in trained}
    if not hold_out:
        return CHOSEN_BY_SAMPLE
    if hold_out == {False}:
        return CHOSEN_ON_DEV
    return CHOSEN_ON_HELD_OUT + ("" if hold_out == {True} else PARTLY_ON_DEV)


def _settings(table: Table) -> str:
    """The settings of the whole table, then those of each data set and of each row, in words."""
    groups = {"": table.settings}
    groups |= {f"{data.upper()}: ": own for data, own in table.data.items()}
    groups |= {f"*{row.name}*: ": row.settings | dict.fromkeys(row.tune, "as chosen") for row in table.rows}
    count = PLAN_SETTINGS if any(row.option == "finetune" for row in table.rows) else OF_ASKING
    listed = []
    for who, own in groups.items():
        if settings := ", ".join(f"{name} {own[name]}" for name in sorted(own.keys() & {*count})):
            listed.append(who + settings)
    return "; ".join(listed) or "the defaults"


def _seeds(table: Table) -> str:
    others = [f"; *{row.name}*: {_listed(row.seeds)}" for row in table.rows if row.seeds not in (None, table.seeds)]
    return _listed(table.seeds) + "".join(others)


def _reading(panel: Panel) -> list[str]:
    """The differences from the baseline, in sentences."""
    if not panel.baseline:
        return [f"*{panel.baseline_name}*, which the others would be compared with, has no runs here."]
    said = panel.verdicts().items()
    return [f"- *{name}* differs from *{panel.baseline_name}* by {_verdict(verdict)}." for name, verdict in said]


def _verdict(verdict: Verdict) -> str:
    if verdict.gain.has_few_seeds:
        return f"{difference_in_words(verdict.gain)}, of too few seeds to say more ({FEWEST_SEEDS} are wanted)"
    words = "beyond noise" if verdict.is_beyond_noise else "within noise"
    return f"{difference_in_words(verdict.gain)}, p {p_in_words(verdict.p)}, which is {words}"


def _predictions(panel: Panel) -> list[str]:
    """A table of how often each class is predicted and how often it is gold, which accuracy does not show."""
    names, splits = read_label_names(path_of(panel.data, "label_names")), panel.splits
    heads = [f"share of {' and '.join(splits)}", *names, "macro-F1 against the baseline"]
    rows = [["*gold labels*", *_shares(panel.labels, len(names)), ""]]
    for cell in panel.cells:
        runs = cell.runs.values()
        predicted = [each for run in runs for split in splits for each in unpack(run[split]["predictions"])]
        is_base = cell.name == panel.baseline_name
        gain = None if is_base else compare(cell.runs, panel.baseline, splits, "macro_f1")
        gained = "" if gain is None else difference_in_words(gain)
        rows.append([cell.name, *_shares(predicted, len(names)), gained])
    return ["", *markdown_table(heads, rows), ""]


def _shares(labels: Sequence[int], classes: int) -> list[str]:
    return [plain(labels.count(each) / len(labels)) for each in range(classes)]


def _tried(table: Table, model: Model, done: Done) -> list[str]:
    choices = render_choices(table, model, done)
    return ["## What was tried", "", f"{CHOICES}.", "", *choices, ""] if choices else []


def _limits(table: Table, model: Model, done: Done, panels: Sequence[Panel]) -> list[str]:
    missing, which = missing_of(table, model, done)
    words = f"{missing} runs of these rows are missing ({which}). " if missing else ""
    runs = {run["key"]: run for panel in panels for cell in panel.cells for run in cell.runs.values()}
    words += "One checkpoint; few seeds see little of what chance does. Seconds depend on what else the machine did."
    return ["## Limits", "", words, "", *made_with(runs)]


def _again(command: Sequence[str], panels: Sequence[Panel], model: Model) -> list[str]:
    """The commands that make all runs again, and one run of the best row of each table."""
    lines = ["## How to do it again", "", "Everything, then the same with `--render`:", ""]
    lines += ["```", *_shell(command), "```", "", "One run of the row with the best accuracy on dev:", "", "```"]
    for panel in panels:
        if cells := [cell for cell in panel.cells if cell.row.option not in SOLVED]:  # which no command does alone
            best = max(cells, key=lambda cell: fmean(run["dev"]["accuracy"] for run in cell.runs.values()))
            run = next(iter(best.runs.values()))
            lines += [*_apart(run), *_shell(command_of(best.row, run, model))]
    return [*lines, "```"]


def _apart(run: Mapping[str, Any]) -> list[str]:
    """What the command of a run cannot do as the run did it, in a comment."""
    count = entry_of(run, "settings").get("second_test") if run["option"] == "finetune" else 0
    words = f"# the run kept {count} training sentences as a second test; this trains on those, too"
    return [words] if count else []


def _shell(words: Sequence[str]) -> list[str]:
    """A command in lines of a page's width."""
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > WIDTH:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]


def command_of(row: Row, result: Mapping[str, Any], model: Model) -> list[str]:
    """The words of the command that makes a run again, with run_llama.py or bert.run. model: that of the table."""
    model = model.beside(row.checkpoint)
    data, option, settings = result["data"], result["option"], entry_of(result, "settings")
    is_llama = result.get("family", model.family) == "llama"
    words = ["--option", option, "--pretrained-model-path", model.package or _shown(model.checkpoint)]
    tokenizer = Path("" if model.package else model.tokenizer)  # a package has its own
    if is_llama and tokenizer.stem not in ("", model.name) and tokenizer.parent != Path(model.checkpoint):
        words += ["--tokenizer", _shown(tokenizer)]
    judge = settings.get("judged_on") or data
    named = {"train": f"{data}-train", "dev": f"{judge}-dev", "test": f"{data}-test"}
    if judge != data:
        named["test"] = f"{judge}-{test_of(judge, data)[0]}"
    words += [word for split, name in named.items() for word in (f"--{split}", f"data/{name}.txt")]
    kind = "advanced" if result["method"] else OUTPUT_WORDS[option]
    size = "" if result["shots"] is None else f"-{result['shots']}"  # without one it is the assignment's own name
    for split in ("dev", "test"):
        words += [f"--{split}_out", f"{data}{size}-{split}-{kind}-output.txt"]
    words += ["--label-names", f"data/{data}-label-mapping.json", "--seed", str(result["seed"])]
    words += ["--method", result["method"]] if result["method"] else []
    words += ["--method-args", *result["arguments"]] if result["arguments"] else []
    words += ["--shots", str(result["shots"])] if result["shots"] is not None else []
    names = settings if option == "finetune" else OF_ASKING
    left_out = () if is_llama else ("attention", "precision")
    for name in (name for name in names if name not in (*left_out, *DATA_SETTINGS)):
        words += [f"--{name}", str(settings[name])] if settings[name] is not None else []
    # measuring train accuracy would move the random generator
    program = ["run_llama.py"] if is_llama else ["-m", "bert.run"]
    return ["python", *program, *words, *(["--no_train_eval"] if option == "finetune" else [])]


def _shown(path: str | Path) -> str:
    """A path as it was given; of an absolute one, which holds on one machine only, the file name."""
    return Path(path).name if Path(path).is_absolute() else str(path)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
