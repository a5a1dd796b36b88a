"""Llama 2 (Touvron et al. 2023, arXiv:2307.09288), written to be read.

What is particular here:
- the token embedding and the output projection are one matrix (weight tying);
- RoPE turns *interleaved* pairs, see rope.py;
- keys and values may have fewer heads than queries (grouped-query attention, arXiv:2305.13245);
- `attention="bidirectional"` has no causal mask: every position sees every other, padding as well. That is the
  assignment's reference. `attention="causal"` is what the weights were pretrained with.

Shapes:
    b batch      s query position   t key position   h query heads   g key/value heads
    d head dim   D model dim        f feed-forward dim               v vocabulary
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import LlamaPreTrainedModel
from config import LlamaConfig, swiglu_hidden_dim
from rope import Start, rotate
from storage import load_tensors
from utils import UserError, causal_mask, causal_mask_at, padded_causal_mask, shorten, some


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D. The statistics are float32 whatever x is: in half precision squares overflow early."""
        return self._norm(x.float()).type_as(x) * self.weight


class KVCache:
    """The keys and values that a causal model has computed so far, so that every token is computed once.

    It belongs to whoever generates; the model keeps no state. The buffers are allocated once, for `max_len` positions.
    All rows hold the same number of positions; shorter texts begin with padding, `pad` tokens in each row (b).
    Raises `ValueError` for a bidirectional model, where every token changes what was computed before it.
    """

    def __init__(self, model: Llama, batch_size: int, max_len: int, pad: torch.Tensor | None = None):
        config = model.config
        if not config.is_causal:
            raise ValueError('a key/value cache needs attention="causal"')
        self.shape = (config.n_layers, batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.keys: torch.Tensor | None = None  # L b g t d, once allocated
        self.values: torch.Tensor | None = None
        self.pad = None if pad is None or not pad.any() else pad
        self.device = model.tok_embeddings.weight.device
        self.length = 0
        self.new = 0
        self.start_pos: Start = 0  # where the new positions stand in the text; b where rows differ
        self.mask: torch.Tensor | None = None

    def begin(self, new: int) -> None:
        """Announce `new` positions: decides, once for all layers, where they stand and which keys they may see.

        Raises `RuntimeError` if there is no room for them.
        """
        self.check_room(new)
        self.new = new
        self.start_pos = self.length if self.pad is None else self.length - self.pad
        if self.pad is not None:
            self.mask = padded_causal_mask(self.pad, new, self.length + new)  # b 1 s t
        elif new > 1:
            self.mask = causal_mask(new, self.length + new, self.device)  # s t
        else:
            self.mask = None  # a single new token sees everything

    def end(self) -> None:
        self.length += self.new

    def check_room(self, new: int) -> None:
        """Raises `RuntimeError` if there is no room for `new` positions."""
        if self.length + new > self.shape[3]:
            raise RuntimeError(f"the cache is for {self.shape[3]} tokens, not {self.length + new}")

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers, once. Whoever computes the first key knows what they must hold."""
        if self.keys is None:
            self.keys = torch.zeros(self.shape, dtype=dtype, device=device)
            self.values = torch.zeros_like(self.keys)

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new keys and values, each b g s d; returns those of all positions, b g t d."""
        self.allocate(key.dtype, key.device)
        end = self.length + self.new
        self.keys[layer_id, :, :, self.length : end] = key
        self.values[layer_id, :, :, self.length : end] = value
        return self.keys[layer_id, :, :, :end], self.values[layer_id, :, :, :end]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.n_rep = config.n_heads // config.n_kv_heads
        self.max_seq_len, self.rope_theta = config.max_seq_len, config.rope_theta
        self.is_causal = config.is_causal
        self.compute_query = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.compute_key = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_value = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_output = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, equation 1).

        query: b h s d, key and value: b h t d -> b h s d. mask: bool, of a shape that broadcasts to b h s t, True where
        a query may see a key. Without one a query sees every key, or, in a causal model, those up to its own, the last
        query's being the last.
        """
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)  # b h s t
        if mask is None and self.is_causal:
            mask = causal_mask(query.shape[-2], key.shape[-2], query.device)  # s t
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = self.attn_dropout(scores.float().softmax(dim=-1).type_as(query))  # b h s t
        return weights @ value  # b h s d

    def forward(
        self, x: torch.Tensor, cache: KVCache | None = None, layer_id: int = 0, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D: the position `at` (b) of each row alone.

        With a cache, x holds the new positions only, and they see the stored ones as well.
        """
        start_pos = 0 if cache is None else cache.start_pos
        asking, asking_pos = (x, start_pos) if at is None else (_pick(x, at), at)
        query = self._heads(self.compute_query(asking), self.n_heads, asking_pos)  # b h s d
        key = self._heads(self.compute_key(x), self.n_kv_heads, start_pos)  # b g s d
        value = self.compute_value(x).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)  # b g s d
        mask = None
        if cache is not None:
            key, value = cache.store(layer_id, key, value)  # b g t d
            mask = cache.mask
        elif self.is_causal:
            mask = causal_mask(x.shape[1], x.shape[1], x.device) if at is None else causal_mask_at(at, x.shape[1])
        if self.n_rep > 1:  # each key/value head serves n_rep query heads
            key, value = (x.repeat_interleave(self.n_rep, dim=1) for x in (key, value))  # b h t d
        seen = () if mask is None else (mask,)  # without a mask the assignment's three arguments are enough
        output = self.compute_query_key_value_scores(query, key, value, *seen)  # b h s d
        output = output.transpose(1, 2).flatten(-2)  # b s D
        return self.resid_dropout(self.compute_output(output))

    def _heads(self, x: torch.Tensor, n_heads: int, start_pos: Start) -> torch.Tensor:
        """Queries or keys as heads, rotated by their positions. x: b s D -> b h s d"""
        x = x.unflatten(-1, (n_heads, self.head_dim))  # b s h d
        return rotate(x, self.head_dim, self.max_seq_len, self.rope_theta, start_pos).transpose(1, 2)


def _pick(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """One position of each row. x: b s D, at: b -> b 1 D"""
    return x[torch.arange(len(at), device=at.device), at][:, None]


class FeedForward(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202, equation 6): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int | None, multiple_of: int, dropout: float):
        super().__init__()
        if hidden_dim is None:
            hidden_dim = swiglu_hidden_dim(dim, multiple_of)
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D, through b s f"""
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class LlamaLayer(nn.Module):
    """One transformer layer, pre-norm: each half normalises its input and adds its output to the residual stream."""

    def __init__(self, layer_id: int, config: LlamaConfig):
        super().__init__()
        self.layer_id = layer_id
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.multiple_of, config.dropout)
        self.attention_norm = RMSNorm(config.dim, eps=config.layer_norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.layer_norm_eps)

    def forward(
        self, x: torch.Tensor, cache: KVCache | None = None, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D: the position `at` (b) of each row alone."""
        residual = x if at is None else _pick(x, at)
        h = residual + self.attention(self.attention_norm(x), cache, self.layer_id, at)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(LlamaPreTrainedModel):
    """The language model: token ids to next-token logits and hidden states."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.params = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(LlamaLayer(layer_id, config) for layer_id in range(config.n_layers))
        self.norm = RMSNorm(config.dim, eps=config.layer_norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tok_embeddings.weight = self.output.weight  # tied (Press & Wolf 2017, arXiv:1608.05859)
        self.init_weights()

    def hidden_states(
        self, tokens: torch.Tensor, cache: KVCache | None = None, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The normalised output of the last layer. tokens: b s -> b s D, or b 1 D: the position `at` (b) of each row.

        The last layer's other positions matter to that one through their keys and values alone, so nothing else of them
        is computed.
        """
        if cache is not None:
            cache.begin(tokens.shape[1])
        h = self.dropout(self.tok_embeddings(tokens))  # b s D
        *earlier, last = self.layers
        for layer in earlier:
            h = layer(h, cache)
        h = last(h, cache, at)
        if cache is not None:
            cache.end()
        return self.norm(h)

    def hidden_state_at(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """`hidden_states` at one position of each row. tokens: b s, at: b -> b D"""
        return self.hidden_states(tokens, at=at)[:, 0]

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, *, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next-token logits and hidden states; with a cache, `tokens` are those that it does not hold yet.

        tokens: b s. `targets` only says that the logits of every position are wanted; without it those of the last
        position are computed, which is all that generation and classification read.
        Returns logits (b s v, or b 1 v) and hidden states (b s D).
        """
        h = self.hidden_states(tokens, cache)
        logits = self.output(h if targets is not None else h[:, [-1], :])
        return logits, h

    def _next_logits(self, idx: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        """Logits after the last token of `idx`, of which the model sees the last `max_seq_len`. idx: b s -> b v

        only_largest: nothing but the largest logit will be read, so an accelerated model may compute no other exactly.
        """
        limit, length = self.config.max_seq_len, idx.shape[1]
        if cache is None:
            return self(idx[:, -limit:])[0][:, -1]
        if length <= limit:
            return self(idx[:, cache.length :], cache=cache)[0][:, -1]
        # The window slides: what the dropped token told the others must go, so nothing that is stored can be kept.
        pad = None if cache.pad is None else (cache.pad - (length - limit)).clamp(min=0)
        return self(idx[:, -limit:], cache=KVCache(self, len(idx), limit, pad))[0][:, -1]

    @torch.inference_mode()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        epsilon: float | None = None,
        stop_ids: Collection[int] = (),
        generator: torch.Generator | None = None,
        pad: torch.Tensor | None = None,
        use_cache: bool = True,
        on_token: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Continue `idx` by at most `max_new_tokens` tokens; see `sample_next` for the other arguments.

        idx: b s -> b (s + new). The model sees the last `max_seq_len` tokens. A causal model keeps keys and values, so
        that each token is computed once, until the text outgrows `max_seq_len`; a bidirectional one, or
        `use_cache=False`, computes the whole sequence anew for every token, with the same result.
        pad: b, how many padding tokens each row of `idx` begins with (causal only).
        A row that produced one of `stop_ids` repeats it until all rows have, then generation ends early.
        on_token: called with each new column of token ids, b 1.
        """
        if pad is not None and not (self.config.is_causal and use_cache):
            raise ValueError("padding before a text can be hidden from a causal model with a cache only")
        limit = self.config.max_seq_len
        cache = None
        if self.config.is_causal and use_cache:
            cache = KVCache(self, len(idx), min(idx.shape[1] + max_new_tokens, limit), pad)
        stops = torch.tensor(sorted(stop_ids), dtype=idx.dtype, device=idx.device)
        stopped = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # b 1
        for _ in range(max_new_tokens):
            logits = self._next_logits(idx, cache, only_largest=temperature == 0.0)  # b v
            idx_next = sample_next(logits, temperature, top_k, top_p, epsilon, generator)  # b 1
            idx_next = torch.where(stopped, idx[:, -1:], idx_next)
            idx = torch.cat((idx, idx_next), dim=1)  # b s+1
            if on_token is not None:
                on_token(idx_next)
            if stop_ids:
                stopped |= torch.isin(idx_next, stops)
                if stopped.all():
                    break
        return idx


def sample_next(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    epsilon: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Choose the next token of each row. logits: b v -> b 1

    temperature 0 takes the most likely token and draws no random number. Otherwise a token is drawn from
    softmax(logits / temperature), after dropping the tokens outside the `top_k` most likely ones, those outside the
    smallest set whose probabilities reach `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751,
    section 3.1), and those less likely than `epsilon` (Hewitt et al. 2022, arXiv:2210.15191, section 4.1), in that
    order. The most likely token is never dropped. Raises `ValueError` for a value out of range.
    """
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if epsilon is not None and not 0.0 <= epsilon < 1.0:
        raise ValueError(f"epsilon={epsilon} must be from 0 to below 1")
    best = logits.argmax(dim=-1, keepdim=True)  # b 1
    largest = logits.gather(-1, best)  # b 1: NaN where any logit is
    if not torch.isfinite(largest).all():
        raise UserError("the model's logits are not finite: its weights are damaged, or the code computes them wrongly")
    if temperature == 0.0:
        return best
    # shifted by its maximum, so that no temperature, however small, overflows
    probs = ((logits.float() - largest.float()) / temperature).softmax(dim=-1)  # b v
    probs = probs.masked_fill(_dropped(probs, top_k, top_p, epsilon), 0.0)
    return torch.multinomial(probs, num_samples=1, generator=generator)  # b 1


def _dropped(probs: torch.Tensor, top_k: int | None, top_p: float | None, epsilon: float | None) -> torch.Tensor:
    """Which tokens are not to be drawn. probs: b v -> bool b v"""
    dropped = torch.zeros_like(probs, dtype=torch.bool)
    if top_k is not None:
        top_k = min(top_k, probs.shape[-1])
    if top_k is not None or top_p is not None:
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = order.argsort(dim=-1)  # b v: 0 for the most likely token
        if top_k is not None:
            dropped |= rank >= top_k
            sorted_probs = sorted_probs.clone()
            sorted_probs[:, top_k:] = 0.0
        if top_p is not None:
            sorted_probs = sorted_probs / sorted_probs.sum(-1, keepdim=True)
            mass_before = sorted_probs.cumsum(-1) - sorted_probs  # b v: what the more likely tokens hold together
            dropped |= (mass_before >= top_p).gather(-1, rank)
    if epsilon is not None:
        dropped |= probs < epsilon
    return dropped.scatter(-1, probs.argmax(-1, keepdim=True), False)


# --------------------------------------------------------------------------------------------------- loading

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # 8-bit ones mean nothing without their scales
ORIGINAL_NAMES = {  # how llama2.c and Meta name what the assignment spells out
    "attention.wq.": "attention.compute_query.",
    "attention.wk.": "attention.compute_key.",
    "attention.wv.": "attention.compute_value.",
    "attention.wo.": "attention.compute_output.",
}


def load_pretrained(path: str | os.PathLike, *, attention: str | None = None) -> Llama:
    """A Llama from a checkpoint `{'model': state_dict, 'model_args': {...}, ...}`, in float32 on the CPU.

    Names may be the assignment's or the original TinyLlamas', with or without the prefix `_orig_mod.` that
    `torch.compile` leaves. `attention` overrides what the checkpoint declares; one that declares nothing is
    bidirectional. Raises `UserError` if the file is missing, not a checkpoint, or of another shape: every missing,
    unexpected or misshapen key is named.
    """
    checkpoint = load_tensors(path)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise UserError(f"{path} is not a checkpoint: it has no state dict under the key 'model'")
    if "optimizer" in checkpoint and "history" in checkpoint:
        raise UserError(f"{path} is the resume point of a fine-tuning; --option finetune --resume goes on from it")
    if "model_config" in checkpoint:
        raise UserError(f"{path} is a fine-tuned classifier, not a pretrained model; training.load_best opens it")
    try:
        config = LlamaConfig.from_checkpoint(
            checkpoint.get("model_args"), **({} if attention is None else {"attention": attention})
        )
        state = canonical_state(checkpoint["model"])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    misfits = _misfits(state, config)
    if misfits:
        raise UserError(f"{path} does not fit its model_args: {some(misfits)}")
    # Drawing weights that are replaced at once looks wasteful. It moves the random generator exactly as the
    # assignment's code does, so that a seed means the same head and the same shuffling here as there.
    model = Llama(config)
    model.load_state_dict(state)
    if damaged := [name for name, tensor in model.named_parameters() if not _is_finite(tensor)]:
        raise UserError(f"{path} is damaged: not all numbers are finite in {some(damaged)}")
    return model.eval()


def canonical_state(state: dict) -> dict:
    """The state dict under this package's names; a tied matrix that is stored once is filled in.

    Raises `ValueError` where two names stand for the same tensor.
    """
    renamed, before = {}, {}
    for name, tensor in state.items():
        full = str(name)
        name = full.removeprefix("_orig_mod.")
        for original, ours in ORIGINAL_NAMES.items():
            name = name.replace(original, ours)
        if name in renamed:
            raise ValueError(f"{shorten(before[name])} and {shorten(full)} are names of the same tensor; keep one")
        renamed[name], before[name] = tensor, full
    for name, twin in (("output.weight", "tok_embeddings.weight"), ("tok_embeddings.weight", "output.weight")):
        if name not in renamed and twin in renamed:
            renamed[name] = renamed[twin]
    return renamed


def _expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the state dict of a Llama of this config."""
    dim, kv_dim, ffn_dim = config.dim, config.n_kv_heads * config.head_dim, config.hidden_dim
    layer = {
        "attention.compute_query": (dim, dim),
        "attention.compute_key": (kv_dim, dim),
        "attention.compute_value": (kv_dim, dim),
        "attention.compute_output": (dim, dim),
        "feed_forward.w1": (ffn_dim, dim),
        "feed_forward.w2": (dim, ffn_dim),
        "feed_forward.w3": (ffn_dim, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    shapes = {"tok_embeddings": (config.vocab_size, dim), "norm": (dim,), "output": (config.vocab_size, dim)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(config.n_layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _is_finite(tensor: torch.Tensor) -> bool:
    # their sum meets every NaN and infinity, and takes a tenth of the time; finite numbers can have an infinite one
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def _is_stored_in_full(tensor: torch.Tensor) -> bool:
    """False for a tensor that is sparse, has no data (device "meta"), or is a few numbers expanded to a huge shape."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _misfits(state: dict, config: LlamaConfig) -> list[str]:
    """What keeps `state` from filling a model of this config, found without allocating one."""
    if config.n_layers > len(state):  # keeps a damaged config from asking for a million layers
        return [f"n_layers={config.n_layers}, but there are only {len(state)} tensors"]
    expected = _expected_shapes(config)
    misfits = [f"missing {name}" for name in expected if name not in state]
    misfits += [f"unexpected {name}" for name in state if name not in expected]
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
            misfits.append(f"{name} is not a floating-point tensor of 16 bits or more")
        elif not _is_stored_in_full(tensor):
            misfits.append(f"{name} does not hold the numbers that its shape promises")
        elif name in expected and tuple(tensor.shape) != expected[name]:
            misfits.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
    if not misfits and not _are_equal(state["tok_embeddings.weight"], state["output.weight"]):
        misfits.append("tok_embeddings.weight and output.weight differ, but this model ties them")
    return misfits
