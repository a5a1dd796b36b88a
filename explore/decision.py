"""Which tokens a classifier's decision hangs on, asked in two ways that do not agree in general.

- Occlusion: each token in turn is left out, and what that takes from a class's probability is the token's (Li et al.
  2016, arXiv:1612.08220: "representation erasure").
- Gradient x input: the gradient of a class's log-probability by the token's embedding, times that embedding (Shrikumar
  et al. 2016, arXiv:1605.01713): what a small change of the embedding's length would do, to first order.

Shapes: s position, c classes, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

BATCH = 32  # texts with a token left out that are computed together


class Decision(NamedTuple):
    """Of one text, alone in its batch.

    log_probabilities: c. occlusion: s c, a difference of probabilities, NaN where nothing can be left out. gradient:
    s c, in nats.
    """

    log_probabilities: torch.Tensor
    occlusion: torch.Tensor
    gradient: torch.Tensor


def decide(model: nn.Module, embedding: nn.Module, ids: Sequence[int]) -> Decision:
    """model: token ids b s -> log-probabilities b c, in evaluation mode. embedding: its table of tokens."""
    tokens = torch.tensor([[*ids]], device=next(model.parameters()).device)  # 1 s
    with torch.inference_mode():
        log_probabilities = model(tokens)[0]  # c
    occlusion = occluded(model, tokens, log_probabilities)
    return Decision(log_probabilities, occlusion, gradient_by_input(model, embedding, tokens))


@torch.inference_mode()
def occluded(model: nn.Module, tokens: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What is lost without each token but the first, bos. tokens: 1 s; whole: c, of the whole text -> s c"""
    length = tokens.shape[1]
    lost = torch.full((length, len(whole)), float("nan"))
    if length < 3:  # bos and one token: there is no text without it
        return lost
    without = torch.stack([torch.cat((tokens[0, :place], tokens[0, place + 1 :])) for place in range(1, length)])
    rows = torch.cat([model(batch) for batch in without.split(BATCH)])  # s-1 c
    lost[1:] = probabilities(whole) - probabilities(rows)
    return lost


def gradient_by_input(model: nn.Module, embedding: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: 1 s -> s c"""
    read: list[torch.Tensor] = []

    def keep(_: nn.Module, __: tuple, output: torch.Tensor) -> torch.Tensor:
        read.append(output.detach().requires_grad_())
        return read[-1]

    hook = embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            log_probabilities = model(tokens)[0]  # c
            rows = [torch.autograd.grad(each, read[0], retain_graph=True)[0][0] for each in log_probabilities]  # s D
    finally:
        hook.remove()
    return torch.stack([(row * read[0].detach()[0]).sum(-1) for row in rows], dim=-1)


def probabilities(log_probabilities: torch.Tensor) -> torch.Tensor:
    """As `runs.predict` has them: scores of label words are compared with one another. ... c -> ... c"""
    return log_probabilities.float().softmax(-1)
