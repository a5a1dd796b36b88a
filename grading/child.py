"""The process in which a student's code runs: it gets questions on one pipe and writes answers to another.

`grading.student_process` starts it. What a student's code prints goes to standard error alone. This process holds no
expected value and no verdict, and cannot import the modules that compute them. So nothing that a student's code does to
this process makes a wrong answer right. The code can still read any file, those of `grading/` too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from grading import wire
from grading.editions import INSTALLED

LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
LONGEST_TROUBLE = 2000  # characters; the script cuts further


class Blocked(BaseException):
    """The import of this module ended an earlier process, or did not end. No `except ImportError` catches this."""


class StudentImports(MetaPathFinder):
    """Runs each module of the student's folder once, and tells the script which one is being imported.

    blocked: modules that must not run again. An import that failed fails again with the same exception.
    """

    def __init__(self, folder: str, note: Callable[[str, str], None]):
        self.folder, self.note = folder, note
        self.blocked: set[str] = set()
        self.failed: dict[str, BaseException] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [self.folder]) if path is None else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = WatchedLoader(name, spec.loader.path, self)
        return spec


class WatchedLoader(SourceFileLoader):
    """The loader of one module of the student's folder."""

    def __init__(self, name: str, path: str, imports: StudentImports):
        super().__init__(name, path)
        self.imports = imports

    def get_code(self, fullname: str) -> CodeType:
        """Of the text that a reader sees: a compiled file beside it may hold something else."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        if self.name in self.imports.blocked:
            raise Blocked(self.name)
        if self.name in self.imports.failed:
            raise self.imports.failed[self.name]
        self.imports.note("importing", self.name)
        try:
            super().exec_module(module)
        except BaseException as error:
            self.imports.failed[self.name] = error
            raise
        finally:
            self.imports.note("imported", self.name)


class Child:
    """Answers questions about the student's code in `folder`. `write` takes a whole message."""

    def __init__(self, folder: str, write: Callable[[bytes], None]):
        self.folder, self.write = os.path.realpath(folder), write
        self.token = ""
        self.imports = StudentImports(self.folder, lambda what, name: self.send({what: name}))

    def send(self, header: dict, tensors: dict | None = None) -> None:
        """Write a message with the token of the question."""
        self.write(wire.pack({"token": self.token, **header}, tensors))

    def start(self) -> str:
        """Import PyTorch and `grading.questions`. Returns what went wrong, or ""."""
        place = next((at for at, one in enumerate(sys.meta_path) if one is PathFinder), 0)
        sys.meta_path.insert(place, self.imports)
        try:
            import torch

            if os.path.dirname(os.path.realpath(torch.__file__)) == self.folder:
                return "PyTorch cannot be imported: torch.py hides it; rename that file"
            import grading
            from grading import questions
        except BaseException as error:
            return f"PyTorch cannot be imported in this folder: {self.trouble(error)}{self.hidden_module(error)}"
        self.questions = questions
        grading.__path__ = []  # from here on no student's code imports the expected values
        return ""

    def hidden_module(self, error: BaseException) -> str:
        """The advice if an exception came through a file with the name of a module that PyTorch imports, else ""."""
        name = os.path.basename(self.frame(error)[0]).removesuffix(".py")
        return f"; {name}.py hides another module of that name: rename it" if name in LIBRARIES else ""

    def answer(self, header: dict, data: bytes) -> None:
        """Ask the student's code one question; send its tensors, or the trouble."""
        self.imports.blocked = set(header["blocked"])
        try:
            self.send({"answer": True}, self.questions.answer(header, data))
        except Blocked as error:
            self.send({"blocked": str(error)})
        except self.questions.Wrong as error:
            self.send({"trouble": str(error)[:LONGEST_TROUBLE]})
        except NotImplementedError as error:
            self.send({"trouble": f"NotImplementedError{self.place(error)}", "is_written": False})
        except BaseException as error:
            self.send({"trouble": self.trouble(error)})

    @staticmethod
    def remedy(name: str) -> str:
        """The advice about a library that is absent."""
        if name.partition(".")[0] not in INSTALLED:
            return "the course allows only what its setup.sh installs"
        return f"it is one of those that the course's setup.sh installs: pip install {name.replace('_', '-')}"

    def trouble(self, error: BaseException) -> str:
        """One line about an exception: its name, the line of the student's file, its message."""
        place = self.place(error)
        if isinstance(error, SystemExit):
            return f"exit(){place} ends the process (exit status {0 if error.code is None else error.code!r:.40})"
        if isinstance(error, ModuleNotFoundError) and error.name:
            file = os.path.basename(self.frame(error)[0])
            if file and error.name.startswith("grading."):
                return f"{file} imports {error.name:.100}, which belongs to the scripts that judge it"
            if file and not os.path.exists(os.path.join(self.folder, f"{error.name}.py")):
                absent = f"{error.name:.100}, which is not installed for this Python"
                return f"{file} imports {absent}; {self.remedy(error.name[:100])}"
        try:
            message = f": {error}".rstrip(": ")
        except BaseException:  # a student's exception may have a `__str__` of its own
            message = ""
        return f"{type(error).__name__}{place}{message}"[:LONGEST_TROUBLE]

    def frame(self, error: BaseException) -> tuple[str, int]:
        """Path and line of the innermost student's file that an exception came through, else "" and 0."""
        for frame in reversed(traceback.extract_tb(error.__traceback__, limit=-100)):
            path = os.path.realpath(frame.filename)
            if os.path.isabs(frame.filename) and os.path.dirname(path) == self.folder:
                return path, frame.lineno or 0
        return "", 0

    def place(self, error: BaseException) -> str:
        """` in llama.py line 12`, or "" if an exception came through none of the student's files."""
        path, line = self.frame(error)
        return f" in {os.path.basename(path)} line {line}" if path else ""


def serve(child: Child, questions: int) -> None:
    """Answer every question from the pipe `questions`, until the question "end"."""
    child.send({"ready": child.start()})
    while message := wire.read(questions):
        child.token = message[0]["token"]
        if message[0]["question"] == "end":
            return
        child.answer(*message)
    os._exit(0)  # the script is gone


def end_with_the_script() -> None:
    """Run in a thread: end this process when the script that started it is gone."""
    script = os.getppid()
    while os.getppid() == script:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """`sys.argv`: the folder that holds grading/, the student's folder, and those of PYTHONPATH with libraries."""
    home, folder = sys.argv[1:3]
    questions, answers, process = os.dup(0), os.dup(1), os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.argv[:] = [os.path.join(folder, "run_llama.py")]
    sys.path[:] = [folder, *(path for path in sys.path if path not in (home, folder))]

    def write(message: bytes) -> None:
        if os.getpid() != process:  # a copy, forked by the student's code
            os._exit(0)
        try:
            wire.write(answers, message)
        except OSError:  # a student's code has closed the pipe
            os._exit(wire.CLOSED)

    def say_goodbye() -> None:
        child.send({"goodbye": True})
        os._exit(0)

    child = Child(folder, write)
    threading.Thread(target=end_with_the_script, daemon=True).start()
    atexit.register(say_goodbye)  # the first to be registered runs last: after all that a student's code registers
    serve(child, questions)
