"""The lines that generate text: one text, several, the assignment's semantics, and a machine with other work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks import peers
from benchmarks.apart import Apart
from benchmarks.ct2 import EOS_ID, CTranslate2
from benchmarks.llamacpp import LlamaCpp
from benchmarks.measure import Contender
from benchmarks.table import Bench, BenchmarkTask, Line, lines_of
from benchmarks.targets import COURSE, CT2_TYPES, HF, LINES, LLAMA2C, LLAMACPP_DTYPES, ONE_BY_ONE, OURS, PLAIN
from benchmarks.work import decoding, recomputing
from llama import Llama

if TYPE_CHECKING:
    from fast.decoder import Decoder

Ids = list[int]
# Computes as long as whoever started it lives.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


class Decoding:
    """Contenders that continue one prompt, and whether they say the same."""

    def __init__(self, bench: Bench, prompt: torch.Tensor, new: int):
        self.bench, self.prompt, self.new = bench, prompt, new
        self.contenders: list[Contender] = []
        self.ids: dict[str, list[Ids]] = {}
        self.libraries: list[Apart] = []

    def add(self, name: str, generate: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        def run() -> None:
            self.ids[name] = generate(self.prompt, self.new).tolist()

        self.contenders.append(Contender(name, run))

    def add_llama(self, name: str, model: Llama | Decoder) -> None:
        self.add(name, lambda prompt, new: model.generate(prompt, new, temperature=0.0))

    def add_peers(self, names: tuple[str, ...]) -> None:
        """Those of `names` that are other programs or libraries and at hand."""
        for name in names:
            if not self.bench.has(name):
                continue
            if name == LLAMA2C:
                self._add_llama2c()
            elif name in LLAMACPP_DTYPES or name in CT2_TYPES:
                self._add_library(name)
            elif name == HF:
                self.add(HF, partial(peers.generate_with_hf, self.bench.peers.hf()))
            elif name == COURSE:
                self.add(COURSE, self.bench.peers.naive().generate)

    def _add_llama2c(self) -> None:
        program, prompt = self.bench.llama2c, self.prompt[0].tolist()
        self.contenders.append(Contender(LLAMA2C, lambda: program.generate(prompt, self.new) * self.new))

    def _add_library(self, name: str) -> None:
        """A compiled library may be installed and not load on this machine."""
        bench = self.bench
        kind, dtype = (LlamaCpp, LLAMACPP_DTYPES[name]) if name in LLAMACPP_DTYPES else (CTranslate2, CT2_TYPES[name])
        try:
            library = Apart(kind, bench.folder, bench.peers.state, bench.config, bench.threads, dtype)
        except RuntimeError as error:
            bench.missing[name] = " ".join(str(error).split())
            return
        self.add(name, library.generate)
        self.libraries.append(library)

    def lines(
        self, work: str, contenders: tuple[str, ...], *, task: BenchmarkTask | None, must_agree: bool
    ) -> list[Line]:
        """Takes turns among all; the first contender is ours. Nobody runs after that."""
        costs = self.bench.race(work, self.contenders)
        for library in self.libraries:
            library.close()
        rows = len(self.prompt)
        notes = {name: self._agreement(name) for name in costs}
        same = {name: notes[name].startswith("identical") for name in costs} if must_agree else None
        amount = float(self.new * rows)
        return lines_of(
            self.bench, work, contenders, costs, amount=amount, unit="tok/s", notes=notes, same=same, task=task
        )

    def _agreement(self, name: str) -> str:
        ours = self.ids[self.contenders[0].name]
        if name == LLAMA2C:
            return self.bench.llama2c.compare(ours[0])
        return compare_ids(ours, self.ids[name], self.prompt.shape[1], ends=name in CT2_TYPES)


def compare_ids(ours: list[Ids], theirs: list[Ids], start: int, *, ends: bool = False) -> str:
    """Whether the ids from position `start` on are the same, in words. ends: they never say eos, where we may."""
    if ours == theirs:
        return "identical ids"
    if ends and EOS_ID in ours[0][start:]:
        end = ours[0].index(EOS_ID, start)
        if ours[0][:end] == theirs[0][:end]:
            return f"identical ids up to eos, position {end}"
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a[start:], b[start:], strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} ids equal"


def _one_text(bench: Bench, precision: str) -> BenchmarkTask:
    return BenchmarkTask(decoding(bench.config, 1, bench.sizes.prompt, bench.sizes.new), precision)


def decode_fp32(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["decode-fp32"].items()
    race = Decoding(bench, bench.prompt(), bench.sizes.new)
    race.add_llama(OURS, bench.peers.ours("fp32"))
    race.add_llama(PLAIN, bench.peers.plain())
    race.add_peers(contenders)
    return race.lines(work, contenders, task=_one_text(bench, "fp32"), must_agree=True)


def decode_int8(bench: Bench) -> list[Line]:
    """int8 and bf16, whose ids may differ; the plain path of int8 and llama2.c are float32."""
    lines = []
    precisions = (("int8", torch.float32), ("bf16", torch.bfloat16))
    for (work, contenders), (precision, dtype) in zip(LINES["decode-int8"].items(), precisions, strict=True):
        race = Decoding(bench, bench.prompt(), bench.sizes.new)
        race.add_llama(OURS, bench.peers.ours(precision))
        race.add_llama(PLAIN, bench.peers.plain(dtype=dtype))
        race.add_peers(contenders)
        lines += race.lines(work, contenders, task=_one_text(bench, precision), must_agree=False)
    return lines


def decode_together(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["decode-together"].items()
    model, sizes = bench.peers.ours("fp32"), bench.sizes

    def one_by_one(prompts: torch.Tensor, new: int) -> torch.Tensor:
        return torch.cat([model.generate(prompt[None], new, temperature=0.0) for prompt in prompts])

    race = Decoding(bench, bench.prompt(sizes.together), sizes.new)
    race.add_llama(OURS, model)
    race.add(ONE_BY_ONE, one_by_one)
    race.add_llama(PLAIN, bench.peers.plain())
    task = BenchmarkTask(decoding(bench.config, sizes.together, sizes.prompt, sizes.new), "fp32")
    return race.lines(work, contenders, task=task, must_agree=True)


def generate_bidirectional(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["generate-bidirectional"].items()
    race = Decoding(bench, bench.prompt(), bench.sizes.new)
    race.add_llama(OURS, bench.peers.ours("fp32", "bidirectional"))
    plain = bench.peers.plain("bidirectional")
    race.add_llama(PLAIN, plain)
    race.add(COURSE, bench.peers.naive("bidirectional").generate)
    task = BenchmarkTask(recomputing(plain.config, 1, bench.sizes.prompt, bench.sizes.new), "fp32")
    return race.lines(work, contenders, task=task, must_agree=True)


def busy(bench: Bench) -> list[Line]:
    """One text while another program computes on one core: threads that wait for one another lose most."""
    ((work, contenders),) = LINES["busy"].items()
    race = Decoding(bench, bench.prompt(), bench.sizes.new)
    race.add_llama(OURS, bench.peers.ours("fp32"))
    race.add_llama(PLAIN, bench.peers.plain())
    with one_core_busy():
        return race.lines(work, contenders, task=None, must_agree=True)


@contextmanager
def one_core_busy() -> Iterator[subprocess.Popen]:
    """Another process that computes without a pause as long as the block lasts."""
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield child
    finally:
        child.kill()
        child.wait()
