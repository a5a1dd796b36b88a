"""What is written for a batch: two CSV files, a report for each student, one page for all. Names and texts are hostile.

In a CSV file, a cell that a spreadsheet would take for a formula gets an apostrophe in front. Reports hold no raw
HTML and no marks of Markdown but their own; the page is a jinja2 template with autoescape.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grading.findings import Finding
from grading.judge import Judgement
from grading.outputs import OUTPUT
from grading.programs import atomic_write, printable
from grading.results import reference_of
from grading.rubric import Grade
from grading.settings import Settings, need

PAGE = Path(__file__).with_name("overview.html")
LONGEST = 500  # characters of a text in a report
CANVAS_COLUMNS = ("Student", "ID", "SIS Login ID", "Section")


@dataclass
class Row:
    """Everything about one submission. judgement: None without a file to judge."""

    student_id: str
    name: str
    canvas_id: str
    section: str
    file: str
    judgement: Judgement | None
    findings: list[Finding]
    grade: Grade


def write_sheets(rows: Sequence[Row], others: Sequence[str], settings: Settings, out: Path) -> None:
    """Write grades.csv, canvas.csv, overview.html and reports/ID.md, each whole or not at all."""
    outputs = sorted({name for row in rows if row.judgement for name in row.judgement.scores})
    files = {
        "grades.csv": csv_of(*_grades(rows, outputs)),
        "canvas.csv": csv_of([*CANVAS_COLUMNS, settings.assignment], _canvas(rows, settings)),
        "overview.html": _page(rows, others, outputs),
    }
    files |= {f"reports/{row.student_id}.md": report_of(row, settings) for row in rows if row.student_id}
    (out / "reports").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with atomic_write(out / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))


# --------------------------------------------------------------------------------------------------------- CSV files


def safe_cell(value: object) -> str:
    """A cell that no spreadsheet takes for a formula; some read full-width signs as well."""
    text = str(value)
    return f"'{text}" if re.match(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]", text) else text


def csv_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([safe_cell(cell) for cell in row] for row in (header, *rows))
    return buffer.getvalue()


def _grades(rows: Sequence[Row], outputs: Sequence[str]) -> tuple[list[str], list[list[object]]]:
    columns = [name.removesuffix("-output.txt") for name in outputs]
    header = ["id", "grade", "status", "name", "computed", "reason", "open", "deductions", "findings", "coherence"]
    lines = []
    for row in rows:
        grade, scores = row.grade, row.judgement.scores if row.judgement else {}
        codes = " ".join(sorted({one.code for one in row.findings}))
        accuracies = [scores.get(name, (0, None, None))[1] for name in outputs]
        lines.append([
            row.student_id, grade.letter, grade.status, row.name, grade.computed, grade.reason, "; ".join(grade.open),
            "; ".join(grade.reasons), codes, row.judgement.coherence if row.judgement else "",
            *("" if accuracy is None else f"{accuracy:.4f}" for accuracy in accuracies), row.file,
        ])  # fmt: skip
    return [*header, *columns, "file"], lines


def _canvas(rows: Iterable[Row], settings: Settings) -> Iterable[list[object]]:
    """The students with a grade: Canvas leaves a student as he is who has no line."""
    for row in rows:
        if row.student_id and row.grade.letter:
            value = settings.points.get(row.grade.letter, row.grade.letter)
            yield [row.name, row.canvas_id, row.student_id, row.section, value]


# ----------------------------------------------------------------------------------------------------------- reports


def markdown(value: object) -> str:
    """Text on one line, without marks of Markdown or HTML that would mean something."""
    text = " ".join(printable(value, LONGEST).split())
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", html.escape(text, quote=False))


def report_of(row: Row, settings: Settings) -> str:
    """The report of one student, in Markdown."""
    grade = row.grade
    lines = [f"# {markdown(row.student_id)}: {grade.letter or 'no grade'} ({grade.status})", ""]
    if grade.reason:
        lines += [f"Given by a person in place of {markdown(grade.computed)}: {markdown(grade.reason)}", ""]
    lines += [f"File: {markdown(row.file)}", ""] if row.file else []
    for title, entries in (("What lowered the grade", grade.reasons), ("Still open", grade.open)):
        lines += [f"## {title}", "", *(f"- {markdown(entry)}" for entry in entries), ""] if entries else []
    if row.findings:
        lines += ["## Findings", ""]
    for one in row.findings:
        place = markdown(one.file) + (f" line {one.line}" if one.line else "") if one.file else ""
        lines.append(f"- **{one.code}** ({one.severity}): {markdown(one.text)}")
        details = (("where", place), ("expected", markdown(one.expected)), ("got", markdown(one.got)),
                   ("what to do", one.check.advice))  # fmt: skip
        lines += [f"  - {name}: {text}" for name, text in details if text]
    lines += [""] if row.findings else []
    return "\n".join([*lines, *_scores(row, settings), *_parts(row)]).rstrip("\n") + "\n"


def _scores(row: Row, settings: Settings) -> list[str]:
    """The table of accuracies."""
    if not (row.judgement and row.judgement.scores):
        return []
    lines = ["## Accuracies", "", "| output file | lines | accuracy | reference | majority |", "|---|---|---|---|---|"]
    for name, (count, *numbers) in row.judgement.scores.items():
        reference = reference_of(*OUTPUT.fullmatch(name).groups(), settings)
        cells = ["-" if number is None else f"{number:.3f}" for number in (numbers[0], reference, numbers[1])]
        lines.append(f"| {name} | {count} | {' | '.join(cells)} |")
    return [*lines, "", f"Coherence of the text at temperature 0: {row.judgement.coherence}.", ""]


def _parts(row: Row) -> list[str]:
    """The executed checks, with what the failed ones printed last."""
    if row.judgement is None or row.judgement.parts is None:
        return []
    lines = ["## Executed checks", ""]
    for part in row.judgement.parts:
        said = markdown(part.message)
        lines.append(f"- {markdown(part.part)}: {said or 'ok' if part.passed else f'FAILED: {said}'}")
        lines += [f"  - `>` {markdown(line)}" for line in part.tail.splitlines()]
    return [*lines, ""]


def _page(rows: Sequence[Row], others: Sequence[str], outputs: Sequence[str]) -> str:
    """One self-contained HTML page, without scripts."""
    jinja2 = need("jinja2")
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(autoescape=True, **options).from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(rows=rows, others=[printable(name) for name in others], outputs=outputs) + "\n"
