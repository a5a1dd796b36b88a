"""How a grading script runs: arguments, errors in one line, files, data lines, `--json`. The graders' own copies.

A student may replace every module of the package, `utils.py` among them, so no grader imports one.
`tests/grading/test_copies.py` compares these copies with `engine.data` and `utils`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import re
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C again, while the program and its libraries end
        message, status = "interrupted", INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "numpy"):
            raise
        message = f"the package {error.name} is not installed for this Python; bash setup.sh installs it"
    except MemoryError:
        message = "the memory is used up; end other programs and run again"
    except OSError as error:
        where = error.filename2 or error.filename or "a file or standard output"
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
        text = raw.replace(b"\0", b"\xff").decode("utf-8-sig")  # NUL is no text, as in `utils`
    except UnicodeDecodeError as error:
        line, nul = raw.count(b"\n", 0, error.start) + 1, ", it has a NUL" * (b"\0" in raw)
        raise GradingError(f"{path} line {line}: not UTF-8 text{nul}; save the file as UTF-8") from None
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
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
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


# ---------------------------------------------- data lines, label mappings and the prompt, as the assignment fixes them

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1

# ------------------------------------------------------------------------------------------------- data lines


class LabelledLine(NamedTuple):
    """One line of a data file, or of an output file, where the label is a prediction."""

    sentence: str
    label: int


def parse_line(line: str) -> LabelledLine:
    """Label and sentence of a line `LABEL ||| sentence`, without white space around them.

    The first separator counts: a sentence may hold another. Raises `ValueError` with the fault of another line.
    """
    label, separator, sentence = line.partition(SEPARATOR)
    sentence = sentence.strip()
    if not separator:
        raise ValueError(f"no '{SEPARATOR}' between label and sentence")
    if not sentence:
        raise ValueError("the sentence is empty")
    try:
        return LabelledLine(sentence, whole_number(label.strip()))
    except ValueError:
        raise ValueError(f"the label {label[:40]!r} is not a whole number") from None


def create_data(path: str | os.PathLike, num_labels: int | None = None, *, is_test: bool = False) -> list[LabelledLine]:
    """The examples of a data file, one `LABEL ||| sentence` a line, UTF-8.

    num_labels: labels must lie in 0 ... num_labels - 1; None accepts every label from 0 up. A test file without gold
    labels may have -1 on every line. Raises `GradingError`, naming file and line, for anything else.
    """
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise GradingError(f"{path} holds no data; expected lines of the form 'LABEL{SEPARATOR}sentence'")
    is_unlabelled = is_test and all(line.partition(SEPARATOR)[0].strip() == str(NO_GOLD_LABEL) for line in lines)
    lowest = NO_GOLD_LABEL if is_unlabelled else 0
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            example = parse_line(line)
        except ValueError as error:
            raise GradingError(f"{path} line {number}: {error}") from None
        if example.label < lowest or (num_labels is not None and example.label >= num_labels):
            allowed = "0 or more" if num_labels is None else f"from 0 to {num_labels - 1}, as the label mapping says"
            raise GradingError(f"{path} line {number}: the label {example.label} is not {allowed}")
        examples.append(example)
    return examples


# ---------------------------------------------------------------------------------------------- labels, prompt


def read_label_names(path: str | os.PathLike) -> list[str]:
    """The label mapping. Raises `GradingError` unless it is a JSON list of at least two distinct, non-empty strings."""
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GradingError(f"{path} is not JSON: {error}") from None
    is_list = isinstance(names, list) and all(
        isinstance(name, str) and name.strip() and name.isprintable() for name in names
    )
    if not is_list or len(names) < 2 or len(set(names)) < len(names):
        raise GradingError(f'{path} must be a JSON list of two or more distinct names, such as ["bad", "good"]')
    return names


QUESTION = "Is this movie {labels}? This movie is "  # the space at the end is part of the reference


def prompt_suffix(label_names: Sequence[str], question: str = QUESTION) -> str:
    """The question, its `{labels}` replaced with the names: `a or b`, or `a, b, or c`."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return question.replace("{labels}", choices)


def has_gold_labels(labels: Sequence[int]) -> bool:
    """Whether the labels of a data set can be gold: placeholders are all equal."""
    return len(set(labels)) > 1


def majority_accuracy(labels: Sequence[int]) -> float:
    """The accuracy of always answering the most frequent gold label."""
    return Counter(labels).most_common(1)[0][1] / len(labels)


# --------------------------------------------------------------------- one JSON object in the place of a script's lines


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of the lines")


def run_told(script: str, args: argparse.Namespace, run: Callable[[dict[str, Any]], int]) -> int:
    """Run a script's check and return its exit status; with `--json` its lines are an entry of the object.

    run: takes a dictionary for what else belongs into the object. Where it raises, nothing is printed here: the object
    is on standard output only if something was checked.
    """
    told: dict[str, Any] = {}
    if not args.json:
        return run(told)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run(told)
    lines = printed.getvalue().splitlines()
    print(json.dumps({"script": script, "edition": args.edition, "status": status, **told, "lines": lines}))
    return status
