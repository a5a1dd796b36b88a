"""What the assignment fixes: data lines, label mappings, the prompt, what counts as a gold label, the editions.

Every program that reads or writes the course's files does it through here, so that they agree on every line. Needs
the standard library and `utils.py` alone.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from utils import UserError, read_text, whole_number

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1

LABEL_NAMES = {"sst": ("awful", "bad", "average", "good", "excellent"), "cfimdb": ("bad", "good")}  # as published


# ------------------------------------------------------------------------------------------------- data lines


class Example(NamedTuple):
    """One line of a data file, or of an output file, where the label is a prediction."""

    sentence: str
    label: int


def parse_line(line: str) -> Example:
    """What a line `LABEL ||| sentence` says; white space around the two is dropped. Raises `ValueError`: what is wrong.

    The first separator counts: a sentence may hold another.
    """
    label, separator, sentence = line.partition(SEPARATOR)
    sentence = sentence.strip()
    if not separator:
        raise ValueError(f"no '{SEPARATOR}' between label and sentence")
    if not sentence:
        raise ValueError("the sentence is empty")
    try:
        return Example(sentence, whole_number(label.strip()))
    except ValueError:
        raise ValueError(f"the label {label[:40]!r} is not a whole number") from None


def format_line(label: int, sentence: str) -> str:
    """The inverse of `parse_line`, without a line end."""
    return f"{label}{SEPARATOR}{sentence}"


def create_data(path: str | os.PathLike, num_labels: int | None = None, *, is_test: bool = False) -> list[Example]:
    """The examples of a data file, one `LABEL ||| sentence` a line, UTF-8.

    num_labels: labels must lie in 0 ... num_labels - 1; None accepts every label from 0 up. A test file without gold
    labels may have -1 on every line. Raises `UserError`, naming file and line, for anything else.
    """
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"{path} holds no data; expected lines of the form 'LABEL{SEPARATOR}sentence'")
    is_unlabelled = is_test and all(line.partition(SEPARATOR)[0].strip() == str(NO_GOLD_LABEL) for line in lines)
    lowest = NO_GOLD_LABEL if is_unlabelled else 0
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            example = parse_line(line)
        except ValueError as error:
            raise UserError(f"{path} line {number}: {error}") from None
        if example.label < lowest or (num_labels is not None and example.label >= num_labels):
            allowed = "0 or more" if num_labels is None else f"from 0 to {num_labels - 1}, as the label mapping says"
            raise UserError(f"{path} line {number}: the label {example.label} is not {allowed}")
        examples.append(example)
    return examples


def divide(
    examples: Sequence[Example], seed: int, shots: int | None = None, hold_out: float = 0.0
) -> tuple[list[Example], list[Example]]:
    """The examples to train on, and those held out to choose by; both in the order of the data.

    shots: train on so many of each class, drawn at random; as many others are held out, if any are. hold_out: else the
    share of each class that is held out, at least one example. Raises `UserError` where a class has too few.
    """
    drawing, train, held_out = random.Random(seed), set(), set()
    for label in sorted({example.label for example in examples}):
        places = [place for place, example in enumerate(examples) if example.label == label]
        drawing.shuffle(places)
        held = shots or max(1, round(hold_out * len(places))) if hold_out else 0
        rest = len(places) - held if shots is None else shots
        if rest < 1 or rest + held > len(places):
            wanted = f"{rest} to train on" if shots else "one to train on"
            wanted += f" and {held} to hold out" if held else ""
            raise UserError(f"class {label} has {len(places)} examples, too few for {wanted}")
        train |= {*places[:rest]}
        held_out |= {*places[rest : rest + held]}
    return [examples[place] for place in sorted(train)], [examples[place] for place in sorted(held_out)]


# ---------------------------------------------------------------------------------------------- labels, prompt


def read_label_names(path: str | os.PathLike) -> list[str]:
    """The label mapping. Raises `UserError` unless it is a JSON list of at least two distinct, non-empty strings."""
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    is_list = isinstance(names, list) and all(
        isinstance(name, str) and name.strip() and name.isprintable() for name in names
    )
    if not is_list or len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f'{path} must be a JSON list of two or more distinct names, such as ["bad", "good"]')
    return names


QUESTION = "Is this movie {labels}? This movie is "  # the space at the end is part of the reference


def prompt_suffix(label_names: Sequence[str], question: str = QUESTION) -> str:
    """The question with the names in the place of `{labels}`: `a or b`, or `a, b, or c`."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return question.replace("{labels}", choices)


def has_gold_labels(labels: Sequence[int]) -> bool:
    """Whether the labels of a data set can be gold: placeholders are all the same."""
    return len(set(labels)) > 1


def majority_accuracy(labels: Sequence[int]) -> float:
    """The accuracy of always answering the most frequent gold label."""
    return Counter(labels).most_common(1)[0][1] / len(labels)


# ---------------------------------------------------------------------------------------------------- editions

ATTENTION_KINDS = ("bidirectional", "causal")
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}  # llama.py has the first
OUTPUT_KINDS = ("prompting", "finetuning", "lora", "advanced")


def output_names(*kinds: str) -> tuple[str, ...]:
    """The output files of some kinds, one for each data set and split."""
    pairs = [(data, split) for data in LABEL_NAMES for split in ("dev", "test")]
    return tuple(f"{data}-{split}-{kind}-output.txt" for kind in kinds for data, split in pairs)


class Accuracy(NamedTuple):
    """A published accuracy: its mean over seeds, and their standard deviation where that is known."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Edition:
    """What one edition of the course hands out, asks for and publishes; what is not known of it is left empty.

    norm: a key of `NORMS`, with which the reference tensors and numbers were computed from the same `stories42M.pt`.
    required: without these files a submission is wrong. listed: in the course's own list, but its checker does not
    demand them. size_limit: of the zip, in millions of bytes. references: by output file, without "-output.txt".
    """

    norm: str
    attention: str
    id_name: str = "ID"
    required: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    size_limit: float = 10.0
    label_names: Mapping[str, Sequence[str]] = field(default_factory=lambda: LABEL_NAMES)
    references: Mapping[str, Accuracy] = field(default_factory=dict)


CODE = ("run_llama.py", "llama.py", "optimizer.py", "classifier.py", "rope.py")
TEXTS = ("generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt")
ADVANCED = output_names("advanced")  # all of these or none
REQUIRED = (*CODE, *TEXTS, *output_names("prompting", "finetuning"))
LISTED = ("base_llama.py", "config.py", "sanity_check.py", "tokenizer.py", "utils.py", "README.md", "structure.md",
          "sanity_check.data", "setup.sh")  # fmt: skip
REFERENCES_2024 = {
    "sst-dev-prompting": Accuracy(0.213, 0.0), "sst-test-prompting": Accuracy(0.224, 0.0),
    "cfimdb-dev-prompting": Accuracy(0.498, 0.0),
    "sst-dev-finetuning": Accuracy(0.414, 0.014), "sst-test-finetuning": Accuracy(0.418, 0.017),
    "cfimdb-dev-finetuning": Accuracy(0.800, 0.115),
}  # fmt: skip
REFERENCES_2025 = {
    "sst-dev-prompting": Accuracy(0.237), "sst-test-prompting": Accuracy(0.250),
    "cfimdb-dev-prompting": Accuracy(0.490),
    "sst-dev-lora": Accuracy(0.275), "sst-test-lora": Accuracy(0.269), "cfimdb-dev-lora": Accuracy(0.510),
}  # fmt: skip
REFERENCES_2026 = {
    "sst-dev-prompting": Accuracy(0.197), "sst-test-prompting": Accuracy(0.176),
    "cfimdb-dev-prompting": Accuracy(0.514),
}  # fmt: skip

# Sources. cmu2024: neubig/minllama-assignment. ucsc: the fork of it that UC Santa Cruz hands out in NLP 244, as seen in
# the public copy iamsorenl/minllama-assignment: the same checker and tree, only the ID is a CruzID. cmu2025:
# cmu-l3/anlp-fall2025-hw1, where LoRA outputs and feedback.txt are new. Its checker counts feedback.txt among the
# advanced outputs and so accepts one of the four alone; here the rule is "all four or none" in every edition. cmu2026:
# ialdarmaki/anlp-spring2026-hw1, which has pre-training in place of fine-tuning; its list of files is not known.
# The limit of 10 MB is that of fall 2025; the earlier ones name none.
EDITIONS = {
    "ucsc": Edition("rms", "bidirectional", "CruzID", REQUIRED, LISTED, references=REFERENCES_2024),
    "cmu2024": Edition("rms", "bidirectional", "AndrewID", REQUIRED, LISTED, references=REFERENCES_2024),
    "cmu2025": Edition(
        "layer",
        "bidirectional",
        "AndrewID",
        REQUIRED + output_names("lora"),
        (*LISTED, "lora.py", "checklist.md"),
        ("feedback.txt",),
        references=REFERENCES_2025,
    ),
    "cmu2026": Edition("layer", "causal", size_limit=15.0, references=REFERENCES_2026),
}
DEFAULT_EDITION = "ucsc"
