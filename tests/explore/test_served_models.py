"""`--serve` with a model of each format: what the server answers is what the checkpoint itself computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_llama, save_checkpoint
from error_helpers import check_one_error
from pages import Trained, trained  # noqa: F401
from test_serve import ask, request, serving

import rope
from bert import run
from bert.config import BertConfig
from bert.model import Bert
from bert.save import save_pretrained
from bert.wordpiece import WordPiece
from convert import __main__ as convert
from engine.runs import load_classifier, predict
from explore import __main__ as program
from explore.inspected import InspectedModel
from explore.look import read
from explore.served import PageAnswers
from llama import Attention, Llama
from tokenizer import Tokenizer

TEXT = "A warm little film."


def served(path: Path, kind: str, **given: object) -> dict:
    """The answer to one question about the model that `python -m explore PATH --serve` serves."""
    args = program.get_args([str(path), "--serve", "--text", TEXT])
    program.check_args(args)
    with serving(lambda: program.open_live(args)) as server:
        assert TEXT.encode() in request(server, "GET", f"/{server.secret}/")[1]
        status, answer = ask(
            server, json.dumps({"kind": kind, "given": {"text": TEXT, "switches": {}} | given}).encode()
        )
    assert status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_a_converted_model(form: str, call: Callable, tokenizer: Tokenizer, tiny_tokenizer: Path, tmp_path: Path):
    pytest.importorskip("gguf" if form == "gguf" else "safetensors", reason="the extra is not installed")
    model = random_llama(attention="causal")
    checkpoint = save_checkpoint(tmp_path / "model.pt", model)
    out = tmp_path / ("folder" if form == "hf" else "model.gguf")
    flags = (checkpoint, out, "--to", form, "--tokenizer", tiny_tokenizer)
    assert call(*flags, main=convert.main)[0] == 0
    answer = served(out, "next", sampling={"temperature": 0}, random=0)
    ids = torch.tensor([tokenizer.encode(TEXT, bos=True, eos=False)])
    p = model(ids)[0][0, -1].detach().softmax(-1)
    assert answer["id"] == int(p.argmax()) and answer["p"] == pytest.approx(float(p.max()), abs=1e-5)
    shown = {row["id"]: row["plain"] for row in answer["top"]}
    assert shown == pytest.approx({id: float(p[id]) for id in p.topk(len(shown)).indices.tolist()}, abs=1e-5)


def test_a_fine_tuned_classifier(trained: Trained):
    expected = next(iter(predict(*load_classifier(trained.model), [TEXT])))
    assert served(trained.model, "read", use="right")["probabilities"] == pytest.approx(
        expected.probabilities, abs=1e-5
    )


@pytest.mark.parametrize("edit", ["bias", "scale", "mask"])
def test_one_head_in_numbers_is_that_of_the_model(edit: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """Biases that a method adds are in queries and keys; a weight that an edit makes another is said to be one."""
    llama = random_llama(attention="causal")
    attention, ids = llama.layers[1].attention, tokenizer.encode(TEXT, bos=True, eos=False)
    if edit == "bias":
        for linear in (attention.compute_query, attention.compute_key):
            drawn = torch.randn(linear.out_features)
            linear.register_forward_hook(lambda _, __, output, drawn=drawn: output + drawn)
    elif edit == "scale":
        own = Attention.compute_query_key_value_scores
        monkeypatch.setattr(Attention, "compute_query_key_value_scores", lambda self, q, *more: own(self, 3 * q, *more))
    else:
        own = Attention.compute_query_key_value_scores
        unmasked = lambda self, q, k, v, mask=None: own(self, q, k, v, torch.ones_like(mask))  # noqa: E731
        monkeypatch.setattr(Attention, "compute_query_key_value_scores", unmasked)
    weights, answers = (
        read(llama, ids, "causal").attention[1][2],
        PageAnswers(InspectedModel("random", llama, tokenizer)),
    )
    row = [answers.answer("numbers", dict(text=TEXT, layer=1, head=2, query=3, key=key)) for key in range(len(ids))]
    assert [each["weight"] for each in row] == pytest.approx(weights[3].tolist(), abs=1e-6)
    scores = torch.tensor([each["score"] for each in row[:4]])
    are_of_scores = torch.allclose(scores.softmax(-1), weights[3, :4], atol=1e-3)
    assert are_of_scores == (edit == "bias") and any(each["isOther"] for each in row) == (edit != "bias")


@pytest.mark.parametrize(
    ("place", "name", "edit"),
    [
        (Attention, "compute_query_key_value_scores", lambda own: lambda self, q, *more: own(self, 3 * q, *more)),
        (Attention, "forward", lambda own: lambda self, x: own(self, 3 * x)),
        (rope, "rope_table", lambda own: lambda *settings: own(*settings)[::-1]),
        (Llama, "forward", lambda own: lambda self, tokens, targets=None: own(self, tokens.flip(0, 1), targets)),
    ],
    ids=["scores", "attention", "angles", "model"],
)
def test_an_edit_is_in_the_next_tokens(place, name: str, edit: Callable, tokenizer: Tokenizer, monkeypatch):
    """Also behind a text that was read before."""
    llama = random_llama(attention="causal")
    monkeypatch.setattr(place, name, edit(getattr(place, name)))
    answers, ids = PageAnswers(InspectedModel("random", llama, tokenizer)), tokenizer.encode(TEXT, bos=True, eos=False)
    for added in ([], [5], [5, 6]):
        answer = answers.answer("next", dict(text=TEXT, added=added, use="right", sampling={"temperature": 0}))
        p = llama(torch.tensor([ids + added]))[0][0, -1].detach().softmax(-1)
        shown = {row["id"]: row["plain"] for row in answer["top"]}
        assert shown == pytest.approx({id: float(p[id]) for id in shown}, abs=1e-5)


def test_a_bert_is_refused_in_one_line(classify_flags: Callable, call: Callable, tmp_path: Path):
    config = BertConfig.from_preset("mini", vocab_size=9, dim=32, n_heads=4, hidden_dim=48)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "good", "bad"]
    save_pretrained(tmp_path / "bert", Bert(config), WordPiece(pieces))
    flags = (*classify_flags("finetune"), "--pretrained-model-path", tmp_path / "bert", "--epochs", 1)
    assert call(*flags, main=run.main)[0] == 0
    (model,) = tmp_path.glob("*.pt")
    status, out, err = call(model, "--serve", main=program.main)
    check_one_error(status, err, f"{model.name} is a fine-tuned Bert, and the page shows what a Llama computes")
    assert out.startswith("http://127.0.0.1:")  # which no longer answers
