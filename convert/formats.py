"""What the formats of other programs have in common: which numbers they hold, and what none of them can say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils import UserError

if TYPE_CHECKING:
    import torch

    from config import LlamaConfig

DTYPES = {  # of each format, the first by default
    "hf": ("f32", "f16", "bf16"),
    "llama2c": ("f32",),
    "gguf": ("f32", "f16", "q8_0"),
    "onnx": ("f32",),
}


def require_causal(config: LlamaConfig, what: str) -> None:
    """Raises `UserError` for a bidirectional model, which would be read as another one."""
    if not config.is_causal:
        raise UserError(f"{what} is causal and this model is bidirectional; --attention causal converts it as one")


def require_finite(name: str, tensor: torch.Tensor, dtype: str) -> None:
    """Raises `UserError` where a number became infinite on its way to `dtype`."""
    if not tensor.isfinite().all():
        raise UserError(f"{name} has numbers that {dtype} cannot hold; --dtype f32 keeps them")
