"""SMART and R-Drop: their terms against the papers' formulas computed in another way, and what is easily done wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from steps import gradients, move, prepared, step_of
from test_methods import LABELS, TOKENS, classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advanced.losses import LabelSmoothing
from advanced.r_drop import RDrop, symmetric_divergence
from advanced.smart import SMART, direction
from classifier import LlamaEmbeddingClassifier
from engine.methods import Step
from engine.tasks import CLASSIFICATION
from fast import accelerate

BOTH = pytest.mark.parametrize("attention", ["bidirectional", "causal"])
IS_PAD = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()  # of TOKENS
LOADER = DataLoader(TensorDataset(TOKENS, LABELS), batch_size=3)


def double(attention: str = "bidirectional", dropout: float = 0.0) -> LlamaEmbeddingClassifier:
    return classifier(attention=attention, dropout=dropout).double()


def divergence_by_hand(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) + KL(Q || P), summed over the rows, by PyTorch's own function. p, q: log-probabilities, b c"""
    return sum(F.kl_div(b, a, log_target=True, reduction="sum") for a, b in ((p, q), (q, p)))


def moved_by_hand(model: nn.Module, tokens: torch.Tensor, perturbation: torch.Tensor) -> torch.Tensor:
    """What the classifier says of moved embeddings, without a hook. perturbation: b s D -> b c"""
    llama = model.llama
    looked_up = F.embedding(tokens, llama.tok_embeddings.weight)  # b s D
    size = looked_up.detach().pow(2).mean(-1, keepdim=True).sqrt()
    hidden = llama.dropout(looked_up + size * perturbation)
    for layer in llama.layers:
        hidden = layer(hidden)
    hidden = llama.norm(hidden)
    last = (~IS_PAD).sum(1) - 1 if llama.config.is_causal else torch.full((3,), tokens.shape[1] - 1)
    return model.classifier_head(hidden[torch.arange(3), last]).log_softmax(-1)


# ------------------------------------------------------------------------------------------- inner maximisation


@BOTH
def test_the_inner_gradient_is_that_of_finite_differences(attention: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # norms and attention compute in doubles as well
    smart = SMART()
    model = prepared(double(attention, dropout=0.2), smart)
    step = step_of(model)
    point = 0.1 * torch.randn(3, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def divergence(perturbation: torch.Tensor) -> float:
        with torch.no_grad():
            return divergence_by_hand(smart.forward(step, perturbation), step.outputs).item()

    gradient = smart.gradient(step, point)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        along = torch.randn(point.shape, generator=generator, dtype=torch.float64)
        slope = (divergence(point + 1e-5 * along) - divergence(point - 1e-5 * along)) / 2e-5
        assert (gradient * along).sum().item() == pytest.approx(slope, rel=1e-4)


@BOTH
def test_the_perturbation_is_as_large_as_it_may_be_and_nothing_on_padding(attention: str):
    model = prepared(double(attention), smart := SMART(radius=0.3, step=0.2, noise=0.01, steps=3))
    seen, forward = [], smart.forward
    smart.forward = lambda step, perturbation: (seen.append(perturbation.detach()), forward(step, perturbation))[1]
    perturbation = smart.worst_perturbation(step_of(model))
    assert len(seen) == 3 and seen[0].abs().max() > 0
    assert all(each[IS_PAD].abs().max() == 0.0 for each in (*seen, perturbation))
    largest = perturbation[~IS_PAD].abs().amax(dim=-1)
    torch.testing.assert_close(largest, torch.full_like(largest, 0.3))  # three steps of 0.2, cut at the radius
    assert not perturbation.requires_grad
    model.pad_id = 7  # a tokenizer's own: 3 is then a token like others
    tokens = TOKENS.index_fill(1, torch.tensor(0), 3).masked_fill(IS_PAD, 7)
    perturbation = smart.worst_perturbation(step_of(model, tokens=tokens))
    assert perturbation[IS_PAD].abs().max() == 0.0 and perturbation[:, 0].abs().amax(dim=-1).min() > 0.0
    model = prepared(double(attention), one := SMART(radius=10.0, step=0.2, noise=0.0, steps=1))
    assert one.worst_perturbation(step_of(model)).abs().max() == 0.0  # where the divergence has no gradient


def test_words_that_a_head_puts_behind_the_texts_are_not_moved():
    model = prepared(double(), smart := SMART())
    smart.perturbation = smart.worst_perturbation(step_of(model))
    longer = torch.tensor([[1, 5, 6, 99, 42, 7, 8], [1, 80, 7, 7, 8, 3, 3], [1, 260, 14, 88, 7, 8, 3]])
    moved = (model.llama.tok_embeddings(longer) != model.llama.tok_embeddings.weight[longer]).any(dim=-1)
    assert torch.equal(moved, F.pad(~IS_PAD, (0, 2)))


@BOTH
def test_the_ascent_finds_more_than_noise_of_the_same_size(attention: str):
    model = prepared(double(attention), smart := SMART(radius=0.2, step=0.2, steps=3))
    step = step_of(model)
    found = smart.worst_perturbation(step)
    noise = 0.2 * torch.randn(found.shape, dtype=found.dtype).sign() * (~IS_PAD)[..., None]
    with torch.no_grad():
        worst, other = (divergence_by_hand(smart.forward(step, each), step.outputs) for each in (found, noise))
    assert worst > 2 * other


def test_a_direction_has_size_one_and_none_where_there_is_no_gradient():
    gradient = torch.tensor([[[3.0, -6.0], [0.0, 0.0], [1e-30, 5e-31]]])
    assert torch.equal(direction(gradient), torch.tensor([[[0.5, -1.0], [0.0, 0.0], [1.0, 0.5]]]))


# ----------------------------------------------------------------------------------------------- the whole penalty


@BOTH
def test_the_penalty_and_its_gradients_are_those_of_the_paper(attention: str):
    model = prepared(double(attention), smart := SMART(weight=2.0, radius=0.1, steps=2, bregman=3.0))
    teacher = copy.deepcopy(model)  # with hooks that have a copy of the method
    move(model, 0.02)
    step = step_of(model)
    perturbation = smart.worst_perturbation(step_of(model))
    penalty = smart.penalty(step)
    assert all(parameter.grad is None for parameter in model.parameters())  # nothing of the inner pass is left
    mine = gradients(model, penalty)

    plain, moved = (moved_by_hand(model, TOKENS, d) for d in (torch.zeros(()), perturbation))
    taught = moved_by_hand(teacher, TOKENS, torch.zeros(())).detach()
    expected = 2.0 * divergence_by_hand(moved, plain) / 3 + 3.0 * divergence_by_hand(plain, taught) / 3
    torch.testing.assert_close(penalty, expected)
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(mine[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    half = 2.0 * divergence_by_hand(moved, plain.detach()) / 3 + 3.0 * divergence_by_hand(plain, taught) / 3
    head = gradients(model, half)["classifier_head.weight"]
    assert not torch.allclose(mine["classifier_head.weight"], head)  # the unmoved pass is differentiated too


@BOTH
def test_all_passes_have_the_masks_of_the_first(attention: str):
    """Else the terms would measure dropout."""
    model = prepared(classifier(attention=attention, dropout=0.5), smart := SMART(radius=1e-6, noise=1e-6))
    step = step_of(model)
    assert symmetric_divergence(step.forward(same_masks=False), step.outputs).mean() > 1e-3
    after = torch.get_rng_state()
    assert smart.penalty(step).abs() < 1e-6
    assert torch.equal(torch.get_rng_state(), after)  # and what is drawn next is what would have been


def test_the_sizes_are_relative_to_the_embeddings_and_the_table_is_not_moved():
    small, large = double(), double()
    with torch.no_grad():
        large.llama.tok_embeddings.weight *= 100  # which the norms take out again, but for their epsilon
        for each in (small, large):
            each.llama.layers[0].attention_norm.eps = 0.0
    found = []
    for model in (small, large):
        model = prepared(model, smart := SMART(bregman=0.0, steps=2))
        table = model.llama.tok_embeddings.weight.detach().clone()
        seen = []
        model.llama.layers[0].register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        smart.penalty(step_of(model))
        assert torch.equal(model.llama.tok_embeddings.weight, table)
        plain, moved = seen[0], seen[-1]
        found.append(((moved - plain).abs().amax(-1) / plain.pow(2).mean(-1).sqrt())[~IS_PAD])
    for relative in found:
        torch.testing.assert_close(relative, torch.full_like(relative, 0.1), rtol=0.05, atol=0.0)


def test_without_a_weight_nothing_is_computed_for_a_term():
    model, smart = classifier(), SMART(weight=0.0, bregman=0.0)
    prepared(model, smart)
    assert smart.penalty(step_of(model)) == 0.0 and smart.state() == {} and not smart.teacher


def test_kernels_compute_the_passes():
    penalties = []
    for is_fast in (False, True):
        model, smart = classifier(), SMART(weight=1.0, bregman=1.0)
        smart.prepare(model)
        if is_fast:
            accelerate(model, "fp32", generates=False)
        smart.start(model)
        move(model, 0.02)
        penalty = smart.penalty(step_of(model.train()))
        penalties.append((penalty.detach(), gradients(model, penalty)["llama.layers.0.feed_forward.w1.weight"]))
        assert torch.isfinite(model.eval()(TOKENS)).all()
    torch.testing.assert_close(penalties[1][0], penalties[0][0], rtol=1e-2, atol=1e-5)
    assert torch.cosine_similarity(*(gradient.flatten() for _, gradient in penalties), dim=0) > 0.99


# --------------------------------------------------------------------------------------------------- the teacher


def test_the_teacher_is_the_average_of_the_paper_and_the_student_stays_what_it_is():
    model = prepared(double(), smart := SMART(decay=0.5, late_decay=0.9))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(40):
        move(model, 0.1, seed=number, names=["classifier_head.weight", "llama.output.weight"])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step = step_of(model, number, total=40)
        if number in (3, 30):
            smart.penalty(step)
        smart.after_step(step)
        beta = 0.5 if number < 4 else 0.9  # the first tenth of forty steps
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
            expected[name] = beta * expected[name] + (1 - beta) * p.detach()
    assert smart.teacher.keys() == expected.keys()
    for name, average in smart.teacher.items():
        torch.testing.assert_close(average, expected[name])


def test_the_teacher_is_of_what_is_trained_and_is_resumed():
    model = classifier()
    model.llama.requires_grad_(False)
    prepared(model, smart := SMART())
    assert smart.teacher.keys() == {"classifier_head.weight", "classifier_head.bias"}
    state = {"teacher": {name: tensor + 1 for name, tensor in smart.state()["teacher"].items()}}
    smart.load_state(state, lambda whole, like: whole)
    assert torch.equal(smart.teacher["classifier_head.bias"], state["teacher"]["classifier_head.bias"])
    with pytest.raises(ValueError, match="another model"):
        smart.load_state({"teacher": {}}, lambda whole, like: whole)


# -------------------------------------------------------------------------------------------------------- R-Drop


def whole_loss(step: Step, method: RDrop, batch_size: int) -> torch.Tensor:
    """What the loop would minimise."""
    return step.task.loss(step.outputs, step.batch, batch_size) + step.local.share * method.penalty(step)


@pytest.mark.parametrize("batch_size", [3, 5])  # five: a short last batch, which is divided by the nominal size
def test_r_drop_is_the_loss_of_the_paper(batch_size: int):
    model = prepared(double(dropout=0.3), method := RDrop(weight=0.7))
    loader = DataLoader(TensorDataset(TOKENS, LABELS), batch_size=batch_size)
    assert method.task(CLASSIFICATION, loader) is CLASSIFICATION
    step = step_of(model)
    state = torch.get_rng_state()
    loss = whole_loss(step, method, batch_size)
    torch.set_rng_state(state)
    again = model(TOKENS)  # b c, with the masks that come next
    assert not torch.allclose(again, step.outputs)
    expected = 0.0
    for p, q, label in zip(step.outputs, again, LABELS, strict=True):
        expected = expected - p[label] - q[label]
        for one, other in ((p, q), (q, p)):
            expected = expected + 0.7 / 2 * sum(one[k].exp() * (one[k] - other[k]) for k in range(2))
    torch.testing.assert_close(loss, expected / batch_size)
    mine, other = gradients(model, loss), gradients(model, expected / batch_size)
    for name, gradient in other.items():
        torch.testing.assert_close(mine[name], gradient)


def test_r_drop_asks_the_task_for_the_loss_and_has_parts_that_add_up():
    method = RDrop()
    task = method.task(LabelSmoothing(0.3).task(CLASSIFICATION, LOADER), LOADER)
    model = prepared(double(), method)  # without dropout: twice the loss and no divergence
    loss = whole_loss(step_of(model, task=task), method, 3)
    expected = 2 * F.cross_entropy(model(TOKENS), LABELS, label_smoothing=0.3)
    torch.testing.assert_close(loss, expected)
    parts = [whole_loss(step_of(model, task=task, rows=rows), method, 3) for rows in (slice(0, 1), slice(1, 3))]
    torch.testing.assert_close(sum(parts), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_r_drop_says_when_its_two_passes_are_one(dropout: float, capsys: pytest.CaptureFixture):
    prepared(double(dropout=dropout), RDrop())
    assert ("its two passes are one" in capsys.readouterr().err) == (dropout == 0.0)


def test_scores_that_do_not_add_up_to_one_are_compared_as_distributions():
    scores = torch.randn(4, 3)
    assert symmetric_divergence(scores, scores - 5.0).abs().max() < 1e-5
    assert symmetric_divergence(scores, -scores).min() > 0
