"""Every device computes what the CPU computes without kernels. Devices that are not here are skipped."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import random_llama
from test_fast import TOKENS, TWO_LABELS

from classifier import LlamaEmbeddingClassifier
from engine.context import rotate
from fast import accelerate, decoder
from fast.attention import FusedAttention, scores_check
from llama import Llama
from optimizer import AdamW
from rope import apply_rotary_emb

PRESENT = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "int8": 5e-2, "int4": 0.5}


@pytest.fixture(params=PRESENT)
def device(request: pytest.FixtureRequest) -> torch.device:
    if not PRESENT[request.param]:
        pytest.skip(f"there is no {request.param} here")
    return torch.device(request.param)


def on(device: torch.device, plain: Llama, precision: str = "fp32", **settings) -> Llama:
    model = copy.deepcopy(plain).to(device)
    accelerate(model, precision, device, **settings)
    return model


def assert_near(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert (actual.cpu().float() - expected.float()).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_logits(device: torch.device, attention: str, precision: str, n_kv_heads: int):
    plain = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    model = on(device, plain, precision)
    assert type(model.layers[0].attention) is FusedAttention
    with torch.no_grad():
        for mine, its in zip(model(TOKENS.to(device), targets=TOKENS), plain(TOKENS, targets=TOKENS), strict=True):
            assert_near(mine, its, TOLERANCE[precision])


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_text(device: torch.device, attention: str):
    plain = random_llama(attention=attention, gain=8.0)
    model, expected = on(device, plain), plain.generate(TOKENS[:1], 20, temperature=0.0)
    for each in (model, decoder(model)):
        assert torch.equal(each.generate(TOKENS[:1].to(device), 20, temperature=0.0).cpu(), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_step(device: torch.device, precision: str):
    plain = random_llama(attention="causal")
    torch.manual_seed(0)
    classifiers = [LlamaEmbeddingClassifier(TWO_LABELS, llama=each) for each in (plain, on(device, plain, precision))]
    classifiers[1].load_state_dict(classifiers[0].state_dict())
    classifiers[1].to(device)
    for classifier, where in zip(classifiers, (torch.device("cpu"), device), strict=True):
        optimizer = AdamW(classifier.parameters(), lr=1e-3)
        F.nll_loss(classifier.train()(TOKENS.to(where)), torch.tensor([0, 1]).to(where)).backward()
        optimizer.step()
    for mine, its in zip(classifiers[1].parameters(), classifiers[0].parameters(), strict=True):
        ratio = mine.grad.norm().cpu() / its.grad.norm()
        assert ratio == pytest.approx(1.0, abs=TOLERANCE[precision])
        assert F.cosine_similarity(mine.grad.cpu().flatten(), its.grad.flatten(), dim=0) > 0.99
        assert (mine.cpu() - its).abs().max() <= 2.1e-3  # a step is at most the learning rate


def test_the_fused_attention_of_a_device_agrees_with_llama_py(device: torch.device):
    assert scores_check(device.type).difference() is None


def test_rotary_embeddings(device: torch.device):
    query, key = torch.randn(2, 2, 9, 4, 8).unbind()
    rotated = apply_rotary_emb(query.to(device), key.to(device), 8, 16)
    for mine, its in zip(rotated, apply_rotary_emb(query, key, 8, 16), strict=True):
        assert_near(mine, its, 1e-5)
    for start in (3, torch.tensor([3, -1])):
        there = start if isinstance(start, int) else start.to(device)
        assert_near(rotate(query.to(device), there, 8, 16), rotate(query, start, 8, 16), 1e-5)
