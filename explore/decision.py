"""How much each token contributes to a classifier's decision, by two methods that do not agree in general.

- Occlusion: the probability of a class minus its probability without the token (Li et al. 2016, arXiv:1612.08220:
  "representation erasure"). In a long text, neighbours are left out together.
- Gradient x input: the gradient of a class's log-probability by the token's embedding, times that embedding (Shrikumar
  et al. 2016, arXiv:1605.01713): the effect, to first order, of a small change of the embedding's length.

Shapes: s position, c classes, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

TEXTS_AT_ONCE = 16  # texts without a token that are computed together
MOST_TOKENS = 2048  # of a text on a page, which a classifier reads whole
OCCLUDED_POSITIONS = 32_000  # of all these texts; in a longer text, more neighbours are left out together


class Decision(NamedTuple):
    """The decision on one text, which is alone in its batch.

    log_probabilities: c. occlusion: s c, differences of probabilities, NaN where no token can be left out. together:
    the number of neighbours that are left out at once. gradient: s c, in nats.
    """

    log_probabilities: torch.Tensor
    occlusion: torch.Tensor
    together: int
    gradient: torch.Tensor


def decide(model: nn.Module, embedding: nn.Module, ids: Sequence[int]) -> Decision:
    """model: token ids b s -> log-probabilities b c, in evaluation mode. embedding: the model's table of tokens."""
    tokens = torch.tensor([[*ids]], device=next(model.parameters()).device)  # 1 s
    with torch.inference_mode():
        log_probabilities = model(tokens)[0]  # c
    together = neighbours_together(len(ids))
    starts = occlusion_starts(len(ids), together)
    occlusion = occluded(model, tokens, log_probabilities, together, starts)
    return Decision(log_probabilities, occlusion, together, gradient_by_input(model, embedding, tokens))


def neighbours_together(length: int) -> int:
    """How many neighbours occlusion leaves out at once in a text of so many tokens."""
    return math.ceil(length**2 / OCCLUDED_POSITIONS)


def occlusion_starts(length: int, together: int) -> list[int]:
    """Where neighbours are left out of a text of so many tokens; never bos, and nowhere if no text would be left."""
    if length < 2 + together:
        return []
    return [min(start, length - together) for start in range(1, length, together)]  # equal lengths need no padding


@torch.inference_mode()
def occluded(
    model: nn.Module, tokens: torch.Tensor, whole: torch.Tensor, together: int, starts: Sequence[int]
) -> torch.Tensor:
    """The loss of probability without each token; NaN where none is left out.

    tokens: 1 s. whole: c, the log-probabilities of the whole text. together: the number of neighbours that are left out
    at once; all get the same value. starts: some of `occlusion_starts`. Returns s c
    """
    lost = torch.full((tokens.shape[1], len(whole)), float("nan"))
    if not starts:
        return lost
    without = torch.stack([torch.cat((tokens[0, :start], tokens[0, start + together :])) for start in starts])
    rows = torch.cat([model(batch) for batch in without.split(TEXTS_AT_ONCE)])
    for start, each in zip(starts, probabilities(whole) - probabilities(rows), strict=True):
        lost[start : start + together] = each
    return lost


def gradient_by_input(model: nn.Module, embedding: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: 1 s -> s c"""
    embedded: list[torch.Tensor] = []

    def keep(_: nn.Module, __: tuple, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            log_probabilities = model(tokens)[0]  # c
            rows = [torch.autograd.grad(each, embedded[0], retain_graph=True)[0][0] for each in log_probabilities]
    finally:
        hook.remove()
    return torch.stack([(row * embedded[0].detach()[0]).sum(-1) for row in rows], dim=-1)  # each row: s D


def probabilities(log_probabilities: torch.Tensor) -> torch.Tensor:
    """As in `engine.predict`: the scores of label words are compared with one another. ... c -> ... c"""
    return log_probabilities.float().softmax(-1)
