"""One run of the benchmarks: contenders are made, measured in turns, compared with the machine's limit and reported."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import limits, report, sentences
from benchmarks.bench import QUICK_SIZES, Bench, Line, Sizes, absent_contenders
from benchmarks.decoders import BOS_ID, SPACE_ID, Llama2C, find_program
from benchmarks.limits import Measured, Rates
from benchmarks.measure import PAUSE, Turns
from benchmarks.peers import SEED, Peers, random_llama
from benchmarks.table import LIMIT, ROWS
from config import LlamaConfig
from engine.programs import import_part
from utils import atomic_write


def run(args: argparse.Namespace) -> list[str]:
    """Measure, print and write what the flags ask for; returns what is wrong, in words."""
    with tempfile.TemporaryDirectory(prefix="minllama-benchmarks-") as folder:
        bench = set_up(args, Path(folder))
        facts = report.describe() | describe_run(bench)
        for name, value in facts.items():
            print(f"{name}: {value}")
        before = measure_rates(bench)
        lines = measure(bench, args.rows)
        measured = limits.best_of(before, measure_rates(bench))
    best = compare_with_limits(lines, measured)
    if bench.profiles:
        print("where our time goes, watched once: share of it, calls x time of each")
    for work, profile in bench.profiles.items():
        print(f"  {work}: {report.profile_text(profile)}")
    results = {
        "machine": facts,
        "sizes": bench.sizes._asdict(),
        "rates": [candidate._asdict() for candidate in measured],
        "limits": best._asdict(),
        "kernels": {use: [choice._asdict() for choice in choices] for use, choices in bench.peers.kernels.items()},
        "rows": [report.as_plain(line) for line in lines],
        "growth": [report.as_plain(growth) for growth in bench.growth],
        "profiles": {work: [share._asdict() for share in profile] for work, profile in bench.profiles.items()},
    }
    write_results(args, results, report.markdown(facts, best, lines, bench.profiles, bench.growth))
    return wrong(lines, bench)


def wrong(lines: list[Line], bench: Bench) -> list[str]:
    """Results that differ, contenders that broke, and costs that grow faster than they should.

    Figures of --quick mean nothing, so that the last is not looked at there.
    """
    found = [f"{line.work}, {line.against}: {line.note}" for line in lines if line.same_result is False]
    found += [f"{name} failed: {reason}" for name, reason in bench.failed.items()]
    if not bench.is_quick:
        found += [f"{growth.work}: {growth.verdict}" for growth in bench.growth if growth.is_faster]
    return found


def compile_loops() -> None:
    """Decoding is measured with the loops compiled, as `setup.sh` and `python -m fast --compile` leave them."""
    from fast.compiled import LINEAR_KERNELS, NotReady, are_compiled, compile_now

    for format_ in LINEAR_KERNELS:
        if not are_compiled(format_):
            print(f"compiling the loops that generate text in {format_} ...", flush=True)
            with suppress(NotReady):  # the table of kernels says so
                compile_now(format_)


def set_up(args: argparse.Namespace, folder: Path) -> Bench:
    """The contenders and their work, as the flags say. Raises `UserError` if the folder fast/ is absent."""
    import_part("fast", "python -m benchmarks")  # before any work
    compile_loops()
    program = None if args.llama2c is None else find_program(args.llama2c)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    threads = torch.get_num_threads()
    if args.quick:
        config = LlamaConfig.from_preset("tiny", attention="causal", max_seq_len=256)
        sizes, data = QUICK_SIZES, sentences.random_sentences(config.vocab_size, {"train": 48, "dev": 16})
    else:
        config = LlamaConfig.from_preset("stories42M", attention="causal")
        sizes, data = Sizes(), sentences.load_sentences(config.vocab_size)
    peers = Peers(random_llama(config))
    llama2c = None
    if program is not None:
        llama2c = Llama2C(program, folder, peers.state, config, threads)
        llama2c.generate([BOS_ID, SPACE_ID, SPACE_ID + 1, SPACE_ID + 2], 1)  # fails at once if it is another program
    turns = Turns(args.repeats, 0.0 if args.quick else PAUSE)
    absent = absent_contenders(config, has_llama2c=llama2c is not None)
    return Bench(config, peers, turns, sizes, data, folder, threads, llama2c, absent)


def describe_run(bench: Bench) -> dict[str, object]:
    """The model, the data and the rounds behind the figures."""
    facts: dict[str, object] = {
        "model": f"random weights, {'tiny' if bench.is_quick else 'the shape of stories42M'}, seed {SEED}",
        "data": bench.sentences.source,
        "rounds": bench.turns.repeats,
        "epochs": f"estimated from one batch in {bench.sizes.every}",
    }
    if bench.is_quick:
        facts["--quick"] = "sizes are smaller than the lines say, and the figures mean nothing"
    return facts


def measure_rates(bench: Bench) -> list[Measured]:
    """What this machine does at best, now."""
    return limits.measure(bench.turns, shrink=64 if bench.is_quick else 1)


def measure(bench: Bench, names: Sequence[str]) -> list[Line]:
    """Run the measurements `names` and print each line at once, except for those against the machine's limit.

    Of the kernels that were chosen, each precision and use is printed once.
    """
    lines, printed = [], set()
    print(report.LINE_FORMAT.format(*report.TABLE_HEADER))
    for name in (name for name in ROWS if name in names):
        module, _, function = ROWS[name].measure.partition(".")
        for line in getattr(importlib.import_module(f"benchmarks.{module}"), function)(bench, ROWS[name].works):
            lines.append(line)
            if line.against != LIMIT:
                print(report.as_text(line))
        for use, choices in bench.peers.kernels.items():
            for choice in choices if use not in printed else ():
                print(f"  kernels, {use}: {', '.join(f'{name} {value}' for name, value in choice._asdict().items())}")
        printed.update(bench.peers.kernels)
        sys.stdout.flush()
    if bench.growth:
        print(report.GROWTH_FORMAT.format(*report.GROWTH_HEADER))
    for growth in bench.growth:
        print(report.GROWTH_FORMAT.format(*report.growth_cells(growth)))
    return lines


def compare_with_limits(lines: list[Line], measured: list[Measured]) -> Rates:
    """Fill the lines against the machine's limit and print them; returns the limit."""
    best = limits.limits(measured)
    print("what this machine does at best, the faster of before and after")
    for candidate in measured:
        print(f"  {report.rate_text(candidate)}")
    print("fractions of the machine's limit; ours and theirs are our time, or rate, and the limit's")
    for line in lines:
        if line.against == LIMIT:
            line.compare_with_limit(best)
            print(report.as_text(line))
    return best


def write_results(args: argparse.Namespace, results: dict[str, Any], markdown: str) -> None:
    """Write the files that the flags name."""
    texts = {"json": json.dumps(results, indent=1, allow_nan=False), "markdown": markdown}
    for flag, text in texts.items():
        path = getattr(args, flag)
        if path is not None:
            with atomic_write(path) as file:
                file.write(text)
            print(f"wrote {path}")
