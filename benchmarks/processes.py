"""Whole processes of `run_llama.py`, from the start of Python to its end: what a user waits for.

The kernels that are compiled at their first use must not cost more than they save, so the first run in a fresh copy of
the repository, where nothing compiled lies beside the code, is measured as well as a later one in the same copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.faults import ending_of
from benchmarks.measure import Contender, Turns
from benchmarks.sentences import find_tokenizers
from benchmarks.table import QUICK_SIZES, Bench, Line, lines_of
from benchmarks.targets import LINES, OURS, PLAIN_PATH
from tokenizer import TOKENIZER_MODEL
from utils import ROOT, UserError

KERNELS_FLAG = {OURS: "auto", PLAIN_PATH: "plain"}
LARGE_CHECKPOINT = "stories42M.pt"
GREEDY_TEXT = "generated-sentence-temp-0.txt"
# What would keep Python or numba from writing, or let them find, compiled code elsewhere than in the copy.
CACHE_SETTINGS = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR")


class Copies:
    """Runs `--option generate` in copies of the repository's tracked files, one for each contender and round.

    extra: files that are linked into every copy. `texts`: what each contender wrote last at temperature 0.
    """

    def __init__(self, folder: Path, tracked: list[str], extra: list[Path], threads: int):
        self.folder, self.tracked, self.extra, self.threads = folder, tracked, extra, threads
        self.copies: dict[str, Path] = {}
        self.texts: dict[str, str] = {}

    def first(self, name: str) -> float:
        """Seconds of a run in a fresh copy."""
        if name in self.copies:
            shutil.rmtree(self.copies[name])
        copy = self.copies[name] = Path(tempfile.mkdtemp(dir=self.folder))
        for file in self.tracked:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        for path in self.extra:
            os.link(path, copy / path.name)
        return self.later(name)

    def later(self, name: str) -> float:
        """Seconds of a run in the copy of the last `first`. Raises `UserError` if it fails."""
        copy = self.copies[name]
        env = {key: value for key, value in os.environ.items() if key not in CACHE_SETTINGS}
        env |= {"OMP_NUM_THREADS": str(self.threads), "XDG_CACHE_HOME": str(copy / ".cache")}
        command = [sys.executable, "run_llama.py", "--option", "generate", "--kernels", KERNELS_FLAG[name]]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, encoding="utf-8")
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise UserError(f"run_llama.py --kernels {KERNELS_FLAG[name]} {ending_of(done)}")
        self.texts[name] = (copy / GREEDY_TEXT).read_text(encoding="utf-8")
        return seconds


def tracked_files() -> list[str]:
    """The repository's files as git knows them; none where this folder is no repository."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    except OSError:
        return []
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [name for name in names if (ROOT / name).is_file()]


def first_run(bench: Bench) -> list[Line]:
    """With the kernels that are chosen by default and with none, for two models."""
    works, tracked = list(LINES["first-run"]), tracked_files()
    if not tracked:
        return [Line(work, PLAIN_PATH, note="no git repository, so its files are not known") for work in works]
    lines = _lines(bench, works[:2], tracked, [])
    tokenizers = find_tokenizers(bench.config.vocab_size)
    if not tokenizers:
        why = f"no tokenizer of {bench.config.vocab_size} pieces"
        return [*lines, *(Line(work, PLAIN_PATH, note=why) for work in works[2:])]
    checkpoint = bench.folder / LARGE_CHECKPOINT
    # like the real one, it says nothing about attention
    model_args = {name: value for name, value in vars(bench.config).items() if name != "attention"}
    torch.save({"model": bench.peers.state, "model_args": model_args}, checkpoint)
    shutil.copy(tokenizers[0], bench.folder / TOKENIZER_MODEL)
    return lines + _lines(bench, works[2:], tracked, [checkpoint, bench.folder / TOKENIZER_MODEL])


def _lines(bench: Bench, works: list[str], tracked: list[str], extra: list[Path]) -> list[Line]:
    """works: the first run and the later one."""
    rounds = 1 if bench.sizes == QUICK_SIZES else bench.turns.repeats  # equal processes differ by up to 10 % in one
    turns = Turns(rounds, bench.turns.pause)
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        copies = Copies(Path(folder), tracked, extra, bench.threads)
        contenders = [
            Contender(f"{when.__name__} {name}", lambda when=when, name=name: when(name))
            for name in KERNELS_FLAG
            for when in (copies.first, copies.later)
        ]
        costs = turns.take(contenders, warm_up=0)  # a round may compile for a minute; the median drops a cold disk
    same = {PLAIN_PATH: copies.texts[OURS] == copies.texts[PLAIN_PATH]}
    notes = {PLAIN_PATH: "identical text" if same[PLAIN_PATH] else "DIFFERENT text"}
    lines = []
    for work, when in zip(works, ("first", "later"), strict=True):
        by_name = {name: costs[f"{when} {name}"] for name in KERNELS_FLAG}
        lines += lines_of(bench, work, LINES["first-run"][work], by_name, notes=notes, same=same)
    return lines
