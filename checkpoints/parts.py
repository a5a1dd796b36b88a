"""What the parts of a small Llama compute according to Hugging Face transformers: what `sanity_check.py` compares with.

    python checkpoints/parts.py        # needs transformers; writes parts.json

Weights and inputs are the closed forms of `grading.small_model`, and nothing is computed by this project's model. The
scores and the softmax, which transformers keeps inside of its attention, are PyTorch's; the classifiers are NumPy on
transformers' hidden states.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from reference import to_hf  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb  # noqa: E402

from config import LlamaConfig  # noqa: E402
from grading import small_model as small  # noqa: E402
from grading.editions import ATTENTION_KINDS, NORMS  # noqa: E402
from grading.parts import LATER_NORM, PARTS_FILE  # noqa: E402
from utils import atomic_write  # noqa: E402

DIGITS = 7
LENGTH = 5
WITHOUT_NORM = ("rotary embedding", "feed-forward", "scores and softmax", "grouped queries")


def to_halves(x: torch.Tensor) -> torch.Tensor:
    """From neighbours, whose pairs are ours, to half-vectors, whose pairs transformers rotates. x: ... d"""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def to_neighbours(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def mask_of(kind: str, length: int) -> torch.Tensor:
    """What is added to the scores. 1 1 s t"""
    hidden = torch.full((length, length), -torch.inf if kind == "causal" else 0.0, dtype=torch.float64)
    return hidden.triu(1)[None, None]


def plain_numbers(model: LlamaForCausalLM) -> dict[str, tuple]:
    x, (query, key) = small.states().double(), map(torch.Tensor.double, small.rotary_inputs())
    angles = model.model.rotary_emb(query, torch.arange(LENGTH)[None])
    rotated = apply_rotary_pos_emb(to_halves(query), to_halves(key), *angles, unsqueeze_dim=2)
    is_layer = small.NORM.get() == "layer"
    norm = torch.nn.LayerNorm(small.DIM, small.NORM_EPS) if is_layer else LlamaRMSNorm(small.DIM, small.NORM_EPS)
    norm.load_state_dict(small.below(small.small_weights(), "norm."))
    return {
        NORMS[small.NORM.get()]: (norm.double()(x),),
        "rotary embedding": tuple(map(to_neighbours, rotated)),
        "feed-forward": (model.model.layers[0].mlp(x),),
    }


def attention_numbers(model: LlamaForCausalLM, kind: str) -> dict[str, tuple]:
    x, mask, first = small.states().double(), mask_of(kind, LENGTH), model.model.layers[0]
    settings = dict(attention_mask=mask, position_embeddings=model.model.rotary_emb(x, torch.arange(LENGTH)[None]))
    heads = list(map(torch.Tensor.double, small.score_inputs()))
    hidden = hidden_states(model, small.TOKENS, kind)
    logits = model.lm_head(hidden)
    return {
        f"scores and softmax, {kind}": (F.scaled_dot_product_attention(*heads, attn_mask=mask),),
        f"grouped queries, {kind}": (first.self_attn(x, **settings)[0],),
        f"layer, {kind}": (first(x, **settings),),
        f"embedding and head, {kind}": (logits[:, [-1]], hidden, logits),
        f"generate, {kind}": greedy_texts(model, kind),
    }


def greedy_texts(model: LlamaForCausalLM, kind: str) -> tuple[torch.Tensor, ...]:
    """Each text with its likeliest continuation; the first again; and 1, as a hot text is not the likeliest one.

    Every token is chosen from a pass over the last `max_seq_len` tokens, whose positions begin at 0.
    """
    texts, limit = small.PROMPTS, small.SMALL_SHAPE["max_seq_len"]
    for _ in range(small.NEW_TOKENS):
        logits = model.lm_head(hidden_states(model, texts[:, -limit:], kind)[:, -1])  # b v
        texts = torch.cat((texts, logits.argmax(-1, keepdim=True)), dim=1)
    return *texts[:, None], texts[:1], torch.tensor(1.0)


def hidden_states(model: LlamaForCausalLM, tokens: torch.Tensor, kind: str) -> torch.Tensor:
    """tokens: b s -> b s D"""
    return model.model(tokens, attention_mask=mask_of(kind, tokens.shape[1]), use_cache=False).last_hidden_state


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def classifier_numbers(model: LlamaForCausalLM, kind: str) -> dict[str, tuple]:
    """A causal model reads each text alone and unpadded; the bidirectional reference reads the padded batch."""
    if kind == "causal":
        texts = [small.PADDED[[row], : last + 1] for row, last in enumerate(small.LAST_TOKENS.tolist())]
        last = np.concatenate([hidden_states(model, text, kind)[:, -1].numpy() for text in texts])  # b D
    else:
        last = hidden_states(model, small.PADDED, kind)[:, -1].numpy()
    vocabulary = log_softmax(last @ model.lm_head.weight.numpy().T)
    labels = np.stack([sum(vocabulary[:, token] for token in ids) for ids in small.LABELS], axis=-1)
    weight, bias = (tensor.double().numpy() for tensor in small.head_weights().values())
    trained = np.broadcast_to(log_softmax(bias), (len(last), len(bias)))  # all of the hidden state is dropped
    return {
        f"zero-shot classifier, {kind}": (labels,),
        f"embedding classifier, {kind}": (log_softmax(last @ weight.T + bias), trained),
    }


def numbers_with(norm: str) -> dict[str, tuple]:
    """Every part's tensors, of a model with this norm."""
    small.NORM.set("rms")
    model = to_hf(small.small_weights(), LlamaConfig(**small.SMALL_SHAPE))
    small.NORM.set(norm)
    if norm == "layer":
        put_layer_norms(model)
    model, numbers = model.double(), {}
    for kind in ATTENTION_KINDS:
        numbers |= attention_numbers(model, kind) | classifier_numbers(model, kind)
    numbers = plain_numbers(model) | numbers
    small.NORM.set("rms")
    return numbers


def put_layer_norms(model: LlamaForCausalLM) -> None:
    """Replace the norms of transformers' model by PyTorch's LayerNorm, with the small model's weights and biases."""
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    places = [(layer, theirs, f"layers.{index}.{ours}.") for index, layer in enumerate(model.model.layers)
              for theirs, ours in names.items()]  # fmt: skip
    for module, name, prefix in (*places, (model.model, "norm", "norm.")):
        norm = torch.nn.LayerNorm(small.DIM, small.EPS)
        norm.load_state_dict(small.below(small.small_weights(), prefix))
        setattr(module, name, norm)


@torch.no_grad()
def compute_parts() -> dict[str, list]:
    """Every part's tensors as nested lists."""
    numbers = numbers_with("rms")
    for name, tensors in numbers_with("layer").items():
        if name.partition(",")[0] not in WITHOUT_NORM:
            numbers[name if name in NORMS.values() else f"{name}{LATER_NORM}"] = tensors
    return {name: [rounded(tensor.tolist()) for tensor in tensors] for name, tensors in numbers.items()}


def rounded(numbers: list | float) -> list | float:
    return list(map(rounded, numbers)) if isinstance(numbers, list) else float(f"{numbers:.{DIGITS}g}")


def write_parts() -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in compute_parts().items())
    with atomic_write(HERE.parent / PARTS_FILE) as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_parts()
