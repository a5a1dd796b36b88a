"""Plots of a report, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.targets import LIMIT, OURS

WHY_NO_PLOTS = 'matplotlib is not installed, so --plots draws nothing: pip install "matplotlib>=3.8"'


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG for every part of `report` that was measured; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    measured = [row for row in report["rows"] if row["ratio"]]
    compared = [row for row in measured if not row["lower_is_better"]]
    plots: Sequence[tuple[str, Callable[..., None], list[dict[str, Any]]]] = (
        ("epoch-seconds", _costs, [row for row in measured if row["work"].startswith("SST epoch")]),
        ("peak-memory", _costs, [row for row in measured if row["work"].startswith("peak memory")]),
        ("ratios", _ratios, [row for row in compared if row["against"] != LIMIT]),
        ("fractions", _fractions, [row for row in compared if row["against"] == LIMIT]),
    )
    return [_figure(folder / f"{name}.png", plot, data) for name, plot, data in plots if data]


def _figure(path: Path, plot: Callable[..., None], data: list[dict[str, Any]]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    plot(axes, data)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _costs(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars of what every contender takes; ours once for each work, however many it is compared with."""
    costs: dict[str, float] = {}
    for row in rows:
        costs[f"{OURS}\n({row['work']})"] = row["ours"]
        costs[f"{row['against']}\n({row['work']})"] = row["theirs"]
    axes.barh([*costs], [*costs.values()], color="lightsteelblue")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
    unit = rows[0]["unit"]
    axes.set(xlabel=unit, title="One SST epoch" if unit == "s" else "Peak memory of fine-tuning")


def _ratios(axes: Any, rows: list[dict[str, Any]]) -> None:
    _bars(axes, [f"{row['work']} | {row['against']}" for row in rows], rows)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="ratio, median and range", title="Times as fast as others", xscale="log")


def _fractions(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["work"] for row in rows]
    _bars(axes, names, rows)
    goals = [(row["goal"], name) for row, name in zip(rows, names, strict=True) if row["goal"] is not None]
    if goals:
        axes.scatter(*zip(*goals, strict=True), marker="D", color="black", zorder=3, label="goal")
        axes.legend()
    axes.set(xlabel="fraction, median and range", title="Of what this machine can do at best")


def _bars(axes: Any, names: list[str], rows: list[dict[str, Any]]) -> None:
    """Medians as bars, with the range of all rounds."""
    medians = [row["ratio"]["median"] for row in rows]
    spans = [[row["ratio"]["median"] - row["ratio"]["low"] for row in rows]]
    spans.append([row["ratio"]["high"] - row["ratio"]["median"] for row in rows])
    axes.barh(names, medians, xerr=spans, color="lightsteelblue")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
