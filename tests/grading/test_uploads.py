"""Whose an upload is, and which of several counts: names as Canvas writes them, folders, the roster."""

import os
import re
from pathlib import Path

import pytest
from wrong_submissions import make_zip, right_files, write_data

from grading import uploads
from grading.archive import FormatError, read_archive
from grading.programs import GradingError
from grading.rules import Rules
from grading.settings import Settings
from grading.submission import check_bytes
from grading.uploads import MAX_READ, find_submissions, read_payload, read_upload


@pytest.mark.parametrize("name, names, user, order, is_late", [
    ("alice.zip", ["alice"], "", (0, 0), False),
    ("alice (1).zip", ["alice (1)", "alice"], "", (0, 0), False),
    ("alice-1.zip", ["alice-1"], "", (0, 0), False),
    ("smithalice_12345_67890_alice.zip", ["alice"], "12345", (67890, 0), False),
    ("smithalice_LATE_12345_67890_alice-1.zip", ["alice-1", "alice"], "12345", (67890, 1), True),
    ("smithalice_12345_67890_hw1_alice-12.ZIP", ["hw1_alice-12", "hw1_alice"], "12345", (67890, 12), False),
    ("alice.tar.gz", ["alice"], "", (0, 0), False),
])  # fmt: skip
def test_names(tmp_path, name, names, user, order, is_late):
    upload = read_upload(tmp_path / name)
    assert (upload.names, upload.user, upload.order, upload.is_late) == (names, user, order, is_late)


@pytest.fixture
def take(tmp_path):
    """Take in files of these names, and say who is graded by which file, with which codes."""
    write_data(tmp_path / "data")

    def run(names, roster="", **settings):
        (tmp_path / "in").mkdir()
        for name in names:
            path = tmp_path / "in" / name
            path.mkdir() if name.endswith("/") else path.write_bytes(b"")
        if roster:
            (tmp_path / "roster.csv").write_text(roster)
            settings["roster"] = str(tmp_path / "roster.csv")
        found, others = find_submissions(tmp_path / "in", Settings(gold=str(tmp_path / "data"), **settings))
        run.others = others
        return {
            one.student.student_id or one.path.name: (
                one.path and one.path.name, sorted(message.code[:4] for message in one.messages)
            )
            for one in found
        }  # fmt: skip

    return run


def test_the_newest_upload_counts(take):
    names = ["x_1_20_alice.zip", "x_1_30_alice-1.zip", "x_LATE_1_40_alice-2.zip", "y_2_10_bob.zip"]
    assert take(names) == {"alice": ("x_LATE_1_40_alice-2.zip", ["E070", "E071"]), "bob": ("y_2_10_bob.zip", [])}


@pytest.mark.parametrize("names", [
    ["alice.zip", "Alice.zip"], ["alice.zip", "x_1_2_alice.zip"], ["x_1_2_alice.zip", "y_3_4_alice.zip"],
    ["alice.zip", "alice (1).zip"], ["alice.zip", "alice.tar.gz"],
])  # fmt: skip
def test_an_id_that_is_claimed_twice_is_not_guessed(take, names):
    (entry,) = take(names).values()
    assert entry == (None, ["E072"])


ROSTER = "\ufeffID,Name,canvas_id\nalice,Alice A,1\nbob-1,Bob,2\ncarol,Carol,\n"


def test_the_roster_matches_by_name_case_and_number(take):
    found = take(["ALICE.zip", "x_2_5_bob-1.zip", "stranger.zip", "y_9_9_homework.zip"], ROSTER)
    assert found == {
        "alice": ("ALICE.zip", ["E011"]), "bob-1": ("x_2_5_bob-1.zip", []), "carol": (None, ["E074"]),
        "stranger.zip": ("stranger.zip", ["E073"]), "y_9_9_homework.zip": ("y_9_9_homework.zip", ["E073"]),
    }  # fmt: skip


def test_the_number_of_canvas_names_a_student_and_never_another_one(take):
    found = take(["x_1_5_homework.zip", "y_2_6_carol.zip"], ROSTER)
    assert found["alice"] == ("x_1_5_homework.zip", []) and found["y_2_6_carol.zip"][1] == ["E073"]
    assert found["carol"] == (None, ["E074"])


def test_what_an_absent_student_has_handed_in_is_named(take, tmp_path):
    found = take(["x_1_5_llama.py", "y_2_6_llama.py", "z_3_7_llama.py"], "id,canvas_id\nalice,1\nbob,\n")
    assert found == {"alice": (None, ["E074"]), "bob": (None, ["E074"])} and len(take.others) == 3
    settings = Settings(gold=str(tmp_path / "data"), roster=str(tmp_path / "roster.csv"))
    said = [str(message) for one in find_submissions(tmp_path / "in", settings)[0] for message in one.messages]
    assert said == ["no upload of this student but x_1_5_llama.py: no archive", "no upload of this student"]


def test_a_number_of_two_students_names_neither(take):
    found = take(["x_1_5_homework.zip"], "id,canvas_id\nalice,1\nbob,1\n")
    assert [entry[1] for entry in found.values()] == [["E074"], ["E074"], ["E073"]]


def test_a_pattern_with_a_group(take):
    found = take(["hw1-alice.zip", "bob.zip"], id_pattern=r"hw1-(?P<id>\w+)")
    assert found == {"alice": ("hw1-alice.zip", []), "bob.zip": ("bob.zip", ["E073"])}


def test_names_that_are_no_ids_and_files_that_are_no_uploads(take):
    found = take(["..zip", "a b.zip", "_x.zip", "grades.csv", "__MACOSX/", ".hidden.zip", "<b>.zip", "=1+1.zip"])
    assert {entry[1][0] for entry in found.values()} == {"E073"} and len(found) == 4
    assert take.others == ["..zip", ".hidden.zip", "__MACOSX", "grades.csv"]


@pytest.mark.parametrize("text, said", [
    ("name\nalice\n", "no column id"), ("id\nalice\nALICE\n", "line 3: ALICE stands in line 2 already"),
    ("id\n../x\n", "line 2: '../x' is not a valid ID"), ("", "no column id"),
    ('id\n"alice\n', "unexpected end of data"),
])  # fmt: skip
def test_a_wrong_roster_is_named(take, text, said):
    with pytest.raises(GradingError, match=re.escape(said)):
        take(["alice.zip"], text or "\n")


@pytest.mark.parametrize("top", ["", "alice/", "ALICE/"])
def test_a_folder_is_read_as_a_zip_would_be(tmp_path, top):
    for name, content in right_files(0).items():
        path = tmp_path / "alice" / top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    entries = read_archive(read_payload(tmp_path / "alice", "alice")).entries
    assert sorted(entry.name for entry in entries) == sorted(f"{top or 'alice/'}{name}" for name in right_files(0))


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_links_in_a_folder_are_not_followed(tmp_path):
    (tmp_path / "alice").mkdir()
    (tmp_path / "secret").write_text("gold")
    (tmp_path / "alice" / "llama.py").symlink_to(tmp_path / "secret")
    payload = read_payload(tmp_path / "alice", "alice")
    assert b"gold" not in payload
    assert any("a link" in problem for problem in check_bytes(payload, "alice", Rules()).wrong)
    os.mkfifo(tmp_path / "pipe.zip")
    assert read_archive(read_payload(tmp_path / "pipe.zip", "alice")).entries == []


def test_what_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "alice.zip"
    path.write_bytes(make_zip("alice", 0))
    assert read_payload(path, "alice") == path.read_bytes()
    os.truncate(path, MAX_READ + 1)
    for given in (path, tmp_path):
        with pytest.raises(FormatError, match="100 MB are not read"):
            read_payload(given, "alice")
    path.write_bytes(b"")
    assert read_payload(tmp_path, "alice")
    monkeypatch.setattr(uploads, "MAX_ENTRIES", 0)
    with pytest.raises(FormatError, match="more than 0 files"):
        read_payload(tmp_path, "alice")


def test_one_zip_alone(tmp_path):
    write_data(tmp_path / "data")
    (tmp_path / "alice.zip").write_bytes(b"")
    found, _ = find_submissions(Path(tmp_path / "alice.zip"), Settings(gold=str(tmp_path / "data")))
    assert [one.student.student_id for one in found] == ["alice"]
