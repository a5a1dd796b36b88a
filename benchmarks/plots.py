"""Plots of a report, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.targets import LIMIT

WHY_NONE = 'matplotlib is not installed, so --plots draws nothing: pip install "matplotlib>=3.8"'


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG for every part of `report` that was measured; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    costs = report["curves"].get("epochs", [])
    compared = [row for row in report["rows"] if row["ratio"] and not row["lower_is_better"]]
    plots: Sequence[tuple[str, Callable[..., None], list[dict[str, Any]]]] = (
        ("context", _context, report["curves"].get("context", [])),
        ("batches", _batches, report["curves"].get("batches", [])),
        ("epoch-seconds", partial(_costs, unit="s"), [row for row in costs if "s" in row]),
        ("peak-memory", partial(_costs, unit="MB"), [row for row in costs if "MB" in row]),
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


def _context(axes: Any, table: list[dict[str, Any]]) -> None:
    contexts = [row["context"] for row in table]
    for name in (key for key in table[0] if key != "context"):
        axes.plot(contexts, [row[name] for row in table], marker="o", label=name)
    axes.set(xlabel="context (tokens)", ylabel="tokens/s", title="Decoding one text, fp32", yscale="log", xscale="log")
    axes.legend()


def _batches(axes: Any, table: list[dict[str, Any]]) -> None:
    largest = max(row["batch"] for row in table)
    for name in (key for key in table[0] if key not in ("batch", "length")):
        for batch, style in ((1, ":"), (largest, "-")):
            rows = [row for row in table if row["batch"] == batch]
            lengths, speeds = [row["length"] for row in rows], [row[name] for row in rows]
            axes.plot(lengths, speeds, style, marker="o", label=f"{name}, batch {batch}")
    axes.set(xlabel="sentence length (tokens)", ylabel="sentences/s", title="Classification", yscale="log")
    axes.legend(fontsize="small")


def _costs(axes: Any, table: list[dict[str, Any]], unit: str) -> None:
    names = [f"{row['contender']}\n({row['work']})" for row in table]
    axes.barh(names, [row[unit] for row in table], color="lightsteelblue")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
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
