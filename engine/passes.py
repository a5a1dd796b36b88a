"""Hidden states of texts that are read with a context, and whether such a reading agrees with llama.py as it stands.

Shapes:  b batch   s position   D model dim   v vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from config import ATTENTION_KINDS, LlamaConfig
from engine.cache import KVCache
from engine.context import AttentionContext, ContextAttention, ContextLlama, rotate, sharing
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.weights import computable_kinds, takes_mask
from llama import NORMS, Attention, FeedForward, Llama, LlamaLayer
from rope import apply_rotary_emb
from utils import UserError

LIMIT, LONG_TEXT = 8, 300  # positions of the models that are compared
WITHOUT_CACHE = "every text is read whole, without a cache, positions or a mask of its own"


def embed(llama: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """The vectors of tokens, as `Llama.forward` looks them up. tokens: b s -> b s D"""
    return llama.tok_embeddings(tokens.masked_fill(tokens == -1, 0))


class GivenVectors(nn.Module):
    """In the place of token embeddings: vectors that are given."""

    def __init__(self, vectors: torch.Tensor):
        super().__init__()
        self.vectors = vectors

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.vectors


def hidden_states(
    llama: Llama,
    tokens: torch.Tensor | None = None,
    context: AttentionContext | None = None,
    *,
    embedded: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of a Llama after the final norm, without logits. tokens: b s, or embedded: b s D -> b s D

    embedded: vectors in the place of those that `tok_embeddings` has for tokens. context: None: of whole texts.
    Raises `UserError` if the model's attention takes no context that agrees with llama.py.
    """
    others: dict[str, nn.Module] = {"output": nn.Identity()}
    if embedded is not None:
        tokens = torch.zeros(embedded.shape[:2], dtype=torch.long, device=embedded.device)
        others["tok_embeddings"] = GivenVectors(embedded)
    if context is None:
        return sharing(llama, type(llama), **others)(tokens)[1]
    if context.mask is not None and not takes_mask(Attention):
        raise UserError("this needs a mask, which Attention.compute_query_key_value_scores in llama.py does not take")
    if reason := why_no_context(llama):
        raise UserError(f"this needs positions or a mask of its own, which the model does not take: {reason}")
    reader = ContextLlama(llama)
    reader.llama._modules.update(others)
    return reader(tokens, context)[1]


# ------------------------------------------------------------------------------------------- comparison with llama.py


def why_no_context(llama: Llama) -> str | None:
    """Why a model cannot be read with a context as llama.py reads it; None if it can."""
    if has_own_forward(llama, Llama):
        return "the model has a forward of its own"
    for number, layer in enumerate(llama.layers):
        if has_own_forward(layer, LlamaLayer):
            return f"layer {number} has a forward of its own"
        if not has_known_attention(layer):
            return f"layer {number} has another attention than llama.py's"
    return context_check(tuple(vars(llama.config).items())).difference()


def has_own_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes something else than its class of llama.py says, perhaps of several positions."""
    return type(module).forward is not kind.forward or "forward" in vars(module)


def has_known_attention(layer: nn.Module) -> bool:
    """Whether the attention of a layer is that of llama.py, or a kernel in its place."""
    attention = getattr(layer, "attention", None)
    is_known = type(attention) in (Attention, ContextAttention) or hasattr(type(attention), "with_context")
    return is_known and "forward" not in vars(attention)


@lru_cache(maxsize=16)
def context_check(config: tuple[tuple[str, Any], ...]) -> EquivalenceCheck:
    """Whether a reading with a context agrees with a model of these settings, as llama.py stands."""
    made = LlamaConfig(**dict(config))
    roots = (Attention, LlamaLayer, FeedForward, NORMS[made.norm], (Llama, "forward"))
    return EquivalenceCheck("Llama.forward", roots, partial(_sides, made), instead=WITHOUT_CACHE)


def _sides(config: LlamaConfig) -> Comparison:
    """Small models, one as deep as `config` says, because an edit may concern one layer, and shallow ones."""
    small = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50, "hidden_dim": 24, "dropout": 0.0}
    models = {}
    for kind, limit, depth in (
        ("causal", LIMIT, config.n_layers),
        ("bidirectional", LIMIT, 2),
        ("causal", LONG_TEXT, 1),
    ):
        settings = {**vars(config), **small, "max_seq_len": limit, "n_layers": depth, "attention": kind}
        model = models[kind, limit] = Llama(LlamaConfig(**settings)).eval().requires_grad_(False)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4 if parameter.dim() == 2 else 1.0)

    def ask(is_plain: bool) -> Callable[..., list[torch.Tensor]]:
        def run(part: Callable, which: tuple[str, int], *inputs: torch.Tensor) -> list[torch.Tensor]:
            return part(models[which], is_plain, *inputs)

        return run

    asked = {"causal"} if config.is_causal else set(ATTENTION_KINDS)  # no causal model is read the other way
    return Comparison(ask(True), ask(False), list(_cases(asked.intersection(computable_kinds()))))


def _cases(kinds: set[str]) -> Iterator[Case]:
    """kinds: of attention, of the models that are compared."""

    def tokens(texts: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (texts, length))

    for kind in sorted(kinds):
        yield Case(f"a {kind} text", (_whole, (kind, LIMIT), tokens(2, 6)))
        yield Case("rope.apply_rotary_emb", (_turned, (kind, LIMIT), torch.randn(2, LIMIT + 3, 4, 8)))
    if "causal" in kinds:
        yield Case("tokens behind a text", (_in_pieces, ("causal", LIMIT), tokens(2, 7)))
        yield Case("texts behind padding", (_padded, ("causal", LIMIT), tokens(3, 7), torch.tensor([0, 4, 2])))
        yield Case(f"{LONG_TEXT} tokens", (_in_pieces, ("causal", LONG_TEXT), tokens(1, LONG_TEXT)))


def _whole(model: Llama, is_plain: bool, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the last and of all positions, and hidden states."""
    if is_plain:
        logits, h = model(tokens)
        return [logits, h, model(tokens, tokens)[0]]
    context = AttentionContext.of_text(tokens.shape[1], model.config.is_causal, tokens.device)
    logits, h = ContextLlama(model)(tokens, context)
    return [logits, h, model.output(h)]


def _turned(model: Llama, is_plain: bool, x: torch.Tensor) -> list[torch.Tensor]:
    """The rotation of the positions from the third on, of rows that begin at two positions, and before position 0."""
    config = model.config
    settings = config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling
    if is_plain:
        both = apply_rotary_emb(x, x[:, :, :2], *settings)
        return [*(each[:, 3:] for each in both), torch.stack((both[0][0, 3:6], both[0][1, 5:8])), x[:, :1]]
    rows = torch.stack((x[0, 3:6], x[1, 5:8]))
    parts = ((x[:, 3:], 3), (x[:, 3:, :2], 3), (rows, torch.tensor([3, 5])), (x[:, :1], torch.tensor([-2, 0])))
    return [rotate(part, start, *settings) for part, start in parts]


def _in_pieces(model: Llama, is_plain: bool, tokens: torch.Tensor) -> list[torch.Tensor]:
    """All hidden states, and the logits after the text."""
    if is_plain:
        return [*reversed(model(tokens))]
    cache, length = KVCache(model, *tokens.shape), tokens.shape[1]
    pieces = [cache.read(piece) for piece in tokens.split([length - 4, 1, 2, 1], dim=1)]
    return [torch.cat([h for _, h in pieces], dim=1), pieces[-1][0]]


def _padded(model: Llama, is_plain: bool, tokens: torch.Tensor, pad: torch.Tensor) -> list[torch.Tensor]:
    """The logits after each text, the first tokens of which are padding."""
    if is_plain:
        return [model(row[None, before:])[0][0] for row, before in zip(tokens, pad.tolist(), strict=True)]
    cache = KVCache(model, *tokens.shape, pad)
    cache.read(tokens[:, :5])
    return [*cache.read(tokens[:, 5:])[0]]
