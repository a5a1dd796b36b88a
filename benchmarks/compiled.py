"""Hugging Face's classifier, compiled by PyTorch (`torch.compile`), as a contender."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks import peers
from benchmarks.ov import our_classifier
from fast.compact import keep_freed_memory

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.apart import LibraryModel


class Compiled:
    """Compiled for the shape of a batch at its first call. `model.dtype`: "fp32", "bf16" (weights) or "autocast"."""

    backend = "inductor"

    def __init__(self, model: LibraryModel):
        torch.set_num_threads(model.threads)
        keep_freed_memory()  # as for all contenders in the process that measures
        ours = our_classifier(model)
        theirs = peers.Peers(ours.llama).hf_classifier()
        theirs.classifier_head = ours.classifier_head
        if model.dtype == "bf16":
            theirs = peers.rounded(theirs, torch.bfloat16)
        elif model.dtype == "autocast":
            theirs = peers.Autocast(theirs)
        self.model = torch.compile(theirs, backend=self.backend)
        self.optimizer = peers.hf_optimizer(self.model)

    def classify(self, token_ids: np.ndarray) -> np.ndarray:
        """b s -> log-probabilities b c"""
        return peers.classify(self.model, torch.from_numpy(token_ids)).float().numpy()

    def train_step(self, token_ids: np.ndarray, labels: np.ndarray) -> None:
        """token_ids: b s, labels: b"""
        peers.train_step(self.model, self.optimizer, torch.from_numpy(token_ids), torch.from_numpy(labels))


class Traced(Compiled):
    """Traced only, for a quick run: compiling C++ takes a minute a batch."""

    backend = "aot_eager"
