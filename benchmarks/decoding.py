"""The lines that generate text: one text, several texts, bidirectional attention, and a machine with other work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from benchmarks.apart import LibraryModel
from benchmarks.bench import Bench, Line
from benchmarks.decoders import EOS_ID
from benchmarks.limits import Pass, decoding, recomputing
from benchmarks.peers import Peers, generate_with_hf, random_llama
from benchmarks.table import (
    CONTENDERS,
    CT2,
    CT2_INT8,
    HF,
    LLAMA2C,
    ONE_BY_ONE,
    ORT_GENAI,
    OURS,
    PLAIN_PATH,
    Work,
)
from config import LlamaConfig
from engine.decoding import Decoder

Ids = list[int]
Generate = Callable[[torch.Tensor, int], torch.Tensor]  # a prompt, rows s, and the number of new tokens
SMOLLM2 = dict(
    vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden_dim=1536, max_seq_len=1024,
    attention="causal",
)  # fmt: skip
# Computes as long as the process that started it lives.
BUSY_PROGRAM = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


class Decoding:
    """The contenders of a line that continue one prompt (rows s), and whether their answers are the same."""

    def __init__(self, bench: Bench, work: Work):
        self.bench, self.work, self.new = bench, work, bench.sizes.new
        rows = bench.sizes.together if ONE_BY_ONE in work.against else 1
        self.prompt = bench.peers.prompt(rows, bench.sizes.prompt)
        self.ids: dict[str, list[Ids]] = {}
        ours = bench.peers.decoder(work.precision, work.attention)
        self.runs: dict[str, Callable[[], object]] = {OURS: partial(self._run, OURS, _greedy(ours))}
        for name in bench.able(work.against):
            with bench.attempt(name):
                if name == LLAMA2C:
                    self.runs[name] = self._run_llama2c
                else:
                    self.runs[name] = partial(self._run, name, self._generator(name, ours))

    def _generator(self, name: str, ours: Decoder) -> Generate:
        bench, work = self.bench, self.work
        if CONTENDERS[name].kind:
            state, dtype = bench.peers.state, CONTENDERS[name].dtype
            return bench.start(name, LibraryModel(bench.folder, state, bench.config, bench.threads, dtype)).generate
        if name == ONE_BY_ONE:
            return partial(_one_by_one, _greedy(ours))
        dtype = torch.bfloat16 if work.precision == "bf16" and name == PLAIN_PATH else torch.float32
        model = bench.peers.llama(name, work.attention, dtype)
        if name == HF:
            return partial(generate_with_hf, model)
        if work.precision == "int4":  # which rounds the weights of ours
            model.load_state_dict(ours.llama.state_dict())
        # the plain path is asked as by `--kernels plain`, with a cache; the course's way has none
        return _greedy(Decoder(model) if name == PLAIN_PATH else model)

    def _run(self, name: str, generate: Generate) -> None:
        self.ids[name] = generate(self.prompt, self.new).tolist()

    def _run_llama2c(self) -> float:
        """Its own clock's seconds."""
        return self.bench.llama2c.generate(self.prompt[0].tolist(), self.new) * self.new

    def lines(self) -> list[Line]:
        """Takes turns among all. Of one number format all must give the same ids; int4 has its weights in two."""
        costs = self.bench.race(self.work, self.runs)
        notes = {name: self._agreement(name) for name in costs}
        exact = {"fp32": [*costs], "int4": [PLAIN_PATH]}.get(self.work.precision, [])
        same = {name: note.startswith("identical") for name, note in notes.items() if name in exact}
        amount = float(self.new * len(self.prompt))
        return self.bench.lines(
            self.work, costs, amount=amount, unit="tok/s", notes=notes, same=same, passes=self._passes()
        )

    def _agreement(self, name: str) -> str:
        if name == LLAMA2C:
            return self.bench.llama2c.compare(self.ids[OURS][0])
        ends = name in (CT2, CT2_INT8, ORT_GENAI)
        return compare_ids(self.ids[OURS], self.ids[name], self.prompt.shape[1], ends=ends)

    def _passes(self) -> list[Pass]:
        config = replace(self.bench.config, attention=self.work.attention)
        count = decoding if config.is_causal else recomputing
        passes = count(config, *self.prompt.shape, self.new)
        if self.work.precision != "int4":
            return passes
        more = round(config.vocab_size * config.dim * (8 / 4.5 - 1))  # the output matrix has 8 bits, not 4.5
        return [each._replace(weights=each.weights + more) for each in passes]


def _greedy(model: Decoder | torch.nn.Module) -> Generate:
    return partial(model.generate, temperature=0.0)


def _one_by_one(generate: Generate, prompts: torch.Tensor, new: int) -> torch.Tensor:
    return torch.cat([generate(prompt[None], new) for prompt in prompts])


def compare_ids(ours: list[Ids], theirs: list[Ids], start: int, *, ends: bool = False) -> str:
    """Whether the ids from position `start` on are the same, in words. ends: theirs never hold eos; ours may."""
    if ours == theirs:
        return "identical ids"
    if ends and EOS_ID in ours[0][start:]:
        end = ours[0].index(EOS_ID, start)
        if ours[0][:end] == theirs[0][:end]:
            return f"identical ids up to eos, position {end}"
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a[start:], b[start:], strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} ids equal"


def decode(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """One text, or several where they are compared with one after another."""
    return [line for work in works for line in Decoding(bench, work).lines()]


def decode_int4(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """A model of SmolLM2-135M's shape, because 4 bits are for models of that size and more.

    The plain path has the rounded weights, and so must give the same ids.
    """
    config = bench.config if bench.is_quick else LlamaConfig(**SMOLLM2)
    peers = Peers(random_llama(config))
    peers.kernels = bench.peers.kernels
    return decode(replace(bench, config=config, peers=peers, folder=bench.folder / "135M"), works)


def busy(bench: Bench, works: Sequence[Work]) -> list[Line]:
    """One text while another program computes on one core: threads that wait for one another lose most."""
    races = [Decoding(bench, work) for work in works]
    with one_core_busy():
        return [line for race in races for line in race.lines()]


@contextmanager
def one_core_busy() -> Iterator[subprocess.Popen]:
    """Another process that computes without a pause as long as the block lasts."""
    child = subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM])
    try:
        yield child
    finally:
        child.kill()
        child.wait()
