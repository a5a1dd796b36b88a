"""The checkpointer of a run whose model is a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from bert.save import save_pretrained, saved_about
from bert.wordpiece import WordPiece
from engine.methods import EpochResult
from engine.text.runs import TextSaver


@dataclass
class DirectoryCheckpointer(TextSaver):
    """Writes the model and its vocabulary. The weights, at `model_path`, hold a digest of the run's identity."""

    tokenizer: WordPiece | None = None

    def save_model(self, model: nn.Module, result: EpochResult) -> None:
        self.model_path.parent.mkdir(exist_ok=True)
        super().save_model(model, result)

    def save_anew(self, model: nn.Module, result: EpochResult) -> None:
        about = {"identity": self._digest(), "epoch": str(result.epoch)}
        save_pretrained(self.model_path.parent, model, self.tokenizer, about)

    def saved_as(self) -> tuple[dict[str, Any], int]:
        about = saved_about(self.model_path.parent)
        return self.identity if about["identity"] == self._digest() else {}, int(about["epoch"])

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
