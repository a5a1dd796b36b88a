"""What test_group.py runs under torchrun: `group_worker.py FOLDER TOKENIZER MODE`.

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

from advanced import choose, create
from classifier import LlamaEmbeddingClassifier
from engine.checkpointer import Checkpointer, load_model
from engine.data import Example
from engine.methods import Method, Step, prepare
from engine.processes import SINGLE_PROCESS, Distributed
from engine.programs import run_main
from engine.storage import load_tensors
from engine.tasks import LlamaDataset
from engine.torchrun import TorchDistributed, join
from engine.training import Trainer, evaluate
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError

CPU = torch.device("cpu")
WORDS = ("warm", "little", "film", "storm", "boat")


class Case(NamedTuple):
    attention: str
    batch_size: int
    shard: bool = False
    dropout: float = 0.0  # in the Llama; the head always has some
    methods: str = ""
    lr: float = 1e-3


CASES = (
    Case("bidirectional", 7),  # 7, 7, 7 and 1 sentences on three processes
    Case("bidirectional", 7, shard=True),
    Case("causal", 8),
    Case("causal", 7, dropout=0.2),
    Case("causal", 2, shard=True),  # a process without sentences in every batch
    Case("bidirectional", 7, dropout=0.2, methods="lora,sam,ema"),
    Case("causal", 5, shard=True, methods="lora,ema"),
    Case("causal", 5, shard=True, methods="ia3,lora"),
    Case("bidirectional", 7, shard=True, methods="padding-mask,prompt-tuning,adapter,prefix,bitfit,ema"),
    Case("causal", 7, shard=True, methods="ema", lr=1e-12),  # no epoch is better than the first
    Case("causal", 2, dropout=0.2, methods="mixout,label-smoothing,class-weights,smart,ema"),
    Case("bidirectional", 7, dropout=0.2, methods="mixconnect,r-drop,smart,wise-ft"),
    Case("causal", 5, shard=True, dropout=0.2, methods="mixout,smart,wise-ft"),
    Case("bidirectional", 5, shard=True, methods="lp-ft,ordinal,r-drop,smart,freelb,sam,ema"),
)


ARGUMENTS = {
    "lora": ["rank=2", "alpha=4", "dropout=0.2"],
    "ema": ["decay=0.6"],
    "mixout": ["p=0.3"],
    "mixconnect": ["p=0.3"],
    "smart": ["steps=2", "decay=0.5", "late_decay=0.7", "radius=0.05"],
    "wise-ft": ["points=3"],
}


class Decay(Method):
    """A penalty of the weights and one that is a mean over the batch."""

    name = "decay"

    def penalty(self, step: Step) -> torch.Tensor | float:
        mean = step.outputs.exp().square().sum(-1).mean()
        again, drawn = step.forward(), step.normal(2)  # b c and b c: those of one process
        mean = mean + (again * drawn).sum(-1).mean()
        return 0.1 * step.model.classifier_head.weight.square().sum() + 0.1 * mean


class Refusal(Method):
    """An error that one process alone meets."""

    name = "refusal"

    def penalty(self, step: Step) -> torch.Tensor | float:
        if dist.get_rank() == 1:
            raise UserError("the second process has had enough")
        return 0.0


def small_dataset(tokenizer: Tokenizer, size: int = 22) -> LlamaDataset:
    texts = [" ".join(WORDS[: 1 + i % 5] * (1 + i % 3)) for i in range(size)]
    return LlamaDataset([Example(text, int("film" in text)) for text in texts], tokenizer)


def methods_of(case: Case) -> list[Method]:
    names = [name for name in case.methods.split(",") if name in ARGUMENTS]
    assignments = [f"{name}.{assignment}" for name in names for assignment in ARGUMENTS[name]]
    chosen = choose(case.methods, assignments) if case.methods else ()
    return [Decay(), *(create(name, dict(settings)) for name, settings in chosen)]


def train_case(
    case: Case, tokenizer: Tokenizer, folder: Path, distributed: Distributed = SINGLE_PROCESS, methods: Any = ()
) -> dict:
    """Two epochs and a prediction with the best model: losses, accuracies, predictions, weights, random state."""
    torch.manual_seed(4)
    settings = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.3, option="finetune")
    llama = random_llama(attention=case.attention, dropout=case.dropout, max_seq_len=256)
    model = LlamaEmbeddingClassifier(settings, llama=llama)
    prepare(model, methods)
    distributed.spread(model, CPU)
    for method in methods:
        method.start(model)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=case.lr, weight_decay=0.1)
    dataset, bucket = small_dataset(tokenizer), case.attention == "causal"
    loaders = [dataset.loader(case.batch_size, shuffle=shuffle, bucket=bucket) for shuffle in (True, False)]
    checkpointer = Checkpointer(folder / "model.pt", folder / "model.resume", methods=methods, distributed=distributed)
    shared = dict(progress=False, distributed=distributed)
    trainer = Trainer(model, optimizer, methods=methods, checkpointer=checkpointer, **shared)
    results = list(trainer.fit(*loaders, epochs=2))
    rng = torch.get_rng_state()
    best = distributed.from_first(lambda: load_tensors(checkpointer.model_path))["model"]
    model = LlamaEmbeddingClassifier(settings, llama=random_llama(attention=case.attention, max_seq_len=256))
    load_model(model.requires_grad_(False), best)
    distributed.spread(model, CPU)
    return {
        "figures": [(result.train_loss, result.train_score, result.dev_score) for result in results],
        "predictions": evaluate(model, loaders[1], **shared).predictions,
        "rng": rng,
        **{
            name: torch.load(checkpointer.resume_path, weights_only=True)[name]
            for name in ("model", "optimizer", "methods")
        },
        "best": best,
    }


def train_all(folder: Path, tokenizer: Tokenizer) -> None:
    with join(CPU) as group:
        outcomes = {}
        for case in CASES:
            outcomes[tuple(case)] = train_case(
                case, tokenizer, folder, TorchDistributed(CPU, case.shard), methods_of(case)
            )
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
