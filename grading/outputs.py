"""What a submission's own files say: output files line by line, their accuracy, and the report. Nothing is rendered."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from grading.editions import ACCURACY_BANDS, LABEL_NAMES, OUTPUT_KINDS, TEXT_PROMPT, reference_accuracy
from grading.findings import Finding
from grading.programs import (
    LabelledLine,
    create_data,
    few,
    find_asset,
    has_gold_labels,
    majority_accuracy,
    parse_line,
    prompt_suffix,
)
from grading.rules import Report, Rules, Score

ENOUGH_LINES = 100  # for an accuracy: chance moves that of fewer lines out of any band
MAX_LINES = 100_000  # of an output file; the largest data set has some 2,000
NO_SUBMISSION = (
    "the films data set that comes with this package is for trying things out; the assignment asks for SST and CFIMDB"
)
OUTPUT = re.compile(rf"({'|'.join(LABEL_NAMES)})-(dev|test)-({'|'.join(OUTPUT_KINDS)})-output\.txt")


def check_text(name: str, raw: bytes, rules: Rules, report: Report) -> None:
    """A generated text must be text, not blank, and continue the prompt; an output file is checked line by line."""
    text = _decode(name, raw, report)
    if text is None:
        return
    if not text.strip():
        report.findings.append(Finding(f"{name} holds nothing but white space", "E019-empty", name))
    elif text.count("\n") > MAX_LINES:
        said = f"{name} has {text.count(chr(10))} lines, too many for an output file"
        report.findings.append(Finding(said, "E020-text", name))
    elif match := OUTPUT.fullmatch(name):
        _check_output(name, *match.groups(), text.removesuffix("\n").split("\n"), rules, report)
    else:
        report.texts[name] = text
        if not " ".join(text.split()).startswith(TEXT_PROMPT):
            said = f"{name} does not begin with the assignment's prompt: {TEXT_PROMPT}"
            report.findings.append(Finding(said, "E050-no-prompt", name, 1, TEXT_PROMPT, text[:100]))


def _decode(name: str, raw: bytes, report: Report) -> str | None:
    """The text of a file; None, with a finding, if it is none.

    The course's driver writes the encoding of the computer, on Windows a code page, so a generated text may have one.
    Which one is not known: letters beyond ASCII may come out as others, and the few of an English text do not matter.
    Editors and PowerShell write UTF-16, with a mark in front.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        is_wide = raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if OUTPUT.fullmatch(name) or (re.search(rb"[\0-\x08\x0e-\x1f\x7f]", raw) and not is_wide):
            report.findings.append(Finding(f"{name} line {line}: not UTF-8 text", "E020-text", name, line))
            return None
        encoding = "UTF-16" if is_wide else "a code page of Windows"
        said = f"{name} line {line}: not UTF-8 text; read as text in {encoding}"
        report.findings.append(Finding(said, "E057-code-page", name, line))
        text = raw.decode("utf-16" if is_wide else "cp1252", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


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
    path = rules.find(f"{dataset}-{split}.txt")
    data = create_data(path, is_test=True) if path else []  # any split may have its labels withheld
    if not (data and _are_of(rows, data)) and (other := _other_source(rows, path, split, rules)):
        said = f"{name}: its sentences are those of {other}"
        said += f": {NO_SUBMISSION}" if other.startswith("films-") else ""
        report.findings.append(Finding(said, "E018-misnamed", name))
        return
    label_names = rules.label_names(dataset)
    labels = range(len(label_names))
    _flag(report.findings, "E015-format", name, "not 'LABEL ||| sentence'", [row is None for row in rows])
    outside = [row is not None and row.label not in labels for row in rows]
    _flag(report.findings, "E016-label", name, f"label outside 0..{len(labels) - 1}", outside)
    if len(rows) > 1 and None not in rows and len({row.label for row in rows}) == 1:
        report.findings.append(Finding(f"{name}: every line has the same label", "E043-constant", name))
    prompt = f" {prompt_suffix(label_names)}".rstrip()  # its last space goes with the line's end
    is_prompted = all(row and row.sentence.endswith(prompt) for row in rows)
    if is_prompted and kind in ("finetuning", "lora"):
        said = f"{name}: every sentence ends in the course's prompt: a prompting output, misnamed"
        report.findings.append(Finding(said, "E018-misnamed", name))
        kind = "prompting"
    if path is None:
        said = f"no {dataset}-{split}.txt here: its outputs are not compared with the data (give --data DIR)"
        report.findings += [Finding(said, "E045-no-data")] if said not in report.findings else []
        return
    if len(rows) != len(data):
        said = f"{name}: {len(rows)} lines, but {path.name} has {len(data)}"
        report.findings.append(Finding(said, "E014-lines", name, min(len(rows), len(data)) + 1, len(data), len(rows)))
    _compare(name, kind, rows, data, prompt, report)
    if len(rows) == len(data) and None not in rows:
        report.scores[name], report.labels[name] = _score(rows, data), [row.label for row in rows]
        reference = reference_accuracy(rules.edition, dataset, split, kind)
        report.findings += _outside_band(name, dataset, reference, report.scores[name])


def _outside_band(name: str, dataset: str, reference: float | None, score: Score) -> list[Finding]:
    """A finding for an accuracy further from the reference's than the grade A allows."""
    accuracy, band = score.accuracy, ACCURACY_BANDS[dataset]
    if None in (reference, accuracy) or score.lines < ENOUGH_LINES or round(abs(accuracy - reference), 3) <= band:
        return []
    said = f"{name}: accuracy {accuracy:.3f}; the reference's is {reference:.3f}, and {band:g} around it is asked for"
    code = "E040-accuracy" if accuracy < reference else "E041-high"
    return [Finding(said, code, name, 0, f"{reference:.3f}", f"{accuracy:.3f}")]


def _other_source(rows: list[LabelledLine | None], own: Path | None, split: str, rules: Rules) -> str:
    """The name of another data file (or of one of the films data set) with the sentences of these outputs; or ""."""
    films = find_asset(Path("data", f"films-{split}.txt"))
    paths = [films, *(rules.find(f"{data}-{part}.txt") for data in LABEL_NAMES for part in ("dev", "test"))]
    others = (path for path in paths if path and path != own)
    return next((path.name for path in others if _are_of(rows, create_data(path, is_test=True))), "")


def _are_of(rows: list[LabelledLine | None], data: list[LabelledLine]) -> bool:
    """Whether most lines have the sentence of the same line of a data file."""
    pairs = list(zip(rows, data, strict=False))
    return 2 * sum(row is not None and row.sentence.startswith(gold.sentence) for row, gold in pairs) > len(pairs)


def _flag(findings: list[Finding], code: str, name: str, what: str, bad: list[bool]) -> None:
    """Add one message for all bad lines: the first one's number, and how many there are."""
    if any(bad):
        line, more = bad.index(True) + 1, f" (and {sum(bad) - 1} more lines)" if sum(bad) > 1 else ""
        findings.append(Finding(f"{name} line {line}: {what}{more}", code, name, line))


def _compare(
    name: str, kind: str, rows: list[LabelledLine | None], data: list[LabelledLine], prompt: str, report: Report
) -> None:
    """Compare sentences. Another prompt is a finding, and for advanced methods not even that."""
    same = {"advanced": str.__contains__, "prompting": str.startswith}.get(kind, str.__eq__)
    pairs = list(zip(rows, data, strict=False))
    strange = [row is not None and not same(row.sentence, gold.sentence) for row, gold in pairs]
    _flag(report.findings, "E017-sentence", name, "not the sentence of the data file's same line", strange)
    if kind == "prompting" and not any(strange):
        if all(row and row.sentence == gold.sentence for row, gold in pairs):
            said = f"{name}: no sentence has a prompt after it: a finetuning output, misnamed"
            report.findings.append(Finding(said, "E018-misnamed", name))
            return
        other = [row is not None and row.sentence != gold.sentence + prompt for row, gold in pairs]
        _flag(report.findings, "E044-prompt", name, "another prompt than the course's after the sentence", other)


def _score(rows: list[LabelledLine], data: list[LabelledLine]) -> Score:
    """Accuracy, and the accuracy of always answering the most frequent class; None without gold labels."""
    labels = [gold.label for gold in data]
    if not has_gold_labels(labels):
        return Score(len(rows), None, None)
    right = sum(row.label == label for row, label in zip(rows, labels, strict=True))
    return Score(len(rows), right / len(data), majority_accuracy(labels))


# ----------------------------------------------------------------------------------------------------------- the report
# `ID-report.pdf`: its name, whether it is a PDF, and how many pages it has, if the library pypdf is installed.

MAX_PAGES = 3
MAX_REPORTS = 3  # files that are looked into, where several may be meant as the report
# The header may stand behind other bytes, which most readers skip.
HEADER, HEADER_WITHIN = b"%PDF-", 1024
MAX_MEMORY, MAX_SECONDS = 256 << 20, 20  # bytes and seconds for counting the pages of one file
NO_LIMIT = 3  # exit status
COUNT_PAGES = """import sys; sys.path = [*filter(None, sys.path)]  # not the current folder, which may be a student's
import io
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
except (ImportError, OSError, ValueError):
    sys.exit(3)
import pypdf
print(len(pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages))"""
_LIKE_A_REPORT = re.compile(r"(?i).*\.pdf|.*report.*\.(docx?|odt|pages|rtf)")


class Uncountable(Exception):
    """The pages of a PDF were not counted, for this reason."""


def right_name(student_id: str) -> str:
    return f"{student_id}-report.pdf"


def reports_among(names: Iterable[str], student_id: str) -> list[str]:
    """The report; if no file has its name, the files that may be meant as one."""
    names = sorted(names)
    if right_name(student_id) in names:
        return [right_name(student_id)]
    return [name for name in names if _LIKE_A_REPORT.fullmatch(name.rsplit("/", 1)[-1])][:MAX_REPORTS]


def name_warnings(names: Iterable[str], student_id: str) -> list[Finding]:
    """A finding if files may be meant as the report and none of them has its name."""
    found, right = reports_among(names, student_id), right_name(student_id)
    if not found or found == [right]:
        return []
    said = f"{few(found)}: the report, if one is handed in, is called {right} and lies in the top folder"
    return [Finding(said, "E060-report-name", found[0], expected=right)]


def check_report(name: str, raw: bytes, report: Report) -> None:
    """A finding if the file is no PDF, has too many pages, or if they were not counted."""
    if HEADER not in raw[:HEADER_WITHIN]:
        said = f"{name} is not a PDF file: it does not begin with {HEADER.decode()}"
        report.findings.append(Finding(said, "E061-report-pdf", name))
        return
    try:
        pages = count_pages(raw)
    except Uncountable as error:
        report.findings.append(Finding(f"{name}: its pages were not counted: {error}", "E065-uncounted", name))
        return
    if pages > MAX_PAGES:
        said = f"{name} has {pages} pages; a report has at most {MAX_PAGES}"
        report.findings.append(Finding(said, "E062-report-pages", name, 0, MAX_PAGES, pages))


def can_count_pages() -> bool:
    return importlib.util.find_spec("pypdf") is not None


def count_pages(raw: bytes) -> int:
    """The number of pages of a PDF, by pypdf. Raises `Uncountable` where it is absent or cannot read the file.

    In a process of its own with limits: a small file may unpack to any number of objects.
    """
    if not can_count_pages():
        raise Uncountable("the package pypdf is not installed (pip install pypdf)")
    command = [sys.executable, "-c", COUNT_PAGES, str(MAX_MEMORY)]
    try:
        done = subprocess.run(
            command, input=raw, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Uncountable(f"pypdf did not end within {MAX_SECONDS} seconds") from None
    if done.returncode == NO_LIMIT:
        raise Uncountable("this system has no limit on a process's memory")
    if not done.stdout.strip().isdigit():
        raise Uncountable("pypdf cannot read it")
    return int(done.stdout)
