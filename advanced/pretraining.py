"""The run of `advanced.pretrain`: texts as windows, the model, the loop, what is saved and gone on from."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from advanced import create
from advanced.pretrain import SHAPE, check_length, check_out, lock_of
from advanced.text import hold_out, pack, read_documents, train_tokenizer, training_batches
from batches import TextWindows
from config import LlamaConfig
from llama import Llama, load_pretrained
from optimizer import AdamW
from plan import Place
from runs import compute_fast
from saver import OtherRun, Saver
from storage import NameLock
from tasks import NextToken
from tokenizer import Tokenizer
from training import EpochResult, evaluate, fit
from utils import UserError, atomic_write, check_new, sha256_of


class Corpus(NamedTuple):
    """A packed text to train on, and one held out. tokenizer_file: what is written beside the checkpoint."""

    tokenizer: Tokenizer
    tokenizer_file: bytes
    train: list[int]
    held_out: list[int]
    held_out_bytes: int


def read_corpus(args: Namespace) -> Corpus:
    """Read the texts, hold out a part of each, and train the tokenizer on the rest if none is given."""
    train, held = [], []
    for number, path in enumerate(args.text):
        documents = read_documents(path)
        print(f"load {len(documents)} documents from {path}")
        for part, more in zip((train, held), hold_out(documents, args.held_out, args.seed + number), strict=True):
            part += more
    if args.tokenizer is None:
        model = train_tokenizer((line for document in train for line in document.split("\n")), args.vocab_size)
    else:
        model = Path(args.tokenizer).read_bytes()
    tokenizer = Tokenizer.from_bytes(model, path=args.tokenizer or "the tokenizer of these texts")
    size = sum(len(document.encode()) for document in held)
    corpus = Corpus(tokenizer, model, pack(train, tokenizer), pack(held, tokenizer), size)
    print(f"{len(corpus.train)} tokens to train on, {len(corpus.held_out)} held out, {tokenizer.n_words} pieces")
    return corpus


def make_model(args: Namespace, tokenizer: Tokenizer) -> Llama:
    if args.init is None:
        shape = {name: getattr(args, name) for name in SHAPE} | {"vocab_size": tokenizer.n_words}
        model = Llama(LlamaConfig(attention="causal", **shape))
    else:
        model = load_pretrained(args.init, attention="causal")
    if tokenizer.n_words != model.config.vocab_size:
        pieces = f"{args.tokenizer} has {tokenizer.n_words} pieces"
        raise UserError(f"{pieces}, and {args.init} a vocabulary of {model.config.vocab_size}")
    check_length(args, model.config.max_seq_len)
    for name in SHAPE:  # as it is, for the figures
        setattr(args, name, getattr(model.config, name))
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    return model


def make_optimizer(model: Llama, lr: float, weight_decay: float = 0.1) -> AdamW:
    """Weight decay on matrices only."""
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
        "tokenizer": hashlib.sha256(corpus.tokenizer_file).hexdigest(),
        "model_args": asdict(config),
        **{name: getattr(args, name) for name in (*names, "precision")},
    }


@dataclass
class SaverWithTokenizer(Saver):
    """Writes NEW.model with the first NEW.pt: neither is there while nothing has been learned.

    Raises `UserError` where somebody else has made one of them since the run began.
    """

    tokenizer_file: bytes = b""
    has_saved: bool = False

    def save_model(self, model: nn.Module, result: EpochResult) -> None:
        if not self.has_saved:
            check_new(self.model_path, "--out")
            self.save_tokenizer()
        super().save_model(model, result)

    def save_tokenizer(self) -> None:
        path = self.model_path.with_suffix(".model")
        if not path.exists():
            with atomic_write(path, "wb") as file:
                file.write(self.tokenizer_file)
        elif path.read_bytes() != self.tokenizer_file:
            raise UserError(f"--out {self.model_path}: {path} is another tokenizer than this run's; move it away")
        self.has_saved = True


def pretrain(args: Namespace, place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row of figures after about every `--every` steps; the model is saved whenever it is the best.

    Raises `UserError` where another process uses `--out`, or a text is too short.
    """
    lock = NameLock(lock_of(args.out))
    if holder := lock.acquire():
        raise UserError(f"--out {args.out} is in use by {holder}")
    try:
        check_out(args)  # once more: another run may have ended since
        yield from _pretrain(args, place)
    finally:
        lock.release()


def _pretrain(args: Namespace, place: Place) -> Iterator[dict[str, Any]]:
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
    record = {"kind": "checkpoint", "model_args": asdict(model.config)}  # the course's layout
    files, identity = (args.out, args.out.with_suffix(".resume")), identity_of(args, corpus, model.config)
    saver = SaverWithTokenizer(*files, record, identity, rounds, methods, tokenizer_file=corpus.tokenizer_file)
    task = NextToken()
    if args.init is not None:
        before = evaluate(model, held_out, task=task, desc="before")
        yield {"step": 0, "held_out": before.loss, **_in_other_units(before.loss, corpus)}
    if history := resume(args, saver, model, optimizer):
        saver.save_tokenizer()
    for result in history:
        yield row_of(result, per_round, corpus, args)
    settings = dict(methods=methods, clip=args.clip, saver=saver, history=history, train_eval=False, progress=False)
    for result in fit(model, optimizer, train, held_out, task=task, epochs=rounds, seed=args.seed, **settings):
        yield row_of(result, per_round, corpus, args)
    saver.resume_path.unlink(missing_ok=True)


def resume(args: Namespace, saver: Saver, model: Llama, optimizer: AdamW) -> list[EpochResult]:
    """Go back to the last measurement, if one is there and is asked for. Returns the rounds that are done."""
    if not args.resume:
        return []
    if not saver.resume_path.is_file():
        print(f"there is no resume point {saver.resume_path}; starting from the beginning")
        return []
    try:
        history = saver.load_resume_point(model, optimizer)
    except OtherRun as error:
        raise UserError(f"{error}; use the same arguments, or name another --out") from None
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
