"""One epoch of fine-tuning on SST: training, then accuracy on the training and on the dev data, as the course runs it.

An epoch is measured on a sample of its batches and scaled up by their number. Batches differ in length, so they are
sorted by the numbers that they hold, padding included, and every n-th is taken from a random start: short and long
ones are met in the epoch's own proportions. With every = 1 the epoch is whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from benchmarks import naive
from benchmarks.sentences import MeasuredSentences
from engine.tasks import EncodingRules, LlamaDataset
from engine.training import Trainer


class FixedBatches(Sampler[list[int]]):
    """The same batches in every pass. `seconds`: of each pass, from its first batch to the end, collation included."""

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


class Sample(NamedTuple):
    """The batches of an epoch that are measured: every `every`-th, drawn from `seed`."""

    batch_size: int
    every: int
    seed: int


def sampled(batches: list[list[int]], lengths: Sequence[int], every: int, draw: random.Random) -> list[list[int]]:
    """Every `every`-th batch in the order of padded size, from a random start, then shuffled again."""
    by_size = sorted(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch))
    every = min(every, len(by_size))
    chosen = by_size[draw.randrange(every) :: every]
    draw.shuffle(chosen)
    return chosen


class Epoch:
    """One contender's epoch: its model, its optimizer, a sample of its batches.

    lengths: tokens of each sentence of train and of dev. encoding: seconds that were spent before the first epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loaders: tuple[DataLoader, DataLoader],
        lengths: tuple[list[int], list[int]],
        sample: Sample,
        encoding: float = 0.0,
    ):
        self.model, self.optimizer, self.encoding = model, optimizer, encoding
        self.phases: list[Phases] = []
        draw = random.Random(sample.seed)
        self.train_loader, self.train_scale = _fixed(loaders[0], lengths[0], sample.every, draw)
        self.dev_loader, self.dev_scale = _fixed(loaders[1], lengths[1], sample.every, draw)

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
        naive.train_epoch(self.model, self.optimizer, self.train_loader, batch_size)
        for loader in (self.train_loader, self.dev_loader):
            naive.evaluate(self.model, loader)


def _fixed(loader: DataLoader, lengths: Sequence[int], every: int, draw: random.Random) -> tuple[DataLoader, float]:
    """A loader of a sample of `loader`'s batches, and how many there are for each that was chosen."""
    batches = list(loader.batch_sampler)
    chosen = sampled(batches, lengths, every, draw)
    fixed = FixedBatches(chosen, loader.batch_sampler.batch_size)
    return DataLoader(loader.dataset, batch_sampler=fixed, collate_fn=loader.collate_fn), len(batches) / len(chosen)


def our_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sentences: MeasuredSentences,
    sample: Sample,
    rules: EncodingRules,
    *,
    bucket: bool,
) -> Epoch:
    """Sentences encoded once, with the package's data set and batches."""
    start = time.perf_counter()
    train, dev = (LlamaDataset(part, sentences.tokenizer, rules) for part in (sentences.train, sentences.dev))
    encoding = time.perf_counter() - start
    lengths = [len(ids) for ids in train.token_ids], [len(ids) for ids in dev.token_ids]
    loaders = train.loader(sample.batch_size, shuffle=True, bucket=bucket), dev.loader(sample.batch_size, bucket=bucket)
    return Epoch(model, optimizer, loaders, lengths, sample, encoding)


def naive_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, sentences: MeasuredSentences, sample: Sample
) -> NaiveEpoch:
    """Sentences encoded in every batch; encoded here too, outside every clock, to know their lengths."""
    loaders, lengths = [], []
    for part, shuffle in ((sentences.train, True), (sentences.dev, False)):
        collate = partial(naive.collate, sentences.tokenizer)
        loaders.append(DataLoader(part, sample.batch_size, shuffle, collate_fn=collate))
        ids = sentences.tokenizer.encode_batch([example.sentence for example in part], True, False)
        lengths.append([len(row) for row in ids])
    return NaiveEpoch(model, optimizer, loaders, lengths, sample)
