"""Cost against work: how speed changes with the context, the length and the batch, and what an epoch costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks import peers
from benchmarks.measure import Contender, Turns
from benchmarks.rows import Bench, Line
from benchmarks.targets import COURSE, HF, OURS, PLAIN

Table = list[dict[str, float | int | str]]
MAX_REPEATS = 3
NEW = 8  # tokens that are timed at each context


def _few_turns(bench: Bench) -> Turns:
    turns = bench.turns
    return Turns(min(turns.repeats, MAX_REPEATS), turns.pause, turns.synchronize)


def tokens_per_second(bench: Bench) -> Table:
    """Decoding, one text, float32: the speed of the last `NEW` tokens before the context is full.

    A run of 1 + NEW tokens less a run of one: what the prompt takes falls out.
    """
    ours, plain, course = bench.peers.ours("fp32"), bench.peers.plain(), bench.peers.naive()
    generators: dict[str, Callable[[torch.Tensor, int], object]] = {
        OURS: lambda prompt, new: ours.generate(prompt, new, temperature=0.0),
        PLAIN: lambda prompt, new: plain.generate(prompt, new, temperature=0.0),
        COURSE: course.generate,
    }
    if bench.has_hf:
        hf = bench.peers.hf()
        generators[HF] = lambda prompt, new: peers.generate_with_hf(hf, prompt, new)
    table: Table = []
    for context in bench.sizes.contexts:
        prompt = bench.batch(1, context - NEW - 1)[0]
        contenders = [
            Contender(f"{name} {new}", partial(_generate, generate, prompt, new))
            for name, generate in generators.items()
            for new in (1, 1 + NEW)
        ]
        costs = _few_turns(bench).take(contenders)
        row: dict[str, float | int | str] = {"context": context}
        for name in generators:
            seconds = statistics.median(costs[f"{name} {1 + NEW}"]) - statistics.median(costs[f"{name} 1"])
            row[name] = NEW / seconds if seconds > 0 else 0.0  # 0: too quick for this clock
        table.append(row)
    return table


def _generate(generate: Callable[[torch.Tensor, int], object], prompt: torch.Tensor, new: int) -> None:
    generate(prompt, new)


def _classify(model: nn.Module, token_ids: torch.Tensor) -> None:
    peers.classify(model, token_ids)


def sentences_per_second(bench: Bench) -> Table:
    """Classification, causal, sentences of one length without padding."""
    models: dict[str, nn.Module] = {
        f"{OURS}, fp32": bench.peers.our_classifier("fp32"),
        f"{OURS}, bf16": bench.peers.our_classifier("bf16"),
        f"{COURSE}, fp32": bench.peers.naive_classifier(),
    }
    if bench.has_hf:
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
