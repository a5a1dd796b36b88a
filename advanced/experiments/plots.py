"""Plots of a table of runs, drawn with matplotlib if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from advanced.experiments.grid import Table, size_in_words
from advanced.experiments.models import Model
from advanced.experiments.render import Cell, Results, cells_of, labels_of
from advanced.experiments.results import compare
from engine.data import majority_accuracy

NO_MATPLOTLIB = 'matplotlib is not installed, so nothing is drawn: pip install "matplotlib>=3.8"'
AXIS_LABELS = {"trainable": "trained parameters", "seconds": "seconds of training"}


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


class Panel(NamedTuple):
    """One picture of a plot: the rows that have runs on one data set and size. baseline: its runs by seed."""

    title: str
    data: str
    size: str
    cells: list[Cell]
    baseline: Mapping[int, Mapping[str, Any]]
    labels: list[int]


def draw(table: Table, model: Model, done: Results, stem: Path) -> list[Path]:
    """Write `stem`-KIND.png for every kind of plot that some row has the figures for. Returns the paths."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    panels = panels_of(table, model, done)
    kinds: Sequence[tuple[str, Callable[..., None], Callable[[Mapping[str, Any]], bool]]] = (
        ("accuracy", _accuracy, lambda run: True),
        ("trainable", partial(_against, figure="trainable"), lambda run: "trainable" in run),
        ("seconds", partial(_against, figure="seconds"), lambda run: "seconds" in run),
        ("wise-ft", _mixtures, lambda run: "wise-ft" in run.get("figures", ())),
    )
    paths = []
    for name, plot, has_figure in kinds:
        chosen = [[cell for cell in panel.cells if all(map(has_figure, cell.runs.values()))] for panel in panels]
        drawn = [panel._replace(cells=cells) for panel, cells in zip(panels, chosen, strict=True) if cells]
        if drawn:
            paths.append(_figure(stem.with_name(f"{stem.name}-{name}.png"), plot, drawn))
    return paths


def panels_of(table: Table, model: Model, done: Results) -> list[Panel]:
    panels = []
    for data, shots in table.sizes():
        cells = [cell for cell in cells_of(table, model, done, data, shots) if cell.runs]
        if cells:
            baseline = next((cell.runs for cell in cells if cell.row.name == table.baseline), {})
            is_trained = any(cell.row.option == "finetune" for cell in cells)
            size = size_in_words(shots)
            title = f"{data.upper()}, {size}" if is_trained else data.upper()
            panels.append(Panel(title, data, size, cells, baseline, labels_of(data, "dev")))
    return panels


def _figure(path: Path, plot: Callable[..., None], panels: list[Panel]) -> Path:
    from matplotlib import pyplot

    size = 5 * len(panels), 2.5 + 0.22 * max(len(panel.cells) for panel in panels)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        plot(axis, panel)
        axis.set_title(panel.title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _mean(cell: Cell) -> float:
    return fmean(run["dev"]["accuracy"] for run in cell.runs.values())


def _accuracy(axis: Any, panel: Panel) -> None:
    """Mean accuracy on dev, with the 95 % interval of its difference from the baseline; each run is a small dot."""
    for place, cell in enumerate(reversed(panel.cells)):
        difference = compare(cell.runs, panel.baseline, "dev", panel.labels) if panel.baseline else None
        if difference is not None and difference.error > 0:
            shift = _mean(cell) - difference.mean
            axis.plot([shift + difference.low, shift + difference.high], [place, place], color="tab:blue")
        axis.plot([run["dev"]["accuracy"] for run in cell.runs.values()], [place] * len(cell.runs), ".", color="0.7")
        axis.plot(_mean(cell), place, "o", color="tab:blue")
    axis.axvline(majority_accuracy(panel.labels), color="0.5", linestyle=":", label="majority class")
    if panel.baseline:
        mean = fmean(run["dev"]["accuracy"] for run in panel.baseline.values())
        axis.axvline(mean, color="tab:orange", label="baseline")
    axis.set_yticks(range(len(panel.cells)), [cell.row.name for cell in reversed(panel.cells)])
    axis.set_xlabel("dev accuracy")
    axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2)  # over no point


def _against(axis: Any, panel: Panel, figure: str) -> None:
    """Mean accuracy on dev over the mean of another figure of the runs."""
    for cell in panel.cells:
        point = fmean(run[figure] for run in cell.runs.values()), _mean(cell)
        axis.plot(*point, "o", color="tab:blue")
        axis.annotate(cell.row.name, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axis.set(xscale="log", xlabel=AXIS_LABELS[figure], ylabel="dev accuracy")


def _mixtures(axis: Any, panel: Panel) -> None:
    """The score on held-out data from the pretrained to the fine-tuned weights: each run, and the mean."""
    for number, cell in enumerate(panel.cells):
        found = [run["figures"]["wise-ft"] for run in cell.runs.values()]
        for each in found:
            axis.plot(each["alphas"], each["scores"], color=f"C{number}", alpha=0.25)
        means = [fmean(scores) for scores in zip(*(each["scores"] for each in found), strict=True)]
        axis.plot(found[0]["alphas"], means, color=f"C{number}", label=cell.row.name)
    axis.set(xlabel="alpha: 0 pretrained, 1 fine-tuned", ylabel="accuracy on held-out data")
    axis.legend(fontsize="small")
