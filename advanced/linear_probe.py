"""A linear probe: the head is trained, and the pretrained weights stay as they are (Alain & Bengio 2016,
arXiv:1610.01644, section 3).

How well a linear classifier does on a layer's state says what the state holds; here it is the last layer's, and what
any method that trains more of the model has to beat. It is what a classifier made with option "pretrain" does.
"""

from __future__ import annotations

from engine.methods import Method


class LinearProbe(Method):
    """No arguments: `engine.methods.prepare` freezes the pretrained weights."""

    name = "linear-probe"
    freezes = True
