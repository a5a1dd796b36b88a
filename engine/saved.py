"""Saved classifiers: loading one, predicting with it; and the perplexity of a language model.

`load_classifier` needs no file but the saved model. This module parses no arguments and prints nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from config import PRECISIONS
from engine.batches import Sentences, TextWindows
from engine.checkpointer import KINDS
from engine.data import NO_GOLD_LABEL, Example
from engine.families import (
    LLAMA_FAMILY,
    create_methods,
    encode_for,
    family_named,
    family_of,
    require_shapes,
    settings_of,
)
from engine.methods import prepare, pretrained_of
from engine.processes import SINGLE_PROCESS, Distributed
from engine.storage import load_tensors, save_tensors
from engine.tasks import NextToken, perplexity_of
from engine.training import evaluate
from engine.weights import Keep, fill, is_finite, keeper, numbers_in, state_dict_errors, tensor_errors, undrawn
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

# ----------------------------------------------------------------------------------------------------------- saved runs


@dataclass(frozen=True)
class SavedRun:
    """The values that a prediction needs besides the model, and the origin of the model.

    batch_size, precision: as in the run's own predictions. prompt_suffix: the text after every sentence; None: no text.
    identity: of the run, see `Plan.identity`; empty for an untrained classifier. epoch, dev_score: of the saved model;
    None for an untrained classifier.
    """

    label_names: tuple[str, ...]
    tokenizer: Any
    prompt_suffix: str | None
    batch_size: int
    precision: str
    config: Any
    identity: dict[str, Any]
    epoch: int | None
    dev_score: float | None


def record_of(
    model: nn.Module,
    tokenizer: Any,
    label_names: Sequence[str],
    batch_size: int,
    precision: str = "fp32",
) -> dict[str, Any]:
    """The values to save beside a classifier's weights, so that loading it needs no other file."""
    family = family_of(model)
    return {
        "family": family.name,
        "model_config": {
            **settings_of(model),
            "model_args": dataclasses.asdict(pretrained_of(model).config),
        },
        "label_names": list(label_names),
        "tokenizer": torch.frombuffer(bytearray(tokenizer.to_bytes()), dtype=torch.uint8),
        "max_sentence_len": tokenizer.max_len,
        "prompt_suffix": model.prompt_suffix,
        "batch_size": batch_size,
        "precision": precision,
    }


def save_classifier(path: str | os.PathLike, model: nn.Module, record: dict[str, Any]) -> None:
    """Save a classifier that was not trained by a run; `load_classifier` loads it. record: see `record_of`."""
    save_tensors(path, {"kind": KINDS["model"], "model": model.state_dict(), "methods": {}, **record})


def load_classifier(
    path: str | os.PathLike,
    distributed: Distributed = SINGLE_PROCESS,
    kept_precision: Callable[[str], str | None] = lambda _: None,
) -> tuple[nn.Module, SavedRun]:
    """Load a saved classifier (token ids b s -> log-probabilities b c; on the CPU, in evaluation mode) and its values.

    kept_precision: from the precision of the run to that of `weights.load_pretrained`, for a large Llama.

    Raises `UserError` if the file is missing, damaged, or not a saved classifier.
    """
    saved = distributed.from_first(lambda: load_tensors(path))
    if not isinstance(saved, dict) or saved.get("kind") != KINDS["model"]:
        raise UserError(f"{path} is not a saved classifier")
    try:
        model, about = _open(saved, str(path), kept_precision)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a foreign file may hold any values under these names
        raise UserError(f"{path} holds another kind of model ({type(error).__name__})") from None
    return model, about


def _open(saved: dict[str, Any], path: str, kept_precision: Callable[[str], str | None]) -> tuple[nn.Module, SavedRun]:
    settings, state = saved["model_config"], saved["model"]
    family = family_named(saved.get("family", LLAMA_FAMILY.name))
    keep = _keeper(saved, family, path, kept_precision)
    making = undrawn if keep else nullcontext
    with torch.random.fork_rng(devices=[]), making():  # the weights that are drawn here are replaced at once
        pretrained, tokenizer = family.reopen(saved, path)
    names, suffix, batch_size = saved["label_names"], saved["prompt_suffix"], saved["batch_size"]
    most, precision = saved["max_sentence_len"], saved["precision"]
    is_possible = len(names) == settings["num_labels"] and all(isinstance(name, str) for name in names)
    is_possible &= all(type(size) is int and size >= 1 for size in (batch_size, 1 if most is None else most))
    is_possible &= isinstance(suffix, str | None) and precision in PRECISIONS
    if not is_possible:
        raise ValueError("settings that cannot be")
    with torch.random.fork_rng(devices=[]), making():
        settings = {"head_settings": {}, **settings}
        model = family.make_classifier(settings, pretrained, tokenizer, names)
        model.prompt_suffix = suffix
        own = saved["methods"]  # the methods that could not be merged into the plain model
        prepare(model, create_methods([(name, own[name]["settings"]) for name in reversed(own)]))
    if keep:
        require_shapes(state_dict_errors(state, model.state_dict()))
        damaged = fill(model, pretrained, state, keep)
    else:
        model.load_state_dict(_joined(state, *(each["tensors"] for each in own.values())))
        damaged = [name for name, tensor in model.state_dict().items() if not is_finite(tensor)]
    if damaged:
        raise UserError(f"not all numbers are finite in {damaged[0]}")
    about = SavedRun(
        tuple(names), tokenizer, suffix, batch_size, precision, pretrained.config,
        saved.get("identity", {}), saved.get("epoch"), saved.get("dev_score"),
    )  # fmt: skip
    return model.requires_grad_(False).eval(), about


def _keeper(saved: dict[str, Any], family: Any, path: str, kept_precision: Callable[[str], str | None]) -> Keep | None:
    """`weights.keeper` for the Llama in a saved classifier; None for one whose methods could not be merged into it."""
    if family is not LLAMA_FAMILY or saved["methods"] or tensor_errors(saved["model"]):
        return None
    keep = keeper(path, numbers_in(saved["model"]), kept_precision(saved["precision"]))
    return keep and (lambda name, tensor: keep(name, tensor) if name.startswith("llama.") else tensor.float())


def _joined(*states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join state dicts. Raises `ValueError` if two of them have the same name."""
    joined = {name: tensor for state in states for name, tensor in state.items()}
    if len(joined) < sum(map(len, states)):
        raise ValueError("a tensor stands there twice")
    return joined


# ----------------------------------------------------------------------------------------------------------- prediction


def loader_of(
    dataset: Sentences, config: Any, batch_size: int, device: torch.device, *, shuffle: bool = False
) -> DataLoader:
    """A loader for this model and device: grouped by length if the model ignores padding, pinned memory for CUDA."""
    pin_memory = device.type == "cuda"
    return dataset.loader(batch_size, shuffle=shuffle, bucket=config.ignores_padding, pin_memory=pin_memory)


class Prediction(NamedTuple):
    """A classifier's result for one sentence. probabilities: one for each label, in the order of the labels.

    is_too_long: whether the sentence has more tokens than the model has positions.
    """

    sentence: str
    label: int
    probabilities: list[float]
    is_too_long: bool


BUCKETED = 50  # batches to collect before sentences are grouped by length, for a model that ignores padding


def predict(
    model: nn.Module, about: SavedRun, sentences: Iterable[str | None], *, batch_size: int | None = None
) -> Iterator[Prediction]:
    """Classify any number of sentences in their order; only a few batches are in memory at a time.

    model, about: the results of `load_classifier`; the model may be on any device. sentences: None among them means
    that no other sentence has arrived yet. A bidirectional Llama, whose predictions depend on the batch, gets full
    batches of the size in `about`, in the order of the sentences; only the last batch may be shorter. Any other model
    gets, at each None, all sentences that have arrived.
    """
    size = batch_size or about.batch_size
    waiting: list[str] = []
    for sentence in sentences:
        if sentence is not None:
            waiting.append(sentence)
            if len(waiting) < BUCKETED * size:
                continue
        ready = len(waiting) if about.config.ignores_padding else len(waiting) // size * size
        yield from _predict(model, about, waiting[:ready], size)
        del waiting[:ready]
    yield from _predict(model, about, waiting, size)


@torch.inference_mode()
def _predict(model: nn.Module, about: SavedRun, sentences: list[str], batch_size: int) -> list[Prediction]:
    device = next(model.parameters()).device
    examples = [Example(sentence, NO_GOLD_LABEL) for sentence in sentences]
    dataset = encode_for(model, about.tokenizer, examples)
    predictions: list[Any] = [None] * len(sentences)
    for batch in loader_of(dataset, about.config, batch_size, device) if sentences else ():
        log_probs = model(batch["token_ids"].to(device))  # b c
        # the log-probabilities of label words are over the whole vocabulary: scale them to a sum of 1 over the labels
        probabilities = log_probs.float().softmax(dim=-1).tolist()
        for index, label, row in zip(batch["indices"], log_probs.argmax(-1).tolist(), probabilities, strict=True):
            predictions[index] = Prediction(sentences[index], label, row, dataset.is_too_long[index])
    return predictions


# ----------------------------------------------------------------------------------------------------------- perplexity


class Perplexity(NamedTuple):
    """How well a language model predicts a text. tokens: the number of predicted tokens."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nats_per_token)


def perplexity(llama: Llama, tokenizer: Tokenizer, text: str, batch_size: int = 8) -> Perplexity:
    """The perplexity of a text: every token is predicted once, in windows of `max_seq_len` that begin with bos.

    Raises `UserError` for a bidirectional model, which sees the tokens that it predicts, and for an empty text.
    """
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; use attention causal")
    ids = tokenizer.encode_all(text)
    if not ids:
        raise UserError("there is no text")
    windows = TextWindows(ids, tokenizer.bos_id, llama.config.max_seq_len)
    result = evaluate(llama, windows.loader(batch_size), task=NextToken(), desc="perplexity")
    return Perplexity(result.loss, result.nats / math.log(2) / len(text.encode()), result.tokens)
