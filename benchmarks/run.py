"""One run of the benchmarks: contenders are made, measured in turns, compared with the machine's limit and reported."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    decoding,
    encoders,
    large,
    learning,
    machine,
    plots,
    processes,
    rates,
    report,
    scaling,
    sentences,
    table,
)
from benchmarks.llama2c import BOS_ID, SPACE_ID, Llama2C, find_program
from benchmarks.measure import PAUSE, Turns
from benchmarks.peers import Peers, load_accelerate, random_llama
from benchmarks.rates import Measured
from benchmarks.table import Bench, Line
from benchmarks.targets import LIMIT, LINES
from benchmarks.work import Rates
from config import LlamaConfig
from utils import atomic_write

MEASURING: Sequence[Callable[[Bench], list[Line]]] = (  # in the order of `targets.LINES`, which has their names
    decoding.decode_fp32,
    decoding.decode_int8,
    decoding.decode_int4,
    decoding.decode_together,
    decoding.generate_bidirectional,
    decoding.busy,
    processes.first_run,
    learning.forward,
    learning.train_fp32,
    learning.train_bf16,
    learning.epoch_causal,
    learning.epoch_bidirectional,
    learning.peak_memory,
    encoders.classify,
    encoders.train,
    large.large,
    scaling.context,
    scaling.batches,
)


def run(args: argparse.Namespace) -> list[str]:
    """Measure, print and write what the flags ask for; returns what is wrong, in words."""
    if args.plots is not None and not plots.can_plot():
        print(plots.WHY_NO_PLOTS, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="minllama-benchmarks-") as folder:
        bench = set_up(args, Path(folder))
        facts, about = machine.describe(), describe_run(bench, args)
        for name, value in (facts | about).items():
            print(f"{name}: {value}")
        before = measure_rates(bench, args)
        lines = measure(bench, args.rows)
        measured = rates.best_of(before, measure_rates(bench, args))
    best = compare_with_limits(lines, measured)
    if bench.profiles:
        print("where our time goes, watched once: share of it, calls x time of each")
    for work, profile in bench.profiles.items():
        print(f"  {work}: {report.profile_text(profile)}")
    results = {
        "machine": facts,
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "markdown", "plots")},
        "sizes": bench.sizes._asdict(),
        "run": about,
        "rates": [candidate._asdict() for candidate in measured],
        "limits": best._asdict(),
        "kernels": {use: [choice._asdict() for choice in choices] for use, choices in bench.peers.kernels.items()},
        "rows": [as_plain(line) for line in lines],
        "growth": [report.growth_as_plain(growth) for growth in bench.growth],
        "profiles": {work: [share._asdict() for share in profile] for work, profile in bench.profiles.items()},
    }
    write_results(args, results, report.markdown(facts | about, best, lines, bench.profiles, bench.growth))
    return wrong(lines, bench)


def wrong(lines: list[Line], bench: Bench) -> list[str]:
    """Results that differ, contenders that failed by our own fault, and costs that grow faster than they should.

    Figures of --quick mean nothing, so that the last is not looked at there.
    """
    found = [f"{line.work}, {line.against}: {line.note}" for line in lines if line.same_result is False]
    found += [f"{name} failed: {bench.missing[name]}" for name in sorted(bench.failed)]
    if bench.sizes != table.QUICK_SIZES:
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
    """The contenders and their work, as the flags say."""
    load_accelerate()  # before any work
    compile_loops()
    program = None if args.llama2c is None else find_program(args.llama2c)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    threads = torch.get_num_threads()
    if args.quick:
        config = LlamaConfig.from_preset("tiny", attention="causal", max_seq_len=256)
        sizes, pause = table.QUICK_SIZES, 0.0
        data = sentences.random_sentences(config.vocab_size, args.seed, {"train": 48, "dev": 16})
    else:
        config = LlamaConfig.from_preset("stories42M", attention="causal")
        sizes, pause = table.Sizes(every=1 if args.full else table.Sizes().every), PAUSE
        data = sentences.load_sentences(config.vocab_size, args.seed)
    peers = Peers(random_llama(config, args.seed), args.seed)
    turns = Turns(args.repeats, pause)
    llama2c = None
    if program is not None:
        llama2c = Llama2C(program, folder, peers.state, config, threads)
        llama2c.generate([BOS_ID, SPACE_ID, SPACE_ID + 1, SPACE_ID + 2], 1)  # fails at once if it is another program
    missing = table.missing_contenders(has_llama2c=llama2c is not None)
    return Bench(config, peers, turns, sizes, data, folder, threads, args.seed, llama2c, missing)


def describe_run(bench: Bench, args: argparse.Namespace) -> dict[str, object]:
    """The model, the data and the rounds behind the figures."""
    facts: dict[str, object] = {
        "model": f"random weights, {'tiny' if args.quick else 'the shape of stories42M'}, seed {args.seed}",
        "data": bench.sentences.source,
        "rounds": args.repeats,
        "epochs": "whole" if bench.sizes.every == 1 else f"estimated from one batch in {bench.sizes.every}",
    }
    if args.quick:
        facts["--quick"] = "sizes are smaller than the lines say, and the figures mean nothing"
    return facts


def measure_rates(bench: Bench, args: argparse.Namespace) -> list[Measured]:
    """What this machine does at best, now."""
    return rates.measure(bench.turns, shrink=64 if args.quick else 1)


def measure(bench: Bench, names: Sequence[str]) -> list[Line]:
    """Run the measurements `names` and print each line at once, except for those against the machine's limit.

    Of the kernels that were chosen, each precision and use is printed once.
    """
    lines, printed = [], set()
    print(report.LINE_FORMAT.format(*report.TABLE_HEADER))
    for name, measurement in zip(LINES, MEASURING, strict=True):
        if name not in names:
            continue
        for line in measurement(bench):
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
    best = rates.limits(measured)
    print("what this machine does at best, the faster of before and after")
    for candidate in measured:
        print(f"  {report.rate_text(candidate)}")
    print("fractions of the machine's limit; ours and theirs are our time, or rate, and the limit's")
    for line in lines:
        if line.against == LIMIT:
            line.compare_with_limit(best)
            print(report.as_text(line))
    return best


def as_plain(line: Line) -> dict[str, Any]:
    """A line for the JSON file."""
    fields = {name: value for name, value in vars(line).items() if name not in ("task", "amount")}
    ratio = None if line.ratio is None else line.ratio._asdict()
    return {**fields, "goal": line.goal, "ratio": ratio, "verdict": line.verdict}


def write_results(args: argparse.Namespace, results: dict[str, Any], markdown: str) -> None:
    """Write the files that the flags name."""
    if args.json is not None:
        with atomic_write(args.json) as file:
            json.dump(results, file, indent=1, allow_nan=False)
        print(f"wrote {args.json}")
    if args.markdown is not None:
        with atomic_write(args.markdown) as file:
            file.write(markdown)
        print(f"wrote {args.markdown}")
    if args.plots is not None and plots.can_plot():
        for path in plots.draw(results, Path(args.plots)):
            print(f"drew {path}")
