"""Output files: format, labels and sentences, line by line, and their accuracy against the data."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from grading.editions import ACCURACY_BANDS, EDITIONS, LABEL_NAMES, OUTPUT_KINDS, REFERENCE_ACCURACIES, TEXT_PROMPT
from grading.lines import LabelledLine, create_data, has_gold_labels, majority_accuracy, parse_line, prompt_suffix
from grading.programs import find_asset
from grading.rules import Report, Rules, Score

ENOUGH_LINES = 100  # for an accuracy: chance moves that of fewer lines out of any band
MAX_LINES = 100_000  # of an output file; the largest data set has some 2,000
NO_SUBMISSION = (
    "the films data set that comes with this package is for trying things out; the assignment asks for SST and CFIMDB"
)
OUTPUT = re.compile(rf"({'|'.join(LABEL_NAMES)})-(dev|test)-({'|'.join(OUTPUT_KINDS)})-output\.txt")


def check_text(name: str, raw: bytes, rules: Rules, report: Report) -> None:
    """A generated text must be UTF-8, not blank, and continue the prompt; an output file is checked line by line."""
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        report.problems.append(f"{name} line {line}: not UTF-8 text")
        return
    if not text.strip():
        report.problems.append(f"{name} holds nothing but white space")
    elif text.count("\n") > MAX_LINES:
        report.problems.append(f"{name} has {text.count(chr(10))} lines, too many for an output file")
    elif match := OUTPUT.fullmatch(name):
        _check_output(name, *match.groups(), text.removesuffix("\n").split("\n"), rules, report)
    elif not " ".join(text.split()).startswith(TEXT_PROMPT):
        report.warnings.append(f"{name} does not begin with the assignment's prompt: {TEXT_PROMPT}")


def _read_line(line: str) -> LabelledLine | None:
    """A line of an output file; None if it has another form, a mistake of the student's."""
    with contextlib.suppress(ValueError):
        return parse_line(line)
    return None


def _check_output(
    name: str, dataset: str, split: str, kind: str, lines: list[str], rules: Rules, report: Report
) -> None:
    """Line format and labels, then lines, sentences and accuracy against the data if it is there."""
    rows = [_read_line(line) for line in lines]
    if _are_of_films(rows, split):
        report.problems.append(f"{name}: its sentences are those of films-{split}.txt: {NO_SUBMISSION}")
        return
    label_names = rules.label_names(dataset)
    labels = range(len(label_names))
    _flag(report.problems, name, "not 'LABEL ||| sentence'", [row is None for row in rows])
    outside = [row is not None and row.label not in labels for row in rows]
    _flag(report.problems, name, f"label outside 0..{len(labels) - 1}", outside)
    if len(rows) > 1 and len({row and row.label for row in rows}) == 1:
        report.warnings.append(f"{name}: every line has the same label")
    prompt = f" {prompt_suffix(label_names)}".rstrip()  # its last space goes with the line's end
    is_prompted = all(row and row.sentence.endswith(prompt) for row in rows)
    if is_prompted and kind in ("finetuning", "lora"):
        report.problems.append(f"{name}: every sentence ends in the course's prompt: a prompting output, misnamed")
        kind = "prompting"
    path = rules.find(f"{dataset}-{split}.txt")
    if path is None:
        note = f"no {dataset}-{split}.txt here: its outputs are not compared with the data (give --data DIR)"
        report.notes += [note] if note not in report.notes else []
        return
    data = create_data(path, is_test=True)  # any split may have its labels withheld
    if len(rows) != len(data):
        report.problems.append(f"{name}: {len(rows)} lines, but {path.name} has {len(data)}")
    _compare(name, kind, rows, data, prompt, report)
    if len(rows) == len(data) and None not in rows:
        report.scores[name] = _score(rows, data)
        if EDITIONS[rules.edition].norm == "rms":
            report.warnings += _outside_band(name, dataset, split, kind, report.scores[name])


def _outside_band(name: str, dataset: str, split: str, kind: str, score: Score) -> list[str]:
    """A warning for an accuracy further from the reference's than the grade A allows."""
    dev, test = REFERENCE_ACCURACIES.get((dataset, kind), (None, None))
    reference, accuracy, band = dev if split == "dev" else test, score.accuracy, ACCURACY_BANDS[dataset]
    if None in (reference, accuracy) or score.lines < ENOUGH_LINES or round(abs(accuracy - reference), 3) <= band:
        return []
    return [f"{name}: accuracy {accuracy:.3f}; the reference's is {reference:.3f}, and {band:g} around it is asked for"]


def _are_of_films(rows: list[LabelledLine | None], split: str) -> bool:
    """Whether these are outputs on the films data set of this package, under any file name."""
    path = find_asset(Path("data", f"films-{split}.txt"))
    pairs = list(zip(rows, create_data(path, is_test=True), strict=False)) if path else []
    return 2 * sum(row is not None and row.sentence.startswith(film.sentence) for row, film in pairs) > len(pairs)


def _flag(messages: list[str], name: str, what: str, bad: list[bool]) -> None:
    """Add one message for all bad lines: the first one's number, and how many there are."""
    if any(bad):
        more = f" (and {sum(bad) - 1} more lines)" if sum(bad) > 1 else ""
        messages.append(f"{name} line {bad.index(True) + 1}: {what}{more}")


def _compare(
    name: str, kind: str, rows: list[LabelledLine | None], data: list[LabelledLine], prompt: str, report: Report
) -> None:
    """Compare sentences. Another prompt is a warning, and for advanced methods not even that."""
    same = {"advanced": str.__contains__, "prompting": str.startswith}.get(kind, str.__eq__)
    pairs = list(zip(rows, data, strict=False))
    strange = [row is not None and not same(row.sentence, gold.sentence) for row, gold in pairs]
    _flag(report.problems, name, "not the sentence of the data file's same line", strange)
    if kind == "prompting" and not any(strange):
        if all(row and row.sentence == gold.sentence for row, gold in pairs):
            report.problems.append(f"{name}: no sentence has a prompt after it: a finetuning output, misnamed")
            return
        other = [row is not None and row.sentence != gold.sentence + prompt for row, gold in pairs]
        _flag(report.warnings, name, "another prompt than the course's after the sentence", other)


def _score(rows: list[LabelledLine], data: list[LabelledLine]) -> Score:
    """Accuracy, and the accuracy of always answering the most frequent class; None without gold labels."""
    labels = [gold.label for gold in data]
    if not has_gold_labels(labels):
        return Score(len(rows), None, None)
    right = sum(row.label == label for row, label in zip(rows, labels, strict=True))
    return Score(len(rows), right / len(data), majority_accuracy(labels))
