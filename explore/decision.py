"""Which tokens a classifier's decision hangs on, asked in two ways that do not agree in general.

- Occlusion: each token in turn is left out, and what that takes from a class's probability is the token's (Li et al.
  2016, arXiv:1612.08220: "representation erasure"). Of a long text neighbours are left out together.
- Gradient x input: the gradient of a class's log-probability by the token's embedding, times that embedding (Shrikumar
  et al. 2016, arXiv:1605.01713): what a small change of the embedding's length would do, to first order.

Shapes: s position, c classes, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

BATCH = 16  # texts with something left out that are computed together
POSITIONS = 32_000  # of all these texts: a long one is asked about in larger pieces


class Decision(NamedTuple):
    """Of one text, alone in its batch.

    log_probabilities: c. occlusion: s c, a difference of probabilities, NaN where nothing can be left out, with so many
    tokens left out `together`. gradient: s c, in nats.
    """

    log_probabilities: torch.Tensor
    occlusion: torch.Tensor
    together: int
    gradient: torch.Tensor


def decide(model: nn.Module, embedding: nn.Module, ids: Sequence[int]) -> Decision:
    """model: token ids b s -> log-probabilities b c, in evaluation mode. embedding: its table of tokens."""
    tokens = torch.tensor([[*ids]], device=next(model.parameters()).device)  # 1 s
    with torch.inference_mode():
        log_probabilities = model(tokens)[0]  # c
    together = math.ceil(len(ids) ** 2 / POSITIONS)
    occlusion = occluded(model, tokens, log_probabilities, together)
    return Decision(log_probabilities, occlusion, together, gradient_by_input(model, embedding, tokens))


@torch.inference_mode()
def occluded(model: nn.Module, tokens: torch.Tensor, whole: torch.Tensor, together: int = 1) -> torch.Tensor:
    """What is lost without each token but the first, bos; so many neighbours lose alike.

    tokens: 1 s; whole: c, of the whole text. Returns s c
    """
    length = tokens.shape[1]
    lost = torch.full((length, len(whole)), float("nan"))
    if length < 2 + together:  # there is no text without them
        return lost
    starts = [min(start, length - together) for start in range(1, length, together)]  # all the same length: no padding
    without = torch.stack([torch.cat((tokens[0, :start], tokens[0, start + together :])) for start in starts])
    rows = torch.cat([model(batch) for batch in without.split(BATCH)])
    for start, each in zip(starts, probabilities(whole) - probabilities(rows), strict=True):
        lost[start : start + together] = each
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
    """As `engine.predict` has them: scores of label words are compared with one another. ... c -> ... c"""
    return log_probabilities.float().softmax(-1)
