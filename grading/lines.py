"""Data lines, label mappings and the prompt, as the assignment fixes them: the graders' own copy.

A student may replace every module of the package, so no grader imports one. `tests/grading/test_copies.py` compares
this copy with `engine.data` and `utils`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from grading.programs import GradingError, read_text, whole_number

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1

# ------------------------------------------------------------------------------------------------- data lines


class LabelledLine(NamedTuple):
    """One line of a data file, or of an output file, where the label is a prediction."""

    sentence: str
    label: int


def parse_line(line: str) -> LabelledLine:
    """Label and sentence of a line `LABEL ||| sentence`, without white space around them.

    The first separator counts: a sentence may hold another. Raises `ValueError` with the fault of another line.
    """
    label, separator, sentence = line.partition(SEPARATOR)
    sentence = sentence.strip()
    if not separator:
        raise ValueError(f"no '{SEPARATOR}' between label and sentence")
    if not sentence:
        raise ValueError("the sentence is empty")
    try:
        return LabelledLine(sentence, whole_number(label.strip()))
    except ValueError:
        raise ValueError(f"the label {label[:40]!r} is not a whole number") from None


def create_data(path: str | os.PathLike, num_labels: int | None = None, *, is_test: bool = False) -> list[LabelledLine]:
    """The examples of a data file, one `LABEL ||| sentence` a line, UTF-8.

    num_labels: labels must lie in 0 ... num_labels - 1; None accepts every label from 0 up. A test file without gold
    labels may have -1 on every line. Raises `GradingError`, naming file and line, for anything else.
    """
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise GradingError(f"{path} holds no data; expected lines of the form 'LABEL{SEPARATOR}sentence'")
    is_unlabelled = is_test and all(line.partition(SEPARATOR)[0].strip() == str(NO_GOLD_LABEL) for line in lines)
    lowest = NO_GOLD_LABEL if is_unlabelled else 0
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            example = parse_line(line)
        except ValueError as error:
            raise GradingError(f"{path} line {number}: {error}") from None
        if example.label < lowest or (num_labels is not None and example.label >= num_labels):
            allowed = "0 or more" if num_labels is None else f"from 0 to {num_labels - 1}, as the label mapping says"
            raise GradingError(f"{path} line {number}: the label {example.label} is not {allowed}")
        examples.append(example)
    return examples


# ---------------------------------------------------------------------------------------------- labels, prompt


def read_label_names(path: str | os.PathLike) -> list[str]:
    """The label mapping. Raises `GradingError` unless it is a JSON list of at least two distinct, non-empty strings."""
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GradingError(f"{path} is not JSON: {error}") from None
    is_list = isinstance(names, list) and all(
        isinstance(name, str) and name.strip() and name.isprintable() for name in names
    )
    if not is_list or len(names) < 2 or len(set(names)) < len(names):
        raise GradingError(f'{path} must be a JSON list of two or more distinct names, such as ["bad", "good"]')
    return names


QUESTION = "Is this movie {labels}? This movie is "  # the space at the end is part of the reference


def prompt_suffix(label_names: Sequence[str], question: str = QUESTION) -> str:
    """The question, its `{labels}` replaced with the names: `a or b`, or `a, b, or c`."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return question.replace("{labels}", choices)


def has_gold_labels(labels: Sequence[int]) -> bool:
    """Whether the labels of a data set can be gold: placeholders are all equal."""
    return len(set(labels)) > 1


def majority_accuracy(labels: Sequence[int]) -> float:
    """The accuracy of always answering the most frequent gold label."""
    return Counter(labels).most_common(1)[0][1] / len(labels)
