"""Contenders that break: the run goes on, says so in an error line and in the table, and ends with status 1."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import __main__ as benchmarks_main
from benchmarks import bench as bench_module
from benchmarks import learning, peers, run, table
from benchmarks.apart import Apart, LibraryModel, reason_of, run_python
from benchmarks.bench import Bench
from benchmarks.limits import Measured
from benchmarks.measure import Turns
from benchmarks.table import ROWS, ContenderInfo, Work
from config import LlamaConfig
from utils import UserError


class Outdated:
    """Asks a module of ours for what has moved."""

    def __init__(self, model: LibraryModel):
        exec("from convert.gguf import NO_SUCH_CONSTANT")


class Unloadable:
    """A library that is installed and does not load on this machine."""

    def __init__(self, model: LibraryModel):
        raise ImportError("libsomething.so.1: cannot open\nshared object file", name="no_such_library")


class Dies:
    """Its process ends while it computes."""

    def __init__(self, model: LibraryModel):
        pass

    def generate(self, prompt: list[int], new: int) -> list[int]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []

    def train_step(self, token_ids: np.ndarray, labels: np.ndarray) -> None:
        os.kill(os.getpid(), signal.SIGABRT)


def tiny_bench(folder: Path, *absent: str) -> Bench:
    config = LlamaConfig.from_preset("tiny", attention="causal")
    models, reasons = peers.Peers(peers.random_llama(config)), dict.fromkeys(absent, "left out")
    return Bench(config, models, Turns(1, 0.0), bench_module.QUICK_SIZES, None, folder, 1, None, reasons)


def test_a_reason_is_one_line():
    assert reason_of(RuntimeError("a\n  b")) == reason_of(UserError("a b")) == "a b"
    assert reason_of(TypeError("no")) == "TypeError: no"


def test_a_program_that_fails_says_how_it_ended():
    with pytest.raises(UserError, match="^it ended with status 3: so it is$"):
        run_python("it", ["-c", "import sys; print('x\\nso it is', file=sys.stderr); sys.exit(3)"], 1)
    with pytest.raises(UserError, match="^it ended with signal 9: nothing said$"):
        run_python("it", ["-c", "import os; os.kill(os.getpid(), 9)"], 1)
    seconds, printed = run_python("it", ["-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], 7)
    assert seconds > 0.0 and printed == "7\n"


def test_who_fails_takes_no_more_turns():
    def fails() -> None:
        done.append("b")
        if len(done) > 2:
            raise RuntimeError("gone")

    done, dropped = [], {}
    runs = {"a": lambda: done.append("a"), "b": fails, "c": lambda: done.append("c")}
    costs = Turns(2, pause=0.0).take(runs, drop=lambda name, error: dropped.update({name: str(error)}))
    assert "".join(done) == "abccbaac" and dropped == {"b": "gone"} and costs.keys() == {"a", "c"}
    with pytest.raises(RuntimeError, match="gone"):
        Turns(2, pause=0.0).take(runs)


def test_an_error_of_ours_ends_the_run(tmp_path: Path):
    bench = tiny_bench(tmp_path)
    for name in (table.OURS, f"{table.OURS}, int8"):
        with pytest.raises(RuntimeError, match="gone"), bench.attempt(name):
            raise RuntimeError("gone")
    assert not bench.failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Outdated, "ImportError: cannot import name 'NO_SUCH_CONSTANT' from 'convert.gguf'"),
        (Unloadable, "ImportError: libsomething.so.1: cannot open shared object file"),
        (Dies, "its process ended with signal 11"),
    ],
)
def test_a_run_ends_with_all_others_measured_and_the_broken_one_named(
    kind: type, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """llama.cpp is the contender that breaks, whether it is installed or not."""
    others = dict.fromkeys((table.LLAMA2C, table.CT2, table.ORT_GENAI, table.HF), "left out")
    monkeypatch.setattr(run, "absent_contenders", lambda *_, **__: dict(others))
    monkeypatch.setattr(run, "measure_rates", lambda *_: [Measured("read", "r", 1.0), Measured("fp32", "p", 1.0)])
    monkeypatch.setattr(run, "compile_loops", lambda: None)
    broken = ContenderInfo(kind=f"{__name__}.{kind.__name__}", dtype="f32")
    monkeypatch.setitem(table.CONTENDERS, table.LLAMACPP, broken)
    flags = ["--quick", "--repeats", "1", "--rows", "decode-fp32", "--markdown", str(tmp_path / "report.md")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *flags])
    assert benchmarks_main.main() == 1
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"| decode, fp32 | llama.cpp f32 | - | - | - | - | FAILED: {reason}" in text
    assert "| decode, fp32 | course's way | " in text and "identical ids |" in text
    assert "| decode, fp32 | CTranslate2 fp32 | - | - | - | - | not measured: left out |" in text
    assert capsys.readouterr().err.count(f"error: llama.cpp f32 failed: {reason}") == 2  # at once, and at the end


@pytest.mark.slow
def test_a_contender_whose_process_dies_in_training_leaves_the_other_lines_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(table.CONTENDERS, table.COMPILED, ContenderInfo(kind=f"{__name__}.Dies"))
    bench = tiny_bench(tmp_path, table.HF)
    lines = learning.train(bench, ROWS["train-fp32"].works)
    notes = {line.note for line in lines if line.against == table.COMPILED}
    assert notes == {"its process ended with signal 6"} and bench.failed.keys() == {table.COMPILED}
    assert {line.verdict for line in lines if line.against == table.COMPILED} == {"FAILED"}
    assert {line.verdict for line in lines if line.against == table.HF} == {"not measured"}
    measured = {line.against for line in lines if line.ratio is not None}
    assert measured == {table.PLAIN_PATH, table.COURSE} and len(lines) == 10


class Constant(nn.Module):
    """The same log-probabilities for every text."""

    def __init__(self, value: float):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(token_ids), 5)


def test_an_answer_that_is_no_number_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = tiny_bench(tmp_path)
    values = {table.OURS: 1.0, table.PLAIN_PATH: 2.0, table.COURSE: math.nan}
    monkeypatch.setattr(bench.peers, "classifier", lambda name, *_, **__: Constant(values[name]))
    work = Work("a line", (table.PLAIN_PATH, table.COURSE), shape="10x45")
    plain, course = learning.forward(bench, [work])
    assert plain.note.endswith("at most 1e+00") and plain.verdict == "RESULTS DIFFER"
    assert (course.verdict, course.note) == ("FAILED", "its log-probabilities are not finite")
    assert learning.train(bench, [work])[1].note == "its log-probabilities are not finite"  # it takes part no longer
    bench.failed.clear()
    assert learning.train(bench, [work])[1].note == "its loss is nan"


def test_a_classifier_that_computes_something_else_differs_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = tiny_bench(tmp_path, table.COMPILED, table.OPENVINO, table.OPENVINO_BF16)
    others, make = peers.Peers(peers.random_llama(bench.config, 2)), bench.peers.classifier

    def classifier(name: str, *settings: str, trains: bool) -> nn.Module:
        is_hf = name in (table.HF, table.HF_BF16)
        return others.classifier(table.PLAIN_PATH) if is_hf else make(name, *settings, trains=trains)

    monkeypatch.setattr(bench.peers, "classifier", classifier)
    bench.absent.pop(table.HF, None)
    lines = [line for line in learning.forward(bench, ROWS["forward"].works) if line.against != table.LIMIT]
    lines = [line for line in lines if line.against in (table.PLAIN_PATH, table.HF)]
    for line in lines:
        is_wrong = line.against == table.HF and line.work.endswith("fp32")
        assert (line.verdict == "RESULTS DIFFER") == is_wrong
    assert len(lines) == 8


@pytest.mark.slow
def test_what_fails_in_another_process_says_how(tmp_path: Path):
    model = LibraryModel(tmp_path, {"weight": torch.tensor(7)}, LlamaConfig.from_preset("tiny"), 1, "f32")
    with pytest.raises(RuntimeError, match="NO_SUCH_CONSTANT"):
        Apart(f"{__name__}.Outdated", model)
    with pytest.raises(RuntimeError, match="no_such_module"):
        Apart("benchmarks.no_such_module.Library", model)
