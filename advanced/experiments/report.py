"""The report of one to three pages that the assignment asks for beside an advanced method, from the runs of a table."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from advanced import METHODS
from advanced.experiments.grid import PLAN_SETTINGS, Model, Table
from advanced.experiments.plots import Panel, panels_of
from advanced.experiments.render import Results, difference_in_words, render_cells
from advanced.experiments.results import Spread, compare
from course import majority_accuracy

MOST_ROWS = 12  # of a table, so that the report keeps to three pages


def write_report(table: Table, model: Model, done: Results, rows: Sequence[str], path: Path) -> list[Path]:
    """Write `path`, and a PDF beside it where pandoc can make one. rows: what is reported, beside the baseline."""
    path.write_text(text_of(table, model, done, rows), encoding="utf-8")
    pdf = path.with_suffix(".pdf")
    if shutil.which("pandoc") is None:
        return [path]
    made = subprocess.run(["pandoc", path.name, "-o", pdf.name], cwd=path.parent, capture_output=True, check=False)
    return [path, pdf] if made.returncode == 0 and pdf.is_file() else [path]


def text_of(table: Table, model: Model, done: Results, rows: Sequence[str]) -> str:
    chosen = [row for row in table.rows if row.name in rows or row.name == table.baseline][:MOST_ROWS]
    names = list(dict.fromkeys(name for row in chosen for name in row.method.split(",") if name))
    parts = [f"# {table.title}", *_what(names), *_how(table, model)]
    for panel in panels_of(table, model, done):
        cells = [cell for cell in panel.cells if cell.row in chosen]
        if any(cell.row.name != table.baseline for cell in cells):
            lines = render_cells(cells, panel.baseline, panel.data, table.baseline)
            parts += [f"## Results: {panel.title}", "", *lines, *_reading(panel._replace(cells=cells), table.baseline)]
    return "\n".join([*parts, *_limits(table, done, model), *_again(table, model)]) + "\n"


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


def _limits(table: Table, done: Results, model: Model) -> list[str]:
    left = len(table.ready(model, done))
    missing = f"{left} runs of the table are missing. " if left else ""
    return ["## Limits", "", f"{missing}One checkpoint, one machine; few seeds see little of what chance does.", ""]


def _again(table: Table, model: Model) -> list[str]:
    command = f"python -m advanced.experiments {table.name} --pretrained-model-path {model.name}.pt"
    return ["## How to do it again", "", f"`{command}`, and the same with `--render`."]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
