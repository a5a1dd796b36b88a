"""Question answering in SQuAD's format: reading it, and the official scores.

Version 1.1 (Rajpurkar et al. 2016, arXiv:1606.05250): every question is answered by a span of its paragraph. Version
2.0 (Rajpurkar et al. 2018, arXiv:1806.03822): some have no answer. The scores are those of the evaluation scripts that
were published with the two, which differ where an answer is empty and where a prediction is missing.
"""

from __future__ import annotations

import os
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.data import read_json
from utils import UserError, short_repr, warn


class Answer(NamedTuple):
    """A span of a paragraph, and at which character it begins; None: it is not where the file says.

    Published files have such answers, counted in bytes or in UTF-16. The scores need no place, training does.
    """

    text: str
    start: int | None


class Question(NamedTuple):
    """A question, its paragraph, and the answers that people have given; none where there is no answer."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]

    @property
    def is_misplaced(self) -> bool:
        """Whether it has answers, and none of them stands where the file says."""
        return bool(self.answers) and all(answer.start is None for answer in self.answers)


def read_squad(path: str | os.PathLike) -> tuple[list[Question], bool]:
    """The questions of a file, and whether some may have no answer: version 2.0, or none is named and some have none.

    Raises `UserError` that says where the file is not of this format.
    """
    content = read_json(path)
    questions: list[Question] = []
    try:
        for place, paragraph in _paragraphs(content):
            questions += _questions(paragraph, place)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not questions:
        raise UserError(f"{path} has no questions")
    if repeated := [id for id, count in Counter(question.id for question in questions).items() if count > 1]:
        raise UserError(f"{path}: two questions have the id {short_repr(repeated[0])}")
    version = str(content.get("version", "")).lower().removeprefix("v")
    return questions, version.startswith("2") or (not version and any(not each.answers for each in questions))


def trainable_questions(path: str | os.PathLike, questions: Sequence[Question]) -> list[Question]:
    """The questions without those whose answers are all misplaced; a warning counts them.

    Raises `UserError` if none is left.
    """
    kept = [question for question in questions if not question.is_misplaced]
    if left_out := len(questions) - len(kept):
        why = "whose answer does not stand at its answer_start, are not trained on"
        warn(f"{path}: {left_out} of {len(questions)} questions, {why}")
    if not kept:
        raise UserError(f"{path} has no question to train on")
    return kept


def _paragraphs(content: Any) -> Iterator[tuple[str, Any]]:
    for number, article in enumerate(_get(content, "data", list, "")):
        place = f"data[{number}]"
        for index, paragraph in enumerate(_get(article, "paragraphs", list, place)):
            yield f"{place}.paragraphs[{index}]", paragraph


def _questions(paragraph: Any, place: str) -> Iterator[Question]:
    context = _get(paragraph, "context", str, place)
    for number, qa in enumerate(_get(paragraph, "qas", list, place)):
        at = f"{place}.qas[{number}]"
        id, text = (_get(qa, name, str, at) for name in ("id", "question"))
        answers = []
        for index, answer in enumerate(_get(qa, "answers", list, at, [])):
            spot = f"{at}.answers[{index}]"
            words, start = _get(answer, "text", str, spot), _get(answer, "answer_start", int, spot)
            if not words:
                raise UserError(f"{spot}.text is empty")
            answers.append(Answer(words, start if context[max(0, start) : start + len(words)] == words else None))
        if _get(qa, "is_impossible", bool, at, False):
            answers = []
        yield Question(id, text, context, tuple(answers))


def _get(value: Any, name: str, kind: type, place: str, default: Any = None) -> Any:
    """An entry of an object, of this kind. Raises `UserError`."""
    dot = "." if place else ""
    if not isinstance(value, dict):
        raise UserError(f"{place or 'the file'} is no JSON object")
    found = value.get(name, default)
    if type(found) is not kind:
        kinds = {str: "a text", list: "a list", int: "a whole number", bool: "true or false"}
        raise UserError(f"{place}{dot}{name} must be {kinds[kind]}")
    return found


# ----------------------------------------------------------------------------------------------------- scores


class Scores(NamedTuple):
    """Percentages, as they are published. Of questions with and without an answer, None where there are none."""

    exact: float
    f1: float
    total: int
    answered_f1: float | None = None
    unanswered_f1: float | None = None


def scores_of(questions: Sequence[Question], predictions: Mapping[str, str], may_be_unanswered: bool) -> Scores:
    """predictions: a text for each question's id, empty for no answer.

    A question without a prediction is wrong in version 1.1, and left out in version 2.0, as in the published scripts.
    """
    exact, f1 = {}, {}
    if may_be_unanswered:
        questions = [question for question in questions if question.id in predictions]
    for question in questions:
        golds = [answer.text for answer in question.answers if not may_be_unanswered or normalized(answer.text)] or [""]
        predicted = predictions.get(question.id)
        for scores, score in ((exact, is_exact), (f1, token_f1 if may_be_unanswered else overlap_f1)):
            scores[question.id] = 0.0 if predicted is None else max(score(predicted, gold) for gold in golds)
    answered = [f1[question.id] for question in questions if question.answers]
    unanswered = [f1[question.id] for question in questions if not question.answers]
    parts = (_percentage(answered), _percentage(unanswered)) if may_be_unanswered else ()
    return Scores(_percentage([*exact.values()]), _percentage([*f1.values()]), len(questions), *parts)


def _percentage(values: Sequence[float]) -> float | None:
    return 100.0 * sum(values) / len(values) if values else None


def normalized(text: str) -> str:
    """In lower case, without punctuation, articles and superfluous white space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def is_exact(predicted: str, gold: str) -> float:
    return float(normalized(predicted) == normalized(gold))


def overlap_f1(predicted: str, gold: str) -> float:
    """Of the words that both have, as often as both have them; version 1.1."""
    words, golds = normalized(predicted).split(), normalized(gold).split()
    common = sum((Counter(words) & Counter(golds)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(golds)
    return 2 * precision * recall / (precision + recall)


def token_f1(predicted: str, gold: str) -> float:
    """Version 2.0: where one of them has no words, they agree or they do not."""
    if not normalized(predicted) or not normalized(gold):
        return is_exact(predicted, gold)
    return overlap_f1(predicted, gold)
