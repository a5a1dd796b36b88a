"""Damaged models and tokenizers end in one line, in bounded memory, and in no file; nothing of them is executed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors")
gguf = pytest.importorskip("gguf")
from conversions import run_convert  # noqa: E402
from damage_worker import ROOM, prepare  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and limits its memory")
WORKER = Path(__file__).with_name("damage_worker.py")
MOST_KB = 400 * 1024  # that a damaged model of 50 KB may take while it is looked at


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("models")
    prepare(folder, tiny_tokenizer)
    return folder


def check(models: Path, first: int, last: int) -> Counter:
    """How the cases ended, by status."""
    command = [sys.executable, str(WORKER), str(models), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]  # no library says anything either
    said = json.loads(done.stdout)
    for case in said["cases"]:
        assert case["status"] in (0, 2), case
        assert len(case["lines"]) == (1 if case["status"] else 0), case
        assert all(line.startswith("error: ") and len(line) < 2500 for line in case["lines"]), case
        assert case["left"] == (["model"] if case["status"] else ["model", "out"]), case
        assert "memory" not in "".join(case["lines"]), case
    assert said["grown"] < MOST_KB < ROOM // 1024
    return Counter(case["status"] for case in said["cases"])


@pytest.mark.parametrize("kind", ["gguf", "gguf of bytes"])
def test_undamaged_they_are_read(models: Path, tmp_path: Path, kind: str):
    run_convert(models / kind / "model.gguf", tmp_path / "out", "--to", "hf")
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_share_of_the_damaged_inputs(models: Path):
    ended = check(models, 0, 135)
    assert ended[2] > 67 and ended[0] > 5  # what is flipped in a number may be another number


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 4500, 2250))
def test_five_hundred_damaged_inputs_of_each_kind(first: int, models: Path):
    check(models, first, first + 2250)
