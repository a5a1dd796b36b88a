"""What each method is worth: its gain over plain training, in all tables of a kind side by side.

    python -m advanced.experiments.summary [--out FILE.md]

There is a table for each data set, with a line for each method and a column for each checkpoint and size of the
training data, made of the results of `full` and `few-shot` in results/. A gain is a difference of accuracies on dev
over the same sentences and seeds, with its 95 % interval (`results.paired_bootstrap`), bold if that leaves 0 out.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.plots import Panel, panels_of
from advanced.experiments.render import difference_in_words, plain, spread, write_page
from advanced.experiments.results import FEWEST_SEEDS, compare, read_results
from engine.data import majority_accuracy
from engine.programs import ArgumentParser, check_writable, run_main
from utils import UserError

HERE = Path(__file__).resolve().parent
TABLES = ("full", "few-shot")
BASELINE = "plain"
NOTHING = ""
ABOUT = f"""Gains in accuracy on dev over plain training on as many sentences, of at least {FEWEST_SEEDS} seeds, with
95 % intervals. Of CFIMDB it is the first 128 tokens of each. What was chosen, and how, is on the tables' own pages."""


class Column(NamedTuple):
    """A checkpoint, and the rows that were trained from it on one data set and size."""

    checkpoint: str
    panel: Panel

    def accuracy(self) -> str:
        """The accuracy of the baseline."""
        return spread([run["dev"]["accuracy"] for run in self.panel.baseline.values()])

    def gain(self, row: str) -> str:
        """The gain of a row over the baseline; "" for too few seeds."""
        cell = next((cell for cell in self.panel.cells if cell.row.name == row), None)
        if cell is None or len(cell.runs.keys() & self.panel.baseline.keys()) < FEWEST_SEEDS:
            return NOTHING
        return difference_in_words(compare(cell.runs, self.panel.baseline, "dev", self.panel.labels))


def columns_of(folder: Path, names: Sequence[str] = TABLES) -> Iterator[Column]:
    """The columns of all files TABLE-CHECKPOINT.jsonl in a folder."""
    for name in names:
        table = Table.read(HERE / "tables" / f"{name}.json")
        for path in sorted(folder.glob(f"{name}-*.jsonl")):
            if not (done := read_results([path])):
                continue
            first = next(iter(done.values()))
            # nothing lies at this path, so that the model is the recorded one
            model = Model(str(path / first["model"]), "", {first["model"]: first["checksums"]})
            columns = (Column(model.name, panel) for panel in panels_of(table, model, done))
            yield from (column for column in columns if len(column.panel.baseline) >= FEWEST_SEEDS)


def summarize(columns: Sequence[Column]) -> list[str]:
    """The lines of a Markdown table of columns of one data set."""
    columns = sorted(columns, key=lambda column: column.checkpoint)
    rows = dict.fromkeys(cell.row.name for column in columns for cell in column.panel.cells)
    heads = [f"{column.checkpoint}, {column.panel.size}" for column in columns]
    majority = [plain(majority_accuracy(column.panel.labels)) for column in columns]
    lines = [["", *heads], ["---"] * (len(columns) + 1), ["majority class", *majority]]
    lines.append([f"{BASELINE}: accuracy", *(column.accuracy() for column in columns)])
    for row in rows:
        gains = [column.gain(row) for column in columns]
        if row != BASELINE and {*gains} != {NOTHING}:
            lines.append([row, *gains])
    return [f"| {' | '.join(line)} |" for line in lines]


def render_summary(columns: Sequence[Column]) -> str:
    text = ["# What each method is worth", "", ABOUT]
    for data in dict.fromkeys(column.panel.data for column in columns):
        text += ["", f"## {data.upper()}", "", *summarize([each for each in columns if each.panel.data == data])]
    return "\n".join(text) + "\n"


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments.summary", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", default=str(HERE / "results"), metavar="FOLDER", help="where the results lie")
    parser.add_argument("--out", metavar="FILE.md", help="write the tables there, too")
    return parser.parse_args(argv)


def main() -> None:
    args = get_args()
    if args.out is not None:
        if Path(args.out).suffix != ".md":
            raise UserError(f"--out {args.out}: the name must end in .md")
        check_writable(args.out, "--out")
    columns = [*columns_of(Path(args.results))]
    if not columns:
        raise UserError(f"--results {args.results}: there are no results of {' or '.join(TABLES)}")
    text = render_summary(columns)
    print(text)
    if args.out is not None:
        write_page(Path(args.out), text, "--out")


if __name__ == "__main__":
    sys.exit(run_main(main))
