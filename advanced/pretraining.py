"""The run of `advanced.pretrain`: windows of texts, the model, its files, its figures."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import LlamaConfig
from engine.methods import EpochResult
from engine.plan import ComputeSettings
from engine.runs import compute_fast
from engine.tasks import NextToken, TextWindows, perplexity_of
from engine.text.flags import Outputs, Row, check_length
from engine.text.runs import (
    Rounds,
    TextSaver,
    alone,
    identity_of,
    paced,
    pack,
    train_and_held_out,
    train_in_rounds,
    train_tokenizer,
    training_batches,
)
from engine.training import evaluate
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, atomic_write, sha256_of


class TextCorpus(NamedTuple):
    """Tokens to train on, and held-out ones. tokenizer_file: the bytes of NEW.model."""

    tokenizer: Tokenizer
    tokenizer_file: bytes
    train: list[int]
    held_out: list[int]
    held_out_bytes: int


def read_corpus(args: Namespace) -> TextCorpus:
    """Read the texts, hold out a part of each, and train the tokenizer on the rest if none is given."""
    train, held = train_and_held_out(args)
    if args.tokenizer is None:
        model = train_tokenizer((line for document in train for line in document.split("\n")), args.vocab_size)
    else:
        model = Path(args.tokenizer).read_bytes()
    tokenizer = Tokenizer.from_bytes(model, path=args.tokenizer or "the tokenizer of these texts")
    size = sum(len(document.encode()) for document in held)
    corpus = TextCorpus(tokenizer, model, pack(train, tokenizer), pack(held, tokenizer), size)
    print(f"{len(corpus.train)} tokens to train on, {len(corpus.held_out)} held out, {tokenizer.n_words} pieces")
    return corpus


def make_model(args: Namespace, tokenizer: Tokenizer, sizes: Collection[str]) -> Llama:
    """sizes: the fields of its config that flags give."""
    if args.init is None:
        shape = {name: getattr(args, name) for name in sizes} | {"vocab_size": tokenizer.n_words}
        model = Llama(LlamaConfig(attention="causal", **shape))
    else:
        model = load_llama_model(args.init, attention="causal")
    if tokenizer.n_words != model.config.vocab_size:
        pieces = f"{args.tokenizer} has {tokenizer.n_words} pieces"
        raise UserError(f"{pieces}, and {args.init} a vocabulary of {model.config.vocab_size}")
    check_length(args, model.config.max_seq_len)
    for name in sizes:  # as it is, for the figures
        setattr(args, name, getattr(model.config, name))
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    return model


def identity_with(args: Namespace, corpus: TextCorpus, config: LlamaConfig) -> dict[str, Any]:
    tokenizer = hashlib.sha256(corpus.tokenizer_file).hexdigest()
    init = None if args.init is None else sha256_of(args.init)
    return identity_of(args, init=init, tokenizer=tokenizer, model_args=asdict(config), precision=args.precision)


@dataclass
class SaverWithTokenizer(TextSaver):
    """Writes NEW.model with the first NEW.pt."""

    tokenizer_file: bytes = b""

    def save_beside(self) -> None:
        path = self.model_path.with_suffix(".model")
        if not path.exists():
            with atomic_write(path, "wb") as file:
                file.write(self.tokenizer_file)
        elif path.read_bytes() != self.tokenizer_file:
            raise UserError(f"--out {self.model_path}: {path} is another tokenizer than this run's; move it away")
        super().save_beside()


def pretrain(args: Namespace, compute: ComputeSettings, outputs: Outputs, sizes: Collection[str]) -> Iterator[Row]:
    """Yields a row of figures after about every `--every` steps; the model is saved whenever it is the best.

    outputs: what is written. sizes: the fields of the config that flags give. Raises `UserError` where another process
    uses `--out`, or a text is too short.
    """
    yield from alone(args, outputs, lambda: _pretrain(args, compute, outputs, sizes))


def _pretrain(args: Namespace, compute: ComputeSettings, outputs: Outputs, sizes: Collection[str]) -> Iterator[Row]:
    corpus = read_corpus(args)
    torch.manual_seed(args.seed)
    model = make_model(args, corpus.tokenizer, sizes)
    compute_fast(model, compute)
    rounds = Rounds.of(args, len(corpus.train) // args.length)
    train = training_batches(corpus.train, corpus.tokenizer, args.length, args.batch_size, rounds.steps, args.seed)
    held_out = TextWindows(corpus.held_out, corpus.tokenizer.bos_id, args.length).loader(args.batch_size)
    methods = [paced(args)]
    record = {"kind": "checkpoint", "model_args": asdict(model.config)}  # the course's layout
    checkpointer = SaverWithTokenizer(
        outputs.model, outputs.point, record, identity_with(args, corpus, model.config), rounds.total, methods,
        tokenizer_file=corpus.tokenizer_file,
    )  # fmt: skip
    task = NextToken()
    if args.init is not None:
        before = evaluate(model, held_out, task=task, desc="before")
        yield {"step": 0, "held_out": before.loss, **_in_other_units(before.loss, corpus)}
    for result in train_in_rounds(args, model, train, held_out, checkpointer, task, methods):
        yield row_of(result, rounds.steps, corpus, args)


def row_of(result: EpochResult, steps: int, corpus: TextCorpus, args: Namespace) -> Row:
    tokens = steps * args.batch_size * args.length
    figures = {"step": (result.epoch + 1) * steps, "train": result.train_loss, "held_out": -result.dev_score}
    pace = {"seconds": result.seconds, "tokens_per_second": round(tokens / result.seconds)}
    return {**figures, **_in_other_units(-result.dev_score, corpus), **pace}


def _in_other_units(loss: float, corpus: TextCorpus) -> dict[str, float]:
    """Perplexity of a loss in nats a token, and bits a byte, which can be compared between vocabularies."""
    bits = loss * len(corpus.held_out) / math.log(2) / corpus.held_out_bytes
    return {"perplexity": perplexity_of(loss), "bits_per_byte": bits}
