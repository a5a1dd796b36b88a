"""The course's own scripts and drivers on our modules, unchanged, in each edition that hands out other ones.

They are not part of this repository. MINLLAMA_HANDOUT names checkouts of github.com/neubig/minllama-assignment,
cmu-l3/anlp-fall2025-hw1 and ialdarmaki/anlp-spring2026-hw1, with the separator of PATH between them; those that it does
not name are skipped. Without the real stories42M.pt, the tensors of `sanity_check.data` are untested here: the course's
script compares a tiny model with numbers of PyTorch's own LayerNorm.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_llama, save_checkpoint

import llama
from grading.addition_models import parameters_of
from grading.answers import saved_model
from grading.editions import EDITIONS
from handout.editions import FIELDS, text_of

# of the files in the assignment's own list, those that its driver and scripts import
MODULES = "base_llama classifier config llama optimizer rope tokenizer utils".split()
COURSE_SCRIPTS = ("run_llama.py", "sanity_check.py", "rope_test.py", "optimizer_test.py")
COURSE_DATA = ("rotary_embedding_actual.data", "optimizer_test.npy")
# the course's driver pickles its arguments, which torch 2.6 and newer refuse to load unless told otherwise
OLD_TORCH_LOAD = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


MARKS = {"cmu2024": (), "cmu2025": ("lora.py",), "cmu2026": ("addition_run.py", "addition_lib.py",
         "addition_data_generation.py")}  # fmt: skip


def checkout_of(edition: str) -> Path:
    """The checkout of an edition: it has the files that only this edition hands out. Skips the test without one."""
    for path in map(Path, filter(None, os.environ.get("MINLLAMA_HANDOUT", "").split(os.pathsep))):
        found = {name for name, marks in MARKS.items() if marks and (path / marks[0]).is_file()} or {"cmu2024"}
        if edition in found and (path / "run_llama.py").is_file():
            return path
    pytest.skip(f"MINLLAMA_HANDOUT names no checkout of the course's hand-out of {edition}")


@pytest.fixture(params=MARKS)
def edition(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(edition: str, course_folder: Path) -> Path:
    """Our modules as the edition has them, its scripts, and a tiny model under the names that they expect."""
    handout = checkout_of(edition)
    for name in MODULES:
        (course_folder / f"{name}.py").write_text(text_of(f"{name}.py", edition), encoding="utf-8")
    for name in (*COURSE_SCRIPTS, *COURSE_DATA, *MARKS[edition]):
        shutil.copy(handout / name, course_folder)
    silence(course_folder / "stories42M.pt")
    return course_folder


def silence(checkpoint: Path) -> None:
    """Leave to the edition what the real stories42M.pt does not say: norm, attention, sampling."""
    content = torch.load(checkpoint, weights_only=True)
    for name in FIELDS:
        content["model_args"].pop(name, None)
    torch.save(content, checkpoint)


@pytest.mark.parametrize("script", ["rope_test.py", "optimizer_test.py"])
def test_the_unit_scripts_pass(folder: Path, run: Callable, script: str):
    done = run(folder / script, cwd=folder)
    assert done.returncode == 0 and "passed" in done.stdout, done.stderr


def test_the_sanity_check_passes(folder: Path, run: Callable, edition: str, monkeypatch: pytest.MonkeyPatch):
    """The model is one of RMSNorms, as stories42M.pt; the numbers are those of the edition's norm and mask."""
    torch.manual_seed(0)
    save_checkpoint(folder / "stories42M.pt", random_llama(vocab_size=32000))
    silence(folder / "stories42M.pt")
    if EDITIONS[edition].norm == "layer":
        monkeypatch.setitem(llama.NORMS, "rms", lambda dim, eps: torch.nn.LayerNorm(dim, eps, bias=False))
    model = llama.load_pretrained(folder / "stories42M.pt", attention=EDITIONS[edition].attention)
    tokens = torch.tensor([[101, 7592, 2088, 102, 0, 0, 0, 0], [101, 7592, 15756, 2897, 2005, 17953, 2361, 102]])
    with torch.no_grad():
        logits, hidden_states = model(tokens)
    torch.save({"logits": logits, "hidden_states": hidden_states}, folder / "sanity_check.data")
    done = run(folder / "sanity_check.py", cwd=folder)
    assert done.returncode == 0 and "correct" in done.stdout, done.stderr


@pytest.mark.parametrize("option", ["prompt", "finetune"])
def test_the_driver_gives_the_files_and_figures_that_ours_gives(folder: Path, run: Callable, edition: str, option: str):
    if (edition, option) == ("cmu2026", "finetune"):
        pytest.skip("this edition asks for no fine-tuning; a causal model's batches here are not the course's")
    kind = {"prompt": "prompting", "finetune": "finetuning"}[option]
    outputs = [f"cfimdb-{split}-{kind}-output.txt" for split in ("dev", "test")]
    flags = ["--option", option, "--epochs", 4, "--lr", "0.003", "--dev_out", outputs[0], "--test_out", outputs[1]]
    theirs = run(folder / "run_llama.py", *flags, cwd=folder, env=OLD_TORCH_LOAD)
    assert theirs.returncode == 0, theirs.stderr
    expected = {name: (folder / name).read_bytes() for name in outputs}
    ours = run("run_llama.py", *flags, "--edition", edition, cwd=folder)
    assert ours.returncode == 0, ours.stderr
    assert {name: (folder / name).read_bytes() for name in outputs} == expected
    figures = [line for line in theirs.stdout.splitlines() if "acc ::" in line]
    assert figures and [line for line in ours.stdout.splitlines() if line in figures] == figures


def test_the_driver_generates_what_ours_generates(folder: Path, run: Callable, edition: str):
    theirs = run(folder / "run_llama.py", cwd=folder)
    assert theirs.returncode == 0, theirs.stderr
    expected = (folder / "generated-sentence-temp-0.txt").read_bytes()
    assert run("run_llama.py", "--edition", edition, cwd=folder).returncode == 0
    assert (folder / "generated-sentence-temp-0.txt").read_bytes() == expected


@pytest.mark.parametrize("edition", ["cmu2026"], indirect=True)
def test_the_models_of_additions_are_made_from_our_modules(folder: Path, run: Callable):
    """The grader reads their size and steps from the course's file, and they learn: two steps lower the loss."""
    pytest.importorskip("matplotlib")
    code = """
import torch, addition_run, addition_lib
from torch.nn import functional as F
shape = dict(vocab_size=13, dim=16, dropout=0.0, n_layers=6, n_heads=4, n_kv_heads=4, max_seq_len=20,
             layer_norm_eps=1e-5, multiple_of=32, hidden_dim=None, position_embedding_type="rotary", use_cache=True)
model = addition_run.create_model(shape)
data = addition_lib.CharDataset(["1249+7996=9245"], list("+0123456789="), 14)
x, y = (one[None] for one in data[0])
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
for _ in range(3):
    losses.append(F.cross_entropy(model(x, y)[0].flatten(0, 1), y.flatten(), ignore_index=-1))
    optimizer.zero_grad(); losses[-1].backward(); optimizer.step()
print(sum(p.numel() for p in model.parameters()), bool(losses[2] < losses[0]))
addition_run.save_model(model, optimizer, shape, {}, "models/best_model.pth")
"""
    (folder / "try_it.py").write_text(code)
    done = run(folder / "try_it.py", cwd=folder)
    raw = (folder / "models/best_model.pth").read_bytes()
    saved = saved_model(torch.frombuffer(bytearray(raw + bytes(-len(raw) % 8)), dtype=torch.int64), len(raw))
    assert saved.pop("steps") == 3
    assert done.stdout.split()[:2] == [str(parameters_of(saved)), "True"], done.stderr
