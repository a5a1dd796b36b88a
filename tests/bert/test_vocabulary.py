"""Vocabularies that are trained: what is in them, that they are the same everywhere, and what is refused."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from error_helpers import check_one_error, refused, snapshot

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from conftest import ROOT, SENTENCES  # noqa: E402
from test_wordpiece import fast, odd_text  # noqa: E402

from bert import vocabulary  # noqa: E402
from bert.basic import words  # noqa: E402
from bert.load import load_tokenizer  # noqa: E402
from bert.merges import by_count, continued, learn  # noqa: E402
from bert.vocabulary import train_vocabulary  # noqa: E402
from bert.wordpiece import SPECIAL, WordPiece  # noqa: E402
from engine.programs import run_main  # noqa: E402

LINES = [f"{sentence}!" for sentence in SENTENCES]


def largest(lines: list[str], lower_case: bool = True) -> WordPiece:
    """All that can be learned; the error says how much that is."""
    message = refused("must be at most", train_vocabulary, lines, 10**9, lower_case)
    return train_vocabulary(lines, int(re.search(r"at most (\d+)", message)[1]), lower_case)


# ----------------------------------------------------------------------------------------------- what is in it


@pytest.mark.parametrize("lower_case", [True, False])
def test_special_tokens_characters_pieces(lower_case: bool):
    tokenizer = train_vocabulary(iter(LINES), 90, lower_case)
    found = [word.text for line in LINES for word in words(line, lower_case)]
    begin = sorted({letter for word in found for letter in word})
    inside = sorted({f"##{letter}" for word in found for letter in word[1:]})
    known = [*SPECIAL, *begin, *inside]
    assert (tokenizer.pieces[: len(known)], len(tokenizer), tokenizer.lower_case) == (known, 90, lower_case)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (*range(5),)
    assert all(any(piece.removeprefix("##") in word for word in found) for piece in tokenizer.pieces[5:])
    assert WordPiece.from_bytes(tokenizer.to_bytes()).pieces == tokenizer.pieces
    assert tokenizer.unk_id not in {id for line in LINES for id in tokenizer.encode(line)}


@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_those_of_pairs_counted_by_hand(seed: int):
    """On words of few letters, where most counts are equal to others."""
    rng = random.Random(seed)
    found = ["".join(rng.choices("abcx", k=rng.randrange(1, 8))) for _ in range(60)]
    tokenizer = largest([" ".join(found)])
    pieces = dict.fromkeys(step.piece for step in learn(found, continued, by_count, 10**6))
    assert [*pieces] == tokenizer.pieces[-len(pieces) :] and len(pieces) > 20


@pytest.mark.parametrize("lower_case", [True, False])
def test_words_of_any_text_are_those_that_we_read(lower_case: bool):
    """Where all is learned, a word that was seen twice is a piece. Which others there are follows from the words."""
    rng = random.Random(7)
    lines = [odd_text(rng) for _ in range(400)]
    tokenizer = largest(lines, lower_case)
    found = Counter(word.text for line in lines for word in words(line, lower_case))
    assert {letter for word in found for letter in word} == {piece for piece in tokenizer.pieces if len(piece) == 1}
    steps = learn(found.elements(), continued, by_count, 10**6)
    pieces = dict.fromkeys(step.piece for step in steps)
    assert [*pieces] == tokenizer.pieces[-len(pieces) :]
    assert {word for word, count in found.items() if count >= vocabulary.LEAST_SEEN} <= {*tokenizer.pieces}


def test_the_same_in_every_process():
    """The library by itself gives others in each: it counts on the order of a hash table."""
    code = (
        "import os, sys; from bert.vocabulary import train_vocabulary; before = dict(os.environ)\n"
        "sys.stdout.write(train_vocabulary(sys.stdin.read().split('\\n'), 400).to_bytes().decode())\n"
        "assert dict(os.environ) == before"
    )
    text = "\n".join([*LINES, *(Path(ROOT, "data/films-dev.txt").read_text(encoding="utf-8").split("\n"))])
    made = set()
    for number, parallel in ((1, "true"), (2, "false"), (3, "true")):
        how = {"PYTHONHASHSEED": str(number), "RAYON_NUM_THREADS": str(number), "TOKENIZERS_PARALLELISM": parallel}
        command, env = [sys.executable, "-c", code], {**os.environ, **how}
        done = subprocess.run(command, input=text, cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
        assert (done.returncode, done.stderr) == (0, "")
        made.add(done.stdout)
    assert made == {train_vocabulary(text.split("\n"), 400).to_bytes().decode()}


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_size_that_does_not_fit_says_which_one_does():
    start = "^--vocab_size {} does not fit the text; it must be "
    message = refused(start.format(20) + r"at least \d+, for", train_vocabulary, LINES, 20)
    least = int(re.search(r"at least (\d+)", message)[1])
    assert len(train_vocabulary(LINES, least)) == least
    refused(f"at least {least}", train_vocabulary, LINES, least - 1)
    most = len(largest(LINES))
    for size in (most + 1, 2**40):  # the library would set memory aside for so many, and abort
        refused(start.format(size) + f"at most {most}: no other", train_vocabulary, LINES, size)


@pytest.mark.parametrize(
    ("lines", "words"), [([], "no words"), ([" ", "\0"], "no words"), (["a \ud800"], "not UTF-8: .* surrogate")]
)
def test_no_text_is_refused(lines: list[str], words: str):
    refused(words, train_vocabulary, lines, 100)


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the program in a folder with a text and a data file; returns its status and what it printed."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(LINES), encoding="utf-8")
    Path("data.txt").write_text("".join(f"7 ||| {line}\n" for line in LINES), encoding="utf-8")

    def run(*flags: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vocabulary.py", *map(str, flags)])
        return run_main(vocabulary.main), *capsys.readouterr()

    return run


@pytest.mark.parametrize("cased", [False, True])
def test_the_command_writes_what_we_and_transformers_read(call, tmp_path: Path, cased: bool):
    flags = ("--text", "text.txt", "data.txt", "--out", "vocab.txt", "--vocab_size", 200, *(["--cased"] * cased))
    status, out, err = call(*flags)
    kind = "cased" if cased else "uncased"
    assert (status, err) == (0, "")
    assert out == f"save the vocabulary to vocab.txt (200 pieces, {kind}, of {2 * len(LINES)} documents)\n"
    expected = train_vocabulary([*LINES, *LINES], 200, lower_case=not cased)  # without the labels
    Path("config.json").write_text('{"model_type": "bert", "vocab_size": 200}', encoding="utf-8")
    ours = load_tokenizer(tmp_path)
    assert (ours.pieces, ours.lower_case) == (expected.pieces, not cased)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    for line in (*LINES, "Unseen WORDS, Café 7"):
        assert ours.encode(line) == theirs(line).input_ids == fast(Path("vocab.txt"), not cased)(line).input_ids


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "nowhere.txt"], ["--text nowhere.txt does not exist"]),
        (["--text", "."], ["--text . is a folder"]),
        (["--text", "text.txt", "./text.txt"], ["--text names", "twice"]),
        (["--text", "empty.txt"], ["empty.txt holds no text"]),
        (["--text", "binary.txt"], ["binary.txt line 1: not UTF-8"]),
        (["--out", "words.txt"], ["--out words.txt: the name must be vocab.txt"]),
        (["--out", "nowhere/vocab.txt"], ["the folder nowhere does not exist"]),
        (["--out", "there/vocab.txt"], ["there/vocab.txt is there already"]),
        (["--out", "half/vocab.txt"], ["half/tokenizer_config.json is there already"]),
        (["--vocab_size", "5"], ["--vocab_size 5: must be from 6"]),
        (["--vocab_size", "-1"], ["--vocab_size -1: must be from 6"]),
        (["--vocab_size", "1e3"], ["--vocab_size"]),
        (["--vocab_size", "7"], ["--vocab_size 7", "at least"]),
        (["--vocab_size", "999999999"], ["--vocab_size 999999999", "at most"]),
        (["--case"], ["--case"]),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(call, tmp_path: Path, flags: list[str], said: list[str]):
    for name in ("there/vocab.txt", "half/tokenizer_config.json"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("mine", encoding="utf-8")
    Path("empty.txt").write_text(" \n\n", encoding="utf-8")
    Path("binary.txt").write_bytes(b"\xff\xfe")
    before = snapshot(tmp_path)
    given = {"--text": ["text.txt"], "--out": ["vocab.txt"], "--vocab_size": ["100"]} | {flags[0]: flags[1:]}
    status, out, err = call(*(each for flag, values in given.items() for each in (flag, *values)))
    check_one_error(status, err, *said)
    assert out == "" and snapshot(tmp_path) == before


def test_an_absent_library_is_found_before_anything_is_read(call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    Path("binary.txt").write_bytes(b"\xff\xfe")
    status, _, err = call("--text", "binary.txt", "--out", "vocab.txt")
    check_one_error(status, err, "training a WordPiece vocabulary needs a package: pip install tokenizers")


def test_a_write_that_fails_leaves_no_vocabulary_of_unknown_case(call, monkeypatch: pytest.MonkeyPatch):
    """Where vocab.txt lay alone, a cased one would be read as uncased."""
    from bert import wordpiece

    def full(path: Path, real=wordpiece.atomic_write):
        if path.name == "vocab.txt":
            raise OSError(28, "No space left on device", str(path))
        return real(path)

    monkeypatch.setattr(wordpiece, "atomic_write", full)
    status, _, err = call("--text", "text.txt", "--out", "vocab.txt", "--vocab_size", 90, "--cased")
    check_one_error(status, err, "vocab.txt", "No space left")
    assert not Path("vocab.txt").exists() and Path("tokenizer_config.json").exists()
