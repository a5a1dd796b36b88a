"""Running the checks on a stranger's code: `python -m grading.box FOLDER|ZIP`. Exit status 0 right, 1 wrong, 2 not run.

The code runs in the box of `grading.sandbox`, answers questions with plain numbers, and every number is judged here:
rotary embedding, AdamW, each part of the model, and texts that a tiny model generates. Inputs and weights are drawn
anew for each run. Nothing of the student's is imported, unpickled or believed here.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from grading.archive import FormatError, archive_problems, read_archive, read_entry
from grading.editions import DEFAULT_EDITION, EDITIONS
from grading.judge import Executed
from grading.programs import GradingError, GradingParser, printable, run_main
from grading.rules import Report
from grading.sandbox import LIMITS, MIB, OPTIONAL, Box, BoxedProcess, BoxLimits, open_box, open_to_all
from grading.student_process import (
    ChildAnswer,
    ChildQuestion,
    Student,
    add_time_limit,
    takes_attention,
    time_limit_of,
)
from grading.submission import CLUTTER, FOREIGN, enter_top_folder
from grading.uploads import read_payload

MOST_CODE = 100 * MIB  # bytes of a submission that is run
ROPE, ADAMW, START, END = "rope_test.py", "optimizer_test.py", "import of PyTorch", "end of the process"


@dataclass
class BoxedStudent(Student):
    """The student's code in a copy of `folder`, in the box. All questions together have `limits.total` seconds."""

    box: Box = field(default_factory=open_box)
    tails: dict[str, str] = field(default_factory=dict)  # what had been printed when a question met trouble
    last_tail: str = ""  # of a process that was lost

    def __enter__(self) -> BoxedStudent:
        self.deadline = time.monotonic() + self.box.limits.total
        return super().__enter__()

    def new_process(self) -> BoxedProcess:
        home = Path(self.scratch.name)
        if not (home / "code").exists():
            self.box.prepare(home)
            copy_code(self.folder, home / "code")
            open_to_all(home)
        return BoxedProcess(self.box, home)

    def _drop(self) -> None:
        if self.process is not None:
            self.last_tail = self.process.tail()
        super()._drop()

    def ask(self, question: ChildQuestion) -> ChildAnswer:
        left = self.deadline - time.monotonic()
        if left <= 0:
            over = f"not asked: the {self.box.limits.total:g} s of all checks are over"
            return ChildAnswer(trouble=over, is_lost=True)
        self.time_limit = min(self.box.limits.seconds, left)
        answer = super().ask(question)
        if answer.trouble:
            self.tails[key(question)] = self.tail()
        return answer

    def tail(self) -> str:
        """The last lines that the process, or one that was lost, has printed."""
        return self.process.tail() if self.process else self.last_tail

    def end(self) -> str:
        """Nothing: one process answers the questions of all scripts; `finish` ends it."""
        return ""

    def finish(self) -> str:
        """The trouble with the end of the process, or ""."""
        self.time_limit = max(1.0, min(self.box.limits.seconds, self.deadline - time.monotonic()))
        return super().end()


def key(question: ChildQuestion) -> str:
    return f"{question.name} {question.settings}"


def run_checks(
    folder: Path, edition: str, box: Box, seed: str | None = None, tell: Callable[[Executed], None] = lambda one: None
) -> list[Executed]:
    """The verdicts on a student's code, in the order in which one writes it.

    folder: the submission's files, of which plain files alone are copied into the box. edition: a key of `EDITIONS`.
    seed: a secret that decides all inputs, for messages that are the same in each run; None draws them. tell: is given
    each verdict at once. Call it from a thread that lives as long as the checks do: the box ends with it.
    """
    executed: list[Executed] = []

    def judge_all() -> None:
        for one in each_check(folder, edition, box, random.SystemRandom() if seed is None else random.Random(seed)):
            executed.append(one)
            tell(one)

    contextvars.copy_context().run(judge_all)  # the salt is this run's own
    return executed


@dataclass(frozen=True)
class InBox:
    """`run_checks` for a batch: what the box lacks comes first, and the inputs are drawn from a hash of the files.

    So the same submission always has the same report. Answers that are written in advance would change the hash.
    """

    box: Box

    def __call__(self, folder: Path, edition: str) -> list[Executed]:
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                digest.update(f"{path.relative_to(folder)}\0".encode("utf-8", "surrogateescape"))
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        lacks = [Executed("the box", True, f"without {LIMITS[name]} ({name})") for name in self.box.missing]
        return [*lacks, *run_checks(folder, edition, self.box, digest.hexdigest())]


def each_check(folder: Path, edition: str, box: Box, drawer: random.Random) -> Iterator[Executed]:
    passed = True
    try:
        with BoxedStudent(Path(folder), box=box) as student:
            for check in (check_scripts, check_parts):
                for one in check(student, drawer, edition):
                    passed = passed and one.passed
                    yield one
            trouble = student.finish()
            if trouble or passed:
                yield Executed(END, not trouble, trouble, student.tail() if trouble else "")
    except GradingError as error:  # the box has been tried before: what keeps it from starting is in the folder
        yield Executed(START, False, str(error))
    for name in EDITIONS[edition].folders:
        from grading.addition_models import check_models

        with tempfile.TemporaryDirectory(prefix="minllama-") as empty, BoxedStudent(Path(empty), box=box) as reader:
            yield from check_models(reader, Path(folder, name), drawer)


def check_scripts(student: BoxedStudent, drawer: random.Random, edition: str) -> Iterator[Executed]:
    """What `rope_test.py` and `optimizer_test.py` say, with drawn inputs beside the published ones."""
    from grading.adamw import COURSE_CHECK, OWN_LIMIT, check_adamw
    from grading.parts import draw_salt
    from grading.rotary import check_rotation

    for part, check in (
        (ROPE, partial(check_rotation, seed=draw_salt((), drawer))),
        (ADAMW, partial(check_adamw, clips=EDITIONS[edition].clips)),
    ):
        lines: list[str] = []
        passed = check(student, say=lines.append)
        if passed:  # perhaps by the course's own check alone, which two lines say
            yield Executed(part, True, "; ".join(line for line in lines if line.startswith((OWN_LIMIT, COURSE_CHECK))))
        else:
            yield Executed(part, False, lines[-1].partition(": ")[2], student.tail())


def check_parts(student: BoxedStudent, drawer: random.Random, edition: str) -> Iterator[Executed]:
    """The verdict on every part, as `sanity_check.py --parts` gives it, on a model that is drawn for this run."""
    from grading import parts, small_model

    small_model.NORM.set(EDITIONS[edition].norm)
    kinds = (EDITIONS[edition].attention,)
    parts.draw_salt(kinds, drawer)
    has_classifiers = "causal" not in kinds or takes_attention(student)
    asked = parts.all_parts(kinds, has_classifiers, EDITIONS[edition].sampling)
    for one in parts.judge_parts(student, asked, parts.right_numbers(kinds), parts.TOLERANCE):
        said = "" if one.verdict == "ok" else f"{one.verdict}: {one.sentence}"
        tail = "" if one.verdict in ("ok", "not judged") else student.tails.get(key(one.part.question), "")
        yield Executed(one.part.name, not said, said, tail, is_right_alone=one.is_right_alone)


# ------------------------------------------------------------------------------------------------ submissions


def copy_code(folder: Path, target: Path) -> None:
    """Copy the plain files of a submission but checkpoints and clutter. Raises `GradingError` if they are too large."""
    total = 0
    for path, folders, files in os.walk(folder):
        place = target / os.path.relpath(path, folder)
        place.mkdir(exist_ok=True)
        folders[:] = [name for name in folders if not (FOREIGN.match(name) or CLUTTER.match(name))]
        for name in files:
            found = os.lstat(os.path.join(path, name))
            if not stat.S_ISREG(found.st_mode) or FOREIGN.match(name) or CLUTTER.match(name):
                continue
            total += found.st_size
            if total > MOST_CODE:
                raise GradingError(f"the files of the submission have more than {MOST_CODE // MIB} MiB")
            shutil.copyfile(os.path.join(path, name), place / name)


@contextlib.contextmanager
def code_of(source: Path) -> Iterator[Path]:
    """The folder of a submission's code; a zip is unpacked into a temporary one. Raises `GradingError`."""
    if source.is_dir():
        yield source
        return
    try:
        archive = read_archive(read_payload(source, ""))
        if problems := archive_problems(archive, MOST_CODE):
            raise GradingError(f"{printable(source)}: {problems[0]}")
        files = enter_top_folder(archive.entries, Report(source.stem), EDITIONS[DEFAULT_EDITION])
        with tempfile.TemporaryDirectory(prefix="minllama-", ignore_cleanup_errors=True) as folder:
            for name, entry in files.items():
                place = Path(folder, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(read_entry(archive, entry, keep=True))
            yield Path(folder)
    except FormatError as error:
        raise GradingError(f"{printable(source)}: {error}") from None


def add_box_flags(parser: GradingParser) -> None:
    """The flags of every program that runs strangers' code."""
    add = parser.add_argument
    add("--python", metavar="PATH", help="the Python in the box; its user must be able to read it (default: this one)")
    add("--allow-without", metavar="LIMITS", default="", help=f"run although these are missing: {','.join(OPTIONAL)}")
    add_time_limit(parser)


def box_of(args: Namespace) -> Box:
    """The box that the flags ask for; a line on standard error names the limits that are missing in it."""
    limits, without = BoxLimits(seconds=time_limit_of(args)), tuple(filter(None, args.allow_without.split(",")))
    box = open_box(args.python, limits, without)
    for name in box.missing:
        print(f"warning: the box is without {LIMITS[name]} ({name})", file=sys.stderr)
    return box


def main() -> int:
    parser = GradingParser(description="Run the checks on the code of a submission in a box, and judge them outside.")
    parser.add_argument("source", type=Path, metavar="FOLDER|ZIP", help="the submission")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="of the course")
    add_box_flags(parser)
    args = parser.parse_args()
    if not args.source.exists():
        raise GradingError(f"{printable(args.source)} does not exist")
    box = box_of(args)
    with code_of(args.source) as folder:
        executed = run_checks(folder, args.edition, box)
    for one in executed:
        said = ": ".join(filter(None, ("ok", one.message))) if one.passed else one.message
        print(f"{one.part + ':':36s} {said}")
    if tail := next((one.tail for one in executed if one.tail), ""):
        print("What the code printed at the first of them:")
        print("\n".join(f"  | {printable(line, 200)}" for line in tail.splitlines()))
    return 0 if all(one.passed for one in executed) else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
