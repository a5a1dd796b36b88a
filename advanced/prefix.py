"""Prefix tuning: trained keys and values that every token attends to (Li & Liang 2021, arXiv:2101.00190, section 4).

In every layer, for every key/value head,

    Attn(q, [P_k; K], [P_v; V])        P_k, P_v: p d, trained    K, V: t d, those of the text

which is a gate between the attention of the model and that of the prefix (He et al. 2022, arXiv:2110.04366, section
3.1):

    (1 - l) Attn(q, K, V) + l Attn(q, P_k, P_v)    l: the share of the prefix in the softmax's sum

The prefix has no position: its keys are joined after rotation, the text keeps its positions (in the first paper's code
for GPT-2 it moves by p), and every query sees the whole prefix. The keys and values reach attention through
`AttentionContext.cache`, as those of an earlier text do, so kernels compute them too.

No prefix begins as the base: l = 0 needs scores of minus infinity, which have no gradient. A random prefix is a bad
start if examples are few (section 7.4 of the first paper), so this one begins as the keys and values that the model
computes from random tokens. The first paper trains an MLP that makes P from a smaller matrix; here P itself is
trained, as the code of the second paper can do.

In a BERT the prefix stands before what [CLS] and the other tokens see in each layer, without position or segment.

Each query has p more keys. PyTorch's fast path for causal masks cannot be used, since the mask is no triangle. In
bfloat16 the inputs and outputs of these attentions stay float32.

Shapes: b batch   g key/value heads   p of the prefix   s query position   t key position   d head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from advanced.added import AddedVectors
from advanced.reading import Listening
from engine.context import AttentionContext, KVCache, hidden_states, with_context
from engine.methods import pretrained_of
from llama import Llama


class Prefix(AddedVectors):
    """length: p."""

    name = "prefix"
    mark = ".attention.prefix_"

    def prepare(self, model: nn.Module) -> None:
        pretrained = pretrained_of(model)
        table = pretrained.tok_embeddings.weight
        drawn = torch.randint(pretrained.config.vocab_size, (1, self.length), device=table.device)  # 1 p
        for layer, (key, value) in zip(pretrained.layers, keys_and_values(pretrained, drawn), strict=True):
            if isinstance(pretrained, Llama):
                layer.attention.__class__ = with_context(type(layer.attention))
            layer.attention.prefix_key, layer.attention.prefix_value = nn.Parameter(key), nn.Parameter(value)  # g p d
            layer.attention.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(
        self, attention: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the prefix before the text. inputs: x, b s D, and perhaps, in a BERT, a mask"""
        x = inputs[0]
        if not hasattr(attention, "is_causal"):  # of a BERT
            mask = next(iter((*inputs[1:], *named.values())), None)
            return (x, self.widened(mask), Prefixed(attention, None)), {}
        context = attention.context or AttentionContext.of_text(x.shape[1], attention.is_causal, x.device)
        return (x, context._replace(mask=self.widened(context.mask), cache=Prefixed(attention, context.cache))), {}

    def widened(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask in which everyone sees the prefix. mask: ... s t -> ... s p+t"""
        if mask is None:
            return None
        return torch.cat((mask.new_ones(*mask.shape[:-1], self.length), mask), dim=-1)


@dataclass
class Prefixed:
    """A cache of a layer's attention: the prefix, and behind it the keys and values of the text."""

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
def keys_and_values(model: nn.Module, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of a text in every layer. token_ids: 1 p -> g p d and g p d for each layer"""
    listening = Listening()
    if isinstance(model, Llama):
        context = AttentionContext.of_text(token_ids.shape[1], model.config.is_causal, token_ids.device)
        hidden_states(model, token_ids, context._replace(cache=listening))
    else:
        h = model.embeddings(token_ids)  # 1 p D
        for layer in model.layers:
            hook = layer.attention.register_forward_pre_hook(lambda attention, inputs: (*inputs, listening))
            h = layer(h, None)
            hook.remove()
    # contiguous, because a transposed tensor cannot be split over processes
    return [(key[0].contiguous(), value[0].contiguous()) for key, value in listening.heard]
