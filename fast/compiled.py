"""The compiled loops: whether they are at hand, loading them, and compiling them.

Compiling takes many seconds and loading most of one, so a text never waits for the first, and waits for the second
only where that pays. Compiling beside a text was tried: at the lowest priority it makes the text take twice as long on
two cores. So `setup.sh` compiles, or `python -m fast --compile`. What is compiled lies where numba keeps it; its
checksums are kept with what else is known of this machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import nn

from config import LlamaConfig
from fast.linear import Bf16Linear, Int8Linear, RoundedLinear
from fast.measure import recall, remember
from fast.proof import say

LOOPS = Path(__file__).resolve().parent / "loops.py"
FORMATS = {"fp32": nn.Linear, "bf16": Bf16Linear, "int8": Int8Linear}
KEPT = "loops"  # under this name
LOAD_SECONDS = 0.6  # of importing numba and loading what is compiled
HINT_SECONDS = 2.0  # that the loops would save, from where on it is worth a line that they are not compiled


class NotReady(Exception):
    """Why there are no loops to decode with, in words."""


def format_of(llama: nn.Module) -> str:
    """In which numbers the loops read a model's weights."""
    kind = type(llama.output)
    return "int8" if kind is Int8Linear else "bf16" if kind in (Bf16Linear, RoundedLinear) else "fp32"


def saved_seconds(config: LlamaConfig, tokens: int) -> float:
    """About how much sooner the loops have decoded that many tokens than PyTorch has: a cautious estimate.

    PyTorch takes its time to start some twenty kernels a layer, and reads weights at about half the speed.
    """
    of_layer = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    weights = config.n_layers * of_layer + config.vocab_size * config.dim
    return tokens * (config.n_layers * 1e-4 + 4 * weights * 2.5e-11)


def why_no_loops() -> str | None:
    """What is known, without loading anything, to keep the loops from being used; None if nothing is."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install numba makes long texts several times faster"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    return _state().failure


def loaded() -> set[str]:
    """The number formats whose loops are in memory."""
    return _state().loaded


def are_compiled(format_: str) -> bool:
    """Whether the loops for one number format lie on disk, whole. What is damaged is removed."""
    kept = recall(KEPT)
    if not isinstance(kept, dict) or kept.get("of") != _made_from() or format_ not in kept.get("formats", ()):
        return False
    files = kept.get("files")
    if isinstance(files, dict) and files and all(_checksum(Path(path)) == sum_ for path, sum_ in files.items()):
        return True
    _remove(map(Path, files or ()))
    return False


def load(format_: str) -> ModuleType:
    """`fast.engine` with the loops for one number format in memory. Raises `NotReady`; never compiles."""
    state = _state()
    if format_ in state.loaded:
        return importlib.import_module("fast.engine")
    if state.failure is not None:
        raise NotReady(state.failure)
    if not are_compiled(format_):
        raise NotReady("the loops are not compiled yet (python -m fast --compile)")
    try:
        engine = _import_engine()
        with _refusing_to_compile():
            engine.warm_up(FORMATS[format_])
    except NotReady:  # numba takes what lies there for outdated
        remember(KEPT, None)
        raise
    except Exception as error:  # numba's threads, its settings, its files: whatever it is, PyTorch decodes as well
        state.failure = f"numba does not work here: {type(error).__name__}: {error}"
        say(f"text is generated without compiled loops; {state.failure}")
        raise NotReady(state.failure) from None
    state.loaded.add(format_)
    return engine


def compile_now(format_: str) -> None:
    """Compile the loops for one number format and keep them. Raises `NotReady` where that cannot be."""
    reason = why_no_loops()
    if reason is not None:
        raise NotReady(reason)
    try:
        engine = _import_engine()
        try:
            engine.warm_up(FORMATS[format_])
        except Exception:  # what lies on disk may be damaged: once more without it
            _remove(_files())
            engine.warm_up(FORMATS[format_])
    except Exception as error:
        raise NotReady(f"numba does not work here: {type(error).__name__}: {error}") from None
    files = {str(path): _checksum(path) for path in _files()}
    before = recall(KEPT) or {}
    formats = {format_, *(before.get("formats", ()) if before.get("of") == _made_from() else ())}
    if not files or not remember(KEPT, {"of": _made_from(), "formats": sorted(formats), "files": files}):
        raise NotReady("compiled code can be kept in no folder")
    _state().loaded.add(format_)


class _State:
    """What this process has found out."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.failure: str | None = None


@cache
def _state() -> _State:
    return _State()


def _import_engine() -> ModuleType:
    try:
        return importlib.import_module("fast.engine")
    except Exception as error:  # a NumPy that numba does not know, settings that it refuses, no folder for its files
        raise RuntimeError(f"it does not load: {error}") from None


@contextmanager
def _refusing_to_compile() -> Iterator[None]:
    """Raise `NotReady` where numba is about to compile one of the loops."""
    from numba.core import event

    class Refusal(event.Listener):
        def on_start(self, started: event.Event) -> None:
            if started.data["dispatcher"].py_func.__module__ == "fast.loops":
                raise NotReady("the loops on disk are outdated (python -m fast --compile)")

        def on_end(self, ended: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Refusal()):
        yield


def _made_from() -> list[object]:
    """What the compiled loops depend on besides the machine."""
    stat = LOOPS.stat()
    return [str(LOOPS), stat.st_mtime_ns, stat.st_size, importlib.metadata.version("numba"), sys.version]


def _files() -> list[Path]:
    """Where numba keeps what it has compiled of the loops."""
    from fast import loops

    folders = {function.stats.cache_path for function in vars(loops).values() if hasattr(function, "stats")}
    return sorted(path for folder in folders for path in Path(folder).glob("loops.*.nb[ic]"))


def _remove(files: Iterable[Path]) -> None:
    """Forget what is compiled."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    remember(KEPT, None)


def _checksum(path: Path) -> int | None:
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return None
