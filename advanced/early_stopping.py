"""Training ends when the score has not risen for some epochs (Prechelt 1998, "Early Stopping - But When?").

The score is that of the data that epochs are chosen on. The criterion is the simplest one: no epoch of the last
`patience` is better than all before them. The best epoch is the one that is kept, as ever.
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
