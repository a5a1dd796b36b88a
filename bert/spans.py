"""Answers as spans: questions and paragraphs as windows, the task, and which span is the answer.

    [CLS] which river ? [SEP] the rhine flows through basel [SEP]      from 6 to 6

A paragraph that does not fit stands in several windows that overlap (Devlin et al. 2019, section 4.2 and 4.3, and the
code that was published with it). Where a window does not hold the answer, [CLS] is the answer.

Windows and their central tokens are those of that code (`run_squad.py`). It differs in that

    a question       is cut to 64 tokens, here to what leaves half of a window
    an answer        that begins or ends within a word is trained as the whole word, here as the pieces that it touches
    of the windows   the highest sum of the two scores counts, and the lowest of [CLS], each of any window; here what a
                     span has more than [CLS] of its own window
    a span           is made of the 20 best first and the 20 best last tokens, here of all
    the text         has a single space for any white space, and whole words where the pieces are not found again in
                     them (letters taken apart, U+00A0); here it is what stands in the paragraph, from piece to piece

Shapes: b batch   s position
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from bert.squad import Question, Scores, scores_of
from bert.wordpiece import Token, WordPiece
from engine.processes import Batch, Distributed
from engine.tasks import Task, padded
from utils import UserError


class Window(NamedTuple):
    """A question and a part of its paragraph.

    question: its number. first: where the paragraph's tokens begin; offsets: their places in the paragraph.
    is_central: for each of them, whether no other window shows more of what stands around it. start, end: of the
    answer, both included; 0 where it is not in this window.
    """

    question: int
    ids: list[int]
    first: int
    offsets: list[tuple[int, int]]
    is_central: list[bool]
    start: int
    end: int


def windows_of(number: int, question: Question, tokenizer: WordPiece, length: int, stride: int) -> Iterator[Window]:
    """All windows of a question, of at most `length` tokens. stride: from one window's beginning to the next one's.

    Of a question that takes more than half of a window only the beginning is read. Of several answers the first counts.
    """
    asked = [token.id for token in tokenizer.tokenize(question.text)][: length // 2 - 2]
    before = [tokenizer.cls_id, *asked, tokenizer.sep_id]
    tokens = tokenizer.tokenize(question.context)
    room = length - len(before) - 1
    firsts = [0]
    while firsts[-1] + room < len(tokens):
        firsts.append(firsts[-1] + min(stride, room))
    answer = _tokens_of_answer(question, tokens)
    for first in firsts:
        shown = tokens[first : first + room]
        start, end = 0, 0
        if answer is not None and first <= answer[0] and answer[1] < first + len(shown):
            start, end = (len(before) + place - first for place in answer)
        central = [_most_central(first + place, firsts, room, len(tokens)) == first for place in range(len(shown))]
        ids = [*before, *(token.id for token in shown), tokenizer.sep_id]
        yield Window(number, ids, len(before), [(token.start, token.end) for token in shown], central, start, end)


def _tokens_of_answer(question: Question, tokens: Sequence[Token]) -> tuple[int, int] | None:
    """The first and the last token that have a part in the first answer with a place; None where no token has."""
    text, start = next((answer for answer in question.answers if answer.start is not None), (None, None))
    if text is None:
        return None
    inside = [place for place, token in enumerate(tokens) if token.end > start and token.start < start + len(text)]
    return (inside[0], inside[-1]) if inside else None


def _most_central(place: int, firsts: Sequence[int], room: int, total: int) -> int:
    """The beginning of the window in which a token has most around it on its poorer side."""

    def context(first: int) -> float:
        last = min(first + room, total) - 1
        return min(place - first, last - place) + 0.01 * (last - first + 1) if first <= place <= last else -1.0

    return max(firsts, key=context)


class SpanData(Dataset):
    """The windows of questions. Raises `UserError` where a window has no room for a paragraph beside its question."""

    def __init__(self, questions: Sequence[Question], tokenizer: WordPiece, length: int, stride: int):
        if length < 8:
            raise UserError(f"a window of {length} tokens has no room for a question and a paragraph")
        if stride < 1:
            raise UserError(f"a stride of {stride} leads from no window to the next")
        self.questions, self.tokenizer = questions, tokenizer
        self.windows = [
            window
            for number, question in enumerate(questions)
            for window in windows_of(number, question, tokenizer, length, stride)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[int, Window]:
        return index, self.windows[index]

    def collate_fn(self, items: Sequence[tuple[int, Window]]) -> dict[str, Any]:
        """token_ids, segment_ids, is_real: b s; starts, ends: b; indices: which windows they are."""
        indices, windows = zip(*items, strict=True)
        lengths = torch.tensor([len(window.ids) for window in windows])
        segment = self.tokenizer.first_segment
        segments = [[segment] * each.first + [segment + 1] * (len(each.ids) - each.first) for each in windows]
        return {
            "token_ids": padded([window.ids for window in windows], self.tokenizer.pad_id),
            "segment_ids": padded(segments, 0),
            "is_real": torch.arange(int(lengths.max())) < lengths[:, None],
            "starts": torch.tensor([window.start for window in windows]),
            "ends": torch.tensor([window.end for window in windows]),
            "indices": list(indices),
        }

    def loader(self, batch_size: int, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(self, batch_size=batch_size, shuffle=shuffle, collate_fn=self.collate_fn)


# ------------------------------------------------------------------------------------------------------- task


class Spans(Task):
    """Where an answer begins and ends (section 4.2): the mean of the two cross-entropies over positions.

    A last batch that is short counts for as much as its windows: its losses are divided by the size of a full one, as
    in classification, where transformers takes their mean.

    The model: `BertForQuestionAnswering`. may_be_unanswered: whether [CLS] can be the answer to a question.
    """

    def __init__(self, may_be_unanswered: bool):
        self.may_be_unanswered = may_be_unanswered

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        both = network(batch["token_ids"], batch["segment_ids"], batch["is_real"], **changed)
        return torch.stack(both, dim=1)  # b 2 s

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        losses = (F.nll_loss(outputs[:, i], batch[name], reduction="sum") for i, name in enumerate(("starts", "ends")))
        return sum(losses) / (2 * batch_size)

    def evaluation(self, dataset: SpanData) -> SpanEvaluation:
        return SpanEvaluation(dataset, self.may_be_unanswered)


LONGEST_ANSWER = 30  # tokens of an answer


@dataclass
class SpanEvaluation:
    """The best span of each window, and of these the best for each question.

    Spans are compared by how much more probable they are than [CLS] of their window: log p(start) + log p(end) -
    log p([CLS], [CLS]), which does not depend on what else stands there.
    """

    dataset: SpanData
    may_be_unanswered: bool
    spans: torch.Tensor = field(init=False)  # windows 4: whether there is a span, its margin, its start and end

    def __post_init__(self) -> None:
        self.spans = torch.zeros(len(self.dataset), 4, dtype=torch.float64)

    def add(self, outputs: torch.Tensor, batch: Batch) -> None:
        """outputs: b 2 s"""
        for index, (starts, ends) in zip(batch["indices"], outputs.cpu().double(), strict=False):
            if (best := best_span(starts, ends, self.dataset.windows[index])) is not None:
                self.spans[index] = torch.tensor([1.0, *best])

    def finish(self, distributed: Distributed) -> None:
        self.spans = distributed.total(self.spans)

    @property
    def predictions(self) -> dict[str, str]:
        """An answer for each question's id."""
        questions, windows = self.dataset.questions, self.dataset.windows
        found = {question.id: "" for question in questions}
        margins = dict.fromkeys(found, 0.0 if self.may_be_unanswered else float("-inf"))
        for window, (is_span, margin, start, end) in zip(windows, self.spans.tolist(), strict=True):
            question = questions[window.question]
            if is_span and margin > margins[question.id]:
                margins[question.id] = margin
                found[question.id] = question.context[window.offsets[int(start)][0] : window.offsets[int(end)][1]]
        return found

    @property
    def scores(self) -> Scores:
        return scores_of(self.dataset.questions, self.predictions, self.may_be_unanswered)

    @property
    def score(self) -> float:
        """The higher, the better: F1, from 0 to 1."""
        return self.scores.f1 / 100


def best_span(starts: torch.Tensor, ends: torch.Tensor, window: Window) -> tuple[float, int, int] | None:
    """The margin of the best span of a window, and its first and last token among the paragraph's; None for none.

    starts, ends: s. It begins at a token that no other window shows better, and has at most `LONGEST_ANSWER` tokens.
    """
    count = len(window.offsets)
    if not any(window.is_central):
        return None
    begins, stops = (scores[window.first : window.first + count] for scores in (starts, ends))
    begins = begins.masked_fill(~torch.tensor(window.is_central), float("-inf"))
    sums = begins[:, None] + stops  # t t
    spans = torch.ones(count, count, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    best = int(sums.masked_fill(~spans, float("-inf")).argmax())
    start, end = divmod(best, count)
    return float(sums[start, end] - starts[0] - ends[0]), start, end
