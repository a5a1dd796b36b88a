"""A linear probe: the head is trained, and the pretrained weights stay as they are (Alain & Bengio 2016,
arXiv:1610.01644, section 3).

The accuracy of a linear classifier on a layer's state shows what the state holds. Here it is the state of the last
layer, and a baseline for all methods that train more. A classifier with option "pretrain" does the same.
"""

from __future__ import annotations

from engine.methods import Method


class LinearProbe(Method):
    """No arguments: `engine.methods.prepare` freezes the pretrained weights."""

    name = "linear-probe"
    freezes = True
