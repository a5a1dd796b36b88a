"""Directories in, directories out, with transformers as the other side; and what is refused, by name."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from conftest import SENTENCES, random_llama, save_checkpoint  # noqa: E402
from conversions import BUNDLED, assert_same_weights, run_convert  # noqa: E402
from error_helpers import assert_code_is_never_run, refused  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from shapes import HF_SHAPES, LLAMA3_ROPE, bytes_of_text, greedy, hf_llama, rewrite, save  # noqa: E402

from config import LlamaConfig  # noqa: E402
from convert import hugging_face, llama2c  # noqa: E402
from convert.directory import write_model  # noqa: E402
from engine.weights import load_llama_model  # noqa: E402
from llama import Llama  # noqa: E402

IDS = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(0))


def assert_same(ours: Llama, theirs: torch.nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS, targets=IDS)[0], theirs(IDS).logits, atol=1e-4, rtol=0)


def tensors_in(weights: Path) -> dict[str, torch.Tensor]:
    """Copies of them, so that the file may be written anew."""
    return {name: tensor.clone() for name, tensor in load_file(weights).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", hf_llama())


# ---------------------------------------------------------------------------------------------------------- in


@pytest.mark.parametrize("shape", HF_SHAPES)
def test_logits_and_greedy_ids_are_those_of_transformers(shape: str, tmp_path: Path):
    theirs = hf_llama(shape)
    ours = load_llama_model(save(tmp_path, theirs))
    assert ours.config.is_causal and not ours.training
    assert ours.config.tied == HF_SHAPES[shape].get("tie_word_embeddings", False)
    assert (ours.output.weight is ours.tok_embeddings.weight) == ours.config.tied
    assert_same(ours, theirs)
    prompt = IDS[0, :5].tolist()
    assert ours.generate(torch.tensor([prompt]), 40, temperature=0.0)[0].tolist() == greedy(theirs, prompt, 40)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_model_for_more_positions_than_any_memory_has_is_read(tmp_path: Path, kernels: str, drive: Callable):
    """The largest number that a config may say; a table of 2^31 angles would have 64 gigabytes."""
    theirs = hf_llama("llama3", max_position_embeddings=2**31 - 1)
    ours = load_llama_model(bytes_of_text(save(tmp_path / "long", theirs)))
    assert ours.config.max_seq_len == 2**31 - 1
    assert_same(ours, theirs)
    bytes_of_text(save(tmp_path / "short", hf_llama("llama3")))
    flags = ["--prompt", "A film", "--max_new_tokens", 4, "--kernels", kernels, "--pretrained-model-path"]
    texts = [drive(*flags, tmp_path / name).partition("Temperature")[2] for name in ("long", "short")]
    assert texts[0] == texts[1] != ""
    refused("angles of all positions; 2147483647 are too many", llama2c_of, ours)


def llama2c_of(model: Llama) -> list[bytes]:
    config = replace(model.config, rope_scaling=None, rope_theta=10000.0, layer_norm_eps=1e-5)
    return [*llama2c.content_of(model.state_dict(), config)]


HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [*HEADS, ""])
def test_the_head_of_another_task_is_left_out(tmp_path: Path, head: str, tied: bool, capsys):
    """Also none at all: `LlamaModel`. Hidden states are those of transformers."""
    config = hf_llama(tie_word_embeddings=tied, num_labels=3).config
    torch.manual_seed(3)
    theirs = getattr(transformers, f"LlamaFor{head}" if head else "LlamaModel")(config).eval()
    folder = save(tmp_path / "model", theirs)
    if not tied:
        refused("missing lm_head.weight; --option finetune needs no head", load_llama_model, folder)
    ours = load_llama_model(folder, needs_output=tied)
    assert ("left out, the head of another task" in capsys.readouterr().err) == bool(head)
    with torch.no_grad():
        states = getattr(theirs, theirs.base_model_prefix, theirs)(IDS).last_hidden_state
        torch.testing.assert_close(ours(IDS)[1], states, atol=1e-5, rtol=0)
    tensors = tensors_in(folder / "model.safetensors")
    tensors["something.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused("unexpected something.weight", load_llama_model, folder, needs_output=False)


def test_without_a_head_a_model_is_fine_tuned_and_asked_nothing(
    tmp_path: Path, drive: Callable, classify_flags: Callable, films: dict[str, Path], capsys
):
    theirs = transformers.LlamaForSequenceClassification(hf_llama(num_labels=3).config)
    folder = bytes_of_text(save(tmp_path / "model", theirs))
    model = ["--pretrained-model-path", folder]
    (text := tmp_path / "text.txt").write_text("A film")
    for flags in ([], ["--option", "perplexity", "--input", text], classify_flags("prompt")):
        refused("missing lm_head.weight", drive, *flags, *model)
    asking = ["--method", "prompt-finetune"]
    asking += [f"--{split}_out={split}-advanced-output.txt" for split in ("dev", "test")]
    refused("missing lm_head.weight", drive, *classify_flags("finetune"), *model, *asking)
    refused("missing lm_head.weight", run_convert, folder, tmp_path / "m.gguf", "--to", "gguf")
    capsys.readouterr()
    drive(*classify_flags("finetune"), *model, "--epochs", 1, "--model_out", "own.pt")
    assert capsys.readouterr().err.count("score.weight left out, the head of another task") == 1
    drive("--option", "predict", "--model", "own.pt", "--input", films["dev"], "--output", "p.txt")
    assert (tmp_path / "p.txt").read_text() == (tmp_path / "films-dev-finetuning-output.txt").read_text()


def test_attention_is_causal_unless_it_is_said(folder: Path):
    assert load_llama_model(folder).config.attention == "causal"
    both = load_llama_model(folder, attention="bidirectional")
    assert both.config.attention == "bidirectional"
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 300
    assert not torch.allclose(both(IDS, targets=IDS)[0][:, 0], both(changed, targets=IDS)[0][:, 0])


@pytest.mark.parametrize("format", ["shards", "bin", "bin-shards", "pickle", "half", "no-prefix"])
def test_every_way_of_storing(format: str, tmp_path: Path):
    theirs = hf_llama()
    save(tmp_path, theirs, **({"max_shard_size": "40KB"} if format == "shards" else {}))
    weights = tmp_path / "model.safetensors"
    if format == "shards":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not weights.exists()
    elif format == "bin-shards":
        tensors, placed = tensors_in(weights), {}
        for part in (0, 1):
            half = dict([*tensors.items()][part::2])
            placed |= dict.fromkeys(half, f"pytorch_model-{part}.bin")
            torch.save(half, tmp_path / f"pytorch_model-{part}.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
        weights.unlink()
    elif format in ("bin", "pickle"):
        how = dict(_use_new_zipfile_serialization=format == "bin")
        tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        torch.save(tensors, tmp_path / "pytorch_model.bin", **how)
        weights.unlink()
    elif format == "half":
        save(tmp_path, theirs.to(torch.bfloat16))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    else:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_in(weights).items()}
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old versions saved it
        save_file(tensors, weights)
    ours = load_llama_model(tmp_path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert_same(ours, theirs)


def test_both_ways_of_saying_the_angles(tmp_path: Path):
    theirs = hf_llama("llama3")
    config = save(tmp_path, theirs) / "config.json"
    new = load_llama_model(tmp_path).config
    said = json.loads(config.read_text())["rope_parameters"]
    scaling = {name: value for name, value in said.items() if name != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")  # its oldest name
    rewrite(config, rope_parameters=None, rope_theta=said["rope_theta"], rope_scaling=scaling)
    assert load_llama_model(tmp_path).config == new and new.rope_theta == 500000.0
    assert new.rope_scaling == ("llama3", 8.0, 1.0, 4.0, 32.0)
    rewrite(config, rope_scaling={"rope_type": "default"}, rope_theta=777)
    unscaled = load_llama_model(tmp_path).config
    assert (unscaled.rope_theta, unscaled.rope_scaling) == (777.0, None)
    rewrite(config, rope_theta=None, rope_scaling=None)
    assert load_llama_model(tmp_path).config.rope_theta == 10000.0


LINEAR, PLAIN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 20.0}


@pytest.mark.parametrize(
    "settings",
    [
        dict(rope_theta=30.0, rope_parameters=PLAIN),
        dict(rope_theta=30.0, rope_parameters=LINEAR),
        dict(rope_scaling=LINEAR, rope_parameters=PLAIN),
        dict(rope_scaling={**LINEAR, "rope_theta": 40.0}, rope_parameters=PLAIN, rope_theta=30.0),
        dict(rope_scaling={}, rope_parameters=PLAIN),
    ],
)
def test_of_several_ways_of_saying_the_angles_the_one_counts_that_counts_in_transformers(settings: dict):
    theirs = transformers.LlamaConfig(**copy.deepcopy(settings)).rope_parameters
    ours = hugging_face.config_of(settings)
    assert ours.rope_theta == theirs["rope_theta"]
    assert ours.rope_scaling == (None if theirs["rope_type"] == "default" else ("linear", theirs["factor"]))


def test_what_a_config_leaves_out_is_what_transformers_takes():
    theirs = transformers.LlamaConfig()
    ours = hugging_face.config_of({})
    assert ours == hugging_face.config_of(theirs.to_dict())
    assert (ours.dim, ours.hidden_dim, ours.n_layers, ours.tied) == (4096, 11008, 32, False)


def test_a_tied_matrix_may_stand_there_twice_or_once_but_not_as_two(tmp_path: Path):
    theirs = hf_llama("smollm")
    weights = save(tmp_path, theirs) / "model.safetensors"
    tensors = tensors_in(weights)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights)
    assert_same(load_llama_model(tmp_path), theirs)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, weights)
    refused("embed_tokens.weight and lm_head.weight differ, but this model ties them", load_llama_model, tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")  # the other one of the two
    save_file(tensors, weights)
    assert_same(load_llama_model(tmp_path), theirs)


# ----------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(model_type="mistral"), "type 'mistral'; llama is known"),
        (dict(hidden_act="gelu"), "hidden_act='gelu': no model here"),
        (dict(attention_bias=True), "attention_bias=True: no model here"),
        (dict(mlp_bias=True), "mlp_bias=True: no model here"),
        (dict(is_causal=False), "is_causal=false: every position sees all others"),
        (dict(rope_parameters=LLAMA3_ROPE, original_max_position_embeddings=64), "is 64 and, of the angles, 32"),
        (dict(rope_interleaved=True), "rope_interleaved=True: no model here"),
        (dict(quantization_config={"bits": 4}), "quantization_config="),
        (dict(head_dim=16), "head_dim=16 is not hidden_size=64 / num_attention_heads=8"),
        (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "kind 'yarn'.*known are default, linear, llama3"),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "kind 'dynamic'"),
        (dict(rope_parameters={"rope_type": "linear"}), "kind linear has no factor"),
        (dict(rope_parameters={"rope_type": "linear", "factor": -1}), "rope_scaling=.'linear', -1.* above 0"),
        (dict(rope_parameters={"rope_type": ["linear"]}), "rope_scaling of the kind"),
        (dict(rope_parameters=[1]), "rope_parameters=.1. must be an object"),
        (dict(rope_parameters={"rope_theta": 0}), "rope_theta=0 must be a number above 0"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (dict(hidden_size=62), "num_attention_heads=8 must divide hidden_size=62"),
        (dict(num_attention_heads=4, head_dim=None), "self_attn.k_proj.weight is .16, 64., not .32, 64."),
        (dict(hidden_size="64"), "hidden_size='64' must be a whole number"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3 must divide num_attention_heads=8"),
        (dict(num_hidden_layers=3), "missing model.layers.2.self_attn.q_proj.weight"),
        (dict(num_hidden_layers=10**6), "num_hidden_layers=1000000, but there are only"),
        (dict(vocab_size=10**9), "vocab_size=1000000000, but the largest tensor"),
        (dict(max_position_embeddings=2**31), "max_position_embeddings=2147483648 must be a whole number"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings='no' must be True or False"),
        (dict(rms_norm_eps=0), "rms_norm_eps=0 must be a number"),
    ],
)
def test_what_no_model_here_computes_is_refused_in_their_words(folder: Path, settings: dict, words: str):
    rewrite(folder / "config.json", **settings)
    refused(words, load_llama_model, folder)


def test_dropout_in_attention_is_left_out_with_a_warning(folder: Path, capfd: pytest.CaptureFixture):
    before = load_llama_model(folder).config
    rewrite(folder / "config.json", attention_dropout=0.1)
    assert load_llama_model(folder).config == before
    assert "warning: attention_dropout=0.1 is for training alone" in capfd.readouterr().err


def test_tensors_that_do_not_fit_are_named_as_the_file_names_them(folder: Path):
    weights = folder / "model.safetensors"
    tensors = tensors_in(weights)
    del tensors["model.layers.1.mlp.down_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["layers.0.attention.compute_query.weight"] = torch.zeros(64, 64)  # a name of ours is foreign there
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, weights)
    message = refused("", load_llama_model, folder)
    for part in (
        "model.safetensors does not fit its config.json",
        "missing lm_head.weight",
        "missing model.layers.1.mlp.down_proj.weight",
        "model.norm.weight is [63], not [64]",
        "unexpected model.layers.0.self_attn.q_proj.bias",
        "unexpected",
    ):
        assert part in message
    tensors["norm.weight"] = torch.ones(64)
    save_file(tensors, weights)
    refused("norm.weight and .*norm.weight are names of the same tensor", load_llama_model, folder)


def test_shards_that_are_absent_foreign_or_doubled(tmp_path: Path):
    save(tmp_path, hf_llama(), max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    shards = sorted(set(said["weight_map"].values()))
    for name in ("../model.safetensors", "/etc/passwd", "C:\\a.safetensors", "config.json", ""):
        rewrite(index, weight_map={**said["weight_map"], "model.norm.weight": name})
        refused("which is no .safetensors file of this folder", load_llama_model, tmp_path)
    for placed in ({}, [], {"a": 3}, None):
        rewrite(index, weight_map=placed)
        refused("weight_map", load_llama_model, tmp_path)
    rewrite(index, weight_map=said["weight_map"])
    shutil.copy(tmp_path / shards[0], tmp_path / "again.safetensors")
    rewrite(index, weight_map={**said["weight_map"], "model.norm.weight": "again.safetensors"})
    refused("several files that hold", load_llama_model, tmp_path)
    rewrite(index, weight_map=said["weight_map"])
    (tmp_path / shards[1]).unlink()
    refused(f"names files that are not here: {shards[1]}", load_llama_model, tmp_path)
    os.symlink(tmp_path / "nowhere", tmp_path / shards[1])
    refused("names files that are not here", load_llama_model, tmp_path)


def test_a_directory_of_links_loads_as_a_cache_has_them_and_the_safe_file_first(folder: Path, tmp_path: Path):
    (folder / "pytorch_model.bin").write_bytes(b"something else")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        os.symlink(file, linked / file.name)
    assert_same(load_llama_model(linked), hf_llama())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_the_place_of_a_file_is_one_line(folder: Path):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused("config.json is no plain file", load_llama_model, folder)


def test_code_in_weights_is_never_run(folder: Path):
    assert_code_is_never_run(folder, load_llama_model)


def test_without_the_folder_convert_one_sentence_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "convert"]:
        monkeypatch.delitem(sys.modules, name)
    real = sys.modules["importlib"].import_module

    def absent(name: str, *rest: object):
        if name.partition(".")[0] == "convert":
            raise ModuleNotFoundError("not here", name="convert")
        return real(name, *rest)

    monkeypatch.setattr("engine.programs.importlib.import_module", absent)
    refused("a Hugging Face directory needs the folder convert/ of this package", load_llama_model, folder)


# --------------------------------------------------------------------------------------------------------- out


LLAMA3 = {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 32.0), "rope_theta": 5000.0}


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"rope_scaling": ("linear", 2.0)}, LLAMA3])
def test_what_is_written_is_what_transformers_reads(changes: dict, tmp_path: Path, tiny_tokenizer: Path):
    model = random_llama(attention="causal", **changes)
    checkpoint = save_checkpoint(tmp_path / "m.pt", model)
    run_convert(checkpoint, tmp_path / "out", "--to", "hf", "--tokenizer", tiny_tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same(model, theirs)
    prompt = IDS[0, :5].tolist()
    assert model.generate(torch.tensor([prompt]), 40, temperature=0.0)[0].tolist() == greedy(theirs, prompt, 40)
    assert theirs.config.dtype == torch.float32
    again = load_llama_model(tmp_path / "out")
    assert again.config == LlamaConfig(**{**vars(model.config), "multiple_of": again.config.multiple_of})
    assert_same_weights(model, again)


@pytest.mark.parametrize("changes", [{}, LLAMA3, {"rope_scaling": ("linear", 2.0)}])
def test_a_config_says_angles_as_versions_before_5_read_them_too(changes: dict):
    """Which know `rope_theta` and `rope_scaling` alone, and want a whole number as a length."""
    config = random_llama(attention="causal", **changes).config
    said = hugging_face.settings_of(config)
    del said["rope_parameters"]
    old = hugging_face.config_of(said)
    assert (old.rope_theta, old.rope_scaling) == (config.rope_theta, config.rope_scaling)
    length = (said["rope_scaling"] or {}).get("original_max_position_embeddings", 1)
    assert type(length) is int


def test_a_file_of_weights_is_the_same_every_time_and_aligned(tmp_path: Path):
    """The library writes what is kept beside weights in any order; tensors begin at a multiple of 8."""
    for size in range(8):
        about = {name: "x" * size for name in "zyxwvu"}
        write_model(tmp_path, {}, {"a": torch.ones(3)}, about)
        content = (tmp_path / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0 and [*json.loads(content[8 : 8 + length])["__metadata__"]] == ["format", *"uvwxyz"]


def test_half_precision_rounds_and_refuses_what_it_cannot_hold(tmp_path: Path, folder: Path):
    for dtype, kind in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        run_convert(folder, tmp_path / dtype, "--to", "hf", "--dtype", dtype)
        stored = load_file(tmp_path / dtype / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {kind}
        assert torch.equal(stored["lm_head.weight"], hf_llama().lm_head.weight.to(kind))
    model = random_llama(attention="causal")
    with torch.no_grad():
        model.norm.weight[3] = 70000.0
    words = "model.norm.weight has numbers that f16 cannot hold; --dtype f32"
    refused(words, hugging_face.write, tmp_path / "no", model.state_dict(), model.config, dtype="f16")
    assert not (tmp_path / "no").exists()


def test_a_directory_without_a_tokenizer_becomes_one_without(folder: Path, tmp_path: Path):
    run_convert(folder, tmp_path / "out", "--to", "hf")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_bidirectional_model_is_refused_and_causal_converts_it(tiny_checkpoint: Path, tmp_path: Path):
    refused("bidirectional; --attention causal converts", run_convert, tiny_checkpoint, tmp_path / "out", "--to", "hf")
    assert not list(tmp_path.iterdir())
    run_convert(tiny_checkpoint, tmp_path / "out", "--to", "hf", "--attention", "causal")
    assert load_llama_model(tmp_path / "out").config.is_causal


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = random_llama(attention="causal")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space.*/out'$"):
        hugging_face.write(tmp_path / "out", model.state_dict(), model.config)
    assert not list(tmp_path.iterdir())


def test_the_bundled_model_and_its_tokenizer_in_transformers(tmp_path: Path):
    run_convert(BUNDLED, tmp_path / "out", "--to", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The lighthouse keeper").input_ids
    ours = load_llama_model(BUNDLED)
    assert ours.generate(torch.tensor([ids]), 40, temperature=0.0)[0].tolist() == greedy(theirs, ids, 40)


def test_a_tokenizer_json_goes_through_unchanged(tmp_path: Path):
    folder = bytes_of_text(save(tmp_path / "model", hf_llama("smollm")), begins=True)
    run_convert(folder, tmp_path / "out", "--to", "hf")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"], said["dtype"]) == (1, 2, "float32")  # ends where it ended
    one, other = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    for text in SENTENCES:
        assert one(text).input_ids == other(text).input_ids
