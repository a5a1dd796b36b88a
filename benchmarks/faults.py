"""Whether a contender could not be measured by our own fault, which fails the run, or because of this machine."""

from __future__ import annotations

import subprocess
import traceback
from pathlib import Path

from utils import ROOT

CODE_ERRORS = (AttributeError, LookupError, NameError, TypeError)  # of code that no longer fits what it calls


class OwnFault(Exception):
    """A contender failed in this repository's code, in another process; the message says how."""


def reason_of(error: Exception) -> str:
    """One line."""
    said = " ".join(str(error).split())
    return said if type(error) in (OwnFault, RuntimeError) else f"{type(error).__name__}: {said}"


def ending_of(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended, and the last that it said."""
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return f"ended with {done.returncode}: {last}"


def is_own_fault(error: Exception) -> bool:
    """Whether one of our modules lacks what is imported from it, or our code raised one of `CODE_ERRORS`.

    Errors of other kinds are what a library or the machine says, also where a library's compiled part raises them.
    """
    if isinstance(error, ImportError):
        return _is_our_module(error.name)
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OwnFault) or (isinstance(error, CODE_ERRORS) and _is_our_file(frames[-1].filename))


def _is_our_module(name: str | None) -> bool:
    top = (name or "").partition(".")[0]
    return bool(top) and ((ROOT / top).is_dir() or (ROOT / f"{top}.py").is_file())


def _is_our_file(path: str) -> bool:
    """Not that of a library, which may lie in an environment inside this folder."""
    return Path(path).resolve().is_relative_to(ROOT) and "site-packages" not in Path(path).parts
