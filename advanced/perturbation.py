"""Methods that move the embeddings of texts: what they share.

A perturbation is in units of the root mean square of each token's embedding, which is not the same in all checkpoints.
It is added behind the table of embeddings, which is the output matrix too and stays, and before all that others add.

Shapes: b batch   s position   k words that a head puts behind the texts   D model dim
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from advanced.reading import is_within
from base_llama import sequence_lengths
from classifier import PAD_ID
from engine.methods import Method, Step, pretrained_of


class PerturbingMethod(Method):
    """perturbation: b s D, while a pass is perturbed; else None."""

    perturbation: torch.Tensor | None = None

    def prepare(self, model: nn.Module) -> None:
        table = pretrained_of(model).tok_embeddings
        table.register_forward_hook(self.perturb, prepend=True)  # before what others add to a text

    def perturb(self, table: nn.Module, inputs: tuple[torch.Tensor], embedded: torch.Tensor) -> torch.Tensor:
        """embedded: texts, b s D; words behind the texts, b s+k D, or without texts, k D, are not moved"""
        if self.perturbation is None or embedded.dim() == 2:
            return embedded
        perturbation = F.pad(self.perturbation, (0, 0, 0, embedded.shape[1] - self.perturbation.shape[1]))  # b s+k D
        size = embedded.detach().square().mean(dim=-1, keepdim=True).sqrt()  # b s+k 1
        return embedded + (size * perturbation).to(embedded.dtype)


def real_tokens(step: Step) -> torch.Tensor:
    """Which positions of the batch hold tokens, not padding: b s 1, boolean"""
    tokens = step.batch["token_ids"]  # b s
    lengths = sequence_lengths(tokens, getattr(step.model, "pad_id", PAD_ID))  # b
    return is_within(lengths, tokens.shape[1])[..., None]
