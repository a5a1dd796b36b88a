"""How a program of this package runs: its arguments, errors in one line, streams, the doors to other folders.

Importing this module costs nothing; PyTorch is imported inside the function that needs it.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from utils import UserError, decimal_number, one_line, whole_number

if TYPE_CHECKING:
    import torch

GRACE_SECONDS = 3.0
INTERRUPTED = 130  # what a shell says of a program that an interrupt has ended: 128 and the signal's number


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


# ---------------------------------------------------------------------------------------------------- running a program


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit status.

    A `UserError`, a file-system error, a memory that is too small and an absent module become one line on standard
    error and status 2, an interrupt one line and status 130. Anything else is a defect of the program and keeps its
    traceback. Work goes on when no program reads the output (`| head -1`, `>&-`).
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


# -------------------------------------------------------------------------------------------------------------- streams


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
    """Make standard output and error writable for as long as the program runs, even without a reader."""
    # a closed one would be the next file that is opened, and take whatever a library prints
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(("stdout", "stderr").index(name) + 1, "w", encoding="utf-8", closefd=False)
        if type(stream) is io.TextIOWrapper:  # not a test's, or a notebook's
            encoding, buffering, through = stream.encoding, stream.line_buffering, stream.write_through
            # a text may hold letters that the terminal cannot show; `python -u` asks for `write_through`
            stream = _PatientStream(
                stream.detach(), encoding, "backslashreplace", line_buffering=buffering, write_through=through
            )
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


# ---------------------------------------------------------------------------------------------------- files and folders


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
    """A folder of this package that stands beside run_llama.py; None where it is not here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the folder is here, and lacks something
            raise
        return None


def require_folder(name: str, wanted_for: str) -> ModuleType:
    """The same. Raises `UserError` that names what needs the folder, where it is absent."""
    folder = import_folder(name)
    if folder is None:
        raise UserError(f"{wanted_for} needs the folder {name}/ of this package beside run_llama.py")
    return folder


def import_part(name: str, wanted_for: str) -> ModuleType:
    """A module of such a folder, as `convert.directory`. Raises `UserError` as `require_folder` does."""
    require_folder(name.partition(".")[0], wanted_for)
    return importlib.import_module(name)


# --------------------------------------------------------------------------------------------------------------- memory


def peak_memory(device: torch.device) -> int:
    """Millions of bytes that this process, or its GPU, has held at most."""
    if device.type == "cuda":
        import torch

        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
