"""A run's results as text: the machine, the lines on the screen, and the same as markdown and as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch

from advanced.experiments.render import markdown_table
from advanced.experiments.trial import commit_of_code, processor
from benchmarks.bench import Growth, Line, exponent
from benchmarks.limits import Measured, Rates
from benchmarks.measure import Share
from benchmarks.table import CONTENDERS, LIMIT

CORE_PACKAGES = ("torch", "numpy", "numba")
LINE_FORMAT = "{:<42} {:<17} {:>7} {:>13} {:>18} {:>18}  {}"
GROWTH_FORMAT = "{:<26} {:<18} {:>12} {:>12} {:>8} {:>15} {:>8}  {}"
GROWTH_HEADER = ("how cost grows", "sizes", "first cost", "last cost", "exponent", "local", "expected", "verdict")
TABLE_HEADER = ("work", "against", "ratio", "range", "ours", "theirs", "verdict")


def cells(line: Line) -> tuple[str, ...]:
    """A line of the table, column by column."""
    said = f"{line.verdict}: {line.note}" if line.ratio is None else "; ".join(filter(None, (line.verdict, line.note)))
    if line.ratio is None:
        return line.work, line.against, "-", "-", "-", "-", said
    median, span = f"{line.ratio.median:.2f}", f"{line.ratio.low:.2f}-{line.ratio.high:.2f}"
    ours, theirs = (f"{value:.4g} {line.unit}" for value in (line.ours, line.theirs))
    return line.work, line.against, median, span, ours, theirs, said


def growth_cells(growth: Growth) -> tuple[str, ...]:
    """The fitted exponent, the range of those between neighbouring sizes, and the algorithm's."""
    low, high = growth.local
    first, last = (f"{growth.medians[at]:.4g} {growth.unit}" for at in (0, -1))
    sizes = f"{growth.sizes[0]:,} to {growth.sizes[-1]:,}"
    expected = f"{exponent(growth.sizes, growth.expected):.2f}"
    return growth.work, sizes, first, last, f"{growth.fitted:.2f}", f"{low:.2f} to {high:.2f}", expected, growth.verdict


def as_plain(row: Line | Growth) -> dict[str, Any]:
    """A row of one of the two tables for the JSON file."""
    fields = {name: value for name, value in vars(row).items() if name not in ("passes", "amount")}
    if isinstance(row, Growth):
        fields |= {"exponent": row.fitted, "local": row.local}
    elif row.ratio is not None:
        fields["ratio"] = row.ratio._asdict()
    return {**fields, "verdict": row.verdict}


def as_text(line: Line) -> str:
    return LINE_FORMAT.format(*cells(line))


def rate_text(measured: Measured) -> str:
    if measured.rate is None:
        return f"{measured.name}: not here"
    return f"{measured.name}: {measured.rate / 1e9:.1f} {'GB/s' if measured.kind == 'read' else 'GFLOP/s'}"


def limit_texts(rates: Rates) -> list[str]:
    """The limits that lines are compared with."""
    products = [f"products, {precision}: {rate / 1e9:.1f} GFLOP/s" for precision, rate in rates.products.items()]
    return [f"memory read: {rates.read / 1e9:.1f} GB/s", *products]


def profile_text(profile: list[Share]) -> str:
    """How much of the time each operation takes; the number of its calls and the time of one, if there are several."""
    calls = [f" ({share.calls} x {share.seconds * 1e6:.0f} us)" if share.calls > 1 else "" for share in profile]
    return ", ".join(f"{each.operation} {each.share:.0%}{more}" for each, more in zip(profile, calls, strict=True))


def markdown(
    facts: dict[str, object],
    rates: Rates,
    lines: list[Line],
    profiles: dict[str, list[Share]],
    growths: Sequence[Growth] = (),
) -> str:
    """Machine, limits, every line with its verdict, how cost grows, and where our time goes."""
    parts = [table_of(("machine", ""), [(name, str(value)) for name, value in facts.items()])]
    parts.append("\n".join(f"- {text}" for text in limit_texts(rates)))
    reached = [line for line in lines if line.against == LIMIT]
    compared = [line for line in lines if line.against != LIMIT]
    if reached:
        header = ("work", "fraction of the limit", "range", "ours", "limit", "verdict")
        parts.append(table_of(header, [(row[0], *row[2:]) for row in map(cells, reached)]))
    if compared:
        parts.append(table_of(TABLE_HEADER, [cells(line) for line in compared]))
    if growths:
        parts.append(table_of(GROWTH_HEADER, [growth_cells(growth) for growth in growths]))
    if profiles:
        rows = [(work, profile_text(profile)) for work, profile in profiles.items()]
        parts.append(table_of(("work", "where the time goes: share of it, calls x time of each"), rows))
    return "\n\n".join(parts) + "\n"


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table(heads, rows))


# ---------------------------------------------------------------------------------------------------------- the machine


def describe() -> dict[str, object]:
    """Machine, versions, commit and date."""
    facts: dict[str, object] = {
        "cpu": processor(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit_of_code() or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    peers = {package for info in CONTENDERS.values() for package in info.packages.values()}
    for package in (*CORE_PACKAGES, *sorted(peers)):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts
