from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_llama, save_checkpoint
from error_helpers import refused

from advanced.experiments.models import model_of
from bert import load as bert_load
from bert.package import directory_of
from config import LlamaConfig
from convert import __main__ as convert_program
from convert import names
from engine import weights
from engine.arguments import find_llama
from engine.weights import load_llama_model
from explore import __main__ as explore_program
from llama import Llama
from llama import load_pretrained as load_plainly
from utils import UserError

# that of the driver, which says what is wrong with a file, and the short one of llama.py
of_both_loaders = pytest.mark.parametrize("load", [load_llama_model, load_plainly], ids=["engine", "llama.py"])
TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33]])
ORIGINAL = {"compute_query": "wq", "compute_key": "wk", "compute_value": "wv", "compute_output": "wo"}


def original_names(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in ORIGINAL.items():
            name = name.replace(f"attention.{ours}", f"attention.{theirs}")
        renamed[prefix + name] = tensor
    return renamed


def write(path: Path, state: object, **model_args) -> Path:
    torch.save({"model": state, "model_args": model_args or vars(random_llama().config)}, path)
    return path


def assert_same_model(one: Llama, other: Llama) -> None:
    assert torch.equal(one(TOKENS)[0], other(TOKENS)[0])


@of_both_loaders
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("is_zip", [True, False])
def test_every_way_of_naming_loads(tmp_path: Path, prefix: str, is_zip: bool, load: Callable):
    model = random_llama()
    for name, state in (("course", model.state_dict()), ("original", original_names(model.state_dict(), prefix))):
        path = tmp_path / f"{name}.pt"
        content = {"model": state, "model_args": vars(model.config), "iter_num": 7, "best_val_loss": torch.tensor(1.5)}
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        assert_same_model(load(path), model)


@of_both_loaders
@pytest.mark.parametrize("left_out", ["output.weight", "tok_embeddings.weight"])
def test_a_tied_matrix_may_be_stored_once(tmp_path: Path, left_out: str, load: Callable):
    state = random_llama().state_dict()
    del state[left_out]
    loaded = load(write(tmp_path / "once.pt", state))
    assert_same_model(loaded, random_llama())
    assert loaded.output.weight is loaded.tok_embeddings.weight


@of_both_loaders
def test_half_precision_weights_become_float32(tmp_path: Path, load: Callable):
    state = {name: tensor.bfloat16() for name, tensor in random_llama().state_dict().items()}
    loaded = load(write(tmp_path / "half.pt", state))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.norm.weight, state["norm.weight"].float())


@of_both_loaders
def test_attention_is_the_argument_else_the_checkpoint_else_bidirectional(tmp_path: Path, load: Callable):
    declared = save_checkpoint(tmp_path / "declared.pt", random_llama(attention="causal"))
    args = {name: value for name, value in vars(random_llama().config).items() if name != "attention"}
    silent = save_checkpoint(tmp_path / "silent.pt", random_llama(), **args)
    assert load(silent).config.attention == "bidirectional" and not load(silent).training
    assert load(silent, attention="causal").config.attention == "causal"
    assert load(declared).config.attention == "causal"
    assert load(declared, attention="bidirectional").config.attention == "bidirectional"


@of_both_loaders
def test_loading_moves_the_random_generator_as_making_a_model_does(tmp_path: Path, load: Callable):
    """A seed means the same head and the same shuffling here as in the course's code."""
    path = save_checkpoint(tmp_path / "model.pt", random_llama())
    states = []
    for make in (lambda: Llama(LlamaConfig.from_preset("tiny")), lambda: load(path)):
        torch.manual_seed(5)
        assert make().config == LlamaConfig.from_preset("tiny")
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@of_both_loaders
def test_no_code_of_a_file_is_run(tmp_path: Path, load: Callable):
    class Code:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": random_llama().state_dict(), "model_args": {"dim": Code()}}, tmp_path / "code.pt")
    with pytest.raises((UserError, pickle.UnpicklingError)):
        load(tmp_path / "code.pt")
    assert not (tmp_path / "ran").exists()


def test_the_short_loader_refuses_what_does_not_fit_or_is_unknown(tmp_path: Path):
    state = random_llama().state_dict()
    with pytest.raises(ValueError, match="unknown keys: depth"):
        load_plainly(write(tmp_path / "m.pt", state, **vars(random_llama().config), depth=3))
    del state["layers.1.feed_forward.w2.weight"]
    with pytest.raises(RuntimeError, match="layers.1.feed_forward.w2.weight"):
        load_plainly(write(tmp_path / "m.pt", state))


def test_every_misfit_is_named(tmp_path: Path):
    state = random_llama().state_dict()
    del state["layers.1.feed_forward.w2.weight"]
    state["layers.0.attention.bias"] = torch.zeros(3)
    state["norm.weight"] = torch.ones(31)
    state["layers.0.ffn_norm.weight"] = "ones"
    with pytest.raises(UserError) as caught:
        load_llama_model(write(tmp_path / "misfit.pt", state))
    for part in (
        "missing layers.1.feed_forward.w2.weight",
        "unexpected layers.0.attention.bias",
        "norm.weight is [31], not [32]",
        "layers.0.ffn_norm.weight is not a floating-point tensor",
        "misfit.pt",
    ):
        assert part in str(caught.value)


def test_a_blueprint_is_the_model_without_its_numbers():
    for changes in ({}, {"n_kv_heads": 4, "hidden_dim": 7}, {"n_layers": 5, "dim": 64}):
        config = LlamaConfig.from_preset("tiny", **changes)
        before = torch.get_rng_state()
        blueprint = weights.blueprint(config, Llama)
        assert torch.equal(torch.get_rng_state(), before)
        assert {tensor.device.type for tensor in blueprint.parameters()} == {"meta"}
        shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (blueprint, Llama(config))]
        assert shapes[0] == shapes[1] and sorted(shapes[0]) == sorted(n.ours for n in names.all_names(config))


@pytest.mark.parametrize("name", ["n_layers", "vocab_size", "dim", "hidden_dim"])
def test_a_config_that_asks_for_more_than_the_file_can_hold_is_refused_at_once(tmp_path: Path, name: str):
    config = {**vars(random_llama().config), "n_heads": 1, "n_kv_heads": 1, name: 2**31 - 2}
    with pytest.raises(UserError, match=f"{name}=2147483646, but"):
        load_llama_model(write(tmp_path / "x.pt", random_llama().state_dict(), **config))


def test_loading_sets_no_global_flag_and_chooses_no_device(tiny_checkpoint: Path):
    def flags() -> tuple:
        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return *tf32, torch.get_default_dtype(), torch.is_grad_enabled()

    before = flags()
    model = load_llama_model(tiny_checkpoint)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert not model.training and flags() == before


def test_the_weights_do_not_depend_on_the_file_after_loading(tmp_path: Path):
    path = save_checkpoint(tmp_path / "mapped.pt", random_llama())
    model = load_llama_model(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert_same_model(model, random_llama())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_config": {}}, "a fine-tuned classifier, not a pretrained model"),
        ({"optimizer": {}, "history": []}, "the resume point of a fine-tuning"),
    ],
)
def test_what_a_fine_tuning_saves_is_called_by_its_name(
    tmp_path: Path, more: dict, words: str, monkeypatch: pytest.MonkeyPatch
):
    path = save_checkpoint(tmp_path / "x.pt", random_llama())
    torch.save({**torch.load(path), **more}, path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("utils.ROOT", tmp_path)  # no tokenizer is there, either
    for program in ("load_llama_model", "run_llama.py", "convert"):
        refused(words, WITH_A_DIRECTORY[program], "x.pt")


@pytest.mark.parametrize("name", ["optimizer", "history"])
def test_a_checkpoint_may_hold_more(tmp_path: Path, name: str):
    path = save_checkpoint(tmp_path / "x.pt", random_llama())
    torch.save({**torch.load(path), name: {}}, path)
    assert load_llama_model(path).config.dim == random_llama().config.dim


# ------------------------------------------------------------------------------------------- the name of a hub

WITH_A_DIRECTORY = {
    "bert.run": lambda name: directory_of(name, "--pretrained-model-path"),
    "bert.load": bert_load.load_bert,
    "run_llama.py": lambda name: find_llama(Namespace(pretrained_model_path=name, tokenizer=None)),
    "load_llama_model": weights.load_llama_model,
    "convert": lambda name: convert_program.get_args(["--to", "gguf", name, "new.gguf"]),
    "explore": lambda name: explore_program.check_args(explore_program.get_args([name, "--out", "page.html"])),
    "advanced.experiments": lambda name: model_of(name, None, {}),
}


@pytest.mark.parametrize("program", WITH_A_DIRECTORY)
def test_a_name_of_a_hub_is_answered_with_how_its_folder_is_got(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("distilbert-base-uncased", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "gpt2"):
        line = refused(f"hf download {name} --local-dir FOLDER", WITH_A_DIRECTORY[program], name)
        assert "not fetched" in line and ("minilm" in line) == program.startswith("bert")
    for name in ("absent.pt", "mine/absent", str(tmp_path / "absent"), "a/b/c"):
        assert "hf download" not in refused("", WITH_A_DIRECTORY[program], name)
