"""Prefix tuning: trained keys and values that every token attends to (Li & Liang 2021, arXiv:2101.00190, section 4).

In every layer, for every key/value head,

    Attn(q, [P_k; K], [P_v; V])        P_k, P_v: p d, trained    K, V: t d, those of the text

which is a gate between the model and what the prefix says (He et al. 2022, arXiv:2110.04366, section 3.1):

    (1 - l) Attn(q, K, V) + l Attn(q, P_k, P_v)    l: the share of the prefix in the softmax's sum

The prefix has no position: keys are joined after rotation, the text stays where it is, and every query sees all of the
prefix, whatever it sees of the text. Keys and values come to attention as those of an earlier text do, through
`AttentionContext.cache`, so that kernels compute them as well.

There is no prefix that begins as the base: l = 0 needs scores of minus infinity, at which nothing would be learned. A
random one is a bad start where examples are few (section 7.4 of the first paper), so this one begins as the keys and
values of drawn tokens, which the model computes and knows what to do with. The first paper's detour in training, an
MLP that makes P of a smaller matrix and is thrown away at the end, is left out: P itself is trained, which the code of
the second paper can do too.

It costs p more keys a query. A causal text of its own has PyTorch's fast way for triangles; with a prefix its mask is
read. In bfloat16 what goes in and out of these attentions stays float32.

Shapes: b batch   g key/value heads   p of the prefix   s query position   t key position   d head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from advanced.added import AddedVectors, context_among
from advanced.reading import Listening
from base_llama import AttentionContext, KVCache
from engine.methods import pretrained_of
from llama import Llama


class Prefix(AddedVectors):
    """length: p."""

    name = "prefix"
    mark = ".attention.prefix_"

    def prepare(self, model: nn.Module) -> None:
        llama = pretrained_of(model)
        drawn = torch.randint(llama.config.vocab_size, (1, self.length), device=llama.norm.weight.device)  # 1 p
        for layer, (key, value) in zip(llama.layers, keys_and_values(llama, drawn), strict=True):
            layer.attention.prefix_key, layer.attention.prefix_value = nn.Parameter(key), nn.Parameter(value)  # g p d
            layer.attention.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(
        self, attention: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the attention find the prefix before the text. inputs: x, b s D, and perhaps a view"""
        x = inputs[0]
        context = context_among(inputs, named) or AttentionContext.of_text(x.shape[1], attention.is_causal, x.device)
        mask = context.mask  # ... s t
        if mask is not None:
            mask = torch.cat((mask.new_ones(*mask.shape[:-1], self.length), mask), dim=-1)  # ... s p+t
        return (x, context._replace(mask=mask, cache=Prefixed(attention, context.cache))), {}


@dataclass
class Prefixed:
    """What a layer's attention takes for a cache: the prefix, and behind it the keys and values of the text."""

    attention: nn.Module
    cache: KVCache | None

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """key and value: b g s d -> b g p+t d"""
        if self.cache is not None:
            key, value = self.cache.store(layer_id, key, value)  # b g t d
        pairs = (self.attention.prefix_key, key), (self.attention.prefix_value, value)
        key, value = (torch.cat((own.to(x.dtype).expand(len(x), -1, -1, -1), x), dim=2) for own, x in pairs)
        return key, value


@torch.no_grad()
def keys_and_values(llama: Llama, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of a text in every layer. token_ids: 1 p -> two of g p d for each layer"""
    listening = Listening()
    context = AttentionContext.of_text(token_ids.shape[1], llama.config.is_causal, token_ids.device)
    llama.encode(llama.embed(token_ids), context._replace(cache=listening))
    # heads come out of a transpose, and what is not contiguous cannot be split over processes
    return [(key[0].contiguous(), value[0].contiguous()) for key, value in listening.heard]
