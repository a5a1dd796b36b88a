"""From a plan to a run: assembling a model with its head, methods, kernels and optimizer, and fine-tuning it.

This module parses no arguments and prints nothing but warnings.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from engine.batches import Sentences
from engine.checkpointer import Checkpointer
from engine.data import Example
from engine.families import LLAMA_FAMILY, advanced_folder, create_methods, family_named, head_among, model_settings
from engine.methods import EpochResult, prepare, pretrained_of
from engine.plan import ComputeSettings, Plan
from engine.processes import SINGLE_PROCESS, Distributed
from engine.programs import import_folder, require_folder
from engine.saved import loader_of, record_of
from engine.training import Trainer
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix, warn

if TYPE_CHECKING:
    from engine.training import TrainingCallback

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


def _asked_of(model: nn.Module, head: tuple[str, Any] | None, label_names: Sequence[str], question: str) -> str:
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
    if beams is None and contrastive is None:
        return None
    decoding = advanced_folder().part("decoding")
    if beams is not None:
        return decoding.BeamSearch(generator, beams)
    return decoding.ContrastiveSearch(llama, *contrastive)


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
