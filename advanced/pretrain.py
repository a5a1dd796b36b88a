"""Train a Llama to predict the next token of a text: from scratch, or from a checkpoint.

    python -m advanced.pretrain --text F [F ...] --out NEW.pt [--dim 256 --n_layers 6 ...]
    python -m advanced.pretrain --text F [F ...] --out NEW.pt --init CHECKPOINT

The second is continued pre-training (Gururangan et al. 2020, "Don't Stop Pretraining", arXiv:2004.10964): on texts of
the domain (DAPT, section 3), or on the training sentences of the task (TAPT, section 4); labels of a data file are
dropped. Always causal: a bidirectional model sees the token that it is to predict. Documents are packed into one row
of tokens, bos and eos between them, and cut into windows.

Beside NEW.pt lie NEW.model, its tokenizer, and NEW.json, the figures: loss and perplexity of held-out documents after
about every `--every` steps. NEW.pt holds the best model so far by that loss; every other command loads it. None of
these files is there before the first measurement, and one that is there already is never overwritten by another run.
"""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from advanced.lineage import origin
from config import PRECISIONS, LlamaConfig
from utils import (
    ArgumentParser,
    UserError,
    atomic_write,
    check_writable,
    find_asset,
    run_main,
    sha256_of,
    tokenizer_name,
    warn,
)

SHAPE = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 4096, "max_seq_len": 512}


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.pretrain", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--text", nargs="+", required=True, metavar="FILE", help="texts, or data files, whose labels are dropped")
    add("--out", required=True, metavar="NEW.pt", help="the checkpoint; its tokenizer is NEW.model")
    add("--init", metavar="CHECKPOINT", help="go on from this one, with its shape and tokenizer")
    add("--tokenizer", help="SentencePiece model; else that of --init, or one that is trained on the texts")
    add("--epochs", type=float, default=4.0, help="passes over the text")
    add("--lr", type=float, default=3e-3, help="the highest learning rate; for --init a tenth of it is a good start")
    add("--warmup", type=float, default=0.05, help="the share of all steps in which the rate rises")
    add("--batch_size", type=int, default=16, help="windows in a batch")
    add("--length", type=int, default=256, help="tokens in a window")
    add("--weight_decay", type=float, default=0.1, help="of the matrices")
    add("--clip", type=float, default=1.0, help="the largest norm of all gradients together")
    add("--held_out", type=float, default=0.02, help="the share of the documents that is not trained on")
    add("--every", type=int, default=100, help="about how many steps between two measurements, and resume points")
    add("--seed", type=int, default=1337, help="of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--precision", choices=[each for each in PRECISIONS if each != "int8"], default="fp32", help="of the products")
    add("--resume", action="store_true", help="go on after the last measurement of an interrupted run")
    shape = parser.add_argument_group("the shape of a new model").add_argument
    for name, value in SHAPE.items():
        shape(f"--{name}", type=int, help=f"{value} if not given")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> None:
    """Raises `UserError` naming the flag; turns the names of files into paths."""
    wanted = {
        "epochs": (0 < args.epochs < math.inf, "above 0"),
        "lr": (0 < args.lr < math.inf, "above 0 and finite"),
        "warmup": (0 <= args.warmup < 1, "from 0 to below 1"),
        "batch_size": (args.batch_size >= 1, "at least 1"),
        "length": (args.length >= 2, "at least 2"),
        "weight_decay": (0 <= args.weight_decay < math.inf, "at least 0 and finite"),
        "clip": (0 < args.clip < math.inf, "above 0 and finite"),
        "held_out": (0 < args.held_out < 1, "above 0 and below 1"),
        "every": (args.every >= 1, "at least 1"),
        "seed": (0 <= args.seed < 2**32, "from 0 to 2^32 - 1"),
    }
    for name, (fits, what) in wanted.items():
        if not fits:
            raise UserError(f"--{name} {getattr(args, name)}: must be {what}")
    for flag in ("init", "tokenizer"):
        if getattr(args, flag) is not None:
            setattr(args, flag, _found(flag, getattr(args, flag)))
    args.text = [_found("text", name) for name in args.text]
    for index, path in enumerate(args.text):
        if Path(path).resolve() in {Path(other).resolve() for other in args.text[:index]}:
            raise UserError(f"--text names {path} twice, so that what is held out of one would be trained on")
        if evaluated := {"dev", "test"} & {*re.split(r"[^a-z]+", Path(path).stem.lower())}:
            warn(f"{path} looks like {evaluated.pop()} sentences; train on them, and scores there say nothing more")
    _check_shape(args)
    if args.init is not None and args.tokenizer is None:
        args.tokenizer = str(find_asset(tokenizer_name(args.init)) or "")
        if not args.tokenizer:
            raise UserError(f"{args.init} has no .model file beside it; name its tokenizer with --tokenizer")
    args.out = Path(args.out)
    check_out(args)


def _found(flag: str, name: str) -> str:
    path = find_asset(name)
    if path is None:
        raise UserError(f"--{flag} {name} {'is a folder; name files' if Path(name).is_dir() else 'does not exist'}")
    return str(path)


def _check_shape(args: Namespace) -> None:
    """Fill in the shape of a new model; that of --init is its own."""
    given = [name for name in SHAPE if getattr(args, name) is not None]
    if args.tokenizer is not None and "vocab_size" in given:
        raise UserError(f"--vocab_size: the pieces are those of --tokenizer {args.tokenizer}")
    if args.init is not None:
        if given:
            raise UserError(f"--{given[0]}: the shape is that of --init {args.init}")
        return
    for name in SHAPE.keys() - given:
        setattr(args, name, SHAPE[name])
    try:
        LlamaConfig(attention="causal", **{name: getattr(args, name) for name in SHAPE})
    except ValueError as error:
        raise UserError(f"no model has this shape: {error}") from None
    check_length(args, args.max_seq_len)


def check_length(args: Namespace, positions: int) -> None:
    if args.length > positions:
        raise UserError(f"--length {args.length}: the model has {positions} positions")


def check_out(args: Namespace) -> None:
    """Nothing that is there is lost: what is not gone on with stays. Raises `UserError`."""
    if args.out.suffix != ".pt":
        raise UserError(f"--out {args.out}: the name must end in .pt")
    inputs = {Path(path).resolve() for path in (*args.text, args.init, args.tokenizer) if path is not None}
    files = files_of(args.out)
    for path in (*files, lock_of(args.out)):
        check_writable(path, "--out")
        if path.resolve() in inputs:
            raise UserError(f"--out {args.out}: {path} is also an input; choose another name")
    there, point = [path for path in files if path.exists()], files[-1]
    if point in there:
        if not args.resume:
            raise UserError(f"{point} is of an interrupted run; go on with --resume, or name another --out")
    elif there:
        over = f", and there is no {point} to go on from" if args.resume else ""
        raise UserError(f"--out {args.out}: {there[0]} is there already{over}; name another --out, or remove it")


def files_of(out: Path) -> tuple[Path, Path, Path, Path]:
    """The checkpoint, its tokenizer, the figures, the resume point."""
    return out, out.with_suffix(".model"), out.with_suffix(".json"), out.with_suffix(".resume")


def lock_of(out: Path) -> Path:
    return out.with_suffix(".pt.lock")


def line_of(row: dict[str, Any]) -> str:
    train = f"train loss :: {row['train']:.3f}, " if "train" in row else ""
    speed = f", {row['tokens_per_second']} tokens a second" if "tokens_per_second" in row else ""
    held_out = f"held-out loss :: {row['held_out']:.4f}, perplexity :: {row['perplexity']:.2f}"
    return f"step {row['step']}: {train}{held_out}, bits a byte :: {row['bits_per_byte']:.4f}{speed}"


def write_figures(args: Namespace, rows: Sequence[dict[str, Any]], ended: bool = False) -> None:
    """Everything that tells how NEW.pt was made; no path, no text. ended: and of what, once it is made."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "resume", "tokenizer")}
    settings |= {"text": [Path(path).name for path in args.text], "init": args.init and Path(args.init).name}
    curve = [{name: round(value, 5) for name, value in row.items()} for row in rows]
    content = {"settings": settings, "seconds": round(sum(row.get("seconds", 0) for row in rows)), "curve": curve}
    if ended:
        content["made_of"] = origin(args.text, args.out.with_suffix(".model"), args.init)
        content["weights"] = sha256_of(args.out)
    with atomic_write(args.out.with_suffix(".json")) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def what_is_kept(args: Namespace) -> str:
    out, *_, point = files_of(args.out)
    if not point.is_file():
        return "nothing was saved"
    return f"the best model so far stays in {out}, and --resume goes on from {point}"


def main() -> None:
    args = get_args()
    check_args(args)
    from advanced.pretraining import pretrain
    from plan import Place
    from training import Diverged
    from utils import choose_device, seed_everything

    seed_everything(args.seed)
    rows: list[dict[str, Any]] = []
    try:
        for row in pretrain(args, Place(choose_device(args.device))):
            rows.append(row)
            print(line_of(row), flush=True)
            if "train" in row:
                write_figures(args, rows)
    except Diverged as error:
        raise UserError(f"{error}; try a smaller --lr; {what_is_kept(args)}") from None
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{str(error) or 'interrupted'}; {what_is_kept(args)}") from None
    write_figures(args, rows, ended=True)
    best = min((row for row in rows if "train" in row), key=lambda row: row["held_out"])
    print(f"save the model to {args.out} (step {best['step']}, held-out perplexity {best['perplexity']:.2f})")
    if best["held_out"] >= rows[0]["held_out"] and best is not rows[0]:
        warn(f"it predicts the held-out text no better than {args.init} did; a smaller --lr may help")


if __name__ == "__main__":
    sys.exit(run_main(main))
