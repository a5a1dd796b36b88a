"""The zip that is handed in: creating it, checking it, and what a hostile one must not do."""

import io
import json
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare_submit
from prepare_submit import ADVANCED, EDITIONS, FormatError, Report, assert_zip, check_zip, create_zip
from utils import UserError

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"sst": ["awful", "bad", "average", "good", "excellent"], "cfimdb": ["bad", "good"]}
SUFFIX = {
    "sst": " Is this movie awful, bad, average, good, or excellent? This movie is ",
    "cfimdb": " Is this movie bad or good? This movie is ",
}
LABELS = {"sst-dev": [0, 1, 2, 3, 4, 4], "sst-test": [3, 2, 1, 0], "cfimdb-dev": [0, 1, 1, 0], "cfimdb-test": [0, 0, 0]}
SENTENCES = {
    part: [f"{part} sentence {i} , très bien ." for i in range(len(labels))] for part, labels in LABELS.items()
}


def write_outputs(folder, *kinds):
    """Right predictions for every line but the first."""
    for part, labels in LABELS.items():
        dataset = part.split("-")[0]
        for kind in kinds:
            end = SUFFIX[dataset] if kind == "prompting" else ""
            guesses = [1 if labels[0] != 1 else 0, *labels[1:]]
            lines = [f"{guess} ||| {text}{end}\n" for guess, text in zip(guesses, SENTENCES[part], strict=True)]
            (folder / f"{part}-{kind}-output.txt").write_bytes("".join(lines).encode())


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Data sets of a few lines, made here."""
    folder = tmp_path_factory.mktemp("data")
    for part, labels in LABELS.items():
        lines = [f"{label} ||| {text}\n" for label, text in zip(labels, SENTENCES[part], strict=True)]
        (folder / f"{part}.txt").write_text("".join(lines), encoding="utf-8")
    for dataset, names in NAMES.items():
        (folder / f"{dataset}-label-mapping.json").write_text(json.dumps(names))
    return folder


def fill(folder, edition="ucsc"):
    for name in EDITIONS[edition].required + EDITIONS[edition].listed:
        (folder / name).write_text(f"# content of {name}\n")
    write_outputs(folder, "prompting", "finetuning", *(["lora"] if edition == "cmu2025" else []))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A complete submission; the current folder is an empty one."""
    (tmp_path / "work").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("MINLLAMA_ASSETS", raising=False)
    return fill(tmp_path / "work")


@pytest.fixture
def create(folder, data_dir):
    return lambda **options: create_zip(folder, "alice", data_dir=data_dir, **options)


@pytest.fixture
def check(data_dir, tmp_path):
    """Check bytes, or the (name, content) entries of a zip."""

    def run(payload, **options):
        path = tmp_path / "given.zip"
        path.write_bytes(payload if isinstance(payload, bytes) else pack(payload))
        return check_zip(path, "alice", data_dir=data_dir, **options)

    return run


def pack(entries):
    """A zip of (name or ZipInfo, content) pairs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def entries_of(folder, top="alice"):
    return [(f"{top}/{path.name}", path.read_bytes()) for path in sorted(folder.iterdir())]


def forge(*entries, before=b"", between=b"", comment=b"", end=b"", wide_end=None):
    """A zip written by hand. entries: name, content, fields of both headers or, as local_..., of the first alone."""
    body, directory = before, b""
    for name, content, *changes in entries:
        changed = dict(*changes)
        local = {key[6:]: value for key, value in changed.items() if key.startswith("local_")}
        both = dict(name=name if isinstance(name, bytes) else name.encode(), version=20, flags=0, method=0,
                    crc=zlib.crc32(content), packed=len(content), size=len(content), extra=b"", attributes=0,
                    offset=len(body))  # fmt: skip
        both |= changed
        headers = [
            struct.pack("<5H3L2H", h["version"], h["flags"], h["method"], 0, 33, h["crc"], h["packed"], h["size"],
                        len(h["name"]), len(h["extra"]))
            for h in (both | local, both)
        ]  # fmt: skip
        local = both | local
        body += b"PK\3\4" + headers[0] + local["name"] + local["extra"] + content + changed.get("descriptor", b"")
        directory += b"PK\1\2\x14\3" + headers[1] + struct.pack("<3H2L", 0, 0, 0, both["attributes"], both["offset"])
        directory += both["name"] + both["extra"]
    body += between
    numbers = [len(entries), len(entries), len(directory), len(body)]
    if wide_end:
        at = len(body) + len(directory)
        directory += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *wide_end(numbers))
        directory += struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *numbers, len(comment)) + comment + end


def extra(number, content):
    return struct.pack("<2H", number, len(content)) + content


def unicode_path(path, name=b""):
    return extra(0x7075, struct.pack("<BL", 1, zlib.crc32(name)) + path.encode())


def only_problem(report, *words):
    assert len(report.problems) == 1, report.problems
    for word in words:
        assert word in report.problems[0], report.problems[0]


# ------------------------------------------------------------------------------------------------- a right one


@pytest.mark.parametrize("edition", EDITIONS)
def test_create_then_check(tmp_path, data_dir, edition):
    (tmp_path / "in").mkdir()
    out = tmp_path / "alice.zip"
    folder = fill(tmp_path / "in", edition)
    report = create_zip(folder, " alice ", out, data_dir=data_dir, edition=edition)
    assert report.problems == [] and report.warnings == []
    assert sorted(report.files) == sorted(path.name for path in folder.iterdir())
    again = assert_zip(out, "alice", data_dir=data_dir, edition=edition)
    assert again.files == report.files and again.scores == report.scores
    with zipfile.ZipFile(out) as archive:
        assert all(archive.read(f"alice/{path.name}") == path.read_bytes() for path in folder.iterdir())


def test_the_three_lists(check, folder):
    assert EDITIONS["ucsc"].required == EDITIONS["cmu2024"].required
    new = set(EDITIONS["cmu2025"].required) - set(EDITIONS["cmu2024"].required)
    assert new == {f"{part}-lora-output.txt" for part in LABELS}
    assert EDITIONS["cmu2025"].optional == ("feedback.txt",)
    assert len(EDITIONS["ucsc"].required) == len(set(EDITIONS["ucsc"].required)) == 15
    missing = check(entries_of(folder), edition="cmu2025").problems
    assert len(missing) == 1 and missing[0].count("lora-output.txt") == 4


def test_accuracies_are_recomputed(create):
    report = create()
    assert report.accuracies["sst-dev-prompting-output.txt"] == pytest.approx(5 / 6)
    assert report.accuracies["cfimdb-dev-finetuning-output.txt"] == pytest.approx(3 / 4)
    assert report.scores["sst-dev-prompting-output.txt"].majority == pytest.approx(2 / 6)
    assert "cfimdb-test-finetuning-output.txt" not in report.accuracies
    assert str(report).count("no gold labels") == 2
    assert str(report).endswith("the submission is fine")


def test_same_input_same_bytes(create, folder):
    create()
    first = Path("alice.zip").read_bytes()
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
        path.chmod(0o600)
    (folder / "alice.zip").write_bytes(first)  # an old zip is not packed into the new one
    create()
    assert Path("alice.zip").read_bytes() == first


def test_works_from_any_folder_with_the_root_modules_alone(folder, data_dir, tmp_path):
    (tmp_path / "alone").mkdir()
    for name in ("prepare_submit.py", "course.py", "utils.py"):
        shutil.copy(ROOT / name, tmp_path / "alone")
    shutil.copytree(data_dir, tmp_path / "alone" / "data")
    command = [sys.executable, "-S", tmp_path / "alone" / "prepare_submit.py", folder, "alice"]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sst-dev-prompting-output.txt" in done.stdout and "note: no " not in done.stdout  # data beside the script


def test_data_is_found_in_the_assets_folder_and_never_in_the_zip(folder, data_dir, tmp_path, monkeypatch):
    lie = [("alice/data/sst-dev.txt", "4 ||| x\n")]
    (tmp_path / "a.zip").write_bytes(pack(entries_of(folder) + lie))
    monkeypatch.setattr(prepare_submit, "find_asset", lambda name: None)
    report = check_zip(tmp_path / "a.zip", "alice")
    assert report.problems == [] and report.scores == {}
    assert len([note for note in report.notes if note.startswith("no ")]) == len(LABELS)
    shutil.copytree(data_dir, tmp_path / "assets" / "data")
    monkeypatch.setenv("MINLLAMA_ASSETS", str(tmp_path / "assets"))
    assert len(check_zip(tmp_path / "a.zip", "alice").scores) == 8


def test_without_data_labels_and_format_are_still_checked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_submit, "find_asset", lambda name: None)
    (folder / "sst-dev-finetuning-output.txt").write_text("5 ||| one\nno bars\n")
    report = create_zip(folder, "alice")
    assert len(report.problems) == 2 and "0..4" in report.problems[1]


# ------------------------------------------------------------------------------------------------------- names


def test_missing_files_are_named_and_nothing_is_written(create, folder):
    Path("alice.zip").write_bytes(b"old")
    (folder / "rope.py").unlink()
    (folder / "generated-sentence-temp-1.txt").unlink()
    only_problem(create(), "missing", "rope.py", "generated-sentence-temp-1.txt")
    assert Path("alice.zip").read_bytes() == b"old" and os.listdir() == ["alice.zip"]
    assert create(force=True).problems
    assert zipfile.is_zipfile("alice.zip")


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("edition", ["ucsc", "cmu2025"])
@pytest.mark.parametrize("feedback", [True, False])
def test_advanced_outputs_are_all_or_none(tmp_path, data_dir, count, edition, feedback):
    folder = tmp_path / "in"
    folder.mkdir()
    fill(folder, edition)
    write_outputs(folder, "advanced")
    (folder / "alice-report.pdf").write_text("pdf")
    for name in ADVANCED[count:]:
        (folder / name).unlink()
    if feedback:
        (folder / "feedback.txt").write_text("good\n")
    report = create_zip(folder, "alice", tmp_path / "x.zip", data_dir=data_dir, edition=edition)
    assert bool(report.problems) == (0 < count < 4)
    for name in ADVANCED[count:] if report.problems else ():
        assert name in report.problems[0]
    assert ("feedback.txt" in str(report)) == (edition == "cmu2025" and not feedback)


@pytest.mark.parametrize("missing, present", [
    ("sst-dev-prompting-output.txt", "sst-dev-output.txt"), ("llama.py", "src/llama.py"), ("rope.py", "rope.py.txt"),
    ("sst-dev-prompting-output.txt", "SST_dev_Prompting-output (1).txt"), ("optimizer.py", "Optimizer.py"),
    ("generated-sentence-temp-1.txt", "generated_sentence_temp_1.txt.txt"), ("run_llama.py", "copy run-llama (2).py"),
    ("cfimdb-test-finetuning-output.txt", "cfimdb-test-finetuned.txt"),
])  # fmt: skip
def test_near_names_stand_beside_the_missing_one(check, folder, missing, present):
    (folder / missing).unlink()
    only_problem(check([*entries_of(folder), (f"alice/{present}", "x")]), f"missing: {missing} (there is {present})")


def test_advanced_outputs_without_a_report_earn_a_warning(create, folder):
    write_outputs(folder, "advanced")
    report = create()
    assert report.problems == [] and "alice-report.pdf" in report.warnings[0]
    (folder / "alice-report.pdf").write_text("pdf")
    assert create().warnings == []


def test_files_of_the_readme_tree_earn_a_warning(create, folder):
    (folder / "tokenizer.py").unlink()
    report = create()
    assert report.problems == [] and "tokenizer.py" in report.warnings[0]


def test_wrong_top_folders(check, folder):
    only_problem(check(entries_of(folder, "bob")), "mismatch", "bob", "alice")
    two = entries_of(folder) + [("bob/x.txt", "x")]
    only_problem(check(two), "one top folder", "alice", "bob")
    loose = [(name.removeprefix("alice/"), content) for name, content in entries_of(folder)]
    only_problem(check(loose), "outside the top folder", "README.md")
    deeper = [(name.replace("alice/", "alice/hw1/"), content) for name, content in entries_of(folder)]
    report = check([*deeper, ("alice/x.py", "x")])
    only_problem(report, "hw1/run_llama.py", "directly in the top folder")
    assert "missing" not in str(report) and "absent" not in str(report) and len(report.scores) == 8
    assert "the archive is empty" in check([]).problems


def test_what_operating_systems_add_is_ignored(check, folder):
    extra = [("__MACOSX/alice/._llama.py", "x"), ("alice/.DS_Store", "x"), (".DS_Store", "x"), ("alice/", "")]
    report = check(entries_of(folder) + extra)
    assert report.problems == [] and report.warnings == [] and ".DS_Store" not in report.files


def test_every_problem_is_reported_together(check, folder):
    (folder / "rope.py").unlink()
    (folder / "llama.py").write_text("")
    (folder / "sst-dev-advanced-output.txt").write_text("1 ||| x\n")
    (folder / "sst-dev-finetuning-output.txt").write_text("9 ||| x\n")
    report = check(entries_of(folder, "bob"))
    text = "\n".join(report.problems)
    for word in ("mismatch", "rope.py", "all four or none", "empty files: llama.py", "0..4", "1 lines", "not the sent"):
        assert word in text
    assert str(report).endswith(f"{len(report.problems)} problems found")


def test_what_does_not_belong_in_a_zip(check, folder):
    for name in (".git/config", "my/.venv/lib/x.py", "e/pyvenv.cfg", "best.PT", "a/b.pth", "node_modules/x"):
        only_problem(check([*entries_of(folder), (f"alice/{name}", "x")]), "do not belong", name)
    report = check([*entries_of(folder), ("alice/__pycache__/llama.pyc", "x")])
    assert report.problems == [] and "__pycache__" in report.warnings[0]


def test_a_zip_is_called_one(create):
    """Under another name it would be packed into the next one."""
    with pytest.raises(UserError, match="must end in .zip"):
        create(out="alice.txt")
    assert not Path("alice.txt").exists()


def test_creation_leaves_out_what_does_not_belong(create, folder):
    left_out = [".git/config", "__pycache__/x.pyc", ".pytest_cache/x", "venv/x", "other/pyvenv.cfg", "old.zip",
                "conda/conda-meta/x", "finetune-5-2e-05.pt", ".DS_Store", "x.resume.tmp", "sub/.git/x",
                "finetune-5-2e-05.lock"]  # fmt: skip
    for name in ["sub/kept.py", "data/environment.txt", ".gitignore", *left_out]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    report = create()
    assert report.problems == [] and report.warnings == []
    assert {"sub/kept.py", "data/environment.txt", ".gitignore"} <= set(report.files)
    assert not set(left_out) & set(report.files)
    assert "other" in str(report) and "and 2 more" in str(report)


def test_links_are_never_followed(create, folder, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("key")
    (folder / "outside").symlink_to(tmp_path / "secret", target_is_directory=True)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "key").symlink_to(tmp_path / "secret" / "key")
    report = create()
    assert report.problems == [] and not any("key" in name for name in report.files)
    assert "key (a link)" in str(report)
    (folder / "llama.py").rename(folder / "mine.py")
    (folder / "llama.py").symlink_to("mine.py")
    report = create()
    only_problem(report, "missing", "llama.py")
    assert "llama.py (a link)" in str(report)


@pytest.mark.skipif(sys.platform != "linux", reason="names that are not UTF-8, and pipes, exist on Linux")
def test_odd_files_are_left_out(create, folder):
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(bytes(folder) + b"/\xff\xfe")).write_text("x")
    report = create()
    assert report.problems == [] and "pipe (not a plain file" in str(report)
    str(report).encode()


# ------------------------------------------------------------------------------------------------ output files


def change(folder, name, edit):
    path = folder / name
    path.write_bytes(edit(path.read_bytes()))


CONTENT_FAULTS = {
    "empty": (lambda b: b"", "empty files"),
    "blank": (lambda b: b"\n \n", "white space"),
    "short": (lambda b: b[: b.rindex(b"\n", 0, -1) + 1], "5 lines, but sst-dev.txt has 6"),
    "long": (lambda b: b + b"1 ||| more\n", "7 lines, but sst-dev.txt has 6"),
    "label": (lambda b: b.replace(b"2 |||", b"5 |||"), "line 3: label outside 0..4"),
    "negative": (lambda b: b.replace(b"2 |||", b"-1 |||"), "line 3: label outside 0..4"),
    "word": (lambda b: b.replace(b"2 |||", b"good |||"), "line 3: not 'LABEL ||| sentence'"),
    "huge": (lambda b: b.replace(b"2 |||", b"9" * 5000 + b" |||"), "line 3: not 'LABEL ||| sentence'"),
    "bars": (lambda b: b.replace(b" ||| ", b", "), "line 1: not 'LABEL ||| sentence' (and 5 more lines)"),
    "latin1": (lambda b: b.decode().encode("latin-1"), "line 1: not UTF-8"),
    "order": (lambda b: b"".join(reversed(b.splitlines(True))), "line 1: not the sentence of the data file's"),
    "many": (lambda b: b + b"\n" * 100_001, "100007 lines, too many"),
    "other": (lambda b: b.replace(b"sentence 4", b"sentence four"), "line 5: not the sentence"),
}


@pytest.mark.parametrize("fault", CONTENT_FAULTS)
@pytest.mark.parametrize("kind", ["prompting", "finetuning", "advanced", "lora"])
def test_wrong_outputs(create, folder, fault, kind):
    edit, message = CONTENT_FAULTS[fault]
    write_outputs(folder, "advanced", "lora")
    name = f"sst-dev-{kind}-output.txt"
    change(folder, name, edit)
    report = create()
    if (fault, kind) == ("empty", "lora"):  # not asked for in this edition
        return
    assert any(message in problem and name in problem for problem in report.problems), report.problems
    assert not Path("alice.zip").exists()


@pytest.mark.parametrize("edit", [
    lambda b: b.replace(b"\n", b"\r\n"),
    lambda b: b"\n".join(line.rstrip() for line in b.split(b"\n")),
    lambda b: b.removesuffix(b"\n"),
    lambda b: b"\xef\xbb\xbf" + b,
    lambda b: b.replace(b"\n", b"  \n"),
])  # fmt: skip
def test_what_editors_do_is_forgiven(create, folder, edit):
    for name in list(LABELS):
        change(folder, f"{name}-prompting-output.txt", edit)
        change(folder, f"{name}-finetuning-output.txt", edit)
    report = create()
    assert report.problems == [] and report.warnings == [] and len(report.scores) == 8


def test_another_prompt_is_a_warning_and_free_for_advanced_methods(create, folder):
    write_outputs(folder, "advanced")
    (folder / "alice-report.pdf").write_text("pdf")
    for part in LABELS:
        change(folder, f"{part}-prompting-output.txt", lambda b: b.replace(b"Is this movie", b"Is it"))
        name = f"{part}-advanced-output.txt"
        change(folder, name, lambda b: b.replace(b"||| ", b"||| Review: ").replace(b"\n", b" It\n"))
    report = create()
    assert report.problems == []
    assert len(report.warnings) == 4 and all("another prompt" in warning for warning in report.warnings)


def test_outputs_under_another_kinds_name(create, folder):
    for part in LABELS:
        paths = [folder / f"{part}-{kind}-output.txt" for kind in ("prompting", "finetuning")]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
    problems = create().problems
    assert len(problems) == 8
    for words in ("prompting-output.txt: no sentence has a prompt", "finetuning-output.txt: every sentence ends in"):
        assert sum(words in problem for problem in problems) == 4


def test_outputs_on_the_bundled_data_are_no_submission(create, folder, monkeypatch):
    films = (ROOT / "data" / "films-dev.txt").read_text(encoding="utf-8")
    for kind, end in (("prompting", SUFFIX["sst"]), ("finetuning", "")):
        (folder / f"cfimdb-dev-{kind}-output.txt").write_text(films.replace("\n", f"{end}\n"), encoding="utf-8")
    (folder / "sst-dev-prompting-output.txt").rename(folder / "films-dev-prompting-output.txt")
    for find in (prepare_submit.Rules.find, lambda self, name: None):  # with the course's data and without them
        monkeypatch.setattr(prepare_submit.Rules, "find", find)
        problems = create().problems
        assert len(problems) == 3 and all("films data set" in problem for problem in problems), problems
        assert "films-dev-prompting-output.txt" in problems[0]


def test_constant_predictions_are_a_warning(create, folder):
    name = "cfimdb-dev-finetuning-output.txt"
    change(folder, name, lambda b: b.replace(b"0 |||", b"1 |||"))
    report = create()
    assert report.problems == [] and report.warnings == [f"{name}: every line has the same label"]


def test_the_mapping_decides_the_label_range(folder, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / "sst-label-mapping.json").write_text('["a", "b"]')
    report = create_zip(folder, "alice", data_dir=tmp_path / "data")
    assert any("outside 0..1" in problem for problem in report.problems)


@pytest.mark.parametrize("name, text", [
    ("sst-dev.txt", "1 || x\n"), ("sst-dev.txt", ""),
    *(("sst-label-mapping.json", text) for text in ("{", "[" * 100_000, "[1]")), ("sst-label-mapping.json", "[]"),
])  # fmt: skip
def test_broken_data_of_the_instructor_is_a_user_error(folder, data_dir, tmp_path, name, text):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / name).write_text(text)
    with pytest.raises(UserError, match=name):
        create_zip(folder, "alice", data_dir=tmp_path / "data")


# ----------------------------------------------------------------------------------------------------- imports


def test_what_is_fine_runs(folder, data_dir, tmp_path, tiny_checkpoint):
    """The assignment's own list of files lacks modules of this package; with them, the unpacked zip runs."""
    for path in ROOT.glob("*.py"):
        if (folder / path.name).exists():
            shutil.copy(path, folder)
    report = create_zip(folder, "alice", data_dir=data_dir)
    absent = "arguments batches cache columns course families finetuning generation plan reports runs"
    absent += " sampling saver sentences storage tasks training weights"
    some = "arguments.py (run_llama.py", "cache.py (llama.py", "course.py (classifier.py", " more"
    only_problem(report, "not in the submission", *some)
    assert len(report.warnings) == 1 and "rope_test.py (sanity_check.py" in report.warnings[0]
    for name in absent.split():
        shutil.copy(ROOT / f"{name}.py", folder)
    assert create_zip(folder, "alice", data_dir=data_dir).problems == []
    zipfile.ZipFile("alice.zip").extractall(tmp_path)
    flags = ["--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", "2"]
    done = subprocess.run([sys.executable, "run_llama.py", "--option", "generate", *flags],
                          cwd=tmp_path / "alice", capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


PRESENT = {"mine.py": "import training", "fast/__init__.py": "from .apply import x", "fast/linear.py": "",
           "scratch.py": "import nothing, training, optimizer_test\nprint 1"}  # fmt: skip


@pytest.mark.parametrize("code, absent", [
    ("import training", "training.py (llama.py line 1)"), ("import os\nimport mine", "training.py (mine.py line 1)"),
    ("def f():\n  from training import fit", "training.py (llama.py line 2)"), ("import fast", "fast/apply.py (fast/_"),
    ("import fast.linear", "fast/apply.py"), ("from fast import decode", "fast/decode.py (llama.py"),
    ("import convert.gguf as g", "convert/ (llama.py line 1)"),
    ("try:\n  import os\nexcept ImportError:\n  import training", "training.py (llama.py line 4)"),
    ("try:\n  import training\nexcept ValueError:\n  pass", "training.py"),
    ("if TYPE_CHECKING:\n  pass\nelse:\n  import training", "training.py"),
    *((f"try:\n  import training\nexcept{error}:\n  pass", None) for error in (
        "", " ImportError", " (KeyError, ModuleNotFoundError)", " builtins.Exception as e")),
    ("with suppress(ImportError):\n  import training", None), ("import numpy, nowhere, fast.linear.f", "fast/apply.py"),
    ("if typing.TYPE_CHECKING:\n  import training", None), ("from . import training", None), ("import llama", None),
    ("try:\n  import training\nexcept ImportError:\n  pass\ndef f():\n  from training import fit", None),
    ("try:\n  import fast.a\nexcept ImportError:\n  pass\nimport fast.decode", "fast/decode.py"),
    ("x = 1\nprint 2", "llama.py line 2: not Python"), ("a\0", "llama.py line 1: not Python"),
    ("a" + ".b" * 49_000, ""), ("a=" + "(" * 90_000, "llama.py line 1: not Python"), ("# coding: zip", "not Python"),
])  # fmt: skip
def test_imports_are_followed(check, folder, code, absent):
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} | PRESENT | {"llama.py": code}
    report = check([(f"alice/{name}", content) for name, content in files.items()])
    assert not any(character in str(report) for character in "\0\x1b")
    if absent is None:
        assert report.problems == []
    elif absent:
        only_problem(report, absent)
    assert any("scratch.py line 2: not Python" in warning for warning in report.warnings)


def test_large_modules_are_not_parsed(check, folder, monkeypatch):
    (folder / "llama.py").write_text("import training\n" * 10_000)
    report = check(entries_of(folder))
    assert report.problems == [] and "too large" in report.warnings[0] and "llama.py" in report.warnings[0]


# --------------------------------------------------------------------------------------------- hostile archives


ME = b"alice/x.py"
UNIX = 16  # bits above DOS's attributes
RECORD = forge(("alice/y.py", b"y"))
HIDDEN = RECORD[: RECORD.index(b"PK\1\2")]  # an entry that no directory names
PACKED = zlib.compress(b"x", wbits=-15)
DEFLATED = {"method": 8, "size": 1, "crc": zlib.crc32(b"x")}
# What the entry alice/x.py becomes, and what is said of it.
HOSTILE_ENTRIES = [
    *((dict(name=name.encode()), "refused entries") for name in (
        "../evil.py", "alice/../../evil.py", "/etc/passwd", "alice//etc", "alice/./x", "C:/x", "c:x", "alice\\x",
        "alice/\x1b[31m", "..", "", "\0lice/x.py", "alice/x\0py", "alice/.. /x", "alice/...")),
    (dict(name=b"alice/\xff", flags=0x800), "undecodable"),
    *((dict(attributes=(kind | 0o777) << UNIX), "a link or special file") for kind in (
        stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK)),
    *((dict(attributes=value), "a file to some tools") for value in (stat.S_IFDIR << UNIX, 0x10, 0x8)),
    (dict(name=b"alice/x/"), "a file to some tools"),
    *((dict(flags=flag), "encrypted") for flag in (1, 0x40, 0x2000)),
    (dict(local_flags=1), "encrypted"), (dict(version=63), "unzip skips"),
    *((dict(method=method), "compression method") for method in (12, 14, 99)),
    (dict(local_name=b"alice/y.py"), "another name"), (dict(local_method=8), "another method"),
    (dict(local_size=2), "another size"), (dict(local_packed=0), "another packed size"),
    (dict(local_crc=0), "another checksum"), (dict(offset=0), "another name"), (dict(offset=1), "local header"),
    *(({key: unicode_path(path, name)}, "Unicode path, 0x7075") for key in ("extra", "local_extra")
      for path in ("alice/y.py", "../../x", "alice/x.py\0", "alice/é.py", "") for name in (b"", ME)),
    (dict(name=b"alice/caf\xe9", extra=unicode_path("alice/cafe")), "Unicode path, 0x7075"),
    (dict(local_extra=extra(1, bytes([5] * 16))), "local header"), (dict(extra=b"up\xff\xff"), "directory is damaged"),
    (dict(size=2**32 - 1, extra=extra(1, struct.pack("<Q", 2))), "declared 2 bytes"),
    (dict(size=2**32 - 1), "when unpacked"),
    *((dict(name=name.encode()), "several entries for one name") for name in (
        "alice/llama.py", "alice/LLAMA.py", "alice/llama.py/", "alice/llama.py;1", "alice/llama.py;", "alice/llama.py.",
        "alice/llama.py:x", "alice/l\u200blama.py")),
    (dict(name=b"alice/llama.py/x/y"), "both a file and a folder"),
    (dict(descriptor=b"junk"), "belong to no entry"), (dict(descriptor=HIDDEN), "belong to no entry"),
    (dict(flags=8), "belong to no entry"),
    (dict(flags=8, content=b"PK\7\x08", descriptor=struct.pack("<3L", zlib.crc32(b"PK\7\x08"), 4, 4)), "its own end"),
    (dict(content=PACKED + HIDDEN, **DEFLATED), "other data follow"), (dict(content=b"\xff", **DEFLATED), "damaged"),
    (dict(content=PACKED[:-1], **DEFLATED), "cut short"),
    (dict(name=b"__MACOSX/x", content=PACKED + HIDDEN, **DEFLATED), "other data follow"),
    (dict(crc=1), "CRC"), (dict(size=2), "declared 2 bytes"), (dict(size=0), "declared 0 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", HOSTILE_ENTRIES)
def test_hostile_entries_are_refused(check, folder, changes, words, tmp_path):
    changes = dict(changes)
    content = changes.pop("content", b"" if changes.get("name", b"").endswith(b"py/") else b"x")
    if changes.get("size") == 0 or "method" in changes or "descriptor" in changes:
        changes.setdefault("packed", len(content))
    report = check(forge(*entries_of(folder), (ME, content, changes)))
    assert words in report.problems[0], report.problems
    assert all(problem.isprintable() and len(problem) < 300 for problem in report.problems)
    assert report.scores == {} or "damaged" in report.problems[0]  # nothing was read
    assert sorted(os.listdir(tmp_path)) == ["given.zip", "here", "work"] and os.listdir() == []


@pytest.mark.parametrize("parts, words", [
    (dict(before=b"#!/bin/sh\n"), "belong to no entry"), (dict(between=HIDDEN), "belong to no entry"),
    (dict(end=b"more"), "behind its end"), (dict(end=RECORD), "not where its end says"),
    (dict(comment=RECORD), "not where its end says"), (dict(comment=HIDDEN), "comment of the archive holds an archive"),
    (dict(wide_end=lambda numbers: [1, *numbers[1:]]), "disagree"),
])  # fmt: skip
def test_archives_with_two_readings_are_refused(check, folder, parts, words):
    only_problem(check(forge(*entries_of(folder), **parts)), words)


def streamed(content, form):
    """What a tool writes that learns the sizes after the data."""
    zeros = {f"local_{name}": 0 for name in ("crc", "packed", "size")}
    return dict(flags=8, descriptor=struct.pack(form, zlib.crc32(content), len(content), len(content)), **zeros)


@pytest.mark.parametrize("name, changes, parts", [
    ("alice/x", streamed(b"x", "<3L"), {}), ("alice/x", streamed(b"x", "<L2Q"), {}),  # Finder, pipes
    ("alice/e\u0301", {}, {}), ("alice/é", dict(flags=0x800), {}),  # Finder; Windows and 7-Zip
    ("alice/é".encode("cp850"), dict(extra=unicode_path("alice/é")), {}),  # Info-ZIP and WinRAR on Windows
    (b"alice/#U20ac", dict(extra=unicode_path("alice/€")), {}), ("alice/é", dict(extra=unicode_path("alice/é")), {}),
    ("alice/x", dict(local_size=2**32 - 1, local_packed=2**32 - 1, local_extra=extra(1, struct.pack("<2Q", 1, 1))), {}),
    ("alice/x", dict(size=2**32 - 1, extra=extra(1, struct.pack("<Q", 1))), dict(wide_end=list)),  # OneDrive
    ("alice/x", dict(attributes=(stat.S_IFREG | 0o644) << UNIX, extra=b"\0\0\0"), dict(comment=b"40 digits of git")),
])  # fmt: skip
def test_honest_archives_of_other_tools_are_fine(check, folder, name, changes, parts):
    report = check(forge(*entries_of(folder), (name, b"x", changes), **parts))
    assert report.problems == [] and len(report.files) == len(list(folder.iterdir())) + 1


def test_unicode_forms_of_one_name_are_duplicates(check, folder):
    for twins in (("\u00e9", "e\u0301"), ("\u00df", "SS")):
        report = check([*entries_of(folder), *((f"alice/{name}", "x") for name in twins)])
        only_problem(report, "several entries for one name")


@pytest.mark.parametrize("name", ["alice/" + "x" * 256, "alice/" + "d/" * 500, "alice/a" + "\u0301\u0316" * 16_000])
@pytest.mark.parametrize("key", ["name", "local_name", "extra"])
def test_names_that_no_disk_holds_are_refused_unread(check, folder, monkeypatch, name, key):
    monkeypatch.setattr(prepare_submit, "unicodedata", None)
    value = unicode_path(name) if key == "extra" else name.encode()
    only_problem(check(forge(*entries_of(folder), (ME, b"x", {key: value}))), "bytes", "255 a part and 1000 in all")


def peak_memory(function):
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("part", ["\u0390/", "a/"])
def test_memory_is_linear_in_the_names(check, folder, part):
    """Long names in deep folders, and letters that become three when case is folded."""
    names = [f"alice/{number}/{part * (900 // len(part.encode()))}x.txt" for number in range(100)]
    payload = forge(*entries_of(folder), *((name, b"x") for name in names))
    report, peak = peak_memory(lambda: check(payload, size_limit=0.3))
    assert report.problems == [] and peak < 10 * len(payload)


def test_declared_sizes_are_bounded(check, folder):
    bomb = [*entries_of(folder), ("alice/zeros", bytes(3_000_000))]
    report = check(bomb, size_limit=0.1)
    only_problem(report, "when unpacked", "the limit is 2 MB")
    assert report.scores == {}
    assert check(bomb, size_limit=0.1, max_unpacked=4).problems == []


@pytest.mark.parametrize("declared", [1000, 0])
def test_reading_stops_at_the_declared_size(check, folder, declared):
    packed = zlib.compress(bytes(60_000_000), wbits=-15)
    payload = forge(*entries_of(folder), (ME, packed, dict(method=8, size=declared)))
    report, peak = peak_memory(lambda: check(payload, size_limit=0.3))
    only_problem(report, "x.py is damaged: its size")
    assert peak < 5_000_000


def test_limits(check, folder, monkeypatch):
    name = "sst-dev-finetuning-output.txt"
    change(folder, name, lambda b: b + b" " * 300_000)
    only_problem(check(entries_of(folder), size_limit=0.2), name, "too large")
    monkeypatch.setattr(prepare_submit, "MAX_ENTRIES", 10)
    only_problem(check(entries_of(folder)), "entries", "more than 10")
    monkeypatch.setattr(prepare_submit, "_check_bytes", None)  # a large zip is not even read
    only_problem(check(b"x" * 2000, size_limit=0.001), "0.00 MB; the limit is 0.001 MB")


@pytest.mark.parametrize("payload", [b"", b"PK\x03\x04", b"hello", b"PK\x05\x06" + b"\xff" * 18, b"\0" * 100])
def test_no_zip_at_all(check, payload):
    only_problem(check(payload), "not a zip archive")


@pytest.fixture(scope="module")
def sound(data_dir, tmp_path_factory):
    """A right zip, and a folder to put changed ones in."""
    folder = fill(tmp_path_factory.mktemp("sound"))
    return pack(entries_of(folder)), tmp_path_factory.mktemp("changed")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4), cut=st.none() | st.floats(0, 1),
       near_end=st.booleans())  # fmt: skip
def test_fuzz_never_raises_and_never_writes(sound, data_dir, changes, cut, near_end):
    payload, folder = sound
    payload = bytearray(payload)
    start = payload.index(b"PK\x01\x02") if near_end else 0  # half of the changes hit the central directory
    for where, value in changes:
        payload[start + int(where * (len(payload) - 1 - start))] = value
    payload = payload[: int(cut * len(payload))] if cut is not None else payload
    path = folder / "changed.zip"
    path.write_bytes(payload)
    report = check_zip(path, "alice", data_dir=data_dir)
    assert isinstance(report, Report) and str(report).isprintable() == ("\n" not in str(report))
    assert os.listdir(folder) == ["changed.zip"]
    if cut is not None and cut < 0.99:
        assert report.problems


@settings(max_examples=50, deadline=None)
@given(payload=st.binary(max_size=300))
def test_fuzz_output_lines(payload):
    report = Report("alice")
    rules = prepare_submit.Rules()
    prepare_submit._check_text("sst-dev-finetuning-output.txt", payload, rules, report)
    assert all("\n" not in message for message in report.problems)


# ---------------------------------------------------------------------------------------------- sizes and disks


def test_a_large_new_zip_names_its_largest_files(create, folder):
    noise = random.Random(0)
    for size in range(1, 8):
        (folder / f"noise{size}").write_bytes(noise.randbytes(size * 10_000))
    report = create(size_limit=0.1)
    only_problem(report, "the limit is 0.1 MB", "noise7 (0.07 MB)", "noise3")
    assert "noise2" not in report.problems[0] and os.listdir() == []


def test_a_folder_that_is_far_too_large_is_not_packed(create, folder, monkeypatch):
    monkeypatch.setattr(prepare_submit, "_pack", None)
    (folder / "zeros").write_bytes(bytes(3_000_000))
    only_problem(create(size_limit=0.1), "too much for a submission", "zeros (3.00 MB)")


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_failing_disk_leaves_the_old_zip(create, monkeypatch, fails):
    create()
    before = Path("alice.zip").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError):
        create()
    assert Path("alice.zip").read_bytes() == before and os.listdir() == ["alice.zip"]


# -------------------------------------------------------------------------------------- functions and command line


@pytest.mark.parametrize("bad_id", ["", "  ", "-x", ".x", "../x", "a/b", "a b", "_x", "a\n", "é", "x" * 20_000])
def test_bad_ids(folder, bad_id):
    if bad_id.strip() and bad_id != bad_id.strip():
        return  # becomes a good one
    with pytest.raises(UserError, match="not a valid ID") as caught:
        create_zip(folder, bad_id)
    assert len(str(caught.value)) < 300


def test_the_id_pattern_can_be_set(folder, data_dir):
    assert create_zip(folder, "group-7", data_dir=data_dir, id_pattern=r"group-\d+").problems == []
    for bad_id, pattern in (("alice", r"group-\d+"), ("group-\u0663", r"group-\d+"), ("a/b", ".*"), ("..", ".*"),
                            ("__MACOSX", ".*"), ("a", "(" * 10_000)):  # fmt: skip
        with pytest.raises(UserError):
            create_zip(folder, bad_id, id_pattern=pattern)


def test_the_course_functions_raise_assertion_errors(folder, data_dir, capsys):
    shutil.copytree(data_dir, "data")
    prepare_submit.main(str(folder), " alice ")
    prepare_submit.main("alice.zip", "alice")
    prepare_submit.check_file("alice.zip", "alice")
    assert capsys.readouterr().out.count("the submission is fine") == 3
    with pytest.raises(AssertionError, match="mismatch: the top folder is alice, the ID is bob"):
        prepare_submit.check_file("alice.zip", "bob")
    (folder / "llama.py").unlink()
    with pytest.raises(FormatError, match="missing: llama.py"):
        prepare_submit.main(str(folder), "carol")
    assert not Path("carol.zip").exists()
    with pytest.raises(AssertionError):
        assert_zip("alice.zip", "bob")


def run(*arguments, **options):
    options.setdefault("env", {**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    done = subprocess.run([sys.executable, ROOT / "prepare_submit.py", *map(str, arguments)],
                          capture_output=True, text=True, errors="replace", **options)  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_command_line_status_0(folder, data_dir):
    assert run(folder, "alice", "--data", data_dir).returncode == 0
    done = run("alice.zip", "alice", "--data", data_dir, "--edition", "cmu2024")
    assert done.returncode == 0 and done.stderr == ""
    assert "0.833" in done.stdout and done.stdout.endswith("the submission is fine\n")


def test_command_line_status_1(folder, data_dir):
    (folder / "llama.py").unlink()
    (folder / "rope.py").write_text("")
    (folder / "\u65e5\u672c.zip").write_text("x")
    done = run(folder, "alice", "--data", data_dir)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.count("problem: ") == 2 and done.stdout.endswith("2 problems found\n")
    Path("no.zip").write_text("no zip")
    done = run("no.zip", "alice")
    assert done.returncode == 1 and done.stdout.endswith("1 problem found\n")


@pytest.mark.parametrize("arguments", [
    [], ["{dir}"], ["{dir}", "a/b"], ["nowhere", "alice"], ["/dev/null", "alice"],
    ["{dir}", "alice", "--data", "nowhere"], ["{dir}", "alice", "--edition", "x"],
    *(["{dir}", "alice", "--size_limit", size] for size in ("nan", "-1", "1_0")),
    ["{dir}", "alice", "--out", "x.txt"], ["{dir}", "alice", "--out", "no/x.zip"],
    ["{dir}/llama.py", "alice", "--force"], ["{dir}", "alice", "--id_pattern", "("],
])  # fmt: skip
def test_command_line_status_2(folder, arguments):
    done = run(*[argument.format(dir=folder) for argument in arguments])
    assert done.returncode == 2 and done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if "error: " in line]) == 1
    assert os.listdir() == []


def test_it_needs_no_heavy_import():
    code = "import sys, prepare_submit; print(sorted({'torch', 'numpy', 'sklearn', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"


REAL = Path(os.environ.get("MINLLAMA_ASSETS") or "/nowhere", "data")


@pytest.mark.skipif(not (REAL / "sst-dev.txt").is_file(), reason="MINLLAMA_ASSETS names no folder with the data")
def test_real_data(folder):
    """Predicting each split's own labels scores 1; the majority accuracies are known from the data."""
    for part in LABELS:
        dataset = part.split("-")[0]
        lines = (REAL / f"{part}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        for kind, end in (("finetuning", ""), ("prompting", SUFFIX[dataset])):
            pairs = [line.split(" ||| ") for line in lines]
            text = "".join(f"{label} ||| {sentence.strip()}{end}\n" for label, sentence in pairs)
            (folder / f"{part}-{kind}-output.txt").write_text(text, encoding="utf-8", newline="\n")
    report = create_zip(folder, "alice", data_dir=REAL)
    assert report.problems == [] and set(report.accuracies.values()) == {1.0}
    assert report.scores["sst-dev-prompting-output.txt"][::2] == (1101, pytest.approx(0.2625, abs=5e-5))
    assert report.scores["sst-test-prompting-output.txt"][::2] == (2210, pytest.approx(0.2864, abs=5e-5))
    assert report.scores["cfimdb-test-prompting-output.txt"] == (488, None, None)
