"""Whether a live page would compute what the model computes: page/live/model.js in Python, beside `llama.py` as it is.

A live page brings its own code, which has no edit of `llama.py`, `rope.py` or `classifier.py`; it is not written then.

Shapes: s position, h query heads, g key/value heads, d head dim, D model dim, v vocabulary, c classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from config import ATTENTION_KINDS, LlamaConfig
from explore.inspected import InspectedModel
from explore.look import read
from utils import UserError

TOKENS = 24  # that both read
TOLERANCE = 1e-3  # of the largest number

Tensors = Mapping[str, torch.Tensor]


def check_unedited(inspected: InspectedModel, tensors: Tensors) -> None:
    """Raises `UserError` if the page would show other numbers. tensors: the page's, see `live.tensors_of`."""
    config = inspected.llama.config
    ids = torch.linspace(0, config.vocab_size - 1, min(TOKENS, config.max_seq_len)).long()  # s
    for attention in ATTENTION_KINDS:
        record = read(inspected.llama, ids.tolist(), attention)
        if record is not None:
            h = hidden_states(config, tensors, ids, attention == "causal")
            _compare("llama.py", record.logits, h @ _output(tensors).T)
    if inspected.classifier is not None:
        with torch.inference_mode():
            own = inspected.classifier(ids[None])[0].softmax(-1)  # c
        h = hidden_states(config, tensors, ids, config.is_causal)[-1]
        _compare("classifier.py", own, _probabilities(inspected, tensors, h))


def _compare(file: str, own: torch.Tensor, pages: torch.Tensor) -> None:
    if not torch.allclose(own.float(), pages, rtol=0.0, atol=TOLERANCE * float(pages.abs().max()), equal_nan=True):
        raise UserError(f"{file} computes other numbers than the page would, which knows no edit of it; use --serve")


def _probabilities(inspected: InspectedModel, tensors: Tensors, h: torch.Tensor) -> torch.Tensor:
    """h: D, of the last token -> c"""
    if "head.weight" in tensors:
        return (tensors["head.weight"] @ h + tensors["head.bias"]).softmax(-1)
    log_p = (_output(tensors) @ h).log_softmax(-1)  # v
    return torch.stack([log_p[ids].sum() for ids in inspected.classifier.label_name_ids]).softmax(-1)


def _output(tensors: Tensors) -> torch.Tensor:
    """v D"""
    return tensors.get("output.weight", tensors["tok_embeddings.weight"])


def hidden_states(config: LlamaConfig, tensors: Tensors, ids: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """The normalised output of the last layer. ids: s -> s D"""
    x = tensors["tok_embeddings.weight"][ids]  # s D
    for layer in range(config.n_layers):
        start = f"layers.{layer}."
        weights = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        h = x + _attention(config, weights, _norm(config, x, weights["attention_norm.weight"]), is_causal)
        normed = _norm(config, h, weights["ffn_norm.weight"])
        gate, up = (normed @ weights[f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = h + (F.silu(gate) * up) @ weights["feed_forward.w2.weight"].T
    return _norm(config, x, tensors["norm.weight"])


def _norm(config: LlamaConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt() * weight


def _attention(config: LlamaConfig, weights: Tensors, x: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """x: s D, normalised -> s D"""
    query, key, value = (
        (x @ weights[f"attention.compute_{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
        for name in ("query", "key", "value")
    )  # h s d, g s d
    query, key = (_turned(config, each) for each in (query, key))
    heads = torch.arange(config.n_heads) // (config.n_heads // config.n_kv_heads)  # of each query head, its key head
    scores = query @ key[heads].transpose(-2, -1) / config.head_dim**0.5  # h s s
    if is_causal:
        scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), float("-inf"))
    output = scores.softmax(-1) @ value[heads]  # h s d
    return output.transpose(0, 1).flatten(-2) @ weights["attention.compute_output.weight"].T


def _turned(config: LlamaConfig, x: torch.Tensor) -> torch.Tensor:
    """Each pair of neighbours, turned by its position. x: ... s d -> ... s d"""
    angles = torch.arange(x.shape[-2])[:, None] * _frequencies(config)  # s d/2
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)  # ... s d/2
    turned = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


def _frequencies(config: LlamaConfig) -> torch.Tensor:
    """The angle of each pair from one position to the next. Returns d/2"""
    plain = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    kind, factor, *more = config.rope_scaling or ("none", 1.0)
    if kind != "llama3":
        return plain / factor
    low, high, length = more
    share = ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share + (1.0 - share) / factor)
