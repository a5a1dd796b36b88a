"""What Hugging Face's independent Llama computes from the bundled checkpoint, stored as reference tensors.

    python checkpoints/reference.py        # needs transformers
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from transformers import LlamaConfig as HFConfig  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from config import LlamaConfig  # noqa: E402
from storage import load_tensors, save_tensors  # noqa: E402

CHECKPOINT = HERE / "minllama1M.pt"
REFERENCE = HERE / "minllama1M-reference.pt"
# The first two tokens are shared, and the first row ends in two zeros: a causal model gives positions 0 and 1 of both
# rows the same hidden states, the bidirectional one does not.
TOKENS = ((1, 300, 412, 975, 1203, 640, 0, 0), (1, 300, 1508, 277, 860, 1999, 523, 344))
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
}


def half_rotation_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key matrix from interleaved pairs to half-vectors. weight: (h d) D -> (h d) D"""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def hf_state(state: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Our state dict under Hugging Face's names, with its order of rows."""
    renamed = {
        "model.embed_tokens.weight": state["tok_embeddings.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["output.weight"],
    }
    for layer in range(config.n_layers):
        for ours, theirs in HF_NAMES.items():
            weight = state[f"layers.{layer}.{ours}.weight"]
            if ours == "attention.compute_query":
                weight = half_rotation_rows(weight, config.n_heads)
            elif ours == "attention.compute_key":
                weight = half_rotation_rows(weight, config.n_kv_heads)
            renamed[f"model.layers.{layer}.{theirs}.weight"] = weight
    return renamed


def to_hf(state: dict[str, torch.Tensor], config: LlamaConfig) -> LlamaForCausalLM:
    """Hugging Face's model with our weights."""
    model = LlamaForCausalLM(
        HFConfig(
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
            attn_implementation="eager",
        )
    )
    model.load_state_dict(hf_state(state, config))
    return model.eval()


@torch.no_grad()
def compute_reference(path: Path = CHECKPOINT) -> dict:
    """tokens b s; for each kind of attention the last position's logits b 1 v and the hidden states b s D."""
    checkpoint = load_tensors(path)
    model = to_hf(checkpoint["model"], LlamaConfig.from_checkpoint(checkpoint["model_args"]))
    tokens = torch.tensor(TOKENS)  # b s
    rows, length = tokens.shape
    masks = {"causal": None, "bidirectional": torch.zeros(rows, 1, length, length)}  # added to the scores
    reference = {"tokens": tokens}
    for attention, mask in masks.items():
        hidden = model.model(tokens, attention_mask=mask, use_cache=False).last_hidden_state  # b s D
        reference[attention] = {"logits": model.lm_head(hidden[:, [-1]]).clone(), "hidden_states": hidden.clone()}
    return reference


def write_reference() -> None:
    save_tensors(REFERENCE, compute_reference())


if __name__ == "__main__":
    write_reference()
