"""The course's own scripts and driver on our modules, unchanged.

They are not part of this repository. MINLLAMA_HANDOUT names a checkout of github.com/neubig/minllama-assignment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, random_llama, save_checkpoint

# of the files in the assignment's own list, those that its driver and scripts import
MODULES = "base_llama classifier config llama optimizer rope tokenizer utils".split()
COURSE_SCRIPTS = ("run_llama.py", "sanity_check.py", "rope_test.py", "optimizer_test.py")
COURSE_DATA = ("rotary_embedding_actual.data", "optimizer_test.npy")
# the course's driver pickles its arguments, which torch 2.6 and newer refuse to load unless told otherwise
OLD_TORCH_LOAD = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


@pytest.fixture
def folder(course_folder: Path) -> Path:
    """Our modules, the course's scripts, and a tiny model under the names that they expect."""
    handout = os.environ.get("MINLLAMA_HANDOUT", "")
    if not handout or not Path(handout, "run_llama.py").is_file():
        pytest.skip("MINLLAMA_HANDOUT names no checkout of the course's hand-out")
    for name in MODULES:
        shutil.copy(ROOT / f"{name}.py", course_folder)
    for name in (*COURSE_SCRIPTS, *COURSE_DATA):
        shutil.copy(Path(handout, name), course_folder)
    return course_folder


@pytest.mark.parametrize("script", ["rope_test.py", "optimizer_test.py"])
def test_the_unit_scripts_pass(folder: Path, run: Callable, script: str):
    done = run(folder / script, cwd=folder)
    assert done.returncode == 0 and "passed" in done.stdout, done.stderr


def test_the_sanity_check_passes(folder: Path, run: Callable):
    torch.manual_seed(0)
    model = random_llama(vocab_size=32000)
    save_checkpoint(folder / "stories42M.pt", model)
    tokens = torch.tensor([[101, 7592, 2088, 102, 0, 0, 0, 0], [101, 7592, 15756, 2897, 2005, 17953, 2361, 102]])
    with torch.no_grad():
        logits, hidden_states = model(tokens)
    torch.save({"logits": logits, "hidden_states": hidden_states}, folder / "sanity_check.data")
    done = run(folder / "sanity_check.py", cwd=folder)
    assert done.returncode == 0 and "correct" in done.stdout, done.stderr


@pytest.mark.parametrize("option", ["prompt", "finetune"])
def test_the_driver_gives_the_files_and_figures_that_ours_gives(folder: Path, run: Callable, option: str):
    kind = {"prompt": "prompting", "finetune": "finetuning"}[option]
    outputs = [f"cfimdb-{split}-{kind}-output.txt" for split in ("dev", "test")]
    flags = ["--option", option, "--epochs", 4, "--lr", "0.003", "--dev_out", outputs[0], "--test_out", outputs[1]]
    theirs = run(folder / "run_llama.py", *flags, cwd=folder, env=OLD_TORCH_LOAD)
    assert theirs.returncode == 0, theirs.stderr
    expected = {name: (folder / name).read_bytes() for name in outputs}
    ours = run("run_llama.py", *flags, cwd=folder)
    assert ours.returncode == 0, ours.stderr
    assert {name: (folder / name).read_bytes() for name in outputs} == expected
    figures = [line for line in theirs.stdout.splitlines() if "acc ::" in line]
    assert figures and [line for line in ours.stdout.splitlines() if line in figures] == figures


def test_the_driver_generates_what_ours_generates(folder: Path, run: Callable):
    theirs = run(folder / "run_llama.py", cwd=folder)
    assert theirs.returncode == 0, theirs.stderr
    expected = (folder / "generated-sentence-temp-0.txt").read_bytes()
    assert run("run_llama.py", cwd=folder).returncode == 0
    assert (folder / "generated-sentence-temp-0.txt").read_bytes() == expected
