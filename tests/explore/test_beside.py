"""`--beside`: two models on one text, each with its own next tokens and attention, on the page that `--out` writes."""

from __future__ import annotations

import base64
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chromium import DRAWN, browsing
from conftest import ROOT, random_llama, save_checkpoint
from error_helpers import check_one_error
from pages import Trained, data_of, trained  # noqa: F401

from engine.weights import load_llama_model
from explore import __main__ as program
from explore.inspected import InspectedModel, InspectedText, page_of_model
from explore.look import read
from tokenizer import Tokenizer
from utils import UserError

BUNDLED, TEXT = ROOT / "checkpoints" / "minllama1M.pt", "Once upon a time there was a goat."


@pytest.mark.slow
def test_both_models_are_read_in_their_own_attention(call: Callable, tmp_path: Path):
    changed = torch.load(BUNDLED, weights_only=True)
    changed["model"]["norm.weight"] *= 0.5
    changed["model_args"]["attention"] = "bidirectional"
    torch.save(changed, tmp_path / "changed.pt")
    flags = ("--tokenizer", BUNDLED.with_suffix(".model"), "--text", TEXT, "--out", "p.html")
    status, _, err = call(BUNDLED, "--beside", tmp_path / "changed.pt", *flags, main=program.main)
    assert (status, err) == (0, "")
    page = data_of(tmp_path / "p.html")
    assert page["columns"] == {"first": {"title": "minllama1M.pt", "remark": "causal"},
                               "second": {"title": "changed.pt", "remark": "bidirectional"}}  # fmt: skip
    (text,) = page["texts"]
    for name, path, attention in (("first", BUNDLED, "causal"), ("second", tmp_path / "changed.pt", "bidirectional")):
        record = read(load_llama_model(path).eval(), text["ids"], attention)
        shown = text["semantics"][name]
        p, ids = record.logits.softmax(-1).topk(5)
        assert shown["lens"][-1]["ids"] == ids.flatten().tolist()
        torch.testing.assert_close(torch.tensor(shown["lens"][-1]["p"]), p.flatten(), atol=1e-3, rtol=1e-3)
        stored = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(shown["attention"]))), dtype=torch.uint8)
        weights = torch.stack(record.attention)
        torch.testing.assert_close(stored.view_as(weights).div(255).square(), weights, atol=5e-3, rtol=0)
    with browsing() as browser:
        browser.open(tmp_path / "p.html")
        browser.value("update({ token: 3, layer: 1, head: 2 })")
        browser.wait(DRAWN)
        for part in ("expected", "maps", "layers"):
            titles = browser.value(f"[...document.querySelectorAll('#{part} h3')].map((each) => each.textContent)")
            assert titles == ["minllama1M.pt causal", "changed.pt bidirectional"]
        titles = browser.value("[...document.querySelectorAll('#semantics label')].map((each) => each.textContent)")
        assert titles == ["minllama1M.pt", "changed.pt"] and browser.errors == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--beside", "nowhere.pt"], "--beside nowhere.pt does not exist"),
        (["--beside", "small.pt"], "--beside small.pt has 2 layers of 4 heads, but minllama1M.pt has 4 of 4"),
        (["--beside", "other.pt"], "--beside other.pt has other tokens than minllama1M.pt"),
        (["--beside", BUNDLED, "--live"], "--beside is for a page that is drawn once"),
    ],
    ids=str,
)
def test_models_that_cannot_stand_beside_each_other(
    flags: list, words: str, call: Callable, tmp_path: Path, tiny_tokenizer: Path
):
    for name, layers in (("small", 2), ("other", 4)):
        shutil.copy(tiny_tokenizer, tmp_path / f"{name}.model")
        save_checkpoint(tmp_path / f"{name}.pt", random_llama(n_layers=layers, n_heads=4, vocab_size=300))
    status, _, err = call(BUNDLED, *flags, "--out", "p.html", main=program.main)
    check_one_error(status, err, words)
    assert not (tmp_path / "p.html").exists()


def test_predicted_tokens_must_be_the_same_too(tokenizer: Tokenizer):
    """The text may be of tokens that both have, and what the second model predicts of others."""

    class Other(InspectedModel):
        def piece(self, id: int) -> str:
            return super().piece(id) if id in ids else f"{id}?"

    llama = random_llama()
    ids = tokenizer.encode(TEXT, bos=True, eos=False)
    one, two = InspectedModel("one", llama, tokenizer), Other("two", llama, tokenizer)
    assert page_of_model(one, [InspectedText(TEXT)], one)["columns"]
    with pytest.raises(UserError, match="--beside two has other tokens than one"):
        page_of_model(one, [InspectedText(TEXT)], two)


def test_a_classifier_beside_what_it_began_as(trained: Trained, call: Callable):
    """The tokens are those that the first model reads."""
    status, _, err = call(trained.log, "--beside", BUNDLED, "--out", "p.html", main=program.main)
    check_one_error(status, err, "--beside is for a model")
    inspected = InspectedModel.open(str(trained.model))
    status, _, err = call(trained.model, "--beside", trained.model, "--out", "p.html", main=program.main)
    assert (status, err) == (0, "")
    (text,) = data_of(Path("p.html"))["texts"]
    assert text["ids"] == inspected.encode(program.SAMPLE_TEXT)
    assert text["semantics"]["first"] == text["semantics"]["second"] and text["decision"]
