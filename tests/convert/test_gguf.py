"""GGUF files: read back number by number, computed by llama.cpp, and what must not become one."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SENTENCES, random_llama, save_checkpoint, slow_among
from conversions import BUNDLED, in_llama_cpp, run_convert, run_module, trained_vocabulary, vocabulary_in
from error_helpers import ROOT, check_one_error, refused, snapshot

from convert import gguf as convert_gguf
from convert import hugging_face
from convert.__main__ import get_args, main
from convert.vocabulary import UNUSED, read_vocabulary
from engine.weights import load_llama_model
from llama import Llama
from tokenizer import Tokenizer

LLAMA_CPP = {
    "attention.compute_query": "attn_q",
    "attention.compute_key": "attn_k",
    "attention.compute_value": "attn_v",
    "attention.compute_output": "attn_output",
    "attention_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "ffn_norm": "ffn_norm",
}


def reader(path: Path):
    return pytest.importorskip("gguf", reason="the package gguf is not installed").GGUFReader(path)


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model with the tiny vocabulary."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")

    def write(model: Llama, tokenizer: Path, dtype: str) -> Path:
        vocabulary = vocabulary_in(tokenizer)
        path = tmp_path / f"{dtype}.gguf"
        convert_gguf.write(path, model.state_dict(), model.config, vocabulary, dtype)
        return path

    return write


def grouped_model(**changes) -> Llama:
    """No two kinds of matrices have one shape."""
    return random_llama(**{"attention": "causal", "hidden_dim": 96, "rope_theta": 5000.0, **changes})


def test_every_number_of_f32_is_the_checkpoints(convert: Callable[..., Path], tiny_tokenizer: Path):
    model = grouped_model()
    tensors = {tensor.name: tensor for tensor in reader(convert(model, tiny_tokenizer, "f32")).tensors}
    state = model.state_dict()
    expected = {"token_embd.weight": "tok_embeddings.weight", "output_norm.weight": "norm.weight"}
    for layer in range(2):
        for ours, theirs in LLAMA_CPP.items():
            expected[f"blk.{layer}.{theirs}.weight"] = f"layers.{layer}.{ours}.weight"
    assert set(tensors) == set(expected) and len(tensors) == len(state) - 1  # the tied matrix once
    for theirs, ours in expected.items():
        assert list(tensors[theirs].shape)[::-1] == list(state[ours].shape), theirs  # GGUF names columns first
        assert np.array_equal(tensors[theirs].data.reshape(state[ours].shape), state[ours].numpy()), theirs


def test_shape_and_vocabulary_are_declared(convert: Callable[..., Path], tiny_tokenizer: Path):
    fields = reader(convert(grouped_model(), tiny_tokenizer, "f32")).fields
    names = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 96, "context_length": 64}
    names |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8, "vocab_size": 300}
    assert {name: fields[f"llama.{name}"].contents() for name in names} == names
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.rope.freq_base"].contents() == 5000.0
    assert fields["llama.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-5)
    model = Tokenizer(tokenizer_model=tiny_tokenizer).sp_model
    assert fields["tokenizer.ggml.tokens"].contents() == [model.id_to_piece(token) for token in range(300)]
    assert fields["tokenizer.ggml.scores"].contents() == [model.get_score(token) for token in range(300)]
    assert fields["tokenizer.ggml.token_type"].contents()[:5] == [2, 3, 3, 6, 6]
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("unknown", "bos", "eos")] == [0, 1, 2]
    said = [fields[f"tokenizer.ggml.add_{name}"].contents() for name in ("bos_token", "eos_token", "space_prefix")]
    assert said == [True, False, True]


def test_a_vocabulary_of_another_size_is_no_file(convert: Callable[..., Path], tiny_tokenizer: Path, tmp_path: Path):
    words = "the tokenizer has 300 pieces and the model's vocabulary 310"
    refused(words, convert, grouped_model(vocab_size=310), tiny_tokenizer, "f32")
    assert not list(tmp_path.iterdir())


def test_rows_beyond_the_last_piece_have_pieces_that_no_text_has(tmp_path: Path, tiny_tokenizer: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    model = grouped_model(vocab_size=320)
    hugging_face.write(tmp_path / "model", model.state_dict(), model.config)
    flags = (tmp_path / "model", tmp_path / "m.gguf", "--to", "gguf", "--tokenizer", tiny_tokenizer)
    run_convert(*flags)
    fields = reader(tmp_path / "m.gguf").fields
    assert len(fields["tokenizer.ggml.tokens"].contents()) == fields["llama.vocab_size"].contents() == 320
    assert fields["tokenizer.ggml.token_type"].contents()[300:] == [UNUSED] * 20


def test_a_directory_gives_the_file_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever it is called by: `.` has no name, and what follows a dot in a folder's is no ending."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    folder = tmp_path / "TinyLlama-1.1B"
    run_convert(BUNDLED, folder, "--to", "hf")
    monkeypatch.chdir(folder)
    run_convert(".", "../m.gguf", "--to", "gguf")
    assert reader(tmp_path / "m.gguf").fields["general.name"].contents() == "TinyLlama-1.1B"
    shutil.copy(BUNDLED, "m\udcf6.pt")  # Latin-1, which no string of a GGUF file can be
    run_convert("m\udcf6.pt", "../n.gguf", "--to", "gguf", "--tokenizer", BUNDLED.with_suffix(".model"))
    assert reader(tmp_path / "n.gguf").fields["general.name"].contents() == r"'m\udcf6'"


def test_fewer_bits_are_near_and_vectors_stay(convert: Callable[..., Path], tiny_tokenizer: Path):
    from gguf import quants

    model = grouped_model(hidden_dim=80)  # w2's rows are no whole number of q8_0's blocks of 32
    state = model.state_dict()
    for dtype, kind, error in (("f16", "F16", 2**-11), ("q8_0", "Q8_0", 0.5 / 127)):
        tensors = {tensor.name: tensor for tensor in reader(convert(model, tiny_tokenizer, dtype)).tensors}
        assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
        assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "F16"
        query, weight = tensors["blk.1.attn_q.weight"], state["layers.1.attention.compute_query.weight"].numpy()
        assert query.tensor_type.name == kind
        stored = quants.dequantize(query.data, query.tensor_type).reshape(weight.shape)
        assert 0 < np.abs(stored - weight).max() <= 1.01 * error * np.abs(weight).max()


@pytest.mark.parametrize("changes", [{}, {"tied": False}])
def test_transformers_reads_the_same_model(changes: dict, convert: Callable[..., Path], tiny_tokenizer: Path):
    """A reader of its own, which turns rows into the other order again; llama.cpp is not always at hand."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with the package accelerate")
    model = grouped_model(**changes)
    path = convert(model, tiny_tokenizer, "f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, model(ids, targets=ids)[0], atol=1e-5, rtol=0)


def test_scaled_angles_and_an_output_matrix_of_its_own_are_declared(convert: Callable[..., Path], tiny_tokenizer: Path):
    linear = reader(convert(grouped_model(rope_scaling=("linear", 4.0)), tiny_tokenizer, "f32"))
    assert linear.fields["llama.rope.scaling.type"].contents() == "linear"
    assert linear.fields["llama.rope.scaling.factor"].contents() == 4.0
    model = grouped_model(rope_scaling=("llama3", 8.0, 1.0, 4.0, 64.0), tied=False)
    tensors = {tensor.name: tensor for tensor in reader(convert(model, tiny_tokenizer, "q8_0")).tensors}
    assert tensors["output.weight"].tensor_type.name == "Q8_0"
    plain = 5000.0 ** (-np.arange(0, 8, 2) / 8)
    turns = 64 * plain / (2 * np.pi)
    share = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    factors = tensors["rope_freqs.weight"]
    assert factors.tensor_type.name == "F32" and factors.data.max() == 8.0 and factors.data.min() == 1.0
    np.testing.assert_allclose(factors.data, 1.0 / (share + (1.0 - share) / 8.0), rtol=1e-5)


def test_llama_cpp_says_the_same(tmp_path: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    done = run_module(BUNDLED, tmp_path / "model.gguf", "--to", "gguf", cwd=ROOT)
    first = "rewrites letters and joins runs of spaces before it cuts a text; programs with this format do not"
    assert (done.returncode, done.stderr) == (0, f"warning: {BUNDLED.with_suffix('.model')} {first}\n")
    assert done.stdout == f"wrote {tmp_path / 'model.gguf'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    tokenizer = Tokenizer(tokenizer_model=BUNDLED.with_suffix(".model"))
    prompt = tokenizer.encode("The lighthouse keeper", bos=True, eos=False)
    ours = load_llama_model(BUNDLED).generate(torch.tensor([prompt]), 60, temperature=0.0)[0].tolist()
    theirs = in_llama_cpp(tmp_path / "model.gguf", n_ctx=256)
    assert prompt + list(islice(theirs.generate(prompt, temp=0.0), 60)) == ours and len(set(ours)) > 20


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": False, "rope_theta": 5000.0},
        {"rope_scaling": ("linear", 4.0)},
        {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 32.0)},
        {"dim": 72, "n_heads": 9, "n_kv_heads": 3, "layer_norm_eps": 1e-3},
    ],
)
def test_llama_cpp_computes_the_same_logits(changes: dict, tmp_path: Path):
    """Of random weights: what a model repeats soon hides angles that are wrong."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    tokenizer = Tokenizer(tokenizer_model=BUNDLED.with_suffix(".model"))
    vocabulary = vocabulary_in(BUNDLED.with_suffix(".model"))
    model = random_llama(attention="causal", vocab_size=tokenizer.n_words, max_seq_len=128, **changes)
    convert_gguf.write(tmp_path / "m.gguf", model.state_dict(), model.config, vocabulary)
    theirs = in_llama_cpp(tmp_path / "m.gguf", n_ctx=128, logits_all=True)
    ids = torch.randint(260, tokenizer.n_words, (1, 100), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids[0].tolist())
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(theirs.scores[:100]), model(ids, ids)[0][0], atol=1e-5, rtol=0)


def test_llama_cpp_reads_text_as_we_do(tmp_path: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    tokenizer = Tokenizer(tokenizer_model=BUNDLED.with_suffix(".model"))
    vocabulary = vocabulary_in(BUNDLED.with_suffix(".model"))
    model = load_llama_model(BUNDLED)
    convert_gguf.write(tmp_path / "m.gguf", model.state_dict(), model.config, vocabulary)
    theirs = in_llama_cpp(tmp_path / "m.gguf", vocab_only=True)
    for text in (*SENTENCES, "naïve café, 北京 costs 3.50?"):
        assert theirs.tokenize(text.encode()) == tokenizer.encode(text, bos=True, eos=False)


# ------------------------------------------------------------------------------------------------- bad input


def test_a_bidirectional_model_is_refused_and_causal_converts_it(call: Callable, tiny_checkpoint: Path, tmp_path: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    status, _, err = call(tiny_checkpoint, "out.gguf", "--to", "gguf", main=main)
    check_one_error(status, err, "bidirectional", "--attention causal")
    assert not list(tmp_path.iterdir())
    status, _, err = call(tiny_checkpoint, "out.gguf", "--to", "gguf", "--attention", "causal", main=main)
    assert status == 0, err
    assert {tensor.name for tensor in reader(tmp_path / "out.gguf").tensors} >= {"token_embd.weight"}


@pytest.mark.parametrize("to", slow_among(["hf", "llama2c", "gguf"], ["hf", "llama2c"]))
def test_a_model_with_layer_norm_is_nothing_that_others_know(
    call: Callable, to: str, tiny_checkpoint: Path, tmp_path: Path
):
    folder = tmp_path / "model"
    folder.mkdir()
    path = save_checkpoint(folder / "layer.pt", random_llama(norm="layer", attention="causal"))
    (folder / "layer.model").write_bytes(tiny_checkpoint.with_suffix(".model").read_bytes())
    status, _, err = call(path, "out", "--to", to, main=main)
    check_one_error(status, err, "has LayerNorm", to)
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.slow
def test_another_tokenizer_names_both_sizes_and_no_file_is_overwritten(
    call: Callable, tiny_checkpoint: Path, tmp_path: Path
):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    flags = ["--to", "gguf", "--attention", "causal", "--tokenizer", BUNDLED.with_suffix(".model")]
    status, _, err = call(tiny_checkpoint, "out.gguf", *flags, main=main)
    check_one_error(status, err, "300", "2048", "--tokenizer")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.gguf").write_text("old")
    status, _, err = call(tiny_checkpoint, "out.gguf", *flags, main=main)
    check_one_error(status, err, "OUT", "out.gguf is there already")
    assert snapshot(tmp_path) == {"out.gguf": b"old"}


def test_too_large_for_float16_is_refused(convert: Callable[..., Path], tiny_tokenizer: Path, tmp_path: Path):
    model = grouped_model()
    with torch.no_grad():
        model.layers[1].feed_forward.w1.weight[3, 4] = 70000.0
    refused("blk.1.ffn_gate.weight.*f32", convert, model, tiny_tokenizer, "f16")
    assert not list(tmp_path.iterdir())
    convert(model, tiny_tokenizer, "q8_0")
    with torch.no_grad():
        model.layers[1].feed_forward.w1.weight[3, 4] = 1e7  # 127 times the largest float16
    refused("blk.1.ffn_gate.weight.*q8_0", convert, model, tiny_tokenizer, "q8_0")
    convert(model, tiny_tokenizer, "f32")
    with torch.no_grad():
        model.layers[1].feed_forward.w1.weight[3, 4] = 65504.0  # the largest float16
    convert(model, tiny_tokenizer, "f16")


def test_a_full_disk_leaves_the_old_file(
    convert: Callable[..., Path], tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import gguf

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "f32.gguf").write_text("old")
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="No space.*f32.gguf"):
        convert(grouped_model(), tiny_tokenizer, "f32")
    assert snapshot(tmp_path) == {"f32.gguf": b"old"}


def test_without_the_package_one_line_says_how_to_get_it(tiny_tokenizer: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    model = grouped_model()
    given = tmp_path / "m.gguf", model.state_dict(), model.config, vocabulary_in(tiny_tokenizer)
    refused("pip install", convert_gguf.write, *given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "words"), [({"model_type": "unigram"}, "BPE"), ({"byte_fallback": False}, "byte")]
)
def test_vocabularies_of_another_kind_are_refused(settings: dict, words: str, tmp_path: Path):
    refused(words, read_vocabulary, trained_vocabulary(tmp_path, **settings).sp_model, "other.model")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([BUNDLED, "m.gguf"], ["--to"]),
        ([BUNDLED, "m.gguf", "--to", "pdf"], ["--to", "pdf"]),
        ([BUNDLED, "m.gguf", "--to", "gguf", "--dtype", "q4_0"], ["--dtype", "q4_0"]),
        (["no-such.pt", "m.gguf", "--to", "gguf"], ["no-such.pt", "does not exist"]),
        (["tests", "m.gguf", "--to", "gguf"], ["tests/config.json does not exist"]),
        ([BUNDLED, "m.gguf", "--to", "gguf", "--tokenizer", "no.model"], ["no.model", "--tokenizer"]),
        ([BUNDLED, ".", "--to", "gguf"], ["OUT", "folder"]),
        ([BUNDLED, "no-such-folder/m.gguf", "--to", "gguf"], ["OUT", "no-such-folder"]),
        ([BUNDLED, BUNDLED, "--to", "gguf"], ["OUT", "is there already"]),
        ([BUNDLED, "m.gguf", "--to", "gguf", "--attention", "bidirectional"], ["bidirectional", "--attention causal"]),
        ([BUNDLED, "m.gguf", "--to", "gguf", "--dtype", "bf16"], ["--dtype bf16", "--to gguf", "q8_0"]),
    ],
)
def test_wrong_flags_are_one_sentence(flags: list[object], words: list[str]):
    message = refused("", get_args, list(map(str, flags)))
    assert all(word in message for word in words)


def test_a_damaged_checkpoint_is_one_line_and_no_file(call: Callable, tmp_path: Path, tiny_tokenizer: Path):
    (tmp_path / "m.pt").write_bytes(BUNDLED.read_bytes()[:5000])
    before = snapshot(tmp_path)
    status, _, err = call("m.pt", "m.gguf", "--to", "gguf", "--tokenizer", tiny_tokenizer, main=main)
    check_one_error(status, err, "m.pt")
    assert snapshot(tmp_path) == before


def test_a_checkpoint_of_original_names_converts_as_well(call: Callable, tiny_tokenizer: Path, tmp_path: Path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    model = grouped_model()
    state = {name.replace("compute_query", "wq"): tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "original.pt"
    torch.save({"model": state, "model_args": vars(model.config)}, save_checkpoint(path, model))
    status, _, err = call(path, "m.gguf", "--to", "gguf", "--tokenizer", tiny_tokenizer, main=main)
    assert status == 0, err
    (query,) = (tensor for tensor in reader(tmp_path / "m.gguf").tensors if tensor.name == "blk.0.attn_q.weight")
    assert np.array_equal(query.data, model.layers[0].attention.compute_query.weight.detach().numpy())
