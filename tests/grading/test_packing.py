"""Making a submission: what is added to the student's files, and what of the package's own folder is left out."""

import shutil
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from submissions import beside, fill

from advanced.experiments.other_data import SOURCES
from grading.needs import OWN_FOLDERS, is_carried
from grading.submission import create_zip

pytest_plugins = ["submission_fixtures"]

RUN = "def main():\n  try:\n    from engine.main import main\n  except ModuleNotFoundError:\n    return 2"
SETUP = "wanted=requirements.txt\npip install -r requirements/fast.txt\n"
OURS = {"run_llama.py": RUN, "sanity_check.py": "from grading.student_process import ask", "setup.sh": SETUP}
ADDED = {"data/cfimdb-label-mapping.json", "data/sst-label-mapping.json", "checkpoints/parts.json", "requirements.txt",
         "requirements/fast.txt", "requirements/test.txt", "engine/__init__.py", "engine/main.py", "engine/plan.py",
         "engine/text/__init__.py", "engine/text/runs.py", "engine/unreached.py", "engine/table.json",
         "grading/__init__.py", "grading/student_process.py", "grading/editions.py", "grading/parts.py"}  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def added(create, folder, package):
    """What is added to the complete submission with some files more, or others; and the note that says so."""

    def run(files):
        write(folder, files)
        report = create()
        assert report.wrong == [] and beside(report) == [], str(report)
        own = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        notes = [note for note in report.of("note") if note.startswith("added")]
        return set(report.files) - own, notes

    return run


def test_what_the_files_need_is_added_in_one_step_and_said(added, package, tmp_path):
    """A folder of which nothing is there comes whole."""
    files, (note,) = added(OURS)
    assert files == ADDED
    said = "checkpoints/parts.json, data/cfimdb-label-mapping.json, data/sst-label-mapping.json, engine/, grading/"
    assert note.endswith(f"lacks it: {said}, requirements.txt, requirements/")
    with zipfile.ZipFile("alice.zip") as archive:
        assert archive.read("alice/engine/plan.py") == (package / "engine/plan.py").read_bytes()


@pytest.mark.parametrize("files, names", [
    ({}, set()),
    ({"run_llama.py": "import llama, tqdm", "sanity_check.py": "import torch, llama"}, set()),
    ({"run_llama.py": "names = 'data/sst-label-mapping.json'"}, {name for name in ADDED if "mapping" in name}),
    ({"sanity_check.py": "import grading.student_process"},
     {name for name in ADDED if name.startswith(("grading", "check"))}),
    ({"setup.sh": SETUP}, {name for name in ADDED if name.startswith("requirements")}),
    ({"setup.sh": "# requirements.txt\npip freeze > requirements.txt"}, set()),
    ({"mine.py": "import convert.gguf"}, {"convert/gguf.py"}),
    ({"llama.py": "def f():\n  import advanced.lora"}, {"advanced/lora.py", "convert/gguf.py"}),
])  # fmt: skip
def test_nothing_else_is_added(added, files, names):
    assert added(files)[0] == names


def test_what_lies_in_the_folder_is_not_replaced(added, package):
    """A changed module of engine/ is the student's; what it lacks of that folder is added file by file."""
    (package / "utils.py").write_text("")
    files, _ = added(OURS | {"engine/plan.py": "import engine.table, tokenizer\n", "engine/table.py": "mine = 1"})
    assert {"engine/plan.py", "engine/unreached.py", "engine/text/runs.py", "utils.py"}.isdisjoint(files)
    assert {"engine/main.py", "grading/parts.py"} <= files
    with zipfile.ZipFile("alice.zip") as archive:
        assert archive.read("alice/engine/plan.py") == b"import engine.table, tokenizer\n"


def test_the_students_own_files_are_never_added(create, folder, package):
    """tokenizer.py is on the course's list: a copy of the package's might not be what the student has run."""
    (package / "tokenizer.py").write_text("")
    (folder / "tokenizer.py").unlink()
    write(folder, OURS)
    report = create()
    assert len(report.wrong) == 1 and report.wrong[0].endswith("without: tokenizer.py (engine/plan.py line 2)")


def test_what_cannot_be_added_is_named(create, folder, package):
    write(folder, {"mine.py": "import benchmarks.measure, tests.test_it"})
    report = create()
    assert report.wrong == [] and "benchmarks/ (mine.py line 1), tests/ (mine.py line 1)" in beside(report)[0]


def test_of_the_packages_own_folder_only_what_runs_is_packed(package, data_dir, folder):
    fill(package)
    mine = {"my_method.py": "x = 1", "notes/idea.md": "x", "advanced/mine.py": "x = 1", "data/mine.txt": "x",
            "picture.png": "x", "train.log": "x", "tests/adapters.py": "x = 1"}  # fmt: skip
    scratch = {"llama.py~": "x", ".llama.py.swp": "x", "llama.py.orig": "x", ".idea/x": "x", "films-1.pt": "x"}
    write(package, OURS | mine | scratch)
    report = create_zip(package, "alice", data_dir=data_dir)
    assert report.wrong == [] and beside(report) == [], str(report)
    course = {path.name for path in folder.iterdir()}
    optional = {f"fast/{name}.py" for name in ("__init__", "apply", "decode", "linear", "loops")}
    optional |= {"advanced/lora.py", "convert/gguf.py", "optimizer_test.py", "rope_test.py", "training.py"}
    assert set(report.files) == course | ADDED | optional | mine.keys()
    (note,) = [note for note in report.of("note") if "no part of a submission" in note]
    for name in ("tests/", "docs/", "benchmarks/", "notebooks/", ".ci/", ".github/", "checkpoints/build.py",
                 "advanced/results/", "advanced/README.md", "pyproject.toml", "tokenizer.model", "data/films-dev.txt",
                 "llama.py~", ".idea/", "README.zh-TW.md"):  # fmt: skip
        assert name in note
    assert not any(note.startswith("added") for note in report.of("note"))


def test_it_is_said_of_every_folder_of_the_package_what_of_it_is_packed():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}  # a reader's own folders may lie beside them
    assert packages | {"checkpoints", "docs", "requirements", "tests"} <= {*OWN_FOLDERS}
    assert not is_carried("handout/holes.py") and is_carried("data/sst-label-mapping.json")
    assert not any(map(is_carried, ("CONTRIBUTING.md", ".editorconfig", ".pre-commit-config.yaml")))
    for name in (*(source.name for source in SOURCES.values()), "sst2"):
        assert not is_carried(f"data/{name}-train.txt")


def test_another_folder_is_packed_as_it_is(create, folder, package):
    """Folders that are called as the package's are the student's own there."""
    write(folder, {"docs/mine.md": "x", "tests/test_mine.py": "x = 1", "advanced/README.md": "x", "data/more.txt": "x"})
    assert {"docs/mine.md", "tests/test_mine.py", "advanced/README.md", "data/more.txt"} <= set(create().files)


def test_a_zip_of_what_was_added_checks_and_packs_to_the_same(create, check, folder, package, tmp_path):
    write(folder, OURS)
    create()
    payload = Path("alice.zip").read_bytes()
    report = check(payload)
    assert report.wrong == [] and beside(report) == []
    zipfile.ZipFile("alice.zip").extractall(tmp_path / "unpacked")
    shutil.rmtree(folder)
    (tmp_path / "unpacked" / "alice").rename(folder)
    create()
    assert Path("alice.zip").read_bytes() == payload


def test_a_zip_of_an_earlier_time_is_not_taken_for_the_new_one(create, folder):
    assert not any("earlier" in note for note in create().of("note"))
    (folder / "rope.py").unlink()
    assert create().of("note")[-1].endswith(".zip was not written; the one that lies there is an earlier one")
