"""What the tests of the grading scripts share: a student's folder, and how a script says that it is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import ROOT

MODULES = ("base_llama", "classifier", "config", "llama", "optimizer", "rope", "tokenizer", "utils")
VERDICTS = ("Rotary embedding test passed!", "Optimizer test passed!", "Your Llama implementation is correct!")


def copy_student(folder: Path) -> Path:
    """A folder with the modules that a student hands in, and what they import; all of them right."""
    folder.mkdir()
    for name in MODULES:
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


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
