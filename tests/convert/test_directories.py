"""The tokenizer of a Hugging Face directory of each kind that one meets: ids and texts are those of transformers."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from conftest import SENTENCES, drive_in  # noqa: E402
from conversions import run_convert, trained_vocabulary  # noqa: E402
from error_helpers import refused  # noqa: E402
from shapes import bytes_of_text, hf_llama, rewrite, save  # noqa: E402

from convert.vocabulary import CONTROL, as_json, read_vocabulary, vocabulary_of  # noqa: E402
from engine.families import load_llama, read_tokenizer  # noqa: E402
from engine.inference import generate  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from utils import UserError  # noqa: E402

SPECIALS = ["<s>", "</s>", "<unk>", "<mask>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|endoftext|>", "<tool>"]
SPECIALS += ["film", "one"]
ODD = ["北京", "naïve", "ﬁ", "🙂", "e\u0301", "▁", "\u00a0", "\t", "12", "1990", "<0x0A>", "don't", "İ", "\u200b"]
PLAIN = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
CHAT = {"300": {"content": "<|im_start|>", "special": True, **PLAIN}}
CHAT |= {"301": {"content": "<|im_end|>", "special": True, **PLAIN}}
LOOSE = {"302": {"content": "<tool>", "special": True, **PLAIN, "lstrip": True, "rstrip": True}}
LOOSE |= {"303": {"content": "film", "special": False, **PLAIN, "normalized": True}}
LOOSE |= {"304": {"content": "one", "special": False, **PLAIN, "single_word": True}}
ADDED_FILE = {"<|im_start|>": 300, "<|im_end|>": 301}
MASK = {"mask_token": {"__type": "AddedToken", "content": "<mask>", "special": False, **PLAIN}}
BOTH_LISTS = {"additional_special_tokens": ["<tool>"], "extra_special_tokens": {"x_token": "<|begin|>"}}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
GPT2 |= {"unk_token": "<|endoftext|>"}

SENTENCEPIECE = {  # what tokenizer_config.json says beside tokenizer.model; None: there is no such file
    "no bos": {"add_bos_token": False, "legacy": True},
    "bos": {"add_bos_token": True, "legacy": True},
    "not legacy": {"add_bos_token": True, "legacy": False},
    "no space": {"add_bos_token": True, "add_prefix_space": False},
    "says nothing of bos": {},
    "says nothing": None,
    "chat": {"add_bos_token": True, "eos_token": "<|im_end|>", "added_tokens_decoder": CHAT},
    "chat, added_tokens.json": {"add_bos_token": True, "eos_token": "<|im_end|>", "legacy": True},
    "loose tokens": {"add_bos_token": True, "pad_token": "<pad>", "added_tokens_decoder": CHAT | LOOSE},
    "Code Llama": {"tokenizer_class": "CodeLlamaTokenizer"},
    "Code Llama, an object": {"tokenizer_class": "CodeLlamaTokenizer"}
    | {"unk_token": {"__type": "AddedToken", "content": "<unk>", "special": True, **PLAIN}},
    "no class, null": {"tokenizer_class": None, "unk_token": None, "add_bos_token": True},
    "no special mask": {"add_bos_token": True} | MASK,
}
JSON = {  # the same beside tokenizer.json, and whether its template puts bos
    "Llama": ({"add_bos_token": False, "legacy": True}, True),
    "Llama, no bos": ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, False),
    "any": (GENERIC | {"add_bos_token": False}, True),
    "any, no bos": (GENERIC | {"add_bos_token": True}, False),
    "any, chat": (GENERIC | {"eos_token": "<|im_end|>", "added_tokens_decoder": CHAT}, True),
    "any, split": (GENERIC | {"split_special_tokens": True}, True),
    "Llama, added_tokens.json": ({"eos_token": "<|im_end|>"}, True),
    "Llama, both lists": (BOTH_LISTS, True),
    "says nothing": (None, True),
}
KINDS = [*(f"sentencepiece: {name}" for name in SENTENCEPIECE), *(f"json: {name}" for name in JSON)]
KINDS += ["bytes: any", "bytes: GPT-2", "tiktoken"]


def directory(kind: str, folder: Path, tokenizer: Path) -> Path:
    """A random model with such a tokenizer. tokenizer: a SentencePiece model of 300 pieces."""
    save(folder, hf_llama(vocab_size=320))
    of, _, name = kind.partition(": ")
    said, begins = (SENTENCEPIECE[name], True) if of == "sentencepiece" else JSON.get(name, (GENERIC, True))
    if of == "bytes":
        bytes_of_text(folder, begins=name == "any")
        if name == "GPT-2":
            (folder / "tokenizer_config.json").write_text(json.dumps(GPT2))
        return folder
    shutil.copy(tokenizer, folder / "tokenizer.model")
    if of != "sentencepiece":
        file = as_json(read_vocabulary(Tokenizer(tokenizer_model=tokenizer).sp_model, tokenizer), [])
        if not begins:
            file["post_processor"] |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": []}
        (folder / "tokenizer.json").write_text(json.dumps(file))
    if of == "tiktoken":
        (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")
    if said is not None:
        base = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(base | said))
    if name.endswith("added_tokens.json"):
        (folder / "added_tokens.json").write_text(json.dumps(ADDED_FILE))
    return folder


def odd_texts(seed: int, count: int = 200) -> list[str]:
    """Words, special tokens, odd letters and spaces in any order."""
    rng, words = random.Random(seed), " ".join(SENTENCES).split()
    parts = [SPECIALS, ODD, words, words, [" ", "  ", "\n", "", " "]]
    texts = [" ", "a", "<s>", " <s> b", "</s>b", "a  b "]
    while len(texts) < count:
        texts.append("".join(rng.choice(rng.choice(parts)) + rng.choice(["", " "]) for _ in range(rng.randint(1, 14))))
    return [text for text in texts if text]


def theirs_of(kind: str, folder: Path):
    if kind.startswith("sentencepiece"):
        pytest.importorskip("google.protobuf")  # with which transformers reads tokenizer.model
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_greedy_text_are_those_of_transformers(kind: str, tmp_path: Path, tiny_tokenizer: Path):
    folder = directory(kind, tmp_path / "model", tiny_tokenizer)
    theirs, (model, ours) = theirs_of(kind, folder), load_llama(folder)
    for text in odd_texts(KINDS.index(kind)):
        ids = theirs(text).input_ids
        assert ours.encode(text, bos=True, eos=False) == (ids or [ours.bos_id])
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    prompt = theirs("The baker", return_tensors="pt").input_ids
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    expected = reference.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    assert generate(model, ours, "The baker", 20) == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    "kind", ["sentencepiece: no bos", "sentencepiece: loose tokens", "json: any, chat", "json: any, split", "tiktoken"]
)
def test_a_directory_that_is_converted_keeps_its_tokenizer(kind: str, tmp_path: Path, tiny_tokenizer: Path):
    folder = directory(kind, tmp_path / "model", tiny_tokenizer)
    run_convert(folder, tmp_path / "out", "--to", "hf")
    ours, again = (load_llama(path)[1] for path in (folder, tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ours.eos_id == again.eos_id == theirs.eos_token_id
    for text in odd_texts(1, 60):
        ids = ours.encode(text, bos=True, eos=False)
        assert again.encode(text, bos=True, eos=False) == theirs(text).input_ids == ids


def test_an_eos_of_the_config_alone_is_no_token_of_the_converted_file(tmp_path: Path, tiny_tokenizer: Path):
    folder = directory("json: any", tmp_path / "model", tiny_tokenizer)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    stop = load_llama(folder)[1].encode("the", bos=False, eos=False)[-1]
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", eos_token_id=stop)
    ours = load_llama(folder)[1]
    run_convert(folder, tmp_path / "out", "--to", "hf")
    again, theirs = load_llama(tmp_path / "out")[1], transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.eos_id == stop
    for text in ["the baker", "other", *odd_texts(2, 30)]:
        ids = ours.encode(text, bos=True, eos=False)
        assert again.encode(text, bos=True, eos=False) == theirs(text).input_ids == ids
        assert again.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_spaces_that_transformers_cleans_up_are_told(tmp_path: Path, capsys):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, ".": 1, "<s>": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "clean_up_tokenization_spaces": True}
    for cleans, said in ((True, "unlike in transformers"), (False, "")):
        settings["clean_up_tokenization_spaces"] = cleans
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert read_tokenizer(tmp_path / "tokenizer.json").decode([0, 1]) == "a ."
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.decode([0, 1]) == ("a." if cleans else "a .")
        told = capsys.readouterr().err
        assert said in told and bool(told) is cleans


def test_a_unigram_model_without_a_class_is_refused(tmp_path: Path, tiny_tokenizer: Path):
    """transformers cuts a text by its scores then; with Llama's class it makes a BPE of it, as here."""
    how = dict(model_type="unigram", vocab_size=320, hard_vocab_limit=False, byte_fallback=True, minloglevel=2)
    folder = directory("sentencepiece: bos", tmp_path / "model", tiny_tokenizer)
    sentences = iter(SENTENCES * 3)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_prefix=f"{folder}/tokenizer", **how)
    theirs, ours = theirs_of("sentencepiece", folder), load_llama(folder)[1]
    assert all(ours.encode(text, bos=True, eos=False) == theirs(text).input_ids for text in odd_texts(3, 30))
    rewrite(folder / "tokenizer_config.json", tokenizer_class=None)
    refused("tokenizer.model is no BPE model", load_llama, folder)


def test_a_vocabulary_for_other_formats_has_what_was_added(tmp_path: Path, tiny_tokenizer: Path):
    folder = directory("sentencepiece: chat", tmp_path / "model", tiny_tokenizer)
    rewrite(folder / "tokenizer_config.json", add_bos_token=False)
    found = vocabulary_of(load_llama(folder)[1])
    assert found.pieces[300:] == ["<|im_start|>", "<|im_end|>"] == [*found.added] and found.types[300:] == [CONTROL] * 2
    assert (found.bos_id, found.eos_id, found.adds_bos, found.adds_space) == (1, 301, False, True)
    refused("llama2c puts bos before every text", run_convert, folder, tmp_path / "m.bin", "--to", "llama2c")
    rewrite(folder / "tokenizer_config.json", add_bos_token=True)
    refused("added tokens .* <\\|im_start\\|>, <\\|im_end", run_convert, folder, tmp_path / "m.bin", "--to", "llama2c")


@pytest.mark.parametrize(
    ("kind", "normalizers", "text"),
    [
        ("json: any", [], None),
        ("json: any, chat", [], None),
        ("json: any", [{"type": "Lowercase"}], "A "),
        ("json: any", [{"type": "NFKC"}], "A "),
        ("json: Llama, no bos", [], " a"),
    ],
)
def test_a_text_that_other_formats_read_otherwise_is_told(
    kind: str, normalizers: list, text: str | None, tmp_path: Path, tiny_tokenizer: Path, capsys
):
    """GGUF and llama2.c have no steps that rewrite a text. Llama's class puts no space before one."""
    folder = directory(kind, tmp_path / "model", tiny_tokenizer)
    file = json.loads((folder / "tokenizer.json").read_text())
    file["normalizer"]["normalizers"][:0] = normalizers
    (folder / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = load_llama(folder)[1]
    capsys.readouterr()
    vocabulary_of(tokenizer)
    told = capsys.readouterr().err
    assert (told == "") if text is None else (f"'{text}" in told and "becomes other tokens there" in told)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"normalization_rule_name": "identity", "remove_extra_whitespaces": False}, ""),
        ({"normalization_rule_name": "identity"}, "own.model joins runs of spaces before"),
        ({"remove_extra_whitespaces": False}, "own.model rewrites letters before"),
    ],
)
def test_what_a_model_does_before_it_cuts_a_text_is_told(how: dict, words: str, tmp_path: Path, capsys):
    """The first is as Llama's own."""
    vocabulary_of(trained_vocabulary(tmp_path, **how))
    told = capsys.readouterr().err
    assert words in told if words else told == ""


def test_a_gguf_file_says_whether_bos_is_put(tmp_path: Path, tiny_tokenizer: Path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    for kind, adds in (("sentencepiece: no bos", False), ("sentencepiece: bos", True)):
        folder, out = directory(kind, tmp_path / str(adds), tiny_tokenizer), tmp_path / f"{adds}.gguf"
        run_convert(folder, out, "--to", "gguf")
        assert gguf.GGUFReader(out).fields["tokenizer.ggml.add_bos_token"].contents() is adds


def test_a_text_ends_at_eos_unless_told_otherwise(tmp_path: Path, tiny_tokenizer: Path):
    folder = directory("json: any", tmp_path / "model", tiny_tokenizer)
    how = ["--pretrained-model-path", folder, "--prompt", "The baker", "--max_new_tokens", 12]
    how += ["--generated_sentence_low_temp_out", "low.txt", "--generated_sentence_high_temp_out", "high.txt"]

    def text(*more: object) -> str:
        drive_in(tmp_path / "run", *how, *more)
        return (tmp_path / "run/low.txt").read_text(encoding="utf-8")

    model, tokenizer = load_llama(folder)
    prompt = torch.tensor([tokenizer.encode("The baker", bos=True, eos=False)])
    new = model.generate(prompt, 12, temperature=0.0)[0, prompt.shape[1] :].tolist()
    stop = next(id for place, id in enumerate(new) if place > 1 and id not in new[:place])
    rewrite(folder / "generation_config.json", eos_token_id=[stop])
    reference = transformers.LlamaForCausalLM.from_pretrained(folder)
    expected = reference.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    assert len(expected) < prompt.shape[1] + 12 and text() == tokenizer.decode(expected)
    assert generate(load_llama(folder)[0], tokenizer, "The baker", 12) == tokenizer.decode(expected)
    assert text("--ignore_eos") == tokenizer.decode([*prompt[0].tolist(), *new])


def grown(**changes: object) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **changes})


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
MANY = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 300, "pair": []}
MANY |= {"special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}}
TABLE = {"type": "Precompiled", "precompiled_charsmap": "AAAAf////38="}
ABSENT = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], "pair": []}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (grown(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 40}), "its 40 steps may make more than"),
        (grown(decoder={"type": "Sequence", "decoders": [DOUBLED] * 40}), "its 40 steps may make more than"),
        (grown(post_processor=MANY), "it puts more than 256 tokens"),
        (grown(post_processor=MANY | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}), "repeats the text"),
        (grown(normalizer=TABLE), "its table of letters is damaged"),
        (grown(post_processor=ABSENT | {"special_tokens": {}}), "it "),
        (grown(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "it is not a tokenizer"),
        *((grown(added_tokens=value), "it is not a tokenizer") for value in (5, {"a": 1}, "x")),
        *((grown(model=value), "it is not a tokenizer") for value in ([1], None, {"type": "BPE", "vocab": 5})),
    ],
)
def test_a_file_that_asks_for_too_much_is_one_line_and_no_trace(content: str, words: str, tmp_path: Path, capfd):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "a", "tokenizer_class": "PreTrainedTokenizerFast"}')
    refused(f"cannot use .*tokenizer.json: .*{words}", read_tokenizer, tmp_path / "tokenizer.json")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("vocabulary", [[[]], [{}], [[["a"]]], [None, 1]])
def test_a_list_of_odd_pieces_is_one_line(vocabulary: list, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(grown(model={"type": "BPE", "vocab": vocabulary, "merges": []}))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "a", "tokenizer_class": "LlamaTokenizer"}')
    with contextlib.suppress(UserError):
        read_tokenizer(tmp_path / "tokenizer.json")
