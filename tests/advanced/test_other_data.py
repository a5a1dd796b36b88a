"""Lines of data made of other people's archives, and archives that are none."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from advanced.experiments import other_data
from engine.data import create_data
from utils import UserError


def archive(folder: Path, name: str, texts: dict[str, list[str]]) -> Path:
    with zipfile.ZipFile(path := folder / name, "w") as file:
        for member, lines in texts.items():
            file.writestr(member, "\n".join(lines).encode("latin-1"))
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_data, "SPLITS", {"dev": 2, "test": 3, "train": 4})


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def run(*paths: Path) -> None:
        monkeypatch.setattr("sys.argv", ["other_data", *map(str, paths), "--out", str(tmp_path)])
        other_data.main()

    return run


def test_lines_are_divided_once_and_no_text_is_in_two_places(tmp_path: Path, small: None, call):
    blamed = [f"<Cons>too heavy, number {each} &amp; loud</Cons>" for each in range(12)]
    praised = [f"   <Pros>light and gr\xfcn, number {each}</Pros>" for each in range(12)]
    more = ["<Pros>said of both kinds</Pros>", praised[0], "<Pros>short one</Pros>", ""]
    first, second = other_data.SOURCES["pros_cons.zip"].members
    path = archive(
        tmp_path, "pros_cons.zip", {first: [*blamed, "<Cons>said of both kinds</Cons>"], second: [*praised, *more]}
    )
    call(path)
    splits = {name: create_data(tmp_path / f"pros-cons-{name}.txt", 2) for name in ("dev", "test", "train")}
    assert {name: len(lines) for name, lines in splits.items()} == {"dev": 4, "test": 6, "train": 8}
    for lines in splits.values():
        assert sum(each.label for each in lines) * 2 == len(lines)
    texts = [each.sentence for lines in splits.values() for each in lines]
    assert len({*texts}) == len(texts) and not {"said of both kinds", "short one"} & {*texts}
    assert all("& loud" in text or "gr\xfcn" in text for text in texts) and "<" not in "".join(texts)
    assert json.loads((tmp_path / "pros-cons-label-mapping.json").read_text()) == ["bad", "good"]
    before = (tmp_path / "pros-cons-train.txt").read_bytes()
    call(path)
    assert (tmp_path / "pros-cons-train.txt").read_bytes() == before


def test_what_is_no_such_archive_is_refused_in_one_line(
    tmp_path: Path, small: None, call, monkeypatch: pytest.MonkeyPatch
):
    members = other_data.SOURCES["subjectivity.zip"].members
    few = {member: [f"{member} tells of {each}" for each in range(5)] for member in members}
    (broken := tmp_path / "broken").mkdir()
    (broken / "subjectivity.zip").write_bytes(b"PK no zip")
    (other := tmp_path / "other").mkdir()
    cases = [
        (tmp_path / "mine.zip", "must be named subjectivity.zip or pros_cons.zip"),
        (tmp_path / "absent" / "subjectivity.zip", "is not the subjectivity.zip of nltk_data"),
        (broken / "subjectivity.zip", "is not the subjectivity.zip of nltk_data"),
        (archive(other, "subjectivity.zip", {"x": ["y"]}), "There is no item named"),
        (archive(tmp_path, "subjectivity.zip", few), "has 5 texts of the class objective, too few"),
    ]
    for path, words in cases:
        with pytest.raises(UserError, match=words) as error:
            call(path)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(other_data, "LARGEST", 10)
    with pytest.raises(UserError, match="is larger than 10 bytes"):
        call(tmp_path / "subjectivity.zip")
    assert not [*tmp_path.glob("subj-*")]


def test_sst_as_two_classes_leaves_the_neutral_sentences_out(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for split in ("train", "dev"):
        lines = [f"{label} ||| {split} {label}\n" for label in (0, 1, 2, 3, 4, 2)]
        (tmp_path / f"data/sst-{split}.txt").write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(other_data, "find_asset", lambda name: path if (path := tmp_path / name).exists() else None)
    with pytest.raises(UserError, match="data/sst-test.txt does not exist"):
        call("--sst2")
    assert not [*tmp_path.glob("sst2-*")]
    (tmp_path / "data/sst-test.txt").write_text("2 ||| so so\n4 ||| splendid\n", encoding="utf-8")
    call("--sst2")
    found = {split: create_data(tmp_path / f"sst2-{split}.txt", 2) for split in ("train", "dev", "test")}
    assert [(each.label, each.sentence) for each in found["dev"]] == [
        (0, "dev 0"), (0, "dev 1"), (1, "dev 3"), (1, "dev 4"),
    ]  # fmt: skip
    assert len(found["train"]) == 4 and [each.sentence for each in found["test"]] == ["splendid"]
    with pytest.raises(UserError, match="name subjectivity.zip or pros_cons.zip, or say --sst2"):
        call()
