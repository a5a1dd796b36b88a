from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import random_llama
from torch import nn

from config import LlamaConfig
from llama import Attention, FeedForward, Llama, RMSNorm

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])


# ----------------------------------------------------------------- a slow and obvious Llama, one number at a time


def slow_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / math.sqrt(np.mean(row**2) + eps) * weight for row in x])


def slow_rotate(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    turned = vector.copy()
    for i in range(0, len(vector), 2):
        angle = position * theta ** (-i / len(vector))
        turned[i] = vector[i] * math.cos(angle) - vector[i + 1] * math.sin(angle)
        turned[i + 1] = vector[i] * math.sin(angle) + vector[i + 1] * math.cos(angle)
    return turned


def slow_attention(x: np.ndarray, w: dict[str, np.ndarray], config: LlamaConfig) -> np.ndarray:
    """x: s D -> s D, every query position and head in a loop of its own."""
    d, output = config.head_dim, np.zeros_like(x)
    for head in range(config.n_heads):
        kv_head = head // (config.n_heads // config.n_kv_heads)
        query = x @ w["compute_query"][head * d : (head + 1) * d].T
        key = x @ w["compute_key"][kv_head * d : (kv_head + 1) * d].T
        value = x @ w["compute_value"][kv_head * d : (kv_head + 1) * d].T
        for s in range(len(x)):
            seen = range(s + 1) if config.attention == "causal" else range(len(x))
            turned = slow_rotate(query[s], s, config.rope_theta)
            scores = np.array([turned @ slow_rotate(key[t], t, config.rope_theta) / math.sqrt(d) for t in seen])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            output[s, head * d : (head + 1) * d] = sum(p * value[t] for p, t in zip(weights, seen, strict=True))
    return output @ w["compute_output"].T


def slow_feed_forward(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    gate = x @ w["w1"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w["w3"].T)) @ w["w2"].T


def slow_llama(model: Llama, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits s v and hidden states s D of one sequence, in double precision."""
    state = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    h = state["tok_embeddings.weight"][tokens]
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        w = {key.split(".")[-2]: value for key, value in state.items() if key.startswith(prefix)}
        h = h + slow_attention(slow_rms_norm(h, w["attention_norm"], config.layer_norm_eps), w, config)
        h = h + slow_feed_forward(slow_rms_norm(h, w["ffn_norm"], config.layer_norm_eps), w)
    h = slow_rms_norm(h, state["norm.weight"], config.layer_norm_eps)
    return h @ state["output.weight"].T, h


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 2), (4, 1), (8, 4), (1, 1)])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_equals_the_slow_implementation(attention: str, n_heads: int, n_kv_heads: int, length: int):
    model = random_llama(n_heads=n_heads, n_kv_heads=n_kv_heads, attention=attention, seed=length)
    tokens = torch.randint(0, 300, (2, length))
    logits, hidden_states = model(tokens, targets=tokens)
    for row in range(2):
        slow_logits, slow_hidden = slow_llama(model, tokens[row].tolist())
        np.testing.assert_allclose(logits[row].detach().numpy(), slow_logits, atol=1e-4)
        np.testing.assert_allclose(hidden_states[row].detach().numpy(), slow_hidden, atol=1e-4)


# ------------------------------------------------------------------------------------------------- the pieces


def test_rms_norm_is_its_formula_and_casts_back():
    norm = RMSNorm(6, eps=1e-3)
    norm.weight.data = torch.arange(6.0)
    x = torch.randn(2, 3, 6)
    expected = x / (x.pow(2).sum(-1, keepdim=True) / 6 + 1e-3).sqrt() * torch.arange(6.0)
    torch.testing.assert_close(norm(x), expected)
    half = RMSNorm(6).half()
    large = torch.full((1, 6), 6e4, dtype=torch.float16)  # its square overflows float16
    assert half(large).dtype == torch.float16
    torch.testing.assert_close(half(large), torch.ones(1, 6, dtype=torch.float16))


@torch.no_grad()
def test_each_dropout_of_the_config_acts_where_it_stands_and_in_training_only():
    model = random_llama(dropout=0.5)
    expected = model(TOKENS)[0]
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [dropout.p for dropout in dropouts] == [0.5] * (1 + 3 * model.config.n_layers)
    for active in dropouts:
        for dropout in dropouts:
            dropout.p = 0.5 if dropout is active else 0.0
        assert not torch.equal(model.train()(TOKENS)[0], expected)
        assert torch.equal(model.eval()(TOKENS)[0], expected)


def test_feed_forward_takes_or_derives_its_width():
    assert FeedForward(64, None, 4, 0.0).w1.weight.shape == (172, 64)
    assert FeedForward(64, 100, 4, 0.0).w2.weight.shape == (64, 100)


# -------------------------------------------------------------------------------------------------- the model


def test_embeddings_are_tied_and_forward_reads_the_last_position():
    model = random_llama()
    assert model.tok_embeddings.weight is model.output.weight
    last, hidden_states = model(TOKENS)
    every, same = model(TOKENS, targets=TOKENS)
    assert last.shape == (2, 1, 300) and every.shape == (2, 7, 300) and hidden_states.shape == (2, 7, 32)
    torch.testing.assert_close(last[:, 0], every[:, -1])
    assert torch.equal(hidden_states, same)


def test_fresh_weights_are_narrower_where_they_write_into_the_residual_stream():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=500))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            narrow = name.endswith(("compute_output.weight", "w2.weight"))
            expected = 0.02 / math.sqrt(8) if narrow else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_a_causal_model_does_not_see_what_follows_and_the_reference_does():
    changed = TOKENS.clone()
    changed[:, -2:] = 99
    for attention, unchanged in (("causal", True), ("bidirectional", False)):
        model = random_llama(attention=attention)
        before, after = model(TOKENS)[1][:, :-2], model(changed)[1][:, :-2]
        assert torch.allclose(before, after, atol=1e-6) is unchanged


def test_dtype_is_that_of_the_weights():
    assert random_llama().dtype == torch.float32
    assert random_llama().bfloat16().dtype == torch.bfloat16


@torch.no_grad()
def test_layers_read_whole_texts_one_after_another():
    for attention in ("bidirectional", "causal"):
        model = random_llama(attention=attention)
        h = model.tok_embeddings(TOKENS)
        for layer in model.layers:
            h = layer(h)
        assert torch.equal(model.norm(h), model(TOKENS)[1])


def test_a_token_of_minus_one_is_padding_that_reads_the_first_vector():
    model, padded = random_llama(), TOKENS.clone()
    padded[1, 4:] = -1
    assert torch.equal(model(padded)[1], model(padded.clamp(min=0))[1])


def test_scores_without_a_mask_see_every_key_and_with_one_what_it_shows():
    for attention in ("bidirectional", "causal"):
        layer = Attention(LlamaConfig.from_preset("tiny", attention=attention))
        query, key, value = torch.randn(3, 2, 4, 6, 8)
        mask = torch.rand(6, 6) < 0.5
        mask[:, 0] = True
        for given in ((), (None,), (mask,)):
            seen = given[0] if given and given[0] is not None else torch.ones(6, 6, dtype=torch.bool)
            weights = (query @ key.mT / math.sqrt(8)).exp() * seen
            expected = weights / weights.sum(-1, keepdim=True) @ value
            torch.testing.assert_close(layer.compute_query_key_value_scores(query, key, value, *given), expected)


# -------------------------------------------------------------------------------------------------- generation

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


class Always(Llama):
    """Gives these logits after every text, and others after each of its beginnings."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = LOGITS.expand(*tokens.shape, -1)
        logits = torch.cat((-logits[:, :-1], logits[:, -1:]), dim=1)
        return logits, logits


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 3.0}])
def test_text_is_drawn_from_the_softmax_of_logits_over_temperature(asked: dict):
    torch.manual_seed(0)
    model, draws = Always(LlamaConfig.from_preset("tiny")), 20_000
    text = model.generate(torch.zeros(draws, 2, dtype=torch.int64), 1, **asked)
    measured = text[:, -1].bincount(minlength=5) / draws
    expected = (LOGITS / asked.get("temperature", 1.0)).exp()
    torch.testing.assert_close(measured, expected / expected.sum(), atol=0.02, rtol=0)


def test_temperature_zero_draws_no_random_number_and_one_seed_gives_one_text():
    model, state = random_llama(), torch.get_rng_state()
    model.generate(TOKENS, 5, temperature=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(model.generate(TOKENS, 20))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_greedy_generation_is_the_argmax_of_each_forward_pass():
    for attention in ("bidirectional", "causal"):
        model = random_llama(attention=attention)
        ids = TOKENS
        for _ in range(12):
            ids = torch.cat((ids, model(ids)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(TOKENS, 12, temperature=0.0), ids)


@torch.no_grad()
def test_generation_crops_to_max_seq_len():
    model = random_llama(max_seq_len=8)
    ids = model.generate(TOKENS[:1], 20, temperature=0.0)
    assert ids.shape == (1, 27) and torch.equal(ids[:, :7], TOKENS[:1])
    for end in range(8, 27):
        assert ids[0, end] == model(ids[:, max(0, end - 8) : end])[0].argmax()
