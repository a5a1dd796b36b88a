"""All submissions of a folder, in several processes. What is finished stands in state.jsonl, from which a run resumes.

A line of state.jsonl has a key, the hash of everything that a judgement depends on: the zip, the config, the data, the
code of `grading/` and the packages that it compares with. A line with another key is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from grading.archive import FormatError
from grading.coherence import limits_path
from grading.editions import LABEL_NAMES
from grading.findings import Finding, Message, findings_of, rank
from grading.intake import Submission, read_payload
from grading.judge import Executed, Judgement, RunCode, examine
from grading.package import Package
from grading.programs import GradingError, atomic_write, printable
from grading.results import compare_students
from grading.rubric import grade_of, override
from grading.settings import Settings
from grading.sheets import Row
from grading.texts import TextJudge

STATE = "state.jsonl"
LAST_SECONDS = 5.0  # of a process whose parent is gone
MakeJudge = Callable[[str, str], TextJudge]  # of the paths of a checkpoint and its tokenizer; importable by its name
Job = tuple[Path, str, Settings, "MakeJudge | None", "RunCode | None"]


@cache
def _judge(make: MakeJudge, checkpoint: str, tokenizer: str) -> TextJudge:
    """One in each process."""
    return make(checkpoint, tokenizer)


def judge_one(job: Job) -> Judgement:
    """Judge one submission, in a process of the pool. A defect of the checker is a finding, and stops nothing."""
    path, student_id, settings, make, run_code = job
    judge = _judge(make, settings.judge.checkpoint, settings.judge.tokenizer) if make else None
    try:
        return examine(path, student_id, settings, judge, run_code)
    except GradingError:
        raise
    except SystemExit:  # of `_begin_process`; the pool would go on with what waits
        os._exit(1)
    except OSError as error:
        return failed(f"cannot be read: {error.strerror}", settings)
    except Exception as error:
        return failed(f"{type(error).__name__}: {printable(error)}", settings)


def failed(why: str, settings: Settings) -> Judgement:
    return Judgement(findings_of([Message(f"the checker failed: {why}", "E079-failed")], settings.severity))


# -------------------------------------------------------------------------------------------------------------- state


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def surroundings(settings: Settings, make: MakeJudge | None, run_code: RunCode | None) -> bytes:
    """The hash of everything but the zip."""
    package = Package()
    files = {f"{package.root / name}": path for name, path in package.paths.items()}
    gold = [path for dataset in LABEL_NAMES for path in Path(settings.gold).glob(f"{dataset}-*")]
    files |= {str(path): path for path in gold if path.is_file()}
    if make:
        judging = [*asdict(settings.judge).values(), limits_path(settings.judge.checkpoint)]
        files |= {str(path): Path(path) for path in judging if Path(path).is_file()}
    contents = [part for name in sorted(files) for part in (name.encode(), files[name].read_bytes())]
    flags = f"{settings!r} {make is not None} {run_code!r} {sys.version_info[:2]}"
    return _digest(flags.encode(), *contents).encode()


def key_of(submission: Submission, around: bytes) -> str:
    try:
        payload = read_payload(submission.path, submission.student.student_id)
    except (FormatError, OSError) as error:
        payload = f"{type(error).__name__} {error}".encode()
    return _digest(around, submission.student.student_id.encode(), submission.path.name.encode(), payload)


def line_of(key: str, judgement: Judgement) -> str:
    return json.dumps({"key": key, **asdict(judgement)}, ensure_ascii=True) + "\n"


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
    submissions: Sequence[Submission], settings: Settings, out: Path, jobs: int,
    make: MakeJudge | None = None, run_code: RunCode | None = None,
) -> Iterator[tuple[Submission, Judgement | None]]:  # fmt: skip
    """The submissions with their judgements, as they are finished; None without a file or student. Writes state.jsonl.

    Raises `GradingError` if the grader's own files are broken; what is finished stays.
    """
    around, known = surroundings(settings, make, run_code), read_state(out / STATE)
    is_known = [one.path is not None and bool(one.student.student_id) for one in submissions]
    keys = {index: key_of(one, around) for index, one in enumerate(submissions) if is_known[index]}
    yield from ((one, None) for one, known_one in zip(submissions, is_known, strict=True) if not known_one)
    yield from ((submissions[index], known[key]) for index, key in keys.items() if key in known)
    todo = {
        index: (submissions[index].path, submissions[index].student.student_id, settings, make, run_code)
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
) -> list[Row]:
    """A row for each submission, in the order of the IDs, with what shows only beside the others."""
    judged = sorted(judged, key=lambda pair: (not pair[0].student.student_id, pair[0].student, str(pair[0].path)))
    digests = {one.student.student_id: judgement.digests for one, judgement in judged if judgement}
    between, rows = compare_students(digests), []
    for one, judgement in judged:
        student = one.student
        extra = findings_of([*one.messages, *between.get(student.student_id, [])], settings.severity)
        findings = sorted([*extra, *(judgement.findings if judgement else [])], key=rank)
        grade = override(grade_of(findings, judgement, settings), student.student_id, overrides)
        file = printable(one.path.name) if one.path else ""
        rows.append(Row(*student, file, judgement, findings, grade))
    return rows
