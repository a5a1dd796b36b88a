"""The command python -m grading: config, overrides, what it writes of hostile names, going on after a kill."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, hear_interrupts
from submissions import forge
from test_batch import graded
from test_hostile import has_ended, wait_for
from wrong_submissions import (
    STORY,
    WRONG,
    accept_these_files,
    die_of_one,
    make_zip,
    put,
    right_files,
    write_data,
)

from grading import batch, findings, judge, settings
from grading.editions import TEXT_PROMPT
from grading.findings import CHECKS
from grading.judge import Executed, read_overrides
from grading.programs import GradingError
from grading.settings import Settings, first_config, read_settings
from grading.uploads import RosterEntry, Submission, find_submissions

OTHER = "generated-sentence-temp-0.txt"


@pytest.fixture
def place(tmp_path):
    """Data, a config, and a folder of four right zips and a broken one."""
    write_data(tmp_path / "data")
    (tmp_path / "in").mkdir()
    for seed, name in enumerate("alice bob carol dave".split()):
        (tmp_path / "in" / f"{name}.zip").write_bytes(make_zip(name, seed))
    (tmp_path / "in" / "eve.zip").write_bytes(b"no zip")
    (tmp_path / "grading.toml").write_text("")
    return tmp_path


def command(place: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "grading", f"{place}/in", "--config", f"{place}/grading.toml", "--out",
            f"{place}/out", *flags]  # fmt: skip


def run(place: Path, *flags: str) -> subprocess.CompletedProcess:
    """The command in a folder with files that have the names of libraries."""
    for name in ("csv", "jinja2", "random"):
        (place / f"{name}.py").write_text("raise SystemExit('a stranger')\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command(place, *flags), cwd=place, env=environment, capture_output=True, text=True)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(path: Path) -> dict[str, dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["id"]: row for row in rows}


# ------------------------------------------------------------------------------------------------------ the command


def test_a_batch_from_the_command_line(place):
    done = run(place, "--jobs", "2")
    assert done.returncode == 1, done.stderr
    assert "5 submissions: A 4; 4 provisional, 1 refused" in done.stdout and "eve: not a zip archive" in done.stdout
    found = table(place / "out" / "grades.csv")
    assert [(row["grade"], row["status"]) for row in found.values()] == [("A", "provisional")] * 4 + [("", "refused")]
    assert "coherence of the text at temperature 0: read it" in found["alice"]["open"]
    assert found["alice"]["sst-dev-finetuning"] == "0.4100" and found["eve"]["findings"] == "E001-zip"
    with open(place / "out" / "canvas.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["Student", "ID", "SIS Login ID", "Section", "min-llama"],
            *(["", "", name, "", "A"] for name in ("alice", "bob", "carol", "dave")),
        ]
    assert {*files_of(place / "out")} == {
        "grades.csv", "canvas.csv", "overview.html",
        *(f"reports/{name}.md" for name in ("alice", "bob", "carol", "dave", "eve")),
        *(f"judgements/{name}.json" for name in ("alice", "bob", "carol", "dave", "eve")),
    }  # fmt: skip
    first = files_of(place / "out")
    assert run(place, "--jobs", "1").returncode == 1 and files_of(place / "out") == first
    report = first["reports/alice.md"].decode()
    assert "| sst-dev-finetuning-output.txt | 200 | 0.410 | 0.414 | 0.200 |" in report


def begin(place: Path, *flags: str, sign: str = "out/judgements/*.json") -> subprocess.Popen:
    """The command as a terminal starts it, once there is a file like this: one of a finished submission."""
    (place / "tmp").mkdir()
    process = subprocess.Popen(
        command(place, *flags), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=hear_interrupts, env=os.environ | {"TMPDIR": str(place / "tmp")},
    )  # fmt: skip
    while not [*place.glob(sign)]:
        assert process.poll() is None
        time.sleep(0.01)
    return process


def without_keys(files):
    """Judgements without keys, which change with any file of the package: other tests may write there."""
    return {
        name: {**json.loads(content), "key": ""} if name.startswith("judgements") else content
        for name, content in files.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_run_goes_on_to_equal_bytes(place, jobs):
    for seed in range(20):
        (place / "in" / f"s{seed}.zip").write_bytes(make_zip(f"s{seed}", 10 + seed))
    with begin(place, "--jobs", jobs) as process:
        process.kill()
    left = {path.name: (path.stat().st_ino, path.read_bytes()) for path in place.glob("out/judgements/*.json")}
    assert not (place / "out" / "grades.csv").exists() and 0 < len(left) < 25
    assert all(json.loads(content)["key"] for _, content in left.values())
    run(place, "--jobs", "2")
    for name, (number, content) in left.items():  # not judged again
        path = place / "out" / "judgements" / name
        assert (path.stat().st_ino, path.read_bytes()) == (number, content)
    resumed = {name: content for name, content in files_of(place / "out").items() if not name.endswith(".tmp")}
    (place / "out").rename(place / "first")
    run(place, "--jobs", "2")
    assert without_keys(resumed) == without_keys(files_of(place / "out"))
    assert len([*place.glob("out/judgements/*.json")]) == 25


def test_what_is_known_is_not_judged_again(place, monkeypatch):
    asked = []
    examine = batch.examine
    monkeypatch.setattr(batch, "examine", lambda path, *rest: asked.append(path.stem) or examine(path, *rest))
    given = Settings(gold=str(place / "data"))
    graded(place / "in", place / "out", given)
    assert len(asked) == 5
    graded(place / "in", place / "out", given)
    assert len(asked) == 5
    (place / "in" / "bob.zip").write_bytes(make_zip("bob", 1, change=put("notes.txt", b"x")))
    graded(place / "in", place / "out", given)
    assert asked[5:] == ["bob"]
    graded(place / "in", place / "out", Settings(gold=str(place / "data"), severity={"E001-zip": "note"}))
    assert len(asked) == 11
    graded(place / "in", place / "out", given)
    assert len(asked) == 16  # the file holds one run
    path = place / "data" / "sst-dev.txt"
    path.write_bytes(path.read_bytes().replace(b"0 |||", b"1 |||", 1))
    graded(place / "in", place / "out", given)
    assert len(asked) == 21


@pytest.mark.parametrize("content", [b"", b'{"key": "cut sh', b"[]", b"{}", b"\xff", b'{"key": "KEY", "findings": 1}'])
def test_a_damaged_file_of_a_student_is_replaced(place, content):
    given = Settings(gold=str(place / "data"))
    graded(place / "in", place / "out", given)
    first = files_of(place / "out")
    path = place / "out" / "judgements" / "bob.json"
    path.write_bytes(content.replace(b"KEY", json.loads(path.read_bytes())["key"].encode()))
    assert graded(place / "in", place / "out", given)["bob"].grade.letter == "A"
    assert files_of(place / "out") == first


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("jobs, sign, seconds", [
    ("1", "out/judgements/*.json", 0.0), ("2", "out/judgements/*.json", 0.0), ("2", "out/judgements/*.json", 0.3),
    *(("2", "tmp/minllama-*", seconds) for seconds in (0.0, 0.02, 0.05, 0.1, 0.2)),
])  # fmt: skip
def test_an_interrupt_is_one_line_and_keeps_what_is_finished(place, jobs, sign, seconds):
    """Whenever Ctrl-C comes: it reaches every process of the terminal, also one that is still importing."""
    for seed in range(30):
        (place / "in" / f"s{seed}.zip").write_bytes(make_zip(f"s{seed}", 10 + seed))
    process = begin(place, "--jobs", jobs, sign=sign)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "error: interrupted\n"
    assert all(json.loads(path.read_bytes())["key"] for path in place.glob("out/judgements/*.json"))
    assert not [*place.glob("tmp/*")] and not [*place.glob("out/judgements/.*")]


SLEEP = """
import sys; sys.path[:0] = {folders!r}
from functools import partial
from pathlib import Path
from grading.batch import judge_all
from grading.uploads import find_submissions
from grading.settings import Settings
from wrong_submissions import sleep_long
place = Path({place!r})
given = Settings(gold=str(place / "data"))
list(judge_all(find_submissions(place / "in", given)[0], given, place, 2, partial(sleep_long, place / "seen")))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_run(place, number):
    """And none is waited for: one may have a quarter of an hour to go."""
    folders = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "grading"))]
    code = SLEEP.format(folders=folders, place=str(place))
    (place / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=place, stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts,
        env=os.environ | {"TMPDIR": str(place / "tmp")},
    )  # fmt: skip
    wait_for(lambda: len([*place.glob("seen-*")]) == 2)
    workers = [int(path.name.removeprefix("seen-")) for path in place.glob("seen-*")]
    assert os.getpgid(process.pid) not in map(os.getpgid, workers)  # a terminal's Ctrl-C does not reach them
    process.send_signal(number)
    process.wait(10)
    for worker in workers:
        wait_for(lambda worker=worker: has_ended(worker), 10)
    wait_for(lambda: not [*place.glob("tmp/*")], 10)


def test_a_process_that_dies_costs_its_own_submission_alone(place):
    (place / "in" / "aaron.zip").write_bytes(make_zip("aaron", 7, change=put(OTHER, f"{STORY} blork".encode())))
    given = Settings(gold=str(place / "data"))
    (place / "out").mkdir()
    submissions, _ = find_submissions(place / "in", given)
    judged = batch.judge_all(submissions, given, place / "out", 2, die_of_one)
    rows = {row.student_id: row for row in batch.rows_of(list(judged), given, {})}
    assert [one.code for one in rows["aaron"].findings] == ["E079-failed"] and rows["aaron"].grade.letter == ""
    assert [rows[name].grade.letter for name in ("alice", "bob", "carol", "dave", "eve")] == ["A"] * 4 + [""]


def test_an_interrupt_while_a_process_is_looked_at_ends_the_run(place, monkeypatch):
    """`Popen.poll` closes a lock; an interrupt just behind it leaves it closed, and `Popen.wait` would wait for it."""
    poll, looked_at = subprocess.Popen.poll, []

    def be_interrupted(self):
        if looked_at:
            return poll(self)
        looked_at.append(self)
        assert self._waitpid_lock.acquire(False)
        raise KeyboardInterrupt

    def judge_all():
        submissions, _ = find_submissions(place / "in", given)
        with pytest.raises(KeyboardInterrupt):
            list(batch.judge_all(submissions, given, place, 2))

    given = Settings(gold=str(place / "data"))
    monkeypatch.setattr(batch.subprocess.Popen, "poll", be_interrupted)
    monkeypatch.setattr(batch, "LAST_SECONDS", 0.1)
    thread = threading.Thread(target=judge_all, daemon=True)
    thread.start()
    thread.join(60)
    assert looked_at and not thread.is_alive()


def test_a_defect_of_the_checker_stops_nothing(place, monkeypatch):
    def fail(path, *rest):
        raise RuntimeError("a defect of <b>ours</b>") if path.stem == "bob" else OSError(5, "Input/output error")

    monkeypatch.setattr(batch, "examine", fail)
    rows = graded(place / "in", place / "out", Settings(gold=str(place / "data")))
    assert {one.code for row in rows.values() for one in row.findings} == {"E079-failed"}
    assert "RuntimeError: a defect" in rows["bob"].findings[0]
    monkeypatch.undo()
    rows = graded(place / "in", place / "out", Settings(gold=str(place / "data")))
    assert rows["bob"].grade.letter == "A"  # it is tried again


def test_broken_data_of_the_grader_end_the_run_in_one_line(place):
    (place / "data" / "sst-dev.txt").write_text("1 || x\n")
    done = run(place, "--jobs", "2")
    assert done.returncode == 2 and re.search(r"^error: .*sst-dev.txt line 1: no ' \|\|\| '.*\n$", done.stderr)
    assert not (place / "out" / "grades.csv").exists()


# --------------------------------------------------------------------------------------------- between the students


def test_students_with_the_same_labels(place, monkeypatch):
    accept_these_files(monkeypatch)
    name = "cfimdb-dev-finetuning-output.txt"
    (place / "in" / "frank.zip").write_bytes(make_zip("frank", 1))  # bob's seed
    carols = right_files(2)[name]
    (place / "in" / "grace.zip").write_bytes(make_zip("grace", 40, change=put(name, carols)))
    rows = graded(place / "in", place / "out", Settings(gold=str(place / "data")))
    for one, other in (("bob", "frank"), ("frank", "bob")):
        found = [each for each in rows[one].findings if each.code == "E048-same-labels"]
        assert len(found) == 2 and all(each.got == other and each.severity == "flag" for each in found)
    assert [each.code for each in rows["carol"].findings] == ["E049-same-cfimdb"]
    few = settings.Thresholds(lines=201)  # more than the outputs have
    assert graded(place / "in", place / "out", Settings(gold=str(place / "data"), thresholds=few))["bob"].findings == []
    assert rows["alice"].findings == [] and rows["bob"].grade.letter == rows["carol"].grade.letter == "A"


@pytest.mark.parametrize(("edition", "count"), [("ucsc", 1), ("cmu2025", 0)])  # the published ones have RMSNorm
def test_zero_shot_labels_are_compared_with_those_of_the_editions_norm(place, monkeypatch, edition, count):
    accept_these_files(monkeypatch)
    (place / "in" / "alice.zip").write_bytes(make_zip("alice", 0, WRONG["zero-shot"]))
    row = graded(place / "in", place / "out", Settings(edition, str(place / "data")))["alice"]
    assert [one.code for one in row.findings].count("E046-zero-shot") == count


# ------------------------------------------------------------------------------------------- the executed checks


def results(*failed: str):
    parts = ("import of llama.py", "RMSNorm", "AdamW")
    return lambda folder, edition: [
        Executed(part, part not in failed, "wrong" if part in failed else "", "its <b>last</b> line") for part in parts
    ]


@pytest.mark.parametrize("failed, case, letter, codes", [
    ((), None, "A", []), (("RMSNorm",), None, "B", ["E080-part"]), ((), "low-sst", "A-", ["E040-accuracy"]),
    (("import of llama.py",), None, "B", ["E081-import"]), ((), "no-output", "B+", ["E013-no-output"]),
    (("AdamW", "RMSNorm"), "loose", "B-", ["E010-folder", "E080-part", "E080-part"]),
])  # fmt: skip
def test_executed_checks_count_and_a_person_reads_the_text(place, monkeypatch, failed, case, letter, codes):
    accept_these_files(monkeypatch)
    (place / "in" / "alice.zip").write_bytes(make_zip("alice", 0, WRONG[case] if case else None))
    given = Settings(gold=str(place / "data"))
    seen = []

    def run_code(folder, edition):
        seen.append((edition, (folder / "llama.py").read_bytes()))
        return results(*failed)(folder, edition)

    row = graded(place / "in", place / "out", given, run_code=run_code)["alice"]
    assert sorted(one.code for one in row.findings) == codes and row.grade.letter == letter
    is_open = ["B or below: how much of the code is missing or wrong"] * (letter in ("B", "B-"))
    assert row.grade.open == ["coherence of the text at temperature 0: read it", *is_open]
    assert row.grade.status == "provisional"
    assert ("ucsc", b"# llama.py\nimport torch\n") in seen
    text = batch.report_of(row, given)
    assert text.count("FAILED") == len(failed) and "&lt;b&gt;last" in text


def test_a_part_that_was_not_judged_is_no_finding_beside_its_cause():
    cause = judge.Executed("RMSNorm", False, "WRONG: the mean is of x", "")
    other = judge.Executed("layer", False, "not judged: it needs RMSNorm", "")
    judgement = judge.Judgement(parts=[cause, other])
    row = batch.StudentRow("alice", "", "", "", "", judgement, [], judge.Grade("B", "provisional"))
    told = ["- RMSNorm: FAILED: the mean is of x", "- layer: not judged: it needs RMSNorm"]
    assert batch.report_of(row, Settings()).splitlines()[-2:] == told
    assert [*map(str, judge._failed([other, cause]))] == ["RMSNorm: WRONG: the mean is of x"]
    assert [*map(str, judge._failed([other]))] == ["layer: not judged: it needs RMSNorm"]


# -------------------------------------------------------------------------------------------------- hostile names


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.links = set(), set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links += [value for name, value in attributes if name in ("href", "src")]


EVIL = "<img src=x onerror=alert(1)>"


def test_hostile_names_stay_text(place, monkeypatch):
    change = lambda files: files.update({f"{EVIL}.zip": b"x", "[a](javascript:x)|`b`.pyc": b"x"})  # noqa: E731
    (place / "in" / "alice.zip").write_bytes(make_zip("alice", 0, change=change))
    (place / "in" / f"{EVIL}.zip").write_bytes(b"x")
    (place / "in" / "dave.zip").write_bytes(forge((b"\xff", b"x", {"flags": 0x800})))  # said to be UTF-8
    (place / "in" / "=cmd|' -C calc'!A1.zip").write_bytes(b"x")
    (place / "in" / "{{ 7*7 }}.txt").write_bytes(b"x")
    names = f'alice,"=HYPERLINK(""http://x"")"\nbob,{EVIL}\ncarol,@SUM(A1)\ndave,"\t=1"\n'
    (place / "roster.csv").write_text(f"id,name\n{names}")
    (place / "grading.toml").write_text('roster = "roster.csv"\nassignment = "+min-llama"\n')
    done = run(place, "--jobs", "1")
    assert done.returncode == 1, done.stderr
    page = (place / "out" / "overview.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert not tags.tags & {"img", "script", "svg"} and tags.attributes <= {
        "lang", "charset", "http-equiv", "content", "name", "href", "class",
    }  # fmt: skip
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 3 and "{{ 7*7 }}" in page and "49" not in page
    assert tags.links == [f"reports/{name}.md" for name in ("alice", "bob", "carol", "dave")]
    for name in ("grades.csv", "canvas.csv"):
        with open(place / "out" / name, encoding="utf-8", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells if cell.strip()[:1] in ("=", "+", "-", "@") and cell.strip()]
        assert any(cell.startswith("'=HYPERLINK") for cell in cells)
    report = (place / "out" / "reports" / "alice.md").read_text(encoding="utf-8")
    assert "<" not in report and r"\[a\]\(javascript:x\)\|\`b\`" in report


@pytest.mark.parametrize("text, cell", [
    ("=1", "'=1"), ("+1", "'+1"), ("-1", "'-1"), ("@x", "'@x"), (" =1", "' =1"), ("\t1", "'\t1"), ("A-", "A-"),
    ("", ""), ("a=1", "a=1"), ("\r=1", "'\r=1"), ("\uff1d1", "'\uff1d1"),
])  # fmt: skip
def test_cells(text, cell):
    assert batch.safe_cell(text) == cell


# --------------------------------------------------------------------------------------------- config and overrides


def test_the_first_config_is_the_defaults_and_names_every_check(place):
    path = place / "new.toml"
    done = subprocess.run([sys.executable, "-m", "grading", "--init", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and path.read_text() == first_config()
    assert read_settings(path) == Settings(gold=str(place / "data"))
    assert [line.split()[1] for line in path.read_text().splitlines() if line.startswith("# E0")] == [*CHECKS]
    again = subprocess.run([sys.executable, "-m", "grading", "--init", path], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "is there already" in again.stderr


@pytest.mark.parametrize("text, said", [
    ("editoin = 'ucsc'", "editoin: Unexpected keyword argument"), ("edition = 'x'", "no edition 'x'"),
    ("edition = 3", "edition: Input should be a valid string"), ("gold = 'nowhere'", "nowhere does not exist"),
    ("[thresholds]\nsst = '0.05'", "thresholds.sst: Input should be a valid number"),
    ("[thresholds]\nsst = 5.0", "thresholds.sst: 5.0 is not between 0 and 1"),
    ("[thresholds]\nsst = nan", "thresholds.sst"), ("[thresholds]\nlines = -1", "lines: -1 is not between"),
    ("[limits]\nsiz = 1", "limits.siz: Unexpected keyword"),
    ("[severity]\nE014-lines = 'low'", "E014-lines = low: the codes"),
    ("[severity]\nE999-x = 'flag'", "E999-x = flag: the codes are those of"), ("[points]\nS = 1", "no grades S"),
    ("[references]\nsst = 0.4", "references.sst: not a name"),
    ("[references]\nsst-dev-finetunning = 0.4", "references.sst-dev-finetunning: not a name"),
    ("roster = 'no.csv'", "no.csv does not exist"),
    ("id_pattern = '('", "missing ), unterminated"), ("a = ", "is not TOML"), ("[a", "is not TOML"),
    ("[judge]\ncheckpoint = 'x.pt'", "judge: Unexpected keyword"), ("edition = 1979-05-27", "no edition '1979-05-27'"),
    ("thresholds = 1", "thresholds: "), ("x = 1\n[thresholds]\nsst = 9.0\ny = 1", "x: Unexpected"),
    ("a = " + "[" * 5000, "grading.toml"),
])  # fmt: skip
def test_a_wrong_config_is_one_line(place, text, said):
    (place / "grading.toml").write_text(text)
    with pytest.raises(GradingError, match=re.escape(said)) as error:
        read_settings(place / "grading.toml")
    assert str(place / "grading.toml") in str(error.value) and "\n" not in str(error.value)[:-1]


def test_without_the_extra_there_is_one_sentence(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(GradingError, match="needs the package pydantic; install it with: pip install"):
        read_settings(place / "grading.toml")


def test_a_text_of_twenty_words_is_judged(place):
    given = Settings(gold=str(place / "data"))
    words = STORY.replace(" .", "").split()[: len(TEXT_PROMPT.split()) + 20]
    assert [*judge.check_texts({OTHER: " ".join(words)}, given)] == []
    assert [one.code for one in judge.check_texts({OTHER: " ".join(words[:-1])}, given)] == ["E054-short"]


def test_severities_and_thresholds_of_the_config_count(place):
    (place / "in" / "alice.zip").write_bytes(make_zip("alice", 0, WRONG["loose"]))
    severity = {"E010-folder": "note", "E038-checker": "off"}
    given = Settings(gold=str(place / "data"), severity=severity, references={"sst-dev-finetuning": 0.9})
    rows = graded(place / "in", place / "out", given)
    found = {one.code: one.severity for one in rows["alice"].findings}
    assert found == {"E010-folder": "note", "E040-accuracy": "deduct"}
    assert rows["alice"].grade.letter == "A-"
    strict = Settings(gold=str(place / "data"), severity={"E010-folder": "refuse"})
    assert graded(place / "in", place / "out", strict)["alice"].grade.status == "refused"
    unreadable = Settings(gold=str(place / "data"), severity={"E001-zip": "off"})
    assert graded(place / "in", place / "out", unreadable)["eve"].grade.status == "refused"


def test_steps_down_are_taken_once_and_late_ones_apart(place):
    name = "x_LATE_1_2_alice.zip"
    (place / "in" / "alice.zip").unlink()
    change = lambda files: files.update({"a.pt": b"x", ".git/HEAD": b"x"})  # noqa: E731
    (place / "in" / name).write_bytes(make_zip("alice", 0, WRONG["loose"], change))
    given = Settings(gold=str(place / "data"))
    assert graded(place / "in", place / "out", given)["alice"].grade.letter == "A-"
    free = Settings(gold=str(place / "data"), penalties=settings.Penalties(0))
    grade = graded(place / "in", place / "out", free)["alice"].grade
    assert (grade.letter, grade.reasons) == ("A", [])
    ruin = Settings(gold=str(place / "data"), penalties=settings.Penalties(20))
    assert graded(place / "in", place / "out", ruin)["alice"].grade.letter == "F"
    late = Settings(gold=str(place / "data"), penalties=settings.Penalties(2, 1))
    row = graded(place / "in", place / "out", late)["alice"]
    assert row.grade.letter == "B" and len(row.grade.reasons) == 2 and row.grade.reasons[1] == "1 step(s) down: late"


def test_overrides_win_and_are_seen(place):
    (place / "grades.csv").write_text("id,grade,reason\nalice,A+,the report shows <b>a gain</b>\neve,F,no answer\n")
    (place / "grading.toml").write_text('overrides = "grades.csv"\n[points]\n"A+" = 100.0\nA = 95.0\n')
    done = run(place, "--jobs", "1")
    assert done.returncode == 0, done.stderr
    found = table(place / "out" / "grades.csv")
    assert [found["alice"][key] for key in ("grade", "status", "computed")] == ["A+", "override", "A"]
    assert [found["eve"][key] for key in ("grade", "status", "computed")] == ["F", "override", "refused"]
    report = (place / "out" / "reports" / "alice.md").read_text()
    assert "in place of A: the report shows &lt;b&gt;a gain&lt;/b&gt;" in report
    with open(place / "out" / "canvas.csv", newline="") as file:
        assert [row[-1] for row in csv.reader(file)] == ["min-llama", "100.0", "95.0", "95.0", "95.0", "F"]


def test_files_of_the_grader_are_not_replaced(place):
    (place / "out").mkdir()
    (place / "out" / "grades.csv").write_text("id,grade,reason\n")
    (place / "grading.toml").write_text('overrides = "out/grades.csv"\n')
    done = run(place)
    assert done.returncode == 2 and "lies in --out, where files are replaced" in done.stderr
    assert (place / "out" / "grades.csv").read_text() == "id,grade,reason\n"
    for flags, said in (([], "SUBMISSIONS is needed"), ([place / "in"], "--config is needed")):
        done = subprocess.run([sys.executable, "-m", "grading", *flags], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"error: {said} (see --help)\n")
    (place / "grading.toml").write_text("")
    for path in (place / "in").iterdir():
        path.rename(path.with_suffix(".txt"))
    done = run(place)
    assert done.returncode == 2 and "holds a grades.csv that is not this program's" in done.stderr
    for make in (Path.touch, Path.mkdir):  # of a former version, and of this one
        name = "state.jsonl" if make is Path.touch else "judgements"
        make(place / "out" / name)
        done = run(place)
        assert done.returncode == 2 and "in holds neither a zip nor a folder" in done.stderr
        (place / "out" / "state.jsonl").unlink(missing_ok=True)
    assert (place / "out" / "grades.csv").read_text() == "id,grade,reason\n"
    done = subprocess.run([*command(place)[:-1], place / "in" / "out"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2


@pytest.mark.parametrize("row, said", [
    ("mallory,A,x", "line 2: there is no student 'mallory'"), ("alice,A", "line 2: alice has no reason"),
    ("alice,1,x", "line 2: '1' is no grade; there are A+, A"), ("alice,A,x\nalice,B,x", "line 3: alice has a grade"),
])  # fmt: skip
def test_a_wrong_override_is_named(place, row, said):
    (place / "o.csv").write_text(f"id,grade,reason\n{row}\n")
    with pytest.raises(GradingError, match=re.escape(said)):
        read_overrides(Settings(overrides=str(place / "o.csv")), [Submission(RosterEntry("alice"))])


# ------------------------------------------------------------------------------------------------- the table of checks


def test_the_page_of_checks_is_complete():
    page = (ROOT / "grading" / "checks.md").read_text(encoding="utf-8")
    rows = [f"| `{code}` | {one.severity} | {one.what} | {one.advice} | {one.most} |" for code, one in CHECKS.items()]
    assert [line for line in page.splitlines() if line.startswith("| `E")] == rows
    assert all(f"| {severity} |" in page for severity in findings.SEVERITIES)


def test_every_code_is_used_and_every_used_one_is_in_the_table():
    code = re.compile(r"\bE0\d\d-[a-z0-9-]+")
    used = {
        one
        for path in (ROOT / "grading").glob("*.py")
        if path.name != "findings.py"
        for one in code.findall(path.read_text(encoding="utf-8"))
    }
    assert used == CHECKS.keys()
