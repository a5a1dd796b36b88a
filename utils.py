"""Errors, safe files, asset look-up, seeds and devices: the small things that every other module may use.

Importing this module costs nothing. PyTorch and NumPy are imported inside the functions that need them, so that
`--help` and argument errors answer at once.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib
import io
import os
import random
import re
import reprlib
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent
GRACE_SECONDS = 3.0


class UserError(ValueError):
    """A mistake that the user can mend. The message is one line: what is wrong, where, and what to do."""


class NeedsCausal(UserError):
    """What reads likelihoods was given a bidirectional model."""


class Default(str):
    """A flag's default value, told apart from the same text that a user typed."""


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse` parser whose errors are one line instead of the usage text and a line; no abbreviated flags."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", int, whole_number)
        self.register("type", float, decimal_number)

    def parse_known_args(self, args: list[str] | None = None, namespace: Any = None) -> tuple:
        for argument in sys.argv[1:] if args is None else args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse takes the value for its own mark
                self.error(f"argument {argument[:-3]}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


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


# -------------------------------------------------------------------------------------------------- messages

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


def shown(value: object) -> str:
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


def some(names: Iterable[str], most: int = MAX_NAMES) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 200) for name in names[:most]) + more


# --------------------------------------------------------------------------------------------------- programs

INTERRUPTED = 130  # what a shell says of a program that an interrupt has ended: 128 and the signal's number


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit status.

    A `UserError`, a file-system error, a memory that is too small and an absent module become one line on standard
    error and status 2, an interrupt one line and status 130. Anything else is a defect of the program and keeps its
    traceback. Work goes on where nobody reads what is printed (`| head -1`, `>&-`).
    """
    _keep_standard_streams()
    status = 2
    try:
        result = main() or 0
        sys.stdout.flush()  # here, where a full disk is still an error like any other
        return result
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt as error:
        message = str(error) or "interrupted: files that were finished are kept, the others were not written"
        status = INTERRUPTED
    except ModuleNotFoundError as error:
        message = _which_is_absent(error)
    except OSError as error:
        where = error.filename or "a file or standard output"
        hint = "; free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        message = f"cannot read or write {where}: {error.strerror or error}{hint}"
        _drop_stuck_output()
    except (MemoryError, RuntimeError) as error:
        message = _what_is_used_up(error)
    _wait_for_the_first_process()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return status


def _which_is_absent(error: ModuleNotFoundError) -> str:
    """Raises the error again where it does not say what is absent."""
    if not error.name:
        raise error
    if error.name.partition(".")[0] in ("torch", "numpy", "sentencepiece", "tqdm", "sklearn"):
        return f"the package {error.name} is not installed for {sys.executable}; bash setup.sh installs it"
    place = error.__traceback__
    while place.tb_next:
        place = place.tb_next
    return (
        f"{error.name.replace('.', '/')}.py is not here, nor is a package of that name installed for "
        f"{sys.executable}; it is imported by {place.tb_frame.f_code.co_filename} line {place.tb_lineno}"
    )


def _what_is_used_up(error: MemoryError | RuntimeError) -> str:
    """Raises the error again where no memory is too small."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "the memory is used up; use a smaller --batch_size, shorter texts, or a smaller model"
    if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which must not be imported for its name alone
        raise error
    return "the accelerator's memory is used up; use a smaller --batch_size, or --device cpu"


def _wait_for_the_first_process() -> None:
    """Of several processes that meet the same error, one should name it: the machine's first.

    When that one ends, torchrun ends the others, here. An error that it does not share is named a little later.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(GRACE_SECONDS)


class _PatientStream(io.TextIOWrapper):
    """A standard stream whose reader may go away while the work goes on; what is written then goes nowhere."""

    has_reader = True

    def write(self, text: str) -> int:
        with self._unheard():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._unheard():
            super().flush()

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.has_reader = False
            _send_nowhere(self.fileno())


def _keep_standard_streams() -> None:
    """Make standard output and error writable for as long as the program runs, whoever listens."""
    # a closed one would be the next file that is opened, and take whatever a library prints
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(("stdout", "stderr").index(name) + 1, "w", encoding="utf-8", closefd=False)
        if type(stream) is io.TextIOWrapper:  # not a test's, or a notebook's
            how = dict(encoding=stream.encoding, line_buffering=stream.line_buffering)
            how |= dict(write_through=stream.write_through)  # which `python -u` asks for
            # a text may hold letters that the terminal cannot show
            stream = _PatientStream(stream.detach(), errors="backslashreplace", **how)
        setattr(sys, name, stream)


def _drop_stuck_output() -> None:
    """Send what standard output cannot take nowhere, or Python fails on it once more at exit (status 120)."""
    try:
        sys.stdout.flush()
    except OSError:
        _send_nowhere(sys.stdout.fileno())


def _send_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


# ----------------------------------------------------------------------------------------------------- files

TEMPORARY = ".minllama-"  # how the names of temporary files begin; then host, process, and something random


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` and rename it to `path` when the block ends without an exception.

    Whoever reads `path` sees the old file or the whole new one, never a half. Text is UTF-8 with `\\n` line ends on
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
    except PermissionError:  # somebody else's
        return True
    return True


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


def check_new(path: str | os.PathLike, flag: str) -> None:
    """Raise `UserError` naming `flag` unless `path` can be created, and nothing is lost by that."""
    check_writable(path, flag)
    if os.path.lexists(path):
        raise UserError(f"{flag}: {path} is there already; name another file, or remove it")


def find_asset(name: str | os.PathLike) -> Path | None:
    """Where an input file lies: as named (from the current folder), else beside this code; None if in neither."""
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return path
    return None


def tokenizer_name(checkpoint: str | os.PathLike, given: str | None = None) -> str:
    """What a checkpoint's tokenizer is called: `given`, else the .model file beside it, else tokenizer.model.

    Of a folder: tokenizer.model in it, else tokenizer.json.
    """
    if given:
        return given
    if os.path.isdir(checkpoint):
        inside = Path(checkpoint, "tokenizer.model")
        return str(inside if inside.exists() else inside.with_suffix(".json"))
    beside = Path(checkpoint).with_suffix(".model")
    return str(beside) if beside.is_file() else "tokenizer.model"


def import_folder(name: str) -> ModuleType | None:
    """A folder of this package that stands beside the root modules; None where it is not here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the folder is here, and lacks something
            raise
        return None


def import_part(name: str, wanted_for: str) -> ModuleType:
    """A module of such a folder, as `convert.directory`. Raises `UserError` that names what it is wanted for."""
    folder = name.partition(".")[0]
    if import_folder(folder) is None:
        raise UserError(f"{wanted_for} needs the folder {folder}/ of this package beside its modules")
    return importlib.import_module(name)


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


def peak_memory(device: torch.device) -> int:
    """Millions of bytes that this process, or its GPU, has held at most."""
    if device.type == "cuda":
        import torch

        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
