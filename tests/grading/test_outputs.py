"""Output files in a submission: format, labels, sentences, and their accuracy."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from submissions import LABELS, SUFFIX, beside, change, pdf_of, write_outputs

from grading.editions import TEXT_PROMPT
from grading.outputs import check_text
from grading.programs import GradingError
from grading.rules import Report, Rules
from grading.submission import create_zip

pytest_plugins = ["submission_fixtures"]

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
    assert any(message in problem and name in problem for problem in report.wrong), report.wrong
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
    assert report.wrong == [] and beside(report) == [] and len(report.scores) == 8


def test_another_prompt_is_a_warning_and_free_for_advanced_methods(create, folder):
    write_outputs(folder, "advanced")
    (folder / "alice-report.pdf").write_bytes(pdf_of(3))
    for part in LABELS:
        change(folder, f"{part}-prompting-output.txt", lambda b: b.replace(b"Is this movie", b"Is it"))
        name = f"{part}-advanced-output.txt"
        change(folder, name, lambda b: b.replace(b"||| ", b"||| Review: ").replace(b"\n", b" It\n"))
    report = create()
    assert report.wrong == []
    assert len(beside(report)) == 4 and all("another prompt" in warning for warning in beside(report))


def test_outputs_under_another_kinds_name(create, folder):
    for part in LABELS:
        paths = [folder / f"{part}-{kind}-output.txt" for kind in ("prompting", "finetuning")]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
    problems = create().wrong
    assert len(problems) == 8
    for words in ("prompting-output.txt: no sentence has a prompt", "finetuning-output.txt: every sentence ends in"):
        assert sum(words in problem for problem in problems) == 4


def test_outputs_on_the_bundled_data_are_no_submission(create, folder, monkeypatch):
    films = (ROOT / "data" / "films-dev.txt").read_text(encoding="utf-8")
    for kind, end in (("prompting", SUFFIX["sst"]), ("finetuning", "")):
        (folder / f"cfimdb-dev-{kind}-output.txt").write_text(films.replace("\n", f"{end}\n"), encoding="utf-8")
    (folder / "sst-dev-prompting-output.txt").rename(folder / "films-dev-prompting-output.txt")
    for find in (Rules.find, lambda self, name: None):  # with the course's data and without them
        monkeypatch.setattr(Rules, "find", find)
        problems = create().wrong
        assert len(problems) == 3 and all("films data set" in problem for problem in problems), problems
        assert "films-dev-prompting-output.txt" in problems[0]


def test_constant_predictions_are_a_warning(create, folder):
    name = "cfimdb-dev-finetuning-output.txt"
    change(folder, name, lambda b: b.replace(b"0 |||", b"1 |||"))
    report = create()
    assert report.wrong == [] and beside(report) == [f"{name}: every line has the same label"]


def test_lines_of_which_none_has_a_label_are_not_called_constant(create, folder):
    change(folder, "sst-dev-finetuning-output.txt", lambda b: b.replace(b" ||| ", b".0 ||| "))
    report = create()
    assert [problem.code for problem in report.wrong] == ["E015-format"] and beside(report) == []


@pytest.mark.parametrize(("right", "said"), [(46, []), (31, ["0.310", "0.414", "0.05"]), (47, ["0.470"])])
def test_an_accuracy_outside_the_band_of_the_grade_is_a_warning(folder, data_dir, tmp_path, right: int, said: list):
    shutil.copytree(data_dir, tmp_path / "data")
    gold = [f"{number % 5} ||| film {number}\n" for number in range(100)]
    (tmp_path / "data" / "sst-dev.txt").write_text("".join(gold))
    lines = [line if number < right else f"{(number + 1) % 5}{line[1:]}" for number, line in enumerate(gold)]
    (folder / "sst-dev-finetuning-output.txt").write_text("".join(lines))
    prompted = "".join(gold[:21] + [f"4{line[1:]}" for line in gold[21:]]).replace("\n", f"{SUFFIX['sst']}\n")
    (folder / "sst-dev-prompting-output.txt").write_text(prompted)  # 21 and every fifth of the others: 0.37
    report = create_zip(folder, "alice", data_dir=tmp_path / "data")
    assert report.wrong == [] and len(beside(report)) == 1 + bool(said)
    assert "sst-dev-prompting" in beside(report)[-1] and "0.213" in beside(report)[-1]
    assert not said or all(word in beside(report)[0] for word in ("sst-dev-finetuning-output.txt", *said))
    later = create_zip(folder, "alice", data_dir=tmp_path / "data", edition="cmu2025")
    assert any("0.237" in warning for warning in beside(later))  # whose reference has LayerNorm


def test_a_text_that_continues_another_prompt_is_a_warning(create, folder):
    path = folder / "generated-sentence-temp-0.txt"
    path.write_text(f"\n  {TEXT_PROMPT.replace('. ', '.' + chr(10))} so bad")  # white space does not matter
    assert beside(create()) == []
    path.write_text(text := "Once upon a time " * 10)
    (found,) = beside(create())
    assert found == f"{path.name} does not begin with the assignment's prompt: {TEXT_PROMPT}"
    assert found.got == text[:100]


def test_a_text_in_a_code_page_is_decoded_and_noted(create, folder):
    """As the course's driver writes it on Windows; bytes that are no text stay a problem."""
    path = folder / "generated-sentence-temp-1.txt"
    for encoding in ("cp1252", "cp1251", "latin-1"):
        said = "\u043d\u0435\u0442" if encoding == "cp1251" else "caf\u00e9"
        path.write_bytes(f"{TEXT_PROMPT} bad .\n {said}".encode(encoding))
        report = create()
        assert report.wrong == [] and beside(report) == []
        assert f"{path.name} line 2: not UTF-8 text; read as text in a code page of Windows" in report.of("note")
        assert report.texts[path.name].startswith(TEXT_PROMPT)
    path.write_bytes(b"PK\x03\x04\xff\x00")
    assert create().wrong == [f"{path.name} line 1: not UTF-8 text"]


def test_the_mapping_decides_the_label_range(folder, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / "sst-label-mapping.json").write_text('["a", "b"]')
    report = create_zip(folder, "alice", data_dir=tmp_path / "data")
    assert any("outside 0..1" in problem for problem in report.wrong)


@pytest.mark.parametrize("name, text", [
    ("sst-dev.txt", "1 || x\n"), ("sst-dev.txt", ""),
    *(("sst-label-mapping.json", text) for text in ("{", "[" * 100_000, "[1]")), ("sst-label-mapping.json", "[]"),
])  # fmt: skip
def test_broken_data_of_the_instructor_is_a_user_error(folder, data_dir, tmp_path, name, text):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / name).write_text(text)
    with pytest.raises(GradingError, match=name):
        create_zip(folder, "alice", data_dir=tmp_path / "data")


@settings(max_examples=50, deadline=None)
@given(payload=st.binary(max_size=300))
def test_fuzz_output_lines(payload):
    report = Report("alice")
    rules = Rules()
    check_text("sst-dev-finetuning-output.txt", payload, rules, report)
    assert all("\n" not in message for message in report.wrong)


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
    assert report.wrong == [] and set(report.accuracies.values()) == {1.0}
    assert report.scores["sst-dev-prompting-output.txt"][::2] == (1101, pytest.approx(0.2625, abs=5e-5))
    assert report.scores["sst-test-prompting-output.txt"][::2] == (2210, pytest.approx(0.2864, abs=5e-5))
    assert report.scores["cfimdb-test-prompting-output.txt"] == (488, None, None)
