"""Contenders that fail: by our own fault, which fails the run, or because of the machine, which ends nothing."""

from __future__ import annotations

import math
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import __main__ as benchmarks_main
from benchmarks import decoding, learning, peers, run, table, targets
from benchmarks.apart import Apart, LibraryModel
from benchmarks.faults import OwnFault, is_own_fault, reason_of
from benchmarks.measure import Contender, Turns
from benchmarks.rates import Measured
from config import LlamaConfig
from utils import ROOT


class Outdated:
    """Asks a module of ours for what has moved."""

    def __init__(self, model: LibraryModel):
        exec("from convert.gguf import NO_SUCH_CONSTANT")


class Dies:
    """Its process ends while it computes."""

    def __init__(self, model: LibraryModel):
        pass

    def generate(self, prompt: list[int], new: int) -> list[int]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []

    def train_step(self, token_ids: np.ndarray, labels: np.ndarray) -> None:
        os.kill(os.getpid(), signal.SIGABRT)


def error_of(code: str) -> Exception:
    with pytest.raises(Exception) as caught:
        exec(compile(code, __file__, "exec"), {"torch": torch})
    return caught.value


@pytest.mark.parametrize(
    ("code", "is_ours"),
    [
        ("from convert.gguf import NO_SUCH_CONSTANT", True),
        ("import convert.no_such_module", True),
        ("import no_such_library", False),
        ("from torch import no_such_name", False),
        ("import json; json.no_such_name", True),  # we ask a library for what it does not have
        ("torch.ones(2, 3).view({})", True),
        ("import json; json.loads(3)", False),  # raised inside a library
        ("raise RuntimeError('this processor cannot')", False),
        ("raise ValueError('no such type here')", False),
    ],
)
def test_whose_fault_an_error_is(code: str, is_ours: bool):
    assert is_own_fault(error_of(code)) == is_ours


def test_a_library_in_an_environment_of_this_folder_is_not_ours():
    code = "def f():\n    raise TypeError\nf()"
    with pytest.raises(TypeError) as caught:
        exec(compile(code, ROOT / ".venv/lib/python3/site-packages/library.py", "exec"))
    assert not is_own_fault(caught.value)


def test_a_reason_is_one_line():
    assert reason_of(RuntimeError("a\n  b")) == reason_of(OwnFault("a b")) == "a b"
    assert reason_of(TypeError("no")) == "TypeError: no"


def test_who_fails_takes_no_more_turns():
    def fails() -> None:
        runs.append("b")
        if len(runs) > 2:
            raise RuntimeError("gone")

    runs, dropped = [], {}
    contenders = [Contender(name, lambda name=name: runs.append(name)) for name in "ac"]
    contenders.insert(1, Contender("b", fails))
    costs = Turns(2, pause=0.0).take(contenders, drop=lambda name, error: dropped.update({name: str(error)}))
    assert "".join(runs) == "abccbaac" and dropped == {"b": "gone"} and costs.keys() == {"a", "c"}
    with pytest.raises(RuntimeError, match="gone"):
        Turns(2, pause=0.0).take(contenders)
    with pytest.raises(RuntimeError, match="gone"):  # ours
        Turns(2, pause=0.0).take(contenders[1:], drop=lambda name, error: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "verdict"),
    [
        (Outdated, 1, "FAILED: ImportError: cannot import name 'NO_SUCH_CONSTANT' from 'convert.gguf'"),
        (Dies, 0, "not measured: its process ended with signal 11"),
    ],
)
def test_a_run_ends_with_all_others_measured(
    kind: type,
    status: int,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    """llama.cpp is the contender that fails, whether it is installed or not."""
    others = dict.fromkeys((targets.LLAMA2C, targets.CT2, targets.ORT_GENAI, targets.HF), "left out")
    monkeypatch.setattr(table, "missing_contenders", lambda **_: dict(others))
    monkeypatch.setattr(run, "measure_rates", lambda *_: [Measured("read", "r", 1.0), Measured("fp32", "p", 1.0)])
    monkeypatch.setattr(run, "compile_loops", lambda: None)
    monkeypatch.setitem(decoding.LIBRARIES, targets.LLAMACPP, (f"{__name__}.{kind.__name__}", "f32"))
    flags = ["--quick", "--repeats", "1", "--rows", "decode-fp32", "--markdown", str(tmp_path / "report.md")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *flags])
    assert benchmarks_main.main() == status
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"| decode, fp32 | llama.cpp f32 | - | - | - | - | {verdict}" in text
    assert "| decode, fp32 | course's way | " in text and "identical ids |" in text
    assert (f"wrong: llama.cpp f32 failed: {verdict.partition(': ')[2]}" in capsys.readouterr().err) == bool(status)


@pytest.mark.slow
def test_a_contender_whose_process_dies_in_training_leaves_the_other_lines_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start = table.Bench.start
    monkeypatch.setattr(table.Bench, "start", lambda self, name, _, model: start(self, name, f"{__name__}.Dies", model))
    config = LlamaConfig.from_preset("tiny", attention="causal")
    models, missing = peers.Peers(peers.random_llama(config, 1)), {targets.HF: "left out"}
    bench = table.Bench(config, models, Turns(1, 0.0), table.QUICK_SIZES, None, tmp_path, 1, 1, None, missing)
    lines = learning.train_fp32(bench)
    notes = {line.note for line in lines if line.against == targets.COMPILED}
    assert notes == {"its process ended with signal 6"} and not bench.failed
    measured = {line.against for line in lines if line.ratio is not None}
    assert measured == {targets.PLAIN_PATH, targets.COURSE} and len(lines) == 10


def test_an_answer_that_is_no_number_is_not_measured():
    answers = {
        name: partial(torch.full, (2, 5), value) for name, value in ((targets.OURS, 1), ("a", 2), ("b", math.nan))
    }
    bench = table.Bench(None, None, Turns(1, 0.0), table.QUICK_SIZES, None, None, 1, 1, None, {})
    a, b = table.classification_lines(bench, "a line", "ab", answers, unit="texts/s")
    assert a.note.endswith("at most 1e+00") and b.ratio is None and b.note == "its log-probabilities are not finite"
    model, ids = nn.Sequential(nn.Embedding(3, 5), nn.Flatten(0, 1)), torch.ones(2, 1, dtype=torch.long)
    nn.init.constant_(model[0].weight, math.nan)
    with pytest.raises(RuntimeError, match="its loss is nan"):
        peers.train_step(model, peers.our_optimizer(model), ids, ids[:, 0])


def test_a_classifier_that_computes_something_else_differs_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = LlamaConfig.from_preset("tiny", attention="causal")
    models, others = (peers.Peers(peers.random_llama(config, seed), seed) for seed in (1, 2))
    monkeypatch.setattr(models, "hf_classifier", lambda *_: others.our_classifier(None))
    missing = dict.fromkeys((targets.COMPILED, targets.OPENVINO, targets.OPENVINO_BF16), "left out")
    bench = table.Bench(config, models, Turns(1, 0.0), table.QUICK_SIZES, None, tmp_path, 1, 1, None, missing)
    lines = [line for line in learning.forward(bench) if line.against in (targets.PLAIN_PATH, targets.HF)]
    for line in lines:
        is_wrong = line.against == targets.HF and line.work.endswith("fp32")
        assert (line.verdict == "RESULTS DIFFER") == is_wrong
    assert len(lines) == 8


@pytest.mark.slow
def test_what_fails_in_another_process_says_whose_fault_it_is(tmp_path: Path):
    model = LibraryModel(tmp_path, {"weight": torch.tensor(7)}, LlamaConfig.from_preset("tiny"), 1, "f32")
    with pytest.raises(OwnFault, match="NO_SUCH_CONSTANT"):
        Apart(f"{__name__}.Outdated", model)
    with pytest.raises(OwnFault, match="no_such_module"):
        Apart("benchmarks.no_such_module.Library", model)


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert table.missing_contenders(has_llama2c=True) == {targets.COMPILED: "no C++ compiler (no-such-compiler)"}
