"""A Llama that judges texts, computed by hand: a grader imports no `llama.py`, which may be a student's.

It is causal, and is read from a checkpoint as llama2.c and the assignment have them: with RMSNorms, or with LayerNorms
if the norms have biases.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F

from grading.programs import GradingError, find_asset
from grading.reference import load_tensors
from grading.small_model import below, feed_forward, normed

META_NAMES = {"wq": "compute_query", "wk": "compute_key", "wv": "compute_value", "wo": "compute_output"}
Cache = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer so far, b g t d


def load_tokenizer(path: str | os.PathLike) -> Any:
    """A SentencePiece tokenizer. Raises `GradingError` if the file, or the package that reads it, is absent."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError:
        raise GradingError("a text is judged with the package sentencepiece; bash setup.sh installs it") from None
    if (found := find_asset(path)) is None:
        raise GradingError(f"{path} does not exist")
    try:
        return SentencePieceProcessor(model_proto=found.read_bytes())
    except (RuntimeError, UnicodeDecodeError):
        raise GradingError(f"{path} is not a SentencePiece model, or it is damaged") from None


def read_checkpoint(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights in float32 by the assignment's names, and the shape. Raises `GradingError` unless it is a Llama's."""
    if (found := find_asset(path)) is None:
        raise GradingError(f"{path} does not exist")
    content = load_tensors(found)
    try:
        weights = {own_name(name): tensor.float() for name, tensor in content["model"].items()}
        args = content["model_args"]
        shape = {
            "n_layers": args["n_layers"], "head_dim": args["dim"] // args["n_heads"], "n_heads": args["n_heads"],
            "max_seq_len": args["max_seq_len"], "eps": args.get("norm_eps", args.get("layer_norm_eps", 1e-5)),
        }  # fmt: skip
        table = weights.setdefault("tok_embeddings.weight", weights.get("output.weight"))
        weights.setdefault("output.weight", table)
        LanguageModel(weights, shape, None).logits(torch.zeros(1, 2, dtype=torch.long))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise GradingError(f"{path} is not a checkpoint of a Llama: {type(error).__name__} {error}") from None
    return weights, shape


def own_name(name: str) -> str:
    return ".".join(META_NAMES.get(part, part) for part in name.removeprefix("_orig_mod.").split("."))


def rotate(x: torch.Tensor, start: int, theta: float = 10000.0) -> torch.Tensor:
    """RoFormer's equation 34, the pairs as complex numbers. x: b s h d, its first position is `start`"""
    pairs = torch.arange(x.shape[-1] // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(start, start + x.shape[1]).double(), theta ** (-2 * pairs / x.shape[-1]))  # s d/2
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


class LanguageModel:
    """weights, shape: as `read_checkpoint` returns them. tokenizer: as `load_tokenizer` does."""

    def __init__(self, weights: dict[str, torch.Tensor], shape: dict[str, Any], tokenizer: Any):
        self.weights, self.shape, self.tokenizer = weights, shape, tokenizer
        self.layers = [below(weights, f"layers.{layer}.") for layer in range(shape["n_layers"])]

    @classmethod
    def load(cls, checkpoint: str | os.PathLike, tokenizer: str | os.PathLike) -> LanguageModel:
        """Raises `GradingError` if a file is absent or of another kind, or the two are not of one model."""
        model = cls(*read_checkpoint(checkpoint), load_tokenizer(tokenizer))
        pieces, size = model.tokenizer.vocab_size(), len(model.weights["tok_embeddings.weight"])
        if pieces != size:
            raise GradingError(f"{tokenizer} has {pieces} pieces and {checkpoint} {size}: they are not of one model")
        return model

    def logits(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """tokens: b s -> b s v. With a cache they are what follows the tokens in it; it must be empty where s > 1."""
        eps, cache = self.shape["eps"], [] if cache is None else cache
        h = F.embedding(tokens, self.weights["tok_embeddings.weight"])  # b s D
        for number, layer in enumerate(self.layers):
            x = normed(h, below(layer, "attention_norm."), eps)
            h = h + self._attention(x, below(layer, "attention."), number, cache)
            x = normed(h, below(layer, "ffn_norm."), eps)
            h = h + feed_forward(x, below(layer, "feed_forward."))
        return F.linear(normed(h, below(self.weights, "norm."), eps), self.weights["output.weight"])

    def _attention(self, x: torch.Tensor, layer: dict[str, torch.Tensor], number: int, cache: Cache) -> torch.Tensor:
        """x: b s D -> b s D. Adds keys and values to the cache."""
        start = cache[number][0].shape[2] if number < len(cache) else 0
        heads = (-1, self.shape["head_dim"])
        names = ("query", "key", "value")
        query, key, value = (F.linear(x, layer[f"compute_{name}.weight"]).unflatten(-1, heads) for name in names)
        query, key, value = (x.transpose(1, 2) for x in (rotate(query, start), rotate(key, start), value))  # b h s d
        if start:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cache[number], (key, value), strict=True))
        cache[number : number + 1] = [(key, value)]
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))  # b h t d
        output = F.scaled_dot_product_attention(query, key, value, is_causal=not start)
        return F.linear(output.transpose(1, 2).flatten(2), layer["compute_output.weight"])

    @torch.inference_mode()
    def continued(self, idx: torch.Tensor, new: int, temperature: float, generator: torch.Generator) -> torch.Tensor:
        """Each row with `new` more tokens, the likeliest ones at temperature 0. idx: b s -> b s+new"""
        cache: Cache = []
        logits = self.logits(idx, cache)[:, -1]
        for left in reversed(range(new)):
            if temperature:
                idx_next = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                idx_next = logits.argmax(-1, keepdim=True)
            idx = torch.cat((idx, idx_next), dim=1)
            if left:
                logits = self.logits(idx_next, cache)[:, -1]
        return idx

    @torch.inference_mode()
    def bits(self, text: str, start: int) -> float:
        """Bits per character of `text[start:]`, which is not empty, after `text[:start]`; as far as the model reads."""
        limit, encode = self.shape["max_seq_len"], self.tokenizer.encode
        ids, given = ([self.tokenizer.bos_id(), *encode(part)][:limit] for part in (text, text[:start]))
        same = next((place for place, pair in enumerate(zip(ids, given, strict=False)) if len({*pair}) > 1), len(given))
        logits = self.logits(torch.tensor([ids[:-1]]))[0, same - 1 :]
        read = len(text) - start if len(ids) < limit else len(self.tokenizer.decode(ids)) - start
        return F.cross_entropy(logits, torch.tensor(ids[same:]), reduction="sum").item() / math.log(2) / max(read, 1)
