"""A bidirectional model that does not see padding (the mask of Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3,
whose masked scores are minus infinity).

In the assignment's reference every position attends to the whole padded batch, and the last position is read, which is
padding for most rows: the prediction for a sentence depends on the longest sentence of its batch. Here

    score(query, key) = -infinity    where key is padding

and the state of the last real token is read, as in a causal model. A row has the same result in every batch. The
course's reference numbers do not hold for it.
"""

from __future__ import annotations

from torch import nn

from advanced import check_attention
from advanced.reading import reading_of
from engine.methods import Method


class PaddingMask(Method):
    """No arguments. It has no tensors, but a saved model needs it."""

    name = "padding-mask"
    begins_as_base = False
    is_needed = True

    def prepare(self, model: nn.Module) -> None:
        """Raises `UserError` for a causal model."""
        check_attention(self.name, model.llama.config.attention)
        reading_of(model).hides_padding = True
