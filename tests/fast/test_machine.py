"""Every processor: kernels that fail here are not used, measurements are kept, damaged files are made anew."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_llama
from test_fast import TOKENS
from torch import nn

import fast.apply
import fast.linear
from fast import accelerate, compact, compiled, decoder, measure
from fast.compact import USERS_SETTINGS
from fast.linear import Bf16Linear, RoundedLinear, has_gated_products, has_onednn, why_no_onednn
from fast.measure import MEASURED, TOO_BUSY, fastest, recall, remember

# Decodes 20 tokens through whatever is chosen, and says whether that were the loops.
DECODE = """
import sys, torch
from types import SimpleNamespace
sys.path.insert(0, {root!r})
from fast import accelerate, compiled, decoder
from engine.weights import load_llama_model
if not {mends}:
    compiled.subprocess = SimpleNamespace(Popen=lambda *args, **settings: None, DEVNULL=None)
model = load_llama_model({path!r}, attention="causal")
plain = model.generate(torch.tensor([[1, 5, 9]]), 20, temperature=0.0)
accelerate(model)
ours = decoder(model)
assert torch.equal(ours.generate(torch.tensor([[1, 5, 9]]), 20, temperature=0.0), plain)
print("loops" if ours.choice.kernel == "numba" else "PyTorch")
"""


def run_python(*args: str, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name not in USERS_SETTINGS}
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, env=env | environment)


def decode(checkpoint: Path, *, mends: bool = False, **environment: str) -> tuple[str, str]:
    """The kernel that has decoded, and the notices."""
    done = run_python("-c", DECODE.format(root=str(ROOT), path=str(checkpoint), mends=mends), **environment)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("note: ") for line in done.stderr.splitlines()), done.stderr
    return done.stdout.strip(), done.stderr


# ------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINLLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "interruptions", lambda: 0)  # other tests run beside these
    return tmp_path / "cache/machine.json"


def waiting(seconds: float, calls: list) -> Callable[[], None]:
    def run() -> None:
        calls.append(seconds)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return run


def test_the_faster_way_is_taken_and_kept(cache: Path):
    calls: list[float] = []
    ways = {"plain": waiting(0.02, calls), "other": waiting(0.001, calls)}
    name, why = fastest("a question", ways)
    assert name == "other" and "times as fast as plain" in why
    count = len(calls)
    assert fastest("a question", ways)[0] == "other" and len(calls) == count  # from the file
    slower = {"plain": waiting(0.001, calls), "other": waiting(0.001, calls)}
    assert fastest("another question", slower)[0] == "plain"  # a little is not enough
    assert fastest("no question", {"plain": waiting(1.0, calls)}) == ("plain", "there is no other")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"x": 3}', b"\xff\xfe", b'{"QUESTION": {"plain": "fast"}}'])
def test_a_damaged_file_of_measurements_is_measured_anew(cache: Path, content: bytes):
    cache.parent.mkdir()
    question = f"{measure.processor()} {measure.settings()} a question"
    cache.write_bytes(content.replace(b"QUESTION", question.encode()))
    calls: list[float] = []
    assert fastest("a question", {"plain": waiting(0.02, calls), "other": waiting(0.001, calls)})[0] == "other"
    assert calls and json.loads(cache.read_text())[question].keys() == {"plain", "other"}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("MINLLAMA_CACHE", "file/folder", "cannot be written"), ("WORLD_SIZE", "2", "several processes do not measure")],
)
def test_where_nothing_can_be_kept_or_several_processes_measure_the_plain_way_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / value) if "/" in value else value)
    calls: list[float] = []
    name, why = fastest("a question", {"plain": waiting(0.02, calls), "other": waiting(0.001, calls)})
    assert name == "plain" and words in why and bool(calls) == (variable == "MINLLAMA_CACHE")


def test_a_busy_machine_is_not_measured(cache: Path, monkeypatch: pytest.MonkeyPatch):
    now, runs = [0.0], iter(range(1000))

    def run() -> None:
        now[0] += 2.0 ** (5 * next(runs) % 16)  # no two rounds alike

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    name, why = fastest("a question", {"plain": run, "other": run})
    assert name == "plain" and "too busy" in why
    assert [[*answer] for answer in json.loads(cache.read_text()).values()] == [[measure.BUSY]]  # no times are kept


def test_a_measurement_that_was_interrupted_does_not_count_and_is_tried_again_after_an_hour(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[float] = []
    ways = {"plain": waiting(0.002, calls), "other": waiting(0.001, calls)}
    monkeypatch.setattr(measure, "interruptions", lambda: len(calls))  # one a round
    monkeypatch.setattr(measure, "_clear_times", lambda rounds: None)
    assert fastest("a question", ways) == ("plain", TOO_BUSY) and calls
    count, now = len(calls), time.time()
    monkeypatch.setattr(measure, "interruptions", lambda: 0)
    assert fastest("a question", ways) == ("plain", TOO_BUSY) and len(calls) == count
    monkeypatch.setattr(measure.time, "time", lambda: now + measure.AGAIN)
    assert fastest("a question", ways)[0] == "other" and len(calls) > count


@pytest.mark.parametrize(
    ("plain", "other", "expected"),
    [
        ((5, 9, 5, 12, 8, 99, 7, 6), (1, 2, 4, 1, 3, 2, 70, 1), "other"),  # but for one round of each
        ((5, 9, 5, 12, 8, 99, 7, 0.5), (1, 2, 4, 1, 3, 2, 170, 1), "other"),  # which are the least and the most of all
        ((1, 2, 4, 1, 3, 2, 70, 1), (5, 9, 5, 12, 8, 99, 7, 6), "plain"),
        ((5, 9, 5, 12, 8, 2, 2, 6), (1, 2, 4, 1, 3, 2, 1, 1), TOO_BUSY),
        ((5, 9, 5, 12, 8, 7, 7, 6), (1, 2, 4, 1, 3, 6, 6, 1), TOO_BUSY),
    ],
)
def test_a_way_that_is_clearly_faster_is_taken_on_a_busy_machine_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch, plain: tuple, other: tuple, expected: str
):
    now, calls = [0.0], itertools.count()

    def taking(rounds: tuple) -> Callable[[], None]:
        takes = itertools.cycle(rounds)  # the first one warms up
        return lambda: now.__setitem__(0, now[0] + next(takes))

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "interruptions", lambda: next(calls))  # in every round
    name, why = fastest("a question", {"plain": taking(plain), "other": taking(other)})
    assert (why if expected == TOO_BUSY else name) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="asked on Linux alone")
def test_a_program_beside_this_one_interrupts_it():
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        before = measure.interruptions()
        assert any(measure.interruptions() > before for _ in range(400) if waiting(0.01, [])() is None)
    finally:
        for each in beside:
            each.kill()
            each.wait()


def test_what_is_kept_is_that_of_this_processor(cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert remember("a fact", 3) and recall("a fact") == 3
    monkeypatch.setattr(measure, "processor", lambda: "another")
    assert recall("a fact") is None


# --------------------------------------------------------------------------------------------------------- memory


def keeps_memory(**environment: str) -> str:
    """In a process of its own, since it is for good."""
    done = run_python("-c", "from fast import compact; print(compact.keep_freed_memory())", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_freed_memory_is_kept_where_the_c_library_is_glibc_and_the_user_has_no_settings():
    assert keeps_memory() == str(platform.libc_ver()[0] == "glibc")
    assert keeps_memory(MALLOC_TRIM_THRESHOLD_="1000000") == "False"


def test_glibc_is_told_both_thresholds(monkeypatch: pytest.MonkeyPatch):
    for name in USERS_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for answers in ((1, 1), (1, 0), (0, 1)):
        told: dict[int, int] = {}

        def mallopt(parameter: int, value: int, told: dict = told, answers: tuple = answers) -> int:
            told[parameter] = value
            return answers[len(told) - 1]

        libc = SimpleNamespace(gnu_get_libc_version=None, mallopt=mallopt)
        monkeypatch.setattr(compact.ctypes, "CDLL", lambda name, libc=libc: libc)
        assert compact.keep_freed_memory() is all(answers)
    assert told[-3] == 32 * 2**20  # M_MMAP_THRESHOLD of malloc.h, the most that glibc takes
    compact.ctypes.CDLL(None).mallopt = lambda parameter, value: told.update({parameter: value}) or 1
    assert compact.keep_freed_memory() and told[-1] == 2**31 - 1  # M_TRIM_THRESHOLD, an int
    monkeypatch.setattr(compact.ctypes, "CDLL", lambda name: object())  # another C library
    assert compact.keep_freed_memory() is False


def test_accelerating_for_a_cpu_keeps_memory(monkeypatch: pytest.MonkeyPatch):
    calls: list[bool] = []
    monkeypatch.setattr(fast.apply, "keep_freed_memory", lambda: calls.append(True))
    accelerate(random_llama())
    assert calls == [True]
    accelerate(random_llama(), device=torch.device("meta"))
    assert calls == [True]


# -------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_that_fails_or_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    def refuses(*args) -> torch.Tensor:
        raise RuntimeError("bf16 path needs the cpu support")

    for broken, words in ((refuses, "bf16 path needs"), (lambda x, weight, *bias: (x @ weight.t()) * 1.5, "differ")):
        with monkeypatch.context() as patch:
            patch.setattr(fast.linear, "onednn_linear", broken)
            patch.setattr(fast.linear, "pack", lambda weight: weight)
            why_no_onednn.cache_clear()
            assert not has_onednn(dtype) and words in why_no_onednn(dtype)
    why_no_onednn.cache_clear()


def test_gated_products_that_fail_or_are_wrong_are_not_taken(monkeypatch: pytest.MonkeyPatch):
    if not has_onednn(torch.bfloat16):
        pytest.skip("oneDNN's products in bfloat16 do not work here")
    for broken in (None, lambda x, *weights: x[..., :1].expand(*x.shape[:-1], 40)):
        with monkeypatch.context() as patch:
            patch.setattr(fast.linear, "onednn_gated", broken)
            has_gated_products.cache_clear()
            assert not has_gated_products()
    has_gated_products.cache_clear()
    assert has_gated_products()


def test_in_training_products_are_measured_with_the_gradients_that_their_names_say(monkeypatch: pytest.MonkeyPatch):
    if not has_onednn():
        pytest.skip("oneDNN's products do not work here")
    ways, calls = {}, []
    monkeypatch.setattr(fast.apply, "fastest", lambda question, given: ways.update(given) or ("PyTorch", ""))
    monkeypatch.setattr(fast.linear, "onednn_weight_gradient", lambda grad, x: calls.append(x) or grad.t() @ x)
    fast.apply._in_training()
    assert [way() or len(calls) for way in ways.values()] == [0, 0, 1]


def test_onednn_that_is_switched_off_is_not_taken():
    with torch.backends.mkldnn.flags(enabled=False):
        assert not has_onednn()
        model = random_llama()
        assert accelerate(model)[0].kernel == "plain" and type(model.output) is nn.Linear
        for precision in ("bf16", "int8"):
            other = random_llama()
            accelerate(other, precision)
            with torch.no_grad():
                assert (other(TOKENS)[0] - model(TOKENS)[0]).abs().max() < 0.1 * model(TOKENS)[0].abs().max()


@pytest.mark.parametrize("packs", [False, True])
def test_rounded_products_are_those_of_bfloat16(packs: bool):
    """Equal to bfloat16 products but for the order of their sums, which decides roundings by one unit at most."""
    if packs and not has_onednn():
        pytest.skip("oneDNN's products do not work here")
    torch.manual_seed(0)
    true, rounded = Bf16Linear(96, 80, out_dtype=torch.bfloat16), RoundedLinear(96, 80, packs=packs)
    rounded.load_state_dict(true.state_dict())
    x, grad = torch.randn(7, 96), torch.randn(7, 80)
    answers = []
    for linear in (true, rounded):
        for trained in (False, True):
            row = x.clone().requires_grad_(trained)
            with torch.set_grad_enabled(trained):
                y = linear(row).float()
            answers.append([y.detach()])
            if trained:
                linear.zero_grad()
                y.backward(grad)
                answers[-1] += [row.grad, linear.weight.grad]
    for expected, actual in zip(answers[:2], answers[2:], strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, a.bfloat16().float())  # results are bfloat16 numbers
            assert (a - b).abs().max() <= 2**-7 * b.abs().max()
            assert (a == b).float().mean() > 0.9


def test_bf16_is_rounded_where_its_products_are_slow_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.setattr(fast.apply, "fastest", lambda question, ways: (next(iter(ways)), f"it is not, {MEASURED}"))
    fast.apply.notice.cache_clear()
    model = random_llama()
    choices = accelerate(model, "bf16")
    assert choices[0].kernel == "rounded to bf16" and type(model.output) is RoundedLinear
    assert capfd.readouterr().err.count("bf16 is not faster than fp32") == 1
    accelerate(model, "fp32")
    assert capfd.readouterr().err == ""
    for why in (TOO_BUSY, "several processes do not measure", "no measurement can be kept"):
        monkeypatch.setattr(fast.apply, "fastest", lambda question, ways, why=why: (next(iter(ways)), why))
        accelerate(model, "bf16")
        said = capfd.readouterr().err  # not that it is slower, which is not known
        assert why in said and "not faster" not in said


# ------------------------------------------------------------------------------------------------ compiled loops


@pytest.fixture(scope="module")
def compiled_loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled loops, and what is known of them."""
    pytest.importorskip("numba")
    folder = tmp_path_factory.mktemp("numba")
    done = run_python("-m", "fast", "--compile", "fp32", **environment(folder))
    assert done.returncode == 0, done.stderr
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"NUMBA_CACHE_DIR": str(folder / "loops"), "MINLLAMA_CACHE": str(folder / "known")}


@pytest.mark.slow
def test_loops_that_are_compiled_decode(compiled_loops: Path, tiny_checkpoint: Path):
    assert decode(tiny_checkpoint, **environment(compiled_loops)) == ("loops", "")


@pytest.mark.slow
def test_loops_that_are_not_compiled_are_not_waited_for(tmp_path: Path, tiny_checkpoint: Path):
    assert decode(tiny_checkpoint, **environment(tmp_path)) == ("PyTorch", "")
    assert not list(tmp_path.rglob("*.nbc"))


ANOTHER_PROCESSOR = "nehalem" if os.environ.get("NUMBA_CPU_NAME") == "haswell" else "haswell"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NUMBA_NUM_THREADS", "0", "numba does not work here"),
        ("NUMBA_DISABLE_JIT", "1", ""),
        ("NUMBA_THREADING_LAYER", "nope", "numba does not work here"),
        ("NUMBA_CPU_NAME", ANOTHER_PROCESSOR, ""),
    ],
)
def test_settings_of_numba_that_do_not_work_leave_decoding_to_pytorch(
    compiled_loops: Path, tiny_checkpoint: Path, variable: str, value: str, words: str
):
    kernel, notes = decode(tiny_checkpoint, **environment(compiled_loops), **{variable: value})
    assert kernel == "PyTorch" and words in notes and len(notes.splitlines()) == bool(words)


def test_loops_of_a_numba_that_is_gone_are_not_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    remember(compiled.KEPT_AS, {"of": compiled._made_from(), "formats": ["fp32"], "files": {}})
    assert compiled.was_compiled("fp32")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not compiled.was_compiled("fp32")


NOT_THE_RECORD = [{"formats": 3}, {"formats": "fp32"}, {"formats": [["fp32"]]}, {"formats": ["fp32", None]}]
NOT_THE_RECORD += [{"files": 3}, {"files": ["a"]}, {"files": None}, {"of": math.nan}, 10**400, "fp32", ["fp32"]]


@pytest.mark.parametrize("change", NOT_THE_RECORD, ids=str)
def test_a_record_of_the_loops_that_is_not_as_it_was_written_is_none(
    cache: Path, change: object, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("numba")
    state = compiled._State()  # of a process that has not loaded the loops
    monkeypatch.setattr(compiled, "_state", lambda: state)
    sound = {"of": compiled._made_from(), "formats": ["fp32"], "files": {}}
    remember(compiled.KEPT_AS, {**sound, **change} if isinstance(change, dict) else change)
    assert not compiled.was_compiled("fp32") and not compiled.are_compiled("fp32")
    with pytest.raises(compiled.NotReady, match="not compiled yet"):
        compiled.load("int8")


@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_deep_answers_are_not_kept(cache: Path, depth: int):
    cache.parent.mkdir()
    cache.write_text(f'{{"{measure.processor()} deep": {"[" * depth}{"]" * depth}}}')
    assert recall("deep") is None and remember("a fact", 3) and recall("a fact") == 3


def test_files_that_the_record_names_are_left_alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where loops are damaged, numba's own files of them are removed: anybody can write into a shared folder."""
    pytest.importorskip("numba")
    others, ours = [tmp_path / name for name in ("thesis.pdf", "loops.x.nbc", "loops.x.nbi")], tmp_path / "loops.y.nbi"
    for path in (*others, ours):
        path.write_text("")
    files = {str(path): 0 for path in (*others, tmp_path / "\0", "/dev/zero")}
    remember(compiled.KEPT_AS, {"of": compiled._made_from(), "formats": ["fp32"], "files": files})
    state = compiled._State()
    monkeypatch.setattr(compiled, "_state", lambda: state)
    monkeypatch.setattr(compiled, "_files", lambda: [ours])
    monkeypatch.setattr(compiled, "subprocess", SimpleNamespace(Popen=lambda *args, **settings: None, DEVNULL=None))
    with pytest.raises(compiled.NotReady, match="damaged"):
        compiled.load("fp32")
    assert all(path.exists() for path in others) and not ours.exists() and not compiled.was_compiled("fp32")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "a bit flipped": flip,
    "removed": Path.unlink,
}
DAMAGED_FILES = [("nbi", "cut"), ("nbi", "emptied"), *(("nbc", damage) for damage in DAMAGES)]


@pytest.fixture
def damaged(compiled_loops: Path, tmp_path: Path) -> Iterator[Callable[[str, str], dict[str, str]]]:
    """Damages files of the loops, which are put back afterwards: what is known of them names their paths."""
    sound = tmp_path / "sound"
    shutil.copytree(compiled_loops, sound)

    def damage_them(ending: str, damage: str) -> dict[str, str]:
        for path in (compiled_loops / "loops").rglob(f"loops.matvec*.{ending}"):
            DAMAGES[damage](path)
        return environment(compiled_loops)

    yield damage_them
    shutil.rmtree(compiled_loops)
    shutil.copytree(sound, compiled_loops)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "damage"), DAMAGED_FILES)
def test_damaged_loops_are_left_alone_and_removed(
    damaged: Callable, compiled_loops: Path, tiny_checkpoint: Path, ending: str, damage: str
):
    env = damaged(ending, damage)
    kernel, notes = decode(tiny_checkpoint, **env)
    assert kernel == "PyTorch" and "damaged" in notes and len(notes.splitlines()) == 1
    assert not list((compiled_loops / "loops").rglob("*.nb[ic]"))
    assert decode(tiny_checkpoint, **env) == ("PyTorch", "")


@pytest.mark.slow
def test_damaged_loops_mend_by_themselves(damaged: Callable, compiled_loops: Path, tiny_checkpoint: Path):
    env = damaged("nbi", "emptied")
    assert decode(tiny_checkpoint, mends=True, **env)[0] == "PyTorch"
    known, deadline = compiled_loops / "known/machine.json", time.monotonic() + 200
    while "formats" not in known.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert decode(tiny_checkpoint, **env) == ("loops", "")


def test_few_tokens_of_a_small_model_are_not_worth_loading_the_loops(
    monkeypatch: pytest.MonkeyPatch,
):
    if compiled.why_no_loops() is not None:
        pytest.skip("there are no loops")
    tried, state = [], compiled._State()  # as in a process that has not loaded the loops
    monkeypatch.setattr(compiled, "_state", lambda: state)
    monkeypatch.setattr(compiled, "was_compiled", lambda format_: True)
    monkeypatch.setattr(compiled, "load", lambda format_: tried.append(format_))
    ours = decoder(random_llama(attention="causal"), tokens=150)
    assert ours.choice.kernel == "plain" and "not worth loading" in ours.choice.reason and not tried
    state.failure = "numba does not work here"  # as loading for an earlier text has found
    assert decoder(random_llama(attention="causal")).choice.reason == state.failure and not tried


def test_the_estimate_grows_with_tokens_and_weights():
    from config import LlamaConfig

    small, large = (LlamaConfig.from_preset(name) for name in ("tiny", "stories42M"))
    assert compiled.saved_seconds(small, 150) < compiled.LOAD_SECONDS < compiled.saved_seconds(large, 150)
    assert compiled.saved_seconds(large, 300) == pytest.approx(2 * compiled.saved_seconds(large, 150))


@pytest.mark.slow
def test_the_table_of_kernels_is_printed():
    done = run_python("-m", "fast")
    assert done.returncode == 0, done.stderr
    for words in ("linear layers", "norms and gates", "attention", "decoding", "compiled loops:", "torch"):
        assert words in done.stdout
    assert all(precision in done.stdout for precision in ("fp32", "bf16", "int8", "int4"))
    done = run_python("-m", "fast", "--compile", "fp8")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_measured_layers_leave_random_numbers_alone_and_import_nothing_large():
    code = """
import sys, torch
from fast.measure import FEW_ROWS
before = torch.get_rng_state()
layers = FEW_ROWS.not_trained()
assert torch.equal(before, torch.get_rng_state()) and all((layer.weight == 1).all() for _, layer in layers)
assert "sympy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
