"""One submission judged: its zip and outputs as `prepare_submit.py` does, what only a batch needs to know, its grade.

Nothing of it is run here. `RunCode` is the place of those who do, in a box; without one no code is run.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from grading.archive import FormatError
from grading.editions import (
    ADVANCED,
    BUNDLED_NORM,
    EDITIONS,
    INSTALLED,
    LABEL_NAMES,
    PUBLISHED_TENSORS,
    TEXT_PROMPT,
    TEXTS,
    reference_accuracy,
)
from grading.findings import Finding
from grading.needs import Files, Package
from grading.outputs import OUTPUT, right_name
from grading.programs import PARTS_FILE, SEPARATOR, GradingError, few, printable, read_text
from grading.published import PUBLISHED_LABELS, PUBLISHED_TEXTS, labels_digest
from grading.rules import Report
from grading.settings import SCALE, Settings
from grading.submission import look_into, with_hints
from grading.uploads import Submission, read_payload, read_table

# ------------------------------------------------------------ accuracies against references; copied and repeated labels


def reference_of(dataset: str, split: str, kind: str, settings: Settings) -> float | None:
    """The reference's accuracy, by the config or else by the course; None where it names none."""
    usual = reference_accuracy(settings.edition, dataset, split, kind)
    return settings.references.get(f"{dataset}-{split}-{kind}", usual)


def check_results(report: Report, settings: Settings) -> Iterator[Finding]:
    """The findings about accuracies and labels of one submission."""
    edition = EDITIONS[settings.edition]
    is_published = (edition.norm, edition.attention) == (BUNDLED_NORM, "bidirectional")
    for name, score in report.scores.items():
        dataset, split, kind = OUTPUT.fullmatch(name).groups()
        if score.accuracy is not None and score.lines >= settings.thresholds.lines:
            reference = reference_of(dataset, split, kind, settings)
            yield from _check_accuracy(name, dataset, score.accuracy, reference, settings)
        if kind == "prompting" and is_published:
            yield from _check_zero_shot(name, f"{dataset}-{split}", report.labels[name])
    advanced = [name for name in ADVANCED if name in report.labels]
    base = {kind: [name.replace("advanced", kind) for name in advanced] for kind in ("prompting", "finetuning")}
    for kind, names in base.items():
        if advanced and all(report.labels[a] == report.labels.get(b) for a, b in zip(advanced, names, strict=True)):
            said = f"the advanced outputs have the labels of the {kind} outputs"
            yield Finding(said, "E047-advanced-equal", advanced[0])


def _check_accuracy(
    name: str, dataset: str, accuracy: float, reference: float | None, settings: Settings
) -> Iterator[Finding]:
    limits = settings.thresholds
    band, copied = getattr(limits, dataset), getattr(limits, f"copied_{dataset}")
    if accuracy >= copied:
        said = f"{name}: accuracy {accuracy:.3f}"
        yield Finding(said, "E042-gold", name, 0, f"less than {copied:g}", f"{accuracy:.3f}")
    elif reference is not None and round(abs(accuracy - reference), 3) > band:
        code = "E040-accuracy" if accuracy < reference else "E041-high"
        said = f"{name}: accuracy {accuracy:.3f}; the reference's is {reference:.3f}"
        yield Finding(said, code, name, 0, f"{reference - band:.3f} or more", f"{accuracy:.3f}")


def _check_zero_shot(name: str, part: str, labels: Sequence[int]) -> Iterator[Finding]:
    accepted = PUBLISHED_LABELS[part]
    if len(labels) == sum(accepted[0].counts) and labels_digest(labels) not in {one.sha256 for one in accepted}:
        yield Finding(f"{name}: other labels than the published ones", "E046-zero-shot", name)


def fine_tuned_digests(labels: Mapping[str, Sequence[int]], least: int) -> dict[str, str]:
    """The digest of each fine-tuned output with at least so many lines, by its name."""
    return {
        name: labels_digest(column)
        for name, column in labels.items()
        if name.endswith("-finetuning-output.txt") and len(column) >= least
    }


def compare_students(digests: Mapping[str, Mapping[str, str]]) -> dict[str, list[Finding]]:
    """Findings by student: the same fine-tuned labels as another's. digests: `fine_tuned_digests` by student."""
    holders, messages = defaultdict(list), defaultdict(list)
    for student, columns in digests.items():
        for name, digest in columns.items():
            holders[name, digest].append(student)
    for (name, _), students in sorted(holders.items()):
        code = "E048-same-labels" if name.startswith("sst") else "E049-same-cfimdb"
        for student in students if len(students) > 1 else []:
            others = few(set(students) - {student})
            messages[student].append(Finding(f"{name}: the same labels as {others}", code, name, 0, "", others))
    return messages


# ----------------------------------------- generated texts: prompt, repetition, known words; a person reads them, too

_WORD = re.compile(r"[^\W\d_]+")


def continuation(text: str) -> str:
    """What follows the assignment's prompt, with single spaces; the whole text where it does not begin with that."""
    return " ".join(text.split()).removeprefix(TEXT_PROMPT).strip()


def distinct_trigrams(words: Sequence[str]) -> float:
    """The share of the trigrams of some words that are distinct; 0 where there is none."""
    trigrams = [*zip(words, words[1:], words[2:], strict=False)]
    return len({*trigrams}) / max(1, len(trigrams))


@cache
def known_words(folder: str) -> frozenset[str]:
    """The words of all data sets in a folder, in lower case."""
    words: set[str] = set()
    for dataset in LABEL_NAMES:
        for path in sorted(Path(folder).glob(f"{dataset}-*.txt")):
            for line in read_text(path).lower().split("\n"):
                words.update(_WORD.findall(line.partition(SEPARATOR)[2]))
    return frozenset(words)


def check_texts(texts: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    """The findings about both texts."""
    low = TEXTS[0]
    if {*TEXTS} <= texts.keys() and continuation(texts[low]) == continuation(texts[TEXTS[1]]):
        yield Finding("both generated texts are equal", "E056-temperatures", TEXTS[1])
    for name in TEXTS:
        if name in texts:
            yield from _check_words(name, continuation(texts[name]), name == low, settings)
    if low in texts:
        digest = hashlib.sha256(texts[low].strip().encode()).hexdigest()
        if digest == PUBLISHED_TEXTS["causal"] and EDITIONS[settings.edition].attention != "causal":
            yield Finding(f"{low}: the published text of the causal mask", "E058-causal", low)


def _check_words(name: str, text: str, is_low: bool, settings: Settings) -> Iterator[Finding]:
    """Too few words, repeated ones (temperature 0 alone), unknown ones: at temperature 1 only where it is no text."""
    words, limits = _WORD.findall(text.lower()), settings.thresholds
    if len(words) < limits.words:
        said = f"{name}: {len(words)} words after the prompt"
        yield Finding(said, "E054-short", name, 0, f"{limits.words} or more", len(words))
        return
    if is_low and len(words) > 2 and (share := distinct_trigrams(words)) < limits.trigrams:
        said = f"{name}: of its trigrams of words, {share:.2f} are distinct"
        yield Finding(said, "E053-repetitive", name, 0, f"{limits.trigrams:g} or more", f"{share:.2f}")
    known, least = known_words(settings.gold), limits.known_words * (1 if is_low else 0.5)
    if known and (share := sum(word in known for word in words) / len(words)) < least:
        said = f"{name}: of its words, {share:.2f} occur in the data sets"
        yield Finding(said, "E055-words", name, 0, f"{least:g} or more", f"{share:.2f}")


# ------------------------------------------------------------------------------------------------------- one submission


class Executed(NamedTuple):
    """The verdict on one executed check. message: "" or one line. tail: the last 40 lines that the code printed.

    code: of the finding that a failure is; "": it is a part of the code. is_right_alone: it failed only because a part
    that it needs is wrong.
    """

    part: str
    passed: bool
    message: str = ""
    tail: str = ""
    code: str = ""
    is_right_alone: bool = False


RunCode = Callable[[Path, str], list[Executed]]  # of the folder of a submission's files, and the edition

# Python imports these before anything else, or in place of a library or of one of its own modules.
SHADOWING = INSTALLED | set(sys.stdlib_module_names) | {"sitecustomize", "usercustomize"}
BEFORE_PY = (".so", ".pyd", "/__init__.py")  # Python takes these rather than a file NAME.py
MODULE_ENDS = (*BEFORE_PY, ".py", ".pyc")
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

    findings: with the table's severities. was_read: whether it could be judged at all. scores: lines, accuracy and
    majority of each output file. digests: of fine-tuned labels, to compare students. parts: None where no code was run.
    """

    findings: list[Finding] = field(default_factory=list)
    was_read: bool = False
    scores: dict[str, tuple[int, float | None, float | None]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    parts: list[Executed] | None = None


def examine(path: Path, student_id: str, settings: Settings, run_code: RunCode | None = None) -> Judgement:
    """Judge one zip or folder. Raises `GradingError` and `OSError` for the grader's own files and for the disk."""
    rules, judgement = settings.rules(), Judgement()
    try:
        payload = read_payload(path, student_id)
    except FormatError as error:
        judgement.findings.append(Finding(str(error), "E003-unpacked"))
        return judgement
    report, files = look_into(payload, student_id, rules)
    findings = list(_refined(report, settings))
    if len(payload) > rules.max_bytes and not path.is_dir():
        findings.append(rules.too_large(len(payload)))
    if files is not None:
        judgement.was_read = True
        findings += check_texts(report.texts, settings)
        findings += [*check_results(report, settings), *_suspicious(files, Package())]
        judgement.digests = fine_tuned_digests(report.labels, settings.thresholds.lines)
        if run_code:
            judgement.parts = _run(files, settings.edition, run_code)
            findings += list(_failed(judgement.parts))
    if right_name(student_id) in report.files and any(name in report.files for name in ADVANCED):
        findings.append(Finding("advanced outputs and a report", "E064-a-plus", right_name(student_id)))
    judgement.scores = {name: tuple(score) for name, score in report.scores.items()}
    judgement.findings = findings
    return judgement


def _refined(report: Report, settings: Settings) -> Iterator[Finding]:
    """The report's findings: missing files one by one, accuracies left to `grading.judge` and its config."""
    for finding in report.findings:
        if finding.code == "E012-missing":
            for name in EDITIONS[settings.edition].required:
                if name not in report.files:
                    code = "E012-missing" if name.endswith(".py") else "E013-no-output"
                    yield Finding(f"missing: {with_hints([name], report.files)}", code, name)
        elif finding.code not in ("E040-accuracy", "E041-high"):
            yield finding


def _suspicious(files: Files, package: Package) -> Iterator[Finding]:
    """Files that stand in for libraries or the student's own modules, and graders that are not the course's."""
    own = {name.removesuffix(".py") for name in files.sizes if name.endswith(".py")}
    shadows = [
        name for name in files.sizes if _module_of(name, MODULE_ENDS) in SHADOWING or _module_of(name, BEFORE_PY) in own
    ]
    for name in sorted(shadows):
        yield Finding(f"{name} is imported in place of another module of that name", "E037-shadow", name)
    changed = sorted(name for name in files.sizes if not _is_handed_out(name, files, package))
    if changed:
        yield Finding(f"other than those handed out: {few(changed)}", "E038-checker", changed[0])


def _module_of(name: str, ends: Sequence[str]) -> str:
    """The module that a file with one of these endings is; "" for other files."""
    return next((name.removesuffix(end).partition(".")[0] for end in ends if name.endswith(end)), "")


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


def _failed(parts: list[Executed]) -> Iterator[Finding]:
    """The failed parts; those that were not judged, as they need a failed one, only if there are no others."""
    failed = [part for part in parts if not part.passed]
    for part in [part for part in failed if not part.message.startswith("not judged")] or failed:
        code = "E081-import" if part.part.startswith("import") else "E080-part"
        yield Finding(f"{part.part}: {part.message}", part.code or code)


# --------------------------------------------------------------------------------------------- from findings to a grade

BEST = "A"  # A+ is given by a person, in the overrides
REFUSED, ABSENT, PROVISIONAL, OVERRIDE = "refused", "absent", "provisional", "override"


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
        return Grade("", ABSENT if absent else REFUSED, [str(one) for one in findings if one.severity == "refuse"])
    letter, reasons = BEST, []
    deducted = [one for one in findings if one.severity == "deduct"]
    for one in deducted:
        if most := one.check.most:
            letter = max(letter, most, key=SCALE.index)
            reasons.append(f"at most {most}: {one}")
    form = [one for one in deducted if not one.check.most]
    late = any(one.code == "E070-late" for one in findings)
    if form and settings.penalties.format_steps:
        letter = lower(letter, settings.penalties.format_steps)
        reasons.append(f"{settings.penalties.format_steps} step(s) down, once: {'; '.join(form)}")
    if late and settings.penalties.late_steps:
        letter = lower(letter, settings.penalties.late_steps)
        reasons.append(f"{settings.penalties.late_steps} step(s) down: late")
    return Grade(letter, PROVISIONAL, reasons, _open(findings, deducted, judgement, settings))


def _open(findings: list[Finding], deducted: list[Finding], judgement: Judgement, settings: Settings) -> list[str]:
    """What is not decided yet. Every grade needs the executed checks, and a person who reads the text."""
    still_open = []
    if judgement.parts is None:
        folders = EDITIONS[settings.edition].folders
        still_open = ["the student's code was not run", *(f"the models in {name}/ were not judged" for name in folders)]
    still_open.append("coherence of the text at temperature 0: read it")
    if any(one.check.most == "B" for one in deducted):
        still_open.append("B or below: how much of the code is missing or wrong")
    still_open += [f"look at {one.code}: {one}" for one in findings if one.severity == "flag"]
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
