"""Cost against work: how speed changes with the context, the length and the batch, and what an epoch costs."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks import naive, peers
from benchmarks.measure import Contender, Turns
from benchmarks.table import Bench, Line
from benchmarks.targets import COURSE, HF, OURS, PLAIN
from llama import Llama

if TYPE_CHECKING:
    from fast.decoder import Decoder

Table = list[dict[str, float | int | str]]
MAX_REPEATS = 3
NEW = 12  # tokens that are timed at each context


def _few_turns(bench: Bench) -> Turns:
    turns = bench.turns
    return Turns(min(turns.repeats, MAX_REPEATS), turns.pause, turns.synchronize)


class TokenClock:
    """Looks at the clock whenever a token is there: `on_token` of ours, a "streamer" for Hugging Face's `generate`."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Part of a streamer."""

    def seconds_per_token(self) -> float:
        """Over the last `NEW` tokens: neither the prompt nor the token that it takes belongs to them."""
        return (self.times[-1] - self.times[-1 - NEW]) / NEW


def tokens_per_second(bench: Bench) -> Table:
    """Decoding, one text, float32: the speed of the last `NEW` tokens before the context is full.

    The course's way computes everything anew for every token, so the time of two whole tokens is its speed.
    """
    contenders = {OURS: partial(_decode, bench.peers.ours("fp32")), PLAIN: partial(_decode, bench.peers.plain())}
    if bench.has(HF):
        contenders[HF] = partial(_decode_hf, bench.peers.hf())
    contenders[COURSE] = partial(_decode_naive, bench.peers.naive())
    table: Table = []
    for context in bench.sizes.contexts:
        token_ids = bench.batch(1, context)[0]
        turns = [Contender(name, partial(decode, token_ids)) for name, decode in contenders.items()]
        costs = _few_turns(bench).take(turns)
        table.append({"context": context, **{name: 1 / statistics.median(costs[name]) for name in contenders}})
    return table


def _decode(model: Llama | Decoder, token_ids: torch.Tensor) -> float:
    """Seconds per token up to the length of `token_ids`, whose beginning is the prompt. token_ids: 1 s"""
    clock = TokenClock()
    model.generate(token_ids[:, : -NEW - 1], NEW + 1, temperature=0.0, on_token=clock.put)
    return clock.seconds_per_token()


def _decode_hf(model: nn.Module, token_ids: torch.Tensor) -> float:
    clock = TokenClock()
    peers.generate_with_hf(model, token_ids[:, : -NEW - 1], NEW + 1, streamer=clock)
    return clock.seconds_per_token()


def _decode_naive(model: naive.NaiveLlama, token_ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model.generate(token_ids[:, :-2], 2)
    return (time.perf_counter() - start) / 2


def _classify(model: nn.Module, token_ids: torch.Tensor) -> None:
    peers.classify(model, token_ids)


def sentences_per_second(bench: Bench) -> Table:
    """Classification, causal, sentences of one length without padding."""
    models: dict[str, nn.Module] = {
        f"{OURS}, fp32": bench.peers.our_classifier("fp32"),
        f"{OURS}, bf16": bench.peers.our_classifier("bf16"),
        f"{COURSE}, fp32": bench.peers.naive_classifier(),
    }
    if bench.has(HF):
        models[f"{HF}, fp32"] = bench.peers.hf_classifier()
        models[f"{HF}, bf16"] = bench.peers.hf_classifier(torch.bfloat16)
    table: Table = []
    for length in bench.sizes.lengths:
        for rows in bench.sizes.batches:
            token_ids = bench.batch(rows, length)[0]
            contenders = [Contender(name, partial(_classify, model, token_ids)) for name, model in models.items()]
            costs = _few_turns(bench).take(contenders)
            speeds = {name: rows / statistics.median(seconds) for name, seconds in costs.items()}
            table.append({"length": length, "batch": rows, **speeds})
    return table


def epoch_costs(lines: list[Line]) -> Table:
    """Seconds of an epoch and peak memory of fine-tuning, from the lines that measured them."""
    table: Table = []
    for line in lines:
        is_epoch, is_memory = line.work.startswith("SST epoch"), line.work.startswith("peak memory")
        if line.ratio is None or not (is_epoch or is_memory):
            continue
        for name, value in ((OURS, line.ours), (line.against, line.theirs)):
            row = {"work": line.work, "contender": name, line.unit: value}
            if row not in table:
                table.append(row)
    return table
