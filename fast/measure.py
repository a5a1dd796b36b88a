"""Which of several ways is the fastest on this machine: measured once, and kept for later runs.

A choice that came out differently in the next run would change the last digits of its results, so it is kept on disk.
If nothing can be kept, or several processes would disturb each other's measurements, nothing is measured, and the plain
way is taken. So it is for an hour after a measurement that other programs have disturbed, unless one way was clearly
faster all the same.

Shapes:  r rows, batch and positions together   i input features   o output features
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from utils import atomic_write

MEASURED_ROUNDS, MEASURED_TRIES = 7, 3
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # variables that forbid newer instructions
STEADY = 1.25  # the third best round takes at most so many times the best one's time, else the processor was busy
MOST_BYTES, MOST_LEVELS = 1 << 20, 3  # of what is kept: more is not of this program
AGAIN = 3600.0  # seconds after which a measurement that was disturbed is tried again
BUSY, TOO_BUSY = "busy until", "the machine was too busy to measure; that is tried again after an hour"
MEASURED = "measured here"  # ends the reasons of choices that were measured
MARGIN = 1.05  # another way than the plain one must be this much faster, or noise would choose


def fastest(question: str, ways: dict[str, Callable[[], object]]) -> tuple[str, str]:
    """The name of the fastest way, and why.

    ways: the first one is plain: it is taken if nothing is measured, or no other is clearly faster. question: the name
    under which the measurement is kept.
    """
    plain, *others = ways
    if not others:
        return plain, "there is no other"
    question = f"{settings()} {question}"
    kept, now = recall(question), time.time()
    if isinstance(kept, dict) and _is_soon(kept.get(BUSY), now):
        return plain, TOO_BUSY
    if not isinstance(kept, dict) or kept.keys() != ways.keys() or not all(_is_time(t) for t in kept.values()):
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return plain, "several processes do not measure"
        kept = next(filter(None, (_best_times(ways) for _ in range(MEASURED_TRIES))), None)
        if kept is None:
            remember(question, {BUSY: now + AGAIN})
            return plain, TOO_BUSY
        if not remember(question, kept):
            return plain, f"{cache_file()} cannot be written, so no measurement can be kept"
    best = min(others, key=kept.__getitem__)
    ratio = kept[plain] / kept[best]
    return (best if ratio >= MARGIN else plain), f"{best} is {ratio:.2f} times as fast as {plain}, {MEASURED}"


def _is_soon(value: object, now: float) -> bool:
    return isinstance(value, float) and now < value <= now + AGAIN


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 1e3


def _best_times(ways: dict[str, Callable[[], object]]) -> dict[str, float] | None:
    """The least seconds of each way over some rounds, in turns.

    Another program has disturbed them if it has interrupted a way's best round, or if a third best round was much
    slower. (All rounds beside a program that computes without a pause take about the same time, in which the slower way
    may be the faster.) Then the median of each way's rounds, if one way was clearly the fastest; else None.
    """
    rounds: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for _ in range(MEASURED_ROUNDS + 1):
        for name, run in ways.items():
            before, start = interruptions(), time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            rounds[name].append((seconds, interruptions() - before))
    best = {name: sorted(taken[1:])[:3] for name, taken in rounds.items()}  # the first round warms up
    if any(first[1] or third[0] > STEADY * first[0] for first, _, third in best.values()):
        return _clear_times({name: sorted(seconds for seconds, _ in taken[1:]) for name, taken in rounds.items()})
    return {name: first[0] for name, (first, *_) in best.items()}


def _clear_times(rounds: dict[str, list[float]]) -> dict[str, float] | None:
    """The medians, if but for one round of each the slowest of one way took less time than the fastest of the others.

    rounds: sorted.
    """
    fastest_way = min(rounds, key=lambda name: rounds[name][-2])
    is_clear = all(rounds[fastest_way][-2] < taken[1] for name, taken in rounds.items() if name != fastest_way)
    return {name: taken[len(taken) // 2] for name, taken in rounds.items()} if is_clear else None


def interruptions() -> int:
    """How often another program has taken a processor from this process, on Linux; 0 elsewhere."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def remember(question: str, answer: Any) -> bool:
    """Keep an answer for later runs on this processor. Returns whether it could be written."""
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        kept = {**_read(), f"{processor()} {question}": answer}
        with atomic_write(cache_file()) as file:
            json.dump(kept, file, indent=1)
    except OSError:
        return False
    return True


def recall(question: str) -> Any:
    """The answer that was kept on this processor; None if there is none."""
    return _read().get(f"{processor()} {question}")


def _read() -> dict[str, Any]:
    """What is kept, without entries that cannot be ours. What an entry holds is checked where it is used."""
    try:
        with open(cache_file(), encoding="utf-8") as file:
            kept = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):  # absent, or damaged: it is written anew
        return {}
    kept = kept if isinstance(kept, dict) else {}
    return {question: answer for question, answer in kept.items() if not _is_nested(answer, MOST_LEVELS)}


def _is_nested(value: object, levels: int) -> bool:
    """Whether lists and dictionaries lie in one another more than `levels` deep: too deep could not be written."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_nested(part, levels - 1) for part in parts)


def cache_file() -> Path:
    """machine.json in the folder $MINLLAMA_CACHE, else beside the compiled Python files, else in the user's folder."""
    if os.environ.get("MINLLAMA_CACHE"):
        return Path(os.environ["MINLLAMA_CACHE"]) / "machine.json"
    folder = Path(__file__).resolve().parent / "__pycache__"
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "min-llama"
    return folder / "machine.json"


@cache
def processor() -> str:
    """Names this processor: several machines may share a home folder."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        text = platform.processor()
    else:
        of_first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        text = "\n".join(line for line in of_first if line.startswith(("model name", "flags", "Features", "CPU")))
    return f"{platform.node()} {platform.machine()} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def settings() -> str:
    """Everything else that a measurement may depend on: library, threads, variables."""
    limits = [f"{name}={os.environ[name]}" for name in ISA_LIMITS if name in os.environ]
    library = f"torch {torch.__version__} {torch.get_num_threads()} threads"
    return " ".join([library, *([] if torch.backends.mkldnn.enabled else ["no oneDNN"]), *limits])


# -------------------------------------------------------------------------------------------- products of linear layers

ROWS, WIDTH, HIDDEN = 512, 512, 1376  # of measured products: a small batch in the feed-forward of stories42M


class Products(NamedTuple):
    """A small batch in layers of these shapes, o i each."""

    question: str = "float32 products"
    shapes: tuple[tuple[int, int], ...] = ((HIDDEN, WIDTH),)
    biases: bool = False
    rows: int = ROWS

    def trained(self) -> list[tuple[torch.Tensor | None, ...]]:
        """Inputs (r i), weight (o i), bias (o, or None) and the gradient of the outputs (r o) of each layer."""
        return [
            (
                torch.ones(self.rows, inputs, requires_grad=True),
                torch.ones(outputs, inputs, requires_grad=True),
                torch.ones(outputs) if self.biases else None,
                torch.ones(self.rows, outputs),
            )
            for outputs, inputs in self.shapes
        ]

    def not_trained(self) -> list[tuple[torch.Tensor, nn.Linear]]:
        """Inputs (r i) of each layer, and the layer. The state of the random numbers stays as it is."""
        with torch.random.fork_rng(devices=[]):  # skip_init would import sympy, a quarter of a second in a first run
            made = [nn.Linear(inputs, outputs, bias=self.biases) for outputs, inputs in self.shapes]
        for linear in made:
            for parameter in linear.requires_grad_(False).parameters():
                nn.init.ones_(parameter)
        return [(torch.ones(self.rows, linear.in_features), linear) for linear in made]


PRODUCTS_OF_LLAMAS = Products()
# Of a text that is generated, most layers are so small that what a kernel does before its product counts as well.
FEW_ROWS = Products("float32 products of few rows", ((WIDTH, WIDTH),) * 4, rows=64)
# Of a text that is computed anew for every token: queries, keys and values side by side, the feed-forward.
WHOLE_TEXT = Products(
    "float32 products of a whole text", ((3 * WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)), rows=80
)
