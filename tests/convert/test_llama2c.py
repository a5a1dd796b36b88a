"""llama2.c's files: read back by their documented layout, run by its own `run.c` where that is at hand, read again."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_llama, save_checkpoint
from conversions import BUNDLED, assert_same_weights, run_convert, vocabulary_in
from error_helpers import refused, snapshot

from convert import llama2c
from convert.llama2c import MAGIC
from convert.vocabulary import UNUSED, read_vocabulary
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer

RUN_C_PROMPTS = ("The lighthouse keeper", "I laughed twice, once by", "naïve café, 北京", "Is this movie good?")


def version_1(model: Llama) -> bytes:
    """A file of version 1, written out as llama2.c's `export.py` orders it."""
    config, state = model.config, model.state_dict()
    shape = (config.dim, config.hidden_dim, config.n_layers, config.n_heads, config.n_kv_heads)
    header = struct.pack("<Ii7iB", 0x616B3432, 1, *shape, config.vocab_size, config.max_seq_len, config.tied)
    names = [f"layers.{layer}.{norm}" for norm in ("attention_norm", "ffn_norm") for layer in range(config.n_layers)]
    names += ["norm", "tok_embeddings"]
    parts = [f"attention.compute_{name}" for name in ("query", "key", "value", "output")]
    parts += [f"feed_forward.w{number}" for number in (1, 2, 3)]
    names += [f"layers.{layer}.{part}" for part in parts for layer in range(config.n_layers)]
    names += [] if config.tied else ["output"]
    return header.ljust(256, b"\0") + b"".join(state[f"{name}.weight"].numpy().tobytes() for name in names)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_what_is_read_is_what_was_written(version: int, tied: bool, tmp_path: Path):
    model = random_llama(attention="causal", hidden_dim=40, tied=tied)
    content = version_1(model) if version else b"".join(llama2c.content_of(model.state_dict(), model.config))
    (tmp_path / "m.bin").write_bytes(content)
    again = llama2c.load_llama2c(tmp_path / "m.bin")
    fixed = ("multiple_of", "dropout")
    assert {**vars(again.config), **dict.fromkeys(fixed)} == {**vars(model.config), **dict.fromkeys(fixed)}
    assert_same_weights(model, again)
    assert not llama2c.load_llama2c(tmp_path / "m.bin", "bidirectional").config.is_causal


def test_a_tokenizer_read_back(tiny_tokenizer: Path):
    model = Tokenizer(tokenizer_model=tiny_tokenizer).sp_model
    vocabulary = read_vocabulary(model, tiny_tokenizer).filled(305)
    raw = b"".join(llama2c.content_of_tokenizer(llama2c.pieces_of(vocabulary), vocabulary.scores))
    (longest,), at, read = struct.unpack_from("<i", raw), 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        read.append((raw[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    assert longest == max(len(piece.encode()) for piece, _ in read) and len(read) == 305
    assert [piece for piece, _ in read[:4]] == ["<unk>", "\n<s>\n", "\n</s>\n", "<0x00>"]
    for token in range(259, 300):
        assert read[token] == (model.id_to_piece(token).replace("\u2581", " "), np.float32(model.get_score(token)))
    assert all(score < -1e10 for _, score in read[300:])  # which run.c never merges to
    assert vocabulary.types[300:] == [UNUSED] * 5


def test_vocabularies_that_run_c_would_read_otherwise(tiny_tokenizer: Path):
    vocabulary = vocabulary_in(tiny_tokenizer)
    first, *others = vocabulary.types
    for changed in (vocabulary._replace(bos_id=2), vocabulary._replace(types=[*others, first])):
        refused("byte b for the token b . 3; this is another order", llama2c.pieces_of, changed)
    pieces = [piece.replace("\u2581", "_") for piece in vocabulary.pieces]
    for changed in (vocabulary._replace(adds_space=False), vocabulary._replace(pieces=pieces)):
        refused("puts a space before every text; this tokenizer does not", llama2c.pieces_of, changed)


@pytest.mark.parametrize("version", [0, 1])
def test_files_of_another_size_or_version_are_refused(version: int, tmp_path: Path):
    model = random_llama(attention="causal")
    content = version_1(model) if version else b"".join(llama2c.content_of(model.state_dict(), model.config))
    eight_bits = MAGIC + struct.pack("<i", 2) + content[8:]
    wrong = [(content + b"four", "it has"), (content[:-4], "it has"), (content[:20], "only 20 bytes"), (b"", "only 0")]
    wrong += [(content[:200], "only 200 bytes"), (eight_bits, "8-bit numbers of version 2")] if version else []
    for damaged, words in wrong:
        (tmp_path / "m.bin").write_bytes(damaged)
        message = f"m.bin is not a model of llama2.c, or it is damaged: .*{words}"
        refused(message, llama2c.load_llama2c, tmp_path / "m.bin")


def test_both_files_or_none_and_nothing_overwritten(tiny_checkpoint: Path, tmp_path: Path):
    how = ("--to", "llama2c", "--attention", "causal")
    run_convert(tiny_checkpoint, tmp_path / "m.bin", *how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "tokenizer.bin"]
    before = snapshot(tmp_path)
    for name in ("m.bin", "other.bin", "tokenizer.bin"):
        refused("is there already|another name", run_convert, tiny_checkpoint, tmp_path / name, *how)
    assert snapshot(tmp_path) == before
    (tmp_path / "m.bin").unlink()
    (tmp_path / "tokenizer.bin").unlink()
    words = "tokenizer.bin is where the tokenizer goes; give the model another name"
    refused(words, run_convert, tiny_checkpoint, tmp_path / "tokenizer.bin", *how)
    refused("bidirectional; --attention causal", run_convert, tiny_checkpoint, tmp_path / "m.bin", "--to", "llama2c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5}, "rope_theta=500000"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06"),
        ({"rope_scaling": ("linear", 2.0)}, "rope_scaling=linear"),
    ],
)
def test_what_run_c_cannot_compute_is_refused(changes: dict, words: str, tiny_tokenizer: Path, tmp_path: Path):
    checkpoint = save_checkpoint(tmp_path / "m.pt", random_llama(attention="causal", **changes))
    refused(words, run_convert, checkpoint, tmp_path / "m.bin", "--to", "llama2c", "--tokenizer", tiny_tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_a_bin_file_becomes_a_directory(tiny_tokenizer: Path, tmp_path: Path):
    pytest.importorskip("safetensors")
    model = random_llama(attention="causal", max_seq_len=200)
    checkpoint = save_checkpoint(tmp_path / "m.pt", model)
    run_convert(checkpoint, tmp_path / "m.bin", "--to", "llama2c", "--tokenizer", tiny_tokenizer)
    run_convert(tmp_path / "m.bin", tmp_path / "out", "--from", "llama2c", "--to", "hf", "--tokenizer", tiny_tokenizer)
    assert_same_weights(model, load_llama_model(tmp_path / "out"))
    files, words = (tmp_path / "m.bin", tmp_path / "no"), "m.bin.*; a .bin file of llama2.c is read with --from llama2c"
    refused(words, run_convert, *files, "--to", "hf", "--tokenizer", tiny_tokenizer)
    other = ("--from", "llama2c", "--to", "hf", "--tokenizer", BUNDLED.with_suffix(".model"))
    refused("name the right one with --tokenizer", run_convert, *files, *other)


# ------------------------------------------------------------------------------------------------------- run.c


@pytest.fixture(scope="module")
def program() -> Path:
    """llama2.c's compiled `run.c`."""
    named = os.environ.get("MINLLAMA_LLAMA2C", "")
    if not named:
        pytest.skip("MINLLAMA_LLAMA2C names no compiled run.c of llama2.c")
    return Path(named)


def text_of(program: Path, folder: Path, prompt: str, positions: int) -> bytes:
    command = [program, "m.bin", "-t", "0", "-n", str(positions), "-i", prompt]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.removesuffix(b"\n")


@pytest.mark.parametrize("tied", [True, False])
def test_run_c_says_the_same(tied: bool, program: Path, tmp_path: Path):
    model = load_llama_model(BUNDLED)
    if not tied:
        shape = {**vars(model.config), "tied": False}
        state = {**model.state_dict(), "output.weight": model.output.weight.detach() * 1.5}
        torch.save({"model": state, "model_args": shape}, tmp_path / "m.pt")
        model = load_llama_model(tmp_path / "m.pt")
        with torch.no_grad():  # another matrix than the embeddings, and another text
            model.output.weight[:, :40] = 0.0
        save_checkpoint(tmp_path / "m.pt", model)
    source = BUNDLED if tied else tmp_path / "m.pt"
    tokenizer = Tokenizer(tokenizer_model=BUNDLED.with_suffix(".model"))
    run_convert(source, tmp_path / "m.bin", "--to", "llama2c", "--tokenizer", tokenizer.model_path)
    for prompt in RUN_C_PROMPTS:
        ids = tokenizer.encode(prompt, bos=True, eos=False)
        ours = model.generate(torch.tensor([ids]), 40, temperature=0.0)[0].tolist()
        ours = ours[: ours.index(1, 1)] if 1 in ours[1:] else ours  # where run.c stops
        ours = ours[: ours.index(2)] if 2 in ours else ours
        said = text_of(program, tmp_path, prompt, len(ids) + 39).decode(errors="replace").partition("\n</s>")[0]
        said_by_us = tokenizer.decode(ours).encode("ascii", "ignore").decode()  # run.c prints no byte above 127
        assert said.encode("ascii", "ignore").decode() == said_by_us, prompt
