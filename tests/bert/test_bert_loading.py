"""Directories in, directories out: names of every age, what is refused and how, and transformers as a reader."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from error_helpers import assert_code_is_never_run, refused  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from small import (  # noqa: E402
    PIECES,
    batch,
    edited_tensors,
    hf_directory,
    hf_model,
    minilm,
    our_directory,
    rewrite_config,
    tensors_of,
)

from bert import heads  # noqa: E402
from bert.config import BertConfig  # noqa: E402
from bert.load import load_bert, load_model, load_tokenizer  # noqa: E402
from bert.model import Bert  # noqa: E402
from bert.names import BERT, DISTILBERT  # noqa: E402
from bert.save import save_pretrained  # noqa: E402
from bert.wordpiece import WordPiece  # noqa: E402
from utils import MAX_MESSAGE, UserError  # noqa: E402

IDS, SEGMENTS, MASK = batch(3, 12)
HEADS_OF_KINDS = {
    "ForPreTraining": heads.BertForPreTraining,
    "ForMaskedLM": heads.BertForMaskedLM,
    "ForNextSentencePrediction": heads.BertForNextSentencePrediction,
    "ForSequenceClassification": lambda encoder: heads.BertForSequenceClassification(encoder, 3),
    "ForTokenClassification": lambda encoder: heads.BertForTokenClassification(encoder, 3),
    "ForQuestionAnswering": heads.BertForQuestionAnswering,
}


@pytest.fixture(scope="module")
def hf() -> transformers.BertModel:
    return hf_model("BertModel")


@pytest.fixture
def folder(tmp_path: Path, hf: transformers.BertModel) -> Path:
    return hf_directory(tmp_path, hf)


def assert_same(one: Bert, other: Bert) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert one.config == other.config


# ------------------------------------------------------------------------------------------- names and formats


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("format", ["safetensors", "zip", "pickle"])
def test_every_way_of_naming_and_storing_loads(folder: Path, prefix: str, is_old: bool, format: str):
    expected, tensors = load_bert(folder), tensors_of(folder)
    if is_old:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, name in old.items():
            tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
        tensors["embeddings.position_ids"] = torch.arange(64)[None]
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if format == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=format == "zip")
    model = load_bert(folder)
    assert_same(model, expected)
    assert not model.training and model.embeddings.norm.weight.requires_grad


def test_safetensors_come_first_and_weights_outlive_their_file(folder: Path):
    expected = load_bert(folder)
    torch.save({}, folder / "pytorch_model.bin")
    loaded = load_bert(folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    assert_same(loaded, expected)


def test_half_precision_weights_become_single_and_nothing_random_is_drawn(folder: Path):
    save_file({name: tensor.half() for name, tensor in tensors_of(folder).items()}, folder / "model.safetensors")
    before = torch.get_rng_state()
    model = load_bert(folder)
    assert torch.equal(before, torch.get_rng_state())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForQuestionAnswering", "ForPreTraining", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_the_encoder_of_a_directory_with_a_head(tmp_path: Path, kind: str, family: str):
    if (family, kind) == ("DistilBert", "ForPreTraining"):
        pytest.skip("transformers has none")
    hf = hf_model(f"{family}{kind}")
    hidden, pooled = load_bert(hf_directory(tmp_path, hf))(IDS, None, MASK)
    theirs = hf.base_model(IDS, attention_mask=MASK)
    torch.testing.assert_close(hidden, theirs.last_hidden_state, atol=1e-4, rtol=0)
    has_pooler = family == "Bert" and kind in ("ForPreTraining", "ForSequenceClassification")
    assert (pooled is not None) == has_pooler


def test_settings_that_a_config_leaves_out_are_those_of_transformers(folder: Path):
    base, distilled = BERT.config({}, has_pooler=True), DISTILBERT.config({}, has_pooler=False)
    assert base == BertConfig() == BertConfig.from_preset("base")
    theirs = transformers.BertConfig()
    assert BERT.config(theirs.to_dict(), has_pooler=True) == base
    assert BERT.config({"hidden_size": 24}, has_pooler=True).hidden_dim == theirs.intermediate_size
    assert DISTILBERT.config(transformers.DistilBertConfig().to_dict(), has_pooler=False) == distilled
    assert (distilled.n_layers, distilled.n_segments, distilled.head_dropout) == (6, 0, 0.2)
    assert BERT.config({"pad_token_id": None}, has_pooler=True).pad_id == 0
    assert BERT.config({"classifier_dropout": None, "hidden_dropout_prob": 0.3}, has_pooler=True).head_dropout == 0.3
    rewrite_config(folder, model_type=None)  # as the oldest files
    load_bert(folder)


# ------------------------------------------------------------------------------------------------ what is refused


def test_every_misfit_is_named_in_a_message_of_bounded_length(folder: Path):
    with edited_tensors(folder) as tensors:
        del tensors["encoder.layer.1.output.dense.weight"]
        tensors["pooler.dense.bias"] = torch.zeros(31)
        tensors["encoder.layer.0.adapter.weight"] = torch.zeros(3)
        tensors["encoder.layer.7.output.dense.bias"] = torch.zeros(32)
        tensors["embeddings.LayerNorm.weight"] = torch.ones(32, dtype=torch.int64)
    message = refused("", load_bert, folder)
    for part in (
        "model.safetensors does not fit its config.json",
        "missing encoder.layer.1.output.dense.weight",
        "pooler.dense.bias is [31], not [32]",
        "unexpected encoder.layer.0.adapter.weight",
        "unexpected encoder.layer.7.output.dense.bias",
        "embeddings.LayerNorm.weight is not a floating-point tensor",
    ):
        assert part in message
    save_file({f"{'x' * 500}.{n}": torch.zeros(1) for n in range(300)}, folder / "model.safetensors")
    assert len(refused("", load_bert, folder)) < MAX_MESSAGE * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(model_type="roberta"), "type 'roberta'; bert and distilbert"),
        (dict(hidden_size=30), "num_attention_heads=4 must divide hidden_size=30"),
        (dict(hidden_size="32"), "hidden_size='32' must be a whole number"),
        (dict(hidden_act="swish"), "hidden_act='swish' must be one of gelu, gelu_new, relu"),
        (dict(num_hidden_layers=3), "missing encoder.layer.2.attention.self.query.weight"),
        (dict(num_hidden_layers=10**6), "but there are only 39 tensors"),
        (dict(vocab_size=10**9), "vocab_size=1000000000, but the largest tensor"),
        (dict(intermediate_size=10**9), "intermediate_size=1000000000, but the largest tensor"),
        (dict(type_vocab_size=2**31 - 1), "type_vocab_size=2147483647, but the largest tensor"),
        (dict(max_position_embeddings=2**20), "max_position_embeddings=1048576, but the largest tensor"),
        (dict(max_position_embeddings=2**31), "max_position_embeddings=2147483648 must be a whole number"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type='relative_key'"),
        (dict(is_decoder=True), "is_decoder=True"),
        (dict(add_cross_attention=True), "add_cross_attention=True"),
        (dict(hidden_dropout_prob=1.5), "hidden_dropout_prob=1.5 must be a number"),
        (dict(layer_norm_eps=0), "layer_norm_eps=0 must be a number"),
        (dict(pad_token_id=300), "pad_token_id=300 must be below vocab_size=300"),
        (dict(model_type=["bert"]), r"type \['bert'\]"),
    ],
)
def test_settings_that_no_model_here_has_are_refused_in_their_words(folder: Path, settings: dict, words: str):
    rewrite_config(folder, **settings)
    refused(words, load_bert, folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"vocab_size": ' + "9" * 10_000 + "}", "\udcff"])
def test_a_damaged_config_is_one_line(folder: Path, text: str):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused("config.json does not hold a JSON object|config.json line 1: not UTF-8", load_bert, folder)


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path):
    refused("is not a folder; name one", load_bert, folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    refused("neither model.safetensors nor pytorch_model.bin", load_bert, folder)
    torch.save([torch.zeros(3)], folder / "pytorch_model.bin")
    refused("does not hold a state dict", load_bert, folder)
    (folder / "config.json").unlink()
    refused("config.json does not exist", load_bert, folder)


def test_without_safetensors_one_sentence_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("model.safetensors needs a package: pip install safetensors", load_bert, folder)


def test_damaged_weights_load_never_with_another_error(folder: Path):
    path = folder / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(0)
    for trial in range(60):
        if trial < 30:
            damaged = whole[: rng.randrange(len(whole))]
        else:
            damaged = bytearray(whole)
            for _ in range(5):
                damaged[rng.randrange(2000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_bert(folder)
        except UserError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        else:
            assert trial >= 30
    path.write_bytes(b"<html>")
    refused("it is not a safetensors file, or it is truncated or damaged", load_bert, folder)
    path.unlink()
    path.mkdir()
    refused("model.safetensors", load_bert, folder)


def test_code_in_weights_is_never_run(folder: Path):
    assert_code_is_never_run(folder, load_bert)


def test_numbers_that_are_none_and_names_that_stand_for_the_same(folder: Path):
    with edited_tensors(folder) as tensors:
        tensors["pooler.dense.bias"][3] = float("nan")
    refused("not all numbers are finite in pooler.dense.bias$", load_bert, folder)
    tensors = {**tensors, "pooler.dense.bias": torch.zeros(32), "bert.pooler.dense.bias": torch.zeros(32)}
    save_file(tensors, folder / "model.safetensors")
    load_bert(folder)
    for other in (torch.ones(32), torch.zeros(3)):
        save_file({**tensors, "bert.pooler.dense.bias": other}, folder / "model.safetensors")
        refused("bert.pooler.dense.bias and pooler.dense.bias are names of the same", load_bert, folder)


def test_distilbert_is_refused_in_its_own_words(tmp_path: Path):
    hf_directory(tmp_path, hf_model("DistilBertForMaskedLM"))
    with edited_tensors(tmp_path) as tensors:
        del tensors["distilbert.transformer.layer.1.ffn.lin2.bias"]
        tensors["distilbert.transformer.layer.1.attention.q_lin.bias"] = torch.zeros(3)
    words = r"missing transformer.layer.1.ffn.lin2.bias, transformer.layer.1.attention.q_lin.bias is \[3\], not \[32\]"
    refused(words, load_bert, tmp_path)
    rewrite_config(tmp_path, n_heads=5)
    refused("n_heads=5 must divide dim=32", load_bert, tmp_path)


# ---------------------------------------------------------------------------------------------------------- heads


def test_a_head_that_a_directory_does_not_hold_is_new(folder: Path):
    model, new = load_model(folder, heads.BertForPreTraining)
    assert new == ["masked_lm", "next_sentence"] and not model.training
    assert_same(model.encoder, load_bert(folder))
    assert model.masked_lm.decoder.weight is model.encoder.embeddings.tokens.weight
    refused("no head that is known here: its config.json names 'BertModel'", load_model, folder)
    unknown = ["BertLMHeadModel"], ["AlbertForMaskedLM"], [], [None], ["Bertfirst_or_pooled"]
    for named in (*unknown, None, "BertForMaskedLM"):
        rewrite_config(folder, architectures=named)
        refused("no head that is known here", load_model, folder)


def test_parts_of_a_head_are_taken_where_they_are(tmp_path: Path):
    hf_directory(tmp_path, hf_model("BertForPreTraining"))
    torch.manual_seed(3)
    plain, new = load_model(tmp_path, lambda encoder: heads.BertForPreTraining(encoder, plain=True))
    assert new == ["masked_lm"]
    assert torch.equal(plain.next_sentence.weight, tensors_of(tmp_path)["cls.seq_relationship.weight"])
    _, new = load_model(tmp_path, lambda encoder: heads.BertForSequenceClassification(encoder, 5))
    assert new == ["classifier"]
    with edited_tensors(tmp_path) as tensors:
        del tensors["cls.predictions.transform.dense.bias"]
        tensors["cls.seq_relationship.bias"] = torch.zeros(3)
    words = "fit its head: missing cls.predictions.transform.dense.bias, cls.seq_relationship.bias is .3., not"
    refused(words, load_model, tmp_path)
    load_bert(tmp_path)


def test_a_decoder_that_is_stored_must_be_the_embeddings(tmp_path: Path):
    hf_directory(tmp_path, hf_model("BertForMaskedLM"))
    with edited_tensors(tmp_path) as twice:
        embeddings = twice["bert.embeddings.word_embeddings.weight"]
        twice["cls.predictions.decoder.weight"] = embeddings.clone()
        twice["cls.predictions.decoder.bias"] = twice["cls.predictions.bias"].clone()
    assert load_model(tmp_path)[1] == []
    with edited_tensors(tmp_path) as twice:
        twice["cls.predictions.decoder.weight"] += 1
    refused("the decoder of masked tokens differs from the token embeddings", load_model, tmp_path)
    load_bert(tmp_path)
    twice["cls.predictions.decoder.weight"] = embeddings[:, :3].contiguous()
    save_file(twice, tmp_path / "model.safetensors")
    refused(r"cls.predictions.decoder.weight is \[300, 3\]", load_model, tmp_path)
    half = {name: tensor.half() for name, tensor in {**twice, "cls.predictions.decoder.weight": embeddings}.items()}
    save_file(half, tmp_path / "model.safetensors")
    assert load_model(tmp_path)[1] == []


def test_a_damaged_head_is_found(tmp_path: Path):
    hf_directory(tmp_path, hf_model("BertForSequenceClassification", num_labels=3))
    with edited_tensors(tmp_path) as tensors:
        tensors["classifier.bias"][1] = float("inf")
    refused("not all numbers are finite in classifier.bias$", load_model, tmp_path)
    rewrite_config(tmp_path, id2label=None)
    refused(r"classifier.weight is \[3, 32\], not \[2, 32\]", load_model, tmp_path)


# --------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("is_distilled", [False, True])
@pytest.mark.parametrize("kind", [None, *HEADS_OF_KINDS])
def test_transformers_reads_what_is_written_and_so_do_we(
    tmp_path: Path, kind: str | None, is_distilled: bool, positions: str
):
    if is_distilled and kind in ("ForPreTraining", "ForNextSentencePrediction"):
        pytest.skip("transformers has none")
    torch.manual_seed(0)
    shape = dict(n_segments=0, has_pooler=False) if is_distilled else {}
    config = BertConfig.from_preset(
        "mini", positions=positions, pad_id=3, head_dropout=0.25, activation="relu", **shape
    )
    encoder = Bert(config)
    model = (HEADS_OF_KINDS[kind](encoder) if kind else encoder).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    save_pretrained(tmp_path / "made", model)
    again = load_model(tmp_path / "made") if kind else (load_bert(tmp_path / "made"), [])
    name = f"{'DistilBert' if is_distilled else 'Bert'}{kind or 'Model'}"
    hf, report = getattr(transformers, name).from_pretrained(tmp_path / "made", output_loading_info=True)
    assert again[1] == [] and not report["missing_keys"]
    assert all("pooler" in key for key in report["unexpected_keys"])  # some classes there leave it out
    assert (again[0].encoder if kind else again[0]).config == config
    extra = {} if is_distilled else {"token_type_ids": SEGMENTS}
    outputs = (model(IDS, SEGMENTS, MASK), again[0](IDS, SEGMENTS, MASK))
    ours, ours_again = (output if isinstance(output, tuple) else (output,) for output in outputs)
    theirs = [*hf.eval()(IDS, attention_mask=MASK, **extra).values()]
    theirs = theirs[::-1] if kind == "ForPreTraining" else theirs
    for one, other, third in zip(ours, ours_again, [*theirs, None], strict=False):
        assert one is other is third is None or torch.equal(one, other)
        if third is not None:
            dim = 1 if kind == "ForQuestionAnswering" else -1
            torch.testing.assert_close(one, third.log_softmax(dim) if kind else third, atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "made/config.json").read_text())["architectures"] == [name]
    with safe_open(tmp_path / "made/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without which older versions of transformers read nothing
        inner = [key for key in file.keys() if "embeddings" in key or "layer." in key]
        assert all(key.startswith(("bert.", "distilbert.")) == bool(kind) for key in inner) and inner


def test_what_transformers_has_no_class_for_is_not_written(tmp_path: Path):
    bare = Bert(BertConfig.from_preset("mini", has_pooler=False))
    for words, model in (
        ("no place for masked_lm.weight", heads.BertForMaskedLM(bare, plain=True)),
        ("no BertForPreTraining on an encoder without a pooler", heads.BertForPreTraining(bare)),
        ("no BertForNextSentencePrediction on an encoder without a", heads.BertForNextSentencePrediction(bare)),
        ("no place for transform.weight", heads.BertForSequenceClassification(bare, 2)),
    ):
        refused(words, save_pretrained, tmp_path / "x", model)
    assert not (tmp_path / "x").exists()
    odd = Bert(BertConfig.from_preset("mini", has_pooler=False, n_segments=0, layer_norm_eps=1e-3)).eval()
    refused("without segments", save_pretrained, tmp_path / "x", odd)


@pytest.mark.parametrize("lower_case", [True, False])
def test_the_tokenizer_goes_along(tmp_path: Path, lower_case: bool):
    tokenizer = WordPiece(PIECES, lower_case)
    save_pretrained(tmp_path, Bert(BertConfig.from_preset("mini")), tokenizer)
    assert (tmp_path / "vocab.txt").read_bytes() == "".join(f"{piece}\n" for piece in PIECES).encode()
    again, hf = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "The Bad É film!"
    assert again.encode(text) == tokenizer.encode(text) == hf(text).input_ids and again.lower_case is lower_case
    rewrite_config(tmp_path, vocab_size=20)
    refused(f"{len(PIECES)} pieces in vocab.txt, but a vocab_size of 20", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("7")
    refused("tokenizer_config.json does not hold a JSON object", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    rewrite_config(tmp_path, vocab_size=len(PIECES))
    assert load_tokenizer(tmp_path).lower_case


def test_the_real_minilm_goes_out_and_in(tmp_path: Path):
    model = load_bert(minilm())
    save_pretrained(tmp_path, model, load_tokenizer(minilm()))
    assert_same(load_bert(tmp_path), model)
    assert len(load_tokenizer(tmp_path)) == model.config.vocab_size == 30522


@pytest.mark.parametrize("said", [{}, {"pad_token_id": None}])
def test_padding_has_one_id_and_is_token_0_for_both_if_the_config_does_not_name_it(tmp_path: Path, said: dict):
    our_directory(tmp_path)
    rewrite_config(tmp_path, pad_token_id=2)
    refused("is piece 0 of vocab.txt, but by config.json it is token 2", load_tokenizer, tmp_path)
    path = tmp_path / "config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "pad_token_id"}
    path.write_text(json.dumps(settings | said))
    assert load_tokenizer(tmp_path).pad_id == load_bert(tmp_path).config.pad_id == 0
    pieces = (tmp_path / "vocab.txt").read_text().split("\n")
    (tmp_path / "vocab.txt").write_text("\n".join([pieces[1], pieces[0], *pieces[2:]]))
    refused(r"\[PAD\] is piece 1 of vocab.txt, but by config.json it is token 0", load_tokenizer, tmp_path)


NO_CHINESE, CASED_BARE = {"tokenize_chinese_chars": False}, {"do_lower_case": False, "strip_accents": True}


@pytest.mark.parametrize("said", [{"strip_accents": False}, NO_CHINESE, {"do_lower_case": None}, CASED_BARE])
def test_what_the_directory_says_of_its_tokenizer_is_done_and_written_again(tmp_path: Path, said: dict):
    pieces = [*PIECES, "u", "##b", "##e", "##r", "\u00fc", "U", "\u00dc", "\u96e8", "##\u96e8", "##u"]
    tokenizer, text = WordPiece(pieces), "\u00fcber \u00dcber U \u96e8\u96e8"
    shape = dict(vocab_size=len(pieces))
    save_pretrained(tmp_path, Bert(BertConfig.from_preset("mini", **shape)), tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | said
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, told = load_tokenizer(tmp_path), {name: value for name, value in said.items() if value is not None}
    hf = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), **told)
    assert ours.encode(text) == hf(text).input_ids
    assert (ours.encode(text) == tokenizer.encode(text)) == (not told)
    assert WordPiece.from_bytes(ours.to_bytes()).encode(text) == ours.encode(text)
    ours.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == settings | {"do_lower_case": ours.lower_case}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"strip_accents": "no"}))
    refused("strip_accents is 'no'; it must be true, false or null", load_tokenizer, tmp_path)
