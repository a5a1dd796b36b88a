"""Models as Hugging Face's directories, which transformers and `load.py` read."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bert.heads import BertForNextSentencePrediction, BertForPreTraining
from bert.load import DECODER
from bert.model import Bert
from bert.names import BERT, TEXTBOOK, Layout, layout_of
from convert.directory import SAFETENSORS, State, write_model
from utils import UserError

if TYPE_CHECKING:
    from bert.wordpiece import WordPiece


def save_pretrained(
    path: str | os.PathLike,
    model: nn.Module,
    tokenizer: WordPiece | None = None,
    about: dict[str, str] | None = None,
) -> None:
    """Write an encoder, or a model of `heads.py`, as a directory, which is made where it does not exist.

    tokenizer: its vocabulary is written as `vocab.txt`. about: what `saved_about` will say of these weights. Raises
    `UserError` for a model that transformers has no class for (with the plain head, or one that reads the pooler of an
    encoder without one), before anything is written.
    """
    encoder = model if isinstance(model, Bert) else model.encoder
    layout = layout_of(encoder.config)
    tensors, settings = _tensors(model, layout), _settings(model, encoder, layout)
    folder = Path(path)
    write_model(folder, settings, tensors, about)
    if tokenizer is not None:
        tokenizer.save(folder)


def saved_about(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a directory's weights. Raises an error of `safetensors` or `OSError` if they cannot be read."""
    with importlib.import_module("safetensors").safe_open(Path(path, SAFETENSORS), "pt") as file:
        return file.metadata() or {}


def _settings(model: nn.Module, encoder: Bert, layout: Layout) -> dict[str, Any]:
    """The content of `config.json`."""
    kind = "Model" if model is encoder else type(model).__name__.removeprefix("Bert")
    settings = {"architectures": [f"{layout.prefix}{kind}"], **layout.config_json(encoder.config)}
    if hasattr(model, "classifier"):
        names = [f"LABEL_{index}" for index in range(model.classifier.out_features)]
        settings["id2label"] = {str(index): name for index, name in enumerate(names)}
        settings["label2id"] = {name: index for index, name in enumerate(names)}
    asks_pooler = isinstance(model, (BertForPreTraining, BertForNextSentencePrediction)) and layout is not TEXTBOOK
    if asks_pooler and not encoder.config.has_pooler:
        raise UserError(f"transformers has no {layout.prefix}{kind} on an encoder without a pooler")
    if layout is BERT and not encoder.config.n_segments:
        raise UserError("transformers has no encoder without segments but DistilBERT, which has no pooler either")
    return settings


def _tensors(model: nn.Module, layout: Layout) -> State:
    """The state dict under their names; of tied tensors one is written."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        is_inner = name.startswith("encoder.")
        name = name.removeprefix("encoder.")
        if name == DECODER:
            continue
        try:
            theirs = layout.theirs(name)
        except KeyError:
            raise UserError(f"transformers has no place for {name}; such a model cannot be written for it") from None
        tensors[f"{layout.name}.{theirs}" if is_inner else theirs] = tensor.cpu().contiguous()
    return tensors
