"""The usual mistakes in each part of a student's code: for each, a sentence that says it, and its wrong computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from grading import small_model as small
from grading.rotary import rotate_by_hand
from grading.small_model import DIM, HEAD_DIM, THETA, at


def less_mean(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x - x.mean(dim, keepdim=True)


def norm_by_hand(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | float,
    eps: float,
    *,
    scaled: Callable = lambda x: x,
    measured: Callable = lambda x: x,
    square: Callable = torch.square,
    mean: Callable = lambda squares: squares.mean(-1, keepdim=True),
    root: Callable = lambda mean, eps: (mean + eps).sqrt(),
    divide: Callable = lambda x, root: x / root,
    finish: Callable = lambda x, weight, bias: x * weight + bias,
) -> torch.Tensor:
    """RMSNorm; a LayerNorm if the mean is subtracted in what is `scaled` and in what is `measured`."""
    return finish(divide(scaled(x), root(mean(square(measured(x))), eps)), weight, bias)


UNBIASED = dict(mean=lambda squares: squares.sum(-1, keepdim=True) / (DIM - 1))
OUTSIDE = dict(root=lambda mean, eps: mean.sqrt() + eps)
NORM_MISTAKES = {
    "the mean is of x, not of its squares": dict(square=lambda x: x),
    "the squares are summed, not averaged": dict(mean=lambda squares: squares.sum(-1, keepdim=True)),
    "it divides by the length of x; it is the root of the mean of the squares":
        dict(mean=lambda squares: squares.sum(-1, keepdim=True), **OUTSIDE),
    "the root is missing": dict(root=lambda mean, eps: mean + eps),
    "it multiplies by the root instead of dividing": dict(divide=lambda x, root: x * root),
    "eps stands outside the root, not inside": OUTSIDE,
    "eps is missing, or not the one that RMSNorm was given": dict(root=lambda mean, eps: (mean + 1e-6).sqrt()),
    "the weight is missing": dict(finish=lambda x, w, b: x),
    "it multiplies by the weight twice; forward does that, _norm does not": dict(finish=lambda x, w, b: x * w * w),
    "it is twice as large as it should be": dict(finish=lambda x, w, b: 2 * x * w),
    "it multiplies by 1 + weight, not by the weight": dict(finish=lambda x, w, b: x * (1 + w)),
    "the mean is subtracted, as in LayerNorm": dict(scaled=less_mean, measured=less_mean),
    "it divides by the standard deviation, which subtracts the mean": dict(measured=less_mean, **UNBIASED),
    "the mean runs over positions, not over dim=-1": dict(mean=lambda squares: squares.mean(1, keepdim=True)),
    "the mean runs over the batch, not over dim=-1": dict(mean=lambda squares: squares.mean(0, keepdim=True)),
    "it returns the factor alone; multiply x by it": dict(divide=lambda x, root: 1 / root),
    "the mean runs over everything, not over dim=-1": dict(mean=torch.mean),
}  # fmt: skip


def layer_norm_by_hand(
    *inputs: torch.Tensor | float, scaled: Callable = less_mean, measured: Callable = less_mean, **wrong: Callable
) -> torch.Tensor:
    return norm_by_hand(*inputs, scaled=scaled, measured=measured, **wrong)


LAYER_NORM_MISTAKES = {
    "the mean is not subtracted, as in RMSNorm": dict(scaled=lambda x: x, measured=lambda x: x),
    "the mean is subtracted, and what is left is divided by the root mean square of x": dict(measured=lambda x: x),
    "the mean is not subtracted, but it divides by the standard deviation": dict(scaled=lambda x: x),
    "the variance divides by n - 1, as torch.var does; it is the mean of the squares (unbiased=False)": UNBIASED,
    "eps stands outside the root, not inside": OUTSIDE,
    "eps stands outside the root, and the deviation divides by n - 1": {**UNBIASED, **OUTSIDE},
    "the root is missing": dict(root=lambda mean, eps: mean + eps),
    "eps is missing, or not the one that LayerNorm was given": dict(root=lambda mean, eps: (mean + 1e-6).sqrt()),
    "the weight is missing": dict(finish=lambda x, w, b: x + b),
    "the bias is missing": dict(finish=lambda x, w, b: x * w),
    "it multiplies by the weight and adds the bias twice; forward does that, _norm does not":
        dict(finish=lambda x, w, b: (x * w + b) * w + b),
    "mean and variance run over positions, not over dim=-1":
        dict(scaled=partial(less_mean, dim=1), measured=partial(less_mean, dim=1),
             mean=lambda squares: squares.mean(1, keepdim=True)),
}  # fmt: skip

MISSING_MASK = "the causal mask is missing: a position sees what follows"
MASK_MISTAKES = {
    "there is a causal mask, which this reference has not (an edition that has it: --attention causal)":
        dict(visible=torch.tril),
    MISSING_MASK: dict(visible=lambda ones: ones),
    "the causal mask is shifted by one: a position does not see itself": dict(visible=lambda ones: ones.tril(-1)),
    "the causal mask is shifted by one: a position sees the next": dict(visible=lambda ones: ones.tril(1)),
    "the causal mask is upside down: a position sees itself and what follows": dict(visible=torch.triu),
    "the causal mask is inverted: it hides what should be seen": dict(visible=lambda ones: ones.triu(1)),
    "the causal mask sets scores to 0, not to -inf": dict(hidden=0.0),
    "the causal mask comes after the softmax, not before":
        dict(visible=lambda ones: ones, normalise=lambda scores: scores.softmax(-1).tril()),
    "the mask is added to the scores; it is True where a query may see a key, and the other scores become -inf":
        dict(visible=lambda ones: ones, normalise=lambda scores: (scores + small.MASK).softmax(-1)),
}  # fmt: skip
ATTEND_MISTAKES = {
    "scores are divided by d, not by sqrt(d)": dict(divisor=HEAD_DIM),
    "scores are not scaled: divide them by sqrt(d)": dict(divisor=1.0),
    "scores are multiplied by sqrt(d), not divided": dict(divisor=1 / math.sqrt(HEAD_DIM)),
    "scores are divided by the root of the model's size, not of the head's": dict(divisor=math.sqrt(DIM)),
    "scores are divided by the root of the length, not of the head's size":
        dict(divisor=math.sqrt(small.TOKENS.shape[1])),
    "scores are divided by the root of the number of heads, not of their size": dict(divisor=math.sqrt(small.N_HEADS)),
    "the weights are scaled after the softmax, not the scores before it":
        dict(divisor=1.0, normalise=lambda scores: scores.softmax(-1) / math.sqrt(HEAD_DIM)),
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
}  # fmt: skip

TURN_MISTAKES = {  # of what `turn` makes of queries and keys
    "queries and keys are not rotated": lambda q, k, v, turn: (q, k, v),
    "keys are not rotated": lambda q, k, v, turn: (turn(q, k)[0], k, v),
    "queries are not rotated": lambda q, k, v, turn: (q, turn(q, k)[1], v),
}
ATTENTION_MISTAKES = {
    "key/value heads are repeated as 1 2 1 2 (repeat), not as 1 1 2 2 (repeat_interleave)":
        dict(spread=lambda x: x.repeat(1, small.N_HEADS // small.KV_HEADS, 1, 1)),
    "all queries use the first key/value head": dict(spread=lambda x: x[:, :1].expand(-1, small.N_HEADS, -1, -1)),
    **{said: dict(turn=partial(give, turn=small.turned_both)) for said, give in TURN_MISTAKES.items()},
    "values are rotated, too": dict(turn=lambda *heads: [rotate_by_hand(x, THETA) for x in heads]),
    "the rotation takes heads for positions: rotate before heads and length change places":
        dict(turn=lambda q, k, v: (rotate_by_hand(q, THETA, along=2), rotate_by_hand(k, THETA, along=2), v)),
    "heads are joined without changing places with the length first (transpose(1, 2))":
        dict(merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1)),
    "heads are cut as (b, h, s, d) at once; it is (b, s, h, d), then transpose(1, 2)":
        dict(split=lambda x: x.reshape(x.shape[0], -1, x.shape[1], HEAD_DIM).transpose(1, 2)),
    "heads are cut as (d, h), not as (h, d)": dict(split=lambda x: x.unflatten(-1, (HEAD_DIM, -1)).transpose(-1, -2)),
    "heads are joined as (d, h), not as (h, d)": dict(merge=lambda x: x.permute(0, 2, 3, 1).flatten(2)),
    "the projection at the end, compute_output, is missing": dict(project=lambda x, weight: x),
    **MASK_MISTAKES,
}  # fmt: skip

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
}  # fmt: skip

LAYER_HALVES = {
    "the residual around the attention is missing: x + ...": dict(first=lambda x, a, m, n: a(m(x))),
    "the residual around the feed-forward is missing: h + ...": dict(second=lambda x, h, f, m, n: f(n(h))),
    "both residuals are missing": dict(first=lambda x, a, m, n: a(m(x)), second=lambda x, h, f, m, n: f(n(h))),
    "it is post-norm, norm(x + attention(x)), not x + attention(norm(x))":
        dict(first=lambda x, a, m, n: m(x + a(x)), second=lambda x, h, f, m, n: n(h + f(h))),
    "norms stand behind attention and feed-forward: it is x + attention(norm(x))":
        dict(first=lambda x, a, m, n: x + m(a(x)), second=lambda x, h, f, m, n: h + n(f(h))),
    "attention_norm is missing": dict(first=lambda x, a, m, n: x + a(x)),
    "ffn_norm is missing": dict(second=lambda x, h, f, m, n: h + f(h)),
    "both norms are missing": dict(first=lambda x, a, m, n: x + a(x), second=lambda x, h, f, m, n: h + f(h)),
    "attention_norm and ffn_norm are exchanged":
        dict(first=lambda x, a, m, n: x + a(n(x)), second=lambda x, h, f, m, n: h + f(m(h))),
    "attention_norm stands before the feed-forward, too": dict(second=lambda x, h, f, m, n: h + f(m(h))),
    "the second residual is x, not h (which has the attention in it)": dict(second=lambda x, h, f, m, n: x + f(n(h))),
    "the feed-forward reads x, not h (which has the attention in it)": dict(second=lambda x, h, f, m, n: h + f(n(x))),
    "the feed-forward reads the attention's output without x": dict(second=lambda x, h, f, m, n: h + f(n(h - x))),
    "the first residual is normalised: add x itself": dict(first=lambda x, a, m, n: m(x) + a(m(x))),
    "the second residual is normalised: add h itself": dict(second=lambda x, h, f, m, n: n(h) + f(n(h))),
    "both residuals are normalised: add x and h themselves":
        dict(first=lambda x, a, m, n: m(x) + a(m(x)), second=lambda x, h, f, m, n: n(h) + f(n(h))),
    "the feed-forward is missing": dict(second=lambda x, h, f, m, n: h),
    "the attention is missing": dict(first=lambda x, a, m, n: x),
    "the layer's output is normalised, too; the norm after all layers is the model's": dict(finish=lambda y, n: n(y)),
}  # fmt: skip
LAYER_MISTAKES = {**LAYER_HALVES, "the eps of RMSNorm is not config.layer_norm_eps": dict(eps=1e-6)}


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
}  # fmt: skip

ALWAYS_DRAWN = "it gives another text each time: argmax at temperature 0, else draw from softmax(logits / temperature)"
GENERATE_MISTAKES = {
    "what is returned are the new tokens alone, without the text before them":
        dict(finish=lambda idx: idx[:, small.PROMPTS.shape[1] :]),
    "there is one new token too few": dict(finish=lambda idx: idx[:, :-1]),
    "there is one new token too many": dict(new=small.NEW_TOKENS + 1),
    "the text ends at max_seq_len tokens; the model then reads the last max_seq_len":
        dict(finish=lambda idx: idx[:, : small.SMALL_SHAPE["max_seq_len"]]),
    "the text is never cut: the model reads its last max_seq_len tokens": dict(window=lambda idx: idx),
    "a long text is cut at its end: the model reads its last max_seq_len tokens":
        dict(window=lambda idx: idx[:, : small.SMALL_SHAPE["max_seq_len"]]),
    "the model reads the newest token alone, not the text before it": dict(window=lambda idx: idx[:, -1:]),
    "a long text is cut to max_seq_len - 1 tokens: the model reads its last max_seq_len":
        dict(window=lambda idx: idx[:, 1 - small.SMALL_SHAPE["max_seq_len"] :]),
    "the temperature is ignored: the likeliest token is always taken": dict(is_drawn=False),
}  # fmt: skip

POOLS = {
    "it reads the first position, not the last": lambda hidden, causal: hidden[:, 0],
    "it reads the second position, not the last": lambda hidden, causal: hidden[:, 1],
    "it reads the last position but one":
        lambda hidden, causal: at(hidden, small.LAST_TOKENS - 1) if causal else hidden[:, -2],
    "it averages over the positions; it should read the last": lambda hidden, causal: hidden.mean(1),
    "it takes the largest over the positions; it should read the last": lambda hidden, causal: hidden.amax(1),
    "it counts what is not padding; the padding's id may stand inside of a text, too":
        lambda hidden, causal: at(hidden, (small.PADDED != small.PAD).sum(-1) - 1),
    "it reads the last token before the padding: this reference reads the batch's last position":
        lambda hidden, causal: at(hidden, small.LAST_TOKENS),
    "the hidden state is normalised once more; the model has done that":
        lambda hidden, causal:
            small.normed(small.last_state(hidden, causal), small.final_norm(), small.EPS),
}  # fmt: skip
POOL_MISTAKES = {sentence: dict(pool=pool) for sentence, pool in POOLS.items()}

ZERO_SHOT_MISTAKES = {
    **POOL_MISTAKES,
    "a label's tokens are averaged, not summed": dict(label=lambda scores: scores.mean(-1)),
    "a label's first token alone counts; sum over all of its tokens": dict(label=lambda scores: scores[:, 0]),
    "a label's last token alone counts; sum over all of its tokens": dict(label=lambda scores: scores[:, -1]),
    "logits are summed, not log-probabilities (log_softmax)": dict(vocabulary=lambda logits: logits),
    "probabilities are summed, not log-probabilities": dict(vocabulary=lambda logits: logits.softmax(-1)),
    "log_softmax runs over the batch, not over the vocabulary": dict(vocabulary=lambda logits: logits.log_softmax(0)),
    "the sums are normalised over the labels": dict(finish=lambda scores: scores.log_softmax(-1)),
    "it returns probabilities over the labels, not sums of log-probabilities": dict(finish=lambda s: s.softmax(-1)),
    "it returns probabilities, not log-probabilities": dict(finish=torch.exp),
    "it returns the negative sums": dict(finish=torch.neg),
    "labels stand in rows; it is b c": dict(finish=lambda scores: scores.T),
}  # fmt: skip

EMBEDDING_MISTAKES = {
    **POOL_MISTAKES,
    "it returns logits, not log-probabilities (log_softmax): rows do not sum to 1": dict(finish=lambda logits: logits),
    "it returns probabilities, not log-probabilities": dict(finish=lambda logits: logits.softmax(-1)),
    "it returns the negative log-probabilities": dict(finish=lambda logits: -logits.log_softmax(-1)),
    "log_softmax runs over the batch, not over the classes": dict(finish=lambda logits: logits.log_softmax(0)),
    "log_softmax is taken of probabilities; take it of logits": dict(finish=lambda s: s.softmax(-1).log_softmax(-1)),
    "there is no dropout in training": dict(modes=lambda whole, dropped: (whole, whole)),
    "there is dropout in evaluation, too": dict(modes=lambda whole, dropped: (dropped, dropped)),
    "dropout acts on the logits, not on the hidden state": dict(modes=lambda whole, dropped: (whole, 0 * whole)),
    "dropout acts on the log-probabilities, not on the hidden state": dict(spoil=lambda answer: 0 * answer),
}  # fmt: skip
