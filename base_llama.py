"""What Llama-like models share: config, initial weights, the causal mask; and the norm of later editions.

Shapes:
    b batch      s query position   t key position   D model dim
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import nn

from config import LlamaConfig

INIT_STD = 0.02


class LlamaPreTrainedModel(nn.Module):
    """Base class: holds the config and draws the initial weights."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.n_layers = config.n_layers

    def init_weights(self, part: nn.Module | None = None) -> None:
        """Draw all weights from N(0, 0.02^2), and `compute_output` and `w2` with a smaller standard deviation.

        part: the module whose weights are drawn; None: the whole model.

        The residual stream sums 2 * n_layers outputs (attention and feed-forward of each layer); dividing the standard
        deviation of their last projections, `compute_output` and `w2`, by sqrt(2 * n_layers) keeps its variance from
        growing with depth (Radford et al. 2019, "GPT-2", section 2.3). The hand-out narrows `w3` in the place of `w2`,
        as llama2.c does; but the last projection of this feed-forward is `w2`. No pretrained weight depends on it.
        """
        part = self if part is None else part
        part.apply(self._init_weights)
        narrow = INIT_STD / math.sqrt(2 * self.config.n_layers)
        for name, parameter in part.named_parameters():
            if name.endswith(("compute_output.weight", "w2.weight")):
                nn.init.normal_(parameter, mean=0.0, std=narrow)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


@lru_cache(maxsize=16)
def causal_mask(length: int, device: torch.device | None = None) -> torch.Tensor:
    """The mask of a causal model: True where a query may see a key, itself and what stands before it.

    Returns a bool tensor s t. All callers share it: do not write to it.
    """
    with torch.inference_mode(False):  # a mask made under inference_mode could never be used in training afterwards
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def sequence_lengths(token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The number of tokens before the right padding of each row.

    token_ids: b s. Returns b, at least 1. Only *trailing* `pad_id`s count as padding.
    """
    positions = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
    return ((token_ids != pad_id) * positions).amax(dim=1).clamp(min=1)  # b


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450, equation 4): mean 0, variance 1, then scale and bias."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps), over the last dimension. x: ... D -> ... D

        var(x) is the mean of the squares of x - mean(x): it divides by D, not by D - 1. For x = (1, 3) and a tiny eps
        the mean is 2 and the variance 1, so the result is (-1, 1).
        """
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D. Mean and variance are taken in float32 for every dtype of x."""
        return self._norm(x.float()).type_as(x) * self.weight + self.bias
