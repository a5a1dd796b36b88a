"""The report of one to three pages that the assignment asks for beside an advanced method, from the runs of a table."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from advanced import METHODS
from advanced.experiments.grid import PLAN_SETTINGS, Model, Table
from advanced.experiments.plots import Panel, panels_of
from advanced.experiments.render import Cell, Results, difference_in_words, render_cells
from advanced.experiments.results import Spread, compare
from arguments import OUTPUT_WORDS
from course import majority_accuracy
from utils import UserError, atomic_write, some, warn

MOST_ROWS = 12  # of a table, so that the report keeps to three pages


def write_report(table: Table, model: Model, done: Results, rows: Sequence[str], path: Path) -> list[Path]:
    """Write `path`, and a PDF beside it where pandoc can make one. rows: what is reported, beside the baseline.

    Raises `UserError` where they have no results, or are too many.
    """
    text = text_of(table, model, done, rows)
    with atomic_write(path) as file:
        file.write(text)
    pdf = path.with_suffix(".pdf")
    if shutil.which("pandoc") is None:
        warn(f"pandoc is not here, so there is no {pdf}")
        return [path]
    made = subprocess.run(["pandoc", path.name, "-o", pdf.name], cwd=path.parent, capture_output=True, check=False)
    if made.returncode or not pdf.is_file():
        warn(f"pandoc made no {pdf}: {(made.stderr.decode(errors='replace').strip() or 'no reason').splitlines()[0]}")
        return [path]
    return [path, pdf]


def text_of(table: Table, model: Model, done: Results, rows: Sequence[str]) -> str:
    chosen = [row for row in table.rows if row.name in rows or row.name == table.baseline]
    if len(chosen) > MOST_ROWS:
        raise UserError(f"a report has room for {MOST_ROWS} rows, not for {len(chosen)}; name them with --only")
    names = list(dict.fromkeys(name for row in chosen for name in row.method.split(",") if name))
    parts = [f"# {table.title}", *_what(names), *_how(table, model)]
    reported: list[tuple[str, Cell]] = []
    for panel in panels_of(table, model, done):
        cells = [cell for cell in panel.cells if cell.row in chosen]
        if any(cell.row.name != table.baseline for cell in cells):
            lines = render_cells(cells, panel.baseline, panel.data, table.baseline)
            parts += [f"## Results: {panel.title}", "", *lines, *_reading(panel._replace(cells=cells), table.baseline)]
            reported += [(panel.title, cell) for cell in cells]
    if not reported:
        raise UserError(f"none of these rows has a final run: {some(rows)}; run the table first")
    return "\n".join([*parts, *_limits(table, done, model, rows), *_again(table, model, rows, reported)]) + "\n"


def _what(names: Sequence[str]) -> list[str]:
    lines = ["", "## What was done beyond the base", ""]
    return [*lines, *(f"- **{name}** {METHODS[name].summary} ({METHODS[name].paper})." for name in names), ""]


HELD_OUT = """Where a row has something to choose, it is chosen on a part that is held out of the training data (seeds
{tuning}); the epoch is chosen there, too. Dev and test were looked at once, by the final runs (seeds {seeds})."""
ON_DEV = """The epoch is chosen on dev, as the assignment does, so that accuracies on dev are a little too high (seeds
{seeds})."""
HOW = """All runs start from `{model}`. Settings: {settings}. {choice} Means are given with the standard deviation over
seeds. Differences from *{baseline}* are paired: a bootstrap over seeds and sentences, with 95 % intervals; bold ones
exclude 0."""


def _how(table: Table, model: Model) -> list[str]:
    settings = ", ".join(f"{name} {value}" for name, value in sorted(table.settings.items()))
    choice = HELD_OUT if table.settings.get("hold_out", PLAN_SETTINGS["hold_out"]) else ON_DEV
    choice = choice.format(tuning=_listed(table.tune_seeds), seeds=_listed(table.seeds))
    values = dict(model=model.name, settings=settings, choice=choice, baseline=table.baseline)
    return ["## How it was measured", "", HOW.format(**values), ""]


def _reading(panel: Panel, baseline: str) -> list[str]:
    """What the table says, in sentences."""
    lines = [""]
    if not panel.baseline:
        lines.append(f"*{baseline}*, which the others would be compared with, has no runs here.")
    for cell in panel.cells:
        difference = compare(cell.runs, panel.baseline, "dev", panel.labels) if panel.baseline else None
        if cell.row.name == baseline or difference is None:
            continue
        verdict = "beyond noise" if difference.is_beyond_noise else "within noise"
        mean = Spread.of([run["dev"]["accuracy"] for run in cell.runs.values()]).mean
        above = mean - majority_accuracy(panel.labels)
        lines.append(
            f"*{cell.row.name}* differs from *{baseline}* by {difference_in_words(difference)}, which is {verdict}; "
            f"it is {above:+.3f} from the majority class."
        )
    return [*lines, ""]


def _limits(table: Table, done: Results, model: Model, rows: Sequence[str]) -> list[str]:
    left = sum(trial.row in rows for trial in table.ready(model, done))
    missing = f"{left} runs of these rows are missing. " if left else ""
    return ["## Limits", "", f"{missing}One checkpoint, one machine; few seeds see little of what chance does.", ""]


def _again(table: Table, model: Model, rows: Sequence[str], reported: Sequence[tuple[str, Cell]]) -> list[str]:
    """The commands: of the whole, and of one run of each row."""
    only = "" if len(rows) == len(table.rows) else f" --only {' '.join(map(shlex.quote, rows))}"
    is_named = (Path(__file__).parent / "tables" / f"{table.name}.json").is_file()
    named = shlex.quote(table.name if is_named else f"{table.name}.json")
    lines = ["## How to do it again", "", "The whole, then the same with `--render`; one run of each row:", "", "```"]
    lines.append(f"python -m advanced.experiments {named} {_files(model.name, model)}{only}")
    for title, cell in reported:
        lines += [f"# {cell.row.name}, {title}", _command(next(iter(cell.runs.values())), model)]
    return [*lines, "```"]


def _files(name: str, model: Model) -> str:
    flags = f"--pretrained-model-path {shlex.quote(name)}.pt"
    tokenizer = Path(model.tokenizer)
    return flags if tokenizer.stem in ("", model.name) else f"{flags} --tokenizer {shlex.quote(tokenizer.name)}"


def _command(result: Mapping[str, Any], model: Model) -> str:
    """The driver's command for a run."""
    data, settings = result["data"], result["settings"]
    flags = [f"--option {result['option']}", _files(result["model"], model)]
    flags += [f"--{split} data/{data}-{split}.txt" for split in ("train", "dev", "test")]
    kind = "advanced" if result["method"] else OUTPUT_WORDS[result["option"]]
    flags += [f"--{split}_out {data}-{split}-{kind}-output.txt" for split in ("dev", "test")]
    flags += [f"--label-names data/{data}-label-mapping.json", f"--seed {result['seed']}"]
    if result["method"]:
        flags.append(f"--method {result['method']}")
    if result["arguments"]:
        flags.append(f"--method-args {' '.join(map(shlex.quote, result['arguments']))}")
    if result["shots"] is not None:
        flags.append(f"--shots {result['shots']}")
    of_asking = "attention", "batch_size", "precision", "max_sentence_len"
    names = settings if result["option"] == "finetune" else [name for name in of_asking if name in settings]
    flags += [f"--{name} {settings[name]}" for name in names if settings[name] is not None]
    return f"python run_llama.py {' '.join(flags)}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
