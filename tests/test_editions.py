"""What later editions of the course have in the place of the first ones: norm, sampling, clipping, LoRA, additions."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import random_llama, save_checkpoint

import llama
from advanced.lora_variants import lora
from base_llama import LayerNorm
from config import LlamaConfig
from engine import weights
from engine.decoding import continue_texts
from grading import addition
from grading.addition import Experiment
from handout.later import generate_epsilon, generate_top_p
from llama import Llama
from optimizer import AdamW
from utils import UserError

ADDITION = {  # what addition_run.py of spring 2026 gives to `LlamaConfig`
    "vocab_size": 13, "dropout": 0.0, "max_seq_len": 20, "layer_norm_eps": 1e-5, "multiple_of": 32, "hidden_dim": None,
    "position_embedding_type": "rotary", "use_cache": True, "dim": 16, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_norm_is_pytorchs(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 + 2 * torch.randn(2, 5, 12, generator=generator)).to(dtype)
    ours, theirs = LayerNorm(12, 1e-3).to(dtype), torch.nn.LayerNorm(12, 1e-3, dtype=dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(12, generator=generator))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), atol=0.05 if dtype == torch.bfloat16 else 1e-6, rtol=1e-5)
    if dtype == torch.float32:
        given = [x.clone().requires_grad_() for _ in range(2)]
        for module, one in zip((ours, theirs), given, strict=True):
            module(one).square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_a_checkpoint_of_rms_norms_is_run_with_layer_norms_whose_biases_are_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
):
    """Against PyTorch's LayerNorm, and in a causal model against a plain mask: a shorter text gives the same."""
    save_checkpoint(tmp_path / "model.pt", random_llama())
    tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(llama.NORMS, "rms", lambda dim, eps: torch.nn.LayerNorm(dim, eps, bias=False))
        expected = llama.load_pretrained(tmp_path / "model.pt", attention=attention)(tokens)[1]
    for load in (llama.load_pretrained, weights.load_llama_model):
        model = load(tmp_path / "model.pt", attention=attention, norm="layer")
        with torch.no_grad():
            hidden = model(tokens)[1]
            torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
            assert torch.allclose(model(tokens[:, :5])[1], hidden[:, :5], atol=1e-5) == (attention == "causal")
        assert not any(tensor.any() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    save_checkpoint(tmp_path / "own.pt", random_llama(norm="layer"))  # with biases of its own
    assert weights.load_llama_model(tmp_path / "own.pt").config.norm == "layer"
    with pytest.raises(UserError, match="unexpected layers.0.attention_norm.bias"):
        weights.load_llama_model(tmp_path / "own.pt", norm="rms")


def test_directories_have_rms_norms(tmp_path: Path):
    with pytest.raises(UserError, match="is a model with RMSNorm"):
        weights.load_llama_model(tmp_path, norm="layer")


PROBABILITIES = torch.tensor([0.5, 0.3, 0.12, 0.045, 0.035])  # .05 is between two of them, .95 within the fourth
OF_EDITIONS = {"plain": Llama.generate, "epsilon": generate_epsilon, "top-p": generate_top_p}


@pytest.mark.parametrize("way", ["continue_texts", "generate"])
@pytest.mark.parametrize(("sampling", "kept"), [("plain", 5), ("epsilon", 3), ("top-p", 4)])
def test_the_sampling_of_an_edition_draws_from_the_right_tokens(
    monkeypatch: pytest.MonkeyPatch, sampling: str, kept: int, way: str
):
    """By the config's `sampling`, and by the `generate` that students of the edition write."""
    model, logits = random_llama(sampling=sampling), PROBABILITIES[None].log() * 2
    monkeypatch.setattr(Llama, "forward", lambda self, idx: (logits.expand(len(idx), 1, -1), None))
    generate = partial(OF_EDITIONS[sampling], model) if way == "generate" else partial(continue_texts, model)
    start = torch.zeros(4000, 1, dtype=torch.long)
    torch.manual_seed(0)
    drawn = generate(start, 1, temperature=2.0)[:, 1]
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    expected = PROBABILITIES[:kept]
    torch.testing.assert_close(shares[:kept], expected / expected.sum(), atol=0.03, rtol=0)
    assert not shares[kept:].any()
    assert generate(start[:1], 3, temperature=0.0).tolist() == [[0, 0, 0, 0]]


def test_a_limit_that_no_token_reaches_leaves_the_likeliest(monkeypatch: pytest.MonkeyPatch):
    model, logits = random_llama(sampling="epsilon"), torch.arange(300.0)[None, None] / 1e3
    monkeypatch.setattr(Llama, "forward", lambda self, idx: (logits.expand(len(idx), 1, -1), None))
    start = torch.zeros(50, 1, dtype=torch.long)
    for text in (continue_texts(model, start, 1), generate_epsilon(model, start, 1)):
        assert (text[:, 1] == 299).all()


def test_adamw_clips_the_gradients_of_a_group_together():
    rows = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    twins = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours, plain = AdamW(rows, lr=0.1, max_grad_norm=0.7), AdamW(twins, lr=0.1)
    for step in range(1, 4):
        for number, pair in enumerate(zip(rows, twins, strict=True)):
            for parameter in pair:
                parameter.grad = torch.tensor([0.5, -1.0, 0.1]) * (number + 1) / step**3
        torch.nn.utils.clip_grad_norm_(twins, 0.7)
        ours.step()
        plain.step()
    assert all(torch.equal(row, twin) for row, twin in zip(rows, twins, strict=True))
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="max_grad_norm"):
            AdamW(rows, max_grad_norm=wrong)
    del ours.param_groups[0]["max_grad_norm"]  # as in a resume point of before
    ours.step()


def test_the_config_takes_what_the_course_gives_it():
    config = LlamaConfig(**ADDITION)
    assert config.position_embedding_type == "rotary" and config.use_cache is True
    with pytest.raises(ValueError, match="position_embedding_type='absolute' must be rotary"):
        LlamaConfig(**{**ADDITION, "position_embedding_type": "absolute"})


def test_lora_of_the_fall_2025_edition_begins_with_normal_factors():
    model = random_llama(dim=64)
    matrices = "compute_query+compute_key+compute_value+compute_output"
    method = lora(variant="normal", rank=4, alpha=2.0, targets=matrices)
    tokens = torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(0))
    before = model(tokens)[1]
    method.prepare(model)
    layers = method.layers(model)
    assert len(layers) == 4 * model.config.n_layers
    drawn = torch.cat([layer.lora_A.flatten() for layer in layers])
    assert abs(drawn.std() - 0.02) < 0.002 and abs(drawn.mean()) < 0.002
    assert not any(layer.lora_B.any() for layer in layers)
    assert torch.equal(model(tokens)[1], before)
    layer, x = layers[0], torch.randn(3, 64)
    with torch.no_grad():
        layer.lora_B.normal_()
        expected = x @ layer.weight.T + 2.0 / 4 * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------- additions


def test_a_text_counts_if_question_and_sum_are_right():
    problems = ["1249+7996=9245", "3213+2675=5888", "9999+9999=19998", "1000+1000=2000"]
    texts = ["1249+7996=9245", "1000+1000=2000", "9999+9999=1999", "1000+1000=20000"]
    assert addition.accuracy_of(problems, texts) == 0.25  # the second solves another problem
    assert addition.accuracy_of([], []) == 0.0
    with pytest.raises(ValueError, match="is no problem with its sum"):
        addition.accuracy_of(["1249+7996=9246"], ["x"])
    with pytest.raises(ValueError):
        addition.accuracy_of(problems, texts[:2])


def test_the_trained_models_are_judged_by_what_was_computed_again():
    fine = {f"ablation_{number}": Experiment(900, 10**12, 0.9) for number in range(1, 6)}
    best = {"best_model": Experiment(500, addition.CAPACITY_LIMIT, addition.SOLVED)}
    assert [*addition.judge_experiments(fine | best)] == []
    assert addition.capacity_of(500, 1000, 10) == 6 * 500 * 1000 * 10
    assert [*addition.judge_experiments({"ablation_1": fine["ablation_1"]}, unread=1)] == []  # which may miss a problem
    for changed, code, said in (
        ({"best_model": Experiment(500, 6 * 10**12, 1.0)}, "E084-capacity", "5,808,844,800,000 operations: best_model"),
        ({"best_model": Experiment(500, 10**12, 0.997)}, "E082-addition", "best_model solves 99.70%"),
        ({"ablation_2": Experiment(400, 10**12, addition.SOLVED)}, "E085-ablations", "models solve all: ablation_2"),
        ({name: Experiment(900, 10**12, 1.0) for name in fine}, "E085-ablations", "0 ablations miss a problem"),
    ):
        (problem,) = addition.judge_experiments(fine | best | changed)
        assert said in problem and problem.code == code
