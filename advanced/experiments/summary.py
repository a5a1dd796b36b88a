"""What each method is worth: one number for each, over all panels that it is in.

    python -m advanced.experiments.summary [--results FOLDER] [--out FILE.md]

A method's gain is the mean of its gains over plain training in all panels of the tables `TABLES` in results/, a data
set, size and checkpoint each (`statistics.pooled`); what two tables have of one panel counts once, from the first. p is
corrected for all methods (Holm). Panels in which plain training itself is not above the majority class, did not fit or
has too few seeds rank nothing: they are left out.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from advanced.experiments.grid import Table
from advanced.experiments.models import Model, remark_on
from advanced.experiments.panel import Panel, panels_of, verdicts_of
from advanced.experiments.render import (
    difference_in_words,
    markdown_table,
    p_in_words,
    plain,
    verdict_in_words,
    write_page,
)
from advanced.experiments.results import FEWEST_SEEDS, Runs, files_of_results, fits, has_few_seeds, read_results
from advanced.experiments.statistics import Difference, pooled
from engine.programs import ArgumentParser, check_writable, run_main
from utils import UserError

HERE = Path(__file__).resolve().parent
# Of a row that two tables have of one panel the first counts: in full-fresh no row was chosen after it looked best.
TABLES = ("full-fresh", "full", "few-shot", "few-shot-rest", "few-shot-llama", "few-shot-llama-rest")
HEADS = ("method", "panels", "gain", "p", "over the bag of words", "time")
ABOUT = """Gains in accuracy over plain training, pooled over panels (data set, size, checkpoint), with 95 % intervals;
p is corrected for all methods (Holm), bold below .05. Panels of one data set judge by the same sentences, which an
interval over panels does not know. Time: of training, beside plain training, the median over panels."""


class Worth(NamedTuple):
    """A row's gains by panel, over plain training and over the bag of words, and its times beside plain training."""

    gains: list[Difference]
    over_words: list[Difference]
    times: list[float]


def panels_in(folder: Path, names: Sequence[str] = TABLES) -> Iterator[tuple[str, Panel]]:
    """The panels of all files TABLE-CHECKPOINT.jsonl in a folder, with the names of the checkpoints."""
    for name in names:
        table = Table.read(HERE / "tables" / f"{name}.json")
        for path in files_of_results(folder, f"{name}-*"):
            if not (done := read_results([path])):
                continue
            first = next(iter(done.values()))
            if path.stem != f"{name}-{first['model']}":  # of another table, whose name begins with that of this one
                continue
            # nothing lies at this path, so that the model is the recorded one
            model = Model(str(path / first["model"]), "", {first["model"]: first["checksums"]})
            yield from ((model.name, panel) for panel in panels_of(table, model, done))


def worths(named: Sequence[tuple[str, Panel]]) -> dict[str, Worth]:
    """By the names of rows. named: the panels, with the names of their checkpoints."""
    found: dict[str, Worth] = defaultdict(lambda: Worth([], [], []))
    counted = set()  # rows that stand in two tables, so that both can be read alone
    for name, panel in named:
        verdicts, over_words = panel.verdicts(), panel.verdicts(panel.bag_of_words())
        for cell in panel.cells:
            which = name, panel.title, cell.name
            if which in counted or cell.name not in verdicts or verdicts[cell.name].gain.has_few_seeds:
                continue
            counted.add(which)
            worth = found[cell.name]
            worth.gains.append(verdicts[cell.name].gain)
            if cell.name in over_words:
                worth.over_words.append(over_words[cell.name].gain)
            if (time := _time_beside(cell.runs, panel.baseline, panel.processor)) is not None:
                worth.times.append(time)
    return found


def _time_beside(runs: Runs, baseline: Runs, processor: str | None) -> float | None:
    """The median time of training beside the baseline's on one processor; None where there is none."""
    mine, theirs = (
        [run.get("seconds") for run in each.values() if run.get("processor") == processor] for each in (runs, baseline)
    )
    return median(mine) / median(theirs) if mine and theirs and all([*mine, *theirs]) else None


def render_summary(named: Sequence[tuple[str, Panel]]) -> str:
    ranking = [(name, panel) for name, panel in named if panel.above_majority().get(panel.baseline_name)]
    found, rows = worths(ranking), []
    verdicts = verdicts_of({name: pooled(worth.gains) for name, worth in found.items()})
    for name, verdict in sorted(verdicts.items(), key=lambda each: -each[1].gain.mean):
        gains, over, times = found[name]
        words = difference_in_words(pooled(over)) if over else ""
        time = f"{median(times):.2f}" if times else ""
        rows.append([name, str(len(gains)), verdict_in_words(verdict), p_in_words(verdict.p), words, time])
    lines = ["# What each method is worth", "", ABOUT, "", *markdown_table(HEADS, rows)]
    lines += ["", "Panels, with the accuracy of the majority class:", ""]
    for name, panel in named:
        remark = "" if (name, panel) in ranking else _why_left_out(panel)
        judges = " and ".join(panel.splits)
        line = f"- {panel.title}, {name}{remark_on(name)}, judged on {judges} ({plain(panel.majority)}){remark}"
        lines += [line] * (line not in lines)
    return "\n".join(lines) + "\n"


def _why_left_out(panel: Panel) -> str:
    runs = [*panel.baseline.values()]
    if not runs:
        return "; no runs of plain training yet"
    if not all(map(fits, runs)):
        return "; left out: plain training did not fit"
    if has_few_seeds(runs):
        return f"; left out: plain training has fewer than {FEWEST_SEEDS} seeds"
    return "; left out: plain training is not above the majority class"


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments.summary", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", default=str(HERE / "results"), metavar="FOLDER", help="where the results lie")
    parser.add_argument("--out", metavar="FILE.md", help="write the table there, too")
    return parser.parse_args(argv)


def main() -> None:
    args = get_args()
    if args.out is not None:
        if Path(args.out).suffix != ".md":
            raise UserError(f"--out {args.out}: the name must end in .md")
        check_writable(args.out, "--out")
    panels = [*panels_in(Path(args.results))]
    if not panels:
        raise UserError(f"--results {args.results}: there are no results of {' or '.join(TABLES)}")
    text = render_summary(panels)
    print(text)
    if args.out is not None:
        write_page(Path(args.out), text, "--out")


if __name__ == "__main__":
    sys.exit(run_main(main))
