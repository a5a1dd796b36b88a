"""A fine-tuned classifier of the tiny model, with the figures of its run, and a page of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import drive_in

FLAGS = "--epochs 2 --lr 1e-4 --batch_size 10 --attention causal --kernels plain".split()  # it makes some errors


class Trained(NamedTuple):
    """What a fine-tuning has left."""

    folder: Path
    model: Path
    log: Path
    page: Path
    printed: str


def data_of(page: Path) -> dict[str, Any]:
    """The figures in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    return json.loads(found[1])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, classify_flags: Callable[[str], list[str]]) -> Trained:
    """Two epochs with `--log_dir` and `--html`."""
    folder = tmp_path_factory.mktemp("trained")
    printed = drive_in(folder, *classify_flags("finetune"), *FLAGS, "--log_dir", "log", "--html", "page.html")
    return Trained(folder, folder / "finetune-2-0.0001.pt", folder / "log", folder / "page.html", printed)
