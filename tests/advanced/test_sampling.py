"""Choosing the next token: the rules beyond the assignment's, and callers that choose rows as well as tokens."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import choosing, random_llama

import engine.decoding
from engine.decoding import Sampling, continue_texts, penalize_repeats, sample_next, truncate
from utils import UserError

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])
LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])


def test_min_p_keeps_what_transformers_keeps():
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = 3.0 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for min_p in (0.0, 0.01, 0.1, 0.5, 1.0):
        theirs = warpers.MinPLogitsWarper(min_p)(None, logits).softmax(-1)
        kept = truncate(logits.softmax(-1), min_p=min_p)
        torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), theirs)
    assert 1 < (truncate(logits.softmax(-1), min_p=0.1) > 0).sum(-1).float().mean() < 10


@pytest.mark.parametrize("name, refused, taken", [
    ("temperature", -0.1, 0.0), ("temperature", math.inf, 1e30), ("top_k", 0, 1), ("top_p", 0.0, 1e-9),
    ("top_p", 1.1, 1.0), ("min_p", -0.1, 0.0), ("min_p", 1.1, 1.0), ("epsilon", -0.1, 0.0), ("epsilon", 1.0, 0.9),
    ("repetition_penalty", 0.0, 1e-9), ("repetition_penalty", math.inf, 1e30),
])  # fmt: skip
def test_the_ends_of_each_range(name: str, refused: float, taken: float):
    assert getattr(Sampling(**{name: taken}), name) == taken
    with pytest.raises(ValueError, match=f"{name}={refused}"):
        Sampling(**{name: refused})


def test_epsilon_after_other_limits_keeps_what_transformers_keeps():
    """Each limit is compared with the probabilities among the tokens that the limits before it have left."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = 2.0 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    for top_k, top_p, min_p in ((3, None, None), (None, 0.5, None), (None, None, 0.2), (10, 0.9, 0.05)):
        theirs = logits
        for value, warper in ((top_k, "TopK"), (top_p, "TopP"), (min_p, "MinP"), (0.05, "Epsilon")):
            if value is not None:
                theirs = getattr(warpers, f"{warper}LogitsWarper")(value)(None, theirs)
        kept = truncate(logits.softmax(-1), top_k, top_p, 0.05, min_p)
        assert torch.equal(kept > 0, theirs.isfinite())


def slow_penalty(logits: list[float], text: list[int], penalty: float) -> list[float]:
    penalized = {token: logits[token] / penalty if logits[token] > 0 else logits[token] * penalty for token in text}
    return [penalized.get(token, logit) for token, logit in enumerate(logits)]


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.5, 5.0])
def test_tokens_of_the_text_are_penalized_once(penalty: float):
    draw = torch.Generator().manual_seed(0)
    logits, idx = torch.randn(6, 30, generator=draw), torch.randint(0, 30, (6, 25), generator=draw)
    before = logits.clone()
    penalized = penalize_repeats(logits, idx, penalty)
    for row in range(6):
        expected = slow_penalty(logits[row].tolist(), idx[row].tolist(), penalty)
        torch.testing.assert_close(penalized[row], torch.tensor(expected))
    assert torch.equal(logits, before) and torch.equal(penalized, logits) == (penalty == 1.0)


def test_a_repetition_penalty_is_that_of_transformers():
    processors = pytest.importorskip("transformers.generation.logits_process")
    draw = torch.Generator().manual_seed(0)
    logits, idx = torch.randn(6, 30, generator=draw), torch.randint(0, 30, (6, 25), generator=draw)
    for penalty in (0.7, 1.0, 1.2, 9.0):
        theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(idx, logits.clone())
        torch.testing.assert_close(penalize_repeats(logits, idx, penalty), theirs)


def test_a_repetition_penalty_comes_before_temperature():
    """At temperature 1 it leaves .294 .221 .081 .029 .368 ..., and at temperature 0 another token."""
    model, idx = random_llama(), torch.tensor([[0, 3, 0]])

    def draw(rows: int, temperature: float, **settings) -> torch.Tensor:
        how = dict(choose=choosing(temperature, **settings), next_logits=lambda idx, cache: LOGITS.expand(rows, -1))
        return continue_texts(model, idx.expand(rows, -1), 1, **how)[:, -1]

    assert draw(1, 0.0, repetition_penalty=1.6).tolist() == [4]
    assert draw(1, 0.0, repetition_penalty=1.2).tolist() == [0]
    torch.manual_seed(0)
    drawn = draw(20_000, 2.0, repetition_penalty=1.6, min_p=0.3)
    probs = torch.tensor([[2.0 / 1.6, 1.0, 0.0, -1.0 * 1.6, 1.5]]).div(2.0).softmax(-1)
    expected = truncate(probs, min_p=0.3)[0]
    assert (expected > 0).tolist() == [True, True, True, False, True]
    measured = drawn.bincount(minlength=5) / 20_000
    torch.testing.assert_close(measured, expected / expected.sum(), atol=0.02, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.9, "min_p": 0.01}, {"repetition_penalty": 1.3}])
def test_whatever_is_dropped_before_the_token_is_chosen_by_sample_next(monkeypatch: pytest.MonkeyPatch, settings: dict):
    """A change of `sample_next` counts with every flag."""
    second = lambda logits, temperature: logits.topk(2).indices[:, 1:]  # noqa: E731
    monkeypatch.setattr(engine.decoding, "sample_next", second)
    assert choosing(0.7, **settings)(LOGITS, torch.tensor([[3]])).tolist() == [[4]]


def test_a_penalty_however_large_leaves_a_token_to_choose():
    idx = torch.arange(5)[None]
    for penalty in (1e-300, 1e300):
        for logits in (LOGITS, -LOGITS, LOGITS.bfloat16()):
            assert 0 <= sample_next(penalize_repeats(logits, idx, penalty)).item() < 5
    for damaged in (math.nan, math.inf):
        logits = LOGITS.clone()
        logits[0, 1] = damaged
        with pytest.raises(UserError, match="not finite"):
            penalize_repeats(logits, idx, 1.3)


def test_a_text_is_generated_with_a_repetition_penalty_row_by_row():
    model, idx = random_llama(gain=8.0, attention="causal"), TOKENS[:2]
    together = continue_texts(model, idx, 20, 0.0, choose=choosing(0.0, repetition_penalty=1.5))
    assert not torch.equal(together, continue_texts(model, idx, 20, 0.0))
    for row, ids in enumerate(idx.tolist()):
        for _ in range(20):
            logits = slow_penalty(model(torch.tensor([ids]))[0][0, -1].tolist(), ids, 1.5)
            ids.append(max(range(300), key=logits.__getitem__))
        assert together[row].tolist() == ids


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("attention", "max_seq_len"), [("causal", 64), ("causal", 9), ("bidirectional", 64)])
def test_rows_are_continued_as_the_caller_says(attention: str, max_seq_len: int, use_cache: bool):
    """Two texts become four; then at every step rows change places, one goes on twice, and one is left."""
    model = random_llama(gain=8.0, attention=attention, max_seq_len=max_seq_len)
    texts, seen = [TOKENS[0, :5].tolist(), TOKENS[1, :5].tolist()], []

    def choose(logits: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert idx.tolist() == texts
        seen.append((idx, logits))
        rows = [0, 1, 0, 1] if len(idx) == 2 else [3, 0, 0, 1]
        tokens = logits[rows].topk(4).indices[range(4), range(4)].tolist()
        texts[:] = [[*texts[row], token] for row, token in zip(rows, tokens, strict=True)]
        return torch.tensor(tokens)[:, None], torch.tensor(rows)

    assert continue_texts(model, TOKENS[:, :5], 12, choose=choose, use_cache=use_cache).tolist() == texts
    assert [len(idx) for idx, _ in seen] == [2] + [4] * 11
    for idx, logits in seen:
        with torch.inference_mode():
            expected = model(idx[:, -max_seq_len:])[0][:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_stopped_stay_so_wherever_they_go():
    steps = []

    def choose(logits: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append(idx)
        second = 9 if len(steps) == 2 else 40 + len(steps)
        return torch.tensor([[20 + len(steps)], [second]]), torch.tensor([1, 0])

    text = continue_texts(random_llama(attention="causal"), TOKENS, 5, choose=choose, stop_ids=[9])
    assert text[:, 7:].tolist() == [[21, 9, 9, 9, 9], [41, 22, 43, 24, 45]]
