"""The zip that is handed in: creating it, checking it, and the command line."""

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from submissions import LABELS, beside, entries_of, fill, forge, only_problem, pack, pdf_of, write_outputs

import prepare_submit
from grading import rules, submission
from grading.programs import GradingError
from prepare_submit import ADVANCED, EDITIONS, FormatError, assert_zip, check_zip, create_zip

pytest_plugins = ["submission_fixtures"]


@pytest.mark.parametrize("edition", EDITIONS)
def test_create_then_check(tmp_path, data_dir, edition):
    (tmp_path / "in").mkdir()
    out = tmp_path / "alice.zip"
    folder = fill(tmp_path / "in", edition)
    report = create_zip(folder, " alice ", out, data_dir=data_dir, edition=edition)
    assert report.wrong == [] and beside(report) == []
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert sorted(report.files) == sorted(files)
    again = assert_zip(out, "alice", data_dir=data_dir, edition=edition)
    assert again.files == report.files and again.scores == report.scores
    with zipfile.ZipFile(out) as archive:
        assert all(archive.read(f"alice/{name}") == path.read_bytes() for name, path in files.items())


def test_the_three_lists(check, folder):
    assert EDITIONS["ucsc"].required == EDITIONS["cmu2024"].required
    new = set(EDITIONS["cmu2025"].required) - set(EDITIONS["cmu2024"].required)
    assert new == {f"{part}-lora-output.txt" for part in LABELS}
    assert EDITIONS["cmu2025"].optional == ("feedback.txt",)
    assert len(EDITIONS["ucsc"].required) == len(set(EDITIONS["ucsc"].required)) == 15
    missing = check(entries_of(folder), edition="cmu2025").wrong
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
    """Beside files, too, that bear the names of modules that it imports, and of the course's own."""
    (tmp_path / "alone").mkdir()
    shutil.copy(ROOT / "prepare_submit.py", tmp_path / "alone")
    shutil.copytree(ROOT / "grading", tmp_path / "alone" / "grading")
    for name in ("argparse", "ast", "config", "random", "tempfile", "torch", "utils", "zipfile"):
        (tmp_path / "alone" / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    shutil.copytree(data_dir, tmp_path / "alone" / "data")
    command = [sys.executable, "-S", tmp_path / "alone" / "prepare_submit.py", folder, "alice"]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sst-dev-prompting-output.txt" in done.stdout and "note: no " not in done.stdout  # data beside the script


def test_data_is_found_in_the_assets_folder_and_never_in_the_zip(folder, data_dir, tmp_path, monkeypatch):
    lie = [("alice/data/sst-dev.txt", "4 ||| x\n")]
    (tmp_path / "a.zip").write_bytes(pack(entries_of(folder) + lie))
    monkeypatch.setattr(rules, "find_asset", lambda name: None)
    report = check_zip(tmp_path / "a.zip", "alice")
    assert report.wrong == [] and report.scores == {}
    assert len([note for note in report.of("note") if note.startswith("no ")]) == len(LABELS)
    (folder / "sst-dev-finetuning-output.txt").write_text("5 ||| one\nno bars\n")
    report = create_zip(folder, "alice")  # labels and format are still checked
    assert len(report.wrong) == 2 and "0..4" in report.wrong[1]
    shutil.copytree(data_dir, tmp_path / "assets" / "data")
    monkeypatch.setenv("MINLLAMA_ASSETS", str(tmp_path / "assets"))
    assert len(check_zip(tmp_path / "a.zip", "alice").scores) == 8


# ------------------------------------------------------------------------------------------------------- names


def test_missing_files_are_named_and_nothing_is_written(create, folder):
    Path("alice.zip").write_bytes(b"old")
    (folder / "rope.py").unlink()
    (folder / "generated-sentence-temp-1.txt").unlink()
    only_problem(create(), "missing", "rope.py", "generated-sentence-temp-1.txt")
    assert Path("alice.zip").read_bytes() == b"old" and os.listdir() == ["alice.zip"]
    assert create(force=True).wrong
    assert zipfile.is_zipfile("alice.zip")


@pytest.mark.parametrize("kept, missing", [
    ((0, 1, 2, 3), []), ((), []), ((0, 1), []), ((2, 3), []),  # of SST alone, of CFIMDB alone
    ((0,), [1]), ((1,), [0]), ((0, 1, 3), [2]), ((0, 2), [1, 3]),
])  # fmt: skip
@pytest.mark.parametrize("edition", ["ucsc", pytest.param("cmu2025", marks=pytest.mark.slow)])
@pytest.mark.parametrize("feedback", [True, False])
def test_advanced_outputs_are_optional_and_half_a_data_set_earns_a_warning(
    tmp_path, data_dir, kept, missing, edition, feedback
):
    folder = tmp_path / "in"
    folder.mkdir()
    fill(folder, edition)
    write_outputs(folder, "advanced")
    (folder / "alice-report.pdf").write_bytes(pdf_of(3))
    for number in {*range(4)} - {*kept}:
        (folder / ADVANCED[number]).unlink()
    if feedback:
        (folder / "feedback.txt").write_text("good\n")
    report = create_zip(folder, "alice", tmp_path / "x.zip", data_dir=data_dir, edition=edition)
    names = ", ".join(sorted(ADVANCED[number] for number in missing))
    said = f"of the advanced outputs of one data set only one is here; missing: {names}"
    assert report.wrong == [] and beside(report) == ([said] if missing else [])
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


def test_advanced_outputs_without_a_report_and_absent_files_of_the_readme_tree_earn_a_warning(create, folder):
    write_outputs(folder, "advanced")
    report = create()
    assert report.wrong == [] and "alice-report.pdf" in beside(report)[0]
    (folder / "alice-report.pdf").write_bytes(pdf_of(3))
    assert beside(create()) == []
    (folder / "tokenizer.py").unlink()
    report = create()
    assert report.wrong == [] and "tokenizer.py" in beside(report)[0]
    assert str(report).endswith("\ncreated: note 1")


@pytest.mark.parametrize("name", ["README.md", "structure.md", "setup.sh", "sanity_check.data"])
def test_only_a_whole_tree_is_called_fine(create, check, folder, name):
    assert str(create()).endswith("\nthe submission is fine")
    (folder / name).unlink()
    report = create()
    assert report.wrong == [] and [name in said for said in beside(report)] == [True]
    assert str(report).endswith("\ncreated: note 1") and f"\nnote: {beside(report)[0]}\n" in str(report)
    (folder / "sst-dev-finetuning-output.txt").write_bytes(b"1 ||| x\n")
    (folder / "alice-report.pdf").write_bytes(b"no PDF")
    checked = check(entries_of(folder, "ALICE"))
    assert str(checked).endswith("\nwrong: deduct 2, flag 1, note 2")


def test_an_id_in_upper_case_is_a_warning_wherever_it_comes_from(folder, data_dir):
    def warned(path, student_id, **rules):
        report = (create_zip if path.is_dir() else check_zip)(path, student_id, data_dir=data_dir, **rules)
        assert report.wrong == []
        return beside(report)

    assert warned(folder, "alice") == [] == warned(Path("alice.zip"), "alice")
    assert warned(Path("alice.zip").rename("hw1.zip"), "alice") == []
    (upper,) = warned(folder, "Alice")
    assert upper == "CruzID in upper case: Alice, the zip is named Alice.zip; write alice, in lower case"
    assert warned(Path("Alice.zip"), "Alice") == [upper]
    folder_, named = warned(Path("Alice.zip"), "alice", edition="cmu2024")
    assert folder_.startswith("AndrewID mismatch: the top folder is Alice, the ID is alice")
    assert named == "AndrewID in upper case: the zip is named Alice.zip; write alice, in lower case"
    assert warned(folder, "Group-7", id_pattern=r"Group-\d+") == []


def test_wrong_top_folders(check, folder):
    only_problem(check(entries_of(folder, "bob")), "mismatch", "bob", "alice")
    two = entries_of(folder) + [("bob/x.txt", "x")]
    only_problem(check(two), "one top folder", "alice", "bob")
    loose = [(name.removeprefix("alice/"), content) for name, content in entries_of(folder)]
    only_problem(check(loose), "outside the top folder", "README.md")
    report = check([*loose, ("engine/x.py", "x = 1"), ("data/x.json", "[]")])
    assert len(report.scores) == 8 and [one.code for one in report.of("deduct")] == ["E010-folder"] * 2
    report = check([*entries_of(folder, "hw1"), ("a/x.txt", "x"), ("alice/x.txt", "x")])
    only_problem(report, "one top folder", "found 3")
    assert len(report.scores) == 8
    code = [("alice/llama.py", "import torch\n")]  # the ID's folder counts wherever it holds a required file
    assert check([*entries_of(folder, "hw1"), *code]).files == ["llama.py"]
    deeper = [(name.replace("alice/", "alice/hw1/"), content) for name, content in entries_of(folder)]
    report = check([*deeper, ("alice/x.py", "x")])
    only_problem(report, "hw1/run_llama.py", "directly in the top folder")
    assert "missing" not in str(report) and "absent" not in str(report) and len(report.scores) == 8
    assert "the archive is empty" in check([]).wrong
    report = check(entries_of(folder, "ALICE"))
    assert report.wrong == [] and len(report.scores) == 8 and "llama.py" in report.files
    mismatch = "CruzID mismatch: the top folder is ALICE, the ID is alice (upper and lower case differ)"
    assert beside(report) == [mismatch]  # upper and lower case
    only_problem(check([*entries_of(folder, "ALICE"), ("bob/x.txt", "x")]), "one top folder", "ALICE", "bob")


def test_what_operating_systems_add_is_ignored(check, folder):
    extra = [("__MACOSX/alice/._llama.py", "x"), ("alice/.DS_Store", "x"), (".DS_Store", "x"), ("alice/", "")]
    report = check(entries_of(folder) + extra)
    assert report.wrong == [] and beside(report) == [] and ".DS_Store" not in report.files


def test_backslashes_are_a_students_problem_and_read_all_the_same(check, folder):
    """Windows PowerShell writes such zips. Where some names have slashes, tools do not agree on the others."""
    names = [(name.replace("/", "\\"), content) for name, content in entries_of(folder)]
    report = check(forge(*names))
    only_problem(report, "backslashes", "Windows PowerShell")
    assert len(report.scores) == 8 and "llama.py" in report.files
    assert "refused entries (a backslash" in check(forge(*names, ("alice/x", b"x"))).wrong[0]
    assert "'..' part" in check(forge(*names, ("alice\\..\\x", b"x"))).wrong[1]


def test_every_problem_is_reported_together(check, folder):
    (folder / "rope.py").unlink()
    (folder / "llama.py").write_text("")
    (folder / "sst-dev-advanced-output.txt").write_text("1 ||| x\n")
    (folder / "sst-dev-finetuning-output.txt").write_text("9 ||| x\n")
    report = check(entries_of(folder, "bob"))
    text = "\n".join(report.wrong)
    for word in ("mismatch", "rope.py", "empty files: llama.py", "0..4", "1 lines", "not the sent"):
        assert word in text
    assert str(report).endswith(f"\nwrong: deduct {len(report.wrong)}, flag 1, note 1")


def test_what_does_not_belong_in_a_zip(check, folder):
    for name in (".git/config", "my/.venv/lib/x.py", "e/pyvenv.cfg", "best.PT", "a/b.pth", "node_modules/x"):
        only_problem(check([*entries_of(folder), (f"alice/{name}", "x")]), "do not belong", name)
    report = check([*entries_of(folder), ("alice/__pycache__/llama.pyc", "x")])
    assert report.wrong == [] and "__pycache__" in beside(report)[0]


def test_creation_leaves_out_what_does_not_belong(create, folder):
    left_out = [".git/config", "__pycache__/x.pyc", ".pytest_cache/x", "venv/x", "other/pyvenv.cfg", "old.zip",
                "conda/conda-meta/x", "finetune-5-2e-05.pt", ".DS_Store", "x.resume.tmp", "sub/.git/x",
                "finetune-5-2e-05.lock", "sst-dev-finetuning-output.lck"]  # fmt: skip
    for name in ["sub/kept.py", "data/environment.txt", ".gitignore", *left_out]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    report = create()
    assert report.wrong == [] and beside(report) == []
    assert {"sub/kept.py", "data/environment.txt", ".gitignore"} <= set(report.files)
    assert not set(left_out) & set(report.files)
    assert "other" in str(report) and f"and {len(left_out) - 10} more" in str(report)


def test_links_are_never_followed(create, folder, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("key")
    (folder / "outside").symlink_to(tmp_path / "secret", target_is_directory=True)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "key").symlink_to(tmp_path / "secret" / "key")
    report = create()
    assert report.wrong == [] and not any("key" in name for name in report.files)
    assert "key (a link)" in str(report)
    (folder / "llama.py").rename(folder / "mine.py")
    (folder / "llama.py").symlink_to("mine.py")
    report = create()
    only_problem(report, "missing", "llama.py")
    assert "llama.py (a link)" in str(report)


@pytest.mark.skipif(sys.platform != "linux", reason="names that are not UTF-8, and pipes, exist on Linux")
def test_odd_files_are_left_out(create, folder):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    (folder / "sub" / "Icon\r").touch()  # Finder's
    Path(os.fsdecode(bytes(folder) + b"/\xff\xfe")).write_text("x")
    report = create()
    assert report.wrong == [] and "pipe (not a plain file" in str(report)
    assert not any("Icon" in name for name in zipfile.ZipFile("alice.zip").namelist())
    str(report).encode()


# ---------------------------------------------------------------------------------------------- sizes and disks


def test_a_large_new_zip_names_its_largest_files(create, folder, monkeypatch):
    noise = random.Random(0)
    for size in range(1, 8):
        (folder / f"noise{size}").write_bytes(noise.randbytes(size * 10_000))
    report = create(size_limit=0.1)
    only_problem(report, "the limit is 0.1 MB", "noise7 (0.07 MB)", "noise3")
    assert "noise2" not in report.wrong[0] and os.listdir() == []
    # far too large: not packed
    monkeypatch.setattr(submission, "_pack", None)
    (folder / "zeros").write_bytes(bytes(3_000_000))
    only_problem(create(size_limit=0.1), "too much for a submission", "zeros (3.00 MB)")


@pytest.mark.parametrize("edition", EDITIONS)
def test_the_limit_is_that_of_the_edition_that_names_one(tmp_path, data_dir, edition):
    """Fall 2025 asks for less than 10 MB; the editions before it name no limit."""
    (tmp_path / "in").mkdir()
    fill(tmp_path / "in", edition)
    (tmp_path / "in" / "photo.jpg").write_bytes(random.Random(0).randbytes(11_000_000))
    report = create_zip(tmp_path / "in", "alice", tmp_path / "alice.zip", data_dir=data_dir, edition=edition)
    limit = EDITIONS[edition].size_limit
    if limit < 11:
        only_problem(report, "the zip is 11.0", f"the limit is {limit:g} MB")
    assert bool(report.wrong) == (limit < 11) and EDITIONS["cmu2025"].size_limit == 10
    assert EDITIONS["ucsc"].size_limit == EDITIONS["cmu2024"].size_limit == 100


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
    with pytest.raises(GradingError, match="not a valid ID") as caught:
        create_zip(folder, bad_id)
    assert len(str(caught.value)) < 300


def test_the_id_pattern_can_be_set_and_a_zip_is_called_one(folder, data_dir):
    with pytest.raises(GradingError, match="must end in .zip"):  # else it would be packed into the next one
        create_zip(folder, "alice", "alice.txt")
    assert not Path("alice.txt").exists()
    assert create_zip(folder, "group-7", data_dir=data_dir, id_pattern=r"group-\d+").wrong == []
    for bad_id, pattern in (("alice", r"group-\d+"), ("group-\u0663", r"group-\d+"), ("a/b", ".*"), ("..", ".*"),
                            ("__MACOSX", ".*"), ("a", "(" * 10_000)):  # fmt: skip
        with pytest.raises(GradingError):
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


def test_command_line_status_0_and_1(folder, data_dir):
    assert run(folder, "alice", "--data", data_dir).returncode == 0
    done = run("alice.zip", "alice", "--data", data_dir, "--edition", "cmu2024")
    assert done.returncode == 0 and done.stderr == ""
    assert "0.833" in done.stdout and done.stdout.endswith("the submission is fine\n")
    (folder / "llama.py").unlink()
    (folder / "rope.py").write_text("")
    (folder / "\u65e5\u672c.zip").write_text("x")
    done = run(folder, "alice", "--data", data_dir)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.count("\ndeduct: ") == 2 and done.stdout.endswith("\nwrong: deduct 2\n")
    Path("no.zip").write_text("no zip")
    done = run("no.zip", "alice")
    assert done.returncode == 1 and done.stdout.endswith("\nwrong: refuse 1\n")


@pytest.mark.parametrize("arguments", [
    [], ["{dir}"], ["{dir}", "a/b"], ["nowhere", "alice"], ["/dev/null", "alice"],
    ["{dir}", "alice", "--data", "nowhere"], ["{dir}", "alice", "--edition", "x"],
    *(["{dir}", "alice", "--size_limit", size] for size in ("nan", "0", "1_0")),
    ["{dir}", "alice", "--out", "x.txt"], ["{dir}", "alice", "--out", "no/x.zip"],
    ["{dir}/llama.py", "alice", "--force"], ["{dir}", "alice", "--id_pattern", "("],
])  # fmt: skip
def test_command_line_status_2(folder, arguments):
    done = run(*[argument.format(dir=folder) for argument in arguments])
    assert done.returncode == 2 and done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if "error: " in line]) == 1
    assert os.listdir() == []


def test_with_json_the_report_is_one_object(tmp_path, folder, data_dir):
    done = run(folder, "alice", "--json", "--data", data_dir)
    told = json.loads(done.stdout)
    assert done.returncode == told["status"] == 0 and told["lines"][-1] == "the submission is fine"
    assert told["id"] == "alice" and "llama.py" in told["files"]
    assert [one["severity"] for one in told["findings"]] == ["note"] and "wrote" in told["findings"][0]["text"]
    (folder / "rope.py").unlink()
    told = json.loads(run(folder, "alice", "--json", "--data", data_dir).stdout)
    first = told["findings"][0]
    assert told["status"] == 1 and (first["code"], first["severity"]) == ("E012-missing", "deduct")
    assert "rope.py" in first["text"]
    assert run(tmp_path / "absent", "alice", "--json").stdout == ""


def test_a_folder_of_zips_is_what_a_grader_has(tmp_path, folder, data_dir):
    (folder / "a.zip").write_bytes(b"x")
    (folder / "b.zip").write_bytes(b"x")
    assert run(folder, "alice", "--data", data_dir).returncode == 0  # a student's, with two old zips
    (tmp_path / "in").mkdir()
    for name in ("a.zip", "b.zip"):
        (tmp_path / "in" / name).write_bytes(b"x")
    done = run(tmp_path / "in", "alice")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "python -m grading" in done.stderr


def test_a_folder_of_outputs_alone_is_an_error_that_says_what_to_name(tmp_path, folder, data_dir):
    (tmp_path / "outputs").mkdir()
    write_outputs(tmp_path / "outputs", "advanced")
    done = run(tmp_path / "outputs", "alice")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "sst-dev-advanced-output.txt, and no code; name the folder that holds the code" in done.stderr
    (tmp_path / "outputs" / "src").mkdir()
    (tmp_path / "outputs" / "src" / "llama.py").write_text("")
    assert run(tmp_path / "outputs", "alice").returncode == 1  # the code lies too deep, which the report says


def test_a_submission_of_2026_holds_trained_models_and_may_lack_modules(tmp_path, data_dir):
    (tmp_path / "in").mkdir()
    folder = fill(tmp_path / "in", "cmu2026")
    (folder / "config.py").unlink()
    (folder / "llama.py").write_text("import config\n")
    (folder / "addition_run.py").write_text("import matplotlib.pyplot, numpy\n")
    (folder / "stories42M.pt").write_bytes(b"0")
    report = create_zip(folder, "alice", tmp_path / "alice.zip", data_dir=data_dir, edition="cmu2026")
    assert report.wrong == [] and [one.code for one in beside(report)] == ["E024-unlisted", "E031-needs-others"]
    assert {one.severity for one in beside(report)} == {"note"}
    assert "addition_models/best_model/best_model.pth" in report.files and "stories42M.pt" not in report.files
    assert create_zip(
        folder, "alice", tmp_path / "b.zip", data_dir=data_dir, edition="ucsc"
    ).wrong  # whose set-up has no matplotlib
    for number in range(1, 6):
        (folder / f"addition_models/ablation_{number}/best_model.pth").unlink()
    (folder / "addition_models/best_model/best_model.pth").unlink()
    first, second = create_zip(folder, "alice", tmp_path / "c.zip", data_dir=data_dir, edition="cmu2026").wrong
    assert "best_model/ with its .pth file is missing" in first and "has 0 folders ablation_N" in second
