"""A submission made of the assignment's own list of files runs where it is unpacked, and nowhere else."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT
from submissions import beside, fill, pack, write_outputs

from grading.editions import LISTED, REQUIRED
from grading.submission import check_zip, create_zip

pytest_plugins = ["submission_fixtures"]


@pytest.fixture
def listed(folder):
    """The complete submission, with this package's own files on the course's list."""
    for name in (*REQUIRED, *LISTED):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    write_outputs(folder, "prompting", "finetuning")
    return folder


def run(folder, *arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and str(ROOT) not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout


def test_what_is_fine_runs(listed, data_dir, tmp_path, tiny_checkpoint):
    """Made in one step, without a round of naming what is missing; run_llama.py finds all that it needs in it."""
    report = create_zip(listed, "alice", data_dir=data_dir)
    assert report.wrong == [] and beside(report) == [], str(report)
    zipfile.ZipFile("alice.zip").extractall(tmp_path)
    shutil.copy(tiny_checkpoint, tmp_path / "alice" / "mine.pt")
    shutil.copy(tiny_checkpoint.with_suffix(".model"), tmp_path / "alice" / "mine.model")
    flags = ["--option", "generate", "--pretrained-model-path", "mine.pt", "--max_new_tokens", "2"]
    assert "Wrote generated sentence" in run(tmp_path / "alice", "run_llama.py", *flags)


def test_what_a_zip_made_by_hand_lacks_is_what_would_have_been_added(listed, data_dir, tmp_path):
    (tmp_path / "hand.zip").write_bytes(pack((f"alice/{path.name}", path.read_bytes()) for path in listed.iterdir()))
    report = check_zip(tmp_path / "hand.zip", "alice", data_dir=data_dir)
    assert len(report.wrong) == 1 and len(beside(report)) <= 1
    named = re.findall(r"(?:: |\), )([\w/.-]+) \(", "".join([*report.wrong, *beside(report)]))
    (note,) = [note for note in create_zip(listed, "alice", data_dir=data_dir).of("note") if note.startswith("added")]
    assert sorted(named) == sorted(note.partition("lacks it: ")[2].split(", "))
    assert {"data/sst-label-mapping.json", "checkpoints/parts.json", "requirements.txt", "requirements/"} <= {*named}


@pytest.mark.slow
def test_the_parts_are_checked_where_it_is_unpacked(listed, data_dir, tmp_path):
    assert create_zip(listed, "alice", data_dir=data_dir).wrong == []
    zipfile.ZipFile("alice.zip").extractall(tmp_path)
    for path in (ROOT / "checkpoints").glob("minllama1M*"):
        shutil.copy(path, tmp_path / "alice" / "checkpoints")
    (tmp_path / "alice" / "sanity_check.data").unlink()  # which is no such file in this test
    assert "RMSNorm" in run(tmp_path / "alice", "sanity_check.py", "--parts")


@pytest.mark.slow
def test_of_the_packages_own_folder_a_small_zip_is_made_that_runs(data_dir, tmp_path, tiny_checkpoint):
    """In a copy of this folder, with the scripts of the copy."""
    skipped = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.pt", "*.zip", ".*_cache")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=skipped)
    (tmp_path / "outputs").mkdir()
    for path in fill(tmp_path / "outputs").glob("*"):
        if not (tmp_path / "clone" / path.name).exists():
            shutil.copy(path, tmp_path / "clone")
    printed = run(tmp_path / "clone", "prepare_submit.py", ".", "alice", "--data", data_dir)
    assert "no part of a submission" in printed and "tests/" in printed
    assert (tmp_path / "clone" / "alice.zip").stat().st_size < 2_000_000
    zipfile.ZipFile(tmp_path / "clone" / "alice.zip").extractall(tmp_path)
    flags = ["--option", "generate", "--pretrained-model-path", tiny_checkpoint, "--max_new_tokens", "2"]
    assert "Wrote generated sentence" in run(tmp_path / "alice", "run_llama.py", *flags)
