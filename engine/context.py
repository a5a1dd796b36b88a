"""Texts that are read with more than llama.py's forward pass has: positions, a mask, the keys and values so far.

llama.py reads a whole text from position 0. A key/value cache, a mask of one's own and a query at one position need
more. Here they meet the model's own code: `ContextLlama` is a second set of modules that share parameters, children and
hooks with the model's; only the attention is of another class, `ContextAttention`, which has `Attention.forward` once
more, with a context. So what is edited in llama.py counts here as well, but for that method and
`rope.apply_rotary_emb`: `context_check` says whether these still agree.

Shapes:
    b batch      s query position   t key position   h query heads   g key/value heads   L layers
    d head dim   D model dim        v vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from base_llama import causal_mask
from config import LlamaConfig
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.weights import computable_kinds, takes_mask
from llama import NORMS, Attention, FeedForward, Llama, LlamaLayer
from rope import Scaling, apply_rotary_emb, frequencies, rope_table, table_rows
from utils import UserError


class AttentionContext(NamedTuple):
    """Positions and attention mask of one forward pass; every layer gets the same object.

    start: the position of the first token in its text, an int for all rows or a tensor of shape b. mask: bool,
    broadcasts to b h s t, True where a query may see a key; None: every query sees every key. at: b, the only query
    position of each row; None: every position is a query. cache: an object whose `store` adds the keys and values of
    earlier texts, as `KVCache` does.
    """

    start: int | torch.Tensor = 0
    mask: torch.Tensor | None = None
    at: torch.Tensor | None = None
    cache: Any = None

    @classmethod
    def of_text(cls, length: int, is_causal: bool, device: torch.device) -> AttentionContext:
        """The context of a pass over a whole text, from position 0."""
        return cls(mask=causal_mask(length, device) if is_causal else None)

    def queried_at(self, at: torch.Tensor) -> AttentionContext:
        """This context with one query in each row, at position `at` (b); it sees the same keys as before."""
        mask = self.mask
        if mask is not None and mask.shape[-2] > 1:  # a mask with one row is the same for all queries
            of_row = mask[at] if mask.dim() == 2 else mask[torch.arange(len(at), device=at.device), 0, at]  # b t
            mask = of_row[:, None, None]  # b 1 1 t
        return self._replace(mask=mask, at=at)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Select the query positions. x: b s D -> b s D, or b 1 D if `at` is set"""
        return x if self.at is None else x[torch.arange(len(self.at), device=self.at.device), self.at][:, None]


class ContextAttention(Attention):
    """`Attention` with a context: that of a call, else its own `context`, else that of a whole text."""

    context: AttentionContext | None = None
    layer_id = 0

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D if the context has one query in each row"""
        context = context or self.context or AttentionContext.of_text(x.shape[1], self.is_causal, x.device)
        query = self.compute_query(context.queries(x)).unflatten(-1, (-1, self.head_dim))  # b s h d
        key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.compute_key, self.compute_value))
        settings = self.head_dim, self.max_seq_len, *self.rope
        query_start = context.start if context.at is None else context.start + context.at
        query, key = rotate(query, query_start, *settings), rotate(key, context.start, *settings)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # b h s d, b g s d
        if context.cache is not None:
            key, value = context.cache.store(self.layer_id, key, value)  # b g t d
        if self.n_rep > 1:  # each key/value head serves n_rep query heads
            key, value = (part.repeat_interleave(self.n_rep, dim=1) for part in (key, value))  # b h t d
        mask = () if context.mask is None else (context.mask,)
        output = self.compute_query_key_value_scores(query, key, value, *mask)  # b h s d
        return self.resid_dropout(self.compute_output(output.transpose(1, 2).flatten(-2)))  # b s D


def rotate(
    x: torch.Tensor,
    start: int | torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """`rope.apply_rotary_emb` for queries or keys that begin at any position. x: b s h d -> b s h d

    start: as in `AttentionContext`; at a negative position the angle is 0.
    """
    length = x.shape[1]
    if isinstance(start, int):
        cos, sin = rope_table(head_dim, table_rows(start + length, max_seq_len), theta, x.device, scaling)
        cos, sin = cos[start : start + length], sin[start : start + length]  # s d/2
    else:  # no table: reading the largest position from a tensor would make a GPU wait
        positions = start[:, None] + torch.arange(length, device=x.device)  # b s
        angles = positions[..., None].float() * frequencies(head_dim, theta, scaling).to(x.device)  # b s d/2
        cos, sin = angles.cos(), angles.sin()
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # b s h d/2
    turned = pairs * torch.complex(cos, sin).unsqueeze(-2)  # one angle for all heads
    return torch.view_as_real(turned).flatten(-2).type_as(x)


# ---------------------------------------------------------------------------------------------------- shared modules


def sharing(module: nn.Module, kind: type[nn.Module], **children: nn.Module) -> Any:
    """A module of the class `kind` that shares everything with `module`, but for these children."""
    shared = object.__new__(kind)  # not by the class: a sharded module's class would make the model's own
    own = {**vars(module), "_modules": {**module._modules, **children}}
    object.__setattr__(shared, "__dict__", own)
    for name in slots_of(type(module)):
        object.__setattr__(shared, name, getattr(module, name))
    return shared


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the attributes that do not lie in `__dict__`, as those of a kernel."""
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))


@cache
def with_context(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of an attention of class `kind` that takes a context. What a subclass overrides stays overridden."""
    if issubclass(kind, ContextAttention):
        return kind
    if kind is Attention:
        return ContextAttention
    return getattr(kind, "with_context", None) or type(kind.__name__, (kind, ContextAttention), {})


class ContextLlama:
    """Reads texts by the code of a Llama as it stands, with a context. It is made for the modules of this moment."""

    def __init__(self, llama: Llama):
        self.attentions, layers = [], []
        for number, layer in enumerate(llama.layers):
            own = layer.get_submodule("attention")
            kind: type = type(own)  # for mypy a `type[Module]` has no hash
            attention = sharing(own, with_context(kind))
            vars(attention)["layer_id"] = number
            self.attentions.append(attention)
            layers.append(sharing(layer, type(layer), attention=attention))
        self.llama = sharing(llama, type(llama), layers=nn.ModuleList(layers))

    def __call__(self, tokens: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Llama.forward`. tokens: b s -> logits b 1 v, hidden states b s D"""
        for attention in self.attentions:
            vars(attention)["context"] = context
        return self.llama(tokens)


# ---------------------------------------------------------------------------------------- keys and values that are kept


class KVCache:
    """Keys and values of texts, and the model that reads what comes next: `read`.

    The code that generates text owns the cache; the model keeps no state. The buffers are made once, for `max_len`
    positions. All rows hold the same number of positions. Raises `ValueError` for a bidirectional model,
    where each new token would change the keys and values of all earlier tokens.
    """

    def __init__(self, llama: Llama, batch_size: int, max_len: int):
        config = llama.config
        if not config.is_causal:
            raise ValueError('a key/value cache needs attention="causal"')
        self.shape = (config.n_layers, batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.keys: torch.Tensor | None = None  # L b g t d, once something is stored
        self.values: torch.Tensor | None = None
        self.device = next(llama.parameters()).device
        self.length = 0
        self.reader = ContextLlama(llama)

    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Llama.forward` for the next tokens of each text, which the cache then holds.

        tokens: b s -> logits b 1 v, hidden states b s D of these tokens. Raises `RuntimeError` as `extend` does.
        """
        return self.reader(tokens, self.extend(tokens.shape[1]))

    def extend(self, new: int) -> AttentionContext:
        """Make room for `new` positions; returns the context of the pass that computes them.

        Raises `RuntimeError` if the cache would hold more than `max_len` positions.
        """
        length = self.length + new
        if length > self.shape[3]:
            raise RuntimeError(f"the cache is for {self.shape[3]} tokens, not {length}")
        mask = last_rows(new, length, self.device) if new > 1 else None  # s t; a single new token sees everything
        start, self.length = self.length, length
        return AttentionContext(start, mask, cache=self)

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new keys and values, each b g s d; returns those of all positions, b g t d."""
        if self.keys is None or self.values is None:  # the buffers get the number format of the first key
            self.keys, self.values = key.new_zeros(self.shape), key.new_zeros(self.shape)
        start = self.length - key.shape[2]
        self.keys[layer_id, :, :, start : self.length] = key
        self.values[layer_id, :, :, start : self.length] = value
        return self.keys[layer_id, :, :, : self.length], self.values[layer_id, :, :, : self.length]

    def take(self, rows: torch.Tensor) -> KVCache:
        """A new cache with these rows of this one, in this order; a row may be taken several times. rows: r"""
        taken = copy.copy(self)
        taken.shape = (self.shape[0], len(rows), *self.shape[2:])
        if self.keys is not None and self.values is not None:
            taken.keys, taken.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)  # L r g t d
        return taken


def last_rows(query_len: int, key_len: int, device: torch.device | None = None) -> torch.Tensor:
    """The last rows of `causal_mask`: the last query sees every key. Returns bool s t; do not write to it."""
    return causal_mask(key_len, device)[key_len - query_len :] if query_len < key_len else causal_mask(key_len, device)


# ---------------------------------------------------------------------- hidden states, and the comparison with llama.py

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
    if tokens is None:
        raise ValueError("tokens or their vectors are needed")
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


def small_models(config: LlamaConfig, depths: dict[tuple[str, int], int]) -> dict[tuple[str, int], Llama]:
    """Random models with the settings of `config`, but small. depths: layers, by attention and number of positions."""
    small = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50, "hidden_dim": 24, "dropout": 0.0}
    models = {}
    for (kind, limit), depth in depths.items():
        settings = {**vars(config), **small, "max_seq_len": limit, "n_layers": depth, "attention": kind}
        model = models[kind, limit] = Llama(LlamaConfig(**settings)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4 if parameter.dim() == 2 else 1.0)
    return models


def _sides(config: LlamaConfig) -> Comparison:
    """Small models, one as deep as `config` says, because an edit may concern one layer, and shallow ones."""
    depths = {("causal", LIMIT): config.n_layers, ("causal", LONG_TEXT): 1}
    if not config.is_causal:  # no causal model is read the other way
        depths["bidirectional", LIMIT] = 2
    models = small_models(config, depths)
    for model in models.values():
        model.requires_grad_(False)

    def ask(is_plain: bool) -> Callable[..., list[torch.Tensor]]:
        def run(part: Callable, which: tuple[str, int], *inputs: torch.Tensor) -> list[torch.Tensor]:
            return part(models[which], is_plain, *inputs)

        return run

    kinds = {kind for kind, _ in models}
    return Comparison(ask(True), ask(False), list(_cases(kinds.intersection(computable_kinds()))))


def _cases(kinds: set[str]) -> Iterator[Case]:
    """kinds: of attention, of the models that are compared."""

    def tokens(texts: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (texts, length))

    for kind in sorted(kinds):
        yield Case(f"a {kind} text", (_whole, (kind, LIMIT), tokens(2, 6)))
        yield Case("rope.apply_rotary_emb", (_turned, (kind, LIMIT), torch.randn(2, LIMIT + 3, 4, 8)))
    if "causal" in kinds:
        yield Case("tokens behind a text", (_in_pieces, ("causal", LIMIT), tokens(2, 7)))
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
    """The rotation of the positions from the third on, and of rows that begin at two positions."""
    config = model.config
    settings = config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling
    if is_plain:
        both = apply_rotary_emb(x, x[:, :, :2], *settings)
        return [*(each[:, 3:] for each in both), torch.stack((both[0][0, 3:6], both[0][1, 5:8]))]
    rows = torch.stack((x[0, 3:6], x[1, 5:8]))
    parts = ((x[:, 3:], 3), (x[:, 3:, :2], 3), (rows, torch.tensor([3, 5])))
    return [rotate(part, start, *settings) for part, start in parts]


def _in_pieces(model: Llama, is_plain: bool, tokens: torch.Tensor) -> list[torch.Tensor]:
    """All hidden states, and the logits after the text."""
    if is_plain:
        return [*reversed(model(tokens))]
    texts, length = tokens.shape
    cache = KVCache(model, texts, length)
    pieces = [cache.read(piece) for piece in tokens.split([length - 4, 1, 2, 1], dim=1)]
    return [torch.cat([h for _, h in pieces], dim=1), pieces[-1][0]]
