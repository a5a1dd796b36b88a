"""Errors, safe files, asset look-up, the prompt, seeds and devices: small functions that every module may use.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent


class UserError(ValueError):
    """A mistake that the user can correct. The message is one line: what is wrong, where, and what to do."""


def whole_number(text: str) -> int:
    """Parse an integer of ASCII digits, for data and flags. (`int` also takes `1_0` and digits of other scripts.)

    Raises `ValueError`.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,1000}", text):
        raise ValueError("not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """Parse a number that may have a fraction or an exponent; as strict as `whole_number`. Raises `ValueError`."""
    if not text.isascii() or "_" in text:
        raise ValueError("not a number")
    return float(text)


# ------------------------------------------------------------------------------------------------------------- messages


MAX_WORD, MAX_MESSAGE, MAX_NAMES = 400, 2000, 10


def warn(message: str) -> None:
    """Print a warning as one line on standard error."""
    print(f"warning: {one_line(message)}", file=sys.stderr)


def one_line(message: str) -> str:
    """A message as one line: words are cut to MAX_WORD characters, the whole to MAX_MESSAGE."""
    words = (shorten(word, MAX_WORD) for word in message.split())
    line = shorten(" ".join(words), MAX_MESSAGE)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)  # a terminal obeys some


def shorten(text: str, most: int = 100) -> str:
    """A text of at most `most` characters: the middle of a longer one becomes `...`."""
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
    except Exception:  # the `repr` of a foreign object may fail, and so may that of a huge number
        return f"a {type(value).__name__}"


def printable(value: object, most: int = 100) -> str:
    """`str` of a value, at most `most` characters; escaped if a terminal could not show one or would obey it."""
    text = shorten(str(value), most)
    return text if text.isprintable() else shorten(ascii(text), most)


def join_names(names: Iterable[str], most: int = MAX_NAMES) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 200) for name in names[:most]) + more


def hub_hint(path: str | os.PathLike, works: str = "checkpoints/minllama1M.pt") -> str:
    """For the end of "PATH does not exist", where PATH may be a model's name on huggingface.co: how to get its folder.

    works: what can be named without a network. Empty for what can only be a file or folder of this machine.
    """
    path = Path(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", str(path)) or path.suffix[1:].isalpha():
        return ""
    if len(path.parts) > 1 and path.parent.is_dir():
        return ""
    how = f"pip install huggingface_hub, hf download {path} --local-dir FOLDER, then name FOLDER"
    return f"; models of huggingface.co are not fetched: with a network, {how}; without one, name {works}"


# ----------------------------------------------------------------------------------------------------------- the prompt

QUESTION = "Is this movie {labels}? This movie is "  # the space at the end is part of the reference
QUESTION_OF_TEXTS = "Is this text {labels}? This text is "  # of files with columns, which may be about anything


def prompt_suffix(label_names: Sequence[str], question: str = QUESTION) -> str:
    """The question with the label names instead of `{labels}`: `a or b`, or `a, b, or c`."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return question.replace("{labels}", choices)


# ---------------------------------------------------------------------------------------------------------------- files


PIECE = 1 << 16  # bytes
MOST_UNPACKED, SMALL = 20, 1 << 26  # times the size of a gzip file (texts: 3 to 10), or `SMALL` bytes if that is more
GZIP = b"\x1f\x8b"
COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\(\xb5/\xfd)|(?P<xz>\xfd7zXZ)|(?P<bzip2>BZh.1AY)|(?P<zip>PK\x03\x04)"
    rb"|(?P<lz4>\x04\"M\x18)|(?P<rar>Rar!\x1a\x07)|(?P<p7zip>7z\xbc\xaf'\x1c)"
)
NUL_IS_NO_TEXT = b"\0", b"\xff"  # UTF-16 without a mark and archives have it; the other byte is nowhere in UTF-8
TEMPORARY = ".minllama-"  # the names of temporary files begin with it; host, process id and random letters follow


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` and rename it to `path` when the block ends without an exception.

    A reader of `path` sees the old file or the whole new file, never a part of it. Text is UTF-8 with `\\n` line ends
    on every platform. Raises `OSError` as `open` does, naming `path`. The temporary file is always removed; if this
    process is killed, the next process that writes to the folder removes it.
    """
    path = Path(path)
    # Not path.name with something added, which could be too long for the file system. The name is known before the file
    # is there: an interrupt could come between the two.
    temporary = path.parent / f"{TEMPORARY}{host_name()}-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        _remove_leftovers(path.parent)
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
        with open(temporary, mode.replace("w", "x"), encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):  # it is renamed, or its folder cannot be written to, which is being said
            temporary.unlink()


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in `folder` that processes of this machine left when they were killed."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        host, _, number = path.name.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
        if host == host_name() and number.isdecimal() and not is_running(int(number)):
            path.unlink(missing_ok=True)


def host_name() -> str:
    """This machine's name in a form that is safe in file names, at most 60 characters."""
    return re.sub("[^A-Za-z0-9.]", "_", socket.gethostname())[:60]


def is_running(number: int) -> bool:
    """Whether a process with this id runs on this machine; True if the system cannot tell."""
    if os.name == "nt":  # on Windows `os.kill` ends the process
        return True
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True


def find_asset(name: str | os.PathLike) -> Path | None:
    """The path of an input file: as given (from the current folder), else beside this code; None if in neither."""
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return path
    return None


def bytes_of(path: str | os.PathLike) -> Iterator[bytes]:
    """The bytes of a file, piece by piece; those of a gzip file unpacked. Raises `OSError`.

    Raises `UserError` for a damaged gzip file, one that could fill the memory, and files that are compressed otherwise.
    """
    with open(path, "rb") as file:
        if not file.peek().startswith(GZIP):
            require_unpacked(path, file.peek())
            yield from iter(lambda: file.read(PIECE), b"")
            return
        import gzip
        import zlib

        left = max(SMALL, MOST_UNPACKED * os.fstat(file.fileno()).st_size)
        unpacked = gzip.GzipFile(fileobj=file)
        try:
            require_unpacked(path, unpacked.peek(1))
            while piece := unpacked.read(PIECE):
                if (left := left - len(piece)) < 0:
                    raise UserError(f"{path} unpacks to over {MOST_UNPACKED} times its size; unpack it with gunzip")
                yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged gzip file: {error}") from None


def require_unpacked(name: str | os.PathLike, beginning: bytes) -> None:
    """Raise `UserError` if a file or stream begins as a compressed one does."""
    if found := COMPRESSED.match(beginning):
        raise UserError(f"{name} is compressed by {found.lastgroup}; unpack it")


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file, which gzip may have packed; line ends become `\\n`, a byte-order mark is dropped.

    Raises `UserError` if the file is missing, a device (some do not end), unreadable or not UTF-8 (naming the first bad
    line; a NUL is none), and as `bytes_of`.
    """
    try:
        if Path(path).is_char_device():
            raise UserError(f"{path} is a device; give a file")
        raw = b"".join(bytes_of(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = raw.replace(*NUL_IS_NO_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, nul = raw.count(b"\n", 0, error.start) + 1, ", it has a NUL" * (b"\0" in raw)
        raise UserError(f"{path} line {line}: not UTF-8 text{nul}; save the file as UTF-8") from None
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
    """The device for `--device auto|cpu|cuda|mps`; `use_gpu` requires an accelerator, CUDA before MPS.

    Under torchrun, "cuda" is the device whose number is this process's LOCAL_RANK.
    Raises `UserError` if PyTorch does not see the requested device.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if use_gpu and name in ("auto", "cpu"):
        name = next((gpu for gpu in ("cuda", "mps") if present[gpu]), "")
        if not name:
            raise UserError("--use_gpu: PyTorch sees neither a CUDA nor an MPS device; leave the flag out for the CPU")
    elif name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if present[device])
    if not present[name]:
        raise UserError(f"--device {name}: PyTorch sees no such device; use --device auto or cpu")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device(name, int(os.environ["LOCAL_RANK"]))
    return torch.device(name)
