"""Errors, safe files, asset look-up, the prompt, seeds and devices: the small things that every module may use.

Importing this module costs nothing. PyTorch and NumPy are imported inside the functions that need them, so that
`--help` and argument errors answer at once.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import reprlib
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent


class UserError(ValueError):
    """A mistake that the user can mend. The message is one line: what is wrong, where, and what to do."""


def whole_number(text: str) -> int:
    """An integer as people write it in data and flags, in ASCII digits: `int` takes `1_0` and digits of every script.

    Raises `ValueError`.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,1000}", text):
        raise ValueError("not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """As `whole_number`, for what may have a fraction or an exponent."""
    if not text.isascii() or "_" in text:
        raise ValueError("not a number")
    return float(text)


# ------------------------------------------------------------------------------------------------------------- messages


MAX_WORD, MAX_MESSAGE, MAX_NAMES = 400, 2000, 10


def warn(message: str) -> None:
    """One line on standard error."""
    print(f"warning: {one_line(message)}", file=sys.stderr)


def one_line(message: str) -> str:
    """A message on one line of bounded length, however long the names and values are that it quotes."""
    words = (shorten(word, MAX_WORD) for word in message.split())
    return shorten(" ".join(words), MAX_MESSAGE)


def shorten(text: str, most: int = 100) -> str:
    """At most so many characters, the middle left out."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def short_repr(value: object) -> str:
    """`repr` of a value from a file, of bounded length and cost: lists can nest, and numbers can be huge."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, int, float, type(None))):
        return shorten(repr(value[:200] if isinstance(value, str) else value))
    brief = reprlib.Repr()
    brief.maxlevel = 2
    try:
        return shorten(brief.repr(value))
    except Exception:  # a foreign object's own `repr`, or a huge number inside
        return f"a {type(value).__name__}"


def printable(value: object, most: int = 100) -> str:
    """`str` of a value of bounded length, escaped where a terminal would not show all of it, or act on it."""
    text = shorten(str(value), most)
    return text if text.isprintable() else shorten(ascii(text), most)


def join_names(names: Iterable[str], most: int = MAX_NAMES) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 200) for name in names[:most]) + more


# ----------------------------------------------------------------------------------------------------------- the prompt

QUESTION = "Is this movie {labels}? This movie is "  # the space at the end is part of the reference


def prompt_suffix(label_names: Sequence[str], question: str = QUESTION) -> str:
    """The question with the names in the place of `{labels}`: `a or b`, or `a, b, or c`."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return question.replace("{labels}", choices)


# ---------------------------------------------------------------------------------------------------------------- files


TEMPORARY = ".minllama-"  # how the names of temporary files begin; then host, process, and something random


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` and rename it to `path` when the block ends without an exception.

    A reader of `path` sees the old file or the whole new one, never a half. Text is UTF-8 with `\\n` line ends on
    every platform. Raises `OSError` as `open` does, naming `path`; the temporary file is removed whatever happens, or,
    where this process is killed, by the next one that writes there.
    """
    path = Path(path)
    temporary = None
    try:
        _remove_leftovers(path.parent)
        # a short name of its own: one made from path.name could be too long where path.name is not
        prefix = f"{TEMPORARY}{host_name()}-{os.getpid()}-"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
        text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with open(handle, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _default_file_mode())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in `folder` that processes of this machine left when they were killed."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        host, _, number = path.name.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
        if host == host_name() and number.isdecimal() and not is_running(int(number)):
            path.unlink(missing_ok=True)


def host_name() -> str:
    """This machine's name, as it stands in file names."""
    return re.sub("[^A-Za-z0-9.]", "_", socket.gethostname())[:60]


def is_running(number: int) -> bool:
    """Whether this machine has a process of that number. Where that cannot be asked: True."""
    if os.name == "nt":  # there `os.kill` ends the process
        return True
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _default_file_mode() -> int:
    """The permissions that `open` would give a new file (mkstemp gives 0600, which an instructor could not read)."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def find_asset(name: str | os.PathLike) -> Path | None:
    """Where an input file lies: as named (from the current folder), else beside this code; None if in neither."""
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return path
    return None


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file, line ends turned into `\\n`; a byte-order mark is dropped.

    Raises `UserError` where the file is missing, unreadable or not UTF-8 (naming the first bad line).
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line}: not UTF-8 text; save the file as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def sha256_of(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------- randomness and devices


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (every device) and ask cuDNN for deterministic kernels."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def choose_device(name: str = "cpu", use_gpu: bool = False) -> torch.device:
    """The device for `--device auto|cpu|cuda|mps`; `use_gpu` insists on an accelerator, CUDA before MPS.

    Under torchrun, "cuda" is the device of this process's number on its machine.
    Raises `UserError` when the accelerator asked for is not there.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if use_gpu and name in ("auto", "cpu"):
        name = next((gpu for gpu in ("cuda", "mps") if present[gpu]), None)
        if name is None:
            raise UserError("--use_gpu: PyTorch sees neither a CUDA nor an MPS device; leave the flag out for the CPU")
    elif name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if present[device])
    if not present[name]:
        raise UserError(f"--device {name}: PyTorch sees no such device; use --device auto or cpu")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device(name, int(os.environ["LOCAL_RANK"]))
    return torch.device(name)
