"""`Llama.generate` of the later editions: what their students write in the place of the root's.

The functions are read as text by `handout.editions`; here they are code, so that tests can call them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llama import Llama


@torch.inference_mode()
def generate_epsilon(
    self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, epsilon: float = 0.05
) -> torch.Tensor:
    """Continue each text by `max_new_tokens` tokens; the model reads the last `max_seq_len` tokens of a text.

    idx: b s -> b (s + max_new_tokens). Each new token is, at temperature 0, the likeliest; else it is drawn from
    softmax(logits / temperature), of which tokens with a probability below epsilon are left out and the rest is scaled
    to a sum of 1 (Hewitt et al. 2022, arXiv:2210.15191, section 4.1); the likeliest token always stays. Of the
    probabilities (0.90, 0.07, 0.03) two are left: 0.928 and 0.072.
    """
    for _ in range(max_new_tokens):
        logits, _ = self(idx[:, -self.config.max_seq_len :])
        logits = logits[:, -1, :]  # b v: after the last token
        if temperature == 0.0:
            idx_next = logits.argmax(dim=-1, keepdim=True)  # b 1
        else:
            probs = F.softmax(logits / temperature, dim=-1)  # b v
            largest = probs.max(dim=-1, keepdim=True).values  # b 1
            probs = probs * ((probs >= epsilon) | (probs == largest))
            idx_next = torch.multinomial(probs / probs.sum(dim=-1, keepdim=True), num_samples=1)  # b 1
        idx = torch.cat((idx, idx_next), dim=1)
    return idx


@torch.inference_mode()
def generate_top_p(
    self: Llama, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_p: float = 0.95
) -> torch.Tensor:
    """Continue each text by `max_new_tokens` tokens; the model reads the last `max_seq_len` tokens of a text.

    idx: b s -> b (s + max_new_tokens). Each new token is, at temperature 0, the likeliest; else it is drawn from
    softmax(logits / temperature), of which the fewest likely tokens stay whose probabilities sum to at least top_p
    (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1), scaled to a sum of 1. Of the probabilities
    (0.90, 0.07, 0.03) two are left: 0.928 and 0.072.
    """
    for _ in range(max_new_tokens):
        logits, _ = self(idx[:, -self.config.max_seq_len :])
        logits = logits[:, -1, :]  # b v: after the last token
        if temperature == 0.0:
            idx_next = logits.argmax(dim=-1, keepdim=True)  # b 1
        else:
            probs, order = F.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True)  # b v
            probs = probs * (probs.cumsum(dim=-1) - probs < top_p)  # the mass of the likelier tokens decides
            drawn = torch.multinomial(probs / probs.sum(dim=-1, keepdim=True), num_samples=1)  # b 1: places in `order`
            idx_next = order.gather(-1, drawn)  # b 1: tokens
        idx = torch.cat((idx, idx_next), dim=1)
    return idx
