"""For the tests of the grading scripts: a student's folder, a script as a process, the form of a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

MODULES = ("base_llama", "classifier", "config", "llama", "optimizer", "rope", "tokenizer", "utils")
VERDICTS = ("Rotary embedding test passed!", "Optimizer test passed!", "Your Llama implementation is correct!")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """A folder with the modules that a student hands in, and what they import; all of them right."""
    (tmp_path / "student").mkdir()
    for name in MODULES:
        shutil.copy(ROOT / f"{name}.py", tmp_path / "student")
    return tmp_path / "student"


def run(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess:
    """Run a script in a folder."""
    command = [sys.executable, "-B", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def add(file: Path, code: str) -> None:
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{code}", encoding="utf-8")


def check_failed(status: int, out: str, err: str, said: str) -> None:
    """FAILED in the last line, and nothing that is a verdict or looks like one."""
    lines = out.splitlines()
    assert status == 1 and not err, (status, out, err)
    assert lines[-1].partition(":")[0].endswith("FAILED")
    assert said in out, out
    assert "\x1b" not in out and not any(word in out for word in ("passed", "is correct", "correct!"))
    assert all(len(line) < 500 for line in lines)
