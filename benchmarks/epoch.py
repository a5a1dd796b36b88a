"""One epoch of fine-tuning on SST: training, then accuracy on the training and on the dev data, as the course runs it.

An epoch is measured on a sample of its batches and scaled up by their number. Batches differ in length, so they are
sorted by the numbers that they hold, padding included, and every n-th is taken from a random start: short and long
ones are met in the epoch's own proportions. With every = 1 the epoch is whole.

The course's loop is here as well: batches in random order whatever their lengths are, tokenised and padded every time
they are needed, and an evaluation that keeps what a backward pass would need.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler

from benchmarks import peers
from benchmarks.bench import Bench, Line
from benchmarks.sentences import IdTokenizer, MeasuredSentences
from benchmarks.table import COURSE, OURS, Work
from engine.data import Example
from engine.tasks import EncodingRules, LlamaDataset, padded
from engine.training import Trainer
from tokenizer import Tokenizer

MAX_EPOCHS = 3  # rounds at most

Loop = Callable[[nn.Module, torch.optim.Optimizer, DataLoader, DataLoader], None]  # with the loaders of train and dev


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


def sampled(batches: list[list[int]], lengths: Sequence[int], every: int, draw: random.Random) -> list[list[int]]:
    """Every `every`-th batch in the order of padded size, from a random start, then shuffled again."""
    by_size = sorted(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch))
    every = min(every, len(by_size))
    chosen = by_size[draw.randrange(every) :: every]
    draw.shuffle(chosen)
    return chosen


class Epoch:
    """One contender's epoch: its model, its optimizer, a sample of its batches, its loop.

    lengths: tokens of each sentence of train and of dev. encoding: seconds that were spent before the first epoch.
    `parts`: seconds of training, of evaluating train and dev, and of encoding, in the last run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loop: Loop,
        loaders: Sequence[DataLoader],
        lengths: Sequence[Sequence[int]],
        every: int,
        encoding: float = 0.0,
    ):
        self.model, self.optimizer, self.loop, self.encoding = model, optimizer, loop, encoding
        self.parts: list[float] = []
        draw = random.Random(peers.SEED)
        self.loaders, self.scales = [], []
        for loader, tokens in zip(loaders, lengths, strict=True):
            batches = list(loader.batch_sampler)
            fixed = FixedBatches(sampled(batches, tokens, every, draw), loader.batch_sampler.batch_size)
            self.loaders.append(DataLoader(loader.dataset, batch_sampler=fixed, collate_fn=loader.collate_fn))
            self.scales.append(len(batches) / len(fixed))

    def warm_up(self) -> None:
        """A step on one batch: a whole round would take as long as a measured one."""
        batch = next(iter(self.loaders[1]))
        peers.train_step(self.model, self.optimizer, peers.Batch((batch["token_ids"],), batch["labels"]))

    def run(self) -> float:
        """Estimated seconds of a whole epoch."""
        self.loop(self.model, self.optimizer, *self.loaders)
        training, on_train, on_dev = self._last(0, -2), self._last(0, -1), self._last(1, -1)
        self.parts = [training, on_train, on_dev, self.encoding]
        return sum(self.parts)

    def _last(self, split: int, which: int) -> float:
        return self.loaders[split].batch_sampler.seconds[which] * self.scales[split]


def our_loop(model: nn.Module, optimizer: torch.optim.Optimizer, train: DataLoader, dev: DataLoader) -> None:
    """The package's loop around any model; it writes no file."""
    for _ in Trainer(model, optimizer, progress=False).fit(train, dev, epochs=1):
        pass


def course_loop(model: nn.Module, optimizer: torch.optim.Optimizer, train: DataLoader, dev: DataLoader) -> None:
    """Training, then accuracy and macro-F1 on train and on dev, gradients not switched off."""
    model.train()
    for batch in train:
        optimizer.zero_grad()
        log_probs = model(batch["token_ids"])
        loss = F.nll_loss(log_probs, batch["labels"], reduction="sum") / train.batch_sampler.batch_size
        loss.backward()
        optimizer.step()
        loss.item()
    for loader in (train, dev):
        evaluate(model, loader)


def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Accuracy and macro-F1."""
    from sklearn.metrics import accuracy_score, f1_score

    model.eval()
    gold, predicted = [], []
    for batch in loader:
        predicted.extend(model(batch["token_ids"]).detach().numpy().argmax(axis=1))
        gold.extend(batch["labels"].tolist())
    return float(accuracy_score(gold, predicted)), float(f1_score(gold, predicted, average="macro"))


def collate(tokenizer: Tokenizer | IdTokenizer, examples: list[Example]) -> dict[str, torch.Tensor]:
    """A batch, tokenised and padded when it is needed: token_ids b s, labels b"""
    encoded = [tokenizer.encode(example.sentence, bos=True, eos=False) for example in examples]
    labels = torch.tensor([example.label for example in examples])
    return {"token_ids": padded(encoded, tokenizer.pad_id), "labels": labels}


def epochs(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """Ours, in buckets where it is causal; the course's, bidirectional; transformers in our loop, without buckets."""
    return [line for work in works for line in _epoch_lines(bench, work)]


def _epoch_lines(bench: Bench, work: Work) -> list[Line]:
    contenders, every = {}, bench.sizes.every
    for name in (OURS, *bench.able(work.against)):
        with bench.attempt(name):
            attention = "bidirectional" if name == COURSE else work.attention
            model = bench.peers.classifier(name, work.precision, attention, trains=True)
            rules = EncodingRules(None, bench.config.max_seq_len, attention == "causal")
            contenders[name] = make_epoch(name, model, bench.sentences, bench.sizes.batch_size, every, rules)
            contenders[name].warm_up()
    runs = {name: contender.run for name, contender in contenders.items() if bench.has(name)}
    costs = bench.race(work, runs, warm_up=0, most=MAX_EPOCHS)
    lines = bench.lines(work, costs)
    for line in lines:
        if line.ratio is not None:
            ours, theirs = (" + ".join(f"{part:.1f}" for part in contenders[name].parts) for name in line.costs)
            line.note = f"from one batch in {every}; training, evaluations, encoding: ours {ours} s, theirs {theirs} s"
    return lines


def make_epoch(
    name: str, model: nn.Module, data: MeasuredSentences, batch_size: int, every: int, rules: EncodingRules
) -> Epoch:
    """The epoch of `name`. Of ours in buckets where `rules` are of a causal model; transformers has none in our loop.

    The course encodes in every batch; here its sentences are encoded too, outside every clock, to know their lengths.
    """
    optimizer, parts = peers.optimizer(name, model), (data.train, data.dev)
    if name == COURSE:
        make = partial(collate, data.tokenizer)
        loaders = [DataLoader(part, batch_size, part is data.train, collate_fn=make) for part in parts]
        texts = ([example.sentence for example in part] for part in parts)
        lengths = [[len(ids) for ids in data.tokenizer.encode_batch(each, True, False)] for each in texts]
        return Epoch(model, optimizer, course_loop, loaders, lengths, every)
    start = time.perf_counter()
    sets = [LlamaDataset(part, data.tokenizer, rules) for part in parts]
    encoding = time.perf_counter() - start
    lengths = [[len(ids) for ids in each.token_ids] for each in sets]
    bucket = rules.is_causal and name == OURS
    loaders = [each.loader(batch_size, shuffle=each is sets[0], bucket=bucket) for each in sets]
    return Epoch(model, optimizer, our_loop, loaders, lengths, every, encoding)
