"""One submission judged: its zip and outputs as `prepare_submit.py` does, then what only a batch needs to know.

Nothing of it is run here. `RunCode` is the place of those who do, in a box; without one no code is run.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grading.archive import FormatError
from grading.editions import ADVANCED, EDITIONS, INSTALLED, PUBLISHED_TENSORS
from grading.findings import Finding, Message, findings_of
from grading.intake import read_payload
from grading.package import Files, Package
from grading.pdf import right_name
from grading.programs import PARTS_FILE, few
from grading.results import check_results, fine_tuned_digests
from grading.rules import Report
from grading.settings import Settings
from grading.submission import look_into, with_hints
from grading.texts import NOT_JUDGED, TextJudge, check_texts


class Executed(NamedTuple):
    """The verdict on one executed check. message: "" or one line. tail: the last 40 lines that the code printed.

    code: of the finding that a failure is; "": it is a part of the code.
    """

    part: str
    passed: bool
    message: str = ""
    tail: str = ""
    code: str = ""


RunCode = Callable[[Path, str], list[Executed]]  # of the folder of a submission's files, and the edition

# Python imports these before anything else, or in place of a library or of one of its own modules.
SHADOWING = INSTALLED | set(sys.stdlib_module_names) | {"sitecustomize", "usercustomize"}
MODULE_ENDS = (".py", ".pyc", ".so", ".pyd", "/__init__.py")
# The graders and their numbers as the course hands them out: the first digits of SHA-256, of text with \n. The copies
# of this package are right as well.
HANDED_OUT = {
    "sanity_check.py": {"46b64be77a0cd69f"},
    "optimizer_test.py": {"78c5a0d4cb8b9634", "57be41d5e813c99f", "eb67f8e2aa55aec0"},
    "rope_test.py": {"f9c36b2f43796110"},
    "prepare_submit.py": {
        "4a528777d1aee716", "68e75417ab583406", "4dd7c5fac380a6ad", "789862dcc6f282f9", "c2566b412a91456a",
        "ae5081e22c20b7aa", "cdc5b326b1a147d9",
    },
    "sanity_check.data": {*PUBLISHED_TENSORS, "f6fc73afcffa7dc6"},
    "optimizer_test.npy": {"77b817e0dce16a9b", "5e66b55c2c6784e1"},
    "rotary_embedding_actual.data": {"57b5f9defc948995", "db23557f4ab154de"},
}  # fmt: skip
MAX_CHECKER = 1_000_000  # bytes of a checker that is compared


@dataclass
class Judgement:
    """What is known of one submission by itself. Plain values, which JSON keeps.

    was_read: whether it could be judged at all. scores: lines, accuracy and majority of each output file. digests: of
    fine-tuned labels, to compare students. coherence: a word of `grading.texts`. parts: None where no code was run.
    """

    findings: list[Finding] = field(default_factory=list)
    was_read: bool = False
    scores: dict[str, tuple[int, float | None, float | None]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    coherence: str = NOT_JUDGED
    parts: list[Executed] | None = None


def examine(
    path: Path, student_id: str, settings: Settings, judge: TextJudge | None = None, run_code: RunCode | None = None
) -> Judgement:
    """Judge one zip or folder. Raises `GradingError` and `OSError` for the grader's own files and for the disk."""
    rules, judgement = settings.rules(), Judgement()
    try:
        payload = read_payload(path, student_id)
    except FormatError as error:
        judgement.findings = findings_of([Message(str(error), "E003-unpacked")], settings.severity)
        return judgement
    report, files = look_into(payload, student_id, rules)
    messages = list(_refined(report, settings))
    if len(payload) > rules.max_bytes and not path.is_dir():
        messages.append(rules.too_large(len(payload)))
    if files is not None:
        judgement.was_read = True
        texts, verdict = check_texts(report.texts, settings, judge)
        messages += [*texts, *check_results(report, settings), *_suspicious(files, Package())]
        judgement.coherence = verdict.word
        judgement.digests = fine_tuned_digests(report.labels, settings.thresholds.lines)
        if run_code:
            judgement.parts = _run(files, settings.edition, run_code)
            messages += list(_failed(judgement.parts))
    if right_name(student_id) in report.files and any(name in report.files for name in ADVANCED):
        messages.append(Message("advanced outputs and a report", "E064-a-plus", right_name(student_id)))
    judgement.scores = {name: tuple(score) for name, score in report.scores.items()}
    judgement.findings = findings_of(messages, settings.severity)
    return judgement


def _refined(report: Report, settings: Settings) -> Iterator[Message]:
    """The report's messages: missing files one by one, accuracies left to `grading.results` and its config."""
    for message in (*report.problems, *report.warnings, *report.notes):
        if message.code == "E012-missing":
            for name in EDITIONS[settings.edition].required:
                if name not in report.files:
                    code = "E012-missing" if name.endswith(".py") else "E013-no-output"
                    yield Message(f"missing: {with_hints([name], report.files)}", code, name)
        elif message.code not in ("E040-accuracy", "E041-high"):
            yield message


def _suspicious(files: Files, package: Package) -> Iterator[Message]:
    """Files that stand in for libraries, and graders that are not the course's."""
    shadows = [
        name
        for name in files.sizes
        for end in MODULE_ENDS
        if name.endswith(end) and name.removesuffix(end).partition(".")[0] in SHADOWING
    ]
    for name in sorted(shadows):
        yield Message(f"{name} is imported in place of another module of that name", "E037-shadow", name)
    changed = sorted(name for name in files.sizes if not _is_handed_out(name, files, package))
    if changed:
        yield Message(f"other than those handed out: {few(changed)}", "E038-checker", changed[0])


def _is_handed_out(name: str, files: Files, package: Package) -> bool:
    """Whether a file is no grader, or one of the course's or of this package's."""
    if not (name in HANDED_OUT or name == PARTS_FILE or (name.startswith("grading/") and name in package.files)):
        return True
    if files.sizes[name] > MAX_CHECKER:
        return False
    content = _plain(name, files.read(name))
    own = name in package.files and content == _plain(name, package.files.read(name))
    return own or hashlib.sha256(content).hexdigest()[:16] in HANDED_OUT.get(name, ())


def _plain(name: str, content: bytes) -> bytes:
    """Without what may differ between right copies: an editor's byte-order mark and line ends, a hand-out's edition."""
    if name == "grading/editions.py":
        content = re.sub(rb'(?m)^DEFAULT_EDITION = "\w+"', b"", content)
    return content.replace(b"\r\n", b"\n").removeprefix(codecs.BOM_UTF8) if name.endswith((".py", ".json")) else content


def _run(files: Files, edition: str, run_code: RunCode) -> list[Executed]:
    """Write a submission's files into a folder of their own, and have them run there."""
    with tempfile.TemporaryDirectory(prefix="minllama-submission-") as folder:
        for name in files.sizes:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files.read(name))
        return run_code(Path(folder), edition)


def _failed(parts: list[Executed]) -> Iterator[Message]:
    """The failed parts; those that were not judged, as they need a failed one, only if there are no others."""
    failed = [part for part in parts if not part.passed]
    for part in [part for part in failed if not part.message.startswith("not judged")] or failed:
        code = "E081-import" if part.part.startswith("import") else "E080-part"
        yield Message(f"{part.part}: {part.message}", part.code or code)
