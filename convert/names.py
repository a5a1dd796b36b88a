"""The names of a Llama's tensors here and in other programs, and the order of their rows there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from config import LlamaConfig


class Names(NamedTuple):
    """The names of one weight: here (`ours`), in llama2.c and Meta's files, in Hugging Face's, and in llama.cpp's."""

    ours: str
    meta: str
    hugging_face: str
    llama_cpp: str


MODEL_NAMES = (
    Names("tok_embeddings", "tok_embeddings", "model.embed_tokens", "token_embd"),
    Names("norm", "norm", "model.norm", "output_norm"),
    Names("output", "output", "lm_head", "output"),
)
LAYER_PREFIXES = Names("layers.", "layers.", "model.layers.", "blk.")  # before a layer's number
LAYER_NAMES = (
    Names("attention.compute_query", "attention.wq", "self_attn.q_proj", "attn_q"),
    Names("attention.compute_key", "attention.wk", "self_attn.k_proj", "attn_k"),
    Names("attention.compute_value", "attention.wv", "self_attn.v_proj", "attn_v"),
    Names("attention.compute_output", "attention.wo", "self_attn.o_proj", "attn_output"),
    Names("attention_norm", "attention_norm", "input_layernorm", "attn_norm"),
    Names("feed_forward.w1", "feed_forward.w1", "mlp.gate_proj", "ffn_gate"),
    Names("feed_forward.w2", "feed_forward.w2", "mlp.down_proj", "ffn_down"),
    Names("feed_forward.w3", "feed_forward.w3", "mlp.up_proj", "ffn_up"),
    Names("ffn_norm", "ffn_norm", "post_attention_layernorm", "ffn_norm"),
)


def all_names(config: LlamaConfig) -> Iterator[Names]:
    """The names of every tensor in the state dict of a Llama of this config."""
    for names in MODEL_NAMES:
        yield Names(*(f"{name}.weight" for name in names))
    for layer in range(config.n_layers):
        for names in LAYER_NAMES:
            yield Names(*(f"{before}{layer}.{name}.weight" for before, name in zip(LAYER_PREFIXES, names, strict=True)))


def in_names_of(program: str, message: str) -> str:
    """A message with another program's names of tensors for ours. program: a field of `Names`."""
    parts, whole = ({each.ours: getattr(each, program) for each in names} for names in (LAYER_NAMES, MODEL_NAMES))
    before = getattr(LAYER_PREFIXES, program)

    def tensor(found: re.Match) -> str:
        layer, name = found[1], found[2]
        return f"{before}{layer}.{parts.get(name, name)}.weight" if layer else f"{whole.get(name, name)}.weight"

    return re.sub(r"(?<![\w.])(?:layers\.([0-9]+)\.)?([a-z_0-9.]+)\.weight\b", tensor, message)


def rotated_heads(name: str, config: LlamaConfig) -> int | None:
    """How many heads a matrix of this name projects to; None for one whose output is not rotated."""
    return {"compute_query": config.n_heads, "compute_key": config.n_kv_heads}.get(name.split(".")[-2])


def half_rotation_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key matrix from interleaved pairs to half-vectors. weight: (h d) D -> (h d) D"""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def interleaved_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The inverse of `half_rotation_rows`. weight: (h d) D -> (h d) D"""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def hugging_face_state(state: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Our state dict under Hugging Face's names, with its order of rows."""
    renamed = {}
    for names in all_names(config):
        weight, heads = state[names.ours], rotated_heads(names.ours, config)
        renamed[names.hugging_face] = weight if heads is None else half_rotation_rows(weight, heads)
    return renamed
