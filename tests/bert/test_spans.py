"""Questions and paragraphs as windows, and which span of them is the answer."""

from __future__ import annotations

import string

import pytest
import torch
from error_helpers import refused

from bert.spans import LONGEST_ANSWER, SpanData, Spans, Window, best_span, windows_of
from bert.squad import Answer, Question
from bert.wordpiece import SPECIAL, WordPiece
from engine.processes import SINGLE_PROCESS

WORDS = [f"{first}{second}" for first in string.ascii_lowercase for second in string.ascii_lowercase]
TOKENIZER = WordPiece([*SPECIAL, *WORDS, "?"])


def question_of(size: int, at: int | None = 0, words: int = 1, asked: str = "zz zy ?") -> Question:
    """A paragraph of so many different words, and an answer of some of them."""
    context = " ".join(WORDS[:size])
    if at is None:
        return Question("q", asked, context, ())
    answer = " ".join(WORDS[at : at + words])
    return Question("q", asked, context, (Answer(answer, context.index(answer)),))


def answer_in(window: Window) -> list[str]:
    return [TOKENIZER.pieces[id] for id in window.ids[window.start : window.end + 1]]


def test_what_fits_is_one_window_and_the_answer_stands_where_it_should():
    question = question_of(10, at=4, words=3)
    (window,) = windows_of(7, question, TOKENIZER, 40, 16)
    assert window.question == 7 and window.first == 5 and all(window.is_central)
    pieces = [TOKENIZER.pieces[id] for id in window.ids]
    assert pieces == ["[CLS]", "zz", "zy", "?", "[SEP]", *WORDS[:10], "[SEP]"]
    assert pieces[window.start : window.end + 1] == WORDS[4:7]
    assert [question.context[start:end] for start, end in window.offsets] == WORDS[:10]


@pytest.mark.parametrize("stride", [3, 5, 9, 100])
@pytest.mark.parametrize("size", [1, 20, 21, 57])
def test_windows_overlap_cover_everything_and_hold_the_answer_or_point_to_cls(size: int, stride: int):
    question = question_of(size, at=size // 2, words=min(2, size - size // 2))
    windows = [*windows_of(0, question, TOKENIZER, 20, stride)]  # 14 tokens of the paragraph each
    shown = [[question.context[start:end] for start, end in window.offsets] for window in windows]
    assert all(len(window.ids) <= 20 and len(words) <= 14 for window, words in zip(windows, shown, strict=True))
    assert {word for words in shown for word in words} == set(WORDS[:size])
    for earlier, later in zip(shown, shown[1:], strict=False):
        assert later[0] == WORDS[WORDS.index(earlier[0]) + min(stride, 14)]
    pairs = [pair for words, w in zip(shown, windows, strict=True) for pair in zip(words, w.is_central, strict=True)]
    central = [word for word, is_central in pairs if is_central]
    assert sorted(central) == sorted(WORDS[:size])  # each word in one window
    answer = question.answers[0].text.split()
    for window, words in zip(windows, shown, strict=True):
        if set(answer) <= {*words}:
            assert answer_in(window) == answer
        else:
            assert (window.start, window.end) == (0, 0)


def test_a_token_is_taken_from_the_window_that_shows_most_around_it():
    windows = [*windows_of(0, question_of(24), TOKENIZER, 20, 10)]
    assert len(windows) == 2 and windows[0].is_central == [True] * 12 + [False] * 2
    assert windows[1].is_central == [False] * 2 + [True] * 12
    equal = [*windows_of(0, question_of(15), TOKENIZER, 20, 2)]  # 14 and 13 tokens: the larger window has the middle
    assert [sum(window.is_central) for window in equal] == [8, 7]


def test_an_answer_of_parts_of_tokens_is_all_of_these_tokens():
    question = Question("q", "zz", "aa ab ac", (Answer("b a", 4),))
    (window,) = windows_of(0, question, TOKENIZER, 20, 9)
    assert answer_in(window) == ["ab", "ac"]
    several = question._replace(answers=(Answer("ac", None), *question.answers))  # the first one is misplaced
    assert [*windows_of(0, several, TOKENIZER, 20, 9)] == [window]


def test_no_answer_is_cls_and_a_long_question_is_cut():
    (window,) = windows_of(0, question_of(5, at=None), TOKENIZER, 20, 9)
    assert (window.start, window.end) == (0, 0)
    long = question_of(30, asked=" ".join(WORDS[100:160]))
    windows = [*windows_of(0, long, TOKENIZER, 20, 9)]
    assert all(window.first == 10 and len(window.ids) <= 20 for window in windows)
    refused("no room for a question", SpanData, [long], TOKENIZER, 7, 3)
    refused("a stride of 0", SpanData, [long], TOKENIZER, 20, 0)


def test_a_batch_is_padded():
    data = SpanData([question_of(10, 3), question_of(5, 1)], TOKENIZER, 40, 16)
    (batch,) = data.loader(4)
    assert batch["token_ids"].shape == batch["segment_ids"].shape == (2, 16) and batch["indices"] == [0, 1]
    assert batch["segment_ids"].tolist() == [[0] * 5 + [1] * 11, [0] * 5 + [1] * 6 + [0] * 5]
    assert batch["token_ids"][1, 11:].tolist() == [TOKENIZER.pad_id] * 5
    assert batch["starts"].tolist() == [8, 6] and batch["ends"].tolist() == [8, 6]


# ------------------------------------------------------------------------------------------------ predictions


def slow_best(starts: torch.Tensor, ends: torch.Tensor, window) -> tuple[float, int, int]:
    spans = {}
    for start in range(len(window.offsets)):
        for end in range(start, min(start + LONGEST_ANSWER, len(window.offsets))):
            if window.is_central[start]:
                score = starts[window.first + start] + ends[window.first + end] - starts[0] - ends[0]
                spans[start, end] = score.item()
    best = max(spans, key=spans.get)
    return spans[best], *best


def test_the_best_span_is_that_of_all_pairs():
    torch.manual_seed(0)
    for size in (1, 12, 60):
        for window in windows_of(0, question_of(size), TOKENIZER, 80 if size == 60 else 20, 7):
            for _ in range(20):
                starts, ends = torch.randn(2, len(window.ids), dtype=torch.float64).log_softmax(-1)
                margin, start, end = best_span(starts, ends, window)
                expected = slow_best(starts, ends, window)
                assert (start, end) == expected[1:] and margin == pytest.approx(expected[0])


def outputs_for(data: SpanData, batch: dict, logits: dict[int, tuple[int, int, float]]) -> torch.Tensor:
    """Log-probabilities b 2 s that favour a span by so much. logits: start, end, and that, for each window."""
    scores = torch.zeros(len(batch["indices"]), 2, batch["token_ids"].shape[1])
    for row, index in enumerate(batch["indices"]):
        start, end, value = logits[index]
        scores[row, 0, start] += value
        scores[row, 1, end] += value
    return scores.log_softmax(-1)


def test_the_surest_window_answers_and_cls_does_where_there_may_be_no_answer():
    data = SpanData([question_of(24, 2), question_of(4, None)._replace(id="r")], TOKENIZER, 20, 10)
    assert len(data) == 3
    (batch,) = data.loader(8)
    first = data.windows[0].first
    logits = {0: (first + 2, first + 3, 5.0), 1: (first + 5, first + 5, 3.0), 2: (0, 0, 4.0)}
    for may_be_unanswered, answers in ((True, {"q": "ac ad", "r": ""}), (False, {"q": "ac ad"})):
        evaluation = Spans(may_be_unanswered).evaluation(data)
        evaluation.add(outputs_for(data, batch, logits), batch)
        evaluation.finish(SINGLE_PROCESS)
        assert answers.items() <= evaluation.predictions.items()
        if may_be_unanswered:
            assert evaluation.scores.exact == 50.0 and evaluation.score == pytest.approx((2 / 3 + 1) / 2)
        else:
            assert evaluation.predictions["r"]  # something, where something must be


def test_the_loss_is_the_mean_of_both_cross_entropies():
    data = SpanData([question_of(10, 3), question_of(5, 1)], TOKENIZER, 40, 16)
    (batch,) = data.loader(2)
    outputs = torch.randn(2, 2, 16).log_softmax(-1)
    sides = [(side, batch[name]) for side, name in enumerate(("starts", "ends"))]
    expected = -sum(outputs[row, side, places[row]] for row in (0, 1) for side, places in sides) / 4
    assert torch.allclose(Spans(False).loss(outputs, batch, 2), expected)
    called = []

    def network(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(given)
        return outputs[:, 0], outputs[:, 1]

    assert torch.equal(Spans(False).forward(network, batch), outputs)
    names = "token_ids", "segment_ids", "is_real"
    assert all(torch.equal(given, batch[name]) for given, name in zip(called[0], names, strict=True))
