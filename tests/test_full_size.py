"""A random checkpoint of the shape of stories42M.pt through all three commands, with the real tokenizer and SST.

    python -m pytest -m slow -s tests/test_full_size.py        (10 to 20 minutes on two cores)

prints peak memory and seconds per epoch.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import asset, save_checkpoint

from config import PRESETS, LlamaConfig
from llama import Llama


@pytest.mark.slow
def test_a_random_42M_checkpoint_runs_the_three_commands(assets: Path, tmp_path: Path, run: Callable):
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "stories42M.pt", Llama(LlamaConfig.from_preset("stories42M")), **PRESETS["stories42M"])
    shutil.copy(asset(assets, "tokenizer.model"), tmp_path)
    data = [f"--{split}={asset(assets, f'data/sst-{split}.txt')}" for split in ("train", "dev", "test")]
    data.append(f"--label-names={asset(assets, 'data/sst-label-mapping.json')}")
    commands = {
        "generate": [],
        "prompt": [*data, "--batch_size", 10],
        "finetune": [*data, "--batch_size", 80, "--epochs", 1],
    }
    env = {"OMP_NUM_THREADS": str(os.cpu_count())}
    for option, flags in commands.items():
        kind = {"prompt": "prompting", "finetune": "finetuning"}.get(option, "unused")
        outputs = [f"--{split}_out=sst-{split}-{kind}-output.txt" for split in ("dev", "test")] if flags else []
        start = time.perf_counter()
        checkpoint = tmp_path / "stories42M.pt"
        named = ["--option", option, "--pretrained-model-path", checkpoint, *flags, *outputs]
        done = run("run_llama.py", *named, cwd=tmp_path, env=env, timeout=3600)
        assert done.returncode == 0, done.stderr
        # the largest child so far; each command needs more than the one before it
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(f"\n{option}: {time.perf_counter() - start:.0f} s in all, peak memory {peak / 1e9:.2f} GB")
        if option == "finetune":
            (seconds,) = re.findall(r"^ +0 .* (\d+\.\d)  <- best", done.stdout, re.MULTILINE)
            print(f"one epoch (training, train and dev accuracy): {seconds} s")
    assert len((tmp_path / "sst-test-finetuning-output.txt").read_text(encoding="utf-8").splitlines()) == 2210
