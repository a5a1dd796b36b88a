"""A bidirectional model that does not see padding (the mask of Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3,
whose masked scores are minus infinity).

The assignment's reference lets every position attend to all of the padded batch and reads the last position, padding
for most rows: a sentence's prediction then depends on the longest sentence that it happens to stand beside. Here

    score(query, key) = -infinity    where key is padding

and the state of the last real token is read, as in a causal model. A row gives the same alone and in any batch. The
reference numbers of the course do not hold.
"""

from __future__ import annotations

from torch import nn

from advanced import check_attention
from advanced.reading import reading_of
from engine.methods import Method


class PaddingMask(Method):
    """No arguments. It has no tensors, and a saved model cannot do without it."""

    name = "padding-mask"
    begins_as_base = False
    is_needed = True

    def prepare(self, model: nn.Module) -> None:
        """Raises `UserError` for a causal model."""
        check_attention(self.name, model.llama.config.attention)
        reading_of(model).hides_padding = True
