"""Plots of a table of runs, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from advanced.experiments.grid import Model, Table, size_in_words
from advanced.experiments.render import Cell, Results, cells_of, labels_of
from advanced.experiments.results import compare
from engine.data import majority_accuracy

WHY_NONE = 'matplotlib is not installed, so nothing is drawn: pip install "matplotlib>=3.8"'


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


class Panel(NamedTuple):
    """What is drawn: the rows that have runs, on one data set and size."""

    title: str
    data: str
    size: str
    cells: list[Cell]
    baseline: Mapping[int, Mapping[str, Any]]
    labels: list[int]


def draw(table: Table, model: Model, done: Results, stem: Path) -> list[Path]:
    """Write `stem`-KIND.png for every kind that there is something to draw of; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    panels = panels_of(table, model, done)
    kinds: Sequence[tuple[str, Callable[..., None], Callable[[Cell], bool]]] = (
        ("accuracy", _accuracy, lambda cell: True),
        ("trainable", _trainable, lambda cell: all("trainable" in run for run in cell.runs.values())),
        ("seconds", _seconds, lambda cell: all("seconds" in run for run in cell.runs.values())),
        ("wise-ft", _mixtures, lambda cell: all("wise-ft" in run.get("figures", ()) for run in cell.runs.values())),
    )
    paths = []
    for name, plot, fits in kinds:
        chosen = [panel._replace(cells=[*filter(fits, panel.cells)]) for panel in panels]
        chosen = [panel for panel in chosen if panel.cells]
        if chosen:
            paths.append(_figure(stem.with_name(f"{stem.name}-{name}.png"), plot, chosen))
    return paths


def panels_of(table: Table, model: Model, done: Results) -> list[Panel]:
    panels = []
    for data, shots in dict.fromkeys((data, shots) for _, data, shots in table.cells()):
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

    height = 2.5 + 0.22 * max(len(panel.cells) for panel in panels)
    how = dict(figsize=(5 * len(panels), height), layout="constrained", squeeze=False)
    figure, axes = pyplot.subplots(1, len(panels), **how)
    for axis, panel in zip(axes[0], panels, strict=True):
        plot(axis, panel)
        axis.set_title(panel.title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _mean(cell: Cell) -> float:
    return fmean(run["dev"]["accuracy"] for run in cell.runs.values())


def _accuracy(axis: Any, panel: Panel) -> None:
    """Means on dev, with the 95 % interval of the difference from the baseline; every run as a small dot."""
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


def _against(axis: Any, panel: Panel, of: Callable[[Mapping[str, Any]], float], label: str) -> None:
    for cell in panel.cells:
        point = fmean(map(of, cell.runs.values())), _mean(cell)
        axis.plot(*point, "o", color="tab:blue")
        axis.annotate(cell.row.name, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axis.set(xscale="log", xlabel=label, ylabel="dev accuracy")


def _trainable(axis: Any, panel: Panel) -> None:
    _against(axis, panel, lambda run: run["trainable"], "trained parameters")


def _seconds(axis: Any, panel: Panel) -> None:
    _against(axis, panel, lambda run: run["seconds"], "seconds of training")


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
