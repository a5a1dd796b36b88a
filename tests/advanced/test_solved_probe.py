"""The head that is solved, against scikit-learn on states that the plain model computes; LP-FT begins with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from test_contract import ARGUMENTS, Laboratory, laboratory  # noqa: F401 (a fixture)
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from advanced import choose
from advanced.experiments.judging import Splits
from advanced.experiments.solved import _solved
from advanced.solved_probe import STRENGTHS, frozen_states, solve, solve_head
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from bert.wordpiece import WordPiece
from engine import families, runs
from engine.data import Example, create_data
from utils import UserError

EXAMPLES = [Example(f"{text} {number}", number % 3) for number, text in enumerate(SENTENCES * 3)]
DRAWN = np.random.default_rng(0)


def states_by_hand(model: nn.Module, dataset: families.Sentences) -> np.ndarray:
    """One text at a time: what a causal Llama with or without pooling, or a BERT, makes of its tokens. n D"""
    states = []
    with torch.no_grad():
        for ids in map(torch.tensor, dataset.token_ids):
            if hasattr(model, "encoder"):
                states.append(model.encoder(ids[None])[1][0])
            else:
                hidden = model.llama(ids[None])[1][0]
                states.append(hidden.mean(dim=0) if hasattr(model.read, "pool") else hidden[-1])
    return torch.stack(states).double().numpy()


def searched(states: np.ndarray, labels: np.ndarray, folds: int) -> GridSearchCV:
    """All strengths, by scikit-learn's own search."""
    normal = (states - states.mean(axis=0)) / (states - states.mean(axis=0)).std()
    split = StratifiedKFold(folds, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": STRENGTHS}, scoring="neg_log_loss", cv=split)
    return search.fit(normal, labels)


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.mark.parametrize("solver", ["the head", "a baseline"])
def test_the_solver_has_one_thread_and_what_comes_after_it_its_own_number(monkeypatch, solver: str):
    seen, fit = [], LogisticRegression.fit
    monkeypatch.setattr(LogisticRegression, "fit", lambda *given: (seen.append(blas_threads()), fit(*given))[1])
    states, examples = DRAWN.normal(size=(12, 3)), [Example("", number % 2) for number in range(12)]
    with threadpool_limits(2, "blas"):
        if blas_threads() != {2}:
            pytest.skip("the threads of this BLAS cannot be set, as those of Accelerate on a Mac")
        if solver == "the head":
            solve(states, np.arange(12) % 2, 2)
        else:
            _solved({"train": states, "held_out": states}, Splits(examples, examples, [], [], []), 1)
        assert blas_threads() == {2}
    assert {*map(frozenset, seen)} == {frozenset({1})}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "pooling", "bert"])
def test_the_head_is_the_solution_for_the_states_of_the_plain_model(laboratory: Laboratory, kind: str):
    if kind == "bert":
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*" ".join(SENTENCES).lower().split()})]
        config = BertConfig(vocab_size=len(pieces), dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_seq_len=64)
        torch.manual_seed(0)
        model, tokenizer = BertForSequenceClassification(Bert(config), 3), WordPiece(pieces)
    else:
        methods = choose("pooling") if kind == "pooling" else ()
        plan = laboratory.plan("", attention="causal", hidden_dropout_prob=0.5)
        run = laboratory.assemble(replace(plan, label_names=("a", "b", "c"), methods=methods))
        model, tokenizer = run.model.train(), run.tokenizer
    dataset = families.encode_for(model, tokenizer, EXAMPLES)
    train = dataset.loader(4, shuffle=True, bucket=True)
    strength = solve_head(model, train)
    states = states_by_hand(model, dataset)
    read, labels = frozen_states(model, train)  # whatever the order of the batches
    np.testing.assert_allclose(read, states, atol=1e-5)
    assert labels.tolist() == [example.label for example in EXAMPLES]
    search = searched(states, labels, 5)
    assert strength == search.best_params_["C"]
    normal = (states - states.mean(axis=0)) / (states - states.mean(axis=0)).std()
    with torch.no_grad():
        outputs = torch.cat([model(torch.tensor([ids])) for ids in dataset.token_ids])
    np.testing.assert_allclose(outputs, search.best_estimator_.predict_log_proba(normal), atol=2e-3)


def test_two_classes_few_texts_and_an_absent_class():
    states = DRAWN.normal(size=(40, 6)) + 3.0
    labels = np.where(states[:, 0] + DRAWN.normal(size=40) > 3.0, 3, 1)  # of five classes
    weight, bias, strength = solve(states, labels, 5)
    assert weight.shape == (5, 6) and strength == searched(states, labels, 5).best_params_["C"]
    logits = states @ weight.T + bias
    odds = searched(states, labels, 5).decision_function((states - states.mean(0)) / (states - states.mean(0)).std())
    np.testing.assert_allclose(logits[:, 3] - logits[:, 1], odds, atol=1e-4)
    assert set(logits.argmax(axis=1)) == {1, 3}
    again = solve(states, labels, 5)
    assert np.array_equal(again[0], weight) and again[2] == strength
    few = [*np.flatnonzero(labels == 1)[:2], *np.flatnonzero(labels == 3)[:6]]  # two texts of a class: two folds
    assert solve(states[few], labels[few], 5)[2] == searched(states[few], labels[few], 2).best_params_["C"]
    single = few[1:]
    assert solve(states[single], labels[single], 5)[2] == 1.0
    with pytest.raises(UserError, match="all training texts have the same label"):
        solve(states[few[:2]], labels[few[:2]], 5)


def test_training_and_averages_begin_with_the_solved_head_and_a_resumed_run_does_not_solve_it_again(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ARGUMENTS, "linear-probe", ["solved=true"])
    solved = laboratory.done("linear-probe").run.model
    plan = laboratory.plan("lp-ft,smart,ema", epochs=2)
    run = laboratory.assemble(plan)
    checkpointer, (method, smart, ema) = laboratory.checkpointer(run), run.trainer.methods
    begun = []

    def after_step(self: object, step: object) -> None:  # before that of the averages
        begun.extend(each["classifier_head.weight"].clone() for each in (smart.teacher, ema.average))

    monkeypatch.setattr(type(method), "after_step", after_step)
    laboratory.train(run, checkpointer, epochs=1)
    for weights in begun[:2]:
        torch.testing.assert_close(weights, solved.classifier_head.weight)
    run = laboratory.assemble(plan)
    monkeypatch.setattr(type(method), "begin", lambda *given: pytest.fail("solved again"))
    checkpointer = laboratory.checkpointer(run)
    history = laboratory.train(run, checkpointer, checkpointer.load_resume_point(run.model, run.trainer.optimizer))
    assert len(history) == 2 and run.trainer.methods[0].figures() == {"C": f"{method.strength:g}"} != {"C": "None"}


def test_a_solved_probe_is_what_is_saved_after_one_epoch_and_nothing_else_changes(
    laboratory: Laboratory, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ARGUMENTS, "linear-probe", ["solved=true"])
    done = laboratory.done("linear-probe", epochs=3)
    assert len(done.history) == 1 and "the head is solved, not trained" in capsys.readouterr().err
    plain = laboratory.assemble(laboratory.plan(""))
    train = families.encode_for(plain.model, plain.tokenizer, create_data(plain.plan.train.path)[1:])
    before = {name: tensor.clone() for name, tensor in plain.model.llama.state_dict().items()}
    solve_head(plain.model, runs.loader_of(train, plain.config, 4, torch.device("cpu")))
    for name, tensor in done.saved.state_dict().items():
        torch.testing.assert_close(tensor, plain.model.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in done.saved.llama.state_dict().items())
