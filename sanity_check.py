"""Checks llama.py and classifier.py against numbers that others computed: `python sanity_check.py`.

Exit status 0 if they are right, 1 if not. With stories42M.pt and the course's sanity_check.data it checks the logits
and hidden states of the two sequences that the assignment publishes. Without them it checks the bundled checkpoint
against tensors that Hugging Face transformers computed from it. Where something is wrong, and with `--parts`, it goes
part by part: the numbers of a wrong part are compared with those of the usual mistakes, and the one that fits is named.
`--published` runs generation and the four zero-shot files on the real stories42M.pt and compares them with what
independently finished public repositories of the assignment have in common.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import subprocess
import sys
import tempfile
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

import rope_test
from course import ATTENTION_KINDS, DEFAULT_EDITION, EDITIONS, NORMS, create_data
from rope_test import Answer, Tensors, Wrong, alike, ask, rotate_by_hand, student
from storage import load_tensors
from utils import ROOT, ArgumentParser, Default, UserError, choose_device, find_asset, read_text, run_main

ATOL, RTOL = 1e-5, 1e-3
KINDS = ATTENTION_KINDS
COURSE_CHECKPOINT, COURSE_REFERENCE = "stories42M.pt", "sanity_check.data"
BUNDLED_CHECKPOINT, BUNDLED_REFERENCE = "checkpoints/minllama1M.pt", "checkpoints/minllama1M-reference.pt"
BUNDLED_NORM = "rms"  # of these, of the parts' numbers, and of what public repositories share
# the two sequences behind the course's sanity_check.data (github.com/neubig/minllama-assignment, commit 2951cdd)
COURSE_TOKENS = ((101, 7592, 2088, 102, 0, 0, 0, 0), (101, 7592, 15756, 2897, 2005, 17953, 2361, 102))


# -------------------------------------------------------------------------------------- logits, hidden states


@dataclass
class Reference:
    """What a checkpoint should compute from `tokens` under one attention semantics."""

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden_states: torch.Tensor
    attention: str


def course_reference(path: Path, attention: str) -> Reference:
    data = load_tensors(path)
    try:
        logits, hidden_states = data["logits"], data["hidden_states"]
    except (TypeError, KeyError, IndexError):
        logits = hidden_states = None
    if not isinstance(logits, torch.Tensor) or not isinstance(hidden_states, torch.Tensor):
        raise UserError(f"{path} does not hold the tensors 'logits' and 'hidden_states'")
    return Reference(torch.tensor(COURSE_TOKENS), logits, hidden_states, attention)


def bundled_references(path: Path) -> list[Reference]:
    data = load_tensors(path)
    return [Reference(data["tokens"], **data[kind], attention=kind) for kind in KINDS]


def takes_attention() -> bool:
    """Whether the student's load_pretrained lets one choose between the two kinds; the hand-out's does not."""
    try:
        return "attention" in inspect.signature(student("llama", "load_pretrained")).parameters
    except Exception:  # it is not there, which whoever calls it will say
        return False


def load_student(path: Path, attention: str) -> torch.nn.Module:
    """The student's model of a checkpoint; one that knows a single kind of attention is taken as it is."""
    chosen = {"attention": attention} if takes_attention() else {}
    return student("llama", "load_pretrained")(path, **chosen).eval()


def compute(checkpoint: Path, reference: Reference, attention: str, device: str) -> Answer:
    """The student's logits and hidden states. Raises `UserError` if checkpoint and reference do not belong together."""
    chosen = choose_device(device)

    def call() -> Tensors:
        model = load_student(checkpoint, attention).to(chosen)
        size, shape = model.config.vocab_size, (*reference.tokens.shape, model.config.dim)
        if reference.tokens.max() >= size:
            raise UserError(f"{checkpoint} has a vocabulary of {size}, too small for the reference's token ids")
        if reference.hidden_states.shape != shape or reference.logits.shape != (shape[0], 1, size):
            shapes = f"{list(reference.hidden_states.shape)} and {list(reference.logits.shape)}"
            raise UserError(f"the reference's tensors are {shapes}, which is not the shape of {checkpoint}")
        with torch.inference_mode():
            logits, hidden_states = model(reference.tokens.to(chosen))
        return hidden_states, logits

    return ask(call, passes=UserError)


def agrees(answer: Answer, reference: Reference, verbose: bool = True) -> bool:
    """Whether the student computed the reference within atol + rtol * |reference|; prints the largest errors."""
    if answer.trouble:
        if verbose:
            print(f"  {answer.line}")
        return False
    verdicts = []
    expected_tensors = (reference.hidden_states, reference.logits)
    for name, actual, expected in zip(("hidden states", "logits"), answer.tensors, expected_tensors, strict=True):
        if actual.shape != expected.shape:
            verdicts.append(False)
            line = f"{list(actual.shape)}, but the reference's are {list(expected.shape)}: WRONG"
        else:
            difference = (actual.float() - expected).abs()
            verdicts.append(bool((difference <= ATOL + RTOL * expected.abs()).all()))  # False for NaN as well
            relative = (difference / expected.abs().clamp(min=ATOL)).max()
            line = (
                f"largest absolute error {difference.max():.1e}, largest relative error {relative:.1e}: "
                f"{'ok' if verdicts[-1] else 'WRONG'}"
            )
        if verbose:
            print(f"  {name:13s}  {line}")
    return all(verdicts)


def check_model(checkpoint: Path, references: list[Reference], device: str = "cpu") -> bool:
    """Check every reference; where one fails, say whether the attention mask is the cause."""
    passed = True
    for reference in references:
        print(f"{checkpoint} with {reference.attention} attention (atol {ATOL:g}, rtol {RTOL:g}):")
        answer = compute(checkpoint, reference, reference.attention, device)
        if agrees(answer, reference):
            continue
        passed = False
        if answer.trouble or not takes_attention():
            continue
        other = "causal" if reference.attention == "bidirectional" else "bidirectional"
        if agrees(compute(checkpoint, reference, other, device), reference, verbose=False):
            print(f"  The causal mask is the cause: with {other} attention the model gives exactly this reference.")
        else:
            print(f"  The causal mask is not the cause: with {other} attention the reference is missed as well.")
    return passed


def kinds_to_check(wanted: str | None) -> tuple[str, ...]:
    """The kinds of attention that the student's model should know."""
    if wanted:
        return (wanted,)
    return KINDS if takes_attention() else ("bidirectional",)


def check_sanity(args: Namespace) -> bool:
    """The course's reference if both of its files are here, the bundled one if not; says which."""
    edition = EDITIONS[args.edition]
    checkpoint, reference = find_asset(args.pretrained_model_path), find_asset(args.data)
    if checkpoint and reference:
        print(f"Checking against the course's reference tensors ({reference}).")
        return check_model(checkpoint, [course_reference(reference, args.attention or edition.attention)], args.device)
    wanted = {args.pretrained_model_path: checkpoint, args.data: reference}
    missing = ", ".join(name for name, found in wanted.items() if not found)
    if not (isinstance(args.pretrained_model_path, Default) and isinstance(args.data, Default)):
        raise UserError(f"{missing} does not exist; a checkpoint that you name is checked against the course's tensors")
    if edition.norm != BUNDLED_NORM:
        raise UserError(f"{missing} does not exist; {args.edition} needs it, as no bundled tensors are of that edition")
    checkpoint, reference = find_asset(BUNDLED_CHECKPOINT), find_asset(BUNDLED_REFERENCE)
    if not checkpoint or not reference:
        raise UserError(f"not here: {missing}, nor the bundled checkpoint; setup.sh fetches the course's files")
    print(f"Not here: {missing}. So checking the bundled checkpoint against Hugging Face transformers' numbers.")
    kinds = kinds_to_check(args.attention)
    references = [reference for reference in bundled_references(reference) if reference.attention in kinds]
    return check_model(checkpoint, references, args.device)


def norm_kind() -> str | None:
    """How the student's layers normalise; None where they cannot be asked. LayerNorm does not see what is added."""

    def call() -> Tensors:
        norm = student("llama", "LlamaLayer")(0, small_config("bidirectional")).eval().attention_norm
        return norm(states()), norm(states() + 1)

    answer = ask(call)
    if answer.trouble:
        return None
    plain, shifted = answer.tensors
    return "layer" if alike((plain,), (shifted,)) else "rms"


def check_another_norm(args: Namespace) -> bool:
    """Of an edition with another norm than the bundled model's, the course's tensors alone can be checked."""
    norm, found = EDITIONS[args.edition].norm, norm_kind()
    name = NORMS[norm]
    if args.parts or args.published:
        raise UserError(f"--parts and --published know {NORMS[BUNDLED_NORM]} alone, and {args.edition} has {name}")
    if found not in (None, norm):
        print(f"{args.edition} has {name}, and llama.py computes {NORMS[found]}: its numbers cannot be the same.")
        return False
    print(f"note: neither the parts nor classifier.py are checked for {name}", file=sys.stderr)
    return check_sanity(args)


# ------------------------------------------------------------------------------------------------ part by part

PARTS = "checkpoints/parts.json"  # what checkpoints/parts.py had others compute
DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 24, 2, 4, 2, 6, 20, 40
EPS, NORM_EPS, THETA, PAD = 0.01, 0.1, 10000.0, 3
SHAPE = dict(vocab_size=VOCAB, dim=DIM, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, max_seq_len=16)
SHAPE |= dict(multiple_of=4, hidden_dim=HIDDEN, layer_norm_eps=EPS)
TOKENS = torch.tensor(((1, 17, 5, 30, 22), (1, 17, 38, 6, 11)))
PADDED = torch.tensor(((1, 17, 5, 30, 22, 9), (1, 8, 26, PAD, PAD, PAD), (1, PAD, 12, 33, PAD, PAD)))
LAST_TOKENS = torch.tensor((5, 2, 3))  # where the rows of PADDED end
LABELS = ((7,), (20, 31), (12, 5, 33))  # token ids of the labels' names
NEARLY_ALL = 0.999999  # of a hidden state dropped: what is left of the logits is the bias


def closed_form(name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """Numbers without a random generator: scale * sin(n^2 + a number made of the name) + shift for n = 1, 2, ..."""
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (scale * torch.sin(n.square() + zlib.crc32(name.encode()) % 1000) + shift).float().reshape(shape)


@lru_cache
def small_weights() -> dict[str, torch.Tensor]:
    """The state dict of a model of `SHAPE`, under the checkpoint's names."""
    key_dim = KV_HEADS * HEAD_DIM
    shapes = {f"attention.compute_{name}": (rows, DIM) for name, rows in (("query", DIM), ("output", DIM))}
    shapes |= {f"attention.compute_{name}": (key_dim, DIM) for name in ("key", "value")}
    shapes |= {"feed_forward.w1": (HIDDEN, DIM), "feed_forward.w2": (DIM, HIDDEN), "feed_forward.w3": (HIDDEN, DIM)}
    shapes |= {"attention_norm": (DIM,), "ffn_norm": (DIM,)}
    shapes = {f"layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    weights = {"tok_embeddings.weight": closed_form("tok_embeddings", VOCAB, DIM, scale=1.5)}
    weights["output.weight"] = weights["tok_embeddings.weight"]
    for name, shape in {**shapes, "norm": (DIM,)}.items():
        spread = dict(scale=0.5, shift=1.0) if len(shape) == 1 else dict(scale=2 / math.sqrt(shape[1]))
        weights[f"{name}.weight"] = closed_form(name, *shape, **spread)
    return weights


def states() -> torch.Tensor:
    return closed_form("states", 2, 5, DIM, shift=0.3)  # b s D


def rotary_inputs() -> Tensors:
    return closed_form("query", 2, 5, HEADS, HEAD_DIM), closed_form("key", 2, 5, KV_HEADS, HEAD_DIM)  # b s h d, b s g d


def score_inputs() -> Tensors:
    return tuple(closed_form(name, 2, HEADS, 5, HEAD_DIM, scale=2.0) for name in ("query", "key", "value"))  # b h s d


def below(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def in_double(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in weights.items()}


# Every part by hand, in float64, with what can go wrong as an argument; and what goes wrong usually.


def mean_square(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.square().mean(dim, keepdim=True)


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (mean_square(x) + eps).sqrt() * weight


NORM_MISTAKES = {
    "the mean is of x, not of its squares": lambda x, w, eps: x / (x.mean(-1, keepdim=True) + eps).sqrt() * w,
    "the squares are summed, not averaged": lambda x, w, eps: x / (DIM * mean_square(x) + eps).sqrt() * w,
    "it divides by the length of x; it is the root of the mean of the squares": lambda x, w, eps: (
        x / (x.norm(dim=-1, keepdim=True) + eps) * w
    ),
    "the root is missing": lambda x, w, eps: x / (mean_square(x) + eps) * w,
    "it multiplies by the root instead of dividing": lambda x, w, eps: x * (mean_square(x) + eps).sqrt() * w,
    "eps stands outside the root, not inside": lambda x, w, eps: x / (mean_square(x).sqrt() + eps) * w,
    "eps is missing, or not the one that RMSNorm was given": lambda x, w, eps: norm(x, w, 1e-6),
    "the weight is missing": lambda x, w, eps: norm(x, 1.0, eps),
    "it multiplies by 1 + weight, not by the weight": lambda x, w, eps: norm(x, 1 + w, eps),
    "the mean is subtracted, as in LayerNorm": lambda x, w, eps: norm(x - x.mean(-1, keepdim=True), w, eps),
    "it divides by the standard deviation, which subtracts the mean": lambda x, w, eps: (
        x / (x.var(-1, keepdim=True) + eps).sqrt() * w
    ),
    "the mean runs over positions, not over dim=-1": lambda x, w, eps: x / (mean_square(x, 1) + eps).sqrt() * w,
    "the mean runs over everything, not over dim=-1": lambda x, w, eps: x / (x.square().mean() + eps).sqrt() * w,
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    *,
    order: Callable = lambda q, k, v: (q, k, v),
    divisor: float = math.sqrt(HEAD_DIM),
    visible: Callable | None = None,
    hidden: float = -math.inf,
    normalise: Callable = lambda scores: scores.softmax(-1),
    finish: Callable = lambda output: output,
) -> torch.Tensor:
    """Vaswani et al. 2017, equation 1. query, key, value: b h s d. visible: what stays of an s s matrix of ones."""
    query, key, value = order(query, key, value)
    scores = query @ key.transpose(-2, -1) / divisor  # b h s t
    ones = torch.ones_like(scores[0, 0])
    seen = visible(ones) if visible else ones.tril() if causal else ones
    return finish(normalise(scores.masked_fill(seen == 0, hidden)) @ value)


MASK_MISTAKES = {
    "there is a causal mask, which this reference has not (an edition that has it: --attention causal)": dict(
        visible=torch.tril
    ),
    "the causal mask is missing: a position sees what follows": dict(visible=lambda ones: ones),
    "the causal mask is shifted by one: a position does not see itself": dict(visible=lambda ones: ones.tril(-1)),
    "the causal mask is shifted by one: a position sees the next": dict(visible=lambda ones: ones.tril(1)),
    "the causal mask is upside down: a position sees itself and what follows": dict(visible=torch.triu),
    "the causal mask is inverted: it hides what should be seen": dict(visible=lambda ones: ones.triu(1)),
    "the causal mask sets scores to 0, not to -inf": dict(hidden=0.0),
    "the causal mask comes after the softmax, not before": dict(
        visible=lambda ones: ones, normalise=lambda scores: scores.softmax(-1).tril()
    ),
}
ATTEND_MISTAKES = {
    "scores are divided by d, not by sqrt(d)": dict(divisor=HEAD_DIM),
    "scores are not scaled: divide them by sqrt(d)": dict(divisor=1.0),
    "scores are multiplied by sqrt(d), not divided": dict(divisor=1 / math.sqrt(HEAD_DIM)),
    "scores are divided by the root of the model's size, not of the head's": dict(divisor=math.sqrt(DIM)),
    "scores are divided by the root of the length, not of the head's size": dict(divisor=math.sqrt(TOKENS.shape[1])),
    "scores are divided by the root of the number of heads, not of their size": dict(divisor=math.sqrt(HEADS)),
    "the weights are scaled after the softmax, not the scores before it": dict(
        divisor=1.0, normalise=lambda scores: scores.softmax(-1) / math.sqrt(HEAD_DIM)
    ),
    "the softmax runs over the queries, not over the keys (dim=-1)": dict(normalise=lambda s: s.softmax(-2)),
    "the softmax runs over the heads, not over the keys (dim=-1)": dict(normalise=lambda s: s.softmax(1)),
    "the softmax runs over the batch, not over the keys (dim=-1)": dict(normalise=lambda s: s.softmax(0)),
    "the softmax is missing": dict(normalise=lambda scores: scores),
    "it is log_softmax, not softmax": dict(normalise=lambda scores: scores.log_softmax(-1)),
    "query and key are exchanged": dict(order=lambda q, k, v: (k, q, v)),
    "key and value are exchanged": dict(order=lambda q, k, v: (q, v, k)),
    "the values are not used": dict(order=lambda q, k, v: (q, k, torch.eye(k.shape[2], dtype=k.dtype))),
    "heads come out after the length; it is b h s d": dict(finish=lambda output: output.transpose(1, 2)),
    "heads come out joined; it is b h s d": dict(finish=lambda output: output.transpose(1, 2).flatten(2)),
    **MASK_MISTAKES,
}


def turned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    return rotate_by_hand(query, THETA), rotate_by_hand(key, THETA), value


def attention(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    causal: bool,
    *,
    split: Callable = lambda x: x.unflatten(-1, (-1, HEAD_DIM)),
    turn: Callable = turned,
    spread: Callable = lambda x: x.repeat_interleave(HEADS // KV_HEADS, dim=1),
    merge: Callable = lambda x: x.transpose(1, 2).flatten(2),
    project: Callable = lambda x, weight: x @ weight.T,
    **masking: Callable | float,
) -> torch.Tensor:
    """Grouped-query attention. x: b s D -> b s D. Heads are b s h d (`split`, `turn`), then b h s d."""
    heads = (split(x @ weights[f"compute_{name}.weight"].T) for name in ("query", "key", "value"))
    query, key, value = (x.transpose(1, 2) for x in turn(*heads))
    return project(
        merge(attend(query, spread(key), spread(value), causal, **masking)), weights["compute_output.weight"]
    )


ATTENTION_MISTAKES = {
    "key/value heads are repeated as 1 2 1 2 (repeat), not as 1 1 2 2 (repeat_interleave)": dict(
        spread=lambda x: x.repeat(1, HEADS // KV_HEADS, 1, 1)
    ),
    "all queries use the first key/value head": dict(spread=lambda x: x[:, :1].expand(-1, HEADS, -1, -1)),
    "queries and keys are not rotated": dict(turn=lambda q, k, v: (q, k, v)),
    "keys are not rotated": dict(turn=lambda q, k, v: (rotate_by_hand(q, THETA), k, v)),
    "queries are not rotated": dict(turn=lambda q, k, v: (q, rotate_by_hand(k, THETA), v)),
    "values are rotated, too": dict(turn=lambda *heads: [rotate_by_hand(x, THETA) for x in heads]),
    "the rotation takes heads for positions: rotate before heads and length change places": dict(
        turn=lambda q, k, v: (rope_test.along_heads(q, THETA), rope_test.along_heads(k, THETA), v)
    ),
    "heads are joined without changing places with the length first (transpose(1, 2))": dict(
        merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1)
    ),
    "heads are cut as (b, h, s, d) at once; it is (b, s, h, d), then transpose(1, 2)": dict(
        split=lambda x: x.reshape(x.shape[0], -1, x.shape[1], HEAD_DIM).transpose(1, 2)
    ),
    "heads are cut as (d, h), not as (h, d)": dict(split=lambda x: x.unflatten(-1, (HEAD_DIM, -1)).transpose(-1, -2)),
    "heads are joined as (d, h), not as (h, d)": dict(merge=lambda x: x.permute(0, 2, 3, 1).flatten(2)),
    "the projection at the end, compute_output, is missing": dict(project=lambda x, weight: x),
    **MASK_MISTAKES,
}


def feed_forward(
    x: torch.Tensor, weights: dict[str, torch.Tensor], gate: Callable = lambda a, b: F.silu(a) * b
) -> torch.Tensor:
    """gate: what becomes of w1 x and w3 x."""
    return gate(x @ weights["w1.weight"].T, x @ weights["w3.weight"].T) @ weights["w2.weight"].T


GATES = {
    "the activation is GELU, not SiLU": lambda a, b: F.gelu(a) * b,
    "the activation is GELU (by tanh), not SiLU": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "the activation is ReLU, not SiLU": lambda a, b: a.relu() * b,
    "the activation is the sigmoid alone; SiLU is x * sigmoid(x)": lambda a, b: a.sigmoid() * b,
    "the activation is tanh, not SiLU": lambda a, b: a.tanh() * b,
    "there is no activation": lambda a, b: a * b,
    "w1 and w3 are exchanged: it is w2(silu(w1 x) * w3 x)": lambda a, b: a * F.silu(b),
    "w3 is not used: it is w2(silu(w1 x) * w3 x)": lambda a, b: F.silu(a),
    "w3 x is added, not multiplied": lambda a, b: F.silu(a) + b,
    "the activation comes after the product: it is silu(w1 x) * w3 x": lambda a, b: F.silu(a * b),
    "both factors are activated: it is silu(w1 x) * w3 x": lambda a, b: F.silu(a) * F.silu(b),
}


def layer(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    causal: bool,
    *,
    block: Callable = lambda x, a, f, m, n: (h := x + a(m(x))) + f(n(h)),
    eps: float = EPS,
) -> torch.Tensor:
    """block: what becomes of x through attention a, feed-forward f, attention_norm m and ffn_norm n."""
    a = partial(attention, weights=below(weights, "attention."), causal=causal)
    f = partial(feed_forward, weights=below(weights, "feed_forward."))
    m, n = (partial(norm, weight=weights[f"{name}.weight"], eps=eps) for name in ("attention_norm", "ffn_norm"))
    return block(x, a, f, m, n)


BLOCKS = {
    "the residual around the attention is missing: x + ...": lambda x, a, f, m, n: (h := a(m(x))) + f(n(h)),
    "the residual around the feed-forward is missing: h + ...": lambda x, a, f, m, n: f(n(x + a(m(x)))),
    "both residuals are missing": lambda x, a, f, m, n: f(n(a(m(x)))),
    "it is post-norm, norm(x + attention(x)), not x + attention(norm(x))": lambda x, a, f, m, n: n(
        (h := m(x + a(x))) + f(h)
    ),
    "norms stand behind attention and feed-forward: it is x + attention(norm(x))": lambda x, a, f, m, n: (
        (h := x + m(a(x))) + n(f(h))
    ),
    "attention_norm is missing": lambda x, a, f, m, n: (h := x + a(x)) + f(n(h)),
    "ffn_norm is missing": lambda x, a, f, m, n: (h := x + a(m(x))) + f(h),
    "both norms are missing": lambda x, a, f, m, n: (h := x + a(x)) + f(h),
    "attention_norm and ffn_norm are exchanged": lambda x, a, f, m, n: (h := x + a(n(x))) + f(m(h)),
    "attention_norm stands before the feed-forward, too": lambda x, a, f, m, n: (h := x + a(m(x))) + f(m(h)),
    "the second residual is x, not h (which has the attention in it)": lambda x, a, f, m, n: x + f(n(x + a(m(x)))),
    "the feed-forward reads x, not h (which has the attention in it)": lambda x, a, f, m, n: x + a(m(x)) + f(n(x)),
    "the feed-forward reads the attention's output without x": lambda x, a, f, m, n: x + (h := a(m(x))) + f(n(h)),
    "the first residual is normalised: add x itself": lambda x, a, f, m, n: (h := m(x) + a(m(x))) + f(n(h)),
    "the second residual is normalised: add h itself": lambda x, a, f, m, n: (h := n(x + a(m(x)))) + f(h),
    "both residuals are normalised: add x and h themselves": lambda x, a, f, m, n: (h := n(m(x) + a(m(x)))) + f(h),
    "the feed-forward is missing": lambda x, a, f, m, n: x + a(m(x)),
    "the attention is missing": lambda x, a, f, m, n: x + f(n(x)),
}
LAYER_MISTAKES = {sentence: dict(block=block) for sentence, block in BLOCKS.items()}
LAYER_MISTAKES["the eps of RMSNorm is not config.layer_norm_eps"] = dict(eps=1e-6)


def llama(
    tokens: torch.Tensor,
    causal: bool,
    *,
    embed: Callable = lambda embedded: embedded,
    layers: tuple[int, ...] = (0, 1),
    eps: float = EPS,
    shown: Callable = lambda before, after: after,
    read: Callable = lambda before, after: after,
    finish: Callable = lambda logits: logits,
    pick: Callable = lambda logits: logits[:, [-1]],
) -> Tensors:
    """The last position's logits, the hidden states, and all logits. before and after: the final norm."""
    weights = in_double(small_weights())
    h = embed(weights["tok_embeddings.weight"][tokens])
    for index in layers:
        h = layer(h, below(weights, f"layers.{index}."), causal)
    after = norm(h, weights["norm.weight"], eps)
    logits = finish(read(h, after) @ weights["output.weight"].T)
    return pick(logits), shown(h, after), logits


def before_norm(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return before


LLAMA_MISTAKES = {
    "the final norm is missing": dict(shown=before_norm, read=before_norm),
    "the logits are made before the final norm": dict(read=before_norm),
    "the hidden states are returned as they are before the final norm": dict(shown=before_norm),
    "the logits are the first position's, not the last's": dict(pick=lambda logits: logits[:, [0]]),
    "logits of all positions are returned without targets, too": dict(pick=lambda logits: logits),
    "the last position's logits are b v, not b 1 v (hidden[:, [-1]])": dict(pick=lambda logits: logits[:, -1]),
    "what is returned are probabilities, not logits": dict(finish=lambda logits: logits.softmax(-1)),
    "what is returned are log-probabilities, not logits": dict(finish=lambda logits: logits.log_softmax(-1)),
    "embeddings are multiplied by sqrt(dim), which Llama does not": dict(embed=lambda x: x * math.sqrt(DIM)),
    "the last layer is left out": dict(layers=(0,)),
    "every layer reads the embeddings, not the layer before": dict(layers=(1,)),
    "one layer is used for all": dict(layers=(0, 0)),
    "the layers run in reverse": dict(layers=(1, 0)),
    "no layer is used": dict(layers=()),
    "the final norm's eps is not config.layer_norm_eps": dict(eps=1e-6),
}


def at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), positions]


def last_state(hidden: torch.Tensor, causal: bool) -> torch.Tensor:
    """hidden: b s D -> b D"""
    return at(hidden, LAST_TOKENS) if causal else hidden[:, -1]


POOLS = {
    "it reads the first position, not the last": lambda hidden, causal: hidden[:, 0],
    "it reads the last position but one": lambda hidden, causal: (
        at(hidden, LAST_TOKENS - 1) if causal else hidden[:, -2]
    ),
    "it averages over the positions; it should read the last": lambda hidden, causal: hidden.mean(1),
    "it takes the largest over the positions; it should read the last": lambda hidden, causal: hidden.amax(1),
    "it reads the padding: in a causal model the last token that is not padding": lambda hidden, causal: hidden[:, -1],
    "it counts what is not padding; the padding's id may stand inside of a text, too": lambda hidden, causal: at(
        hidden, (PADDED != PAD).sum(-1) - 1
    ),
    "it reads the last token before the padding: this reference reads the batch's last position": (
        lambda hidden, causal: at(hidden, LAST_TOKENS)
    ),
}
POOL_MISTAKES = {sentence: dict(pool=pool) for sentence, pool in POOLS.items()}


def zero_shot(
    causal: bool,
    *,
    pool: Callable = last_state,
    vocabulary: Callable = lambda logits: logits.log_softmax(-1),
    label: Callable = lambda scores: scores.sum(-1),
    finish: Callable = lambda scores: scores,
) -> torch.Tensor:
    scores = vocabulary(pool(llama(PADDED, causal)[1], causal) @ small_weights()["output.weight"].double().T)  # b v
    return finish(torch.stack([label(scores[:, list(ids)]) for ids in LABELS], dim=-1))  # b c


ZERO_SHOT_MISTAKES = {
    **POOL_MISTAKES,
    "a label's tokens are averaged, not summed": dict(label=lambda scores: scores.mean(-1)),
    "a label's first token alone counts; sum over all of its tokens": dict(label=lambda scores: scores[:, 0]),
    "a label's last token alone counts; sum over all of its tokens": dict(label=lambda scores: scores[:, -1]),
    "logits are summed, not log-probabilities (log_softmax)": dict(vocabulary=lambda logits: logits),
    "probabilities are summed, not log-probabilities": dict(vocabulary=lambda logits: logits.softmax(-1)),
    "log_softmax runs over the batch, not over the vocabulary": dict(vocabulary=lambda logits: logits.log_softmax(0)),
    "the sums are normalised over the labels": dict(finish=lambda scores: scores.log_softmax(-1)),
}


def head_weights() -> dict[str, torch.Tensor]:
    return {"weight": closed_form("head", len(LABELS), DIM, scale=0.5), "bias": closed_form("bias", len(LABELS))}


def embedding(
    causal: bool,
    *,
    pool: Callable = last_state,
    finish: Callable = lambda logits: logits.log_softmax(-1),
    modes: Callable = lambda whole, dropped: (whole, dropped),
    spoil: Callable = lambda answer: answer,
) -> Tensors:
    """In evaluation; and in training, where dropout of nearly all leaves the bias. modes: the logits of the two."""
    head = in_double(head_weights())
    whole = pool(llama(PADDED, causal)[1], causal) @ head["weight"].T + head["bias"]  # b c
    evaluated, trained = map(finish, modes(whole, head["bias"].expand_as(whole)))
    return evaluated, spoil(trained)


EMBEDDING_MISTAKES = {
    **POOL_MISTAKES,
    "it returns logits, not log-probabilities (log_softmax): rows do not sum to 1": dict(finish=lambda logits: logits),
    "it returns probabilities, not log-probabilities": dict(finish=lambda logits: logits.softmax(-1)),
    "log_softmax runs over the batch, not over the classes": dict(finish=lambda logits: logits.log_softmax(0)),
    "there is no dropout in training": dict(modes=lambda whole, dropped: (whole, whole)),
    "there is dropout in evaluation, too": dict(modes=lambda whole, dropped: (dropped, dropped)),
    "dropout acts on the logits, not on the hidden state": dict(modes=lambda whole, dropped: (whole, 0 * whole)),
    "dropout acts on the log-probabilities, not on the hidden state": dict(spoil=lambda answer: 0 * answer),
}

# How a student's parts are asked. Each kind of attention has its own.


def fill(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A student's module with these weights, in evaluation mode."""
    unknown = module.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise Wrong(f"it has no parameter {unknown[0]}; the names are the checkpoint's")
    return module.eval()


def make(name: str, prefix: str, *arguments) -> torch.nn.Module:
    """A part of the student's llama.py with the weights below `prefix`."""
    return fill(student("llama", name)(*arguments), below(small_weights(), prefix))


def small_config(kind: str) -> Any:
    return student("config", "LlamaConfig")(**SHAPE, attention=kind)


def ask_attention(kind: str, x: torch.Tensor) -> torch.Tensor:
    module = make("Attention", "layers.0.attention.", small_config(kind))
    scores = module.compute_query_key_value_scores

    def watched(query: torch.Tensor, key: torch.Tensor, *others, **named) -> torch.Tensor:
        try:
            return scores(query, key, *others, **named)
        except RuntimeError as error:
            if key.shape[1] == KV_HEADS:
                raise Wrong("key/value heads are not repeated; each serves n_heads / n_kv_heads queries") from error
            raise

    module.compute_query_key_value_scores = watched
    return module(x)


def ask_llama(kind: str) -> Tensors:
    model = make("Llama", "", small_config(kind))
    if model.output.weight is not model.tok_embeddings.weight:
        raise Wrong("the head is not tied: self.tok_embeddings.weight = self.output.weight")
    logits, hidden = model(TOKENS)
    return logits, hidden, model(TOKENS, TOKENS)[0]


@contextmanager
def small_checkpoint(kind: str) -> Iterator[str]:
    """A checkpoint file of the small weights, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "small.pt")
        torch.save({"model": small_weights(), "model_args": {**SHAPE, "attention": kind}}, path)
        yield path


def ask_loading(kind: str) -> Tensors:
    with small_checkpoint(kind) as path:
        loaded = load_student(path, kind).state_dict()
    for name, tensor in small_weights().items():
        if name not in loaded or not torch.equal(loaded[name].cpu(), tensor):
            raise Wrong(f"{name} is not what the checkpoint holds")
    return ()


class LabelTokenizer:
    """Stands in for a tokenizer: a label's name lists its token ids."""

    bos_id, eos_id, pad_id = 1, 2, PAD

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        return [self.bos_id] * bos + [int(number) for number in text.split()] + [self.eos_id] * eos


def make_classifier(name: str, kind: str, *arguments) -> torch.nn.Module:
    settings = SimpleNamespace(num_labels=len(LABELS), hidden_dropout_prob=NEARLY_ALL, option="finetune", pad_id=PAD)
    with small_checkpoint(kind) as path:
        settings.pretrained_model_path, settings.attention = path, kind
        return student("classifier", name)(settings, *arguments)


def ask_zero_shot(kind: str) -> torch.Tensor:
    names = [" ".join(map(str, ids)) for ids in LABELS]
    return make_classifier("LlamaZeroShotClassifier", kind, LabelTokenizer(), names).eval()(PADDED)


def ask_embedding(kind: str) -> Tensors:
    model = make_classifier("LlamaEmbeddingClassifier", kind)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    heads = [module for module in linear if (module.in_features, module.out_features) == (DIM, len(LABELS))]
    if len(heads) != 1:
        raise Wrong("it has no linear head from a hidden state to num_labels numbers")
    fill(heads[0], head_weights())
    torch.manual_seed(0)
    return model.eval()(PADDED), model.train()(PADDED)


@dataclass(frozen=True)
class Part:
    """One thing that a student writes: how it is asked, and what usual mistakes would answer.

    needs: the parts that it calls, so that it cannot be right while they are wrong.
    """

    name: str
    where: str
    ask: Callable[[], torch.Tensor | Tensors]
    mistakes: dict[str, Callable[[], torch.Tensor | Tensors]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What became of a part: "ok", "WRONG", "not written yet" or "not judged", and a sentence on it."""

    part: Part
    verdict: str
    sentence: str = ""


def with_mistakes(by_hand: Callable, table: dict[str, dict], *arguments) -> dict[str, Callable]:
    return {sentence: partial(by_hand, *arguments, **wrong) for sentence, wrong in table.items()}


def plain_parts() -> Iterator[Part]:
    """What is the same for both kinds of attention."""
    x, (query, key) = states(), rotary_inputs()
    norm_weight = small_weights()["norm.weight"].double()
    yield Part(IMPORT, "llama.py", lambda: importlib.import_module("llama") and (), {})
    yield Part(
        "RMSNorm",
        "class RMSNorm in llama.py",
        lambda: make("RMSNorm", "norm.", DIM, NORM_EPS)(x),
        {sentence: partial(wrong, x.double(), norm_weight, NORM_EPS) for sentence, wrong in NORM_MISTAKES.items()},
    )
    yield Part(
        "rotary embedding",
        "apply_rotary_emb in rope.py",
        lambda: student("rope", "apply_rotary_emb")(query, key, HEAD_DIM, SHAPE["max_seq_len"]),
        {sentence: partial(wrong, query, key, THETA) for sentence, wrong in rope_test.MISTAKES.items()},
    )
    weights = in_double(below(small_weights(), "layers.0.feed_forward."))
    yield Part(
        "feed-forward",
        "class FeedForward in llama.py",
        lambda: make("FeedForward", "layers.0.feed_forward.", DIM, HIDDEN, SHAPE["multiple_of"], 0.0)(x),
        {sentence: partial(feed_forward, x.double(), weights, gate) for sentence, gate in GATES.items()},
        (IMPORT,),
    )


def attention_parts(kind: str) -> Iterator[Part]:
    """What depends on the kind of attention, up to the language model."""
    causal, x, heads = kind == "causal", states(), score_inputs()
    weights = in_double(below(small_weights(), "layers.0."))
    yield Part(
        f"scores and softmax, {kind}",
        "Attention.compute_query_key_value_scores in llama.py",
        lambda: student("llama", "Attention")(small_config(kind)).eval().compute_query_key_value_scores(*heads),
        with_mistakes(attend, ATTEND_MISTAKES, *(head.double() for head in heads), causal),
        (IMPORT,),
    )
    yield Part(
        f"grouped queries, {kind}",
        "Attention.forward in llama.py",
        lambda: ask_attention(kind, x),
        with_mistakes(attention, ATTENTION_MISTAKES, x.double(), below(weights, "attention."), causal),
        ("rotary embedding", f"scores and softmax, {kind}"),
    )
    yield Part(
        f"layer, {kind}",
        "LlamaLayer.forward in llama.py",
        lambda: make("LlamaLayer", "layers.0.", 0, small_config(kind))(x),
        with_mistakes(layer, LAYER_MISTAKES, x.double(), weights, causal),
        ("RMSNorm", "feed-forward", f"grouped queries, {kind}"),
    )
    yield Part(
        f"embedding and head, {kind}",
        "Llama.forward in llama.py",
        lambda: ask_llama(kind),
        with_mistakes(llama, LLAMA_MISTAKES, TOKENS, causal),
        ("RMSNorm", f"layer, {kind}"),
    )
    yield Part(f"loading, {kind}", "load_pretrained in llama.py", lambda: ask_loading(kind), {}, (IMPORT,))


def classifier_parts(kind: str) -> list[Part]:
    causal, needs = kind == "causal", (f"embedding and head, {kind}", f"loading, {kind}")
    return [
        Part(
            f"zero-shot classifier, {kind}",
            "class LlamaZeroShotClassifier in classifier.py",
            lambda: ask_zero_shot(kind),
            with_mistakes(zero_shot, ZERO_SHOT_MISTAKES, causal),
            needs,
        ),
        Part(
            f"embedding classifier, {kind}",
            "class LlamaEmbeddingClassifier in classifier.py",
            lambda: ask_embedding(kind),
            with_mistakes(embedding, EMBEDDING_MISTAKES, causal),
            needs,
        ),
    ]


IMPORT = "import of llama.py"
PART_ORDER = (
    IMPORT,
    "RMSNorm",
    "rotary embedding",
    "scores and softmax",
    "grouped queries",
    "feed-forward",
    "layer",
    "embedding and head",
    "loading",
    "zero-shot classifier",
    "embedding classifier",
)
WHOLES = ("embedding and head", "zero-shot classifier", "embedding classifier")  # asked in any case


def all_parts(kinds: tuple[str, ...]) -> list[Part]:
    """Every part, in the order in which one writes them."""
    parts = [*plain_parts()]
    for kind in kinds:
        parts += attention_parts(kind)
        if kind == "bidirectional" or takes_attention():  # how an edition of one causal kind reads a text is not known
            parts += classifier_parts(kind)
    return sorted(parts, key=lambda part: PART_ORDER.index(part.name.partition(",")[0]))


def stored_numbers() -> dict[str, Tensors] | None:
    """What every part should answer, or None where the file is not here."""
    path = find_asset(PARTS)
    if path is None:
        return None
    try:
        return {name: tuple(map(torch.tensor, numbers)) for name, numbers in json.loads(read_text(path)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); get it again") from None


def judge(parts: list[Part], expected: dict[str, Tensors]) -> list[Finding]:
    """One that fails is not judged where a part that it needs is wrong or missing."""
    findings: list[Finding] = []
    to_mend: dict[str, list[str]] = {}  # why a part is not right: itself, or parts that it needs
    blanks: set[str] = set()  # where parts are not written
    for part in parts:
        with torch.no_grad():
            answer = ask(part.ask)
        if not answer.trouble and alike(answer.tensors, expected.get(part.name, ())):
            findings.append(Finding(part, "ok"))
            continue
        needed = [*dict.fromkeys(cause for need in part.needs for cause in to_mend.get(need, ()))]
        if not answer.is_written and answer.trouble not in blanks:
            blanks.add(answer.trouble)
            needed = []  # it is itself what is missing
        to_mend[part.name] = needed or [part.name]
        if needed:
            findings.append(Finding(part, "not judged", f"it needs {'; '.join(needed)}"))
        elif answer.trouble:
            findings.append(Finding(part, "WRONG" if answer.is_written else "not written yet", answer.trouble))
        else:
            findings.append(Finding(part, "WRONG", explanation(part, answer.tensors, expected[part.name])))
    return findings


def explanation(part: Part, actual: Tensors, expected: Tensors) -> str:
    """The usual mistake that gives these numbers, or how far off they are."""
    for sentence, mistake in part.mistakes.items():
        wrong = mistake()
        if alike(actual, wrong if isinstance(wrong, tuple) else (wrong,), tolerance=1e-4):
            return sentence
    if len(actual) != len(expected):
        return f"it returns {len(actual)} tensors, not {len(expected)}"
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape:
            return f"it returns {list(a.shape)} numbers, not {list(e.shape)}"
    with torch.no_grad():
        if not alike(ask(part.ask).tensors, actual):
            return "it gives other numbers each time; is there dropout in evaluation?"
    error = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return f"off by up to {error:.1e}, and no usual mistake gives these numbers"


def check_parts(args: Namespace, whole_is_right: bool) -> bool:
    """Whether every part is right. Prints a line for each, unless the whole is right and nobody asked for them."""
    expected = stored_numbers()
    if expected is None:
        if args.parts:
            raise UserError(f"--parts needs {PARTS}, which is not here")
        print(f"note: {PARTS} is not here, so neither the parts nor classifier.py were checked", file=sys.stderr)
        return True
    parts = all_parts(kinds_to_check(args.attention))
    wholes = [part for part in parts if part.name.partition(",")[0] in WHOLES]
    if whole_is_right and not args.parts and all(one.verdict == "ok" for one in judge(wholes, expected)):
        return True
    print(f"Part by part, on a small model ({PARTS} holds what others computed):")
    findings = judge(parts, expected)
    for one in findings:
        print(f"  {one.part.name + ':':36s} {one.verdict}{f': {one.sentence}' if one.sentence else ''}")
    wrong = [one.part for one in findings if one.verdict != "ok"]
    if wrong:
        print(f"Begin with: {wrong[0].name} ({wrong[0].where}).")
    elif not whole_is_right:
        print("Every part is right by itself. Look at what depends on sizes, and at the checkpoint and the device.")
    return not wrong


# --------------------------------------------------------------------------------- published text and labels

# What independently finished repositories of the 2024 / UCSC edition have in common. sha256: of a generated file's
# bytes, or of the labels column (one label a line, each ended by a newline). Two accepted hashes are two ways in which
# floating-point ties fall on different machines.
PUBLISHED_TEXTS = {
    "bidirectional": "51616a471e3cfe14eb8d2e224d06b04559e984062ebf4216226a23bafc5f23ec",
    "causal": "da0b634a0bcf04e6dc712214dfaae7904e16544561006c2282e1ed0188656e2f",
}


@dataclass(frozen=True)
class PublishedLabels:
    """One accepted zero-shot label file: its hash, how often each label occurs, and its accuracy."""

    sha256: str
    counts: tuple[int, ...]
    accuracy: float | None


PUBLISHED_LABELS = {
    "sst-dev": (
        PublishedLabels(
            "f0200a774dc8d5eaba133a4a8a295a79a96427ae9fa2fa7b2a6acf7b7b046d64", (405, 493, 83, 89, 31), 0.2134
        ),
    ),
    "sst-test": (
        PublishedLabels(
            "30ac3cfd8f617719be22657adae21a04d231784d1aff3ba6351b16889ebd1670", (732, 990, 220, 194, 74), 0.2244
        ),
        PublishedLabels(
            "7cb2c41bc2e0b9dfea72fc821c909c31fea2e3ebbcc5a19f67aa68ed730b3da7", (734, 982, 226, 194, 74), 0.2244
        ),
    ),
    "cfimdb-dev": (
        PublishedLabels("0b6c0e486b15e056d6c1e647fab32086a92d1dae9e79dffda3ef282850762bd8", (59, 186), 0.502),
        PublishedLabels("9d32c2ead2379b299b42c5f4e64161e037e6070a451363a1f2285939fac3ff4d", (60, 185), 0.498),
    ),
    "cfimdb-test": (
        PublishedLabels("c9b6390227cc044520b727e55cfa9c92bfaee6f08207fd6ea0958e9e4ed5e76c", (104, 384), None),
        PublishedLabels("25608bacba8fcf0fa09cf8e307ffaec6c6d862860213865182646de1bbed77bf", (103, 385), None),
    ),
}


def check_published(args: Namespace, texts: dict[str, str], labels: dict[str, tuple[PublishedLabels, ...]]) -> bool:
    """Run the driver as a student would, in a scratch folder, and print item, expected, got and verdict."""
    checkpoint = find_asset(args.pretrained_model_path)
    if checkpoint is None:
        raise UserError(f"--published needs {args.pretrained_model_path}, which is not here; run setup.sh to fetch it")
    gold = {name: find_asset(f"{args.data_dir}/{name}.txt") for name in labels}
    if None in gold.values():
        raise UserError(f"--published needs the course's data in {args.data_dir}/; run setup.sh to fetch it")
    flags = ["--pretrained-model-path", str(checkpoint.resolve())]
    if args.tokenizer:
        flags += ["--tokenizer", str(Path(args.tokenizer).resolve())]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for attention, expected in texts.items():
            run_driver(["--option", "generate", "--attention", attention, *flags], folder)
            got = hashlib.sha256((Path(folder) / "generated-sentence-temp-0.txt").read_bytes()).hexdigest()
            rows.append((f"text, temperature 0, {attention}", expected[:12], got[:12], _verdict(expected == got)))
        for dataset in sorted({name.rsplit("-", 1)[0] for name in labels}):
            run_driver([*_zero_shot_flags(dataset, gold[f"{dataset}-dev"].parent), *flags], folder)
            for split in ("dev", "test"):
                name = f"{dataset}-{split}"
                output = Path(folder) / f"{name}-prompting-output.txt"
                rows.append(label_row(name, output, gold[name], labels[name]))
    print_table(("item", "expected", "got", "verdict"), rows)
    return all(row[-1] != "DIFFERS" for row in rows)


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFERS"


def _zero_shot_flags(dataset: str, data_dir: Path) -> list[str]:
    """The assignment's zero-shot command for one data set, attention left to its reference semantics."""
    flags = ["--option", "prompt", "--batch_size", "10", "--attention", "bidirectional"]
    for split in ("train", "dev", "test"):
        flags += [f"--{split}", str((data_dir / f"{dataset}-{split}.txt").resolve())]
    for split in ("dev", "test"):
        flags += [f"--{split}_out", f"{dataset}-{split}-prompting-output.txt"]
    return [*flags, "--label-names", str((data_dir / f"{dataset}-label-mapping.json").resolve())]


def run_driver(flags: list[str], folder: str) -> None:
    """Run run_llama.py in `folder`. Raises `UserError` with its last line if it fails."""
    print(f"running run_llama.py {' '.join(flags[:2])} ...", file=sys.stderr)
    command = [sys.executable, str(ROOT / "run_llama.py"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"run_llama.py failed (status {done.returncode}): {last_line}")


def label_row(name: str, output: Path, gold: Path, accepted: tuple[PublishedLabels, ...]) -> tuple[str, str, str, str]:
    """Compare a prediction file with the accepted ones.

    "close": no accepted hash, but counts within 1 % of the lines and accuracy within 0.01 of an accepted one, which is
    what ties that fall differently on another machine look like.
    """
    predictions, labels = ([one.label for one in create_data(path, is_test=True)] for path in (output, gold))
    digest = hashlib.sha256("".join(f"{label}\n" for label in predictions).encode()).hexdigest()
    counts = tuple(Counter(predictions)[label] for label in range(len(accepted[0].counts)))
    accuracy = sum(map(int.__eq__, predictions, labels)) / len(labels)

    def is_close(one: PublishedLabels) -> bool:
        moved = sum(abs(a - b) for a, b in zip(counts, one.counts, strict=True)) / 2
        near = one.accuracy is None or abs(accuracy - one.accuracy) <= 0.01
        return moved <= 0.01 * len(labels) and near

    if any(one.sha256 == digest for one in accepted):
        verdict = "equal"
    else:
        verdict = "close" if any(map(is_close, accepted)) else "DIFFERS"
    expected = " or ".join(_describe(one.sha256, one.counts, one.accuracy) for one in accepted)
    got = _describe(digest, counts, None if accepted[0].accuracy is None else accuracy)
    return f"zero-shot, {name}", expected, got, verdict


def _describe(digest: str, counts: tuple[int, ...], accuracy: float | None) -> str:
    acc = "no gold labels" if accuracy is None else f"acc {accuracy:.3f}"
    return f"{digest[:8]} {'/'.join(map(str, counts))} {acc}"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def get_args() -> Namespace:
    parser = ArgumentParser(description="Check llama.py and classifier.py against numbers that others computed.")
    parser.add_argument("--pretrained-model-path", default=Default(COURSE_CHECKPOINT), help="the checkpoint to check")
    parser.add_argument("--data", default=Default(COURSE_REFERENCE), help="the course's reference tensors")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="whose reference tensors")
    parser.add_argument("--attention", choices=KINDS, help="check this kind alone (default: all that llama.py has)")
    parser.add_argument("--parts", action="store_true", help="ask every part by itself, even if the whole is right")
    parser.add_argument("--published", action="store_true", help="compare text and zero-shot labels with public ones")
    parser.add_argument("--data_dir", default="data", help="where --published finds sst-*.txt and cfimdb-*.txt")
    parser.add_argument("--tokenizer", help="SentencePiece model for --published (default: as run_llama.py chooses)")
    return parser.parse_args()


def main() -> int:
    args = get_args()
    if EDITIONS[args.edition].norm != BUNDLED_NORM:
        passed = check_another_norm(args)
    elif args.published:
        passed = check_published(args, PUBLISHED_TEXTS, PUBLISHED_LABELS)
    else:
        passed = check_sanity(args)
        passed = check_parts(args, passed) and passed
    print("Your Llama implementation is correct!" if passed else "Sanity check FAILED: see the lines above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
