"""Models that are trained, or have been: loading a saved classifier, predicting with it, and making a run of a `Plan`.

`load_classifier` needs no file but the saved model. `assemble` puts a model together with its head, methods,
kernels and optimizer; `fine_tune` trains it. This module parses no arguments and prints nothing but warnings.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from config import PRECISIONS
from engine.checkpointer import KINDS, Checkpointer
from engine.data import NO_GOLD_LABEL, Example
from engine.families import (
    LLAMA_FAMILY,
    advanced_folder,
    create_methods,
    encode_for,
    family_named,
    family_of,
    head_among,
    model_settings,
    require_shapes,
    settings_of,
)
from engine.methods import Classifier, EpochResult, prepare, pretrained_of
from engine.metrics import TrainingCallback
from engine.plan import ComputeSettings, Plan
from engine.processes import SINGLE_PROCESS, Distributed
from engine.programs import import_folder, require_folder
from engine.storage import load_tensors, save_tensors
from engine.tasks import Sentences
from engine.training import Trainer
from engine.weights import Keep, fill, is_finite, keeper, numbers_in, state_dict_errors, tensor_errors, undrawn
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix, short_repr, warn

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

    kept_precision: from the precision of the run to that of `weights.load_llama_model`, for a large Llama.

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
    gets, at each None, all sentences that have arrived. Raises `TypeError` for one text in the place of several.
    """
    if isinstance(sentences, str):
        raise TypeError(f"sentences is one text, {short_repr(sentences)}; give a list of texts")
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


def _predict(model: nn.Module, about: SavedRun, sentences: list[str], batch_size: int) -> list[Prediction]:
    if not sentences:
        return []
    dataset = encode_for(model, about.tokenizer, [Example(sentence, NO_GOLD_LABEL) for sentence in sentences])
    log_probs = log_probabilities(model, dataset, batch_size)
    # the log-probabilities of label words are over the whole vocabulary: scale them to a sum of 1 over the labels
    probabilities = log_probs.float().softmax(dim=-1).tolist()
    each = sentences, log_probs.argmax(-1).tolist(), probabilities, dataset.is_too_long
    return [Prediction(*values) for values in zip(*each, strict=True)]


@torch.inference_mode()
def log_probabilities(model: nn.Module, dataset: Sentences, batch_size: int) -> torch.Tensor:
    """What a classifier has for the labels of each sentence, in the order of the data, on the CPU: n c"""
    device = next(model.parameters()).device
    found: dict[int, torch.Tensor] = {}
    for batch in loader_of(dataset, pretrained_of(model).config, batch_size, device):
        rows = model(batch["token_ids"].to(device)).cpu()  # b c
        found |= zip(batch["indices"], rows, strict=True)
    return torch.stack([found[index] for index in range(len(found))])


# ------------------------------------------------------------------------------------------------- from a plan to a run

FEWEST_IN_4_BITS = 20_000_000  # parameters: below them int4 is refused
MANY_IN_4_BITS = 100_000_000  # below them it has a warning

# ------------------------------------------------------------------------------------------------------------- assembly


class Run(NamedTuple):
    """The result of `assemble`: everything that training needs, except the data."""

    plan: Plan
    tokenizer: Any
    trainer: Trainer
    compute: ComputeSettings

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def config(self) -> Any:
        return pretrained_of(self.model).config

    @property
    def uses_unlabelled(self) -> bool:
        return any(method.uses_unlabelled for method in self.trainer.methods)


def assemble(
    plan: Plan,
    compute: ComputeSettings | None = None,
    distributed: Distributed = SINGLE_PROCESS,
    examples: Sequence[Example] = (),
) -> Run:
    """Load, classifier, methods, kernels, processes, optimizer: in this order, and nowhere else.

    Methods change a plain model; kernels replace the modules that methods left unchanged; several processes share the
    result; the optimizer gets the parameters that are trained in the end. examples: the labelled training sentences,
    for a head that learns something from them before it is trained.
    """
    compute = (compute or ComputeSettings(torch.device("cpu")))._replace(precision=plan.precision)
    family = family_named(plan.family)
    pretrained, tokenizer = family.load(plan)
    if plan.dropout is not None:
        _set_dropout(pretrained, plan.dropout)
    head, chosen = head_among(plan.methods)
    settings = model_settings(head, len(plan.label_names), plan.hidden_dropout_prob)
    model = family.make_classifier(settings, pretrained, tokenizer, plan.label_names, plan.option)
    methods = create_methods(chosen)
    prepare(model, methods)
    if remark := getattr(model, "remark", ""):
        warn(remark)
    compute_fast(model, compute)
    if hasattr(model, "learn"):
        model.eval().learn(examples, plan.seed)
    distributed.spread(model, compute.device)
    for method in methods:
        method.start(model)
    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "lr": plan.lr}]
    for method in methods:
        groups = method.parameter_groups(groups, model)
    plan = dataclasses.replace(plan, attention=pretrained.config.attention)
    trainer = Trainer(
        model,
        update_fast(AdamW(groups, lr=plan.lr, weight_decay=plan.weight_decay), compute.kernels),
        methods=methods,
        seed=plan.seed,
        clip=plan.clip,
        train_eval=plan.train_eval,
        distributed=distributed,
    )
    return Run(plan, tokenizer, trainer, compute)


def _set_dropout(pretrained: nn.Module, p: float) -> None:
    for module in pretrained.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


def assemble_zero_shot(
    llama: Llama,
    tokenizer: Tokenizer,
    label_names: Sequence[str],
    methods: Sequence[tuple[str, Any]] = (),
    texts: Sequence[str] | None = None,
    question: str | None = None,
    compute: ComputeSettings | None = None,
    distributed: Distributed = SINGLE_PROCESS,
    examples: Sequence[Example] = (),
    seed: int = 0,
) -> nn.Module:
    """A zero-shot classifier, which asks the language model and trains nothing. Same order of steps as `assemble`.

    methods: names and settings. texts: unlabelled texts, for a head that estimates values from them. question: replaces
    the course's question, see `utils.prompt_suffix`. examples: labelled training sentences, for a head that learns from
    them; seed: of what it draws. Raises `UserError` for a question if the head has its own or none.
    """
    compute = compute or ComputeSettings(torch.device("cpu"))
    head, chosen = head_among(methods)
    settings = model_settings(head or ("label words", ()), len(label_names))
    model = LLAMA_FAMILY.make_classifier(settings, llama, tokenizer, label_names).requires_grad_(False)
    if question is not None:
        model.prompt_suffix = _asked_of(model, head, label_names, question)
    prepare(model, create_methods(chosen))
    model.requires_grad_(False)
    compute_fast(model, compute, trains=False)
    if hasattr(model, "learn"):
        model.eval().learn(examples, seed)
    distributed.spread(model, compute.device)
    if hasattr(model, "estimate"):
        model.eval().estimate(texts)
    return model


def _asked_of(model: Classifier, head: tuple[str, Any] | None, label_names: Sequence[str], question: str) -> str:
    """The prompt suffix of this classifier with another question; without a head, it keeps the course's final space."""
    if head is None:
        return prompt_suffix(label_names, question)
    if model.prompt_suffix is None:
        raise UserError(f"the method {head[0]} asks nothing after a sentence, so it has no question")
    if model.settings["template"] != advanced_folder().METHODS[head[0]].defaults["template"]:
        raise UserError(f"the method {head[0]} asks its template; give that or a question, not both")
    return prompt_suffix(model.words, question).rstrip()


def compute_fast(model: nn.Module, compute: ComputeSettings, *, trains: bool = True, generates: bool = False) -> None:
    """Move `model` to its device and replace its modules by the fastest kernels of this machine.

    Without the folder fast/, float32 is computed as the code is written; another precision raises `UserError`, and so
    does int4 for a small model, unless `compute` insists.
    """
    if not compute.shard:  # a model that will be split may be too large for one device
        model.to(compute.device)
    if compute.kernels != "auto":
        return
    if compute.precision != "fp32":
        require_folder("fast", f"the precision {compute.precision}")
    if compute.precision == "int4" and any(isinstance(part, Llama) for part in model.modules()):
        _check_size(sum(parameter.numel() for parameter in model.parameters()), compute.insists)
    if (fast := import_folder("fast")) is None:
        warn("the folder fast/ is not here: all is computed as it is written, long texts and training more slowly")
        return
    keeps_copies = not compute.shard  # a model is split to avoid whole copies of its weights
    fast.accelerate(
        model, compute.precision, compute.device, generates=generates, trains=trains, keeps_copies=keeps_copies
    )


def update_fast(optimizer: AdamW, kernels: str = "auto") -> AdamW:
    """Let the fastest kernel of this machine compute the optimizer's updates, if `kernels` is "auto". In place."""
    if kernels == "auto" and (fast := import_folder("fast")) is not None:
        fast.accelerate_optimizer(optimizer)
    return optimizer


def _check_size(numbers: int, insists: bool) -> None:
    if numbers < FEWEST_IN_4_BITS and not insists:
        size = f"a model of {numbers / 1e6:.1f} M parameters"
        raise UserError(f"--precision int4 makes {size} much worse; use int8, or insist: --precision int4 given twice")
    if numbers < MANY_IN_4_BITS:
        warn("4 bits cost quality in models of under 100 M parameters; int8 loses less")


def decoding_module() -> ModuleType | None:
    """engine/decoding.py; None in a hand-out, which has neither the cache nor the sampling that it uses."""
    name = "engine.decoding"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def generator_of(llama: Llama, compute: ComputeSettings, tokens: int) -> Any:
    """The fastest `decoding.Decoder` for `tokens` tokens; None where engine/decoding.py is not here."""
    if (decoding := decoding_module()) is None:
        compute_fast(llama, compute, trains=False, generates=True)
        return None
    fast, precision = import_folder("fast") if compute.kernels == "auto" else None, compute.precision
    if fast is not None and precision == "fp32" and compute.device.type == "cpu" and fast.is_small_job(llama, tokens):
        return decoding.Decoder(llama)  # choosing kernels would take longer
    compute_fast(llama, compute, trains=False, generates=True)
    return decoding.Decoder(llama) if fast is None else fast.decoder(llama, precision, tokens=tokens)


def search_of(
    llama: Llama, generator: Any, beams: int | None = None, contrastive: tuple[float, int] | None = None
) -> Any:
    """A search that replaces `generator`, with its own `generate`; None without both `beams` and `contrastive`."""
    if beams is not None:
        return advanced_folder().part("decoding").BeamSearch(generator, beams)
    if contrastive is not None:
        return advanced_folder().part("decoding").ContrastiveSearch(llama, *contrastive)
    return None


# ---------------------------------------------------------------------------------------------------------- fine-tuning


def checkpointer_for(run: Run, model_path: Path, resume_path: Path, seconds: float = math.inf) -> Checkpointer:
    """The checkpointer that saves a run in these files. seconds: between resume points within an epoch."""
    plan = run.plan
    return Checkpointer(
        model_path=model_path,
        resume_path=resume_path,
        record=record_of(run.model, run.tokenizer, plan.label_names, plan.batch_size, plan.precision),
        identity=plan.identity(),
        epochs=plan.epochs,
        methods=run.trainer.methods,
        distributed=run.trainer.distributed,
        seconds=seconds,
    )


def fine_tune(
    run: Run,
    train: Sentences,
    dev: Sentences,
    checkpointer: Checkpointer | None,
    *,
    unlabelled: Sentences | None = None,
    history: Iterable[EpochResult] = (),
    progress: bool = True,
    callback: TrainingCallback | None = None,
) -> Iterator[EpochResult]:
    """Train as the plan says; yields the results of `Trainer.fit`. dev: the data on which epochs are chosen.

    unlabelled: sentences for the methods that use some without labels.
    """
    trainer, batches = run.trainer, (run.config, run.plan.batch_size, run.compute.device)
    trainer.checkpointer, trainer.callback = checkpointer, callback
    trainer.progress, trainer.history = progress, list(history)
    for method in trainer.methods:
        method.see(unlabelled if method.uses_unlabelled else None, run.plan.label_names)
    return trainer.fit(loader_of(train, *batches, shuffle=True), loader_of(dev, *batches), run.plan.epochs)
