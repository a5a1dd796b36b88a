"""The entries of methods that combine saved models; each is chosen alone and trains nothing (`engine.finetuning`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advanced.entries import EVERY, MethodEntry, models_joined, one_of

SAVED_MODELS = models_joined("what --option finetune has saved, A.pt and B.pt", least=2)


def _no_models(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    return "" if settings["models"] else "name the saved models, --method-args models=A.pt,B.pt"


# fmt: off
COMBINED = {
    "vote": MethodEntry(
        "advanced.vote.vote", "averages the probabilities of saved models", {"models": SAVED_MODELS},
        paper="arXiv:1612.01474", cost="no training; a pass a model", options=("prompt", "finetune"), families=EVERY,
        combines="predictions", refuses=_no_models,
    ),
    "soup": MethodEntry(
        "advanced.soup.soup", "averages the weights of saved models of one kind", {
            "models": SAVED_MODELS,
            "kind": one_of(("uniform", "greedy"), "uniform", "of all models, or of those that help"),
        },
        paper="arXiv:2203.05482", cost="no training; greedy: two passes a model", options=("prompt", "finetune"),
        families=EVERY, combines="weights", refuses=_no_models,
    ),
}
# fmt: on
