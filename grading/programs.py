"""How a grading script runs: arguments, errors in one line, files. The graders' own copy of parts of `utils.py`.

A student may replace every module of the package, `utils.py` among them, so no grader imports one.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent  # where the grading scripts lie
PARTS_FILE = "checkpoints/parts.json"  # what checkpoints/parts.py had others compute: the right numbers of the parts
MAX_WORD, MAX_MESSAGE = 400, 2000
INTERRUPTED = 130  # 128 and the signal's number, as a shell says


class GradingError(ValueError):
    """A mistake that the user can correct. The message is one line: what is wrong, where, and what to do."""


class DefaultText(str):
    """The default value of a flag. The same text, typed by a user, is a plain `str`."""


class GradingParser(argparse.ArgumentParser):
    """An `argparse` parser whose errors are one line instead of the usage text and a line; no abbreviated flags."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", float, decimal_number)

    def parse_known_args(self, args: list[str] | None = None, namespace: Any = None) -> tuple:
        for argument in sys.argv[1:] if args is None else args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse takes the value for its own mark
                self.error(f"argument {argument[:-3]}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise GradingError(f"{message} (see --help)")


def whole_number(text: str) -> int:
    """An integer in ASCII digits: `int` also takes `1_0` and digits of every script. Raises `ValueError`."""
    if not re.fullmatch(r"[+-]?[0-9]{1,1000}", text):
        raise ValueError("not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """As `whole_number`, for a number that may have a fraction or an exponent."""
    if not text.isascii() or "_" in text:
        raise ValueError("not a number")
    return float(text)


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit status.

    A `GradingError`, a file-system error, too little memory and an absent package become one line on standard error
    and status 2, an interrupt one line and status 130. Any other exception is a defect of the program and keeps its
    traceback. A reader of the output that ends early (`| head -1`, `>&-`) changes neither verdict nor status.
    """
    keep_standard_streams()
    status = 2
    try:
        result = main() or 0
        sys.stdout.flush()  # here, where a full disk is still an error like any other
        return result
    except GradingError as error:
        message = str(error)
    except KeyboardInterrupt:
        message, status = "interrupted", INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "numpy"):
            raise
        message = f"the package {error.name} is not installed for this Python; bash setup.sh installs it"
    except MemoryError:
        message = "the memory is used up; end other programs and run again"
    except OSError as error:
        where = error.filename or "a file or standard output"
        hint = "; free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        message = f"cannot read or write {where}: {error.strerror or error}{hint}"
        drop_stuck_output()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return status


class PatientStream(io.TextIOWrapper):
    """A standard stream whose reader may end early; then the text is dropped."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            send_nowhere(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            send_nowhere(self.fileno())


def keep_standard_streams() -> None:
    """Make standard output and error writable for as long as the program runs, with or without a reader."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed one would be the next file that is opened
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or open(number, "w", encoding="utf-8", closefd=False)
        if type(stream) is io.TextIOWrapper:  # not a test's
            is_by_line, is_unbuffered, encoding = stream.line_buffering, stream.write_through, stream.encoding
            # backslashes for what the terminal cannot show
            stream = PatientStream(stream.detach(), encoding, "backslashreplace", None, is_by_line, is_unbuffered)
        setattr(sys, name, stream)


def drop_stuck_output() -> None:
    """Drop the text that standard output cannot take; else Python fails on it once more at exit (status 120)."""
    try:
        sys.stdout.flush()
    except OSError:
        send_nowhere(sys.stdout.fileno())


def send_nowhere(number: int) -> None:
    """Connect a file descriptor with /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def one_line(message: str) -> str:
    """A message on one line of bounded length, however long the names and values are that it quotes."""
    words = (shorten(word, MAX_WORD) for word in message.split())
    line = shorten(" ".join(words), MAX_MESSAGE)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)  # a terminal obeys some


def shorten(text: str, most: int = 100) -> str:
    """At most so many characters, the middle left out."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def printable(value: object, most: int = 100) -> str:
    """`str` of a value, of bounded length; escaped where it has characters that a terminal hides or obeys."""
    text = shorten(str(value), most)
    return text if text.isprintable() else shorten(ascii(text), most)


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names of a collection, in the order of the alphabet, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 200) for name in names[:most]) + more


def find_own(name: str) -> Path | None:
    """The path of a file that comes with the scripts; None if absent. A student's file of that name does not count."""
    path = ROOT / name
    is_here = ROOT == Path.cwd().resolve()
    return (Path(name) if is_here else path) if path.is_file() else None


def find_course_file(name: str, judged: Path) -> Path | None:
    """The path of a file of the course, as the user named it; a default one in the current folder or by the scripts.

    judged: the student's folder. It and the folders in it do not count as the current one, unless the scripts lie
    there as well.
    """
    if not isinstance(name, DefaultText):
        return find_asset(name)
    here = Path.cwd().resolve()
    is_students = judged != ROOT and judged in (here, *here.parents)
    return Path(name) if Path(name).is_file() and not is_students else find_own(name)


def find_asset(name: str | os.PathLike) -> Path | None:
    """The path of an input file: in the current folder, else beside the scripts; None if in neither."""
    return next((path for path in (Path(name), ROOT / name) if path.is_file()), None)


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file, line ends turned into `\\n`; a byte-order mark is dropped.

    Raises `GradingError` where the file is missing, a device (some do not end), unreadable or not UTF-8 (naming the
    first bad line).
    """
    try:
        if Path(path).is_char_device():
            raise GradingError(f"{path} is a device; give a file")
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise GradingError(f"{path} does not exist") from None
    except OSError as error:
        raise GradingError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise GradingError(f"{path} line {line}: not UTF-8 text; save the file as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Open a temporary binary file beside `path`, and rename it to `path` when the block ends without an exception.

    Raises `OSError` as `open` does, naming `path`; the temporary file is removed whatever happens.
    """
    path = Path(path)
    # the name is known before the file is there: an interrupt could come between the two
    temporary = path.parent / f".minllama-{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # it is renamed, or its folder cannot be written to, which is being said
            temporary.unlink()


def check_writable(path: str | os.PathLike, flag: str) -> None:
    """Raise `GradingError` naming `flag` unless `path` can be created or replaced."""
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except OSError as error:
        raise GradingError(f"{flag} {path}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise GradingError(f"{flag} {path} is a folder; give a file name")
    if not stat.S_ISREG(mode):
        raise GradingError(f"{flag} {path} is a device or pipe, which writing would replace; give a file name")
    if not path.parent.is_dir():
        raise GradingError(f"{flag} {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise GradingError(f"{flag} {path}: the folder {path.parent} is not writable")
