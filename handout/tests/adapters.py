"""How each part of your code is called. If your classes have other names or arguments, change the functions here.

Each function gets weights and inputs, and returns tensors. Weights are named as in the checkpoint, below the part's own
name: a layer's are `attention.compute_query.weight`, `attention_norm.weight` and so on. config: the keyword arguments
of `LlamaConfig`. Shapes: b batch, s position, h heads, g key/value heads, d head dim, D model dim, v vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

Weights = dict[str, torch.Tensor]


def run_norm(weights: Weights, x: torch.Tensor, eps: float) -> torch.Tensor:
    """This edition's norm. x: b s D -> b s D"""
    import llama

    name = "LayerNorm" if "bias" in weights else "RMSNorm"
    return _filled(getattr(llama, name)(x.shape[-1], eps), weights)(x)


def run_rope(
    query: torch.Tensor, key: torch.Tensor, head_dim: int, max_seq_len: int, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: b s h d, key: b s g d -> both, turned"""
    from rope import apply_rotary_emb

    return apply_rotary_emb(query, key, head_dim, max_seq_len, theta)


def run_scores(
    config: dict, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Scaled dot-product attention. All: b h s d -> b h s d. mask: bool, b 1 s s, True where a query may see a key"""
    import llama

    attention = llama.Attention(_config(config)).eval()
    return attention.compute_query_key_value_scores(query, key, value, *(() if mask is None else (mask,)))


def run_attention(config: dict, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention with rotary positions. x: b s D -> b s D"""
    import llama

    return _filled(llama.Attention(_config(config)), weights)(x)


def run_layer(config: dict, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """One transformer layer. x: b s D -> b s D"""
    import llama

    return _filled(llama.LlamaLayer(0, _config(config)), weights)(x)


def run_llama(config: dict, weights: Weights, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens: b s -> logits of the last position b 1 v, hidden states b s D"""
    import llama

    return _filled(llama.Llama(_config(config)), weights)(tokens)


def run_generate(config: dict, weights: Weights, tokens: torch.Tensor, new: int, temperature: float) -> torch.Tensor:
    """tokens: 1 s -> 1 (s + new)"""
    import llama

    return _filled(llama.Llama(_config(config)), weights).generate(tokens, new, temperature=temperature)


def run_adamw(weights: torch.Tensor, gradients: torch.Tensor, settings: dict) -> torch.Tensor:
    """AdamW on one parameter for each row of `weights`. gradients: steps, then as `weights` -> the last weights"""
    from optimizer import AdamW

    rows = [torch.nn.Parameter(row.clone()) for row in weights]
    optimizer = AdamW(rows, **settings)
    for gradient in gradients:
        for row, its in zip(rows, gradient, strict=True):
            row.grad = its.clone()
        optimizer.step()
    return torch.stack([row.detach() for row in rows])


def run_classifier(config: dict, weights: Weights, head: Weights, tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The embedding classifier in evaluation. tokens: b s, padded at the right -> log-probabilities b c"""
    import llama
    from classifier import LlamaEmbeddingClassifier

    model = _filled(llama.Llama(_config(config)), weights)
    given = SimpleNamespace(num_labels=len(head["bias"]), hidden_dropout_prob=0.3, option="finetune", pad_id=pad_id)
    classifier = LlamaEmbeddingClassifier(given, llama=model)
    _filled(classifier.classifier_head, head)
    return classifier.eval()(tokens)


def _config(config: dict):
    from config import LlamaConfig

    return LlamaConfig(**config)


def _filled(module: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    module.load_state_dict(weights, strict=False)
    return module.eval()
