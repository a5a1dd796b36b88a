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
from convert.names import hugging_face_state  # noqa: E402
from engine.storage import load_tensors, save_tensors  # noqa: E402

CHECKPOINT = HERE / "minllama1M.pt"
REFERENCE = HERE / "minllama1M-reference.pt"
# The first two tokens are shared, and the first row ends in two zeros: a causal model gives positions 0 and 1 of both
# rows the same hidden states, the bidirectional one does not.
TOKENS = ((1, 300, 412, 975, 1203, 640, 0, 0), (1, 300, 1508, 277, 860, 1999, 523, 344))


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
    model.load_state_dict(hugging_face_state(state, config))
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
