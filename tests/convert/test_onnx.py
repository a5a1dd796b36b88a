"""Classifiers as ONNX files: the real rotation beside the complex one, onnxruntime beside PyTorch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SENTENCES, random_llama
from conversions import BUNDLED, run_module
from error_helpers import ROOT, check_one_error, refused

from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from convert import onnx as convert_onnx
from convert.__main__ import get_args, main
from convert.compare import largest_difference
from engine.runs import load_classifier, record_of, save_classifier
from rope import apply_rotary_emb, frequencies
from tokenizer import NO_PIECE, Tokenizer

ATTENTION_AND_PADDING = [("causal", 3), ("bidirectional", 3), ("causal", NO_PIECE)]
OTHER = "computes something else than what would be written"
BATCH_SHAPES = [(1, 1), (1, 7), (2, 7), (5, 20), (3, 90)]  # of which the last is longer than the model


def classifier(attention: str = "causal", pad_id: int = 3, **changes) -> LlamaEmbeddingClassifier:
    settings = SimpleNamespace(num_labels=3, hidden_dropout_prob=0.3, option="finetune", pad_id=pad_id)
    return LlamaEmbeddingClassifier(settings, llama=random_llama(attention=attention, **changes)).eval()


def batch(shape: tuple[int, int], pad_id: int) -> torch.Tensor:
    """Rows of several lengths. b s"""
    size, length = shape
    token_ids = torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(size))
    for row in range(1, size):
        token_ids[row, max(1, length - 2 * row) :] = pad_id
    return token_ids


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A saved classifier, as a fine-tuning leaves it."""
    path = tmp_path_factory.mktemp("onnx") / "model.pt"
    tokenizer = Tokenizer(tokenizer_model=tiny_tokenizer)
    model = classifier(pad_id=tokenizer.pad_id)
    save_classifier(path, model, record_of(model, tokenizer, ["bad", "fair", "good"], 8))
    return path


def test_the_real_rotation_is_the_complex_one():
    x = torch.randn(2, 50, 4, 16)  # b s h d
    for scaling in (None, ("linear", 4.0), ("llama3", 8.0, 1.0, 4.0, 32.0)):
        positions = torch.arange(50)[:, None].float()
        angles = (positions * frequencies(16, 5000.0, scaling))[:, None]  # s 1 d/2
        for expected in apply_rotary_emb(x, x, 16, 64, 5000.0, scaling):
            torch.testing.assert_close(convert_onnx.rotate(x, angles), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("attention", "pad_id"), ATTENTION_AND_PADDING)
def test_what_is_exported_computes_what_the_classifier_does(attention: str, pad_id: int):
    for changes in ({}, {"n_kv_heads": 4}, {"rope_scaling": ("linear", 2.0)}, {"tied": False}):
        model = classifier(attention, pad_id, **changes)
        real = convert_onnx.RealClassifier(model).eval()
        with torch.no_grad():
            for shape in BATCH_SHAPES:
                token_ids = batch(shape, pad_id)
                torch.testing.assert_close(real(token_ids), model(token_ids), atol=1e-5, rtol=0)


def test_an_edit_that_has_no_place_in_a_file_is_an_error(monkeypatch: pytest.MonkeyPatch):
    model = classifier()
    real = convert_onnx.RealClassifier(model).eval()
    convert_onnx.require_equal(real, model)
    monkeypatch.setattr("llama.LlamaLayer.forward", lambda self, x: x)
    refused(OTHER, convert_onnx.require_equal, real, model)


def test_nothing_is_written_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert_onnx, "_import_onnx", lambda: None)
    monkeypatch.setattr(convert_onnx, "_exported", lambda model, about: b"file")
    convert_onnx.write(tmp_path / "m.onnx", classifier(), SimpleNamespace(label_names=("a",)))
    monkeypatch.setattr(convert_onnx, "rotate", lambda x, angles: x)
    refused(OTHER, convert_onnx.write, tmp_path / "n.onnx", classifier(), SimpleNamespace(label_names=("a",)))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_says_how_batches_for_it_are_made():
    for attention, pad_id in ATTENTION_AND_PADDING:
        model = convert_onnx.RealClassifier(classifier(attention, pad_id))
        said = convert_onnx._metadata(model, SimpleNamespace(label_names=("a", "b")))
        expected = {"labels": '["a", "b"]', "attention": attention, "pad_id": str(pad_id), "max_seq_len": "64"}
        assert said == expected


def test_an_edit_of_what_is_exported_counts(monkeypatch: pytest.MonkeyPatch):
    model = classifier()
    monkeypatch.setattr("llama.FeedForward.forward", lambda self, x: x)
    convert_onnx.require_equal(convert_onnx.RealClassifier(model).eval(), model)


def test_other_classifiers_are_refused(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert_onnx, "_import_onnx", lambda: None)
    llama, names = random_llama(attention="causal"), ["bad", "good"]
    asked = LlamaZeroShotClassifier(SimpleNamespace(num_labels=2), Tokenizer(None, tiny_tokenizer), names, llama=llama)
    path, about = tmp_path / "m.onnx", SimpleNamespace(label_names=names)
    refused("LlamaZeroShotClassifier is not written as ONNX", convert_onnx.write, path, asked, about)
    monkeypatch.setattr(convert_onnx, "MOST_ONNX_BYTES", 1000)
    refused("bytes of weights; one ONNX file holds less", convert_onnx.write, path, classifier(), about)
    assert not list(tmp_path.iterdir())


def test_without_the_packages_one_line_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    given = tmp_path / "m.onnx", classifier(), SimpleNamespace(label_names=("a",))
    refused("pip install onnx onnxscript", convert_onnx.write, *given)


@pytest.mark.parametrize(
    "flags", [["--attention", "causal"], ["--tokenizer", "t.model"], ["--from", "llama2c"], ["--dtype", "f16"]]
)
def test_flags_that_say_nothing_to_a_saved_classifier(flags: list[str], saved: Path, tmp_path: Path):
    given = [str(saved), str(tmp_path / "m.onnx"), "--to", "onnx", *flags]
    refused(f"{flags[0]}.* is not for --to onnx", get_args, given)


def test_a_checkpoint_is_no_classifier(call: Callable, tmp_path: Path):
    status, _, err = call(BUNDLED, "m.onnx", "--to", "onnx", main=main)
    check_one_error(status, err, "minllama1M.pt is not a saved classifier")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ the file itself


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "pad_id"), ATTENTION_AND_PADDING)
def test_onnxruntime_computes_the_same_for_any_batch(attention: str, pad_id: int, tmp_path: Path):
    """Exporting takes from ten seconds to a minute."""
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
    pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
    model = classifier(attention, pad_id)
    convert_onnx.write(tmp_path / "m.onnx", model, SimpleNamespace(label_names=("a", "b", "c")))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for shape in BATCH_SHAPES:
        token_ids = batch(shape, pad_id)
        (theirs,) = session.run(["log_probabilities"], {"token_ids": token_ids.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(theirs), model(token_ids), atol=1e-4, rtol=0)
    said = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(said["labels"]) == ["a", "b", "c"] and said["pad_id"] == str(pad_id)
    assert said["attention"] == attention


def test_a_nan_in_a_later_batch_is_a_difference():
    ours = [torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(2, 3)]
    assert largest_difference(ours, [each + 0.5 for each in ours]) == 0.5
    assert math.isnan(largest_difference(ours, [ours[0], ours[1].log() * 0, ours[2]]))


@pytest.mark.slow
def test_a_saved_classifier_from_the_command_line(saved: Path, tmp_path: Path):
    pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
    done = run_module(saved, tmp_path / "m.onnx", "--to", "onnx")
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'm.onnx'}\n"), done.stderr
    model, _ = load_classifier(saved)
    token_ids = batch((4, 11), model.pad_id)
    (theirs,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"token_ids": token_ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(theirs), model(token_ids), atol=1e-4, rtol=0)
    (tmp_path / "in.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES), encoding="utf-8")
    command = [sys.executable, "-m", "convert.compare", saved, tmp_path / "m.onnx", "--input", tmp_path / "in.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "10 sentences, 10 with the same label" in done.stdout, done.stderr
    (tmp_path / "m.onnx").write_bytes(b"PK")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    check_one_error(done.returncode, done.stderr, "m.onnx is not an ONNX file")
