"""The variants of LoRA and (IA)^3: their formulas computed by hand, and beside PEFT where it is installed; what every
method must be like, for each variant."""

from __future__ import annotations

import math

import pytest
import test_contract
import torch
from conftest import slow_among
from steps import share_factors
from test_contract import Laboratory, laboratory, outputs_of  # noqa: F401 (a fixture)
from test_frozen import ATTENTIONS, HEAD, prepared, trained_names
from test_methods import TOKENS, classifier, exported, train
from torch import nn

from advanced import choose
from advanced.ia3 import IA3
from advanced.lora import LoRA
from advanced.lora_variants import DoRA, PiSSA, lora
from advanced.table import MATRICES
from engine.methods import prepare
from utils import UserError

VARIANTS = ["dora", "rslora", "pissa"]


def linear(method: LoRA, bias: bool = False, i: int = 6, o: int = 5) -> nn.Linear:
    """A layer with its update, whose factors are drawn."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"w1": nn.Linear(i, o, bias=bias)})
    method.prepare(model)
    for name, parameter in model["w1"].named_parameters():
        if name in ("lora_A", "lora_B"):
            nn.init.normal_(parameter)
    return model["w1"]


# ------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("bias", [False, True])
def test_dora_computes_its_formula_row_by_row_and_its_norm_has_no_gradient(bias: bool):
    layer, x = linear(method := DoRA(rank=2, alpha=3.0, targets="w1"), bias), torch.randn(4, 6)
    with torch.no_grad():
        layer.lora_magnitude.mul_(1.5)
    w0, a, b, m = (each.detach().clone() for each in (layer.weight, layer.lora_A, layer.lora_B, layer.lora_magnitude))
    a, b, m = a.requires_grad_(), b.requires_grad_(), m.requires_grad_()
    rows = []
    for index in range(5):
        row = w0[index] + 1.5 * (b[index] @ a)
        rows.append(m[index] * row / math.sqrt(sum(number**2 for number in row.tolist())))  # a plain number: constant
    expected = x @ torch.stack(rows).T + (layer.bias.detach() if bias else 0.0)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(method.merged(layer), torch.stack(rows), atol=1e-5, rtol=1e-5)
    (layer(x) ** 2).sum().backward()
    (expected**2).sum().backward()
    for mine, other in ((layer.lora_A, a), (layer.lora_B, b), (layer.lora_magnitude, m)):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_a_row_of_zeros_stays_one_in_dora():
    model = nn.ModuleDict({"w1": nn.Linear(6, 5, bias=False)})
    nn.init.zeros_(model["w1"].weight)
    DoRA(targets="w1").prepare(model)
    assert not model["w1"](torch.randn(3, 6)).any()


def test_rslora_divides_alpha_by_the_root_of_the_rank():
    layer, x = linear(lora("rslora", rank=4, alpha=3.0, targets="w1")), torch.randn(4, 6)
    expected = x @ (layer.weight + 1.5 * layer.lora_B @ layer.lora_A).T
    torch.testing.assert_close(layer(x), expected)
    assert lora("plain", rank=4, alpha=3.0).scale == 0.75


def test_pissa_trains_the_best_approximation_of_each_matrix_and_freezes_the_rest():
    model, base, method = classifier(), classifier(), PiSSA(rank=3, alpha=6.0, targets="compute_key+w2")
    prepare(model, [method])
    torch.testing.assert_close(model(TOKENS), base(TOKENS), atol=1e-5, rtol=1e-5)
    for name in ("attention.compute_key", "feed_forward.w2"):  # fewer rows than columns; the other way around
        mine, w0 = (each.llama.layers[1].get_submodule(name) for each in (model, base))
        squares = torch.linalg.eigvalsh(w0.weight.double() @ w0.weight.double().T).flip(0)  # of the singular values
        rest = mine.weight.double().square().sum()
        torch.testing.assert_close(rest, squares[3:].sum(), atol=1e-6, rtol=1e-4)  # Eckart & Young: no smaller rest
        for gram in (mine.lora_A @ mine.lora_A.T, mine.lora_B.T @ mine.lora_B):  # both are S^(1/2) long
            torch.testing.assert_close(2.0 * gram, torch.diag(squares[:3].sqrt()).float(), atol=1e-5, rtol=1e-4)
        assert torch.equal(mine.lora_A, mine.lora_A0) and torch.equal(mine.lora_B, mine.lora_B0)
    assert len(trained_names(model) - HEAD) == 2 * 2 * 2


def test_pissa_refuses_a_rank_that_no_matrix_has():
    with pytest.raises(UserError, match="rank=17 with variant=pissa, but a matrix here has rank 16"):
        PiSSA(rank=17, targets="compute_key").prepare(classifier())


def test_lora_plus_gives_b_a_higher_rate():
    model, (plain, plus) = classifier(), (LoRA(), LoRA(plus=16.0))
    prepare(model, [plus])
    groups = [{"params": [each for each in model.parameters() if each.requires_grad], "lr": 0.01}]
    assert plain.parameter_groups(groups, model) is groups
    rates = {id(each): group["lr"] for group in plus.parameter_groups(groups, model) for each in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == (0.16 if name.endswith("lora_B") else 0.01)
    assert len(rates) == 8 + 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", slow_among(ATTENTIONS, ["bidirectional"]))
def test_a_variant_is_like_every_method(
    laboratory: Laboratory, variant: str, attention: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(test_contract.ARGUMENTS, "lora", [f"variant={variant}", "plus=4"])
    run, plain = (laboratory.assemble(laboratory.plan(each, attention=attention)) for each in ("lora", ""))
    exact = dict(rtol=0, atol=1e-5 if variant == "pissa" else 0.0)
    torch.testing.assert_close(outputs_of(run.model, run), outputs_of(plain.model, plain), **exact)
    with run.trainer.methods[0].evaluation_weights(run.model):
        torch.testing.assert_close(outputs_of(run.model, run), outputs_of(plain.model, plain), **exact)
    test_contract.test_what_is_judged_is_what_is_saved_and_the_file_is_enough(laboratory, "lora", attention)
    test_contract.test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(laboratory, "lora", is_within=True)


def test_the_factors_are_kept_beside_the_merged_model(laboratory: Laboratory):
    run = laboratory.assemble(laboratory.plan("lora", epochs=1))
    checkpointer = laboratory.checkpointer(run)
    laboratory.train(run, checkpointer)
    saved = torch.load(checkpointer.model_path, weights_only=True)
    kept, base = saved["kept"]["lora"], laboratory.assemble(laboratory.plan("")).model.state_dict()
    assert kept["settings"] == run.trainer.methods[0].settings and len(kept["tensors"]) == 8
    name = "llama.layers.0.attention.compute_value"
    update = 2.0 * kept["tensors"][f"{name}.lora_B"] @ kept["tensors"][f"{name}.lora_A"]
    torch.testing.assert_close(saved["model"][f"{name}.weight"], base[f"{name}.weight"] + update)
    assert update.abs().max() > 1e-3 and not any("lora" in name for name in saved["model"])


@pytest.mark.parametrize("variant", ["dora", "rslora"])
def test_variants_compute_and_learn_as_in_the_peft_library(variant: str):
    peft = pytest.importorskip("peft")
    model, method = classifier(), lora(variant, rank=3, alpha=6.0, targets="compute_query+w2")
    prepare(model, [method])
    other = classifier()
    config = peft.LoraConfig(
        r=3, lora_alpha=6.0, lora_dropout=0.0, target_modules=["compute_query", "w2"],
        use_dora=variant == "dora", use_rslora=variant == "rslora",
    )  # fmt: skip
    peft.inject_adapter_in_model(config, other.llama)
    share_factors(model, other)
    outputs = model(TOKENS), other(TOKENS)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for each in outputs:
        each[:, 0].sum().backward()
    for name in trained_names(model) - HEAD:
        theirs = name.replace("lora_magnitude", "lora_magnitude_vector") + ".default.weight"
        gradients = model.get_parameter(name).grad, other.get_parameter(theirs).grad
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- (IA)^3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_ia3_scales_keys_values_and_what_w2_reads_and_is_a_plain_model_in_the_end(attention: str):
    """Two key/value heads serve four query heads, so the vectors of keys and values are 16 numbers long, not 32."""
    model, base = prepared(IA3(), attention, std=1.0), classifier(attention=attention)
    mine, plain = model.llama.layers[1], base.llama.layers[1]
    scales = [mine.get_submodule(name).ia3_scale for name in ("attention.compute_key", "attention.compute_value")]
    assert [each.shape for each in (*scales, mine.feed_forward.w2.ia3_scale)] == [(16,), (16,), (96,)]
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        for name, scale in zip(("compute_key", "compute_value"), scales, strict=True):
            expected = plain.attention.get_submodule(name)(x) * scale
            torch.testing.assert_close(mine.attention.get_submodule(name)(x), expected)
        inner = nn.functional.silu(plain.feed_forward.w1(x)) * plain.feed_forward.w3(x)
        expected = plain.feed_forward.w2(inner * mine.feed_forward.w2.ia3_scale)
        torch.testing.assert_close(mine.feed_forward(x), expected, atol=1e-5, rtol=1e-5)
    assert trained_names(model) - HEAD == {
        f"llama.layers.{index}.{name}.ia3_scale" for index in range(2)
        for name in ("attention.compute_key", "attention.compute_value", "feed_forward.w2")
    }  # fmt: skip
    base.load_state_dict(exported(model, [IA3()]))
    torch.testing.assert_close(base(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(TOKENS), classifier(attention=attention)(TOKENS), atol=1e-2)


def test_ia3_scales_the_biases_of_keys_and_values():
    model = nn.ModuleDict({"compute_key": nn.Linear(6, 5)})
    method, x = IA3(), torch.randn(3, 6)
    method.prepare(model)
    nn.init.normal_(model["compute_key"].ia3_scale)
    outputs = model["compute_key"](x)
    with method.evaluation_weights(model):
        torch.testing.assert_close(model["compute_key"](x), outputs)
        assert not torch.allclose(nn.functional.linear(x, model["compute_key"].weight), outputs, atol=1e-3)
    assert torch.equal(model["compute_key"](x), outputs)


def test_ia3_and_lora_on_the_same_matrices_are_merged_in_the_order_in_which_they_work():
    methods = [IA3(), LoRA(rank=3, targets="+".join(MATRICES))]
    model = classifier()
    prepare(model, methods)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "ia3" in name:
            nn.init.normal_(parameter, std=0.5)
    assert [each.name for each in choose("lora,ia3")] == ["ia3", "lora"]
    expected, plain = model(TOKENS), classifier(seed=5)
    plain.load_state_dict(exported(model, methods))
    torch.testing.assert_close(plain(TOKENS), expected, atol=1e-4, rtol=1e-3)


def test_ia3_learns_with_its_vectors_alone():
    model, base = classifier(), classifier().state_dict()
    train(model, [IA3()])
    for name, parameter in model.named_parameters():
        if "ia3" in name:
            assert not torch.equal(parameter, torch.ones_like(parameter))
        elif "classifier_head" not in name:
            assert torch.equal(parameter, base[name])
