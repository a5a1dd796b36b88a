"""The autograder for Gradescope in a copy of its folders: what it writes, and what a submission cannot reach.

The code runs as another user, which only root can arrange; elsewhere these tests are skipped.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from error_helpers import check_one_error
from judging import add, student  # noqa: F401
from submission_fixtures import data_dir  # noqa: F401
from submissions import fill
from test_box import PYTHON
from test_hostile import HOSTILE, wait_for

from grading import gradescope, outputs, sandbox
from grading.box import ADAMW, ROPE, Executed
from grading.gradescope import UNFINISHED, build
from grading.programs import GradingError, run_main
from grading.sandbox import STUDENT, BoxLimits, UserBox, own_libraries
from grading.uploads import MAX_READ

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, who gives the code a user of its own"
)
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
SHOWN = {"enum": ["hidden", "after_due_date", "after_published", "visible"]}
# https://gradescope-autograders.readthedocs.io/en/latest/specs/, as far as it is used here
SCHEMA = {
    "type": "object", "required": ["score", "output", "tests"], "additionalProperties": False,
    "properties": {
        "extra_data": {"type": "object"},
        "score": NUMBER, "output": TEXT, "visibility": SHOWN, "stdout_visibility": SHOWN,
        "tests": {"type": "array", "items": {
            "type": "object", "required": ["name", "score", "max_score", "status"], "additionalProperties": False,
            "properties": {"name": TEXT, "score": {"type": "number", "minimum": 0}, "max_score": NUMBER,
                           "status": {"enum": ["passed", "failed"]}, "output": TEXT, "visibility": SHOWN}}},
        "leaderboard": {"type": "array", "items": {
            "type": "object", "required": ["name", "value"], "properties": {"name": TEXT, "value": NUMBER}}},
    },
}  # fmt: skip


class Autograder:
    """A copy of Gradescope's folders below `base`."""

    def __init__(self, base: Path, data_dir: Path, **settings):
        self.base, self.results = base, base / "results/results.json"
        for name in ("source", "submission", "results"):
            (base / name).mkdir()
        build(base / "autograder.zip", "ucsc", str(data_dir), **settings)
        with zipfile.ZipFile(base / "autograder.zip") as archive:
            archive.extractall(base / "source")
        (base / "autograder.zip").unlink()

    def start(self) -> subprocess.Popen:
        paths = {"PYTHONPATH": os.pathsep.join(own_libraries()), "TMPDIR": str(self.base)}
        command = [PYTHON, "-m", "grading.gradescope", "--run", str(self.base)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.base / "source", env=os.environ | paths, **pipes)

    def read(self) -> dict:
        """The results, which are what Gradescope's specification asks for."""
        jsonschema = pytest.importorskip("jsonschema")
        found = json.loads(self.results.read_text())
        jsonschema.validate(found, SCHEMA)
        return found

    def run(self) -> tuple[dict, dict[str, dict]]:
        """The results, and their tests by name."""
        process = self.start()
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err) == (0, "", "")
        found = self.read()
        return found, {test["name"]: test for test in found["tests"]}


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that every user may enter, as `/autograder` is; at the end no process of the student's is left."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        assert sys.platform != "linux" or UserBox(PYTHON, user=STUDENT).members(0) == []
        left = {name for name in os.listdir(folder) if not name.startswith("torchinductor")}
        assert left <= {"source", "submission", "results", "submission_metadata.json", "seen"}


@pytest.fixture
def autograder(base: Path, data_dir: Path) -> Autograder:
    return Autograder(base, data_dir, seconds=20.0)


def submit(autograder: Autograder, student: Path) -> None:
    """A complete submission whose outputs are those of the small data sets, and whose code is the student's."""
    fill(autograder.base / "submission")
    shutil.copytree(student, autograder.base / "submission", dirs_exist_ok=True)


# ----------------------------------------------------------------------------------------------------- the zip


def test_the_zip_is_what_gradescope_unpacks(tmp_path: Path, data_dir: Path):
    for name in ("first.zip", "second.zip"):
        build(tmp_path / name, "ucsc", str(data_dir), 3)
        time.sleep(1.1)  # zip counts in steps of two seconds, and a file has a time
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "first.zip") as archive:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
        text = {name: archive.read(name).decode() for name in modes}
    assert [name for name, mode in modes.items() if mode == 0o755] == ["run_autograder", "setup.sh"]
    assert not any("\r" in text[name] for name in modes) and text["run_autograder"].startswith("#!/usr/bin/env bash\n")
    assert "\npip torch==" in text["setup.sh"] and "grading/child.py" in text and "engine/flags.py" not in text
    for data in ("sst", "cfimdb"):
        assert text[f"gold/{data}-test.txt"] == (data_dir / f"{data}-test.txt").read_text()
    assert json.loads(text["gradescope.json"]) == {"edition": "ucsc", "max_per_day": 3, "seconds": 60.0}
    check = subprocess.run(["bash", "-n"], input=text["setup.sh"] + text["run_autograder"], text=True)
    assert check.returncode == 0


def test_the_index_of_pytorch_is_the_instructors(tmp_path: Path, data_dir: Path):
    build(tmp_path / "a.zip", "ucsc", str(data_dir), torch_index="https://example.org/a b")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert "\npip --index-url 'https://example.org/a b' torch==" in archive.read("setup.sh").decode()


def test_the_zip_needs_the_data(tmp_path: Path):
    with pytest.raises(GradingError, match="sst-dev.txt is not here: give --data DIR"):
        build(tmp_path / "a.zip", "ucsc", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "said"), [
    (("a.txt",), "must end in .zip"), (("a.zip", "--max_per_day", "-1"), "--max_per_day -1: give a number from 0"),
    (("a.zip", "--time_limit", "0"), "--time_limit 0: give seconds"), (("a.zip", "--torch_index", "http://x"), "https"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags: tuple, said: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradescope", "--build", *flags])
    check_one_error(run_main(gradescope.main), capsys.readouterr().err, said)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- a run in this process


@pytest.fixture
def quick(base: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict]:
    """Grades in this process without running code: two checks pass, one fails."""
    autograder = Autograder(base, data_dir, max_per_day=2)
    monkeypatch.setattr(gradescope, "ROOT", base / "source")
    monkeypatch.setattr(gradescope, "add_python", lambda box: box)

    def run_checks(folder: Path, edition: str, box: object, tell: Callable) -> None:
        for one in (Executed(ROPE, True), Executed(ADAMW, True), Executed("RMSNorm", False, "WRONG: x", "1\n2")):
            tell(one)

    monkeypatch.setattr(gradescope, "run_checks", run_checks)

    def run(metadata: object = None) -> dict:
        if metadata is not None:
            (base / "submission_metadata.json").write_text(json.dumps(metadata))
        gradescope.grade(base)
        return autograder.read()

    return run


def test_points_outputs_and_what_is_hidden(quick: Callable, base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outputs, "ENOUGH_LINES", 1)  # an accuracy that differs from the reference's is told
    fill(base / "submission")
    found = quick({"users": [{"email": "alice@ucsc.edu"}], "created_at": "2026-11-26T10:00:00.000000-08:00"})
    tests = {test["name"]: test for test in found["tests"]}
    assert found["output"] == "Begin with: RMSNorm." and sum(test["max_score"] for test in tests.values()) == 100
    assert found["score"] == 65 and tests["RMSNorm"]["score"] == 0 and tests["RMSNorm"]["max_score"] == 35
    assert tests["RMSNorm"]["output"] == "WRONG: x\nWhat the code printed last:\n1\n2"
    assert tests["Files and outputs"]["score"] == 20, tests
    assert found["leaderboard"] == [
        {"name": "sst dev accuracy", "value": 0.833}, {"name": "cfimdb dev accuracy", "value": 0.75}
    ]  # fmt: skip
    hidden = [test for test in found["tests"] if test["visibility"] == "hidden"]
    assert [test["name"] for test in hidden] == ["Accuracy: sst test, prompting", "Accuracy: sst test, finetuning"]
    assert all("0.750" in test["output"] for test in hidden)  # one of four labels is wrong
    seen = json.dumps({**found, "tests": [test for test in found["tests"] if test not in hidden]})
    assert "sst-dev-prompting-output.txt: accuracy 0.833" in seen
    assert "-test-prompting-output.txt: accuracy" not in seen and "0.418" not in seen and "0.224" not in seen


@pytest.mark.parametrize(
    "metadata", [None, {}, [], {"users": [], "previous_submissions": 7}, {"users": [{"email": 7}]}]
)
def test_odd_metadata_stop_nothing(metadata: object, quick: Callable, base: Path):
    fill(base / "submission")
    assert quick(metadata)["score"] == 65


def test_a_submission_in_a_folder_is_found_there(quick: Callable, base: Path):
    (base / "submission/alice").mkdir()
    fill(base / "submission/alice")
    (base / "submission/__MACOSX").mkdir()
    assert quick()["score"] == 65


@pytest.mark.parametrize("kind", ["missing", "empty", "broken", "link"])
def test_what_is_no_submission_has_no_points_for_files(kind: str, quick: Callable, base: Path):
    if kind == "missing":
        (base / "submission").rmdir()
    if kind == "link":
        (base / "seen").mkdir()
        (base / "submission/alice").symlink_to(fill(base / "seen"))
    if kind == "broken":
        (base / "submission/llama.py").write_bytes(bytes(range(256)))
        (base / "submission/link.py").symlink_to("/etc/passwd")
        (base / "submission/sst-dev-prompting-output.txt").write_bytes(b"\xff\xfe" * 99)
    found = quick()
    first = found["tests"][0]
    assert first["score"] == 0 and first["output"].startswith("refuse: ")
    assert "passwd" not in json.dumps(found) and "root:" not in json.dumps(found)


def test_an_accuracy_at_the_edge_of_the_band_is_enough(quick: Callable, base: Path, monkeypatch: pytest.MonkeyPatch):
    fill(base / "submission")  # with accuracies of 0.75
    for reference, status in ((0.8, "passed"), (0.801, "failed")):
        table = {("sst", "finetuning"): (None, reference)}
        monkeypatch.setattr(gradescope, "reference_accuracies", lambda edition, table=table: table)
        (test,) = [test for test in quick()["tests"] if test["visibility"] == "hidden"]
        assert (test["status"], test["max_score"]) == (status, 20)


def test_a_mistake_costs_the_points_of_its_own_part(quick: Callable, base: Path, monkeypatch: pytest.MonkeyPatch):
    """A part that needs the wrong one has its points if it is right by itself, and none where that is not known."""
    fill(base / "submission")
    needs = "not judged: it needs RMSNorm"
    executed = [Executed("RMSNorm", False, "WRONG: x"), Executed("layer", False, needs, is_right_alone=True),
                Executed("sampling", False, needs)]  # fmt: skip
    monkeypatch.setattr(gradescope, "run_checks", lambda *given, tell: [tell(one) for one in executed])
    found = quick()
    points = {test["name"]: round(test["score"], 2) for test in found["tests"]}
    assert (points["RMSNorm"], points["layer"], points["sampling"]) == (0, 11.67, 0)
    assert found["score"] == 51.67  # 20 for files and outputs, 20 for accuracies, with two digits
    (layer,) = [test for test in found["tests"] if test["name"] == "layer"]
    assert layer["output"] == f"{needs}\nBy itself it is right." and found["output"] == "Begin with: RMSNorm."


def test_points_for_accuracies_stand_in_the_file_before_the_code_runs(quick: Callable, base: Path, monkeypatch):
    fill(base / "submission")
    seen = []

    def look(*given: object, **named: object) -> None:
        seen.append(json.loads((base / "results/results.json").read_text())["score"])

    monkeypatch.setattr(gradescope, "run_checks", look)
    quick()
    assert seen == [20 + 20]


def test_more_than_max_per_day_keep_the_best_score(quick: Callable, base: Path):
    fill(base / "submission")
    earlier = [{"submission_time": f"2026-11-{day}T12:00:00.000000-08:00", "score": score} for day, score in
               (("24", "99.0"), ("26", "40.0"), ("26", None))]  # fmt: skip
    metadata = {"created_at": "2026-11-26T13:00:00.000000-08:00", "previous_submissions": earlier}
    found = quick(metadata)
    assert found["score"] == 40 and found["output"].startswith("Not graded: 2 submissions") and found["tests"] == []
    assert found["output"].endswith(f"that of your submission of {earlier[1]['submission_time']}.")
    graded = quick({**metadata, "previous_submissions": earlier[:2]})
    assert graded["score"] == 65
    # what was not graded has no score of its own, and takes no place among those that are
    ungraded = {"submission_time": "2026-11-26T12:30:00.000000-08:00", "score": "40.0", "results": found}
    assert quick({**metadata, "previous_submissions": [*earlier[:2], ungraded, ungraded]})["score"] == 65
    more = [*earlier, {**ungraded, "score": "99.0"}, {**earlier[1], "score": "30", "results": graded}]
    assert quick({**metadata, "previous_submissions": more})["score"] == 40


def test_too_large_a_submission_is_told_so(quick: Callable, base: Path):
    with open(base / "submission/huge.txt", "wb") as file:
        file.truncate(MAX_READ + 1)
    found = quick()
    assert found["score"] == 0 and "100 MB are not read" in found["output"]


# ----------------------------------------------------------------------------------------- a run as it is there


@needs_root
@pytest.mark.slow
def test_right_code_has_all_points(autograder: Autograder, student: Path):
    submit(autograder, student)
    found, tests = autograder.run()
    assert [test for test in tests.values() if test["status"] == "failed"] == []
    assert found["score"] == 100 and found["output"] == "All 17 visible tests passed."
    assert autograder.results.stat().st_uid == 0 and (autograder.base / "results").stat().st_mode & 0o777 == 0o700
    assert (autograder.base / "source").stat().st_mode & 0o777 == 0o700


ATTACK = """
import os
seen, base = [], {base!r}
for path in ("results/results.json", "results/new", "run_autograder", "source/run_autograder",
             "source/gold/sst-test.txt", "submission/llama.py", "source/grading/box.py"):
    for mode in "wa":
        try:
            open(os.path.join(base, path), mode)
            seen.append(path)
        except OSError:
            pass
for path in ("results/results.json", "source/gold/sst-test.txt", "source/grading/rotary.py"):
    try:
        open(os.path.join(base, path))
        seen.append(path)
    except OSError:
        pass
for number in filter(str.isdigit, os.listdir("/proc")):
    try:
        environment = open(f"/proc/{{number}}/environ", "rb").read()
        os.kill(int(number), 0)
        if os.stat(f"/proc/{{number}}").st_uid == 0:
            seen.append(number)
    except OSError:
        pass
try:
    os.setuid(0)
    seen.append("root")
except OSError:
    pass
raise RuntimeError(f"reached: {{seen}}")
"""


@needs_root
@pytest.mark.slow
def test_the_code_reaches_neither_results_nor_grader(autograder: Autograder, student: Path):
    add(student / "rope.py", ATTACK.format(base=str(autograder.base)))
    (autograder.base / "source/gold").chmod(0o777)  # the folder above is shut
    submit(autograder, student)
    found, tests = autograder.run()
    assert tests[ROPE]["output"].endswith("reached: []"), tests[ROPE]
    assert tests[ROPE]["score"] == 0 and tests[ADAMW]["score"] == 15 and found["score"] < 60


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless at import", "os._exit in a call", "an answer written in advance"])
def test_code_that_crashes_or_never_ends_has_no_points_for_it(name: str, autograder: Autograder, student: Path):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    add(student / "rope.py", daemon + HOSTILE[name].code)
    submit(autograder, student)
    found, tests = autograder.run()
    assert tests[ROPE]["score"] == 0 and tests[ADAMW]["score"] == 15 and tests["RMSNorm"]["score"] >= 0
    assert found["score"] < 100 and found["output"].startswith("Begin with: ")


@needs_root
@pytest.mark.slow
def test_a_run_that_is_killed_has_said_so_before(autograder: Autograder, student: Path):
    add(student / "optimizer.py", "AdamW.step = lambda self: __import__('time').sleep(1000)\n")
    submit(autograder, student)
    process = autograder.start()
    wait_for(lambda: autograder.results.exists() and ROPE in autograder.results.read_text())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = autograder.read()
    assert found["output"] == UNFINISHED and found["score"] == 50, found
    box = UserBox(PYTHON, user=STUDENT)  # Gradescope ends the container
    box.end(0)
    for path in autograder.base.glob("minllama-*"):
        shutil.rmtree(path)


@needs_root
def test_a_process_that_has_ended_is_not_waited_for():
    """Its parent, or the container's first process, may never take note; and its name cannot make it seem ended."""
    box, code = UserBox(PYTHON, user=STUDENT), "open('/proc/self/comm', 'w').write('a\\nState:\\tZ'); input()"
    process = subprocess.Popen([*box.become, "/usr/bin/python3", "-c", code], stdin=subprocess.PIPE)
    wait_for(lambda: box.members(0) == [process.pid])
    started = time.monotonic()
    box.end(0)
    assert time.monotonic() - started < 5 and box.members(0) == []
    assert process.wait() == -signal.SIGKILL


def test_processes_that_cannot_be_ended_are_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    rounds = iter(range(1000))
    monkeypatch.setattr(sandbox, "END_LIMIT", 0.05)
    monkeypatch.setattr(UserBox, "members", lambda box, process: [next(rounds) + 2**30])  # numbers of no process
    UserBox(PYTHON, user=STUDENT).end(0)
    assert next(rounds) >= 1


@needs_root
def test_only_root_can_give_the_code_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(GradingError, match="only root"):
        UserBox(sys.executable, BoxLimits()).prepare(tmp_path)
