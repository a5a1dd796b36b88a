"""A plot of a table of runs, drawn with matplotlib if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import fmean
from typing import Any

from advanced.experiments.grid import Done, Table
from advanced.experiments.models import Model
from advanced.experiments.panel import Panel, each_seed, panels_of
from utils import warn


def draw(table: Table, model: Model, done: Done, stem: Path) -> list[Path]:
    """Write `stem`-accuracy.png, a picture for each panel. Returns its path; none without runs, or matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        warn('matplotlib is not installed, so nothing is drawn: pip install "matplotlib>=3.8"')
        return []
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    panels = panels_of(table, model, done)
    if not panels:
        return []
    size = 5 * len(panels), 2.5 + 0.22 * max(len(panel.cells) for panel in panels)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        _accuracy(axis, panel)
        axis.set_title(panel.title)
    lines = max((axis.get_legend_handles_labels() for axis in axes[0]), key=lambda found: len(found[0]))
    figure.legend(*lines, fontsize="small", loc="outside lower center", ncol=3)
    path = stem.with_name(f"{stem.name}-accuracy.png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return [path]


def _accuracy(axis: Any, panel: Panel) -> None:
    """Mean accuracy, each run a small dot; of three seeds or more the 95 % interval of the gain."""
    verdicts = panel.verdicts()
    for place, cell in enumerate(reversed(panel.cells)):
        each = each_seed(cell.runs, panel.splits)
        verdict = verdicts.get(cell.name)
        if verdict is not None and not verdict.gain.has_few_seeds:
            shift = fmean(each) - verdict.gain.mean
            ends = [shift + verdict.gain.low, shift + verdict.gain.high]
            axis.plot(ends, [place, place], color="tab:blue")
        axis.plot(each, [place] * len(each), ".", color="0.7")
        axis.plot(fmean(each), place, "o", color="tab:red" if cell.unfitted else "tab:blue")
    axis.axvline(panel.majority, color="0.5", linestyle=":", label="majority class")
    for runs, colour, name in (
        (panel.baseline, "tab:orange", "baseline"),
        (panel.bag_of_words(), "tab:green", "words"),
    ):
        if runs:
            axis.axvline(fmean(each_seed(runs, panel.splits)), color=colour, label=name)
    axis.set_yticks(range(len(panel.cells)), [cell.name for cell in reversed(panel.cells)])
    axis.set_xlabel(f"accuracy on {' and '.join(panel.splits)}")
