"""Train a Llama to predict the next token of a text: from scratch, or from a checkpoint.

    python -m advanced.pretrain --text F [F ...] --out NEW.pt [--dim 256 --n_layers 6 ...]
    python -m advanced.pretrain --text F [F ...] --out NEW.pt --init CHECKPOINT

The second is continued pre-training (Gururangan et al. 2020, "Don't Stop Pretraining", arXiv:2004.10964): on texts of
the domain (DAPT, section 3), or on the training sentences of the task (TAPT, section 4); labels of a data file are
dropped. Always causal: a bidirectional model sees the token that it is to predict. Documents are packed into one row
of tokens, bos and eos between them, and cut into windows.

Beside NEW.pt lie NEW.model, its tokenizer, and NEW.json, the figures: loss and perplexity of held-out documents after
every `--every` steps. NEW.pt holds the best model so far by that loss; every other command loads it.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from llama import Llama
    from optimizer import AdamW
    from plan import Place
    from saver import Saver
    from tokenizer import Tokenizer
    from training import EpochResult

SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")


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
    add("--every", type=int, default=100, help="steps between two measurements, and resume points")
    add("--seed", type=int, default=1337, help="of everything random")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--precision", choices=[each for each in PRECISIONS if each != "int8"], default="fp32", help="of the products")
    add("--resume", action="store_true", help="go on after the last measurement of an interrupted run")
    shape = parser.add_argument_group("the shape of a new model").add_argument
    for name, value in zip(SHAPE, (256, 6, 8, 4, 4096, 512), strict=True):
        shape(f"--{name}", type=int, default=value)
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
    args.out = Path(args.out)
    if args.out.suffix != ".pt":
        raise UserError(f"--out {args.out}: the name must end in .pt")
    inputs = {Path(path).resolve() for path in (*args.text, args.init, args.tokenizer) if path is not None}
    for path in files_of(args.out):
        check_writable(path, "--out")
        if path.resolve() in inputs:
            raise UserError(f"--out {args.out}: {path} is also an input; choose another name")
    if args.init is not None and args.tokenizer is None:
        args.tokenizer = str(find_asset(tokenizer_name(args.init)) or "")
        if not args.tokenizer:
            raise UserError(f"{args.init} has no .model file beside it; name its tokenizer with --tokenizer")
    if args.init is None:
        try:
            LlamaConfig(attention="causal", **{name: getattr(args, name) for name in SHAPE})
        except ValueError as error:
            raise UserError(f"no model has this shape: {error}") from None


def _found(flag: str, name: str) -> str:
    path = find_asset(name)
    if path is None:
        raise UserError(f"--{flag} {name} does not exist")
    return str(path)


def files_of(out: Path) -> tuple[Path, Path, Path, Path]:
    """The checkpoint, its tokenizer, the figures, the resume point."""
    return out, out.with_suffix(".model"), out.with_suffix(".json"), out.with_suffix(".resume")


class Corpus(NamedTuple):
    """A packed text to train on, and one held out."""

    tokenizer: Tokenizer
    train: list[int]
    held_out: list[int]
    held_out_bytes: int


def read_corpus(args: Namespace) -> Corpus:
    """Read the texts, hold out a part of each, and train the tokenizer on the rest if none is given."""
    from advanced.text import hold_out, pack, read_documents, train_tokenizer
    from tokenizer import Tokenizer

    train, held = [], []
    for number, path in enumerate(args.text):
        documents = read_documents(path)
        print(f"load {len(documents)} documents from {path}")
        for part, more in zip((train, held), hold_out(documents, args.held_out, args.seed + number), strict=True):
            part += more
    model = args.out.with_suffix(".model")
    if args.tokenizer is None:
        train_tokenizer((line for document in train for line in document.split("\n")), model, args.vocab_size)
    elif Path(args.tokenizer).resolve() != model.resolve():
        with atomic_write(model, "wb") as file:
            file.write(Path(args.tokenizer).read_bytes())
    tokenizer = Tokenizer(tokenizer_model=model)
    size = sum(len(document.encode()) for document in held)
    corpus = Corpus(tokenizer, pack(train, tokenizer), pack(held, tokenizer), size)
    print(f"{len(corpus.train)} tokens to train on, {len(corpus.held_out)} held out, {tokenizer.n_words} pieces")
    return corpus


def make_model(args: Namespace, tokenizer: Tokenizer) -> Llama:
    from llama import Llama, load_pretrained

    if args.init is None:
        shape = {name: getattr(args, name) for name in SHAPE} | {"vocab_size": tokenizer.n_words}
        model = Llama(LlamaConfig(attention="causal", **shape))
    else:
        model = load_pretrained(args.init, attention="causal")
    if tokenizer.n_words != model.config.vocab_size:
        raise UserError(f"{args.init} has a vocabulary of {model.config.vocab_size}, its tokenizer {tokenizer.n_words}")
    if args.length > model.config.max_seq_len:
        raise UserError(f"--length {args.length}: the model has {model.config.max_seq_len} positions")
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    return model


def make_optimizer(model: Llama, lr: float, weight_decay: float = 0.1) -> AdamW:
    """Weight decay on matrices only."""
    from optimizer import AdamW

    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def identity_of(args: Namespace, corpus: Corpus, config: LlamaConfig) -> dict[str, Any]:
    """What must be equal for a run to go on."""
    names = ("epochs", "lr", "warmup", "batch_size", "length", "weight_decay", "clip", "held_out", "every", "seed")
    return {
        "train": [sha256_of(path) for path in args.text],
        "init": None if args.init is None else sha256_of(args.init),
        "tokenizer": sha256_of(args.out.with_suffix(".model")),
        "model_args": asdict(config),
        **{name: getattr(args, name) for name in (*names, "precision")},
    }


def pretrain(args: Namespace, place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row of figures after every `--every` steps; the model is saved whenever it is the best."""
    import torch

    from advanced import create
    from advanced.text import training_batches
    from batches import TextWindows
    from runs import compute_fast
    from saver import Saver
    from tasks import NextToken
    from training import evaluate, fit

    corpus = read_corpus(args)
    torch.manual_seed(args.seed)
    model = make_model(args, corpus.tokenizer)
    compute_fast(model, args.precision, place)
    windows = len(corpus.train) // args.length
    steps = max(1, math.ceil(args.epochs * windows / args.batch_size))
    rounds = max(1, round(steps / args.every))
    per_round = math.ceil(steps / rounds)
    shape = corpus.tokenizer, args.length, args.batch_size
    train = training_batches(corpus.train, *shape, per_round, args.seed)
    held_out = TextWindows(corpus.held_out, corpus.tokenizer.bos_id, args.length).loader(args.batch_size)
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    methods = [create("schedule", {"warmup": args.warmup, "decay": "cosine"})]
    identity = identity_of(args, corpus, model.config)
    record = {"kind": "checkpoint", "model_args": asdict(model.config)}  # the course's layout
    saver = Saver(args.out, args.out.with_suffix(".resume"), record, identity, rounds, methods)
    task = NextToken()
    if args.init is not None:
        before = evaluate(model, held_out, task=task, desc="before")
        yield {"step": 0, "held_out": before.loss, **_in_other_units(before.loss, corpus)}
    history = resume(args, saver, model, optimizer)
    for result in history:
        yield row_of(result, per_round, corpus, args)
    settings = dict(methods=methods, clip=args.clip, saver=saver, history=history, train_eval=False, progress=False)
    for result in fit(model, optimizer, train, held_out, task=task, epochs=rounds, seed=args.seed, **settings):
        yield row_of(result, per_round, corpus, args)
    saver.resume_path.unlink(missing_ok=True)


def resume(args: Namespace, saver: Saver, model: Llama, optimizer: AdamW) -> list[EpochResult]:
    """Go back to the last measurement, if one is there and is asked for. Returns the rounds that are done."""
    from saver import OtherRun

    if not (args.resume and saver.resume_path.is_file()):
        return []
    try:
        history = saver.load_resume_point(model, optimizer)
    except OtherRun as error:
        raise UserError(f"{error}; use the same arguments, or leave out --resume to start anew") from None
    print(f"resuming from {saver.resume_path}")
    return history


def row_of(result: EpochResult, per_round: int, corpus: Corpus, args: Namespace) -> dict[str, Any]:
    tokens = per_round * args.batch_size * args.length
    figures = {"step": (result.epoch + 1) * per_round, "train": result.train_loss, "held_out": -result.dev_score}
    pace = {"seconds": result.seconds, "tokens_per_second": round(tokens / result.seconds)}
    return {**figures, **_in_other_units(-result.dev_score, corpus), **pace}


def _in_other_units(loss: float, corpus: Corpus) -> dict[str, float]:
    """Of a loss in nats a token: perplexity, and bits a byte, which models of other vocabularies share."""
    bits = loss * len(corpus.held_out) / math.log(2) / corpus.held_out_bytes
    return {"perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def line_of(row: dict[str, Any]) -> str:
    train = f"train loss :: {row['train']:.3f}, " if "train" in row else ""
    speed = f", {row['tokens_per_second']} tokens a second" if "tokens_per_second" in row else ""
    held_out = f"held-out loss :: {row['held_out']:.4f}, perplexity :: {row['perplexity']:.2f}"
    return f"step {row['step']}: {train}{held_out}, bits a byte :: {row['bits_per_byte']:.4f}{speed}"


def write_figures(args: Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Everything that tells how NEW.pt was made; no path, no text."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "resume", "tokenizer")}
    settings |= {"text": [Path(path).name for path in args.text], "init": args.init and Path(args.init).name}
    curve = [{name: round(value, 5) for name, value in row.items()} for row in rows]
    content = {"settings": settings, "seconds": round(sum(row.get("seconds", 0) for row in rows)), "curve": curve}
    with atomic_write(args.out.with_suffix(".json")) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def main() -> None:
    args = get_args()
    check_args(args)
    from plan import Place
    from utils import choose_device, seed_everything

    seed_everything(args.seed)
    rows: list[dict[str, Any]] = []
    for row in pretrain(args, Place(choose_device(args.device))):
        rows.append(row)
        print(line_of(row), flush=True)
        write_figures(args, rows)
    best = min((row for row in rows if "train" in row), key=lambda row: row["held_out"])
    print(f"save the model to {args.out} (step {best['step']}, held-out perplexity {best['perplexity']:.2f})")
    if best["held_out"] >= rows[0]["held_out"] and best is not rows[0]:
        warn(f"it predicts the held-out text no better than {args.init} did; a smaller --lr may help")


if __name__ == "__main__":
    sys.exit(run_main(main))
