"""How a grading script asks a student's code: in a process of its own, with a time limit, over a pipe.

The script sends a question with its inputs and gets numbers, or the trouble in a sentence (`grading.wire`). The
expected numbers stay here. This module imports no PyTorch, so that both processes can import it at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grading import wire
from grading.programs import ROOT, GradingError

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------- the process, its pipes and its end

LOOK = 0.1  # seconds between two looks whether the process still lives
# Seconds for an answer on its way, once the process has ended. More than a busy machine keeps a thread waiting: a right
# answer that comes late would be called wrong.
LAST_WORDS = 5.0
SPOILT = "closed the pipe of its answers, or wrote to it"
LONGEST_OUTPUT = 8000  # bytes that are kept of what the process prints
# Small models judge: beside another busy program, threads that wait for one another took twenty times as long.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
START = """import sys; sys.path = [*filter(None, sys.path), sys.argv[1], *sys.argv[3:]]
from grading.child import main; main()"""


def libraries(folder: Path) -> list[str]:
    """The folders of PYTHONPATH, without the student's: no file there may hide grading/ or a library."""
    added = (os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    return [path for path in added if folder not in (Path(path), *Path(path).parents)]


class Process:
    """A running process of the student's code, and what it sends."""

    def __init__(self, folder: Path, scratch: str):
        flags = ["-B"] * sys.dont_write_bytecode
        inherited = {name: os.environ[name] for name in os.environ if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        self.start(
            [sys.executable, *flags, "-c", START, str(ROOT), str(folder), *libraries(folder)],
            {**ONE_THREAD, **inherited, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)},
            folder,
        )

    def start(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        """Run a command in a folder, and read what it sends and prints from now on."""
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,  # no terminal, and a process group that can be ended as a whole
        )  # fmt: skip
        self.messages: queue.Queue = queue.Queue(maxsize=4)
        self.output, self.printed = b"", 0
        self.drain = threading.Thread(target=self._drop_output, daemon=True)
        for thread in (threading.Thread(target=self._read_messages, daemon=True), self.drain):
            thread.start()

    def _read_messages(self) -> None:
        """Put every message into the queue; None at the end of the pipe, or at bytes that are not a message."""
        message: tuple[dict, bytes] | None = ({}, b"")
        while message is not None:
            try:
                message = wire.read(self.process.stdout.fileno())
            except (wire.Malformed, OSError, ValueError):
                message = None
            self.messages.put(message)

    def _drop_output(self) -> None:
        """Read all that the process prints, so that it never waits; keep the end of it for `last_line`."""
        with contextlib.suppress(OSError, ValueError):
            while printed := os.read(self.process.stderr.fileno(), 1 << 16):
                self.output = (self.output + printed)[-LONGEST_OUTPUT:]
                self.printed += len(printed)

    def last_line(self) -> str:
        """The last line that an ended process printed, unchanged, or ""."""
        self.drain.join(LAST_WORDS)
        return self.output.decode(errors="replace").rstrip().rpartition("\n")[2]

    def send(self, message: bytes) -> None:
        """Write in a thread: a process that does not read must not stop the script."""

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):  # the process has ended: `receive` finds that
                wire.write(self.process.stdin.fileno(), message)

        threading.Thread(target=write, daemon=True).start()

    def receive(self, deadline: float) -> tuple[dict, bytes] | None:
        """The next message; None if the process or its pipe has ended. Raises `TimeoutError` at the deadline.

        A copy of the process may hold the pipe open after its end, so the process itself is polled as well.
        """
        while (left := deadline - time.monotonic()) > 0:  # also of a process that never stops sending
            has_ended = self.process.poll() is not None
            try:
                return self.messages.get(timeout=min(LAST_WORDS if has_ended else LOOK, left))
            except queue.Empty:
                if has_ended:
                    return None
        raise TimeoutError

    def how_it_ended(self) -> str:
        """As text, after `receive` has returned None: an exit status, a signal, or a spoilt pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)
        status = self.process.returncode
        if status is None or status == wire.CLOSED:
            return SPOILT
        if status >= 0:
            return f"ended the process (exit status {status})"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
        return f"was ended by a signal ({name})"

    def kill(self) -> None:
        """End the process and its whole group."""
        with contextlib.suppress(OSError, AttributeError):  # Windows has no process groups
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)


# ------------------------------------------------------------------------------------------------------------ questions

LONGEST_TROUBLE = 200  # characters
TIME_LIMIT = 120.0  # seconds for one part
START_LIMIT = 300.0  # seconds for Python and PyTorch in the student's process: a slow disk is not the student's fault
MOST_IMPORTS = 1000  # that one question may cause
MOST_LOST, LONGEST_NAME = 10, 100  # imports under way in a lost process that are remembered; characters of a name
VERDICT = re.compile(r"\b(passed|correct)\s*!", re.IGNORECASE)


class ChildQuestion(NamedTuple):
    """A function of `grading.questions`, the student's module that it calls, and its arguments by name.

    settings: arguments that are plain values. tensors: arguments that are tensors, or dictionaries of tensors.
    """

    name: str
    module: str
    settings: dict[str, Any] = {}
    tensors: dict[str, Any] = {}


class ChildAnswer(NamedTuple):
    """The tensors that a student's code returned, with their names; or in one line why there are none.

    is_written: False for a `NotImplementedError`. is_lost: the process ended or had to be ended.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    trouble: str = ""
    is_written: bool = True
    is_lost: bool = False
    names: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return self.trouble if self.is_written else f"not written yet: {self.trouble}"


@dataclass
class Student:
    """The student's code in `folder`. Use it in a `with` block: at its end the process is ended.

    One process answers all questions; if it is lost, the next question gets a new one. If the import of a module lost
    a process, the module is not imported again: questions about it get the same answer at once.
    """

    folder: Path
    time_limit: float = TIME_LIMIT
    lost_imports: dict[str, ChildAnswer] = field(default_factory=dict)
    process: Process | None = None
    no_start: ChildAnswer | None = None  # the reason if no process can be started
    is_ready: bool = False
    last_module: str = ""

    def __enter__(self) -> Student:
        """Start the process; it imports PyTorch while the script does the same."""
        self.scratch = tempfile.TemporaryDirectory(prefix="minllama-", ignore_cleanup_errors=True)
        self.process = self.new_process()
        # PyTorch imports NumPy from C code that would swallow an interrupt, and go on
        importlib.import_module("numpy")
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        self.scratch.cleanup()

    def new_process(self) -> Process:
        return Process(self.folder, self.scratch.name)

    def _drop(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self.is_ready = None, False

    def ask(self, question: ChildQuestion) -> ChildAnswer:
        """The tensors that the student's code returns, as float64, or the trouble with it."""
        if question.module in self.lost_imports:
            return self.lost_imports[question.module]
        if trouble := self.no_start or self._make_ready():
            return trouble
        self.last_module, importing = question.module, []
        header = self.header(question)
        self.process.send(wire.pack(header, flat_tensors(question.tensors)))
        try:
            answer = self.listen(header["token"], time.monotonic() + self.time_limit, importing)
        except TimeoutError:
            answer = f"did not end within {self.time_limit:g} s"
        if isinstance(answer, ChildAnswer):
            return without_given(answer, question)
        name, doing = [question.module, *importing][-1], "imported" if importing else "called"
        lost = ChildAnswer(trouble=f"{short_repr(name)}.py {answer} while it was {doing}", is_lost=True)
        self.lost_imports |= dict.fromkeys(importing[-MOST_LOST:], lost)
        self._drop()
        return lost

    def ask_all(self, questions: Iterable[ChildQuestion]) -> list[ChildAnswer]:
        """The answers to several questions. If one question ends the process, all later ones get the same answer."""
        answers: list[ChildAnswer] = []
        for question in questions:
            answers.append(answers[-1] if answers and answers[-1].is_lost else self.ask(question))
        return answers

    def header(self, question: ChildQuestion) -> dict:
        """A new token: an answer to another question, or one that is written in advance, does not count."""
        asked = {"question": question.name, "settings": question.settings, "blocked": [*self.lost_imports]}
        return {"token": secrets.token_hex(16), **asked}

    def _make_ready(self) -> ChildAnswer | None:
        """Start a process if none is running, and wait until it can be asked. Returns the trouble, or None."""
        if self.process is None:
            self.process = self.new_process()
        elif self.is_ready and self.process.process.poll() is not None:
            ended = f"{self.last_module}.py {self.process.how_it_ended()} after it was called"
            self._drop()
            return ChildAnswer(trouble=ended, is_lost=True)
        if self.is_ready:
            return None
        trouble = self._wait_for_start()
        if trouble:
            self._drop()
            self.no_start = ChildAnswer(trouble=trouble, is_lost=True)
        self.is_ready = not trouble
        return self.no_start

    def _wait_for_start(self) -> str:
        """Wait until the process has imported PyTorch. Returns what went wrong, or "".

        PyTorch imports a student's file if it has the name of a module; then the import gets the time limit of a part.
        Raises `GradingError` if the process ends before it imports any of the student's files.
        """
        deadline, name = time.monotonic() + START_LIMIT, ""
        try:
            while (message := self.process.receive(deadline)) is not None and "ready" not in message[0]:
                name = short_repr(message[0].get("importing") or name)
                deadline = min(deadline, time.monotonic() + self.time_limit)
        except TimeoutError:
            return f"PyTorch cannot be imported in this folder: {name or 'its import'} takes too long"
        if message is None:
            how = self.process.how_it_ended()
            if not name:
                how, said = how.replace(" the process", ""), short_repr(self.process.last_line())
                raise GradingError(f"the process that is to run the code {how}{f': {said}' if said else ''}")
            return f"PyTorch cannot be imported in this folder: {name}.py {how}"
        return short_repr(message[0]["ready"])

    def listen(self, token: str, deadline: float, importing: list[str]) -> ChildAnswer | str:
        """The answer to the question with this token; or, as text, how the process was lost.

        importing: a list that this method fills: modules whose import has begun and not ended. Raises `TimeoutError`.
        """
        for _ in range(2 * MOST_IMPORTS):
            message = self.process.receive(deadline)
            if message is None:
                return self.process.how_it_ended()
            header, data = message
            if header.get("token") != token:
                return SPOILT
            if isinstance(header.get("importing"), str):
                importing.append(header["importing"][:LONGEST_NAME])
            elif "imported" in header:
                del importing[-1:]
            else:
                return self._answer(header, data)
        return f"imported modules more than {MOST_IMPORTS:,} times"

    def _answer(self, header: dict, data: bytes) -> ChildAnswer | str:
        """The answer in a message; or, as text, how the process was lost if the message holds none."""
        blocked = header.get("blocked")
        if isinstance(blocked, str) and blocked in self.lost_imports:
            return self.lost_imports[blocked]
        if "trouble" in header:
            trouble, is_written = short_repr(header["trouble"]), header.get("is_written") is not False
            return ChildAnswer(trouble=trouble, is_written=is_written)
        try:
            tensors = wire.unpack(header, data)
        except wire.Malformed:
            return SPOILT
        return ChildAnswer(tuple(one.double() for one in tensors.values()), names=tuple(tensors))

    def end(self) -> str:
        """Let the process end as any program does. Returns the trouble with its end, or ""."""
        if self.process is None or not self.is_ready:
            return ""
        token, module = secrets.token_hex(16), f"{self.last_module}.py"
        self.process.send(wire.pack({"token": token, "question": "end"}))
        deadline = time.monotonic() + self.time_limit
        try:
            message = self.process.receive(deadline)
            while message is not None and message[0].get("goodbye") is None:
                message = self.process.receive(deadline)
        except TimeoutError:
            return f"{module} keeps the process from ending: after {self.time_limit:g} s a thread still runs"
        if message is None or message[0].get("token") != token:
            return f"{module} {self.process.how_it_ended()} at its end"
        return ""


def takes_attention(student: Student) -> bool:
    """Whether the student's load_pretrained has an argument for the kind of attention; the hand-out's has none.

    False where the question fails: questions that follow will say why.
    """
    return not student.ask(ChildQuestion("names_attention", "llama")).trouble


def without_given(answer: ChildAnswer, question: ChildQuestion) -> ChildAnswer:
    """The answer without the question's own tensors; a trouble if one of them was changed."""
    import torch

    if answer.trouble or question.name == "saved_model":
        return answer
    found = dict(zip(answer.names, answer.tensors, strict=True))
    for name, tensor in flat_tensors(question.tensors).items():
        kept = found.pop(f"{wire.GIVEN}{name}", None)
        if kept is None or not torch.equal(kept, tensor.double()):
            return ChildAnswer(trouble=f"it changes its input {name} in place; make a new tensor")
    return ChildAnswer(tuple(found.values()), names=tuple(found))


def short_repr(text: object) -> str:
    """Text of the student's process on one line of bounded length; words that look like a verdict are left out."""
    text = text if isinstance(text, str) else f"({type(text).__name__})"  # a nested list may be too deep for `str`
    text = VERDICT.sub("[...]", " ".join(text.split()))
    text = text if len(text) <= LONGEST_TROUBLE else f"{text[: LONGEST_TROUBLE - 3]}..."
    return text if text.isprintable() else ascii(text)[1:-1]


def flat_tensors(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors by name; one of a dictionary is called `argument/name`. `questions.answer` restores the dictionaries."""
    flat = {}
    for argument, value in tensors.items():
        if isinstance(value, dict):
            flat |= {f"{argument}/{name}": tensor for name, tensor in value.items()}
        else:
            flat[argument] = value
    return flat


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every script that asks a student's code."""
    add, default = parser.add_argument, argparse.SUPPRESS
    help_text = "the folder of the code that is judged (default: the one that this script lies in)"
    add("--code", metavar="DIR", default=default, help=help_text)
    add_time_limit(parser)


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    limit = "how long a part may take"
    parser.add_argument("--time_limit", metavar="SECONDS", type=float, default=TIME_LIMIT, help=limit)


def time_limit_of(args: argparse.Namespace) -> float:
    """Raises `GradingError` for a number of seconds that cannot be."""
    if not 0 < args.time_limit < float("inf"):
        raise GradingError(f"--time_limit {args.time_limit:g}: give a number of seconds above 0")
    return args.time_limit


def student_of(args: argparse.Namespace) -> Student:
    """The student that the flags name. Raises `GradingError` for a folder or a number of seconds that cannot be."""
    if getattr(args, "code", None) == "":  # a `Path` of it would be the current folder
        raise GradingError("--code is empty; name the folder of the code, . for the current one")
    folder = Path(getattr(args, "code", ROOT)).resolve()
    if not folder.is_dir():
        raise GradingError(f"--code {folder} is not a folder")
    return Student(folder, time_limit_of(args))
