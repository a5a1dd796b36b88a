from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import random_llama
from torch import nn

from base_llama import KVCache
from config import LlamaConfig
from engine.sampling import Sampling, chooser
from llama import FeedForward, Llama, RMSNorm, sample_next

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
        before, after = model.hidden_states(TOKENS)[:, :-2], model.hidden_states(changed)[:, :-2]
        assert torch.allclose(before, after, atol=1e-6) is unchanged


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_a_hidden_state_at_one_position_is_that_of_the_whole_pass(attention: str, n_kv_heads: int):
    model = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    whole = model.hidden_states(TOKENS)  # b s D
    for at in ([6, 6], [0, 3], [5, 0]):
        expected = whole[torch.arange(2), at]
        torch.testing.assert_close(model.hidden_state_at(TOKENS, torch.tensor(at)), expected, atol=1e-5, rtol=1e-5)


def test_dtype_is_that_of_the_weights():
    assert random_llama().dtype == torch.float32
    assert random_llama().bfloat16().dtype == torch.bfloat16


# ------------------------------------------------------------------------------------- sampling and generation


def frequencies(logits: torch.Tensor, draws: int = 20_000, **settings) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    text = torch.zeros(draws, 1, dtype=torch.int64)
    drawn = chooser(Sampling(**settings), generator)(logits.expand(draws, -1), text)
    return drawn.flatten().bincount(minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])  # probabilities .464 .171 .063 .023 .281


def test_a_text_is_drawn_at_temperature_1_where_nothing_else_is_asked_for():
    model, idx = random_llama(attention="causal"), torch.tensor([[1, 5, 9]])
    texts = [
        model.generate(idx, 20, generator=torch.Generator().manual_seed(3), **asked)
        for asked in ({}, {"temperature": 1.0}, {"temperature": 2.0})
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0, 4]),
        ({"top_p": 0.75}, [0, 1, 4]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"epsilon": 0.05}, [0, 1, 2, 4]),
        ({"epsilon": 0.99}, [0]),
        ({"top_k": 4, "top_p": 0.9}, [0, 1, 4]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # which holds .62 of what the two hold together, and .46 of all
        ({"top_k": 1, "epsilon": 0.2}, [0]),
        ({"min_p": 0.0}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.1}, [0, 1, 2, 4]),  # of .464
        ({"min_p": 0.5}, [0, 4]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.1, "temperature": 3.0}, [0, 1, 2, 3, 4]),  # .322 .231 .165 .118 .272 are compared
        ({"min_p": 0.5, "temperature": 3.0}, [0, 1, 2, 4]),
        ({"min_p": 0.1, "top_k": 3}, [0, 1, 4]),
        ({"min_p": 0.3, "top_p": 0.9, "epsilon": 0.2}, [0, 4]),
        ({"temperature": 1e-30}, [0]),
    ],
)
def test_samples_follow_the_truncated_softmax(settings: dict, kept: list[int]):
    expected = (LOGITS / settings.get("temperature", 1.0)).double().softmax(-1)[0]
    dropped = torch.ones(5, dtype=torch.bool)
    dropped[kept] = False
    expected[dropped] = 0.0
    expected /= expected.sum()
    measured = frequencies(LOGITS, **settings)
    assert (measured[dropped] == 0.0).all()
    torch.testing.assert_close(measured.double(), expected, atol=0.02, rtol=0)


def test_epsilon_is_compared_after_temperature():
    flat = frequencies(LOGITS, temperature=10.0, epsilon=0.15)  # .22 .20 .18 .16 .21: nothing is dropped
    assert (flat > 0).all()


def test_a_nucleus_ends_where_it_holds_what_is_asked():
    assert (frequencies(torch.zeros(1, 4), top_p=0.5) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature", [-0.1, float("inf"), float("nan")])
def test_a_temperature_that_cannot_be_is_refused(temperature: float):
    with pytest.raises(ValueError, match="temperature=.* must be at least 0 and finite"):
        sample_next(LOGITS, temperature)
    with pytest.raises(ValueError, match="temperature"):
        random_llama().generate(torch.tensor([[1, 5]]), 2, temperature)


def test_temperature_zero_is_argmax_and_draws_no_random_number():
    state = torch.get_rng_state()
    assert sample_next(LOGITS, temperature=0.0).tolist() == [[0]]
    assert chooser(Sampling(temperature=0.0, top_k=3))(LOGITS, torch.tensor([[1]])).tolist() == [[0]]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("settings", [
    {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": 0}, {"top_p": 0.0},
    {"top_p": 1.1}, {"epsilon": 1.0}, {"epsilon": -0.1}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan},
    {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0}, {"repetition_penalty": math.inf},
    {"repetition_penalty": math.nan},
])  # fmt: skip
def test_impossible_settings_are_refused(settings: dict):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


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


def test_one_seed_gives_one_text_and_a_generator_leaves_the_global_state_alone():
    model = random_llama()
    state = torch.get_rng_state()
    one, two, other = (model.generate(TOKENS, 20, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_embed_and_encode_are_what_a_pass_is_made_of():
    for attention in ("bidirectional", "causal"):
        model, at = random_llama(attention=attention), torch.tensor([2, 5])
        h = model.embed(TOKENS)
        assert torch.equal(model.encode(h), model.hidden_states(TOKENS))
        assert torch.equal(model.encode(h, at=at)[:, 0], model.hidden_state_at(TOKENS, at))
        *_, last = model.layers
        assert torch.equal(model.norm(last(model.layers[0](h))), model.encode(h))  # layers alone read whole texts


def test_a_token_is_chosen_and_logits_are_computed_as_the_caller_says():
    model, seen = random_llama(attention="causal"), []

    def choose(logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        seen.append((logits.shape, idx.shape[1]))
        return logits.argmin(-1, keepdim=True)

    def negative(idx: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        return -model.next_logits(idx, cache)

    least = model.generate(TOKENS, 9, choose=choose)
    assert seen == [((2, 300), length) for length in range(7, 16)]
    assert torch.equal(model.generate(TOKENS, 9, temperature=0.0, next_logits=negative), least)
    assert not torch.equal(model.generate(TOKENS, 9, temperature=0.0), least)


def test_generation_stops_at_stop_ids_row_by_row():
    model = random_llama()
    free = model.generate(TOKENS, 30, temperature=0.0)
    stop = free[0, 12].item()  # row 0 stops here at the latest; row 1 goes on unless it meets the same token
    stopped = model.generate(TOKENS, 30, temperature=0.0, stop_ids=[stop])
    for row in range(2):
        new = free[row, 7:].tolist()
        first = new.index(stop) if stop in new else len(new)
        length = stopped.shape[1] - 7
        expected = (new[: first + 1] + [stop] * length)[:length] if stop in new else new[:length]
        # a bidirectional model sees the repeated stop ids of its own row only, so the other row is unaffected
        assert stopped[row, 7:].tolist() == expected
    assert model.generate(TOKENS[:1], 30, temperature=0.0, stop_ids=[stop]).shape[1] < 37
