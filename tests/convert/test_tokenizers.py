"""`tokenizer.json` as transformers reads it, SentencePiece models as such files, padding, and the driver with these."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from conftest import ROOT, SENTENCES, asset, drive_in, random_llama, save_checkpoint  # noqa: E402
from conversions import trained_vocabulary  # noqa: E402
from error_helpers import TEXT_FLAGS, refused  # noqa: E402
from sentencepiece import sentencepiece_model_pb2  # noqa: E402
from shapes import bytes_of_text, greedy, hf_llama, rewrite, save  # noqa: E402

from convert.directory import MOST_SETTINGS  # noqa: E402
from convert.hugging_face import write  # noqa: E402
from convert.merges import merges  # noqa: E402
from convert.tokenizer import JsonTokenizer  # noqa: E402
from convert.vocabulary import NORMAL, Vocabulary, as_json, files, read_vocabulary, rewriting_rules, vocabulary_of  # noqa: E402
from engine.families import load_llama  # noqa: E402
from engine.inference import TextStream  # noqa: E402
from engine.runs import load_classifier  # noqa: E402
from tokenizer import NO_PIECE, Tokenizer  # noqa: E402
from utils import prompt_suffix  # noqa: E402

ODD_TEXTS = (*SENTENCES, "naïve café, 北京 costs 3.50?", " two  spaces ", "tabs\tand\nnew lines\n", "", "a")


def tokenizer_of(folder: Path, **how) -> JsonTokenizer:
    return JsonTokenizer.from_file(folder / "tokenizer.json", **how)


@pytest.fixture(params=[False, True], ids=["no bos", "bos"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return bytes_of_text(save(tmp_path / "model", hf_llama("smollm")), begins=request.param)


# ---------------------------------------------------------------------------------------------- tokenizer.json


def test_ids_and_texts_are_those_of_transformers(folder: Path):
    ours, theirs = tokenizer_of(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_id, ours.n_words) == (1, 0, len(theirs))
    for text in (*ODD_TEXTS[:-2], "a", "an <|endoftext|> inside"):
        ids = theirs(text).input_ids
        assert ours.encode(text, bos=True, eos=False) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("", bos=True, eos=False) == [1]  # a model cannot read nothing at all
    assert ours.encode_batch(list(ODD_TEXTS), True, True) == [ours.encode(text, True, True) for text in ODD_TEXTS]
    cut = tokenizer_of(folder, max_len=3).encode(ODD_TEXTS[0], bos=True, eos=True)
    assert cut == ours.encode(ODD_TEXTS[0], bos=True, eos=False)[: 3 + len(ours.begins)] + [0]
    assert ours.decode([*ours.encode_all("a film"), 5000]) == "a film"


def test_what_follows_a_text_is_the_tail_of_both(folder: Path):
    ours = tokenizer_of(folder)
    for text in ODD_TEXTS[:10]:
        for suffix in ("Is this movie good or bad? This movie is ", "yes"):
            assert ours.encode_all(text) + ours.encode_next(suffix) == ours.encode_all(f"{text} {suffix}")


def test_what_the_files_beside_it_say_of_special_tokens(folder: Path):
    beside = folder / "tokenizer_config.json"
    rewrite(folder / "config.json", eos_token_id=None)
    rewrite(beside, bos_token={"content": "<|endoftext|>"}, eos_token=None, add_bos_token=True)
    ours = tokenizer_of(folder)
    assert (ours.bos_id, ours.eos_id) == (0, 0)
    rewrite(beside, bos_token="<|endoftext|>")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode("a", True, False) == theirs("a").input_ids  # the file decides, and not add_bos_token
    beside.unlink()
    rewrite(folder / "config.json", bos_token_id=1, eos_token_id=[0, 1])
    ours = tokenizer_of(folder)
    assert (ours.bos_id, ours.eos_id) == (1, 0)
    rewrite(folder / "config.json", bos_token_id=None, eos_token_id=None)
    refused("names a bos or an eos token", tokenizer_of, folder)


def test_neither_cut_nor_padded_as_its_file_says(folder: Path):
    """Many files still say how their last training batch was made."""
    file = folder / "tokenizer.json"
    plain = tokenizer_of(folder)
    library = tokenizers.Tokenizer.from_file(str(file))
    library.enable_truncation(4)
    library.enable_padding(length=50)
    library.save(str(file))
    assert tokenizer_of(folder).encode_all(ODD_TEXTS[0]) == plain.encode_all(ODD_TEXTS[0])
    batch = (["a", ODD_TEXTS[0]], True, True)
    assert tokenizer_of(folder).encode_batch(*batch) == plain.encode_batch(*batch)


def test_saved_and_opened_again_it_is_the_same(folder: Path):
    ours = tokenizer_of(folder, max_len=5)
    again = JsonTokenizer.from_bytes(ours.to_bytes(), 5)
    assert again.encode(ODD_TEXTS[0], True, True) == ours.encode(ODD_TEXTS[0], True, True)
    for damaged in (b"{", b"{}", b'{"tokenizer": 3, "special": {}}', b'{"tokenizer": "{}", "special": {}}'):
        refused("", JsonTokenizer.from_bytes, damaged)


NEGATIVE = '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'


@pytest.mark.parametrize("content", ["", "{}", "[" * 10_000, NEGATIVE, "\udcff"])
def test_what_is_no_tokenizer_is_one_line(content: str, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refused("tokenizer.json", tokenizer_of, tmp_path)


def test_what_the_library_gives_up_with_is_one_line_and_an_interrupt_goes_on(folder: Path):
    """Code in Rust panics with an exception that is no `Exception`."""

    class Panic(BaseException):
        pass

    def give_up(*_: object, **__: object) -> None:
        raise error

    ours = tokenizer_of(folder)
    ours.tokenizer = SimpleNamespace(encode=give_up, encode_batch=give_up, decode=give_up)
    for use in (lambda: ours.encode_all("a"), lambda: ours.encode_batch(["a"], True, True), lambda: ours.decode([1])):
        error: BaseException = Panic("index out of\nbounds")
        refused("cannot use .*tokenizer.json: it cannot (en|de)code every", use)
        error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            use()


def test_a_settings_file_of_absurd_size_is_not_read(folder: Path):
    with open(folder / "tokenizer_config.json", "ab") as file:
        file.truncate(MOST_SETTINGS + 1)
    refused("tokenizer_config.json has 8388609 bytes", tokenizer_of, folder)


def test_without_the_library_one_sentence_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused("tokenizer.json needs the package tokenizers: pip install tokenizers", tokenizer_of, folder)


# -------------------------------------------------------------------------------------------------- SentencePiece


def test_a_sentencepiece_model_as_tokenizer_json(tiny_tokenizer: Path, tmp_path: Path):
    """Whose normalizer is SentencePiece's own, with a table of rules."""
    model, ours = random_llama(attention="causal"), Tokenizer(tokenizer_model=tiny_tokenizer)
    write(tmp_path / "out", model.state_dict(), model.config, ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*ODD_TEXTS[:-2], "ﬁ ① Å", "a   b"):
        ids = ours.encode(text, bos=True, eos=False)
        assert theirs(text).input_ids == ids == tokenizer_of(tmp_path / "out").encode(text, bos=True, eos=False)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        assert tokenizer_of(tmp_path / "out").decode([*ids, ours.eos_id]) == ours.decode(ids)
    assert (tmp_path / "out/tokenizer.model").read_bytes() == ours.to_bytes()
    question = prompt_suffix(["bad", "good"])
    assert tokenizer_of(tmp_path / "out").encode_next(question) == ours.encode_next(question)


def test_a_stream_of_byte_tokens_prints_a_text_once(tiny_tokenizer: Path, tmp_path: Path, capsys):
    """Bytes in a row that are no text become others from the first of them on."""
    model, plain = random_llama(attention="causal"), Tokenizer(tokenizer_model=tiny_tokenizer)
    write(tmp_path / "out", model.state_dict(), model.config, plain)
    rng = random.Random(0)
    for tokenizer in (plain, tokenizer_of(tmp_path / "out")):
        for _ in range(100):
            ids = [1, *(rng.choice([rng.randrange(3, 259), rng.randrange(259, 300)]) for _ in range(10))]
            stream = TextStream(tokenizer, ids[:2])
            for id in ids[2:]:
                stream(torch.tensor([[id]]))
            assert capsys.readouterr().out == stream.shown
            assert tokenizer.decode(ids).startswith(stream.shown)


def test_pairs_are_merged_in_the_order_of_scores_and_never_to_a_control_piece():
    pieces, types = ["<unk>", "<s>", "<", "s", ">", "s>", "<s"], [2, 3, 1, 1, 1, 1, 1]
    vocabulary = Vocabulary(pieces, [0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0], types, 0, 1, 1, False)
    assert merges(vocabulary.scored(NORMAL)) == [("<", "s"), ("s", ">")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            lambda model: setattr(model.pieces[-100], "score", model.pieces[270].score),
            "the pieces .* have the same score",
        ),
        (lambda model: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True), "the space before a word"),
        (lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False), "the space before a word"),
    ],
    ids=["equal scores", "spaces behind words", "spaces as they are"],
)
def test_what_a_list_of_merges_cannot_say_is_refused(changes: Callable, words: str, tmp_path: Path):
    """SentencePiece itself merges the first of two equal pieces in a text: no order of them says that."""
    own = trained_vocabulary(tmp_path, vocab_size=400)
    files(own)
    model = sentencepiece_model_pb2.ModelProto.FromString(own.to_bytes())
    changes(model)
    refused(words, files, Tokenizer.from_bytes(model.SerializeToString()))


# Line breaks, spaces of many kinds, marks that are the same letter in two ways, letters that are no piece.
PARTS = [
    *" \n\r\t\u00a0\u3000\u2028\u200b\x0b\ufeff\u2581ae}",
    "  ",
    "the",
    "e\u0301",
    "\uff21",
    "\u6f22",
    "\U0001f600",
    "<0x0A>",
]


@pytest.mark.parametrize("name", ["minllama1M.model", "tok512.model", "tokenizer.model"])
def test_a_tokenizer_json_cuts_every_text_as_its_model_does(name: str, request: pytest.FixtureRequest):
    """The third is Llama's own, with one score for its pieces of two to sixteen spaces; the second keeps lines."""
    bundled = ROOT / "checkpoints" / name
    own = Tokenizer(tokenizer_model=bundled if bundled.exists() else asset(request.getfixturevalue("assets"), name))
    there = tokenizers.Tokenizer.from_str(files(own)["tokenizer.json"].decode())
    rng = random.Random(0)
    texts = ["".join(rng.choices(PARTS, k=rng.randrange(1, 8))) for _ in range(2000)]
    texts += [before + " " * count + after for count in range(1, 100) for before in ("", "a") for after in ("", "the")]
    for text in texts:
        assert there.encode(text, add_special_tokens=False).ids == own.encode_all(text), repr(text)


def test_runs_of_spaces_may_have_one_score_where_every_run_is_cut_alike(tmp_path: Path):
    """Of every set of lengths: it is refused where SentencePiece itself cuts some run in another way."""
    model = sentencepiece_model_pb2.ModelProto.FromString(trained_vocabulary(tmp_path, vocab_size=400).to_bytes())
    model.normalizer_spec.remove_extra_whitespaces = False
    refused_sets = []
    for lengths in ((2, *others) for count in (1, 2, 3) for others in combinations(range(3, 9), count)):
        for number, length in enumerate(lengths):
            model.pieces[300 + number].piece, model.pieces[300 + number].score = "\u2581" * length, -1e6
        own = Tokenizer.from_bytes(model.SerializeToString())
        content = as_json(read_vocabulary(own.sp_model, "own.model"), [])
        there = tokenizers.Tokenizer.from_str(json.dumps(content))
        runs = (" " * length for length in range(1, 63))
        if any(there.encode(run, add_special_tokens=False).ids != own.encode_all(run) for run in runs):
            refused_sets.append(lengths)
            refused("have the same score", files, own)
        else:
            files(own)
    assert (2, 3) not in refused_sets and len(refused_sets) > 3
    for number, piece in enumerate(("\u2581\u2581", "\u2581" * 3)):
        model.pieces[300 + number].piece = piece
    files(Tokenizer.from_bytes(model.SerializeToString()))
    model.pieces[310].piece = "\u2581\u2581a"  # merged before they are, from parts of a run
    refused("have the same score", files, Tokenizer.from_bytes(model.SerializeToString()))


def test_pieces_that_are_never_cut_are_refused(tmp_path: Path):
    """Others cut a text at them by rules of their own."""
    own = trained_vocabulary(tmp_path, vocab_size=400, user_defined_symbols=["<film>"])
    refused("own.model has pieces that are never cut, as '<film>'", vocabulary_of, own)


def test_a_directory_may_have_more_embeddings_than_pieces(tiny_tokenizer: Path, tmp_path: Path, capfd):
    model, tokenizer = random_llama(attention="causal", vocab_size=320), Tokenizer(tokenizer_model=tiny_tokenizer)
    write(tmp_path / "out", model.state_dict(), model.config, tokenizer)
    llama, loaded = load_llama(tmp_path / "out", tmp_path / "out/tokenizer.model")
    assert "has a vocabulary of 320, but" in capfd.readouterr().err
    assert loaded.decode([*tokenizer.encode("a film", True, False), 310]) == "a film"
    checkpoint = save_checkpoint(tmp_path / "m.pt", model)
    refused("300 pieces", load_llama, checkpoint, tiny_tokenizer)
    few = random_llama(attention="causal", vocab_size=290)
    write(tmp_path / "few", few.state_dict(), few.config)
    refused("vocabulary of 290, but .* has 300 pieces", load_llama, tmp_path / "few", tiny_tokenizer)


# -------------------------------------------------------------------------------------------------------- padding


def test_a_sentence_that_ends_in_id_3_is_read_to_its_end(folder: Path, tmp_path: Path, films: dict[str, Path]):
    """Id 3 is padding in Llama's own vocabulary, and a letter in this one."""
    ours = tokenizer_of(folder)
    letter = ours.decode([3])
    assert ours.encode_all(letter) == [3] and ours.pad_id == NO_PIECE
    llama, _ = load_llama(folder, folder / "tokenizer.json")
    batch = [ours.encode(text, True, False) for text in (f"a film{letter}{letter}", "a film", SENTENCES[3])]
    longest = max(map(len, batch))
    padded = torch.tensor([ids + [NO_PIECE] * (longest - len(ids)) for ids in batch])
    from classifier import read_last

    alone = torch.cat([read_last(llama, torch.tensor([ids]), ours.pad_id) for ids in batch])
    torch.testing.assert_close(read_last(llama, padded, ours.pad_id), alone, atol=1e-5, rtol=0)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)  # the letters count


def test_a_vocabulary_without_bytes_has_padding_of_its_own(tmp_path: Path):
    assert trained_vocabulary(tmp_path, vocab_size=120, byte_fallback=False).pad_id == NO_PIECE


# ------------------------------------------------------------------------------------------------------ the driver


def flags(folder: Path, option: str, films: dict[str, Path]) -> list[object]:
    word = {"prompt": "prompting", "finetune": "finetuning"}[option]
    named = ["--option", option, "--pretrained-model-path", folder, "--label-names", films["label_names"]]
    named += [item for split in ("train", "dev", "test") for item in (f"--{split}", films[split])]
    return [*named, "--dev_out", f"x-dev-{word}-output.txt", "--test_out", f"x-test-{word}-output.txt"]


def test_generate_continues_as_transformers_does(folder: Path, tmp_path: Path):
    theirs, tokenizer = hf_llama("smollm"), transformers.AutoTokenizer.from_pretrained(folder)
    how = ("--prompt", "The baker", "--max_new_tokens", 30, *TEXT_FLAGS)
    printed = drive_in(tmp_path / "run", "--pretrained-model-path", folder, *how)
    assert f"load model from {folder} (attention: causal)" in printed
    ids = greedy(theirs, tokenizer("The baker").input_ids, 30)
    text = (tmp_path / "run/generated-sentence-temp-0.txt").read_text(encoding="utf-8")
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("shape", ["tinyllama", "llama3", "linear"])
def test_kernels_generate_what_the_page_does(shape: str, tmp_path: Path):
    """With an output matrix of its own, and with scaled angles."""
    folder = bytes_of_text(save(tmp_path / "model", hf_llama(shape)))
    texts = []
    for kernels in ("plain", "auto"):
        how = ("--prompt", "The baker", "--max_new_tokens", 60, "--kernels", kernels, *TEXT_FLAGS)
        drive_in(tmp_path / kernels, "--pretrained-model-path", folder, *how)
        texts.append((tmp_path / kernels / "generated-sentence-temp-0.txt").read_bytes())
    assert texts[0] == texts[1]


def test_prompt_scores_labels_as_transformers_does(folder: Path, tmp_path: Path, films: dict[str, Path]):
    theirs, tokenizer = hf_llama("smollm"), transformers.AutoTokenizer.from_pretrained(folder)
    drive_in(tmp_path / "run", *flags(folder, "prompt", films))
    words = [tokenizer(name, add_special_tokens=False).input_ids for name in ("bad", "good")]
    lines = (tmp_path / "run/x-dev-prompting-output.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 10
    for line in lines:
        label, text = line.split(" ||| ", 1)
        ids = tokenizer(text).input_ids
        with torch.no_grad():
            after = F.log_softmax(theirs(torch.tensor([ids])).logits[0, -1], dim=-1)
        scores = [float(after[ids].sum()) for ids in words]
        assert int(label) == scores.index(max(scores))


def test_finetune_predicts_from_transformers_states(folder: Path, tmp_path: Path, films: dict[str, Path]):
    run = tmp_path / "run"
    drive_in(run, *flags(folder, "finetune", films), "--epochs", 1, "--lr", 1e-4, "--model_out", "m.pt")
    model, about = load_classifier(run / "m.pt")
    assert isinstance(about.tokenizer, JsonTokenizer) and model.pad_id == NO_PIECE
    theirs = hf_llama("smollm")
    from convert.names import hugging_face_state

    trained = hugging_face_state(model.llama.state_dict(), model.llama.config)
    theirs.load_state_dict(trained)
    lines = (run / "x-dev-finetuning-output.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        label, text = line.split(" ||| ", 1)
        ids = torch.tensor([about.tokenizer.encode(text, True, False)])
        with torch.no_grad():
            last = theirs.model(ids).last_hidden_state[:, -1]
            assert int(model.classifier_head(last).argmax()) == int(label)
    (run / "in.txt").write_text("".join(line.split(" ||| ", 1)[1] + "\n" for line in lines), encoding="utf-8")
    printed = drive_in(run, "--option", "predict", "--model", "m.pt", "--input", "in.txt")
    assert printed.splitlines() == lines


def test_without_a_tokenizer_the_model_loads_and_the_driver_asks_for_one(tmp_path: Path, tiny_tokenizer: Path):
    folder = save(tmp_path / "model", hf_llama())
    given = tmp_path / "run", "--pretrained-model-path", folder
    refused("holds no tokenizer.model and no tokenizer.json; name one with --tokenizer", drive_in, *given)
    drive_in(*given, "--tokenizer", tiny_tokenizer, "--max_new_tokens", 3)
    refused("config.json does not exist", drive_in, tmp_path / "run", "--pretrained-model-path", tmp_path)
    how = ("--tokenizer", tiny_tokenizer, "--generated_sentence_low_temp_out", folder / "config.json")
    refused("config.json of --pretrained-model-path", drive_in, *given, *how)


def test_perplexity_is_that_of_transformers(folder: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES[:4]), encoding="utf-8")
    how = "--option", "perplexity", "--pretrained-model-path", folder, "--input", tmp_path / "text.txt"
    printed = drive_in(tmp_path / "run", *how)
    ids = [1, *tokenizer_of(folder).encode_all("\n".join(SENTENCES[:4]))]
    assert len(ids) <= 129
    with torch.no_grad():
        logits = hf_llama("smollm")(torch.tensor([ids[:-1]])).logits[0]
    nats = F.cross_entropy(logits, torch.tensor(ids[1:])).item()
    assert f"nats a token :: {nats:.4f}" in printed, json.dumps(printed)


def test_a_field_of_another_kind_is_skipped_as_sentencepiece_does(tiny_tokenizer: Path):
    content = tiny_tokenizer.read_bytes()
    damaged = content + b"\x18\x01"  # the number of the rules' field, and 1 in the place of a message
    one, other = (Tokenizer.from_bytes(each, None, "x").sp_model for each in (content, damaged))
    assert one.encode("a b") == other.encode("a b")
    assert rewriting_rules(damaged) == rewriting_rules(content) != b""
