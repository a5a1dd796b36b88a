"""Causal attention against Hugging Face transformers' LlamaForCausalLM, an independent implementation."""

from __future__ import annotations

import pytest
import torch
from conftest import random_llama

to_hf = pytest.importorskip("reference").to_hf  # which needs transformers


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (4, 4), (4, 2), (8, 2), (4, 1)])
def test_causal_logits_and_hidden_states_equal(n_heads: int, n_kv_heads: int, length: int, batch: int):
    model = random_llama(n_heads=n_heads, n_kv_heads=n_kv_heads, attention="causal", seed=length)
    tokens = torch.randint(0, 300, (batch, length))
    with torch.inference_mode():
        logits, hidden_states = model(tokens, targets=tokens)
        theirs = to_hf(model.state_dict(), model.config)(tokens, output_hidden_states=True)
    assert logits.std() > 0.05  # logits that are all alike would agree whatever was computed
    torch.testing.assert_close(logits, theirs.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden_states, theirs.hidden_states[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_other_rope_bases_and_widths(theta: float):
    model = random_llama(attention="causal", rope_theta=theta, dim=96, hidden_dim=100, layer_norm_eps=1e-3)
    tokens = torch.randint(0, 300, (2, 40))
    with torch.inference_mode():
        theirs = to_hf(model.state_dict(), model.config)(tokens).logits
        torch.testing.assert_close(model(tokens, tokens)[0], theirs, atol=1e-4, rtol=0)


def test_greedy_text_equals():
    model = random_llama(attention="causal")
    prompt = torch.tensor([[1, 17, 240, 33]])
    hf = to_hf(model.state_dict(), model.config)
    theirs = hf.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(prompt, 40, temperature=0.0), theirs)
