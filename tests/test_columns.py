"""Data of one's own: TSV, CSV and JSONL files give what lines of `LABEL ||| sentence` give."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import shutil
import subprocess
import tarfile
import time
import tracemalloc
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from error_helpers import refused

from engine import reports, tables
from engine.data import Example, create_data, read_label_names
from engine.plan import InputFile
from engine.tables import Columns, derive_label_names, read_examples, read_sentences, read_texts
from utils import UserError

NAMES = ["bad", "good"]


JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".jl")


def write(path: Path, rows: list[dict]) -> Path:
    """Rows as a file of the kind that its name says, by the standard library's own writers."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix.lower() in JSON_LINES:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        elif path.suffix.lower() == ".csv":
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines("\t".join(map(str, line)) + "\n" for line in (rows[0], *(row.values() for row in rows)))
    return path


@pytest.fixture(params=[*tables.FORMATS, *tables.ALIASES])
def ending(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("labels", [
    ["bad", "good", "bad"], ["0", "1", "0"], [0, 1, 0], [" bad", "1", "0 "], ["0.0", "1.0", "bad"], [0.0, 1.0, 0],
])  # fmt: skip
def test_labels_are_names_or_numbers(tmp_path: Path, ending: str, labels: list):
    texts = ["a dull film", 'a "fine" one, really', "ça ||| va"]
    rows = [{"id": 7, "text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    found = read_examples(write(tmp_path / f"d{ending}", rows), NAMES)
    assert found == [Example(text, label) for text, label in zip(texts, (0, 1, 0), strict=True)]


def test_columns_have_names_of_their_own(tmp_path: Path, ending: str):
    rows = [{"stars": "good", "text": "not this", "review": "this"}]
    path = write(tmp_path / f"d{ending.upper()}", rows)
    assert read_examples(path, NAMES, Columns("review", "stars")) == [Example("this", 1)]
    assert read_texts(path, Columns("review")) == ["this"]


@pytest.mark.parametrize("one", ["1", 1, 1.0, "1.0", " 1 ", "1e0", "10E-1", "1.00"])
def test_names_come_first_in_every_format(tmp_path: Path, ending: str, one: object):
    """Where a name is a number, a number is a name and nothing else: 0 could be the first class or none."""
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": "2"}, {"text": "y", "label": one}])
    assert [example.label for example in read_examples(path, ["1", "2", "3"])] == [1, 0]
    assert [example.label for example in read_examples(path, ["no", "maybe", "yes"])] == [2, 1]
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": 0}])
    with pytest.raises(UserError, match="line [12]: the label '0' is not one of 1, 2, 3$"):
        read_examples(path, ["1", "2", "3"])


@pytest.mark.parametrize("spelt", ["-0", "-0.0", "1e3", "5e-1", "1.50", "1e22", "1e400", "01", "+1", ".5", "1."])
def test_a_number_is_one_label_however_it_is_spelt(tmp_path: Path, spelt: str):
    """A CSV file keeps how a number is written, and JSON does not: both are one label. 01, .5 are no JSON."""
    try:
        line = f'{{"text": "x", "label": {json.dumps(json.loads(spelt))}}}\n'
    except ValueError:
        line = f'{{"text": "x", "label": "{spelt}"}}\n'
    (tmp_path / "d.jsonl").write_text(line)
    (tmp_path / "d.csv").write_text(f"text,label\nx,{spelt}\n")
    found = [tables.read_records(tmp_path / f"d.{ending}")[0].label for ending in ("csv", "jsonl")]
    assert found[0] == found[1]


def test_two_names_that_are_one_label_are_refused(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": "1.10"}])
    with pytest.raises(UserError, match="'1.1' and '1.10' are one label"):
        read_examples(path, ["1.1", "1.10"])


def test_true_and_false_are_two_labels_in_every_format(tmp_path: Path, ending: str):
    """Python's writers put True into CSV files and true into JSON, spreadsheets TRUE."""
    labels = (True, False, "True", "false", "TRUE", "FALSE")
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": each} for each in labels])
    assert derive_label_names(path) == ["false", "true"]
    for names in (["false", "true"], ["False", "True"]):
        assert [example.label for example in read_examples(path, names)] == [1, 0] * 3
    with pytest.raises(UserError, match="'True' and 'TRUE' are one label"):
        read_examples(path, ["True", "TRUE"])


@pytest.mark.parametrize("text", [123, 1.5, 10**30, True])
def test_a_number_is_a_text_in_every_format(tmp_path: Path, ending: str, text: object):
    path = write(tmp_path / f"d{ending}", [{"text": text, "label": "good"}])
    said = "true" if text is True and ending in JSON_LINES else str(text)  # as the file says it
    assert read_texts(path) == [said] and read_examples(path, NAMES) == [Example(said, 1)]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_a_text_of_several_lines_is_one_line(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"text": "one\r\ntwo\nthree ", "label": 1}, {"text": "four", "label": 0}])
    assert [example.sentence for example in read_examples(path, NAMES)] == ["one two three", "four"]


def test_lines_may_end_as_on_windows(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": "good"}, {"text": "y", "label": "bad"}])
    path.write_bytes("\ufeff".encode() + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    assert read_examples(path, NAMES) == [Example("x", 1), Example("y", 0)]


def test_a_tab_divides_even_between_quotes(tmp_path: Path):
    (path := tmp_path / "d.tsv").write_text('text\tlabel\n"fine\t1\n"so ""so"" "\t0\n', encoding="utf-8")
    assert read_examples(path, NAMES) == [Example('"fine', 1), Example('"so ""so"" "', 0)]


def test_spaces_around_the_name_of_a_column_are_none_of_it(tmp_path: Path):
    (path := tmp_path / "d.csv").write_text("text, label\nx,good\n", encoding="utf-8")
    assert read_examples(path, NAMES) == [Example("x", 1)]


def test_a_test_file_may_lack_labels_and_no_other(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"text": "x", "other": 3}])
    assert read_examples(path, NAMES, is_test=True) == [Example("x", -1)]
    with pytest.raises(UserError, match=r"line [12]: nothing in a column 'label'; there are text, other; --label-col"):
        read_examples(path, NAMES)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("d.csv", "text,label\nx,good\ny\n", "line 3: 1 columns, where line 1 names 2"),
    ("d.csv", 'text,label\n"x,good\n', "line 2: unexpected end of data"),
    ("d.csv", 'text,label\nfine,0\n"x,good\nfine,1\n', "line 3: unexpected end of data"),
    ("d.csv", "text,text\nx,good\n", "line 2: nothing in a column 'text'; there are text (1), text (2)"),
    ("d.csv", "text,label,label\nx,1,0\n", "line 2: nothing in a column 'label'; there are text, label (1), label (2)"),
    ("d.csv", "x,x,x (1)\na,b,c\n", "line 1: two columns are called 'x (1)'"),
    ("d.csv", "text,label\n", "holds no data"),
    ("d.csv", "", "holds no data"),
    ("d.csv", "text,label\n ,good\n", "line 2: the column text is empty; --skip_empty leaves such lines out"),
    ("d.csv", "text,label\nx,good\n\n", "line 3: the line is blank; --skip_empty"),
    ("d.jsonl", '{"text": "x", "label": 1}\n\n', "line 2: the line is blank; --skip_empty"),
    ("d.jsonl", '{"text": null, "label": 1}\n', "line 1: the column text is empty; --skip_empty"),
    ("d.jsonl", '{"text": "x", "label": 1}\n{"text": "y", "label": NaN}\n', "line 2: the column label is empty"),
    ("d.jsonl", '{"text": "x", "label": [1]}\n', "line 1: the label is no text and no number but [1]"),
    ("d.jsonl", '{"text": "x", "label": 1}\n{"text": "\\ud83d", "label": 1}\n',
     "line 2: not JSON: \\ud83d is half a character (a lone surrogate) (column 11)"),
    ("d.jsonl", '{"text": "x", "text": "y"}\n', "line 1: not JSON: two entries of one object are called 'text'"),
    ("d.txt", "1 ||| x\n\n", "line 2: no ' ||| ' between label and sentence; --skip_empty leaves such lines out"),
    ("d.txt", "1 ||| x\n0 ||| \n", "line 2: the sentence is empty; --skip_empty leaves such lines out"),
    ("d.json", "[]", "one JSON text for the whole file is not read; write an object a line, in a file that ends in"),
    ("d.tar.gz", "", "archives are not read; unpack it"),
    ("d.xlsx", "PK\x03\x04", "spreadsheets are not read; save it as .csv"),
    ("d.csv", "text;label\nx;good\n", "there are text;label; --text-column says which it is; columns of .csv are"),
    ("d.csv", "text;label\nx, y;good\n", "separated by commas and those of .tsv by tabs, these by ';', it seems"),
    ("d.tsv", "text,label\nx,good\n", "these by ',', it seems"),
    ("d.csv", "text\tlabel\nx\tgood\n", r"these by '\t', it seems"),
    ("d.csv", "text,label\nx,fine\n", "line 2: the label 'fine' is neither one of bad, good, nor a number from 0 to 1"),
    ("d.csv", "text,label\nx,2\n", "line 2: the label '2' is neither"),
    ("d.csv", "text,label\nx,-1\n", "line 2: the label '-1' is neither"),
    ("d.csv", "text,label\nx,\n", "line 2: the column label is empty; --skip_empty leaves such lines out"),
    ("d.tsv", "text\tlabel\nx\tgood\ty\n", "line 2: 3 columns, where line 1 names 2"),
    ("d.tsv", "sentence\tlabel\nx\tgood\n", "line 2: nothing in a column 'text'; there are sentence, label;"),
    ("d.jsonl", '{"text": "x", "label": 1}\n{"text"\n', "line 2: not JSON"),
    ("d.jsonl", "[" * 100_000, "line 1: not JSON"),
    ("d.jsonl", "[1]\n", "d.jsonl is one JSON array; one JSON text for the whole file is not read"),
    ("d.jsonl", json.dumps([{"text": "x", "label": 1}] * 3, indent=2), "d.jsonl is one JSON array; one JSON text"),
    ("d.jsonl", json.dumps({"data": [{"text": "x"}]}, indent=2), "d.jsonl is one JSON object; one JSON text"),
    ("d.jsonl", '"x"\n[1]\n', "line 1: no JSON object but 'x'"),
    ("d.jsonl", '{"text": ["x"], "label": 1}\n', "line 1: the column text is no text but ['x']"),
    ("d.jsonl", '{"text": "x", "label": true}\n', "line 1: the label 'true' is neither"),
    ("d.jsonl", '{"text": "x", "label": 1.5}\n', "line 1: the label '1.5' is neither"),
    ("d.jsonl", '{"text": "x", "label": null}\n', "line 1: the column label is empty"),
    ("d.jsonl", '{"text": "x", "label": 1}\n{"text": "y"}\n', "line 2: the column label is empty"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, words: str):
    (path := tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read_examples(path, NAMES)
    assert words in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_some_labels_of_a_test_file_are_not_enough(tmp_path: Path):
    path = write(tmp_path / "d.jsonl", [{"text": "x", "label": 1}, {"text": "y"}])
    with pytest.raises(UserError, match="line 2: the column label is empty"):
        read_examples(path, NAMES, is_test=True)


@pytest.mark.parametrize("label", [None, "", -1])
def test_a_test_file_may_have_placeholders(tmp_path: Path, label: object):
    path = write(tmp_path / "d.jsonl", [{"text": "x", "label": label}] * 2)
    assert read_examples(path, NAMES, is_test=True) == [Example("x", -1)] * 2


def test_what_is_empty_is_left_out_and_counted(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture):
    rows = [{"text": text, "label": label} for text, label in (("x", 1), (" ", 0), ("y", ""), ("z", "bad"))]
    path = write(tmp_path / f"d{ending}", rows)
    path.write_bytes(path.read_bytes() + b"\n")
    skipping = Columns(skip_empty=True)
    assert read_examples(path, NAMES, skipping) == [Example("x", 1), Example("z", 0)]
    assert "3 of 5 lines are left out, which have no text or no label" in capsys.readouterr().err
    assert read_texts(path, skipping) == [*read_sentences(str(path), skipping)] == ["x", "y", "z"]
    lines = tmp_path / "d.txt"
    lines.write_text("\n1 ||| x\n0 ||| \n0 |||\n \n0 ||| z\n", encoding="utf-8")
    capsys.readouterr()
    assert read_examples(lines, NAMES, skipping) == [Example("x", 1), Example("z", 0)]
    assert [*read_sentences(str(lines), skipping)] == ["x", "z"]
    assert capsys.readouterr().err.count("4 of 6 lines are left out, which have no sentence") == 2


def test_a_field_may_have_any_length_and_a_header_any_number_of_columns(tmp_path: Path, ending: str):
    long = "a fine film " * 20_000
    path = write(tmp_path / f"d{ending}", [{"text": long, "label": "good"}])
    assert read_examples(path, NAMES) == [Example(long.strip(), 1)]
    before, names = csv.field_size_limit(), [f"c{number}" for number in range(30_000)]
    path = write(tmp_path / f"d{ending}", [dict.fromkeys(names, "x") | {"text": "x", "label": "bad"}])
    start = time.process_time()
    assert read_examples(path, NAMES) == [Example("x", 0)]
    assert time.process_time() - start < 2 and csv.field_size_limit() == before


@pytest.mark.parametrize(("labels", "names"), [
    (["good", "bad"] * 2, ["bad", "good"]),
    (["1", "0"] * 2, ["0", "1"]),
    ([1, 0] * 2, ["0", "1"]),
    (["fine", "poor"] * 2, ["fine", "poor"]),
    (["good", "bad", "neutral"] * 2, ["bad", "good", "neutral"]),
    ([1, 2, 3, 4, 5], ["1", "2", "3", "4", "5"]),
    (["10", "9", 2.0, "10.0"] * 2, ["2", "9", "10"]),
    ([0.5, 1, 1.5] * 2, ["0.5", "1", "1.5"]),
    ([0, 10**9] * 2, ["0", "1000000000"]),
    (["US", "us "] * 2 + ["01", "1"], "'US' (line 1) and 'us' (line 2) differ in capitals or spaces alone"),
    (["caf\u00e9", "cafe\u0301"] * 2, "differ in capitals or spaces alone"),
])  # fmt: skip
def test_classes_are_the_labels_that_are_there(tmp_path: Path, labels: list, names: list[str] | str):
    path = write(tmp_path / "d.jsonl", [{"text": "x", "label": label} for label in labels])
    if isinstance(names, list):
        assert derive_label_names(path) == names
    else:
        refused(re.escape(names), derive_label_names, path)


@pytest.mark.parametrize("labels", [["one"] * 9, [*"abcdefgh"], [0, 0], ["a\x07", "b"] * 2, [1, 900, 7, 55, 2000]])
def test_what_does_not_look_like_labels_is_refused(tmp_path: Path, labels: list):
    path = write(tmp_path / "d.jsonl", [{"text": "x", "label": label} for label in labels])
    with pytest.raises(UserError, match="does not look like labels"):
        derive_label_names(path)


def test_other_columns_are_other_data(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"text": "x", "label": "good"}])
    assert InputFile.of(path, columns=Columns()) == InputFile.of(path, columns=Columns())
    assert InputFile.of(path, columns=Columns()) != InputFile.of(path, columns=Columns(label="other"))
    (lines := tmp_path / "d.txt").write_bytes(path.read_bytes())
    assert InputFile.of(lines, columns=Columns(label="other")) == InputFile.of(lines)


def test_sentences_to_predict_come_from_a_column(tmp_path: Path, ending: str):
    path = write(tmp_path / f"d{ending}", [{"review": "x"}, {"review": "0 ||| y"}])
    assert [*read_sentences(str(path), Columns("review"))] == ["x", "0 ||| y"]


def test_a_run_on_columns_is_that_on_lines(
    tmp_path: Path, drive: Callable, classify_flags: Callable, films: dict[str, Path]
):
    """The same accuracies and the same output files; a plain run's name, which tells no columns."""
    flags = [*classify_flags("finetune"), "--epochs", 1, "--lr", 0.01]
    first = drive(*flags)
    outputs = {path.name: path.read_bytes() for path in tmp_path.glob("*-output.txt")}
    given = ["--text-column", "review", "--label-column", "stars"]
    for split, ending in (("train", ".csv"), ("dev", ".tsv"), ("test", ".jsonl")):
        rows = [{"stars": NAMES[example.label], "review": example.sentence} for example in create_data(films[split])]
        given += [f"--{split}", write(tmp_path / f"{split}{ending}", rows)]
    again = drive(*flags, *given)
    assert [line for line in again.splitlines() if "acc ::" in line] == [
        line for line in first.splitlines() if "acc ::" in line
    ]
    assert len(outputs) == 2
    assert outputs == {path.name: path.read_bytes() for path in tmp_path.glob("*-output.txt")}


def test_label_names_come_from_the_training_data(tmp_path: Path, drive: Callable, classify_flags: Callable):
    rows = [{"text": f"x {number}", "label": ("poor", "fine", "so-so")[number % 3]} for number in range(9)]
    path = write(tmp_path / "own.csv", rows)
    flags = classify_flags("finetune")
    at = flags.index("--label-names")
    del flags[at : at + 2]
    for split in ("train", "dev", "test"):
        flags[flags.index(f"--{split}") + 1] = path
    out = drive(*flags, "--epochs", 1)
    assert "labels: 0 fine, 1 poor, 2 so-so\n" in out and "dev acc ::" in out and "'label_names': None" in out
    (lines := tmp_path / "lines.txt").write_text("0 ||| x\n1 ||| y\n", encoding="utf-8")
    write(path, [{"text": f"x {number}", "label": 1 + number % 2} for number in range(4)])
    refused("lines.txt has class numbers, which are not the labels of", drive, *flags, "--dev", lines)


@pytest.mark.parametrize("method", [[], ["--method", "direct"], ["--method", "channel"]])
def test_data_of_ones_own_get_neither_the_names_nor_the_question_of_films(
    tmp_path: Path, drive: Callable, classify_flags: Callable, method: list, monkeypatch: pytest.MonkeyPatch
):
    """With the course's classifier and with methods that ask."""
    asked, encode = [], reports.encode

    def noting(args: Namespace, data: dict, tokenizer: object, model: object) -> dict:
        asked.append(model)
        return encode(args, data, tokenizer, model)

    monkeypatch.setattr(reports, "encode", noting)
    path = write(tmp_path / "own.csv", [{"text": f"x {number}", "label": number % 2} for number in range(4)])
    flags = [*classify_flags("prompt"), "--dev", path, "--test", path, *method]
    at = flags.index("--label-names")
    del flags[at : at + 2]
    if method:
        ending = [flags.index(f"--{split}_out") + 1 for split in ("dev", "test")]
        for place, split in zip(ending, ("dev", "test"), strict=True):
            flags[place] = f"{split}-advanced-output.txt"
    assert "labels: 0 0, 1 1\n" in drive(*flags, "--attention", "causal")
    (model,) = asked
    if method == ["--method", "channel"]:
        assert model.settings["template"] == "This text is {label}."
    else:
        assert model.prompt_suffix.strip() == "Is this text 0 or 1? This text is"


def test_a_column_that_no_input_has_is_refused(drive: Callable, classify_flags: Callable):
    with pytest.raises(UserError, match="--label-column is for files that end in .tsv, .csv, .jsonl, and no input is"):
        drive(*classify_flags("prompt"), "--label-column", "stars")
    with pytest.raises(UserError, match="--text-column is for files that end in"):
        drive("--option", "perplexity", "--input", "x.txt", "--text-column", "stars")


def test_every_format_that_is_read_is_written(tmp_path: Path, ending: str):
    """What a new entry of `FORMATS` lacks: nothing may be written in another format's way."""
    rows = [{"text": "a, b", "label": "good"}, {"text": 'so "fine"', "label": "bad"}]
    path = tmp_path / f"rows{ending}"
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = tables.TableWriter(file, str(path), [*rows[0]])
        for row in rows:
            table.write(row)
    assert path.read_text() == write(tmp_path / f"expected{ending}", rows).read_text()
    assert read_examples(path, NAMES) == [Example("a, b", 1), Example('so "fine"', 0)]


def test_rows_of_a_format_without_a_writer_are_refused(tmp_path: Path):
    with open(tmp_path / "rows", "w", encoding="utf-8") as file, pytest.raises(ValueError, match="not written yet"):
        tables.TableWriter(file, "rows.psv", ["text"])
    assert not (tmp_path / "rows").read_bytes()


# ------------------------------------------------------------------------------ what a file is, whatever its name says


@pytest.mark.parametrize("ending", tables.FORMATS)
def test_of_columns_with_one_name_only_those_that_are_asked_for_matter(tmp_path: Path, ending: str):
    """The header of the SMS collection is `v1,v2,,,`. JSON objects with two entries of one name are no data."""
    between = {".csv": ",", ".tsv": "\t"}.get(ending)
    if between is None:
        return
    lines = (["v1", "v2", "", "", "x", "x"], ["ham", "See you", "a", "b", "c", "d"], ["spam", "Win", "", "", "", ""])
    (path := tmp_path / f"d{ending}").write_text("".join(between.join(line) + "\n" for line in lines))
    assert read_examples(path, ["ham", "spam"], Columns("v2", "v1")) == [Example("See you", 0), Example("Win", 1)]
    sentences, rows = tables.read_rows(str(path), Columns("v2"))
    assert [*sentences] == ["See you", "Win"] and [*rows[0].values()] == lines[1]  # in an output nothing is lost
    assert [*rows[0]] == ["v1", "v2", "(1)", "(2)", "x (1)", "x (2)"]
    assert read_texts(path, Columns("x (2)", skip_empty=True)) == ["d"]
    for columns in (Columns("x"), Columns("v2", "x")):
        refused("nothing in a column 'x'", read_examples, path, ["ham", "spam"], columns, is_test=True)


def packed(path: Path) -> Path:
    """A copy of the file, packed by the program gzip where it is installed."""
    out = path.with_name(f"{path.name}.gz")
    if shutil.which("gzip"):
        out.write_bytes(subprocess.run(["gzip", "-c", path], capture_output=True, check=True).stdout)
    else:
        out.write_bytes(gzip.compress(path.read_bytes()))
    return out


def test_a_file_that_gzip_has_packed_is_read_as_the_file_itself(tmp_path: Path, ending: str):
    rows = [{"text": text, "label": label} for text, label in (("ça va", "good"), ('so "fine"', "bad"))] * 50
    path = packed(write(tmp_path / f"d{ending}", rows))
    assert read_examples(path, NAMES) == read_examples(tmp_path / f"d{ending}", NAMES)
    assert [*read_sentences(str(path))] == [row["text"] for row in rows]
    path.rename(path.with_suffix(""))  # under the name of the file itself
    assert read_texts(path.with_suffix("")) == [row["text"] for row in rows]


def test_lines_that_gzip_has_packed_are_read_as_lines(tmp_path: Path):
    lines = tmp_path / "d.txt"
    lines.write_text("1 ||| ça\r\n0 ||| va\n", encoding="utf-8")
    (several := tmp_path / "several.txt.gz").write_bytes(packed(lines).read_bytes() * 2)  # gzip joins files so
    for path, times in ((packed(lines), 1), (several, 2)):
        assert read_examples(path, NAMES) == [Example("ça", 1), Example("va", 0)] * times
        assert [*read_sentences(str(path))] == ["ça", "va"] * times
    (names := tmp_path / "names.json").write_text('["bad", "good"]')
    assert read_label_names(packed(names)) == NAMES


def test_a_gzip_file_that_is_damaged_or_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = gzip.compress(b"a fine film\n" * 999)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 0xFF
    for number, content in enumerate((whole[:-9], whole[:40], bytes(changed), whole + b"more")):
        (path := tmp_path / f"d{number}.txt.gz").write_bytes(content)
        for read in (create_data, lambda path: [*read_sentences(str(path))]):
            refused("is a damaged gzip file", read, path)
    monkeypatch.setattr("utils.SMALL", 1 << 20)
    (path := tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(bytes(100 << 20)))
    for read in (read_texts, create_data):
        tracemalloc.start()
        refused("unpacks to over 20 times its size; unpack it with gunzip", read, path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 << 20
    refused("over 20 times", lambda: [*read_sentences(str(path.rename(tmp_path / "bomb.txt.gz")))])


# the first bytes by the formats' own descriptions: lz4_Frame_format.md, RAR 5.0 archive format, 7zFormat.txt
BEGINNINGS = {"lz4": "04224d18", "rar": "526172211a07", "p7zip": "377abcaf271c"}


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".txt", ".csv.zst"])
@pytest.mark.parametrize("kind", ["xz", "bzip2", "zip", "zstd", "gzip", *BEGINNINGS])
def test_what_other_programs_have_packed_is_named(tmp_path: Path, kind: str, ending: str):
    content = b"text,label\nx\xc3\xa9,good\n" * 9
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "made", "w", zipfile.ZIP_DEFLATED) as made:
            made.writestr("d.csv", content)
        raw = (tmp_path / "made").read_bytes()
    elif kind == "zstd":
        raw = bytes.fromhex("28b52ffd2022110100") + content  # RFC 8878, 3.1.1: magic number, header, a raw block
    elif kind in BEGINNINGS:
        raw = bytes.fromhex(BEGINNINGS[kind]) + content
    else:
        raw = {"xz": lzma.compress, "bzip2": bz2.compress, "gzip": gzip.compress}[kind](content)
        raw = gzip.compress(raw) if kind == "gzip" else raw  # twice
    (path := tmp_path / f"d{ending}").write_bytes(raw)
    said = f"d{ending} is compressed by {kind}; unpack it"
    refused(said, read_examples, path, NAMES)
    refused(said, lambda: [*read_sentences(str(path))])


@pytest.mark.parametrize("name", ["d.txt", "d.csv", "d.jsonl", "d.txt.gz"])
def test_a_nul_is_no_text(tmp_path: Path, name: str):
    """UTF-16 without a mark is UTF-8 with a NUL behind every letter; an archive has them behind the names of files."""
    with tarfile.open(tmp_path / "made.tar", "w") as made:
        made.add(write(tmp_path / "in.csv", [{"text": "x", "label": 1}]), "in.csv")
    archive = (tmp_path / "made.tar").read_bytes()
    for content, line in (("text\nfine\n".encode("utf-16-le"), 1), (archive, 1), (b"fine\ndull\0\n", 2)):
        (path := tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        for read in (read_examples, lambda path, _: [*read_sentences(str(path))]):
            refused(f"line {line}: not UTF-8 text", read, path, NAMES)


TABLES = {  # lines under a name that does not say what they are, and the words by which they are refused
    "objects": (
        '{"text": "x", "label": 1}\n\n{"text": "y"}\n',
        "every line is a JSON object; named .jsonl they are read as columns",
    ),
    "indented objects": ('  {"text": "x"}\n\t{"text": "y"}\n', "every line is a JSON object"),
    "one object": ('\ufeff{"text": "x"}', "every line is a JSON object"),
    "tabs": ("text\tlabel\nx\t1\n\ny\t\n", "every line has 1 tab; named .tsv they are read"),
    "more tabs": ("a\tb\tc\nx\t1\t2\r\n", "every line has 2 tabs; named .tsv they are read"),
}
TEXTS = {
    "an object alone": '{"text": "x"}\nand a line\n',
    "another line first": 'see:\n{"text": "x"}\n',
    "braces": "{a}\n{b}\n",
    "arrays": "[1]\n[2]\n",
    "a tab in one line": "one\ttab\nnone\n",
    "a line with a tab": "one\ttab\n",
    "other tabs": "a\tb\nc\td\te\n",
}


@pytest.mark.parametrize("name", ["d.txt", "d.dat", "d", "d.txt.gz"])
@pytest.mark.parametrize("content", TABLES)
def test_columns_under_another_ending_are_refused(tmp_path: Path, content: str, name: str):
    text, said = TABLES[content]
    (path := tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    refused(said, lambda: [*read_sentences(str(path))])
    refused(said, read_examples, path, NAMES)


@pytest.mark.parametrize("content", TEXTS)
def test_texts_stay_lines_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str):
    (path := tmp_path / "d.txt").write_text(TEXTS[content])
    assert [*read_sentences(str(path))] == TEXTS[content].splitlines()
    said = "warning: " in (err := capsys.readouterr().err) and "is a JSON object, which is read as text" in err
    assert said == (content == "an object alone")
    (path := tmp_path / "labelled.txt").write_text("0 ||| a\tb\n1 ||| c\td\n")
    assert read_examples(path, NAMES) == [Example("a\tb", 0), Example("c\td", 1)]
    assert [*read_sentences(str(path))] == ["a\tb", "c\td"]


def test_a_command_refuses_columns_under_another_ending_and_outputs_that_would_be_packed(
    tmp_path: Path, drive: Callable, tiny_checkpoint: Path
):
    (path := tmp_path / "d.txt").write_text('{"text": "x"}\n{"text": "y"}\n')
    model = ["--pretrained-model-path", tiny_checkpoint, "--attention", "causal", "--max_new_tokens", 2]
    for flags in (["--option", "perplexity", "--input", path], ["--prompt_file", path]):
        refused("every line is a JSON object", drive, *model, *flags)
    refused("is not packed; leave .gz out", drive, *model, "--prompt_file", path, "--output", "o.csv.GZ")
    path = path.rename(tmp_path / "d.ndjson")
    assert [json.loads(line)["prompt"] for line in drive(*model, "--prompt_file", path).splitlines()] == ["x", "y"]
    drive(*model, "--prompt_file", packed(path), "--output", "o.jl")
    assert [json.loads(line)["prompt"] for line in (tmp_path / "o.jl").read_text().splitlines()] == ["x", "y"]
    (lines := tmp_path / "lines.txt").write_text("x\ny")
    measured = [drive(*model, "--option", "perplexity", "--input", each) for each in (path, packed(path), lines)]
    assert len({each.partition("nats a token")[2] for each in measured}) == 1
