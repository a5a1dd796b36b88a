"""Causal attention against Hugging Face transformers' LlamaForCausalLM, an independent implementation."""

from __future__ import annotations

import pytest
import torch
from conftest import random_llama

from llama import Llama

transformers = pytest.importorskip("transformers")

HF_NAMES = {
    "attention.compute_query": "self_attn.q_proj",
    "attention.compute_key": "self_attn.k_proj",
    "attention.compute_value": "self_attn.v_proj",
    "attention.compute_output": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens",
}


def halves_from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from (x1, y1, x2, y2, ...) to (x1, x2, ..., y1, y2, ...)."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def to_hf(model: Llama):
    config = model.config
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.layer_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    state = {}
    for name, weight in model.state_dict().items():
        if "compute_query" in name or "compute_key" in name:
            weight = halves_from_pairs(weight, config.head_dim)
        for ours, theirs in HF_NAMES.items():
            name = name.replace(ours, theirs)
        state["lm_head.weight" if name == "output.weight" else f"model.{name}"] = weight
    hf.load_state_dict(state)
    return hf.eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (4, 4), (4, 2), (8, 2), (4, 1)])
def test_causal_logits_and_hidden_states_equal(n_heads: int, n_kv_heads: int, length: int, batch: int):
    model = random_llama(n_heads=n_heads, n_kv_heads=n_kv_heads, attention="causal", seed=length)
    tokens = torch.randint(0, 300, (batch, length))
    with torch.inference_mode():
        logits, hidden_states = model(tokens, targets=tokens)
        theirs = to_hf(model)(tokens, output_hidden_states=True)
    assert logits.std() > 0.05  # logits that are all alike would agree whatever was computed
    torch.testing.assert_close(logits, theirs.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden_states, theirs.hidden_states[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_other_rope_bases_and_widths(theta: float):
    model = random_llama(attention="causal", rope_theta=theta, dim=96, hidden_dim=100, layer_norm_eps=1e-3)
    tokens = torch.randint(0, 300, (2, 40))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens, tokens)[0], to_hf(model)(tokens).logits, atol=1e-4, rtol=0)


def test_greedy_text_equals():
    model = random_llama(attention="causal")
    prompt = torch.tensor([[1, 17, 240, 33]])
    hf = to_hf(model)
    theirs = hf.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(prompt, 40, temperature=0.0), theirs)
