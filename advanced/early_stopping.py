"""Training ends when the score has not risen for some epochs (Prechelt 1998, "Early Stopping - But When?").

The score is computed on the data that epochs are chosen on. Training ends when none of the last `patience` epochs was
better than all epochs before it. The best epoch is saved, as in plain training. (The paper's criterion of this kind,
UP_s, ends training after s strips of five epochs in a row, each of which has raised the error; it does not look at the
best epoch.)
"""

from __future__ import annotations

from engine.methods import EpochResult, Method


class EarlyStopping(Method):
    """patience: how many epochs in a row may pass without a better score."""

    name = "early-stopping"

    def __init__(self, patience: int = 2):
        super().__init__(patience=patience)
        self.patience = patience

    def stop(self, history: list[EpochResult]) -> bool:
        return not any(result.improved for result in history[-self.patience :])
