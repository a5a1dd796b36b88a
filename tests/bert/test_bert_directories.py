"""The tokenizer of a BERT's directory of each kind that one meets: ids are those of transformers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
from error_helpers import refused  # noqa: E402
from small import PIECES, hf_directory, hf_model, write_vocabulary  # noqa: E402

from bert.load import load_tokenizer  # noqa: E402
from bert.wordpiece import WordPiece  # noqa: E402

COUNT = len(PIECES)
PLAIN = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
ADDED = {
    str(COUNT): {"content": "[NEW]", "special": True, **PLAIN},
    str(COUNT + 1): {"content": "Widget", "special": False, **PLAIN, "normalized": True},
    str(COUNT + 2): {"content": "one", "special": False, **PLAIN, "single_word": True},
}
WHOLE = {"content": "[MASK]", "special": True, **PLAIN, "single_word": True}
WITHIN = {str(COUNT): {"content": "film", "special": False, **PLAIN, "normalized": True, "single_word": True}}
WITHIN |= {str(COUNT + 1): {"content": "il", "special": False, **PLAIN, "normalized": True}}
KINDS = {  # what tokenizer_config.json says; whether transformers 5 then writes the directory's tokenizer anew
    "plain": ({}, False),
    "cased": ({"do_lower_case": False}, False),
    "added_tokens.json": ({}, False),
    "added tokens": ({"added_tokens_decoder": ADDED}, False),
    "a special token as a word": ({"added_tokens_decoder": {"4": WHOLE}}, False),
    "one within another": ({"added_tokens_decoder": WITHIN}, False),
    "split": ({"split_special_tokens": True}, False),
    "by transformers 5": ({}, True),
    "by transformers 5, cased": ({"do_lower_case": False}, True),
    "by transformers 5, added tokens": ({"added_tokens_decoder": ADDED}, True),
    "any class, cased": ({"do_lower_case": False}, True),
}
WORDS = [piece.removeprefix("##") for piece in PIECES if piece[0] != "["]
ODD = [
    "[NEW]",
    "[new]",
    "[MASK]",
    "[CLS]",
    "Widget",
    "WIDGET",
    "widgets",
    "one",
    "ones",
    "one\u0301",
    "one\u00b2",
    "films",
    "caf\u00e9",
    "\u5317\u4eac",
    "\u0130",
    "\u200b",
]


def directory(kind: str, folder: Path) -> Path:
    said, is_new = KINDS[kind]
    hf_directory(folder, hf_model("BertModel", vocab_size=COUNT + 3))
    write_vocabulary(folder / "vocab.txt")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **said}))
    if kind == "added_tokens.json":
        (folder / "added_tokens.json").write_text(json.dumps({"[NEW]": COUNT, "Widget": COUNT + 1}))
    if is_new:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        (folder / "vocab.txt").unlink()
        tokenizer.save_pretrained(folder)
    if kind == "any class, cased":
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path):
    folder, rng = directory(kind, tmp_path / "model"), random.Random(0)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    again = WordPiece.from_bytes(ours.to_bytes())
    ours.save(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    written = load_tokenizer(tmp_path)
    for _ in range(200):
        parts = (rng.choice(rng.choice([WORDS, WORDS, ODD])) + rng.choice(["", " ", " "]) for _ in range(8))
        text = "".join(parts)
        assert ours.encode(text) == theirs(text).input_ids, text
        assert again.encode(text) == written.encode(text) == ours.encode(text)


def test_what_no_bert_here_has_is_named(tmp_path: Path):
    folder = directory("any class, cased", tmp_path / "model")
    whole = json.loads((folder / "tokenizer.json").read_text())
    for changes, words in (
        ({"model": {**whole["model"], "type": "BPE"}}, "model's type is 'BPE'"),
        ({"model": {**whole["model"], "vocab": {"a": 7}}}, "its ids do not count its pieces"),
        ({"normalizer": {"type": "NFC"}}, "otherwise than a BERT's, by NFC"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(whole | changes))
        refused(words, load_tokenizer, folder)
    for named, words in (('"<mask>"', "'<mask>'"), ("null", "None")):
        (folder / "tokenizer_config.json").write_text(f'{{"mask_token": {named}}}')
        refused(f"mask_token is {words}", load_tokenizer, folder)


def test_a_vocabulary_without_an_end_is_refused(tmp_path: Path):
    folder = directory("plain", tmp_path / "model")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to("/dev/zero")
    refused("vocab.txt is no plain file", load_tokenizer, folder)
