"""Adapters in PEFT's format: written and read, beside PEFT and transformers where they are installed, and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from conversions import run_convert  # noqa: E402
from error_helpers import refused  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from shapes import bytes_of_text, hf_llama, rewrite, save  # noqa: E402

from bert.config import BertConfig  # noqa: E402
from bert.heads import BertForSequenceClassification  # noqa: E402
from bert.load import load_bert  # noqa: E402
from bert.model import Bert  # noqa: E402
from bert.save import save_pretrained  # noqa: E402
from bert.wordpiece import WordPiece  # noqa: E402
from classifier import LlamaEmbeddingClassifier  # noqa: E402
from convert import patterns  # noqa: E402
from convert import peft as adapters  # noqa: E402
from convert.__main__ import main  # noqa: E402
from engine import runs as saved_runs  # noqa: E402
from engine.checkpointer import Checkpointer  # noqa: E402
from engine.families import create_methods, read_tokenizer  # noqa: E402
from engine.methods import EpochResult, prepare  # noqa: E402
from engine.programs import tokenizer_name  # noqa: E402
from engine.weights import load_llama_model  # noqa: E402

IDS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
RESULT = EpochResult(0, 0.5, 0.5, 0.5, 1.0, True)
VARIANTS = ["plain", "dora", "rslora", "pissa"]


class Settings:
    num_labels, hidden_dropout_prob, option, pad_id = 3, 0.0, "finetune", 3


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama with grouped queries, and a tokenizer."""
    return bytes_of_text(save(tmp_path / "base", hf_llama()))


def saved_run(path: Path, model: torch.nn.Module, tokenizer: Any, others: tuple = (), **settings: Any) -> Path:
    """A classifier that LoRA has trained, as a run saves it; what it has learned is drawn."""
    methods = create_methods([*others, ("lora", {"rank": 3, "alpha": 6.0, **settings})])
    prepare(model, methods)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape)
    record = saved_runs.record_of(model, tokenizer, ["a", "b", "c"], 4)
    checkpointer = Checkpointer(path, path.with_suffix(".resume"), record, methods=methods)
    with methods[-1].evaluation_weights(model):
        checkpointer.save_model(model, RESULT)
    return path


def trained_llama(base: Path, attention: str = "causal", targets: str = "compute_query+compute_key+w2", **how) -> Path:
    model = LlamaEmbeddingClassifier(Settings, llama=load_llama_model(base, attention))
    tokenizer = read_tokenizer(base / "tokenizer.json")
    return saved_run(base.parent / "films.pt", model, tokenizer, targets=targets, **how)


def written(path: Path, base: Path) -> Path:
    adapters.write(path.parent / "adapter", str(path), str(base))
    return path.parent / "adapter"


# ----------------------------------------------------------------------------------------------------- written


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_read_as_the_merged_model(base: Path, variant: str):
    path = trained_llama(base, variant=variant)
    model, _ = saved_runs.load_classifier(path)
    llama = load_llama_model(written(path, base))
    assert llama.config == model.llama.config and llama.stop_ids == load_llama_model(base).stop_ids
    with torch.no_grad():
        torch.testing.assert_close(llama(IDS, targets=IDS)[0], model.llama(IDS, targets=IDS)[0], atol=1e-4, rtol=0)
        assert not torch.allclose(llama(IDS)[0], load_llama_model(base)(IDS)[0], atol=0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_the_same_in_peft(base: Path, variant: str):
    peft = pytest.importorskip("peft")
    path = trained_llama(base, variant=variant)
    ours = saved_runs.load_classifier(path)[0].llama
    there = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(there, written(path, base)).eval()
    with torch.no_grad():
        outputs = theirs(IDS, output_hidden_states=True)
        torch.testing.assert_close(ours(IDS, targets=IDS)[0], outputs.logits, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(ours(IDS)[1], outputs.hidden_states[-1], atol=1e-5, rtol=1e-5)


def test_the_files_say_what_peft_asks_for(base: Path):
    folder = written(trained_llama(base, dropout=0.25), base)
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["peft_type"] == "LORA" and said["task_type"] == "CAUSAL_LM"
    assert said["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert (said["r"], said["lora_alpha"], said["lora_dropout"]) == (3, 6, 0.25)
    assert said["base_model_name_or_path"] == str(base) and said["bias"] == "none" and said["modules_to_save"] is None
    shapes = {name: [*tensor.shape] for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    assert len(shapes) == 2 * 3 * 2
    assert shapes["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"] == [16, 3]
    assert shapes["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] == [3, 96]


def bert_classifier(folder: Path, **shape) -> tuple[BertForSequenceClassification, WordPiece]:
    torch.manual_seed(0)
    sizes = dict(vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_seq_len=32, dropout=0.0)
    encoder = Bert(BertConfig(**{**sizes, "attention_dropout": 0.0, **shape})).eval()
    for parameter in encoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(95))]
    save_pretrained(folder, encoder, WordPiece(pieces))
    model = BertForSequenceClassification(load_bert(folder), 3).eval()
    for each in (model.classifier, model.transform):
        if each is not None:
            torch.nn.init.normal_(each.weight), torch.nn.init.normal_(each.bias)
    return model, WordPiece(pieces)


KINDS = {"bert": {}, "distilbert": dict(n_segments=0, has_pooler=False), "no pooler": dict(has_pooler=False)}
FILMS = "compute_value+w2"  # in a BERT w2 is called output.dense, and another matrix attention.output.dense


@pytest.mark.parametrize("variant", ["plain", "dora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_of_a_bert_is_read_as_the_merged_model(kind: str, variant: str, tmp_path: Path):
    folder = tmp_path / "base"
    path = saved_run(tmp_path / "films.pt", *bert_classifier(folder, **KINDS[kind]), targets=FILMS, variant=variant)
    model, _ = saved_runs.load_classifier(path)
    encoder = load_bert(written(path, folder))
    before = "bert." if kind == "bert" else ""
    names = [f"{before}encoder.layer.{i}.{each}" for i in (0, 1) for each in ("attention.self.value", "output.dense")]
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert said == (["lin2", "v_lin"] if kind == "distilbert" else names)  # "dense" would name other matrices as well
    with torch.no_grad():
        for mine, other in zip(encoder(IDS), model.encoder(IDS), strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(encoder(IDS)[0], load_bert(folder)(IDS)[0], atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_of_a_bert_is_the_same_in_peft_with_its_head(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    peft = pytest.importorskip("peft")
    folder = tmp_path / "base"
    path = saved_run(tmp_path / "films.pt", *bert_classifier(folder, **KINDS[kind]), targets=FILMS)
    model, _ = saved_runs.load_classifier(path)
    adapter = written(path, folder)
    has_head = kind != "no pooler"
    assert ("the head of" in capsys.readouterr().err) != has_head
    make = transformers.AutoModelForSequenceClassification if has_head else transformers.AutoModel
    there = make.from_pretrained(folder, **({"num_labels": 3} if has_head else {"add_pooling_layer": False}))
    theirs = peft.PeftModel.from_pretrained(there, adapter).eval()
    with torch.no_grad():
        if has_head:
            torch.testing.assert_close(model(IDS), theirs(IDS).logits.log_softmax(-1), atol=1e-5, rtol=1e-5)
        else:
            hidden = theirs(input_ids=IDS).last_hidden_state
            torch.testing.assert_close(model.encoder(IDS)[0], hidden, atol=1e-5, rtol=1e-5)


def test_a_wrong_base_and_a_model_that_peft_cannot_say_are_refused(base: Path, tmp_path: Path):
    path = trained_llama(base)
    other = bytes_of_text(save(tmp_path / "other", hf_llama(seed=1)))
    small = save(tmp_path / "small", hf_llama(num_hidden_layers=1))
    out = tmp_path / "out"
    for wrong in (other, small):
        refused("is not the model of .*; name its base", adapters.write, out, str(path), str(wrong))
    saved = torch.load(path, weights_only=True)
    changed = {
        "keeps no factors of LoRA": {name: value for name, value in saved.items() if name != "kept"},
        "is damaged in what it keeps": {**saved, "kept": {"lora": {"settings": [], "tensors": {}}}},
        "missing .*lora_A": {**saved, "kept": {"lora": {**saved["kept"]["lora"], "tensors": {}}}},
        "no setting 'rank'": {**saved, "kept": {"lora": {**saved["kept"]["lora"], "settings": {"rank": 0}}}},
    }
    for words, content in changed.items():
        torch.save(content, tmp_path / "changed.pt")
        refused(words, adapters.write, out, str(tmp_path / "changed.pt"), str(base))
    with_bitfit = trained_llama(base, others=(("bitfit", {}),))
    refused("needs bitfit as well", adapters.write, out, str(with_bitfit), str(base))
    both_ways = trained_llama(base, attention="bidirectional")
    refused("--attention causal converts it as one", adapters.write, out, str(both_ways), str(base))
    adapters.write(out, str(both_ways), str(base), "causal")
    assert (out / "adapter_config.json").is_file()


# -------------------------------------------------------------------------------------------------------- read


def theirs_saved(base: Path, folder: Path, **settings: Any) -> torch.nn.Module:
    """An adapter that PEFT has made; its model."""
    peft = pytest.importorskip("peft")
    there = transformers.AutoModelForCausalLM.from_pretrained(base)
    targets = {"target_modules": ["q_proj", "k_proj", "down_proj"]}
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, **targets, **settings})
    model = peft.get_peft_model(there, config).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {
            "rank_pattern": {"q_proj": 5, r"model\.layers\.0\.mlp\.down_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.k_proj": 9, "layers.0.self.attn.k_proj": 2},
        },
        {
            "rank_pattern": {r".*\.layers\.[01]\.mlp\..*": 5, "(q|k)_proj": 2},
            "alpha_pattern": {r"model\.layers\.0\.(?!mlp).*": 9, r".*\.mlp\.\w+": 2, "[qk]_proj": 20, "k_proj": 30},
        },
        {"alpha_pattern": {"proj": 9, "q_proj|down_proj": 7, r"layers\.1\.self_attn\.k_proj": 2, r".*": 3}},
        {"layers_to_transform": [1], "task_type": "CAUSAL_LM"},
        {"modules_to_save": ["lm_head"], "target_modules": "all-linear"},
    ],
    ids=["plain", "dora", "rslora", "patterns", "expressions", "alternatives", "one layer", "modules to save"],
)
def test_what_peft_has_saved_is_read_as_the_same_model(base: Path, tmp_path: Path, settings: dict[str, Any]):
    peft = pytest.importorskip("peft")
    theirs_saved(base, tmp_path / "adapter", **settings)
    there = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(there, tmp_path / "adapter").eval()  # it saves patterns in another order
    ours = load_llama_model(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS, targets=IDS)[0], theirs(IDS).logits, atol=2e-5, rtol=1e-5)
        assert not torch.allclose(ours(IDS)[0], load_llama_model(base)(IDS)[0], atol=0.1)


def test_an_expression_that_never_ends_is_given_up(adapter: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    rewrite(adapter / "adapter_config.json", alpha_pattern={"([a-z0-9_.]+)+!": 3})
    refused(r"alpha_pattern: matching .* takes more than 1 seconds", load_llama_model, adapter)


def test_new_embeddings_of_a_tied_model_are_refused(tmp_path: Path):
    """In PEFT the output matrix stays as it was, and is no longer the same."""
    base = save(tmp_path / "base", hf_llama("smollm"))
    theirs = theirs_saved(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    assert not torch.equal(theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight)
    refused(
        "holds model.embed_tokens.weight, which in .*base is the output matrix", load_llama_model, tmp_path / "adapter"
    )


@pytest.mark.parametrize("make", ["BertForSequenceClassification", "DistilBertForSequenceClassification", "BertModel"])
def test_what_peft_has_saved_of_a_bert_is_read_as_the_same_model(make: str, tmp_path: Path, capsys):
    peft = pytest.importorskip("peft")
    sizes = dict(vocab_size=100, num_labels=3)
    if make.startswith("Distil"):
        config = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, **sizes)
    else:
        layers = dict(num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
        config = transformers.BertConfig(hidden_size=32, **layers, **sizes)
    torch.manual_seed(0)
    there = getattr(transformers, make)(config)
    (there if make == "BertModel" else there.base_model).save_pretrained(tmp_path / "base")  # without a head
    there.name_or_path = str(tmp_path / "base")
    targets = ["q_lin", "lin2"] if make.startswith("Distil") else ["query", "output.dense"]
    kind = {} if make == "BertModel" else {"task_type": "SEQ_CLS"}
    model = peft.get_peft_model(there, peft.LoraConfig(r=3, target_modules=targets, **kind)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "adapter")
    rewrite(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="../base")
    ours = load_bert(tmp_path / "adapter")
    assert ("left out" in capsys.readouterr().err) == (make != "BertModel")
    inner = model.base_model.model
    inner = inner if make == "BertModel" else inner.base_model
    with torch.no_grad():
        theirs = inner(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(ours(IDS)[0], theirs, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(theirs, load_bert(tmp_path / "base")(IDS)[0], atol=0.1)


@pytest.fixture
def adapter(base: Path) -> Path:
    return written(trained_llama(base), base)


def test_the_base_is_found_beside_the_adapter_or_from_here_or_as_it_is_said(
    adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, expected = adapter / "adapter_config.json", load_llama_model(adapter).state_dict()
    monkeypatch.chdir(tmp_path)
    for name in ("../base", "base", str(base)):
        rewrite(config, base_model_name_or_path=name)
        found = load_llama_model(adapter)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items())
        assert Path(tokenizer_name(adapter)).resolve() == base / "tokenizer.json"
    for name in ("someone/llama", "", None, 3, "a\0b", "x" * 5000):
        rewrite(config, base_model_name_or_path=name)
        refused("python -m convert .* --base DIR makes a model of both", load_llama_model, adapter)
    rewrite(config, base_model_name_or_path=".")
    monkeypatch.chdir(adapter)
    refused("is an adapter itself", load_llama_model, adapter)


def test_the_program_writes_an_adapter_and_merges_it(call: Callable, base: Path, tmp_path: Path):
    path, out = trained_llama(base), tmp_path / "adapter"
    status, printed, err = call(path, out, "--to", "peft", "--base", base, main=main)
    assert status == 0 and f"wrote {out}" in printed and "the head of" in err
    rewrite(out / "adapter_config.json", base_model_name_or_path="someone/llama")
    run_convert(out, tmp_path / "merged", "--to", "hf", "--base", base)
    merged, ours = load_llama_model(tmp_path / "merged"), saved_runs.load_classifier(path)[0].llama
    torch.testing.assert_close(merged.state_dict(), {**ours.state_dict()}, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "merged/tokenizer.json").is_file()
    for words, flags in {
        "--to peft needs --base": (path, tmp_path / "x", "--to", "peft"),
        "--base is for adapters": (base, tmp_path / "x", "--to", "hf", "--base", base),
        "--base .*nothing is no folder": (out, tmp_path / "x", "--to", "hf", "--base", tmp_path / "nothing"),
        "is an adapter itself": (out, tmp_path / "x", "--to", "hf", "--base", out),
        "--tokenizer is not for --to peft": (path, tmp_path / "x", "--to", "peft", "--base", base, "--tokenizer", base),
        "--base is not for --to onnx": (path, tmp_path / "x", "--to", "onnx", "--base", base),
    }.items():
        refused(words, run_convert, *flags)


def test_a_run_starts_from_an_adapter_and_knows_it_by_its_content(
    adapter: Path, base: Path, drive: Callable, classify_flags: Callable, tmp_path: Path
):
    flags = [*classify_flags("finetune"), "--pretrained-model-path", adapter, "--epochs", 1]
    index = flags.index("--tokenizer") if "--tokenizer" in flags else None
    if index is not None:
        del flags[index : index + 2]
    printed = drive(*flags, "--model_out", "own.pt")
    assert "epoch 0: train loss" in printed
    first = torch.load(tmp_path / "own.pt", weights_only=True)["identity"]["checkpoint"]
    tensors = load_file(base / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    drive(*flags, "--model_out", "own2.pt")
    assert torch.load(tmp_path / "own2.pt", weights_only=True)["identity"]["checkpoint"] != first


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "an adapter of the kind 'IA3'; LORA is known here"),
        ({"bias": "all"}, "bias='all' is nothing that is known here"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is nothing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens="),
        ({"layer_replication": [[0, 1]]}, "layer_replication="),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"something_new": "x"}, "something_new='x'"),
        ({"r": 4}, "r=4, but .* has factors of rank 3"),
        ({"r": "3"}, "must be numbers"),
        ({"lora_alpha": 10**400}, "must be numbers"),
        ({"lora_alpha": True}, "must be numbers"),
        ({"alpha_pattern": [1]}, "must be numbers"),
        ({"alpha_pattern": {"q_proj": "x"}}, "must be numbers"),
        ({"alpha_pattern": {"q_proj": 3, "(k_proj": 3}}, "one of .* is no regular expression"),
        ({"use_dora": True}, "use_dora=True does not fit"),
        ({"use_rslora": "yes"}, "must be true or false"),
    ],
)
def test_settings_that_would_be_another_update_are_refused(adapter: Path, settings: dict[str, Any], words: str):
    rewrite(adapter / "adapter_config.json", **settings)
    refused(words, load_llama_model, adapter)


def test_weights_that_do_not_fit_are_refused(adapter: Path):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    changed = {
        "its factors do not fit": {**tensors, name: torch.zeros(3, 7)},
        "r=3, but": {key: tensor for key, tensor in tensors.items() if key != name},
        "which no LoRA of matrices has": {**tensors, "base_model.model.x.lora_embedding_A": torch.zeros(3)},
        "updates model.layers.9.mlp.down_proj, which": {
            key.replace("layers.1", "layers.9"): tensor for key, tensor in tensors.items()
        },
        "is not a floating-point": {**tensors, name: torch.zeros(3, 64, dtype=torch.int8)},
        "not all numbers are finite": {**tensors, name: torch.full((3, 64), float("nan"))},
        "holds model.layers.0.more": {**tensors, "base_model.model.model.layers.0.more": torch.zeros(3)},
    }
    for words, content in changed.items():
        save_file({key: tensor.clone() for key, tensor in content.items()}, file)
        refused(words, load_llama_model, adapter)
    file.write_bytes(b"nothing")
    refused("cannot load", load_llama_model, adapter)
    file.unlink()
    refused("holds an adapter_config.json and no weights", load_llama_model, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    refused("does not hold a JSON object", load_llama_model, adapter)
