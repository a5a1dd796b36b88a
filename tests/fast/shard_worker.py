"""What test_kernels.py runs under torchrun: `shard_worker.py OUT`.

A model with kernels that keep no copies of weights, split over the processes; the first one writes to OUT what was
computed, and how many whole weights lay in memory when none should have.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import random_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fast.apply
import fast.linear
from classifier import LlamaEmbeddingClassifier
from fast import accelerate

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])
CASES = {"bf16": ("bf16", True), "rounded": ("bf16", False), "int8": ("int8", False)}  # precision, bfloat16 products?


def make_model() -> LlamaEmbeddingClassifier:
    llama = random_llama(attention="causal", hidden_dim=52)
    torch.manual_seed(0)
    return LlamaEmbeddingClassifier(SimpleNamespace(num_labels=2, hidden_dropout_prob=0.0, option=""), llama=llama)


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.llama.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class TrainingCallback:
    """Counts tensors in memory that hold as many numbers as a feed-forward weight, which no activation does."""

    def __init__(self, model: nn.Module):
        self.size = model.llama.layers[0].feed_forward.w1.weight.numel()
        self.saved: list[torch.Tensor] = []

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor)
        return tensor

    def whole(self, tensors: list) -> int:
        plain = (tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter))
        return sum(tensor.numel() == self.size and not is_freed(tensor) for tensor in plain)

    def in_python(self) -> int:
        return self.whole([each for each in gc.get_objects() if isinstance(each, torch.Tensor)])


def is_freed(tensor: torch.Tensor) -> bool:
    return not tensor.is_mkldnn and tensor.untyped_storage().nbytes() == 0


def predict(model: nn.Module) -> list[float]:
    with torch.inference_mode():
        return model.eval()(TOKENS).flatten().tolist()


def train(model: nn.Module, callback: TrainingCallback | None = None) -> tuple[list[float], int]:
    """Gradients' lengths, and how many whole weights wait for the backward pass."""
    model.train()
    note: Callable = callback.note if callback else lambda tensor: tensor
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = F.nll_loss(model(TOKENS), torch.tensor([0, 1]))
    waiting = callback.whole(callback.saved) if callback else 0
    if callback:
        assert any(tensor.numel() == callback.size for tensor in callback.saved)
        callback.saved.clear()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]
    return [loss.item(), *(each.norm().item() for each in whole)], waiting


def outcome(precision: str, has_products: bool) -> dict[str, object]:
    fast.apply.fastest = lambda question, ways: ([*ways][-1 if has_products else 0], "as the test says")
    model = make_model()
    alone = copy.deepcopy(model)
    accelerate(alone, precision, generates=False)
    accelerate(model, precision, generates=False, keeps_copies=False)
    shard(model)
    callback, gradients, waiting = TrainingCallback(model), [[], []], 0
    if precision != "int8":
        gradients[0], _ = train(alone)
        gradients[1], waiting = train(model, callback)  # before anything is predicted, as FSDP wants it
    numbers = [[*predict(each), *its] for each, its in zip((alone, model), gradients, strict=True)]
    del alone
    gc.collect()
    return {"alone": numbers[0], "sharded": numbers[1], "waiting": waiting, "kept": callback.in_python()}


def main() -> None:
    dist.init_process_group("gloo")
    fast.linear.SMALL_PRODUCT = 0  # all products here are small
    found = {name: outcome(*case) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
