"""Flags, checks, output files and figures that all programs share that train on text files. No PyTorch."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.arguments import columns_of
from engine.flags import ABOVE_0, AT_LEAST_1, BELOW_1, Flag, Range, add_flags, flags_named
from engine.metrics import check_folder
from engine.programs import ArgumentParser, and_kept, check_writable, hears_termination, input_file
from engine.tables import check_format
from utils import UserError, atomic_write, warn

Row = dict[str, Any]  # the figures of one measurement
NO_SETTINGS = ("out", "resume", "tokenizer", "log_dir")  # flags that are left out of the figures
OF_COLUMNS = ("text_column", "skip_empty")

TEXT_FLAGS = (
    Flag("--epochs", "passes over the text", float, 4.0, ABOVE_0),
    Flag("--lr", "the highest learning rate; for --init a tenth of it is a good start", float, 3e-3, ABOVE_0),
    Flag("--warmup", "the share of all steps in which the rate rises", float, 0.05, BELOW_1),
    Flag("--batch_size", "rows in a batch", int, 16, Range("must be at least 1 and at most 65536", 1, 2**16)),
    Flag("--length", "tokens in a row", int, 256, Range("must be at least 2", 2)),
    Flag("--weight_decay", "of the matrices", float, 0.1,
         Range("must be at least 0 and finite", 0, excludes=(False, True))),
    Flag("--clip", "the largest norm of all gradients together", float, 1.0, ABOVE_0),
    Flag("--held_out", "the share of the documents that is not trained on", float, 0.02,
         Range("must be above 0 and below 1", 0, 1, excludes=(True, True))),
    Flag("--every", "about how many steps between two measurements, and resume points", int, 100, AT_LEAST_1),
    *flags_named("seed", help="of everything random"),
    *flags_named("device", "text-column", "skip_empty"),
    Flag("--resume", "go on after the last measurement of an interrupted run", bool),
    Flag("--log_dir", "keep the figures of each step there, as JSON lines", metavar="DIR"),
)  # fmt: skip


def add_text_flags(parser: ArgumentParser) -> None:
    """Add the flags of a program that trains on text, without --out, --init, --precision and a new model's sizes."""
    what = "texts, or data files, whose labels are dropped; of files with columns the texts"
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help=what)
    add_flags(parser, TEXT_FLAGS)


def check_text_flags(args: Namespace) -> None:
    """Check these flags, and replace the names of texts by paths. Raises `UserError` naming the flag."""
    for flag in TEXT_FLAGS:
        flag.check(args)
    if args.log_dir is not None:
        check_folder(args.log_dir, args.resume)
    args.text = [input_file("--text", name) for name in args.text]
    columns_of(args, args.text)  # raises
    for index, path in enumerate(args.text):
        check_format(path)
        if Path(path).resolve() in {Path(other).resolve() for other in args.text[:index]}:
            raise UserError(f"--text names {path} twice, so that what is held out of one would be trained on")
        if evaluated := {"dev", "test"} & {*re.split(r"[^a-z]+", Path(path).stem.lower())}:
            warn(f"{path} looks like {evaluated.pop()} sentences; train on them, and scores there say nothing more")


def fill_shape(args: Namespace, sizes: Mapping[str, Any], make: Callable[[], Any]) -> None:
    """Fill in the sizes of a new model that were not given; with --init, the sizes are those of that model.

    sizes: names and defaults. make: makes the config, or raises `ValueError`. Raises `UserError` naming the flag.
    """
    given = [name for name in sizes if getattr(args, name) is not None]
    if args.tokenizer is not None and "vocab_size" in given:
        raise UserError(f"--vocab_size: the pieces are those of --tokenizer {args.tokenizer}")
    if args.init is not None:
        if given:
            raise UserError(f"--{given[0]}: the shape is that of --init {args.init}")
        return
    for name, value in sizes.items():
        if name not in given:
            setattr(args, name, value)
    try:
        make()
    except ValueError as error:
        raise UserError(f"no model has this shape: {error}") from None
    check_length(args, args.max_seq_len)


def check_length(args: Namespace, positions: int) -> None:
    if args.length > positions:
        raise UserError(f"--length {args.length}: the model has {positions} positions")


class Outputs(NamedTuple):
    """The output files of a run: the model, the files beside it, its figures, its resume point, and its lock.

    flag: the flag that names them. inputs: the files that the run reads; None for an input that is not given.
    """

    model: Path
    beside: tuple[Path, ...]
    figures: Path
    point: Path
    lock: Path
    flag: str = "--out"
    inputs: Sequence[str | Path | None] = ()

    def check(self, args: Namespace) -> None:
        """Raise `UserError` if the run would overwrite a file, unless it resumes the run of that file."""
        if self.model.parent == args.out and args.out.exists() and not args.out.is_dir():
            raise UserError(f"{self.flag} {args.out} is a file; name a folder")
        files = (self.model, *self.beside, self.figures, self.point)
        resolved = {Path(path).resolve() for path in self.inputs if path is not None}
        for path in (*files, self.lock):
            check_writable(args.out if path.parent == args.out and not args.out.exists() else path, self.flag)
            if path.resolve() in resolved:
                raise UserError(f"{self.flag} {args.out}: {path} is also an input; choose another name")
        there = [path for path in files if path.exists()]
        if self.point in there:
            if not args.resume:
                how = f"go on with --resume, or name another {self.flag}"
                raise UserError(f"{self.point} is of an interrupted run; {how}")
        elif there:
            over = f", and there is no {self.point} to go on from" if args.resume else ""
            how = f"name another {self.flag}, or remove it"
            raise UserError(f"{self.flag} {args.out}: {there[0]} is there already{over}; {how}")

    def what_is_kept(self, args: Namespace) -> str:
        if not self.point.is_file():
            return "nothing was saved"
        return f"the best model so far stays in {args.out}, and --resume goes on from {self.point}"

    def write_figures(self, args: Namespace, rows: Sequence[Row], made: dict[str, Any] | None = None) -> None:
        """Write settings and figures of the run, without paths and texts. made: entries for the finished model."""
        settings = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
        # left out where they say nothing: checkpoints of before there were these flags keep their identity (lineage)
        settings = {name: value for name, value in settings.items() if value or name not in OF_COLUMNS}
        settings |= {"text": [Path(path).name for path in args.text], "init": args.init and Path(args.init).name}
        curve = [{name: round(value, 5) for name, value in row.items()} for row in rows]
        content = {"settings": settings, "seconds": round(sum(row.get("seconds", 0) for row in rows)), "curve": curve}
        with atomic_write(self.figures) as file:
            file.write(json.dumps(content | (made or {}), indent=1) + "\n")


@hears_termination()
def follow(args: Namespace, outputs: Outputs, rows: Iterator[Row], line_of: Callable[[Row], str]) -> list[Row]:
    """Print a line for each measurement, and write all figures after each one that follows training steps.

    Returns all measurements. Raises `UserError` if training diverges; this error and `KeyboardInterrupt` say which
    files are kept.
    """
    from engine.training import Diverged

    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
            print(line_of(row), flush=True)
            if "train" in row:
                outputs.write_figures(args, done)
    except Diverged as error:
        raise UserError(f"{error}; try a smaller --lr; {outputs.what_is_kept(args)}") from None
    except KeyboardInterrupt as error:
        raise and_kept(error, outputs.what_is_kept(args)) from None
    return done
