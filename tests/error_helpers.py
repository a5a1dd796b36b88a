"""What the tests of bad input share: flags, snapshots of a folder, the shape of an error, and code in a pickle."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from utils import UserError

ROOT = Path(__file__).resolve().parent.parent
# after another prompt than the assignment's, no file is written that is not named
TEXT_FLAGS = ["--generated_sentence_low_temp_out", "generated-sentence-temp-0.txt"]
TEXT_FLAGS += ["--generated_sentence_high_temp_out", "generated-sentence-temp-1.txt"]
PROGRESS_BAR = re.compile(r"^\s*\w[\w ]*: +\d+%\|")


def generate_flags(checkpoint: object, *more: object) -> list:
    return ["--pretrained-model-path", checkpoint, "--max_new_tokens", 3, *more]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder` with its bytes; None for what is not a plain file."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def stderr_lines(stderr: str) -> list[str]:
    """What a person reads: the lines on standard error without the progress bars."""
    lines = (line.strip() for line in re.split(r"[\r\n]", stderr))
    return [line for line in lines if line and not PROGRESS_BAR.match(line)]


def check_one_error(status: int, stderr: str, *words: object, expected: int = 2) -> str:
    """Assert the status and one line, `error: ...`, that holds every one of `words`. Returns the line.

    Nothing stands beside it but the program's own `warning: ...` lines.
    """
    assert status == expected, stderr
    assert "Traceback" not in stderr
    lines = [line for line in stderr_lines(stderr) if not line.startswith("warning: ")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert str(word).lower() in lines[0].lower(), f"{str(word)!r} is not in {lines[0]!r}"
    return lines[0]


def refused(words: str, function: Callable, *given: object, **named: object) -> str:
    """Assert that a call raises `UserError` with one line, which matches `words` if any are given. Returns the line."""
    with pytest.raises(UserError, match=words or None) as caught:
        function(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class MarkerWriter:
    """Unpickling this writes a file: what a checkpoint with code in it could do."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


class PickledEval(MarkerWriter):
    """The same through a builtin, without a shell."""

    def __reduce__(self):
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def assert_code_is_never_run(folder: Path, load: Callable[[Path], object]) -> None:
    """A Hugging Face directory whose pickled weights hold code is refused, and the code is not executed."""
    payload = {"model.norm.weight": PickledEval(folder / "executed")}
    assert executes_when_unpickled(payload, folder / "executed")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(payload))
    refused("pytorch_model.bin", load, folder)
    assert not (folder / "executed").exists()


def executes_when_unpickled(payload: object, marker: Path) -> bool:
    """Whether the plain unpickler runs the code in `payload`; removes the marker again. Shows the bait is live."""
    pickle.loads(pickle.dumps(payload))
    written = marker.exists()
    marker.unlink(missing_ok=True)
    return written
