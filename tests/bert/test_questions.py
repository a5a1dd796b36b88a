"""The made-up questions: SQuAD's format, answers that stand where they are said to, nothing of dev in train."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from error_helpers import refused

from bert import questions as program
from bert.squad import read_squad


def run(*flags: object) -> None:
    program.main([str(flag) for flag in flags])


@pytest.mark.parametrize("version", program.VERSIONS)
def test_the_files_are_read_and_every_answer_stands_at_its_place(tmp_path: Path, version: str):
    run("--out", tmp_path, "--paragraphs", 60, "--version", version)
    contexts = {}
    for part, count in (("train", 60), ("dev", 6)):
        asked, may_be_unanswered = read_squad(tmp_path / f"questions-{part}.json")
        assert may_be_unanswered == (version == "v2.0")
        content = json.loads((tmp_path / f"questions-{part}.json").read_text())
        paragraphs = content["data"][0]["paragraphs"]
        contexts[part] = {paragraph["context"] for paragraph in paragraphs}
        assert len(paragraphs) == len(contexts[part]) == count and len(asked) == sum(len(p["qas"]) for p in paragraphs)
        places = Counter()
        for paragraph in paragraphs:
            for question in paragraph["qas"]:
                for answer in question["answers"]:
                    start = answer["answer_start"]
                    assert paragraph["context"][start:].startswith(answer["text"])
                    places[paragraph["context"][:start].count(","), question["question"]] += 1
        assert part == "dev" or len(places) == 16 and max(places.values()) < 0.5 * count  # a question has no one place
    assert not contexts["train"] & contexts["dev"]


def test_what_cannot_be_written_is_one_line(tmp_path: Path):
    for flags, words in (
        (["--paragraphs", 9], "--paragraphs 9: must be at least 10"),
        (["--paragraphs", 14000], "--paragraphs 14000: there are 14400 paragraphs"),
        (["--out", tmp_path / "absent"], "the folder .*absent does not exist"),
    ):
        refused(words, run, "--out", tmp_path, *flags)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "questions-dev.json").write_text("mine")
    refused("questions-dev.json is there already", run, "--out", tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "questions-dev.json"]
