"""One epoch of fine-tuning on SST: training, then accuracy on the training and on the dev data, as the course runs it.

An epoch is measured on a sample of its batches and scaled up by their number. Batches differ in length, so they are
sorted by the numbers that they hold, padding included, and every n-th is taken from a random start: short and long
ones are met in the epoch's own proportions. With every = 1 the epoch is whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from benchmarks import naive
from benchmarks.sentences import MeasuredSentences
from engine.batches import EncodingRules, LlamaDataset
from engine.training import Trainer


class FixedBatches(Sampler[list[int]]):
    """The same batches in every pass. `seconds`: how long each pass took whoever asked for them, collation included."""

    def __init__(self, batches: Sequence[list[int]], batch_size: int):
        self.batches, self.batch_size = batches, batch_size
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        start = time.perf_counter()
        yield from self.batches
        self.seconds.append(time.perf_counter() - start)


class Phases(NamedTuple):
    """Estimated seconds of a whole epoch's parts. `encoding` is what is done once before the first epoch."""

    training: float
    train_evaluation: float
    dev_evaluation: float
    encoding: float

    @property
    def total(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        parts = " + ".join(f"{seconds:.1f}" for seconds in self)
        return f"{parts} s (training, train evaluation, dev evaluation, encoding)"


def sampled(batches: list[list[int]], lengths: Sequence[int], every: int, draw: random.Random) -> list[list[int]]:
    """Every `every`-th batch in the order of padded size, from a random start, then shuffled again."""
    by_size = sorted(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch))
    every = min(every, len(by_size))
    chosen = by_size[draw.randrange(every) :: every]
    draw.shuffle(chosen)
    return chosen


class Epoch:
    """One contender's epoch: its model, its optimizer, its batches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_loader: DataLoader,
        dev_loader: DataLoader,
        lengths: dict[str, list[int]],
        every: int,
        seed: int,
    ):
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self.phases: list[Phases] = []
        self.encoding = 0.0
        draw = random.Random(seed)
        self.train_loader, self.train_scale = _fixed(train_loader, lengths["train"], every, draw)
        self.dev_loader, self.dev_scale = _fixed(dev_loader, lengths["dev"], every, draw)

    def run(self) -> float:
        """Estimated seconds of a whole epoch."""
        train_passes, dev_passes = self.train_loader.batch_sampler.seconds, self.dev_loader.batch_sampler.seconds
        self._train_and_evaluate()
        training, train_evaluation = (seconds * self.train_scale for seconds in train_passes[-2:])
        phases = Phases(training, train_evaluation, dev_passes[-1] * self.dev_scale, self.encoding)
        self.phases.append(phases)
        return phases.total

    def _train_and_evaluate(self) -> None:
        """The package's own loop, around whatever model it is given; it writes no file."""
        trainer = Trainer(self.model, self.optimizer, progress=False)
        for _ in trainer.fit(self.train_loader, self.dev_loader, epochs=1):
            pass


class NaiveEpoch(Epoch):
    """The course's loop."""

    def _train_and_evaluate(self) -> None:
        batch_size = self.train_loader.batch_sampler.batch_size
        naive.train_epoch(self.model, self.optimizer, self.train_loader, batch_size, self.device)
        for loader in (self.train_loader, self.dev_loader):
            naive.evaluate(self.model, loader, self.device)


def _fixed(loader: DataLoader, lengths: Sequence[int], every: int, draw: random.Random) -> tuple[DataLoader, float]:
    """A loader of a sample of `loader`'s batches, and how many there are for each that was chosen."""
    batches = list(loader.batch_sampler)
    chosen = sampled(batches, lengths, every, draw)
    fixed = FixedBatches(chosen, loader.batch_sampler.batch_size)
    return DataLoader(loader.dataset, batch_sampler=fixed, collate_fn=loader.collate_fn), len(batches) / len(chosen)


def our_epoch(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    sentences: MeasuredSentences,
    batch_size: int,
    every: int,
    seed: int,
    *,
    rules: EncodingRules,
    bucket: bool,
) -> Epoch:
    """Sentences encoded once, with the package's data set and batches."""
    start = time.perf_counter()
    train, dev = (LlamaDataset(part, sentences.tokenizer, rules) for part in (sentences.train, sentences.dev))
    encoding = time.perf_counter() - start
    lengths = {"train": [len(ids) for ids in train.token_ids], "dev": [len(ids) for ids in dev.token_ids]}
    loaders = (train.loader(batch_size, shuffle=True, bucket=bucket), dev.loader(batch_size, bucket=bucket))
    epoch = Epoch(model, make_optimizer(model), *loaders, lengths, every, seed)
    epoch.encoding = encoding
    return epoch


def naive_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sentences: MeasuredSentences,
    batch_size: int,
    every: int,
    seed: int,
) -> NaiveEpoch:
    """Sentences encoded in every batch; encoded here too, outside every clock, to know their lengths."""
    train, dev = (naive.SentenceDataset(part, sentences.tokenizer) for part in (sentences.train, sentences.dev))
    lengths = {}
    for split, part in (("train", sentences.train), ("dev", sentences.dev)):
        ids = sentences.tokenizer.encode_batch([example.sentence for example in part], True, False)
        lengths[split] = [len(row) for row in ids]
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True, collate_fn=train.collate_fn)
    dev_loader = DataLoader(dev, batch_size=batch_size, collate_fn=dev.collate_fn)
    return NaiveEpoch(model, optimizer, train_loader, dev_loader, lengths, every, seed)
