"""The least work that an answer takes: operations of its matrix products, and weights that must be read for it.

A product of an m x k by a k x n matrix is 2 m k n operations: a multiplication and an addition each. Nothing else is
counted; norms, gates, softmax and rotations are below a percent of it and are done while the products wait for memory.
Results that the answer does not use are not counted: hidden scores of a causal model, logits of other positions than
the last, and, if only some positions are used, the last layer's queries, outputs and feed-forward at the others.

Letters: D model dim, f feed-forward dim, h query heads, g key/value heads, d head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from config import LlamaConfig

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 4.5 / 8}  # of a weight, with the scale of a group


class Pass(NamedTuple):
    """One time through the model: what is to be computed, and how many weights are read once for it."""

    operations: int
    weights: int


def forward_pass(
    config: LlamaConfig, rows: int, new: int, *, before: int = 0, read: int = 1, outputs: int | None = None
) -> Pass:
    """`rows` texts of `new` positions, after `before` whose keys and values are there already.

    read: how many of the last positions of each text are wanted. outputs: of the head, else the vocabulary's size.
    """
    outputs = config.vocab_size if outputs is None else outputs
    dim, kv_dim, ffn_dim, layers = config.dim, config.n_kv_heads * config.head_dim, config.hidden_dim, config.n_layers
    asking = (layers - 1) * new + read  # positions over all layers that have a query
    pairs = (layers - 1) * visible_pairs(config, before + new, new) + visible_pairs(config, before + new, read)
    keys_values = 2 * layers * new * dim * 2 * kv_dim
    query_output = 2 * asking * dim * 2 * dim
    attention = 2 * 2 * pairs * dim  # scores, and sums weighted by them: h d = D
    feed_forward = 2 * asking * 3 * dim * ffn_dim
    head = 2 * read * dim * outputs
    matrices = layers * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * ffn_dim) + dim * outputs
    return Pass(rows * (keys_values + query_output + attention + feed_forward + head), matrices)


def visible_pairs(config: LlamaConfig, length: int, asking: int) -> int:
    """Pairs of a query and a key that it sees, of one head: queries are the last `asking` of `length` positions."""
    hidden = asking * (asking - 1) // 2 if config.is_causal else 0
    return asking * length - hidden


def decoding(config: LlamaConfig, rows: int, prompt: int, new: int) -> list[Pass]:
    """Greedy continuation with a cache: the prompt gives the first new token, each later one is a step."""
    first = forward_pass(config, rows, prompt)
    return [first, *(forward_pass(config, rows, 1, before=prompt + step) for step in range(new - 1))]


def recomputing(config: LlamaConfig, rows: int, prompt: int, new: int) -> list[Pass]:
    """Continuation where a token changes what was computed before it: the whole text for every one."""
    return [forward_pass(config, rows, prompt + step) for step in range(new)]


def classifying(config: LlamaConfig, rows: int, length: int, classes: int) -> list[Pass]:
    """One position of each text is read."""
    return [forward_pass(config, rows, length, outputs=classes)]


def training(config: LlamaConfig, rows: int, length: int, classes: int) -> list[Pass]:
    """Forward, and backward with two products for each of its: the gradients of the weight and of the input."""
    ((operations, weights),) = classifying(config, rows, length, classes)
    return [Pass(3 * operations, weights)]


class Rates(NamedTuple):
    """What this machine does at best: bytes/s read from memory, operations/s of products by precision."""

    read: float
    products: dict[str, float]

    def product(self, precision: str) -> float:
        """Numbers in fewer bits can be widened, so no precision is slower than float32."""
        return max(self.products.get(precision, 0.0), self.products["fp32"])


def limit_seconds(passes: list[Pass], precision: str, rates: Rates) -> float:
    """No program can take less: each pass waits for memory or for arithmetic, whichever takes longer."""
    return sum(
        max(weights * BYTES_PER_WEIGHT[precision] / rates.read, operations / rates.product(precision))
        for operations, weights in passes
    )
