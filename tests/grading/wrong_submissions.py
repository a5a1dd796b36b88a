"""Whole submissions with data of some hundred lines: right ones, and seventy of which each is wrong in one way."""

import hashlib
import json
import os
import random
import re
import stat
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from submissions import NAMES, SUFFIX, pack, pdf_of

from grading import judge, published
from grading.editions import EDITIONS, TEXT_PROMPT, TEXTS
from grading.judge import Executed, labels_digest
from grading.programs import PARTS_FILE, ROOT

COUNTS = {"sst-dev": 200, "sst-test": 200, "cfimdb-dev": 120, "cfimdb-test": 120}
ACCURACY = {"prompting": {"sst-dev": 0.215, "sst-test": 0.225, "cfimdb-dev": 0.5},
            "finetuning": {"sst-dev": 0.41, "sst-test": 0.42, "cfimdb-dev": 0.8},
            "lora": {"sst-dev": 0.28, "sst-test": 0.27, "cfimdb-dev": 0.5},
            "advanced": {"sst-dev": 0.43, "sst-test": 0.44, "cfimdb-dev": 0.85}}  # fmt: skip
STORIES = (
    " a good man who lived near the sea . one day he took his small boat and went out to find a friend . the wind was "
    "strong and the boat began to turn , but he was not afraid . he came home before dark and told the story .",
    " a kind old bear . every morning she walked down to the river with a basket and looked for berries . today she "
    "met a fox who had lost his hat . they looked together under each tree until the moon rose , and then they slept .",
)
CODE_PAGE = STORIES[0].replace("friend", "fiancé")


def sentences(part: str) -> list[str]:
    """Distinct ones, of the words of both stories."""
    words, draw = " ".join(STORIES).split(), random.Random(part)
    return [f"{part} {number} {' '.join(draw.sample(words, 9))}" for number in range(COUNTS[part])]


def gold(part: str) -> list[int]:
    classes = len(NAMES[part.split("-")[0]])
    return [0] * COUNTS[part] if part == "cfimdb-test" else [number % classes for number in range(COUNTS[part])]


def predictions(part: str, accuracy: float | None, seed: int) -> list[int]:
    """Labels with that accuracy, right at other lines for each seed."""
    right, classes, draw = gold(part), len(NAMES[part.split("-")[0]]), random.Random(f"{part} {seed}")
    if accuracy is None:
        return [draw.randrange(classes) for _ in right]
    kept = set(draw.sample(range(len(right)), round(accuracy * len(right))))
    return [label if number in kept else (label + 1) % classes for number, label in enumerate(right)]


def output(part: str, kind: str, labels: list[int]) -> bytes:
    end = SUFFIX[part.split("-")[0]] if kind == "prompting" else ""
    return "".join(f"{a} ||| {b}{end}\n" for a, b in zip(labels, sentences(part), strict=True)).encode()


def outputs(kind: str, seed: int) -> dict[str, bytes]:
    return {
        f"{part}-{kind}-output.txt": output(part, kind, predictions(part, ACCURACY[kind].get(part), seed))
        for part in COUNTS
    }


def right_files(seed: int) -> dict[str, bytes]:
    """A right submission. Zero-shot labels are the same for all, as in the course; fine-tuned ones are a student's."""
    edition = EDITIONS["ucsc"]
    files = {name: f"# {name}\nimport torch\n".encode() for name in (*edition.required, *edition.listed)}
    files |= {name: f"{TEXT_PROMPT}{story}".encode() for name, story in zip(TEXTS, STORIES, strict=True)}
    return files | outputs("prompting", 0) | outputs("finetuning", seed + 1)


def write_data(folder: Path) -> None:
    folder.mkdir()
    for part in COUNTS:
        (folder / f"{part}.txt").write_bytes(output(part, "finetuning", gold(part)))
    for dataset, names in NAMES.items():
        (folder / f"{dataset}-label-mapping.json").write_text(json.dumps(names))


def accept_these_files(monkeypatch) -> None:
    """Make the graders and zero-shot labels of `right_files` those of the course."""
    files = right_files(0)
    for name in ("sanity_check.py", "sanity_check.data"):
        monkeypatch.setitem(judge.HANDED_OUT, name, {hashlib.sha256(files[name]).hexdigest()[:16]})
    for part in COUNTS:
        labels = predictions(part, ACCURACY["prompting"].get(part), 0)
        counts = tuple(labels.count(label) for label in range(len(NAMES[part.split("-")[0]])))
        accepted = (published.PublishedLabels(labels_digest(labels), counts, None),)
        monkeypatch.setitem(published.PUBLISHED_LABELS, part, accepted)
    causal = f"{TEXT_PROMPT}{STORIES[1]} the end"
    monkeypatch.setitem(published.PUBLISHED_TEXTS, "causal", hashlib.sha256(causal.encode()).hexdigest())


# ---------------------------------------------------------------------------------------- in the place of the box


def die_of_one(folder: Path, edition: str) -> list[Executed]:
    """The process dies of one submission."""
    if "blork" in (folder / TEXTS[0]).read_text(encoding="utf-8"):
        os._exit(1)
    return []


def sleep_long(mark: Path, folder: Path, edition: str) -> list[Executed]:
    """Takes a minute. The number of the process stands in the name of a file."""
    Path(f"{mark}-{os.getpid()}").touch()
    time.sleep(60)
    return []


# ------------------------------------------------------------------------------------------------- seventy wrong ones

Files = dict[str, bytes]
Entries = list[tuple[str | zipfile.ZipInfo, bytes]]


class Case(NamedTuple):
    """change: of the files; of the entries of the zip; or of its bytes. also: codes that come with it."""

    code: str
    severity: str
    grade: str
    files: Callable[[Files], object] = lambda files: None
    entries: Callable[[Entries], Entries] = lambda entries: entries
    payload: Callable[[bytes], bytes] = lambda payload: payload
    also: tuple[str, ...] = ()


def put(name: str, content: bytes) -> Callable:
    return lambda files: files.update({name: content})


def drop(*names: str) -> Callable:
    return lambda files: [files.pop(name) for name in names]


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable:
    return lambda files: files.update({name: change(files[name])})


def copy(source: str, target: str) -> Callable:
    return lambda files: files.update({target: files[source]})


def relabel(part: str, accuracy: float, kind: str = "finetuning") -> Callable:
    return put(f"{part}-{kind}-output.txt", output(part, kind, predictions(part, accuracy, 99)))


def move(change: Callable[[str], str]) -> Callable:
    return lambda entries: [(change(name), content) for name, content in entries]


def link(entries: Entries) -> Entries:
    info = zipfile.ZipInfo("ID/link")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return [*entries, (info, b"/etc/passwd")]


def packed_otherwise() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("ID/plot.txt")
    info.compress_type = zipfile.ZIP_BZIP2
    return info


def damage(payload: bytes, name: bytes = b"README.md") -> bytes:
    """Another byte in the data of an entry."""
    start = payload.index(name) + len(name) + 9
    return payload[:start] + bytes([payload[start] ^ 0xFF]) + payload[start + 1 :]


def with_advanced(*more: Callable) -> Callable:
    def change(files: Files) -> None:
        files.update(outputs("advanced", 5))
        files["ID-report.pdf"] = pdf_of(3)
        for each in more:
            each(files)

    return change


DEV, LOW, HIGH = "sst-dev-finetuning-output.txt", *TEXTS
STORY = f"{TEXT_PROMPT}{STORIES[0]}"
NOISE = "".join(random.Random(1).choices("qxzjvkw ", k=400))
REPEATED = f"{TEXT_PROMPT} {'he was not afraid and ' * 12}".encode()
SAME_AS_BASE = [edit(f"{part}-advanced-output.txt", lambda _, part=part: output(
    part, "advanced", predictions(part, ACCURACY["prompting"].get(part), 0))) for part in COUNTS]  # fmt: skip
WRONG = {
    "no-zip": Case("E001-zip", "refuse", "", payload=lambda raw: b"My homework"),
    "cut": Case("E001-zip", "refuse", "", payload=lambda raw: raw[: len(raw) // 2]),
    "nothing": Case("E001-zip", "refuse", "", payload=lambda raw: b""),
    "rar": Case("E001-zip", "refuse", "", payload=lambda raw: b"Rar!\x1a\x07\x01\x00"),
    "zip-in-zip": Case("E001-zip", "refuse", "", payload=lambda raw: pack([("zip-in-zip/hw.zip", raw)]),
                       also=("E023-clutter", "E024-unlisted")),
    "appended": Case("E001-zip", "refuse", "", payload=lambda raw: raw + b"more"),
    "too-large": Case("E002-size", "deduct", "A-", put("photo.jpg", random.Random(1).randbytes(1_100_000))),
    "bomb": Case("E003-unpacked", "refuse", "", put("zeros.bin", bytes(21_000_000))),
    "link": Case("E004-entries", "refuse", "", entries=link),
    "absolute": Case("E004-entries", "refuse", "", entries=lambda entries: [*entries, ("/etc/cron.d/x", b"x")],
                     also=("E010-folder",)),
    "upwards": Case("E004-entries", "refuse", "", entries=lambda entries: [*entries, ("ID/../x", b"x")]),
    "backslash": Case("E004-entries", "refuse", "", entries=lambda entries: [*entries, ("ID/a\\b", b"x")]),
    "two-spellings": Case("E004-entries", "refuse", "", put("LLAMA.py", b"import torch\n")),
    "powershell": Case("E006-backslash", "note", "A", payload=lambda raw: re.sub(
        rb"powershell/(?=[\w.-]+)", rb"powershell\\", raw)),
    "bzip2": Case("E004-entries", "refuse", "", entries=lambda entries: [*entries, (packed_otherwise(), b"x")]),
    "damaged": Case("E005-damaged", "refuse", "", payload=damage),
    "damaged-checker": Case("E005-damaged", "refuse", "", payload=lambda raw: damage(raw, b"sanity_check.py")),
    "other-top": Case("E010-folder", "deduct", "A-", entries=move(lambda name: name.replace("ID/", "minllama/"))),
    "two-tops": Case("E010-folder", "deduct", "A-", entries=lambda entries: [*entries, ("other/a.txt", b"x")]),
    "loose": Case("E010-folder", "deduct", "A-", entries=lambda entries: [*entries, ("notes.txt", b"x")]),
    "no-top": Case("E010-folder", "deduct", "A-", entries=move(lambda name: name.replace("ID/", ""))),
    "no-top-but-folders": Case("E010-folder", "deduct", "A-", put("helpers/x.py", b"x = 1\n"),
                               entries=move(lambda name: name.replace("ID/", ""))),
    "deeper": Case("E010-folder", "deduct", "A-", entries=move(lambda name: name.replace("ID/", "ID/hw1/"))),
    "case": Case("E011-id-case", "note", "A", entries=move(lambda name: name.replace("ID/", "id/"))),
    "no-code": Case("E012-missing", "deduct", "B", drop("llama.py")),
    "no-output": Case("E013-no-output", "deduct", "B+", drop("cfimdb-dev-prompting-output.txt")),
    "no-text": Case("E013-no-output", "deduct", "B+", drop(HIGH)),
    "short": Case("E014-lines", "deduct", "A-", edit(DEV, lambda raw: raw[: raw.rindex(b"\n", 0, -1) + 1])),
    "no-text-and-long": Case("E013-no-output", "deduct", "B+", lambda files: files.update(
        {DEV: files[DEV] + b"1 ||| more\n", "rope.txt": files.pop(HIGH)}), also=("E014-lines",)),
    "long": Case("E014-lines", "deduct", "A-", edit(DEV, lambda raw: raw + b"1 ||| more\n")),
    "no-bars": Case("E015-format", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b" ||| ", b", ", 1))),
    "word": Case("E015-format", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b"2 |||", b"good |||", 1))),
    "five": Case("E016-label", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b"2 |||", b"5 |||", 1))),
    "negative": Case("E016-label", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b"2 |||", b"-1 |||", 1))),
    "other-words": Case("E017-sentence", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b"sst-dev 7 ", b"x ", 1))),
    "as-prompting": Case("E018-misnamed", "deduct", "A-", copy("sst-dev-prompting-output.txt", DEV),
                         also=("E040-accuracy",)),
    "as-finetuning": Case("E018-misnamed", "deduct", "A-",
                          copy(DEV, "sst-dev-prompting-output.txt"),
                          also=("E041-high", "E046-zero-shot")),
    "dev-as-test": Case("E018-misnamed", "deduct", "A-", copy(DEV, "sst-test-finetuning-output.txt")),
    "empty": Case("E019-empty", "deduct", "B+", put(DEV, b"")),
    "blank": Case("E019-empty", "deduct", "B+", put(HIGH, b" \n\n")),
    "empty-code": Case("E019-empty", "deduct", "B+", put("rope.py", b"")),
    "latin": Case("E020-text", "deduct", "A-", edit(DEV, lambda raw: raw.replace(b"sst-dev 3", b"sst-dev \xe9", 1))),
    "binary": Case("E020-text", "deduct", "A-", put(HIGH, b"\x80\x00\x01text")),
    "endless": Case("E020-text", "deduct", "A-", edit(DEV, lambda raw: raw + b"\n" * 100_001)),
    "three-advanced": Case("E021-advanced", "note", "A", with_advanced(drop("sst-dev-advanced-output.txt")),
                           also=("E064-a-plus",)),
    "checkpoint": Case("E022-foreign", "deduct", "A-", put("finetune-5.pt", b"weights")),
    "git": Case("E022-foreign", "deduct", "A-", put(".git/HEAD", b"ref: x")),
    "caches": Case("E023-clutter", "note", "A", put("__pycache__/llama.cpython-311.pyc", b"x")),
    "no-readme": Case("E024-unlisted", "note", "A", drop("README.md")),
    "other-year": Case("E027-edition", "flag", "A", lambda files: files.update(outputs("lora", 3))),
    "needs": Case("E030-needs", "deduct", "A-", put("llama.py", b"import engine.training\n")),
    "script-needs": Case("E031-needs-others", "note", "A", put("plot.py", b"import engine.training\n")),
    "library": Case("E032-library", "deduct", "A-", put("llama.py", b"import transformers\n")),
    "script-library": Case("E033-library-others", "note", "A", put("plot.py", b"import matplotlib\n")),
    "no-python": Case("E034-python", "deduct", "B", put("llama.py", b"def f(:\n")),
    "script-no-python": Case("E035-python-others", "note", "A", put("plot.py", b"<<<<<<< HEAD\n")),
    "large-module": Case("E036-unread", "flag", "A", put("table.py", b"x = 1\n" * 20_000)),
    "torch": Case("E037-shadow", "flag", "A", put("torch.py", b"x = 1\n")),
    "torch-in-another-case": Case("E037-shadow", "flag", "A", put("torch.py", b"x = 1\n"), also=("E011-id-case",),
                                  entries=move(lambda name: name.replace("ID/", "id/"))),
    "sitecustomize": Case("E037-shadow", "flag", "A", put("sitecustomize.py", b"x = 1\n")),
    "numpy-folder": Case("E037-shadow", "flag", "A", put("numpy/__init__.py", b"x = 1\n")),
    "extension": Case("E037-shadow", "flag", "A", put("torch.cpython-311-x86_64-linux-gnu.so", b"x")),
    "own-folder": Case("E037-shadow", "flag", "A", put("rope/__init__.py", b"x = 1\n")),
    "own-extension": Case("E037-shadow", "flag", "A", put("rope.cpython-311-x86_64-linux-gnu.so", b"x")),
    "own-checker": Case("E038-checker", "flag", "A", put("grading/child.py", b"x = 1\n")),
    "checker": Case("E038-checker", "flag", "A", put("sanity_check.py", b"print('correct!')\n")),
    "numbers": Case("E038-checker", "flag", "A", put("sanity_check.data", b"x")),
    "low-sst": Case("E040-accuracy", "deduct", "A-", relabel("sst-test", 0.365)),
    "low-cfimdb": Case("E040-accuracy", "deduct", "A-", relabel("cfimdb-dev", 0.6)),
    "low-zero-shot": Case("E040-accuracy", "deduct", "A-", relabel("sst-dev", 0.1, "prompting"),
                          also=("E046-zero-shot",)),
    "high": Case("E041-high", "note", "A", relabel("sst-dev", 0.5)),
    "gold": Case("E042-gold", "flag", "A", relabel("sst-test", 1.0)),
    "gold-cfimdb": Case("E042-gold", "flag", "A", relabel("cfimdb-dev", 0.99)),
    "constant": Case("E043-constant", "flag", "A", put(
        "cfimdb-test-finetuning-output.txt", output("cfimdb-test", "finetuning", [1] * 120))),
    "other-prompt": Case("E044-prompt", "note", "A", edit(
        "sst-dev-prompting-output.txt", lambda raw: raw.replace(b"Is this movie", b"Is it"))),
    "zero-shot": Case("E046-zero-shot", "note", "A", relabel("sst-dev", 0.22, "prompting")),
    "same-as-base": Case("E047-advanced-equal", "flag", "A", with_advanced(*SAME_AS_BASE),
                         also=("E064-a-plus",)),
    "one-as-base": Case("E064-a-plus", "note", "A", with_advanced(SAME_AS_BASE[0])),
    "no-prompt": Case("E050-no-prompt", "flag", "A", put(LOW, f"Once there was{STORIES[0]}".encode())),
    "repeated": Case("E053-repetitive", "flag", "A", put(LOW, REPEATED)),
    "few-words": Case("E054-short", "flag", "A", put(LOW, f"{TEXT_PROMPT} a bit".encode())),
    "noise": Case("E055-words", "flag", "A", put(LOW, f"{TEXT_PROMPT} {NOISE}".encode())),
    "noise-at-1": Case("E055-words", "flag", "A", put(HIGH, f"{TEXT_PROMPT} {NOISE}".encode())),
    "equal-texts": Case("E056-temperatures", "flag", "A", put(HIGH, STORY.replace(" ", "\n").encode())),
    "code-page": Case("E057-code-page", "note", "A", put(LOW, f"{TEXT_PROMPT}{CODE_PAGE}".encode("cp1252"))),
    "utf-16": Case("E057-code-page", "note", "A", put(HIGH, STORY.replace("man", "fiancé").encode("utf-16"))),
    "causal": Case("E058-causal", "flag", "A", put(LOW, f"{TEXT_PROMPT}{STORIES[1]} the end".encode())),
    "report-name": Case("E060-report-name", "flag", "A", put("report.pdf", pdf_of(2))),
    "report-no-pdf": Case("E061-report-pdf", "flag", "A", put("ID-report.pdf", b"PK\3\4 a document")),
    "report-pages": Case("E062-report-pages", "flag", "A", put("ID-report.pdf", pdf_of(4))),
    "report-uncounted": Case("E065-uncounted", "note", "A", put("ID-report.pdf", b"%PDF-1.7\n")),
    "no-report": Case("E063-no-report", "flag", "A", with_advanced(drop("ID-report.pdf"))),
}  # fmt: skip
RIGHT = {
    "plain": lambda files: None,
    "with-report": put("ID-report.pdf", pdf_of(1)),
    "windows-lines": lambda files: files.update({name: raw.replace(b"\n", b"\r\n") for name, raw in files.items()
                                                 if name.endswith((".txt", ".py"))}),
    "byte-order-marks": lambda files: files.update({name: b"\xef\xbb\xbf" + raw for name, raw in files.items()
                                                    if name.endswith((".txt", ".py"))}),
    "folder": put("photo.jpg", bytes(1_100_000)),  # a folder's files have no limit of a zip
    "own-numbers": put(PARTS_FILE, (ROOT / PARTS_FILE).read_bytes()),
    "own-package": put("method/__init__.py", b"x = 1\n"),
    "lower-case": put("Queue.py", b"x = 1\n"),  # hides nothing, on any system
    "macos": lambda files: files.update({".DS_Store": b"x", "data/Icon\r": b"", "Icon\r": b"", "._llama.py": b"x"}),
    "repeated-at-1": put(HIGH, REPEATED),
    "odd-words-at-1": put(HIGH, f"{TEXT_PROMPT} {' qzx '.join(STORIES[0].split()[::2])}".encode()),
    "at-the-band": relabel("cfimdb-dev", 0.65),
    "own-module": lambda files: files.update({"llama.py": b"import torch, helpers\n", "helpers.py": b"x = 1\n"}),
}  # fmt: skip


def make_zip(student_id: str, seed: int, case: Case | None = None, change: Callable = lambda files: None) -> bytes:
    files = right_files(seed)
    change(files)
    if case:
        case.files(files)
    entries = [(f"ID/{name}", content) for name, content in sorted(files.items())]
    entries = case.entries(entries) if case else entries
    named = []
    for name, content in entries:
        if isinstance(name, str):
            name = name.replace("ID", student_id).replace("id/", f"{student_id.upper()}/")
        else:
            name.filename = name.filename.replace("ID", student_id)
        named.append((name, content))
    return case.payload(pack(named)) if case else pack(named)


def write_wrong_and_right(folder: Path) -> None:
    """A zip of each, named by its case."""
    folder.mkdir()
    for seed, (name, case) in enumerate(WRONG.items()):
        (folder / f"{name}.zip").write_bytes(make_zip(name, seed, case))
    for seed, (name, change) in enumerate(RIGHT.items(), len(WRONG)):
        (folder / f"right-{name}.zip").write_bytes(make_zip(f"right-{name}", seed, None, change))
    with zipfile.ZipFile(folder / "right-folder.zip") as archive:
        archive.extractall(folder)
    (folder / "right-folder.zip").unlink()
