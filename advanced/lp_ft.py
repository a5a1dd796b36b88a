"""LP-FT: the head is solved on frozen states, and then everything is fine-tuned from there (Kumar et al. 2022,
"Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", arXiv:2202.10054, section 3.4).

With a head that is drawn at random, the first steps change the states of the training texts to suit that head, and
those of other texts less, so that the pretrained features are distorted (theorem 3.2); a head that fits the frozen
states leaves them less to change. `solved_probe.py` has the linear probe: logistic regression with a penalty, as in the
authors' code, which chooses C by the accuracy on a validation set and tries more of them. Other methods' targets and
penalties count in fine-tuning alone. A BERT without a pooler has a random layer below its head, which is only read.
"""

from __future__ import annotations

from advanced.solved_probe import SolvedHead


class LPFT(SolvedHead):
    """No arguments: what follows the solution is plain fine-tuning."""

    name = "lp-ft"
