"""What test_distributed.py runs under torchrun: `distributed_worker.py FOLDER TOKENIZER MODE`.

MODE "train": every case of `CASES`, the first process saving what came of it. MODE "raise": one process meets an error
of its own in the middle of training, while the others wait for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from conftest import random_llama
from fast.distributed import Group, join

from batches import LlamaDataset
from classifier import LlamaEmbeddingClassifier
from course import Example
from optimizer import AdamW
from saver import Checkpoints
from tasks import ALONE, World
from tokenizer import Tokenizer
from training import Method, evaluate, fit, load_best
from utils import UserError, run_main

CPU = torch.device("cpu")
WORDS = ("warm", "little", "film", "storm", "boat")


class Case(NamedTuple):
    attention: str
    batch_size: int
    shard: bool = False
    dropout: float = 0.0  # in the Llama; the head always has some


CASES = (
    Case("bidirectional", 7),  # 7, 7, 7 and 1 sentences on three processes
    Case("bidirectional", 7, shard=True),
    Case("causal", 8),
    Case("causal", 7, dropout=0.2),
    Case("causal", 2, shard=True),  # a process without sentences in every batch
)


class Decay(Method):
    """A penalty of the weights and one that is a mean over the batch."""

    def penalty(self, model: torch.nn.Module, batch: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor | float:
        mean = log_probs.exp().square().sum(-1).mean()
        return 0.1 * model.classifier_head.weight.square().sum() + 0.1 * mean


class Refusal(Method):
    """An error that one process alone meets."""

    def penalty(self, model: torch.nn.Module, batch: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor | float:
        if dist.get_rank() == 1:
            raise UserError("the second process has had enough")
        return 0.0


def small_dataset(tokenizer: Tokenizer, size: int = 22) -> LlamaDataset:
    texts = [" ".join(WORDS[: 1 + i % 5] * (1 + i % 3)) for i in range(size)]
    return LlamaDataset([Example(text, int("film" in text)) for text in texts], tokenizer)


def train_case(case: Case, tokenizer: Tokenizer, folder: Path, world: World = ALONE, methods: Any = ()) -> dict:
    """Two epochs and a prediction with the best model: losses, accuracies, predictions, weights, random state."""
    torch.manual_seed(4)
    settings = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.3, option="finetune")
    llama = random_llama(attention=case.attention, dropout=case.dropout, max_seq_len=256)
    model = LlamaEmbeddingClassifier(settings, llama=llama)
    world.spread(model, CPU)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    dataset, bucket = small_dataset(tokenizer), case.attention == "causal"
    loaders = [dataset.loader(case.batch_size, shuffle=shuffle, bucket=bucket) for shuffle in (True, False)]
    saved = Checkpoints(folder / "model.pt", folder / "model.resume", {}, {}, {}, methods)
    shared = dict(device=CPU, progress=False, world=world)
    results = list(fit(model, optimizer, *loaders, epochs=2, checkpoints=saved, **shared))
    rng = torch.get_rng_state()
    load_best(model, saved.model_path, world)
    return {
        "figures": [(result.train_loss, result.train_acc, result.dev_acc) for result in results],
        "predictions": evaluate(model, loaders[1], **shared).predictions,
        "rng": rng,
        **{name: torch.load(saved.resume_path, weights_only=True)[name] for name in ("model", "optimizer")},
    }


def train_all(folder: Path, tokenizer: Tokenizer) -> None:
    with join(CPU) as group:
        outcomes = {}
        for case in CASES:
            outcomes[tuple(case)] = train_case(case, tokenizer, folder, Group(CPU, case.shard), [Decay()])
        if group.is_first:
            torch.save(outcomes, folder / "outcomes.pt")


def main() -> None:
    folder, tokenizer = Path(sys.argv[1]), Tokenizer(tokenizer_model=sys.argv[2])
    if sys.argv[3] == "train":
        train_all(folder, tokenizer)
        return
    with join(CPU) as group:
        train_case(CASES[0], tokenizer, folder, group, [Refusal()])


if __name__ == "__main__":
    sys.exit(run_main(main))
