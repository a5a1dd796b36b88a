"""Choosing tokens and continuing texts: engine/decoding.py, and what they have of llama.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import random_llama

from engine import decoding
from engine.context import KVCache
from engine.decoding import Decoder, Sampling, chooser, continue_texts, logits_after, sample_next, why_own_generate
from engine.equivalence import notice
from llama import Llama

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])


def frequencies(logits: torch.Tensor, draws: int = 20_000, **settings) -> torch.Tensor:
    torch.manual_seed(0)
    text = torch.zeros(draws, 1, dtype=torch.int64)
    drawn = chooser(Sampling(**settings))(logits.expand(draws, -1), text)
    return drawn.flatten().bincount(minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])  # probabilities .464 .171 .063 .023 .281


def test_a_text_is_drawn_at_temperature_1_where_nothing_else_is_asked_for():
    model, idx = random_llama(attention="causal"), torch.tensor([[1, 5, 9]])
    texts = []
    for asked in ({}, {"temperature": 1.0}, {"temperature": 2.0}):
        torch.manual_seed(3)
        texts.append(continue_texts(model, idx, 20, **asked))
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
        continue_texts(random_llama(), torch.tensor([[1, 5]]), 2, temperature)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 5e-324}, {"min_p": 5e-324}])
@pytest.mark.parametrize("temperature", [1e-38, 1e-50, 5e-324])
def test_the_smallest_temperatures_draw_the_likeliest(temperature: float, limits: dict):
    assert chooser(Sampling(temperature, **limits))(LOGITS, torch.tensor([[1]])).tolist() == [[0]]


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


def test_a_greedy_text_is_the_argmax_of_each_forward_pass():
    for attention in ("bidirectional", "causal"):
        model = random_llama(attention=attention)
        ids = TOKENS
        for _ in range(12):
            ids = torch.cat((ids, model(ids)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(continue_texts(model, TOKENS, 12, temperature=0.0), ids)


@torch.no_grad()
def test_a_text_is_cropped_to_max_seq_len():
    model = random_llama(max_seq_len=8)
    ids = continue_texts(model, TOKENS[:1], 20, temperature=0.0)
    assert ids.shape == (1, 27) and torch.equal(ids[:, :7], TOKENS[:1])
    for end in range(8, 27):
        assert ids[0, end] == model(ids[:, max(0, end - 8) : end])[0].argmax()


def test_a_token_is_chosen_and_logits_are_computed_as_the_caller_says():
    model, seen = random_llama(attention="causal"), []

    def choose(logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        seen.append((logits.shape, idx.shape[1]))
        return logits.argmin(-1, keepdim=True)

    def negative(idx: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        return -logits_after(model, idx, cache)

    least = continue_texts(model, TOKENS, 9, choose=choose)
    assert seen == [((2, 300), length) for length in range(7, 16)]
    assert torch.equal(continue_texts(model, TOKENS, 9, temperature=0.0, next_logits=negative), least)
    assert not torch.equal(continue_texts(model, TOKENS, 9, temperature=0.0), least)


def test_generation_stops_at_stop_ids_row_by_row():
    model = random_llama()
    free = continue_texts(model, TOKENS, 30, temperature=0.0)
    stop = free[0, 12].item()  # row 0 stops here at the latest; row 1 goes on unless it meets the same token
    stopped = continue_texts(model, TOKENS, 30, temperature=0.0, stop_ids=[stop])
    for row in range(2):
        new = free[row, 7:].tolist()
        first = new.index(stop) if stop in new else len(new)
        length = stopped.shape[1] - 7
        expected = (new[: first + 1] + [stop] * length)[:length] if stop in new else new[:length]
        # a bidirectional model sees the repeated stop ids of its own row only, so the other row is unaffected
        assert stopped[row, 7:].tolist() == expected
    assert continue_texts(model, TOKENS[:1], 30, temperature=0.0, stop_ids=[stop]).shape[1] < 37


# ------------------------------------------------------------------------------------- the model's own `generate`


@pytest.fixture(autouse=True)
def notes_again() -> None:
    """A note is given once in a process; each test reads its own."""
    notice.cache_clear()


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_text_is_that_of_llama_generate(attention: str, temperature: float):
    """Also beyond max_seq_len, and of drawn tokens too: both draw from the same numbers."""
    model, texts = random_llama(attention=attention, max_seq_len=12), []
    for generate in (model.generate, Decoder(model).generate, lambda *asked: continue_texts(model, *asked)):
        torch.manual_seed(1)
        texts.append(generate(TOKENS, 20, temperature))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]) and why_own_generate(model) is None


def penalized(plain: Callable) -> Callable:
    """What a student may write: tokens 0 to 149 are never chosen."""

    def generate(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.max_seq_len :])[0][:, -1]
            logits[:, :150] = -math.inf
            probs = F.softmax(logits / max(temperature, 1e-6), dim=-1)
            idx_next = torch.multinomial(probs, 1) if temperature else logits.argmax(-1, keepdim=True)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx

    return torch.inference_mode()(generate)


def a_little_warmer(plain: Callable) -> Callable:
    return lambda self, idx, new, temperature=1.0: plain(self, idx, new, 1.01 * temperature)


def without_one_token(plain: Callable) -> Callable:
    """The end of a text, say, is never chosen."""

    def generate(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.max_seq_len :])[0][:, -1].index_fill(-1, torch.tensor([2]), -math.inf)
            if temperature == 0.0:
                idx_next = logits.argmax(-1, keepdim=True)
            else:
                idx_next = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx

    return torch.inference_mode()(generate)


def greedy_after_20_tokens(plain: Callable) -> Callable:
    def generate(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        for number in range(max_new_tokens):
            idx = plain(self, idx, 1, temperature if number < 20 else 0.0)
        return idx

    return generate


def top_two_at_1(plain: Callable) -> Callable:
    """As it was, but at one temperature."""

    def generate(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        if temperature != 1.0:
            return plain(self, idx, max_new_tokens, temperature)
        return continue_texts(self, idx, max_new_tokens, choose=chooser(Sampling(1.0, top_k=2)))

    return generate


EDITS = [penalized, a_little_warmer, without_one_token, greedy_after_20_tokens, top_two_at_1]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_generate_is_noticed_before_and_after_the_first_text(monkeypatch: pytest.MonkeyPatch, edit: Callable):
    model, plain = random_llama(attention="causal"), Llama.generate
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Llama, "generate", edit(plain))
            assert why_own_generate(model)
        assert why_own_generate(model) is None


def test_a_model_s_own_generate_is_noticed():
    model = random_llama()
    model.generate = lambda idx, *others: idx
    assert why_own_generate(model) == "it has a generate of its own"
    model = random_llama()
    model.__class__ = type("Other", (Llama,), {"generate": lambda self, idx, *others: idx})
    assert why_own_generate(model) == "it has a generate of its own"


def test_a_generate_that_computes_what_it_did_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    def generate(self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        if temperature == 0.0:
            for _ in range(max_new_tokens):
                logits = self(idx[:, -self.config.max_seq_len :])[0]
                idx = torch.cat((idx, logits[:, -1:].max(-1).indices), dim=1)
            return idx
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.max_seq_len :])[0][:, -1]
            idx = torch.cat((idx, torch.multinomial((logits / temperature).softmax(-1), 1)), dim=1)
        return idx

    monkeypatch.setattr(Llama, "generate", torch.inference_mode()(generate))
    assert decoding.generate_check().holds() and capfd.readouterr().err == ""
