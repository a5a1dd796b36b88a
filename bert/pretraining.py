"""The run of `bert.pretrain`: texts as pairs with masked tokens, the model, its files, its figures."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from bert.config import NEW_BERT, config_of
from bert.directory import DirectoryCheckpointer
from bert.examples import Noise, PretrainingData, sentences_of
from bert.heads import BertForMaskedLM, BertForPreTraining
from bert.load import load_model, load_tokenizer, read_vocabulary
from bert.model import Bert
from bert.pairs import Document
from bert.tasks import Pretraining, PretrainingEvaluation
from bert.vocabulary import train_vocabulary
from bert.wordpiece import WordPiece
from convert.directory import VOCABULARY
from engine.methods import EpochResult, Method
from engine.plan import ComputeSettings, checksum, origin
from engine.runs import compute_fast
from engine.tasks import NO_TARGET
from engine.text.flags import Outputs, Row, check_length
from engine.text.runs import Rounds, alone, identity_of, paced, train_and_held_out, train_in_rounds
from engine.training import evaluate
from utils import UserError

TASK_FLAGS = ("no_nsp", "share", "mask", "random", "whole_words", "static")


class PretrainingCorpus(NamedTuple):
    """The token ids of documents to train on, and of those held out."""

    tokenizer: WordPiece
    train: list[Document]
    held_out: list[Document]


def read_corpus(args: Namespace) -> PretrainingCorpus:
    """Read the texts, hold out a part of each, and train the vocabulary on the rest if none is given."""
    train, held = train_and_held_out(args)
    if args.init is not None:
        tokenizer = load_tokenizer(args.init)
    elif args.tokenizer is not None:
        tokenizer = read_vocabulary(args.tokenizer, lower_case=False if args.cased else None)
    else:
        lines = (line for document in train for line in document.split("\n"))
        tokenizer = train_vocabulary(lines, args.vocab_size, lower_case=not args.cased)
    corpus = PretrainingCorpus(tokenizer, *([*sentences_of(documents, tokenizer)] for documents in (train, held)))
    counts = [sum(map(len, (line for document in part for line in document))) for part in corpus[1:]]
    print(f"{counts[0]} tokens to train on, {counts[1]} held out, {len(tokenizer)} pieces")
    return corpus


def data_of(args: Namespace, corpus: PretrainingCorpus) -> tuple[PretrainingData, PretrainingData]:
    """The training examples, and the held-out ones, which are the same in every measurement."""
    noise = Noise(args.share, args.mask, args.random, args.whole_words)
    shape = corpus.tokenizer, args.length, noise, not args.no_nsp
    if len(corpus.train) < 2 - args.no_nsp:
        raise UserError(f"--held_out {args.held_out} leaves {len(corpus.train)} documents to train on")
    train = PretrainingData(corpus.train, *shape, is_dynamic=not args.static, seed=args.seed)
    try:
        return train, PretrainingData(corpus.held_out, *shape, is_dynamic=False, seed=args.seed + 1)
    except UserError as error:
        raise UserError(f"--held_out {args.held_out} is too little: {error}") from None


def new_model(args: Namespace, tokenizer: WordPiece) -> nn.Module:
    return _counted(_with_heads(args)(Bert(config_of(args, len(tokenizer), tokenizer.pad_id))))


def model_of_init(args: Namespace) -> nn.Module:
    """The model of --init, whose shape is noted in `args`. Raises `UserError` for one that cannot be trained so."""
    model, new = load_model(args.init, _with_heads(args))
    if new:
        print(f"{args.init} has no {' and no '.join(new)}: what it lacks begins anew")
    config = model.encoder.config
    if not (args.no_nsp or (config.has_pooler or config.plain_heads) and config.n_texts > 1):
        lacks = f"--init {args.init} has no pooler or no second segment"
        raise UserError(f"{lacks} to tell next sentences by; add --no_nsp")
    check_length(args, config.max_seq_len)
    for name in (*NEW_BERT, "dropout"):  # for the file of figures
        setattr(args, name, getattr(config, name))
    args.textbook = config.plain_heads
    return _counted(model)


def _with_heads(args: Namespace) -> type[nn.Module]:
    return BertForMaskedLM if args.no_nsp else BertForPreTraining


def _counted(model: nn.Module) -> nn.Module:
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    return model


class Recording(Method):
    """Keeps the figures of all measurements, in the resume point as well. It moves no weights."""

    name = "recording"

    def __init__(self, task: Pretraining) -> None:
        super().__init__()
        self.asked, self.earlier = task, []

    @property
    def rows(self) -> list[dict[str, float]]:
        """The figures of each measurement, those of the resumed run first."""
        return [*self.earlier, *map(figures_of, self.asked.evaluations)]

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if not all(isinstance(value, float) for row in state["rows"] for value in row.values()):
            raise ValueError("no figures")
        self.earlier = [dict(row) for row in state["rows"]]


def figures_of(found: PretrainingEvaluation) -> dict[str, float]:
    words, hidden, nexts = found.words, found.hidden, found.nexts
    figures = {"held_out": -found.score, "word_loss": words.loss}
    figures |= {"perplexity": words.perplexity, "word_accuracy": words.accuracy}
    if hidden.count:
        figures |= {"hidden_perplexity": hidden.perplexity, "hidden_accuracy": hidden.accuracy}
    if nexts.count:
        figures |= {"next_loss": nexts.loss, "next_accuracy": nexts.accuracy}
    return figures


def unigrams(train: Sequence[Document], held_out: PretrainingData) -> dict[str, float]:
    """Perplexity and accuracy at the held-out masks, predicted from the frequencies of tokens alone.

    Each token counts once more than it was seen, so that none is impossible.
    """
    counts = Counter(token for document in train for sentence in document for token in sentence)
    size = len(held_out.tokenizer)
    total = counts.total() + size
    most = counts.most_common(1)[0][0]
    targets = [token for index in range(held_out.count) for token in held_out[0, index]["targets"]]
    asked = [token for token in targets if token != NO_TARGET]
    loss = -sum(math.log((counts[token] + 1) / total) for token in asked) / len(asked)
    right = sum(token == most for token in asked) / len(asked)
    return {"unigram_perplexity": math.exp(loss), "unigram_accuracy": right}


def pretrain(args: Namespace, compute: ComputeSettings, outputs: Outputs) -> Iterator[Row]:
    """Yields a row of figures after about every `--every` steps, and saves the model whenever it is the best.

    outputs: the files of the run. Raises `UserError` if another process uses `--out`, or a text is too short.
    """
    yield from alone(args, outputs, lambda: _pretrain(args, compute, outputs))


def _pretrain(args: Namespace, compute: ComputeSettings, outputs: Outputs) -> Iterator[Row]:
    torch.manual_seed(args.seed)
    model = None if args.init is None else model_of_init(args)  # first: reading the texts takes longer
    corpus = read_corpus(args)
    if model is None:
        model = new_model(args, corpus.tokenizer)
    corpus.tokenizer.first_segment = model.encoder.config.first_segment
    train, held_out = data_of(args, corpus)
    tokens = sum(len(pair.a) + len(pair.b) for pair in train.pairs(0))
    print(f"{train.count} rows in a pass, of {tokens} tokens")
    compute_fast(model, compute)
    rounds = Rounds.of(args, train.count)
    task = Pretraining()
    recording = Recording(task)
    methods = [paced(args), recording]
    identity = identity_of(
        args,
        init=None if args.init is None else checksum(args.init),
        tokenizer=hashlib.sha256(corpus.tokenizer.to_bytes()).hexdigest(),
        model_args=asdict(model.encoder.config),
        **{name: getattr(args, name) for name in TASK_FLAGS},
    )
    checkpointer = DirectoryCheckpointer(
        outputs.model, outputs.point, {}, identity, rounds.total, methods, tokenizer=corpus.tokenizer
    )
    batches = train.training_batches(args.batch_size, rounds.steps), held_out.batches(args.batch_size)
    first = {"step": 0, **unigrams(corpus.train, held_out)}
    if args.init is not None:
        first |= figures_of(evaluate(model, batches[1], task=Pretraining(), desc="before"))
    yield first
    for result in train_in_rounds(args, model, *batches, checkpointer, task, methods):
        yield row_of(result, recording.rows[result.epoch], rounds.steps, args)


def row_of(result: EpochResult, figures: dict[str, float], steps: int, args: Namespace) -> Row:
    pace = {"seconds": result.seconds, "rows_per_second": round(steps * args.batch_size / result.seconds, 1)}
    return {"step": (result.epoch + 1) * steps, "train": result.train_loss, **figures, **pace}


def record_of(args: Namespace) -> dict[str, Any]:
    """The inputs of the finished model, for `engine.plan`."""
    return {"made_of": origin(args.text, args.out / VOCABULARY, args.init), "weights": checksum(args.out)}
