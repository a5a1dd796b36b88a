"""The rules of a check of a submission (`Rules`), and what was found (`Report`)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grading.archive import MB, FormatError, name_fault
from grading.editions import DEFAULT_EDITION, EDITIONS, LABEL_NAMES
from grading.findings import OWN_CHECK, SEVERITIES, Finding
from grading.programs import GradingError, find_asset, printable, read_label_names

WRONG = ("refuse", "deduct")  # the severities that a zip is not written with
NO_FAULT = ("", "E025-optional")  # codes of notes that stand in the report of a fine submission, too
MAX_ID = 100  # letters
MAX_UNPACKED = 500 * MB


class Score(NamedTuple):
    """An output file compared with its data. Accuracies are None if the data has no gold labels."""

    lines: int
    accuracy: float | None
    majority: float | None


@dataclass
class Report:
    """What a check has found. findings: in the order in which they were found, with the table's severities.

    files: names relative to the top folder. texts: the generated texts, decoded. labels: of each output file whose
    lines all have the form, in order. is_written: the zip that was checked has been made from a folder and written.
    """

    student_id: str
    findings: list[Finding] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    labels: dict[str, list[int]] = field(default_factory=dict)
    is_written: bool = False

    def of(self, *severities: str) -> list[Finding]:
        """The findings that have these severities in the student's own check, in order."""
        return [one for one in (each.with_severity(OWN_CHECK) for each in self.findings) if one.severity in severities]

    @property
    def wrong(self) -> list[Finding]:
        """The findings that cost a part of the grade, or all of it."""
        return self.of(*WRONG)

    @property
    def accuracies(self) -> dict[str, float]:
        """Accuracy of each output file whose data has gold labels."""
        return {name: score.accuracy for name, score in self.scores.items() if score.accuracy is not None}

    def raise_if_wrong(self) -> None:
        """Raise `FormatError` with all that is wrong in its message, if there is anything."""
        if self.wrong:
            raise FormatError("; ".join(self.wrong))

    def __str__(self) -> str:
        lines = [f"{self.student_id}: {len(self.files)} files"]
        if self.scores:
            lines.append(f"{'output file':<36}{'lines':>6}{'accuracy':>10}{'majority':>10}")
        for name, (count, accuracy, majority) in self.scores.items():
            numbers = "  no gold labels" if accuracy is None else f"{accuracy:>10.3f}{majority:>10.3f}"
            lines.append(f"{name:<36}{count:>6}{numbers}")
        for severity in reversed(SEVERITIES):
            lines += [f"{severity}: {one}" for one in self.of(severity)]
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """The last line of the report: "fine" is only a submission in which checks have found nothing."""
        found = Counter(one.severity for one in self.of(*SEVERITIES) if one.code not in NO_FAULT)
        if not found:
            return "the submission is fine"
        done = "wrong" if self.wrong else "created" if self.is_written else "checked"
        return f"{done}: {', '.join(f'{severity} {found[severity]}' for severity in SEVERITIES if severity in found)}"


@dataclass(frozen=True)
class Rules:
    """The limits of a check; sizes in MB (1,000,000 bytes). data_dir: None searches the usual folders.

    size_limit: None takes the edition's. max_unpacked: None takes 20 times the size limit, at most `MAX_UNPACKED`.
    """

    edition: str = DEFAULT_EDITION
    data_dir: str | os.PathLike | None = None
    size_limit: float | None = None
    max_unpacked: float | None = None
    id_pattern: str = r"[A-Za-z0-9][A-Za-z0-9._-]*"

    def __post_init__(self) -> None:
        if self.edition not in EDITIONS:
            raise GradingError(f"no edition {printable(repr(self.edition))}; there are {', '.join(EDITIONS)}")
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise GradingError(f"the data folder {printable(self.data_dir)} does not exist")
        if self.size_limit is None:
            object.__setattr__(self, "size_limit", EDITIONS[self.edition].size_limit)

    @property
    def max_bytes(self) -> float:
        return self.size_limit * MB

    @property
    def max_unpacked_bytes(self) -> float:
        return self.max_unpacked * MB if self.max_unpacked else min(20 * self.max_bytes, MAX_UNPACKED)

    def too_large(self, size: int) -> Finding:
        said = f"the zip is {size / MB:.2f} MB; the limit is {self.size_limit:g} MB"
        return Finding(said, "E002-size", expected=int(self.max_bytes), got=size)

    def clean_id(self, student_id: str) -> str:
        """The ID without spaces around it. Raises `GradingError` unless it fits the pattern and is a folder name."""
        student_id = student_id.strip()
        try:
            fits = re.fullmatch(self.id_pattern, student_id, re.ASCII) and len(student_id) <= MAX_ID
        except (re.error, OverflowError, RecursionError) as error:
            said = f"the ID pattern {printable(self.id_pattern)} is no regular expression: {error}"
            raise GradingError(said) from None
        # A top name with a leading underscore would be ignored by the check, as the course does for __MACOSX.
        if not fits or "/" in student_id or student_id.startswith("_") or name_fault(student_id):
            wanted = f"at most {MAX_ID} letters, pattern {printable(self.id_pattern)}"
            raise GradingError(f"{printable(repr(student_id))} is not a valid ID ({wanted})")
        return student_id

    def find(self, name: str) -> Path | None:
        """The path of a data file of the caller's, never one inside the submission; None if there is none."""
        if self.data_dir is not None:
            path = Path(self.data_dir, name)
        else:
            path = find_asset(Path("data", name)) or Path(os.environ.get("MINLLAMA_ASSETS", ""), "data", name)
        return path if path.is_file() else None

    def label_names(self, dataset: str) -> Sequence[str]:
        """The names in the data set's mapping file, or the published ones. Raises `GradingError` if it is broken."""
        path = self.find(f"{dataset}-label-mapping.json")
        return LABEL_NAMES[dataset] if path is None else read_label_names(path)
