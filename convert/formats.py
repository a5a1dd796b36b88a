"""Shared by the formats of other programs: their types of numbers, checks, and writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    "peft": ("f32",),
}


def require_causal(config: LlamaConfig, what: str) -> None:
    """Raises `UserError` for a bidirectional model, which would be read as another one."""
    if not config.is_causal:
        raise UserError(f"{what} is causal and this model is bidirectional; --attention causal converts it as one")


def require_finite(name: str, tensor: torch.Tensor, dtype: str) -> None:
    """Raises `UserError` where a number became infinite on its way to `dtype`."""
    if not tensor.isfinite().all():
        raise UserError(f"{name} has numbers that {dtype} cannot hold; --dtype f32 keeps them")


@contextmanager
def whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write a file or a folder at, which becomes `path` at the end; nothing is left after an error.

    Raises `OSError` that names `path`.
    """
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".minllama-", suffix=".tmp") as folder:
            temporary = Path(folder, path.name)
            yield temporary
            os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
