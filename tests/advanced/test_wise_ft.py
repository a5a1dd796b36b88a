"""WiSE-FT: mixtures of weights, scored at the end of a run and judged like an epoch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import asset
from steps import move, prepared
from test_contract import Laboratory, laboratory, outputs_of  # noqa: F401 (a fixture)
from test_methods import ADVANCED, TOKENS, Settings, classifier
from torch import nn

from advanced.ema import EMA
from advanced.wise_ft import WiSEFT
from advanced.wise_ft import best_of as best_alpha_of
from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from engine import runs
from engine.checkpointer import best_of
from engine.methods import EpochResult
from engine.reports import print_epoch_table
from engine.storage import load_tensors
from engine.weights import load_llama_model


def swept(scores: list[float], model: nn.Module | None = None) -> tuple[WiSEFT, nn.Module, list[dict], bool]:
    """A model whose weights have moved, and what each mixture of it was when it was scored."""
    model = model or classifier()
    method = WiSEFT(points=len(scores))
    prepared(model, method)
    move(model)
    seen: list[dict] = []

    def evaluate() -> float:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return scores[len(seen) - 1]

    return method, model, seen, method.finish(model, evaluate)


def test_every_mixture_is_that_of_the_formula_and_both_ends_are_exact():
    before = {name: tensor.clone() for name, tensor in classifier().state_dict().items()}
    moved = classifier()
    move(moved)
    after = moved.state_dict()
    method, model, seen, _ = swept([0.1, 0.2, 0.9, 0.3, 0.4])
    assert method.alphas == [0.0, 0.25, 0.5, 0.75, 1.0] and len(seen) == 5
    for alpha, state in zip(method.alphas, seen, strict=True):
        for name, tensor in state.items():
            of_head = name.startswith("classifier_head")
            expected = after[name] if of_head else (1 - alpha) * before[name] + alpha * after[name]
            torch.testing.assert_close(tensor, expected)
            if alpha in (0.0, 1.0):
                assert torch.equal(tensor, after[name] if of_head or alpha == 1.0 else before[name]), name
        assert torch.equal(state["llama.output.weight"], state["llama.tok_embeddings.weight"])
    assert model.llama.output.weight is model.llama.tok_embeddings.weight
    assert len(method.before) == len(list(model.llama.parameters()))  # a tied matrix once
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {tensor.data_ptr() for tensor in method.before.values()}
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in model.state_dict().items())  # the best is left


@pytest.mark.parametrize(
    ("scores", "alpha"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], 1.0),  # nothing is gained
        ([0.5, 0.5, 0.5, 0.5, 0.4], 0.5),
        ([0.5, 0.6, 0.5, 0.6, 0.5], 0.75),  # as near to one half: the larger one
        ([0.7, 0.6, 0.5, 0.6, 0.7], 1.0),
        ([0.7, 0.6, 0.5, 0.6, 0.5], 0.0),
        ([0.1, 0.6, 0.5, 0.6, 0.7], 1.0),
    ],
)
def test_the_best_is_taken_and_of_equals_the_last_epoch_or_the_nearest_to_one_half(
    scores: list[float], alpha: float, capsys: pytest.CaptureFixture
):
    method, model, seen, is_judged = swept(scores)
    assert method.figures() == {"alphas": [0.0, 0.25, 0.5, 0.75, 1.0], "scores": scores, "alpha": alpha}
    assert is_judged == (alpha < 1.0)  # the last epoch has been judged
    said = capsys.readouterr().err
    assert ("no mixture scores better than the pretrained weights; of the training only " in said) == (alpha == 0.0)
    assert ("only classifier_head.weight, classifier_head.bias is left" in said) == (alpha == 0.0)
    chosen = seen[method.alphas.index(alpha)]
    assert all(torch.equal(tensor, chosen[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("points", range(4, 102))
def test_of_two_alphas_as_near_to_one_half_the_larger_is_taken_however_they_are_rounded(points: int):
    alphas = WiSEFT(points).alphas
    for place in range(1, points // 2):
        scores = [float(each in (place, points - 1 - place)) for each in range(points)]
        assert best_alpha_of(alphas, scores) == alphas[points - 1 - place]


def test_two_points_are_the_two_ends_and_a_model_without_a_head_is_mixed_whole(
    tokenizer, capsys: pytest.CaptureFixture
):
    class Words:
        num_labels = 2

    llama = classifier().llama
    model = LlamaZeroShotClassifier(Words, tokenizer, ["bad", "good"], llama=llama).requires_grad_(True)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    method, model, seen, _ = swept([0.4, 0.3], model)
    assert "nothing is left of the training" in capsys.readouterr().err
    assert method.alphas == [0.0, 1.0]
    assert all(torch.equal(tensor, first[name]) for name, tensor in seen[0].items())
    assert not any(torch.equal(tensor, first[name]) for name, tensor in seen[1].items())


def test_what_another_method_has_added_is_not_mixed():
    model = classifier()
    model.llama.layers[0].attention.bias = nn.Parameter(torch.ones(3))
    method, model, seen, _ = swept([0.1, 0.2, 0.1], model)
    bias = [state["llama.layers.0.attention.bias"] for state in seen]
    assert torch.equal(bias[0], bias[2]) and not torch.equal(bias[0], torch.ones(3))
    assert "layers.0.attention.bias" not in method.before


def test_with_an_average_of_the_weights_the_average_is_mixed_and_training_weights_come_back():
    model = classifier()
    ema, wise = EMA(decay=0.0), WiSEFT(points=3)
    prepared(model, ema, wise)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for average in ema.average.values():
        average += 1.0  # what it would be after some steps
    ema.steps = 1
    move(model)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: list[torch.Tensor] = []
    name = "llama.layers.0.feed_forward.w1.weight"
    with wise.evaluation_weights(model), ema.evaluation_weights(model):
        wise.finish(model, lambda: seen.append(model.get_parameter(name).detach().clone()) or 0.5 - abs(2 - len(seen)))
        mixed = model.get_parameter(name).detach().clone()
    for alpha, weight in zip((0.0, 0.5, 1.0), seen, strict=True):
        torch.testing.assert_close(weight, before[name] + alpha)
    torch.testing.assert_close(mixed, before[name] + 0.5)
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


def test_mixtures_of_another_run_are_not_gone_on_with():
    method = WiSEFT(points=3)
    own = {"alphas": [0.0, 0.5, 1.0], "scores": [0.1, 0.3, 0.2], "alpha": 0.5}
    method.load_state({"found": own}, lambda *how: None)
    assert method.figures() == own
    for other in ({**own, "alphas": [0.0, 1.0], "scores": [0.5, 0.5]}, {"alphas": [0.0, 0.5, 1.0]}):
        with pytest.raises(ValueError, match="the mixtures of another run"):
            method.load_state({"found": other}, lambda *how: None)


# ----------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("names", ["wise-ft", "smart,ema,wise-ft"])
def test_the_mixture_is_judged_after_the_last_epoch_and_saved_if_it_is_the_best(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, names: str
):
    """Each score is the best so far, and that of the middle mixture the best of all."""
    scores, finish = (number / 100 for number in range(1, 99)), WiSEFT.finish

    def middle_is_best(self: WiSEFT, model: nn.Module, evaluate: Callable[[], float]) -> bool:
        calls: list[float] = []
        return finish(self, model, lambda: calls.append(evaluate()) or (0.99 if len(calls) == 2 else calls[-1] / 2))

    monkeypatch.setattr(WiSEFT, "finish", middle_is_best)
    monkeypatch.setattr("engine.training.Trainer.evaluate", lambda *how, **named: SimpleNamespace(score=next(scores)))
    run = laboratory.assemble(laboratory.plan(names, epochs=2, lr=0.02))
    checkpointer, judged = laboratory.watched(run)
    history = laboratory.train(run, checkpointer)
    assert [result.is_finish for result in history] == [False, False, True] and history[-1].improved
    model, about = runs.load_classifier(checkpointer.model_path)
    assert about.epoch == 2 == best_of(history).epoch
    assert torch.equal(outputs_of(model, run), judged[-1])
    (method,) = [each for each in run.trainer.methods if each.name == "wise-ft"]
    assert method.figures()["alpha"] == 0.5
    assert load_tensors(checkpointer.model_path)["figures"] == {"wise-ft": method.figures()}

    resumed = laboratory.assemble(laboratory.plan(names, epochs=2, lr=0.02))
    checkpointer = laboratory.checkpointer(resumed)
    again = laboratory.train(
        resumed, checkpointer, checkpointer.load_resume_point(resumed.model, resumed.trainer.optimizer)
    )
    assert (
        list(map(str, again)) == list(map(str, history)) and resumed.trainer.methods[-1].figures() == method.figures()
    )


def test_the_driver_prints_the_sweep_and_holds_data_out_for_it(
    tmp_path: Path, drive: Callable, classify_flags: Callable
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 2, "--lr", 0.01, "--batch_size", 4]
    out = drive(*flags, "--method", "wise-ft", "--method-args", "points=3")
    assert re.search(r"^train on \d+ sentences; \d+ others are held out$", out, re.MULTILINE)
    found, *table = out.rstrip().splitlines()[-5:]
    assert re.fullmatch(r"wise-ft: alpha [01]\.\d{3}", found) and table[0].split() == ["alphas", "scores"]
    alphas, scores = zip(*map(str.split, table[1:]), strict=True)
    assert alphas == ("0.000", "0.500", "1.000")
    last = re.findall(r"^epoch 1:.*held-out acc :: (\d\.\d{3})$", out, re.MULTILINE)
    assert [scores[2]] == last  # alpha = 1 is the last epoch


def test_what_is_judged_after_the_last_epoch_is_no_epoch_in_the_table(capsys: pytest.CaptureFixture):
    history = [EpochResult(0, 0.5, 0.6, 0.7, 1.0, True), EpochResult(0, 0.5, 0.6, 0.8, 1.0, True, is_finish=True)]
    print_epoch_table(history, "held-out")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["0", "after"]


def test_a_real_checkpoint_keeps_what_it_knew_at_alpha_zero(assets: Path):
    path = asset(assets, "stories260K.pt")
    torch.manual_seed(0)
    model = LlamaEmbeddingClassifier(Settings, llama=load_llama_model(path))
    wanted = load_llama_model(path)(TOKENS)[0]
    seen: list[torch.Tensor] = []
    method = WiSEFT(points=2)
    prepared(model, method)
    move(model, 0.01)
    model.eval()
    method.finish(model, lambda: seen.append(model.llama(TOKENS)[0]) or 0.0)
    assert torch.equal(seen[0], wanted) and not torch.allclose(seen[1], wanted, atol=1e-2)
