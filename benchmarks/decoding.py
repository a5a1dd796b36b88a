"""The lines that generate text: one text, several texts, bidirectional attention, and a machine with other work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from benchmarks import peers
from benchmarks.apart import LibraryModel
from benchmarks.llama2c import EOS_ID
from benchmarks.measure import Contender
from benchmarks.peers import Peers, random_llama
from benchmarks.table import QUICK_SIZES, Bench, BenchmarkTask, Line, lines_of
from benchmarks.targets import (
    COURSE,
    CT2_TYPES,
    HF,
    LINES,
    LLAMA2C,
    LLAMACPP_DTYPES,
    ONE_BY_ONE,
    ORT_GENAI,
    OURS,
    PLAIN_PATH,
)
from benchmarks.work import decoding, recomputing
from config import LlamaConfig
from engine.decoding import Decoder
from llama import Llama

Ids = list[int]
LIBRARIES = {  # the class that computes with it, in a process of its own, and the type of its weights
    **{name: ("benchmarks.llamacpp.LlamaCpp", dtype) for name, dtype in LLAMACPP_DTYPES.items()},
    **{name: ("benchmarks.ct2.CTranslate2", dtype) for name, dtype in CT2_TYPES.items()},
    ORT_GENAI: ("benchmarks.ort_genai.OrtGenAI", "fp32"),
}
SMOLLM2 = dict(
    vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden_dim=1536, max_seq_len=1024,
    attention="causal",
)  # fmt: skip
# Computes as long as the process that started it lives.
BUSY_PROGRAM = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


class Decoding:
    """Contenders that continue one prompt (rows s), and whether their answers are the same."""

    def __init__(self, bench: Bench, rows: int = 1):
        self.bench, self.prompt, self.new = bench, bench.prompt(rows), bench.sizes.new
        self.contenders: list[Contender] = []
        self.ids: dict[str, list[Ids]] = {}

    def add(self, name: str, generate: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        def run() -> None:
            self.ids[name] = generate(self.prompt, self.new).tolist()

        self.contenders.append(Contender(name, run))

    def add_llama(self, name: str, model: Llama | Decoder) -> None:
        """model: the plain one is asked as by `--kernels plain`, with a cache."""
        generator = Decoder(model) if isinstance(model, Llama) else model
        self.add(name, partial(generator.generate, temperature=0.0))

    def add_peers(self, names: tuple[str, ...]) -> None:
        """Those of `names` that are other programs or libraries and are installed."""
        for name in filter(self.bench.has, names):
            with self.bench.attempt(name):
                if name == LLAMA2C:
                    self.contenders.append(Contender(LLAMA2C, self._run_llama2c))
                elif name in LIBRARIES:
                    self._add_library(name, *LIBRARIES[name])
                elif name == HF:
                    self.add(HF, partial(peers.generate_with_hf, self.bench.peers.hf()))
                elif name == COURSE:
                    self.add(COURSE, self.bench.peers.naive().generate)

    def _run_llama2c(self) -> float:
        """Its own clock's seconds."""
        return self.bench.llama2c.generate(self.prompt[0].tolist(), self.new) * self.new

    def _add_library(self, name: str, kind: str, dtype: str) -> None:
        """A compiled library may be installed and still not load on this machine."""
        bench = self.bench
        model = LibraryModel(bench.folder, bench.peers.state, bench.config, bench.threads, dtype)
        if library := bench.start(name, kind, model):
            self.add(name, library.generate)

    def lines(self, work: str, contenders: tuple[str, ...], task: BenchmarkTask | None, must_agree: bool) -> list[Line]:
        """Takes turns among all; the first contender is ours."""
        costs = self.bench.race(work, self.contenders)
        notes = {name: self._agreement(name) for name in costs}
        same = {name: notes[name].startswith("identical") for name in costs} if must_agree else {}
        amount = float(self.new * len(self.prompt))
        return lines_of(
            self.bench, work, contenders, costs, amount=amount, unit="tok/s", notes=notes, same=same, task=task
        )

    def _agreement(self, name: str) -> str:
        ours = self.ids[self.contenders[0].name]
        if name == LLAMA2C:
            return self.bench.llama2c.compare(ours[0])
        return compare_ids(ours, self.ids[name], self.prompt.shape[1], ends=name in (*CT2_TYPES, ORT_GENAI))


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


def _one_text(bench: Bench, precision: str, attention: str = "causal", dtype: torch.dtype = torch.float32) -> Decoding:
    """Ours and the plain path on one prompt. dtype: of the plain path's weights."""
    race = Decoding(bench)
    race.add_llama(OURS, bench.peers.ours(precision, attention))
    race.add_llama(PLAIN_PATH, bench.peers.plain(attention, dtype))
    return race


def _decoding_task(bench: Bench, precision: str, rows: int = 1) -> BenchmarkTask:
    return BenchmarkTask(decoding(bench.config, rows, bench.sizes.prompt, bench.sizes.new), precision)


def decode_fp32(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["decode-fp32"].items()
    race = _one_text(bench, "fp32")
    race.add_peers(contenders)
    return race.lines(work, contenders, _decoding_task(bench, "fp32"), must_agree=True)


def decode_int8(bench: Bench) -> list[Line]:
    """int8 and bf16, whose ids may differ; the plain path of int8 and llama2.c are float32."""
    lines = []
    precisions = (("int8", torch.float32), ("bf16", torch.bfloat16))
    for (work, contenders), (precision, dtype) in zip(LINES["decode-int8"].items(), precisions, strict=True):
        race = _one_text(bench, precision, dtype=dtype)
        race.add_peers(contenders)
        lines += race.lines(work, contenders, _decoding_task(bench, precision), must_agree=False)
    return lines


def decode_int4(bench: Bench) -> list[Line]:
    """A model of SmolLM2-135M's shape, because 4 bits are for models of that size and more.

    The plain path has the rounded weights, and so must give the same ids.
    """
    ((work, contenders),) = LINES["decode-int4"].items()
    config = bench.config if bench.sizes == QUICK_SIZES else LlamaConfig(**SMOLLM2)
    peers = Peers(random_llama(config, bench.seed), bench.seed)
    peers.kernels = bench.peers.kernels
    bench = replace(bench, config=config, peers=peers, folder=bench.folder / "135M")
    race, ours, plain = Decoding(bench), peers.ours("int4"), peers.plain()
    plain.load_state_dict(ours.llama.state_dict())
    race.add_llama(OURS, ours)
    race.add_llama(PLAIN_PATH, plain)
    race.add_peers(contenders)
    passes, precision = _decoding_task(bench, "int4")
    more = round(config.vocab_size * config.dim * (8 / 4.5 - 1))  # the output matrix has 8 bits, not 4.5
    task = BenchmarkTask([each._replace(weights=each.weights + more) for each in passes], precision)
    lines = race.lines(work, contenders, task, must_agree=False)
    for line in lines:
        if line.against == PLAIN_PATH:
            line.same_result = line.note.startswith("identical")
    return lines


def decode_together(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["decode-together"].items()
    model, rows = bench.peers.ours("fp32"), bench.sizes.together

    def one_by_one(prompts: torch.Tensor, new: int) -> torch.Tensor:
        return torch.cat([model.generate(prompt[None], new, temperature=0.0) for prompt in prompts])

    race = Decoding(bench, rows)
    race.add_llama(OURS, model)
    race.add(ONE_BY_ONE, one_by_one)
    race.add_llama(PLAIN_PATH, bench.peers.plain())
    return race.lines(work, contenders, _decoding_task(bench, "fp32", rows), must_agree=True)


def generate_bidirectional(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["generate-bidirectional"].items()
    race, course = _one_text(bench, "fp32", "bidirectional"), bench.peers.naive("bidirectional")
    race.add(COURSE, course.generate)
    task = BenchmarkTask(recomputing(course.config, 1, bench.sizes.prompt, bench.sizes.new), "fp32")
    return race.lines(work, contenders, task, must_agree=True)


def busy(bench: Bench) -> list[Line]:
    """One text while another program computes on one core: threads that wait for one another lose most."""
    ((work, contenders),) = LINES["busy"].items()
    race = _one_text(bench, "fp32")
    with one_core_busy():
        return race.lines(work, contenders, task=None, must_agree=True)


@contextmanager
def one_core_busy() -> Iterator[subprocess.Popen]:
    """Another process that computes without a pause as long as the block lasts."""
    child = subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM])
    try:
        yield child
    finally:
        child.kill()
        child.wait()
