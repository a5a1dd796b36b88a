"""How far each step goes, when a run ends, and what it begins with: rates, layer rates, early stopping, new layers."""

from __future__ import annotations

import pytest
import torch
from conftest import random_llama
from test_contract import Laboratory, laboratory  # noqa: F401 (a fixture)
from test_methods import LABELS, TOKENS, classifier, created
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from advanced import choose
from advanced.early_stopping import EarlyStopping
from advanced.layer_decay import LayerDecay
from advanced.reinit import Reinit
from advanced.schedule import Schedule
from engine.methods import EpochResult, Method, Step, prepare
from optimizer import AdamW
from utils import UserError

# ------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("decay", ["cosine", "linear", "none"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.34])
def test_the_rates_are_those_of_pytorchs_schedulers(decay: str, warmup: float):
    total = 50
    rising = int(warmup * total)
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=2.0)
    falling = {
        "cosine": lambda: CosineAnnealingLR(optimizer, total - rising),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, total - rising),
        "none": lambda: LinearLR(optimizer, 1.0, 1.0, 1),
    }
    stages = [falling[decay]()]
    if rising:
        stages = [LinearLR(optimizer, 1 / rising, 1.0, rising - 1), *stages]
    scheduler = SequentialLR(optimizer, stages, [rising] if rising else [])
    schedule = Schedule(warmup, decay)
    for number in range(total):
        assert 2.0 * schedule.rate(number, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        assert schedule.rate(number, total) > 0.0
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("total", [1, 2, 7])
def test_a_short_run_has_a_rate_in_every_step(total: int):
    for warmup in (0.0, 0.5, 0.99):
        rates = [Schedule(warmup).rate(number, total) for number in range(total)]
        assert all(0 < rate <= 1 for rate in rates)
    assert Schedule(0.5).rate(2, 7) == 1.0  # 3.5 steps of warm-up are 3


def test_the_optimizer_has_the_rates_and_those_of_layers_are_multiplied(laboratory: Laboratory):
    seen = []

    class TrainingCallback(Method):
        name = "watch"

        def prepare(self, model: nn.Module) -> None:
            pass

        def after_step(self, step: Step) -> None:
            seen.append((step.number, step.total))

    plan = laboratory.plan("layer-decay,schedule", lr=0.5)
    run = laboratory.assemble(plan)
    rates, step = [], run.trainer.optimizer.step
    run.trainer.optimizer.step = lambda: (
        rates.append([group["lr"] for group in run.trainer.optimizer.param_groups]),
        step(),
    )
    run.trainer.methods.append(TrainingCallback())
    laboratory.train(run, laboratory.checkpointer(run))
    assert len(rates) == seen[-1][1] == seen[-1][0] + 1
    for number, of_groups in enumerate(rates):
        factor = Schedule().rate(number, len(rates))
        assert of_groups == pytest.approx([0.5 * 0.9**level * factor for level in range(4)])


# --------------------------------------------------------------------------------------------------- layer rates


def groups_of(model: nn.Module, *methods: Method, lr: float = 1.0) -> list[dict]:
    prepare(model, methods)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}]
    for method in methods:
        groups = method.parameter_groups(groups, model)
    return groups


def rates_of(model: nn.Module, groups: list[dict]) -> dict[str, float]:
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups)  # each once
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert rates.keys() == {*trained.values()}
    return {name: rates[p] for name, p in trained.items()}


def test_each_layer_has_the_rate_of_the_one_above_times_the_factor_and_the_embedding_the_lowest():
    model = classifier(n_layers=3)
    rates = rates_of(model, groups_of(model, LayerDecay(0.5), lr=8.0))
    expected = {"classifier_head": 8.0, "llama.norm": 8.0, "llama.tok_embeddings": 0.5}
    expected |= {f"llama.layers.{layer}.": rate for layer, rate in ((2, 4.0), (1, 2.0), (0, 1.0))}
    for name, rate in rates.items():
        (wanted,) = [value for start, value in expected.items() if name.startswith(start)]
        assert rate == wanted, name
    assert model.llama.output.weight is model.llama.tok_embeddings.weight
    alone = random_llama()  # without a classifier around it
    rates = rates_of(alone, groups_of(alone, LayerDecay(0.5)))
    assert rates["tok_embeddings.weight"] == 0.125 and rates["norm.weight"] == 1.0


def test_an_output_matrix_of_its_own_has_the_rate_of_what_stands_above_the_layers():
    alone = random_llama(tied=False)
    rates = rates_of(alone, groups_of(alone, LayerDecay(0.5)))
    assert rates["tok_embeddings.weight"] == 0.125 and rates["output.weight"] == rates["norm.weight"] == 1.0


def test_what_other_methods_have_added_to_a_layer_has_its_rate():
    model = classifier()
    rates = rates_of(model, groups_of(model, *created("lora,layer-decay")))
    lora = {name: rate for name, rate in rates.items() if "lora" in name}
    assert len(lora) == 8 and {*rates} - {*lora} == {"classifier_head.weight", "classifier_head.bias"}
    for name, rate in lora.items():
        assert rate == (0.9 if "layers.1." in name else 0.81)


def test_a_step_goes_as_far_as_the_rate_says_and_factor_one_changes_nothing():
    moved = {}
    for factor in (1.0, 0.25, None):
        model = classifier()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = AdamW(groups_of(model, *([] if factor is None else [LayerDecay(factor)]), lr=0.01))
        torch.nn.functional.nll_loss(model(TOKENS), LABELS).backward()
        optimizer.step()
        moved[factor] = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    for name, step in moved[None].items():
        assert torch.equal(moved[1.0][name], step)
        level = {"llama.layers.1": 1, "llama.layers.0": 2, "llama.tok_embe": 3}.get(name[:14], 0)
        torch.testing.assert_close(moved[0.25][name], step * 0.25**level, atol=1e-7, rtol=1e-3)


# ------------------------------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_stops_after_so_many_epochs_without_a_better_one(patience: int):
    scores = [0.3, 0.5, 0.4, 0.6, 0.6, 0.5, 0.7, 0.1, 0.2, 0.3, 0.7]
    history: list[EpochResult] = []
    for number, score in enumerate(scores):
        improved = all(score > earlier for earlier in scores[:number])
        history.append(EpochResult(number, 1.0, 1.0, score, 0.0, improved))
        best = max(range(number + 1), key=lambda k: scores[k])  # the first of equals
        assert EarlyStopping(patience).stop(history) == (number - best >= patience)


def test_a_run_ends_early_with_the_best_epoch(laboratory: Laboratory):
    run = laboratory.assemble(laboratory.plan("early-stopping", epochs=9, lr=1e-9))  # no epoch is better
    history = laboratory.train(run, laboratory.checkpointer(run))
    assert [result.improved for result in history] == [True, False]  # a patience of one


# ----------------------------------------------------------------------------------------------------- new layers


def test_the_top_layers_are_as_before_pre_training_and_nothing_else_is_changed():
    model, plain = classifier(n_layers=3, dim=96), classifier(n_layers=3, dim=96)
    with torch.no_grad():
        for part in (model, plain):
            for name, parameter in part.named_parameters():
                if "norm" in name:
                    parameter.fill_(3.0)
    Reinit(layers=2).prepare(model)
    for (name, parameter), before in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "layers.1." not in name and "layers.2." not in name:
            assert torch.equal(parameter, before), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            narrow = 6**0.5 if name.endswith(("compute_output.weight", "w2.weight")) else 1.0  # of three layers
            assert parameter.std().item() == pytest.approx(0.02 / narrow, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.002
    assert model.llama.output.weight is model.llama.tok_embeddings.weight


def test_a_head_of_zeros_finds_all_classes_equally_likely():
    model = classifier()
    Reinit(head="zero").prepare(model)
    torch.testing.assert_close(model(TOKENS).exp(), torch.full((3, 2), 0.5))


def test_the_head_may_be_drawn_anew_alone():
    model, plain = classifier(), classifier()
    Reinit(layers=0, head="zero").prepare(model)
    assert all(map(torch.equal, model.llama.state_dict().values(), plain.llama.state_dict().values()))
    assert not model.classifier_head.weight.any() and not model.classifier_head.bias.any()


def test_more_layers_than_there_are_and_a_head_that_is_not_there_are_refused():
    with pytest.raises(UserError, match="3 layers cannot be drawn anew: the model has 2"):
        Reinit(layers=3).prepare(classifier())
    with pytest.raises(UserError, match="no head"):
        Reinit(head="zero").prepare(random_llama())
    with pytest.raises(UserError, match="reinit and lora cannot be combined|lora and reinit cannot be combined"):
        choose("lora,reinit")
