"""All submissions of a folder, in several processes, and the sheets that are written about them.

What is finished stands in state.jsonl, from which a run resumes. A line of it has a key, the hash of everything that a
judgement depends on: the zip, the config, the data, the code of `grading/` and the packages that it compares with. A
line with another key is not used.
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from grading.archive import FormatError
from grading.editions import LABEL_NAMES
from grading.findings import Finding, rank, with_severities
from grading.intake import Submission, read_payload
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
        said = markdown(part.message)
        lines.append(f"- {markdown(part.part)}: {said or 'ok' if part.passed else f'FAILED: {said}'}")
        lines += [f"  - `>` {markdown(line)}" for line in part.tail.splitlines()]
    return [*lines, ""]


def _page(rows: Sequence[StudentRow], others: Sequence[str], outputs: Sequence[str]) -> str:
    """One self-contained HTML page, without scripts."""
    jinja2 = need("jinja2")
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(autoescape=True, **options).from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(rows=rows, others=[printable(name) for name in others], outputs=outputs) + "\n"


# ------------------------------------------------------------------------------------------------------------ the batch

STATE = "state.jsonl"
LAST_SECONDS = 5.0  # of a process whose parent is gone
Job = tuple[Path, str, Settings, "RunCode | None"]  # pickled for the processes


def judge_one(job: Job) -> Judgement:
    """Judge one submission, in a process of the pool. A defect of the checker is a finding, and stops nothing."""
    path, student_id, settings, run_code = job
    try:
        return examine(path, student_id, settings, run_code)
    except GradingError:
        raise
    except SystemExit:  # of `_begin_process`; the pool would go on with what waits
        os._exit(1)
    except OSError as error:
        return failed(f"cannot be read: {error.strerror}", settings)
    except Exception as error:
        return failed(f"{type(error).__name__}: {printable(error)}", settings)


def failed(why: str, settings: Settings) -> Judgement:
    return Judgement(with_severities([Finding(f"the checker failed: {why}", "E079-failed")], settings.severity))


# -------------------------------------------------------------------------------------------------------------- state


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


def line_of(key: str, judgement: Judgement) -> str:
    findings = [one.told() for one in judgement.findings]
    return json.dumps({"key": key, **asdict(judgement), "findings": findings}, ensure_ascii=True) + "\n"


def read_state(path: Path) -> dict[str, Judgement]:
    """The judgements of an earlier run by their keys. Lines that were cut short are left out."""
    found = {}
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            values = json.loads(line)
            key = values.pop("key")
            values["findings"] = [Finding(**one) for one in values["findings"]]
            values["scores"] = {name: tuple(score) for name, score in values["scores"].items()}
            values["parts"] = values["parts"] and [Executed(*part) for part in values["parts"]]
            if all(one.code != "E079-failed" for one in values["findings"]):  # that is tried again
                found[key] = Judgement(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


# ---------------------------------------------------------------------------------------------------------------- run


def judge_all(
    submissions: Sequence[Submission], settings: Settings, out: Path, jobs: int, run_code: RunCode | None = None
) -> Iterator[tuple[Submission, Judgement | None]]:
    """The submissions with their judgements, as they are finished; None without a file or student. Writes state.jsonl.

    Raises `GradingError` if the grader's own files are broken; what is finished stays.
    """
    around, known = surroundings(settings, run_code), read_state(out / STATE)
    is_known = [one.path is not None and bool(one.student.student_id) for one in submissions]
    keys = {index: key_of(one, around) for index, one in enumerate(submissions) if is_known[index]}
    yield from ((one, None) for one, known_one in zip(submissions, is_known, strict=True) if not known_one)
    yield from ((submissions[index], known[key]) for index, key in keys.items() if key in known)
    todo = {
        index: (submissions[index].path, submissions[index].student.student_id, settings, run_code)
        for index, key in keys.items()
        if key not in known
    }
    with open(out / STATE, "ab") as state:
        if state.tell():
            state.write(b"\n")  # the last line may be cut short
        for index, judgement in _in_processes(todo, jobs):
            known[keys[index]] = judgement
            state.write(line_of(keys[index], judgement).encode())
            state.flush()
            os.fsync(state.fileno())
            yield submissions[index], judgement
    with atomic_write(out / STATE) as state:  # in order, without the lines of other runs
        state.writelines(line_of(key, known[key]).encode() for key in dict.fromkeys(keys.values()))


def _in_processes(todo: dict[int, Job], jobs: int) -> Iterator[tuple[int, Judgement]]:
    """Judge in so many processes. One that dies is started again, for what it may have died of one at a time."""
    if jobs == 1:
        yield from ((index, judge_one(job)) for index, job in todo.items())
        return
    lost = {}
    with closing(_pool(todo, jobs)) as finished:
        for index, future in finished:
            try:
                yield index, future.result()
            except BrokenProcessPool:
                lost[index] = todo[index]
    for index, job in lost.items():
        for _, future in _pool({index: job}, 1):
            try:
                yield index, future.result()
            except BrokenProcessPool:
                yield index, failed("its process died", job[2])


def _pool(todo: dict[int, Job], jobs: int) -> Iterator[tuple[int, Future]]:
    """The finished futures of a pool of fresh processes. Those that wait are dropped when the caller stops."""
    others, pool = {*active_children()}, ProcessPoolExecutor(jobs, get_context("spawn"), _begin_process)
    try:
        with _deaf_to_interrupts():
            futures = {pool.submit(judge_one, job): index for index, job in todo.items()}  # starts the processes
        yield from ((futures[future], future) for future in as_completed(futures))
    except BaseException:
        for process in {*active_children()} - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; a process that begins in it hears none until it says so."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # as it is
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # raises, and has blocked, if Ctrl-C came before
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_process() -> None:
    """In a process of the pool: it ends, and removes its files, when the parent says so or is gone."""

    def follow() -> None:
        parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_SECONDS)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    if hasattr(signal, "pthread_sigmask"):  # see _deaf_to_interrupts
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.unraisablehook = _end_later
    threading.Thread(target=follow, daemon=True).start()


def _end_later(unraisable: sys.UnraisableHookArgs) -> None:
    """What a signal raises is lost if Python was in a `__del__` or a weak reference's callback: it comes once more."""
    if isinstance(unraisable.exc_value, SystemExit):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        sys.__unraisablehook__(unraisable)


def rows_of(
    judged: Iterable[tuple[Submission, Judgement | None]], settings: Settings, overrides: dict[str, tuple[str, str]]
) -> list[StudentRow]:
    """A row for each submission, in the order of the IDs, with what shows only beside the others."""
    judged = sorted(judged, key=lambda pair: (not pair[0].student.student_id, pair[0].student, str(pair[0].path)))
    digests = {one.student.student_id: judgement.digests for one, judgement in judged if judgement}
    between, rows = compare_students(digests), []
    for one, judgement in judged:
        student = one.student
        extra = with_severities([*one.messages, *between.get(student.student_id, [])], settings.severity)
        findings = sorted([*extra, *(judgement.findings if judgement else [])], key=rank)
        grade = override(grade_of(findings, judgement, settings), student.student_id, overrides)
        file = printable(one.path.name) if one.path else ""
        rows.append(StudentRow(*student, file, judgement, findings, grade))
    return rows
