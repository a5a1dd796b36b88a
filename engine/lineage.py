"""The identity of a checkpoint: checkpoints that the same command makes from the same texts count as one. No PyTorch.

Two processors round differently; after a few thousand steps their weights differ as much as those of two seeds. But
published figures shall also hold for a model that is pretrained again on another machine. So its identity is a checksum
of its settings and inputs, which `advanced.pretrain` writes to NEW.json, and `bert.pretrain` to a file in its
directory. The identity of every other checkpoint is a checksum of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.programs import import_part
from utils import sha256_of

PLACES = ("text", "init", "device")  # settings that are paths or devices; `origin` has the checksums of the files
RECORD = "pretraining.json"  # the name of the record in a directory


def origin(texts: Sequence[str], tokenizer: str | Path, init: str | None) -> dict[str, Any]:
    """The inputs of a pre-training run, as checksums. init: the checkpoint to start from; None: random weights."""
    first = None if init is None else identity_of(init)
    return {"text": [sha256_of(path) for path in texts], "tokenizer": sha256_of(tokenizer), "init": first}


def identity_of(checkpoint: str | Path) -> str:
    """The checksum of a checkpoint's settings and inputs, if it has a record of these weights; else of its bytes."""
    weights, path = checksum(checkpoint), Path(checkpoint)
    try:
        record = json.loads((path / RECORD if path.is_dir() else path.with_suffix(".json")).read_text(encoding="utf-8"))
        if record["weights"] != weights:
            return weights
        settings = {name: value for name, value in record["settings"].items() if name not in PLACES}
        content = {"settings": settings, "made_of": record["made_of"]}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return weights
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checksum(path: str | Path) -> str:
    """The checksum of a file, or of the files of the model in a directory.

    A file is read again only if its modification time has changed.
    """
    if not os.path.isdir(path):
        return _checksum(str(path), os.stat(path).st_mtime_ns)
    files = {os.path.basename(name): Path(path, name) for name in files_of(path)}
    sums = {name: _checksum(str(file), file.stat().st_mtime_ns) for name, file in files.items()}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def files_of(folder: str | Path) -> list[str]:
    """The names of the files of model and tokenizer in a directory; of an adapter's base, paths. Raises `UserError`."""
    return import_part("convert.directory", "a Hugging Face directory").files_of_model(Path(folder))


@lru_cache(maxsize=256)
def _checksum(path: str, changed: int) -> str:
    return sha256_of(path)
