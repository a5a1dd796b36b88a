"""The compiled loops: whether they can be used, loading them, and compiling them.

Compiling takes many seconds and loading takes most of a second. A text never waits for compiling, and waits for loading
only if that saves more time. (Compiling beside a text, at the lowest priority, made the text take twice as long on two
cores.) So `setup.sh` compiles, or `python -m fast --compile`. numba keeps the compiled files, and `fast.measure` their
checksums.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from config import LlamaConfig
from engine.equivalence import notice
from fast.linear import Bf16Linear, Int4Linear, Int8Linear, RoundedLinear
from fast.measure import recall, remember
from utils import ROOT

LOOPS = ("fast.loops", "fast.loops_together", "fast.loops_head", "fast.row_sums")  # what numba compiles
LOOPS_FILES = [Path(__file__).resolve().parent / f"{name.partition('.')[2]}.py" for name in LOOPS]
ONE_TEXT, TOGETHER = ENGINES = ("fast.loop_engine", "fast.together")  # the modules that run them
LINEAR_KERNELS = {"fp32": nn.Linear, "bf16": Bf16Linear, "int8": Int8Linear, "int4": Int4Linear}
KEPT_AS = "loops"  # the name of the checksums and formats in `fast.measure`
LOAD_SECONDS = 0.6  # to import numba and load the compiled loops

GIVE_WAY = """import os
os.nice(19)
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    pass
"""  # runs before the imports of PyTorch and numba, which take time as well


class NotReady(Exception):
    """The loops cannot be used. The message is the reason."""


def format_of(llama: nn.Module) -> str:
    """The number format in which the loops read a model's weights."""
    kind = type(llama.output)
    if any(type(module) is Int4Linear for module in llama.modules()):  # whose output matrix has 8 bits
        return "int4"
    return "int8" if kind is Int8Linear else "bf16" if kind in (Bf16Linear, RoundedLinear) else "fp32"


def saved_seconds(config: LlamaConfig, tokens: int) -> float:
    """A cautious estimate of the seconds that the loops save against PyTorch on so many tokens.

    PyTorch starts some twenty kernels a layer, and reads weights at about half the speed.
    """
    of_layer = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    weights = config.n_layers * of_layer + config.vocab_size * config.dim
    return tokens * (config.n_layers * 1e-4 + 4 * weights * 2.5e-11)


def why_no_loops() -> str | None:
    """Why the loops cannot be used, as far as that is known without loading them; None for no known reason."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install numba makes long texts several times faster"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    return _state().failure


def loaded() -> set[str]:
    """The number formats of the loops for one text that are in memory."""
    return {format_ for engine, format_ in _state().loaded if engine == ONE_TEXT}


def are_compiled(format_: str) -> bool:
    """Whether the loops of one number format are on disk, undamaged."""
    return was_compiled(format_) and not _is_damaged()


def was_compiled(format_: str) -> bool:
    """Whether the loops of one number format have been compiled here; `load` finds damaged files."""
    return format_ in _kept()["formats"]


def _kept() -> dict[str, Any]:
    """The formats that were compiled from the present sources, and checksums by path; both empty if not as written."""
    kept = recall(KEPT_AS)
    if isinstance(kept, dict) and kept.get("of") == _made_from():
        formats, files = kept.get("formats"), kept.get("files")
        if isinstance(formats, list) and isinstance(files, dict) and all(each in [*LINEAR_KERNELS] for each in formats):
            return {"formats": formats, "files": files}
    return {"formats": [], "files": {}}


def _is_damaged() -> bool:
    """Whether a file is not as it was written, after a full disk or a power failure."""
    files, ours = _kept()["files"], {*map(str, _files())}  # files elsewhere are not ours, whatever was kept
    return not files or any(path not in ours or _checksum(Path(path)) != files[path] for path in files)


def load(format_: str, engine_name: str = ONE_TEXT) -> ModuleType:
    """An engine with its loops of one number format in memory. Raises `NotReady`; never compiles."""
    state = _state()
    if (engine_name, format_) in state.loaded:
        return importlib.import_module(engine_name)
    if state.failure is not None:
        raise NotReady(state.failure)
    if not was_compiled(format_):
        raise NotReady("the loops are not compiled yet (python -m fast --compile)")
    try:
        engine = _import_engine(engine_name)
        if _is_damaged():
            raise EOFError
        with _refusing_to_compile():
            engine.warm_up(LINEAR_KERNELS[format_])
    except NotReady:  # numba says that its files are outdated
        remember(KEPT_AS, None)
        raise
    except (EOFError, pickle.UnpicklingError):
        _mend(format_)
        state.failure = "the compiled loops on disk were damaged; they are being compiled anew"
        notice(f"text is generated by PyTorch's kernels: {state.failure}")
        raise NotReady(state.failure) from None
    except Exception as error:  # such as numba's threads or settings: PyTorch can decode as well
        state.failure = f"numba does not work here: {type(error).__name__}: {error}"
        notice(f"text is generated by PyTorch's kernels: {state.failure}")
        raise NotReady(state.failure) from None
    state.loaded.add((engine_name, format_))
    return engine


def _mend(format_: str) -> None:
    """Remove the compiled files, and compile anew in a process of low priority that outlives this one."""
    _remove_files()
    code = f"{GIVE_WAY}from fast.compiled import compile_now; compile_now({format_!r})"
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with suppress(OSError):
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, **nowhere)


def compile_now(format_: str) -> None:
    """Compile the loops of one number format and keep them. Raises `NotReady` if that fails."""
    reason = why_no_loops()
    if reason is not None:
        raise NotReady(reason)
    try:
        engines = [_import_engine(name) for name in ENGINES]
        _remove_outdated_files()
        try:
            for engine in engines:
                engine.warm_up(LINEAR_KERNELS[format_])
        except Exception:  # files on disk may be damaged: try again without them
            _remove_files()
            for engine in engines:
                engine.warm_up(LINEAR_KERNELS[format_])
    except Exception as error:
        raise NotReady(f"numba does not work here: {type(error).__name__}: {error}") from None
    # an index may be written again, when numba compiles for another processor that shares the folder
    files = {str(path): _checksum(path) for path in _files() if path.suffix == ".nbc"}
    formats = sorted({format_, *_kept()["formats"]})
    if not files or not remember(KEPT_AS, {"of": _made_from(), "formats": formats, "files": files}):
        raise NotReady("compiled code can be kept in no folder")
    _state().loaded.update((name, format_) for name in ENGINES)


class _State:
    """What this process has found out: engines and formats that are loaded, and why loading failed, if it did."""

    def __init__(self) -> None:
        self.loaded: set[tuple[str, str]] = set()
        self.failure: str | None = None


@cache
def _state() -> _State:
    return _State()


def _import_engine(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # such as a NumPy that numba does not know, refused settings, no folder for its files
        raise RuntimeError(f"it does not load: {error}") from None


@contextmanager
def _refusing_to_compile() -> Iterator[None]:
    """Raise `NotReady` when numba is about to compile one of the loops."""
    from numba.core import event

    class Refusal(event.Listener):
        def on_start(self, started: event.Event) -> None:
            if started.data["dispatcher"].py_func.__module__ in LOOPS:
                raise NotReady("the loops on disk are outdated (python -m fast --compile)")

        def on_end(self, ended: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Refusal()):
        yield


def _made_from() -> list[object]:
    """Everything but the machine that the compiled loops depend on."""
    settings = (os.environ.get(f"NUMBA_{name}") for name in ("CACHE_DIR", "CPU_NAME", "CPU_FEATURES"))
    try:
        numba = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:  # removed since, or a folder of that name
        numba = None
    stats = [(file, file.stat()) for file in LOOPS_FILES]
    sources = [value for file, stat in stats for value in (str(file), stat.st_mtime_ns, stat.st_size)]
    return [*sources, numba, sys.version, *settings]


def _files() -> list[Path]:
    """The files in which numba keeps the compiled loops, none of anybody else; empty if numba does not work."""
    try:
        from fast import loops
    except Exception:  # as in `_import_engine`
        return []
    folders = {function.stats.cache_path for function in vars(loops).values() if hasattr(function, "stats")}
    names = [file.stem for file in LOOPS_FILES]
    return sorted(path for folder in folders for name in names for path in Path(folder).glob(f"{name}.*.nb[ic]"))


def _remove_outdated_files() -> None:
    """Remove what is older than a source: numba looks at a loop's own file alone, not at those that it uses."""
    written = max(file.stat().st_mtime_ns for file in LOOPS_FILES)
    for path in _files():
        with suppress(OSError):
            if path.stat().st_mtime_ns < written:
                path.unlink()


def _remove_files() -> None:
    """Remove the compiled loops, numba's indices of them, and the record of them."""
    for path in _files():
        with suppress(OSError):
            path.unlink()
    remember(KEPT_AS, None)


def _checksum(path: Path) -> int | None:
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return None
