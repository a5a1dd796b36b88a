"""SQuAD's format and scores, against values worked out by hand from the official definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_helpers import refused

from bert.squad import Answer, Question, overlap_f1, read_squad, scores_of, token_f1, trainable_questions
from utils import UserError

CONTEXT = "The Rhine flows through Basel, and then to the North Sea."


def question(id: str, *answers: str) -> Question:
    return Question(id, "where?", CONTEXT, tuple(Answer(text, 0) for text in answers))


def write(path: Path, qas: list, version: str | float | None = "1.1") -> Path:
    """version: None for a file that names none."""
    content = {"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}
    path.write_text(json.dumps(content if version is None else {**content, "version": version}))
    return path


@pytest.mark.parametrize(
    ("predicted", "gold", "exact", "f1"),
    [
        ("Basel", "basel.", 1, 1),
        ("the  North Sea", "North   Sea", 1, 1),  # an article, white space
        ("North-Sea", "NorthSea", 1, 1),  # punctuation leaves nothing behind
        ("a theatre", "theatre", 1, 1),  # articles are words, not letters
        ("North", "the North Sea", 0, 2 * 1 * 0.5 / 1.5),
        ("sea sea sea", "sea", 0, 2 * (1 / 3) * 1 / (4 / 3)),  # counted as often as both have it
        ("Basel", "Rhine", 0, 0),
        ("", "Basel", 0, 0),
    ],
)
def test_exact_match_and_f1_of_one_answer(predicted: str, gold: str, exact: float, f1: float):
    for may_be_unanswered in (False, True):
        scores = scores_of([question("1", gold)], {"1": predicted}, may_be_unanswered)
        assert scores.exact == pytest.approx(100 * exact) and scores.f1 == pytest.approx(100 * f1)


def test_of_several_answers_the_best_counts_and_each_score_has_its_own_best():
    several = question("1", "North", "to the North Sea")
    assert scores_of([several], {"1": "North"}, False)[:2] == (100.0, 100.0)
    scores = scores_of([several], {"1": "the North Sea"}, False)
    assert scores.exact == 0.0 and scores.f1 == pytest.approx(100 * 2 * 1 * (2 / 3) / (5 / 3))


def test_a_question_without_a_prediction_is_wrong_in_version_1_and_left_out_in_version_2():
    questions = [question("1", "Basel"), question("2", "Rhine"), question("3")]
    assert scores_of(questions, {"1": "Basel"}, True) == (100.0, 100.0, 1, 100.0, None)
    questions = [question("1", "Basel"), question("2", "Rhine"), question("3", "Sea")]
    scores = scores_of(questions, {"1": "Basel", "3": "North Sea"}, False)
    assert scores.total == 3 and scores.exact == pytest.approx(100 / 3)
    assert scores.f1 == pytest.approx(100 * (1 + 2 / 3) / 3) and scores.answered_f1 is None


def test_no_answer_is_right_where_there_is_none():
    questions = [question("1"), question("2"), question("3", "Basel"), question("4", "Basel")]
    scores = scores_of(questions, {"1": "", "2": "Basel", "3": "Basel", "4": ""}, True)
    assert scores.exact == 50.0 and scores.f1 == 50.0
    assert scores.answered_f1 == 50.0 and scores.unanswered_f1 == 50.0
    assert scores_of([question("1", "Basel")], {"1": "Basel"}, True).unanswered_f1 is None
    assert scores_of([question("1")], {"1": "Basel"}, False)[:2] == (0.0, 0.0)  # in version 1


def test_the_two_versions_differ_where_an_answer_is_nothing_but_an_article():
    assert overlap_f1("the", "The") == 0.0 and token_f1("the", "The") == 1.0
    the = question("1", "The")
    assert scores_of([the], {"1": "the"}, False)[:2] == (100.0, 0.0)
    assert scores_of([the], {"1": "the"}, True)[:2] == (100.0, 100.0)
    assert scores_of([question("1", "The", "Rhine")], {"1": ""}, True)[:2] == (0.0, 0.0)  # its words count alone


def test_questions_of_both_versions_are_read(tmp_path: Path):
    first = {"id": "1", "question": "Which river?", "answers": [{"text": "Rhine", "answer_start": 4}]}
    questions, may_be_unanswered = read_squad(write(tmp_path / "one.json", [first]))
    assert questions == [Question("1", "Which river?", CONTEXT, (Answer("Rhine", 4),))] and not may_be_unanswered
    second = {"id": "2", "question": "Who?", "answers": [], "is_impossible": True}
    questions, may_be_unanswered = read_squad(write(tmp_path / "two.json", [first, second], "v2.0"))
    assert [len(each.answers) for each in questions] == [1, 0] and may_be_unanswered
    for version, qas, may_be_unanswered in (
        ("v2.0", [first], True),
        (2.0, [first], True),
        (1.1, [first, second], False),  # the version counts, not the questions
        (None, [first], False),
        (None, [first, second], True),
    ):
        assert read_squad(write(tmp_path / "other.json", qas, version))[1] == may_be_unanswered
    impossible = {**first, "is_impossible": True}
    assert read_squad(write(tmp_path / "three.json", [impossible]))[0][0].answers == ()


@pytest.mark.parametrize("start", [5, -53, 10**30, 0])
def test_a_misplaced_answer_is_not_trained_on_and_scored_all_the_same(
    tmp_path: Path, start: int, capsys: pytest.CaptureFixture
):
    qas = [{**GOOD, "answers": [{"text": "Rhine", "answer_start": start}]}, {**GOOD, "id": "2"}]
    path = write(tmp_path / "x.json", [*qas, {**GOOD, "id": "3", "answers": [*qas[0]["answers"], *GOOD["answers"]]}])
    questions, _ = read_squad(path)
    assert [each.is_misplaced for each in questions] == [True, False, False]
    assert scores_of(questions, dict.fromkeys("123", "Rhine"), False).exact == 100
    assert [each.id for each in trainable_questions(path, questions)] == ["2", "3"]
    assert capsys.readouterr().err.count("1 of 3 questions, whose answer does not stand at its answer_start") == 1
    with pytest.raises(UserError, match="no question to train on"):
        trainable_questions(path, questions[:1])


GOOD = {"id": "1", "question": "?", "answers": [{"text": "Rhine", "answer_start": 4}]}


@pytest.mark.parametrize(
    ("qas", "words"),
    [
        ([{**GOOD, "answers": [{"text": "", "answer_start": 5}]}], r"qas\[0\].answers\[0\].text is empty"),
        ([{**GOOD, "question": "\ud83d"}], r"half a character \(a lone surrogate\)"),
        ([{**GOOD, "answers": [{"text": "Rhine", "answer_start": True}]}], "answer_start must be a whole number"),
        ([{**GOOD, "id": 7}], r"data\[0\].paragraphs\[0\].qas\[0\].id must be a text"),
        ([GOOD, GOOD], "two questions have the id '1'"),
        ([{"id": "1"}], "question must be a text"),
        (["x"], "is no JSON object"),
        ({}, "qas must be a list"),
        ([], "has no questions"),
        *((text, "") for text in ("", "[]", "null", '{"data": 1}', "[" * 10**5)),
    ],
)
def test_a_file_that_is_not_of_the_format_is_one_line(tmp_path: Path, qas: list | str, words: str):
    """qas: the questions, or the text of the whole file."""
    path = write(tmp_path / "wrong.json", qas)
    if isinstance(qas, str):
        path.write_text(qas)
    assert str(path) in refused(words, read_squad, path)
