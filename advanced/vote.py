"""Vote: the mean of the probabilities of several models is what is predicted, a deep ensemble (Lakshminarayanan et al.
2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles", arXiv:1612.01474, section 2.4):

    p(y | x) = 1 / M * sum_m p_m(y | x)

The models may be of any kinds, each with its own tokenizer and way of reading; all must have the same labels. Each
predicts as --option predict does with it alone, in the batches and the precision that it was saved with. (The paper's
models differ by their random initialisation and the order of the data alone, and are also trained on adversarial
examples.)
"""

from __future__ import annotations

import numpy as np


def vote(probabilities: list[list[list[float]]]) -> list[int]:
    """The label of the largest mean probability, of equals the first one.

    probabilities: for each model and each text, those of the labels: M n c -> n
    """
    return np.mean(probabilities, axis=0).argmax(axis=-1).tolist()
