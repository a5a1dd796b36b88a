"""Which checkpoints count as one: what the same command makes of the same texts. No PyTorch.

Two processors round differently, and after a few thousand steps the weights differ in their digits, as those of two
seeds do. A model that is made again elsewhere is still the model that its figures are of, so it is known by what it
was made of, which `advanced.pretrain` writes to NEW.json, and `bert.pretrain` to a file in its directory; every other
checkpoint is known by its bytes.
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

PLACES = ("text", "init", "device")  # settings that say where something lies: `origin` has what lies there
RECORD = "pretraining.json"  # of a directory


def origin(texts: Sequence[str], tokenizer: str | Path, init: str | None) -> dict[str, Any]:
    """What a run of pre-training begins with, as checksums."""
    first = None if init is None else identity_of(init)
    return {"text": [sha256_of(path) for path in texts], "tokenizer": sha256_of(tokenizer), "init": first}


def identity_of(checkpoint: str | Path) -> str:
    """The checksum of what a checkpoint was made of, if its record says so of these very weights; else of its bytes."""
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
    """Of a file as it is now, or of the files in a directory that its model is read from.

    They are read again only when they have changed.
    """
    if not os.path.isdir(path):
        return _checksum(str(path), os.stat(path).st_mtime_ns)
    files = {name: Path(path, name) for name in files_of(path)}
    sums = {name: _checksum(str(file), file.stat().st_mtime_ns) for name, file in files.items()}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def files_of(folder: str | Path) -> list[str]:
    """The names of the files in a directory that its model and tokenizer are read from. Raises `UserError`."""
    return import_part("convert.directory", "a Hugging Face directory").files_of_model(Path(folder))


@lru_cache(maxsize=256)
def _checksum(path: str, changed: int) -> str:
    return sha256_of(path)
