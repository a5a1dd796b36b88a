"""One step of training, as methods see it, on a small batch with padding; a run of the driver in two processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from conftest import FIGURES, ROOT, drive_in, outputs
from test_methods import LABELS, TOKENS
from torch import nn

from engine.methods import Method, RandomState, Step, prepare
from engine.processes import LocalBatch
from engine.tasks import CLASSIFICATION, Task
from llama import Llama


def prepared(model: nn.Module, *methods: Method) -> nn.Module:
    prepare(model, methods)
    for method in methods:
        method.start(model)
    return model.train()


def step_of(
    model: nn.Module,
    number: int = 0,
    total: int = 10,
    task: Task = CLASSIFICATION,
    rows: slice = slice(0, 3),
    tokens: torch.Tensor = TOKENS,
    labels: torch.Tensor = LABELS,
) -> Step:
    """rows: those of this process."""
    batch = {"token_ids": tokens[rows], "labels": labels[rows]}
    part, before = LocalBatch(batch, rows.start, rows.stop, len(tokens)), RandomState(torch.device("cpu"))
    outputs = task.forward(model, batch)
    return Step(model, task, part, batch, outputs, 0, number, total, model, before, seed=3)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}


def check_kernels(
    plain: nn.Module, fast: nn.Module, precision: str, weight: str, *,
    exact: float = 1e-4, rounded: float, cosine: float, tokens: torch.Tensor = TOKENS,
) -> None:  # fmt: skip
    """A model with kernels has the outputs of the plain one in training, and the gradient of a weight.

    exact, rounded: the absolute tolerance in fp32 and in bf16. cosine: of the two gradients, at least, in bf16.
    """
    outputs, gradients = [], []
    for model in (plain, fast):
        torch.manual_seed(3)
        outputs.append(model.train()(tokens))
        outputs[-1][:, 0].sum().backward()
        gradients.append(model.get_parameter(weight).grad.flatten())
    close = dict(atol=exact, rtol=1e-4) if precision == "fp32" else dict(atol=rounded, rtol=0.1)
    torch.testing.assert_close(*reversed(outputs), **close)
    assert torch.cosine_similarity(*gradients, dim=0) > (0.9999 if precision == "fp32" else cosine)


def move(model: nn.Module, size: float = 0.05, seed: int = 1, names: Sequence[str] = ()) -> None:
    """Change the weights, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not names or name in names:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)


def passes_through(llama: Llama) -> list[tuple[int, int, int]]:
    """Of every later pass through the layers: rows, positions, and the largest position at which a row begins."""
    passes: list[tuple[int, int, int]] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        context = getattr(layer.attention, "context", None)
        start = 0 if context is None else int(torch.as_tensor(context.start).max())
        passes.append((*inputs[0].shape[:2], start))

    llama.layers[0].register_forward_pre_hook(note)
    return passes


def two_processes_as_one(folder: Path, flags: Sequence[object]) -> subprocess.CompletedProcess:
    """The driver on two processes that share the model, after a check that one process has the same results."""
    alone = drive_in(folder / "alone", *flags)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(ROOT / "run_llama.py"), *map(str, flags), "--shard"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert FIGURES.findall(done.stdout) == FIGURES.findall(alone) != [], done.stderr
    assert outputs(folder) == outputs(folder / "alone") and len(outputs(folder)) == 2
    return done


def share_factors(model: nn.Module, other: nn.Module) -> None:
    """Give PEFT's LoRA in `other.llama` the factors of ours in `model.llama`; B, and dora's magnitudes, drawn first."""
    with torch.no_grad():
        for name, mine in model.llama.named_modules():
            if hasattr(mine, "lora_A"):
                theirs = other.llama.get_submodule(name)
                theirs.lora_A["default"].weight.copy_(mine.lora_A)
                theirs.lora_B["default"].weight.copy_(nn.init.normal_(mine.lora_B))
                if hasattr(mine, "lora_magnitude"):
                    theirs.lora_magnitude_vector["default"].weight.copy_(mine.lora_magnitude.mul_(1.5))
