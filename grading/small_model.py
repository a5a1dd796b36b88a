"""The small model on which the parts are judged: shapes, weights, inputs, and every part computed by hand."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from grading.rotary import Tensors, rotate_by_hand

DIM, N_HEADS, KV_HEADS, HEAD_DIM, HIDDEN_DIM, VOCAB_SIZE = 24, 4, 2, 6, 20, 40
EPS, NORM_EPS, THETA, PAD = 0.01, 0.1, 10000.0, 3
SMALL_SHAPE = {
    "vocab_size": VOCAB_SIZE, "dim": DIM, "n_layers": 2, "n_heads": N_HEADS, "n_kv_heads": KV_HEADS,
    "max_seq_len": 16, "multiple_of": 4, "hidden_dim": HIDDEN_DIM, "layer_norm_eps": EPS,
}  # fmt: skip
TOKENS = torch.tensor(((1, 17, 5, 30, 22), (1, 17, 38, 6, 11)))
PADDED = torch.tensor(((1, 17, 5, 30, 22, 9), (1, 8, 26, PAD, PAD, PAD), (1, PAD, 12, 33, PAD, PAD)))
LAST_TOKENS = torch.tensor((5, 2, 3))  # where the rows of PADDED end
LABELS = ((7,), (20, 31), (12, 5, 33))  # token ids of the labels' names
MASK = torch.ones(5, 5, dtype=torch.long).tril()  # of a causal model. s t; 1: a query may see a key
# Texts to continue; after two new tokens they are longer than the model's max_seq_len. Chosen so that every new token's
# logit is at least 0.3 above the next, and that every mistake gives other tokens.
PROMPTS = torch.tensor(
    ((1, 34, 3, 15, 33, 20, 13, 12, 17, 28, 8, 31, 23, 21), (1, 19, 5, 38, 7, 23, 12, 11, 20, 39, 31, 33, 8, 30))
)
NEW_TOKENS = 8
NORM = ContextVar("norm", default="rms")  # of the model: a key of `editions.NORMS`
NEARLY_ALL = 0.999999  # of a hidden state dropped: the logits are then the bias
SALT = ContextVar("salt", default=0)  # 0: the numbers of parts.json; another one draws other weights and inputs


def closed_form(name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """Numbers without a random generator: scale * sin(n^2 + a number made of the name) + shift for n = 1, 2, ...

    With a `SALT` the angles are drawn, which gives numbers of the same distribution.
    """
    n, seed, salt = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64), zlib.crc32(name.encode()), SALT.get()
    angles = n.square() + seed % 1000
    if salt:
        angles = torch.rand(len(n), dtype=n.dtype, generator=torch.Generator().manual_seed(seed + salt)) * 2 * math.pi
    return (scale * torch.sin(angles) + shift).float().reshape(shape)


def small_weights() -> dict[str, torch.Tensor]:
    """The state dict of a model of `SMALL_SHAPE` with this `NORM` and `SALT`, under the checkpoint's names."""
    return _weights(NORM.get(), SALT.get())


@lru_cache
def _weights(norm: str, salt: int) -> dict[str, torch.Tensor]:
    key_dim = KV_HEADS * HEAD_DIM
    shapes = {
        "attention.compute_query": (DIM, DIM), "attention.compute_output": (DIM, DIM),
        "attention.compute_key": (key_dim, DIM), "attention.compute_value": (key_dim, DIM),
        "feed_forward.w1": (HIDDEN_DIM, DIM), "feed_forward.w2": (DIM, HIDDEN_DIM),
        "feed_forward.w3": (HIDDEN_DIM, DIM), "attention_norm": (DIM,), "ffn_norm": (DIM,),
    }  # fmt: skip
    shapes = {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    table = closed_form("tok_embeddings", VOCAB_SIZE, DIM, scale=1.5)
    weights = {"tok_embeddings.weight": table, "output.weight": table}
    for name, shape in {**shapes, "norm": (DIM,)}.items():
        if len(shape) == 1:
            weights[f"{name}.weight"] = closed_form(name, *shape, scale=0.5, shift=1.0)
            if norm == "layer":
                weights[f"{name}.bias"] = closed_form(f"{name}.bias", *shape, scale=0.5)
        else:
            weights[f"{name}.weight"] = closed_form(name, *shape, scale=2 / math.sqrt(shape[1]))
    return weights


def final_norm() -> dict[str, torch.Tensor]:
    return in_double(below(small_weights(), "norm."))


def states() -> torch.Tensor:
    """b s D"""
    return closed_form("states", 2, 5, DIM, shift=0.3)


def rotary_inputs() -> Tensors:
    """b s h d, b s g d"""
    return closed_form("query", 2, 5, N_HEADS, HEAD_DIM), closed_form("key", 2, 5, KV_HEADS, HEAD_DIM)


def score_inputs() -> Tensors:
    return tuple(closed_form(name, 2, N_HEADS, 5, HEAD_DIM, scale=2.0) for name in ("query", "key", "value"))  # b h s d


def below(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def in_double(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in weights.items()}


# Every part by hand, in float64. The keyword arguments are what can go wrong.


def mean_square(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.square().mean(dim, keepdim=True)


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / (mean_square(x) + eps).sqrt() * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor | float, bias: torch.Tensor | float, eps: float) -> torch.Tensor:
    return norm(x - x.mean(-1, keepdim=True), weight, eps) + bias


def normed(x: torch.Tensor, weights: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
    """The norm with these weights: a LayerNorm if there is a bias among them."""
    return layer_norm(x, **weights, eps=eps) if "bias" in weights else norm(x, **weights, eps=eps)


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


def turned_both(query: torch.Tensor, key: torch.Tensor) -> Tensors:
    return rotate_by_hand(query, THETA), rotate_by_hand(key, THETA)


def turned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    return *turned_both(query, key), value


def attention(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    causal: bool,
    *,
    split: Callable = lambda x: x.unflatten(-1, (-1, HEAD_DIM)),
    turn: Callable = turned,
    spread: Callable = lambda x: x.repeat_interleave(N_HEADS // KV_HEADS, dim=1),
    merge: Callable = lambda x: x.transpose(1, 2).flatten(2),
    project: Callable = lambda x, weight: x @ weight.T,
    attend: Callable = attend,
    **masking: Callable | float,
) -> torch.Tensor:
    """Grouped-query attention. x: b s D -> b s D. Heads are b s h d (`split`, `turn`), then b h s d."""
    heads = (split(x @ weights[f"compute_{name}.weight"].T) for name in ("query", "key", "value"))
    query, key, value = (x.transpose(1, 2) for x in turn(*heads))
    return project(
        merge(attend(query, spread(key), spread(value), causal, **masking)), weights["compute_output.weight"]
    )


def feed_forward(
    x: torch.Tensor, weights: dict[str, torch.Tensor], gate: Callable = lambda a, b: F.silu(a) * b
) -> torch.Tensor:
    """gate: the function of w1 x and w3 x whose result w2 multiplies."""
    return gate(x @ weights["w1.weight"].T, x @ weights["w3.weight"].T) @ weights["w2.weight"].T


def layer(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    causal: bool,
    *,
    eps: float = EPS,
    **wrong: Callable,
) -> torch.Tensor:
    """wrong: keywords of `assembled`."""
    a = partial(attention, weights=below(weights, "attention."), causal=causal)
    f = partial(feed_forward, weights=below(weights, "feed_forward."))
    m, n = (partial(normed, weights=below(weights, f"{name}."), eps=eps) for name in ("attention_norm", "ffn_norm"))
    return assembled(x, a, f, m, n, **wrong)


def assembled(
    x: torch.Tensor,
    a: Callable,
    f: Callable,
    m: Callable,
    n: Callable,
    *,
    first: Callable = lambda x, a, m, n: x + a(m(x)),
    second: Callable = lambda x, h, f, m, n: h + f(n(h)),
    finish: Callable = lambda y, n: y,
) -> torch.Tensor:
    """The layer of attention a, feed-forward f, attention_norm m and ffn_norm n. h: what the first half returns."""
    return finish(second(x, first(x, a, m, n), f, m, n), n)


def llama(
    tokens: torch.Tensor,
    causal: bool,
    *,
    embed: Callable = lambda embedded: embedded,
    layers: tuple[int, ...] = (0, 1),
    layer: Callable = lambda h, weights, index, causal: layer(h, below(weights, f"layers.{index}."), causal),
    norm: Callable = normed,
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
        h = layer(h, weights, index, causal)
    after = norm(h, below(weights, "norm."), eps)
    logits = finish(read(h, after) @ weights["output.weight"].T)
    return pick(logits), shown(h, after), logits


def last_tokens(idx: torch.Tensor) -> torch.Tensor:
    return idx[:, -SMALL_SHAPE["max_seq_len"] :]


def next_logits(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    """b s -> b 1 v"""
    return llama(tokens, causal)[0]


@lru_cache
def likeliest_text(
    causal: bool, window: Callable, new: int, norm: str, salt: int, logits: Callable = next_logits
) -> torch.Tensor:
    idx = PROMPTS
    for _ in range(new):
        idx = torch.cat((idx, logits(window(idx), causal).argmax(-1)), dim=1)
    return idx


def generate(
    causal: bool,
    *,
    window: Callable = last_tokens,
    finish: Callable = lambda idx: idx,
    new: int = NEW_TOKENS,
    is_drawn: bool = True,
    logits: Callable = next_logits,
) -> Tensors:
    """The likeliest continuation of each row of `PROMPTS`; the first once more; and 1 where the last text is drawn."""
    texts = finish(likeliest_text(causal, window, new, NORM.get(), SALT.get(), logits)).double()
    return *texts[:, None], texts[:1], torch.tensor(float(is_drawn))


def at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), positions]


def last_state(hidden: torch.Tensor, causal: bool) -> torch.Tensor:
    """hidden: b s D -> b D"""
    return at(hidden, LAST_TOKENS) if causal else hidden[:, -1]


def end_of_batch(hidden: torch.Tensor, causal: bool) -> torch.Tensor:
    """What the course's classifiers read in a causal model as well. hidden: b s D -> b D"""
    return hidden[:, -1]


def hidden_states(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    """b s -> b s D"""
    return llama(tokens, causal)[1]


def zero_shot(
    causal: bool,
    *,
    states: Callable = hidden_states,
    pool: Callable = last_state,
    vocabulary: Callable = lambda logits: logits.log_softmax(-1),
    label: Callable = lambda scores: scores.sum(-1),
    finish: Callable = lambda scores: scores,
) -> torch.Tensor:
    scores = vocabulary(pool(states(PADDED, causal), causal) @ small_weights()["output.weight"].double().T)  # b v
    return finish(torch.stack([label(scores[:, list(ids)]) for ids in LABELS], dim=-1))  # b c


def head_weights() -> dict[str, torch.Tensor]:
    return {"weight": closed_form("head", len(LABELS), DIM, scale=0.5), "bias": closed_form("bias", len(LABELS))}


def embedding(
    causal: bool,
    *,
    states: Callable = hidden_states,
    pool: Callable = last_state,
    finish: Callable = lambda logits: logits.log_softmax(-1),
    modes: Callable = lambda whole, dropped: (whole, dropped),
    spoil: Callable = lambda answer: answer,
    matrix: torch.Tensor | None = None,
) -> Tensors:
    """In evaluation; and in training, where dropout of nearly all leaves the bias. modes: the logits of the two.

    matrix: in the place of the head's own.
    """
    head = in_double(head_weights() if matrix is None else {**head_weights(), "weight": matrix})
    whole = pool(states(PADDED, causal), causal) @ head["weight"].T + head["bias"]  # b c
    evaluated, trained = map(finish, modes(whole, head["bias"].expand_as(whole)))
    return evaluated, spoil(trained)
