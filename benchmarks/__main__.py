"""Ratios between this package and others, measured in one run.

python -m benchmarks                      # everything; README.md here says what each line means
python -m benchmarks --rows decode-fp32 train-fp32 --llama2c ~/llama2.c/run --json report.json
python -m benchmarks --quick              # every code path on a tiny model, in seconds; its figures mean nothing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.targets import LIMIT, MEASUREMENTS, ON_CUDA
from engine.programs import ArgumentParser, check_writable, run_main
from utils import UserError, atomic_write, choose_device

if TYPE_CHECKING:
    from benchmarks.rates import Measured
    from benchmarks.table import Bench, Line
    from benchmarks.work import Rates


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `UserError` for what does not fit."""
    parser = ArgumentParser(prog="python -m benchmarks", description="ratios of speed and memory, measured in one run")
    parser.add_argument("--rows", nargs="+", choices=MEASUREMENTS, metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--repeats", type=positive, default=5, help="rounds that are kept; epochs take 3")
    parser.add_argument("--threads", type=positive, help="threads of PyTorch and llama2.c; default: PyTorch's choice")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"cuda: {', '.join(ON_CUDA)}")
    parser.add_argument("--llama2c", metavar="PATH", help="llama2.c's compiled `run`, or the folder that holds it")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables here")
    parser.add_argument("--plots", metavar="DIR", help="draw it into this folder (needs matplotlib)")
    parser.add_argument("--full", action="store_true", help="whole epochs instead of a sample of their batches, once")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny work: does everything run?")
    args = parser.parse_args(argv)
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Everything that can be known before work starts."""
    for flag in ("json", "markdown"):
        if getattr(args, flag) is not None:
            check_writable(getattr(args, flag), f"--{flag}")
    if args.json and args.markdown and Path(args.json).resolve() == Path(args.markdown).resolve():
        raise UserError(f"--markdown {args.markdown} is also --json; give it a name of its own")
    if args.plots is not None and not (Path(args.plots).is_dir() and os.access(args.plots, os.W_OK)):
        raise UserError(f"--plots {args.plots} is not a folder that can be written to; create it first")
    if args.rows is None:
        args.rows = ON_CUDA if args.device == "cuda" else MEASUREMENTS
    if args.device == "cuda":
        if args.llama2c is not None:
            raise UserError("--llama2c runs on the CPU; leave it out, or --device cuda")
        unfit = [row for row in args.rows if row not in ON_CUDA]
        if unfit:
            raise UserError(f"--rows {' '.join(unfit)}: on cuda there are {', '.join(ON_CUDA)}")


def compile_loops() -> None:
    """Decoding is measured as it is once `setup.sh`, or `python -m fast --compile`, has run."""
    from fast.compiled import FORMATS, NotReady, are_compiled, compile_now

    for format_ in FORMATS:
        if not are_compiled(format_):
            print(f"compiling the loops that generate text in {format_} ...", flush=True)
            with suppress(NotReady):  # the table of kernels says so
                compile_now(format_)


def set_up(args: argparse.Namespace, folder: Path) -> Bench:
    """The contenders and their work, as the flags say."""
    import torch

    from benchmarks import sentences, table
    from benchmarks.llama2c import BOS_ID, SPACE_ID, Llama2C, find_program
    from benchmarks.measure import PAUSE, Turns
    from benchmarks.peers import Peers, load_accelerate, random_llama
    from config import LlamaConfig

    load_accelerate()  # before any work
    if args.device == "cpu":
        compile_loops()
    program = None if args.llama2c is None else find_program(args.llama2c)
    device = choose_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    quick = {"max_seq_len": 256} if args.quick else {}
    config = LlamaConfig.from_preset("tiny" if args.quick else "stories42M", attention="causal", **quick)
    peers = Peers(random_llama(config, args.seed), device, args.seed)
    threads = torch.get_num_threads()
    sizes = table.QUICK if args.quick else table.Sizes(every=1 if args.full else table.Sizes().every)
    data = (
        sentences.random_sentences(config.vocab_size, args.seed, {"train": 48, "dev": 16})
        if args.quick
        else sentences.load_sentences(config.vocab_size, args.seed)
    )
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    turns = Turns(args.repeats, 0.0 if args.quick else PAUSE, synchronize)
    llama2c = None
    if program is not None:
        llama2c = Llama2C(program, folder, peers.state, config, threads)
        llama2c.generate([BOS_ID, SPACE_ID, SPACE_ID + 1, SPACE_ID + 2], 1)  # fails at once where it is another program
    missing = table.missing_contenders(device, has_llama2c=llama2c is not None)
    return table.Bench(config, peers, turns, sizes, data, folder, threads, args.seed, llama2c, missing)


def describe_run(bench: Bench, args: argparse.Namespace) -> dict[str, object]:
    """What the figures are of."""
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
    from benchmarks import rates

    return rates.measure(bench.turns, bench.device, shrink=64 if args.quick else 1)


def print_kernels(kernels: dict[str, list[Any]], printed: set[str]) -> None:
    """What was chosen, once for each precision and use."""
    for use, choices in kernels.items():
        if use not in printed:
            printed.add(use)
            for choice in choices:
                print(f"  kernels, {use}: {', '.join(f'{name} {value}' for name, value in choice._asdict().items())}")


def measure(bench: Bench, names: list[str]) -> list[Line]:
    """Runs what is named, printing every line as soon as it is known: all but those against the machine's limit."""
    from benchmarks import report
    from benchmarks.rows import measurements

    functions, lines, printed = measurements(), [], set()
    print(report.LINE_FORMAT.format(*report.TABLE_HEADER))
    for name in (name for name in functions if name in names):
        for line in functions[name](bench):
            lines.append(line)
            if line.against != LIMIT:
                print(report.as_text(line))
        print_kernels(bench.peers.kernels, printed)
        sys.stdout.flush()
    return lines


def compare_with_limits(lines: list[Line], measured: list[Measured]) -> Rates:
    """Fill the lines against the machine's limit and print them; returns the limit."""
    from benchmarks import rates, report

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


def print_profiles(bench: Bench) -> None:
    from benchmarks import report

    print("where our time goes, watched once: share of it, calls x time of each")
    for work, profile in bench.profiles.items():
        print(f"  {work}: {report.profile_text(profile)}")


def as_plain(line: Line) -> dict[str, Any]:
    """A line for the JSON file."""
    fields = {name: value for name, value in vars(line).items() if name not in ("task", "amount")}
    return {
        **fields,
        "goal": line.goal,
        "ratio": None if line.ratio is None else line.ratio._asdict(),
        "verdict": line.verdict,
    }


def write_results(args: argparse.Namespace, report: dict[str, Any], markdown: str) -> None:
    """The files that were asked for."""
    from benchmarks import plots

    if args.json is not None:
        with atomic_write(args.json) as file:
            json.dump(report, file, indent=1, allow_nan=False)
        print(f"wrote {args.json}")
    if args.markdown is not None:
        with atomic_write(args.markdown) as file:
            file.write(markdown)
        print(f"wrote {args.markdown}")
    if args.plots is not None and plots.can_plot():
        for path in plots.draw(report, Path(args.plots)):
            print(f"drew {path}")


def main() -> int:
    """Exit status 1 where results differ that must be the same."""
    args = get_args()
    from benchmarks import machine, plots, rates
    from benchmarks.report import markdown

    if args.plots is not None and not plots.can_plot():
        print(plots.WHY_NO_PLOTS, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="minllama-benchmarks-") as folder:
        bench = set_up(args, Path(folder))
        facts, run = machine.describe(bench.device), describe_run(bench, args)
        for name, value in (facts | run).items():
            print(f"{name}: {value}")
        before = measure_rates(bench, args)
        lines = measure(bench, args.rows)
        measured = rates.best_of(before, measure_rates(bench, args))
    best = compare_with_limits(lines, measured)
    if bench.profiles:
        print_profiles(bench)
    report = {
        "machine": facts,
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "markdown", "plots")},
        "sizes": bench.sizes._asdict(),
        "run": run,
        "rates": [candidate._asdict() for candidate in measured],
        "limits": best._asdict(),
        "kernels": {use: [choice._asdict() for choice in choices] for use, choices in bench.peers.kernels.items()},
        "rows": [as_plain(line) for line in lines],
        "profiles": {work: [share._asdict() for share in profile] for work, profile in bench.profiles.items()},
    }
    write_results(args, report, markdown(facts | run, best, lines, bench.profiles))
    return exit_status(lines)


def exit_status(lines: list[Line]) -> int:
    """Speed alone is no failure: 1 where results differ that must be the same, else 0."""
    return int(any(line.same_result is False for line in lines))


if __name__ == "__main__":
    sys.exit(run_main(main))
