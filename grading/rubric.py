"""From findings to a grade: the course's rubric as numbers, and the grades that a person gives in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grading.editions import EDITIONS
from grading.findings import Finding
from grading.intake import Submission, read_table
from grading.judge import Judgement
from grading.programs import GradingError, few, printable
from grading.settings import SCALE, Settings
from grading.texts import NOT_JUDGED

BEST = "A"  # A+ is given by a person, in the overrides
REFUSED, ABSENT, FINAL, PROVISIONAL, OVERRIDE = "refused", "absent", "final", "provisional", "override"


@dataclass
class Grade:
    """letter: "" if there is none. reasons: what lowered it. open: what a person, or running the code, has to decide.

    computed: the letter before a person's override, whose reason is `reason`.
    """

    letter: str
    status: str
    reasons: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    computed: str = ""
    reason: str = ""


def lower(letter: str, steps: int) -> str:
    """A grade so many steps lower, at most down to the last one."""
    return SCALE[min(SCALE.index(letter) + steps, len(SCALE) - 1)]


def grade_of(findings: Iterable[Finding], judgement: Judgement | None, settings: Settings) -> Grade:
    """The grade of one submission by its findings, those of the comparison between students among them."""
    findings = list(findings)
    if judgement is None or not judgement.was_read or any(one.severity == "refuse" for one in findings):
        absent = any(one.code == "E074-absent" for one in findings)
        return Grade("", ABSENT if absent else REFUSED, [one.text for one in findings if one.severity == "refuse"])
    letter, reasons = BEST, []
    deducted = [one for one in findings if one.severity == "deduct"]
    for one in deducted:
        if most := one.check.most:
            letter = max(letter, most, key=SCALE.index)
            reasons.append(f"at most {most}: {one.text}")
    form = [one for one in deducted if not one.check.most]
    late = any(one.code == "E070-late" for one in findings)
    if form and settings.penalties.format_steps:
        letter = lower(letter, settings.penalties.format_steps)
        reasons.append(f"{settings.penalties.format_steps} step(s) down, once: {'; '.join(one.text for one in form)}")
    if late and settings.penalties.late_steps:
        letter = lower(letter, settings.penalties.late_steps)
        reasons.append(f"{settings.penalties.late_steps} step(s) down: late")
    still_open = _open(findings, deducted, judgement, settings)
    return Grade(letter, PROVISIONAL if still_open else FINAL, reasons, still_open)


def _open(findings: list[Finding], deducted: list[Finding], judgement: Judgement, settings: Settings) -> list[str]:
    """What is not decided yet. Every grade needs the executed checks."""
    still_open = []
    if judgement.parts is None:
        folders = EDITIONS[settings.edition].folders
        still_open = ["the student's code was not run", *(f"the models in {name}/ were not judged" for name in folders)]
    if judgement.coherence == NOT_JUDGED:
        still_open.append("coherence of the text at temperature 0 was not judged")
    if any(one.check.most == "B" for one in deducted):
        still_open.append("B or below: how much of the code is missing or wrong")
    still_open += [f"look at {one.code}: {one.text}" for one in findings if one.severity == "flag"]
    still_open += ["A+, if the report shows a gain" for one in findings if one.code == "E064-a-plus"]
    return still_open


# --------------------------------------------------------------------------------------------------------- overrides


def read_overrides(settings: Settings, submissions: Iterable[Submission]) -> dict[str, tuple[str, str]]:
    """Grade and reason by ID. Raises `GradingError` for an unknown ID or grade, an ID twice, an absent reason."""
    known, found = {one.student.student_id for one in submissions} - {""}, {}
    if not settings.overrides:
        return found
    for line, row in read_table(Path(settings.overrides), "id", "grade", "reason"):
        where, student_id, grade = f"{settings.overrides} line {line}", row["id"], row["grade"]
        if student_id not in known:
            raise GradingError(f"{where}: there is no student {printable(repr(student_id))}")
        if student_id in found:
            raise GradingError(f"{where}: {student_id} has a grade already")
        if grade not in SCALE:
            raise GradingError(f"{where}: {printable(repr(grade))} is no grade; there are {', '.join(SCALE)}")
        if not row["reason"]:
            raise GradingError(f"{where}: {student_id} has no reason; write one")
        found[student_id] = grade, row["reason"]
    return found


def override(grade: Grade, student_id: str, overrides: Mapping[str, tuple[str, str]]) -> Grade:
    """The grade, or a person's in its place: what was computed stays in sight."""
    if student_id not in overrides:
        return grade
    letter, reason = overrides[student_id]
    return Grade(letter, OVERRIDE, grade.reasons, grade.open, grade.letter or grade.status, reason)


def summary(grades: Iterable[Grade]) -> str:
    """How many there are of each grade and status, in one line."""
    grades = list(grades)
    letters = [f"{letter} {count}" for letter in SCALE if (count := sum(one.letter == letter for one in grades))]
    states = sorted({one.status for one in grades})
    return f"{len(grades)} submissions: {few(letters, len(SCALE))}; " + ", ".join(
        f"{sum(one.status == status for one in grades)} {status}" for status in states
    )
