"""Errors, safe files, asset look-up, seeds, devices and masks: the small things that every other module may use.

Importing this module costs nothing. PyTorch and NumPy are imported inside the functions that need them, so that
`--help` and argument errors answer at once.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import os
import random
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent
GRACE_SECONDS = 3.0


class UserError(ValueError):
    """A mistake that the user can mend. The message is one line: what is wrong, where, and what to do."""


class Default(str):
    """A flag's default value, told apart from the same text that a user typed."""


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse` parser whose errors are one line instead of the usage text and a line; no abbreviated flags."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit status.

    A `UserError`, a file-system error and an interrupt become one line on standard error and status 2.
    Anything else is a defect of the program and keeps its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text may hold letters that the terminal cannot show
    try:
        status = main() or 0
        sys.stdout.flush()  # here, where a full disk is still an error like any other
        return status
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt as error:
        message = str(error) or "interrupted: files that were finished are kept, the others were not written"
    except OSError as error:
        where = error.filename or "a file or standard output"
        hint = "; free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        message = f"cannot read or write {where}: {error.strerror or error}{hint}"
        _drop_stuck_output()
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which must not be imported for its name alone
            raise
        message = "the accelerator's memory is used up; use a smaller --batch_size, or --device cpu"
    _wait_for_the_first_process()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _wait_for_the_first_process() -> None:
    """Of several processes that meet the same error, one should name it: the machine's first.

    When that one ends, torchrun ends the others, here. An error that it does not share is named a little later.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(GRACE_SECONDS)


def _drop_stuck_output() -> None:
    """Send what standard output cannot take nowhere, or Python fails on it once more at exit (status 120)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ----------------------------------------------------------------------------------------------------- files


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` and rename it to `path` when the block ends without an exception.

    Whoever reads `path` sees the old file or the whole new one, never a half. Text is UTF-8 with `\\n` line ends on
    every platform. Raises `OSError` as `open` does, naming `path`; the temporary file is removed whatever happens.
    """
    path = Path(path)
    temporary = None
    try:
        # a short name of its own: one made from path.name could be too long where path.name is not
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".minllama-", suffix=".tmp")
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


def _default_file_mode() -> int:
    """The permissions that `open` would give a new file (mkstemp gives 0600, which an instructor could not read)."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def check_writable(path: str | os.PathLike, flag: str) -> None:
    """Raise `UserError` naming `flag` unless `path` can be created or replaced."""
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{flag} {path} is a folder; give a file name")
    if not stat.S_ISREG(mode):
        raise UserError(f"{flag} {path} is a device or pipe, which writing would replace; give a file name")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: the folder {path.parent} is not writable")


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


def load_tensors(path: str | os.PathLike, *, mmap: bool = True) -> object:
    """What `torch.save` wrote to `path`, on the CPU: tensors and plain Python values, nothing else.

    `weights_only=True` never runs code from the file. mmap: map files in the zip format into memory, so that a tensor
    is read from disk when it is used; not for tensors that outlive the file. Raises `UserError` where the file is
    missing, damaged, or holds anything else.
    """
    import torch

    try:
        with open(path, "rb") as file:
            start = file.read(4)
        is_zip = start == b"PK\x03\x04"
        if not is_zip and not start.startswith(b"\x80"):
            raise ValueError("neither a zip nor a pickle")  # a web page, for example
        with warnings.catch_warnings():  # torch.load's remarks about odd files would stand beside the one line
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # whatever the unpickler meets in a damaged or foreign file
        if "weights_only" in str(error):
            reason = "it holds Python objects other than tensors and plain values, which are never unpickled here"
        else:
            reason = "it is not a PyTorch checkpoint, or it is truncated or damaged"
        raise UserError(f"cannot load {path}: {reason}") from None


# --------------------------------------------------------------------------------------- randomness and devices


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


# ----------------------------------------------------------------------------------------------------- masks


@lru_cache(maxsize=16)
def causal_mask(query_len: int, key_len: int, device: torch.device | None = None) -> torch.Tensor:
    """Which keys a query may see in a causal model: True where it may. The last query sees every key.

    Returns a bool tensor of shape (query_len, key_len), the same one for all layers: nobody may write to it.
    """
    import torch

    with torch.inference_mode(False):  # as the tables of rope.py
        mask = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
        return mask.tril(diagonal=key_len - query_len)


def causal_mask_at(positions: torch.Tensor, key_len: int) -> torch.Tensor:
    """`causal_mask` for one query a row, at a position of its own. positions: b. Returns bool b 1 1 t."""
    import torch

    keys = torch.arange(key_len, device=positions.device)
    return (keys <= positions[:, None])[:, None, None]


def padded_causal_mask(pad: torch.Tensor, query_len: int, key_len: int) -> torch.Tensor:
    """`causal_mask` for rows that begin with padding: nobody sees it, but a padding position sees itself.

    (A query that sees nothing at all would come out of the softmax as NaN, and spread.)
    pad: b, how many padding tokens each row begins with. Returns bool b 1 s t.
    """
    import torch

    keys = torch.arange(key_len, device=pad.device)
    queries = keys[key_len - query_len :]
    is_real = keys >= pad[:, None]  # b t
    sees_itself = queries[:, None] == keys  # s t
    visible = causal_mask(query_len, key_len, pad.device) & is_real[:, None, :] | sees_itself  # b s t
    return visible[:, None]


def sequence_lengths(token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The number of tokens before the right padding of each row.

    token_ids: b s. Returns b, at least 1. Only *trailing* `pad_id`s count as padding.
    """
    import torch

    positions = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
    return ((token_ids != pad_id) * positions).amax(dim=1).clamp(min=1)  # b
