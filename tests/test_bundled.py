"""The bundled checkpoint and data set: what the package promises about them, checked on the committed files."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from config import LlamaConfig
from engine.data import create_data
from engine.storage import load_tensors
from engine.weights import load_llama_model
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "checkpoints"
CHECKPOINT = FOLDER / "minllama1M.pt"
SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def scripts():
    """Imports a script of `checkpoints/` by name, without leaving its folder on the path."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path[:] = before


@pytest.fixture(scope="module")
def grammar(scripts) -> ModuleType:
    return scripts("generate_text")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_model=FOLDER / "minllama1M.model")


@pytest.fixture(scope="module")
def label_names() -> list[str]:
    return json.loads((ROOT / "data/films-label-mapping.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def splits() -> dict[str, list]:
    return {split: create_data(ROOT / f"data/films-{split}.txt", 5) for split in SPLITS}


def contains(phrase: str, text: str) -> bool:
    """Whether `phrase` stands in `text` as whole words, in any case."""
    return re.search(rf"(?<![\w-]){re.escape(phrase.lower())}(?![\w-])", text.lower()) is not None


# ------------------------------------------------------------------------------------------------ checkpoint


def test_the_folder_is_small():
    files = [path for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".resume"]
    assert sum(path.stat().st_size for path in files) < 6_000_000


def test_model_args_say_what_the_model_is(tokenizer):
    checkpoint = load_tensors(CHECKPOINT)
    config = LlamaConfig.from_checkpoint(checkpoint["model_args"])
    assert checkpoint["model_args"]["attention"] == "causal"
    assert config.n_kv_heads < config.n_heads  # grouped-query attention
    assert config.vocab_size == tokenizer.n_words
    model = load_llama_model(CHECKPOINT)
    assert model.config.is_causal
    assert 500_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000


def test_tokenizer_is_of_llamas_kind(tokenizer):
    assert tokenizer.sp_model.unk_id() == 0
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    for text in ("The café closes at 21:45.", "日本語", "tabs\tand <br /> tags"):
        ids = tokenizer.encode(text, bos=True, eos=True)
        assert tokenizer.sp_model.unk_id() not in ids
    assert tokenizer.decode(tokenizer.encode("The café", bos=True, eos=True)) == "The café"
    digits = [tokenizer.sp_model.id_to_piece(token) for token in tokenizer.encode("2026", bos=False, eos=False)]
    assert [piece for piece in digits if piece != "▁"] == ["2", "0", "2", "6"]


@pytest.mark.parametrize("name", ["films", "sst", "cfimdb"])
def test_every_label_name_is_one_token(name, tokenizer):
    for label in json.loads((ROOT / f"data/{name}-label-mapping.json").read_text(encoding="utf-8")):
        assert len(tokenizer.encode(label, bos=False, eos=False)) == 1


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_reference_tensors(attention):
    """Computed once by Hugging Face's Llama, an independent implementation."""
    reference = load_tensors(FOLDER / "minllama1M-reference.pt")
    model = load_llama_model(CHECKPOINT, attention=attention)
    with torch.inference_mode():
        logits, hidden_states = model(reference["tokens"])
    torch.testing.assert_close(logits, reference[attention]["logits"], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(hidden_states, reference[attention]["hidden_states"], atol=1e-4, rtol=0.0)


def test_reference_tells_the_two_kinds_of_attention_apart():
    """The sequences share two tokens: only without the causal mask may the states there differ."""
    reference = load_tensors(FOLDER / "minllama1M-reference.pt")
    tokens = reference["tokens"]
    assert torch.equal(tokens[0, :2], tokens[1, :2])
    assert tokens[0, -2:].tolist() == [0, 0]
    causal, bidirectional = (reference[kind]["hidden_states"] for kind in ("causal", "bidirectional"))
    torch.testing.assert_close(causal[0, :2], causal[1, :2], atol=1e-5, rtol=0.0)
    assert (bidirectional[0, :2] - bidirectional[1, :2]).abs().max() > 0.1


def test_reference_is_what_transformers_computes_now(scripts):
    pytest.importorskip("transformers")
    stored = load_tensors(FOLDER / "minllama1M-reference.pt")
    computed = scripts("reference").compute_reference(CHECKPOINT)
    assert torch.equal(stored["tokens"], computed["tokens"])
    for attention in ("causal", "bidirectional"):
        for name, tensor in stored[attention].items():
            torch.testing.assert_close(computed[attention][name], tensor, atol=1e-4, rtol=0.0)


# ------------------------------------------------------------------------------------ what the README shows of them


README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_the_readme_shows_what_is_generated(drive: Callable, tmp_path: Path):
    drive("--pretrained-model-path", CHECKPOINT)
    text = (tmp_path / "generated-sentence-temp-0.txt").read_text(encoding="utf-8")
    assert " ".join(text.split()) in " ".join(README.split())


def test_the_readme_has_the_zero_shot_figures(drive: Callable):
    command = next(block for block in README.split("```") if "prompt --batch_size 10 --train data/films" in block)
    paths = re.sub(r"\bdata/", f"{ROOT}/data/", command.replace("\\\n", " "))
    out = drive("--pretrained-model-path", CHECKPOINT, *paths.split()[2:])
    row = re.search(r"`films` zero-shot, dev / test \(majority class (.*) / (.*)\) \| - \| (.*) / (.*) \|", MEASURED)
    shown = [re.findall(rf"^(?:dev|test) {name} :: (.*)$", out, re.MULTILINE) for name in ("majority-class acc", "acc")]
    assert [*shown[0], *shown[1]] == [*row.groups()]


@pytest.mark.slow
def test_the_readmes_lines_of_python_load_classify_and_generate(drive: Callable, tmp_path: Path):
    lines = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len([line for line in lines.splitlines() if line]) <= 10
    (name,) = re.findall(r'load_classifier\(ROOT / "(.*?)"\)', lines)
    few = [f"{i % 5} ||| film {i}\n" for i in range(20)]
    (tmp_path / "few.txt").write_text("".join(few))
    files = [word for split in ("train", "dev", "test") for word in (f"--{split}", "few.txt")]
    outs = ["--dev_out", "a-dev-finetuning-output.txt", "--test_out", "a-test-finetuning-output.txt"]
    labels = ["--label-names", ROOT / "data/films-label-mapping.json"]
    drive("--option", "finetune", "--pretrained-model-path", CHECKPOINT, *files, *labels, *outs, "--model_out", name)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", lines.replace("(ROOT /", f"({str(tmp_path)!r} + '/' +")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second, text = done.stdout.splitlines()
    names = json.loads((ROOT / "data/films-label-mapping.json").read_text())
    assert first.split()[0] in names and first.endswith("I loved every minute of it.") and "jokes fall flat" in second
    assert text.startswith("The film was ") and len(text.split()) > 8


# -------------------------------------------------------------------------------------------------- data set


def test_splits_are_well_formed_and_disjoint(splits):
    sizes = {split: len(examples) for split, examples in splits.items()}
    assert 1000 <= sizes["train"] <= 1500
    assert 250 <= sizes["dev"] <= 300 and 250 <= sizes["test"] <= 300
    for examples in splits.values():
        shares = [count / len(examples) for count in Counter(example.label for example in examples).values()]
        assert len(shares) == 5 and min(shares) > 0.1 and max(shares) < 0.3
    sentences = [example.sentence for examples in splits.values() for example in examples]
    assert len(sentences) == len(set(sentences))


def test_no_sentence_names_its_label(splits, label_names):
    for examples in splits.values():
        for example in examples:
            assert not any(contains(name, example.sentence) for name in label_names)


def as_pattern(option: str) -> re.Pattern:
    """Matches what an option becomes: its verb endings and slots stand for any word."""
    pattern = re.escape(option).replace(r"\[is\]", r"\w+").replace(r"\[has\]", r"\w+")
    pattern = re.sub(r"\\\[\w+\\\]", r"\\w*", pattern)
    return re.compile(rf"(?<![\w-]){pattern}(?![\w-])", re.IGNORECASE)


def test_opinions_of_train_and_of_dev_and_test_are_disjoint(splits, grammar):
    train = "\n".join(example.sentence for example in splits["train"])
    held_out = "\n".join(example.sentence for split in ("dev", "test") for example in splits[split])
    seen = 0
    for name, options in grammar.FILM["opinions"].items():
        for option in options["held"]:
            assert not as_pattern(option).search(train), f"{name}: {option}"
            seen += as_pattern(option).search(held_out) is not None
        for option in options["train"]:
            assert not as_pattern(option).search(held_out), f"{name}: {option}"
    assert seen > 150


def test_committed_data_is_what_the_generator_writes(splits, grammar, label_names):
    assert list(grammar.LABEL_NAMES) == label_names
    for split, rows in grammar.data_set().items():
        assert [(example.label, example.sentence) for example in splits[split]] == rows


# ------------------------------------------------------------------------------------------------- generator


def digest(texts) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def test_generator_follows_its_seed(grammar):
    first, again, other = (digest(grammar.documents(seed, scale=0.01)) for seed in (1, 1, 2))
    assert first == again != other
    ordered = digest(grammar.documents(1, scale=0.01, ordered=True))
    assert (first[:10], ordered[:10]) == ("e2b5419a28", "5d2e37af5c")  # the bundled checkpoint was trained on such text


def test_pretraining_text_has_no_sentence_of_the_data_set(splits, grammar):
    sentences = [example.sentence for examples in splits.values() for example in examples]
    for document in grammar.documents(scale=0.02):
        assert not any(sentence in document for sentence in sentences)


def test_text_is_clean(grammar):
    """No slot left open, no doubled blank, no sentence that begins small, no "a apple"."""
    for document in grammar.documents(3, scale=0.02):
        assert not re.search(r"[{}|\[\]#]|  | [,.;:!?]", document)
        assert not re.search(r"\b[Aa] [aeio](?!ne\b)", document)
        assert not re.search(r"[.!?] [a-z]", document)
