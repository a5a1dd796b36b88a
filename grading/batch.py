"""All submissions of a folder, in several processes, and the sheets that are written about them.

What is finished stands in one JSON file a student, from which a run resumes. It has a key, the hash of everything that
a judgement depends on: the zip, the config, the data, the code of `grading/` and the packages that it compares with. A
file with another key is not used, and replaced.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import html
import io
import json
import os
import pickle
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grading.archive import FormatError
from grading.editions import LABEL_NAMES
from grading.findings import Finding, with_severities
from grading.judge import (
    Executed,
    Grade,
    Judgement,
    RunCode,
    compare_students,
    examine,
    grade_of,
    override,
    reference_of,
)
from grading.needs import Package
from grading.outputs import OUTPUT, can_count_pages
from grading.programs import GradingError, atomic_write, printable
from grading.settings import Settings, need
from grading.uploads import Submission, read_payload

# ----------------------------------------------------------------------------------------------------------- the sheets
# Two CSV files, a report for each student, one page for all. Names and texts are hostile. In a CSV file, a cell that a
# spreadsheet would take for a formula gets an apostrophe in front. Reports hold no raw HTML and no marks of Markdown
# but their own; the page is a jinja2 template with autoescape.

PAGE = Path(__file__).with_name("overview.html")
LONGEST = 500  # characters of a text in a report
CANVAS_COLUMNS = ("Student", "ID", "SIS Login ID", "Section")


@dataclass
class StudentRow:
    """Everything about one submission. judgement: None without a file to judge."""

    student_id: str
    name: str
    canvas_id: str
    section: str
    file: str
    judgement: Judgement | None
    findings: list[Finding]
    grade: Grade


def write_sheets(rows: Sequence[StudentRow], others: Sequence[str], settings: Settings, out: Path) -> None:
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


def _grades(rows: Sequence[StudentRow], outputs: Sequence[str]) -> tuple[list[str], list[list[object]]]:
    columns = [name.removesuffix("-output.txt") for name in outputs]
    header = ["id", "grade", "status", "name", "computed", "reason", "open", "deductions", "findings"]
    lines = []
    for row in rows:
        grade, scores = row.grade, row.judgement.scores if row.judgement else {}
        codes = " ".join(sorted({one.code for one in row.findings}))
        accuracies = [scores.get(name, (0, None, None))[1] for name in outputs]
        lines.append([
            row.student_id, grade.letter, grade.status, row.name, grade.computed, grade.reason, "; ".join(grade.open),
            "; ".join(grade.reasons), codes,
            *("" if accuracy is None else f"{accuracy:.4f}" for accuracy in accuracies), row.file,
        ])  # fmt: skip
    return [*header, *columns, "file"], lines


def _canvas(rows: Iterable[StudentRow], settings: Settings) -> Iterable[list[object]]:
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


def report_of(row: StudentRow, settings: Settings) -> str:
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
        lines.append(f"- **{one.code}** ({one.severity}): {markdown(one)}")
        details = (("where", place), ("expected", markdown(one.expected)), ("got", markdown(one.got)),
                   ("what to do", one.check.advice))  # fmt: skip
        lines += [f"  - {name}: {text}" for name, text in details if text]
    lines += [""] if row.findings else []
    return "\n".join([*lines, *_scores(row, settings), *_parts(row)]).rstrip("\n") + "\n"


def _scores(row: StudentRow, settings: Settings) -> list[str]:
    """The table of accuracies."""
    if not (row.judgement and row.judgement.scores):
        return []
    lines = ["## Accuracies", "", "| output file | lines | accuracy | reference | majority |", "|---|---|---|---|---|"]
    for name, (count, *numbers) in row.judgement.scores.items():
        reference = reference_of(*OUTPUT.fullmatch(name).groups(), settings)
        cells = ["-" if number is None else f"{number:.3f}" for number in (numbers[0], reference, numbers[1])]
        lines.append(f"| {name} | {count} | {' | '.join(cells)} |")
    return [*lines, ""]


def _parts(row: StudentRow) -> list[str]:
    """The executed checks, with what the failed ones printed last."""
    if row.judgement is None or row.judgement.parts is None:
        return []
    lines = ["## Executed checks", ""]
    for part in row.judgement.parts:
        said = markdown(part.message.removeprefix("WRONG: "))
        failed = said if part.message.startswith("not judged") else f"FAILED: {said}"
        lines.append(f"- {markdown(part.part)}: {said or 'ok' if part.passed else failed}")
        lines += [f"  - `>` {markdown(line)}" for line in part.tail.splitlines()]
    return [*lines, ""]


def _page(rows: Sequence[StudentRow], others: Sequence[str], outputs: Sequence[str]) -> str:
    """One self-contained HTML page, without scripts."""
    jinja2 = need("jinja2")
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(autoescape=True, **options).from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(rows=rows, others=[printable(name) for name in others], outputs=outputs) + "\n"


# ------------------------------------------------------------------------------------------------------------ the batch

STATE, OLD_STATE = "judgements", "state.jsonl"  # the folder of the students' JSON files; a former version's file
Job = tuple[Path, str, Settings, "RunCode | None"]  # the arguments of `examine`


def judge_one(job: Job) -> Judgement:
    """Judge one submission. A defect of the checker is a finding, and stops nothing. Raises `GradingError`."""
    try:
        return examine(*job)
    except GradingError:
        raise
    except OSError as error:
        return failed(f"cannot be read: {error.strerror}")
    except Exception as error:
        return failed(f"{type(error).__name__}: {printable(error)}")


def failed(why: str) -> Judgement:
    return Judgement([Finding(f"the checker failed: {why}", "E079-failed")])


def judge_all(
    submissions: Sequence[Submission], settings: Settings, out: Path, jobs: int, run_code: RunCode | None = None
) -> Iterator[tuple[Submission, Judgement | None]]:
    """The submissions with their judgements, as they are finished; None without a file or student.

    Writes a JSON file for each, and reads the one of an earlier run that has its key. Raises `GradingError` if the
    grader's own files are broken; what is finished stays.
    """
    around, keys, todo = surroundings(settings, run_code), {}, {}
    (out / STATE).mkdir(exist_ok=True)
    for index, one in enumerate(submissions):
        student_id, known = one.student.student_id, None
        if one.path is not None and student_id:
            keys[index] = key_of(one, around)
            known = read_judgement(out / STATE / f"{student_id}.json", keys[index])
            if known is None:
                todo[index] = one.path, student_id, settings, run_code
                continue
        yield one, known
    judged = _in_processes(todo, jobs) if jobs > 1 else ((index, judge_one(job)) for index, job in todo.items())
    for index, judgement in judged:
        one = submissions[index]
        if all(finding.code != "E079-failed" for finding in judgement.findings):  # the next run tries that again
            write_judgement(out / STATE / f"{one.student.student_id}.json", keys[index], judgement)
        yield one, judgement


# --------------------------------------------------------------------------------------------- one JSON file a student


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def surroundings(settings: Settings, run_code: RunCode | None) -> bytes:
    """The hash of everything but the zip."""
    package = Package()
    files = {f"{package.root / name}": path for name, path in package.paths.items()}
    gold = [path for dataset in LABEL_NAMES for path in Path(settings.gold).glob(f"{dataset}-*")]
    files |= {str(path): path for path in gold if path.is_file()}
    contents = [part for name in sorted(files) for part in (name.encode(), files[name].read_bytes())]
    flags = f"{settings!r} {run_code!r} {sys.version_info[:2]} {can_count_pages()}"
    return _digest(flags.encode(), *contents).encode()


def key_of(submission: Submission, around: bytes) -> str:
    try:
        payload = read_payload(submission.path, submission.student.student_id)
    except (FormatError, OSError) as error:
        payload = f"{type(error).__name__} {error}".encode()
    return _digest(around, submission.student.student_id.encode(), submission.path.name.encode(), payload)


def write_judgement(path: Path, key: str, judgement: Judgement) -> None:
    """Write a student's file, whole or not at all."""
    findings = [one.told() for one in judgement.findings]
    with atomic_write(path) as file:
        file.write(json.dumps({"key": key, **asdict(judgement), "findings": findings}).encode())


def read_judgement(path: Path, key: str) -> Judgement | None:
    """The judgement in a student's file; None if there is none with this key."""
    try:
        values = json.loads(path.read_bytes())
        if values.pop("key") != key:
            return None
        values["findings"] = [Finding(**one) for one in values["findings"]]
        values["scores"] = {name: tuple(score) for name, score in values["scores"].items()}
        values["parts"] = values["parts"] and [Executed(*part) for part in values["parts"]]
        return Judgement(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


# --------------------------------------------------------------------------------------------------- several processes
# Each judges one submission after the other. In a session of its own it hears no Ctrl-C, and its temporary files lie in
# a folder of this process: it can be killed at any time. The end of its input tells it that this process is gone.

WORKER_CODE = "import sys; sys.path[:] = {path!r}; from grading.batch import work; work(sys.argv[1])"
POLL = 0.02  # seconds between two looks for answers
LAST_SECONDS = 5.0  # for a killed process: an interrupt in poll() can leave its lock closed; then wait() would not end
ANSWERS = "answers"  # the folder of the answers; no other user reads there


def _in_processes(todo: dict[int, Job], most: int) -> Iterator[tuple[int, Judgement]]:
    """Judge in so many processes. One that dies costs its own submission alone."""
    waiting, idle, busy = list(reversed(todo)), [], {}
    with tempfile.TemporaryDirectory(prefix="minllama-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o711)  # the box's user passes through it
        Path(scratch, ANSWERS).mkdir(mode=0o700)
        try:
            while waiting or busy:
                while waiting and len(busy) < most:
                    process, index = (idle.pop() if idle else _start_worker(scratch)), waiting.pop()
                    busy[process] = index
                    with contextlib.suppress(BrokenPipeError):  # it has died, which is found below
                        process.stdin.write(pickle.dumps((index, todo[index])))
                time.sleep(POLL)
                for process, index in [*busy.items()]:
                    has_died = process.poll() is not None  # before the look for an answer, which it may have given
                    file = Path(scratch, ANSWERS, str(index))
                    if has_died or file.exists():
                        del busy[process]
                        idle += [] if has_died else [process]
                        yield index, _read_answer(file)
        finally:
            for process in (*busy, *idle):
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_SECONDS)


def _start_worker(scratch: str) -> subprocess.Popen:
    flags, code = ["-B"] * sys.dont_write_bytecode, WORKER_CODE.format(path=sys.path)
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, scratch], stdin=subprocess.PIPE, bufsize=0, start_new_session=True,
        env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch),
    )  # fmt: skip


def _read_answer(file: Path) -> Judgement:
    """The answer that a process has left in a file. Raises the `GradingError` that it met."""
    answer = pickle.loads(file.read_bytes()) if file.exists() else failed("its process died")
    if isinstance(answer, GradingError):
        raise answer
    return answer


def work(scratch: str) -> None:
    """In a process of its own: judge the jobs on standard input, and leave each answer in a file with its number."""

    def read_jobs() -> None:
        try:
            while True:
                jobs.put(pickle.load(sys.stdin.buffer))
        finally:  # the end of the input, also within a job
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there are no sessions
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=read_jobs, daemon=True).start()
    while True:
        index, job = jobs.get()
        try:
            answer = judge_one(job)
        except GradingError as error:
            answer = error
        with atomic_write(Path(scratch, ANSWERS, str(index))) as file:
            file.write(pickle.dumps(answer))


# ----------------------------------------------------------------------------------------------------------- all rows


def rows_of(
    judged: Iterable[tuple[Submission, Judgement | None]], settings: Settings, overrides: dict[str, tuple[str, str]]
) -> list[StudentRow]:
    """A row for each submission, in the order of the IDs, with what shows only beside the others."""
    judged = sorted(judged, key=lambda pair: (not pair[0].student.student_id, pair[0].student, str(pair[0].path)))
    digests = {one.student.student_id: judgement.digests for one, judgement in judged if judgement}
    between, rows = compare_students(digests), []
    for one, judgement in judged:
        student = one.student
        found = [*one.messages, *between.get(student.student_id, []), *(judgement.findings if judgement else [])]
        findings = with_severities(found, settings.severity)
        grade = override(grade_of(findings, judgement, settings), student.student_id, overrides)
        file = printable(one.path.name) if one.path else ""
        rows.append(StudentRow(*student, file, judgement, findings, grade))
    return rows
