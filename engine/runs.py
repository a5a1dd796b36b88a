"""One plan, one run: assembling a model with its head, methods, kernels and optimizer, and fine-tuning it.

Nothing here parses arguments or prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from engine.batches import Sentences
from engine.families import LLAMAS, advanced_folder, create_methods, family_named, head_among, model_settings
from engine.methods import EpochResult, Method, prepare, pretrained_of
from engine.plan import Place, Plan
from engine.processes import ALONE, World
from engine.programs import import_folder
from engine.saved import loader_of, record_of
from engine.saver import Saver
from engine.training import fit
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix, warn

if TYPE_CHECKING:
    from engine.training import Watch

# ------------------------------------------------------------------------------------------------------------- assembly


class Run(NamedTuple):
    """What `assemble` made of a plan: everything that training needs but the data."""

    plan: Plan
    model: nn.Module
    tokenizer: Any
    methods: list[Method]
    optimizer: torch.optim.Optimizer
    place: Place
    world: World

    @property
    def config(self) -> Any:
        return pretrained_of(self.model).config


def assemble(plan: Plan, place: Place | None = None, world: World = ALONE) -> Run:
    """Load, classifier, methods, kernels, processes, optimizer: in this order, and nowhere else.

    Methods wrap a plain model; kernels replace what they left; several processes share the result; the optimizer is
    given what is trained in the end.
    """
    place = place or Place(torch.device("cpu"))
    family = family_named(plan.family)
    pretrained, tokenizer = family.load(plan)
    head, chosen = head_among(plan.methods)
    settings = model_settings(head, len(plan.label_names), plan.hidden_dropout_prob)
    model = family.make_classifier(settings, pretrained, tokenizer, plan.label_names, plan.option)
    methods = create_methods(chosen)
    prepare(model, methods)
    if remark := getattr(model, "remark", ""):
        warn(remark)
    compute_fast(model, plan.precision, place)
    world.spread(model, place.device)
    for method in methods:
        method.start(model)
    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "lr": plan.lr}]
    for method in methods:
        groups = method.parameter_groups(groups, model)
    plan = dataclasses.replace(plan, attention=pretrained.config.attention)
    return Run(plan, model, tokenizer, methods, AdamW(groups, lr=plan.lr), place, world)


def assemble_zero_shot(
    llama: Llama,
    tokenizer: Tokenizer,
    label_names: Sequence[str],
    methods: Sequence[tuple[str, Any]] = (),
    *,
    texts: Sequence[str] | None = None,
    question: str | None = None,
    precision: str = "fp32",
    place: Place | None = None,
    world: World = ALONE,
) -> nn.Module:
    """A classifier that asks the language model, of which nothing is trained. In the same order as `assemble`.

    methods: names and settings. texts: unlabelled ones, for a head that estimates something from them. question: in
    the place of the course's, see `utils.prompt_suffix`. Raises `UserError` for one where another is asked, or none.
    """
    place = place or Place(torch.device("cpu"))
    head, chosen = head_among(methods)
    settings = model_settings(head or ("label words", ()), len(label_names))
    model = LLAMAS.make_classifier(settings, llama, tokenizer, label_names).requires_grad_(False)
    if question is not None:
        model.prompt_suffix = _asked_of(model, head, label_names, question)
    prepare(model, create_methods(chosen))
    model.requires_grad_(False)
    compute_fast(model, precision, place, trains=False)
    world.spread(model, place.device)
    if hasattr(model, "estimate"):
        model.eval().estimate(texts)
    return model


def _asked_of(model: nn.Module, head: tuple[str, Any] | None, label_names: Sequence[str], question: str) -> str:
    """What this classifier is to ask: the course's has a space at the end, to which the words of a head belong."""
    if head is None:
        return prompt_suffix(label_names, question)
    if model.prompt_suffix is None:
        raise UserError(f"the method {head[0]} asks nothing after a sentence, so it has no question")
    if model.settings.get("template"):
        raise UserError(f"the method {head[0]} asks its template; give that or a question, not both")
    return prompt_suffix(model.words, question).rstrip()


def compute_fast(
    model: nn.Module, precision: str, place: Place, *, trains: bool = True, generates: bool = False
) -> None:
    """Put `model` on its device and give it the kernels of this machine.

    Where the root modules stand alone, float32 is computed as it is written. Raises `UserError` for another precision.
    """
    if not place.shard:  # a model that is to be split need not fit the device
        model.to(place.device)
    if place.kernels != "auto":
        return
    if (fast := import_folder("fast")) is not None:
        # splitting a model is there to avoid whole copies of its weights
        purpose = dict(generates=generates, trains=trains, keeps_copies=not place.shard)
        fast.accelerate(model, precision, place.device, **purpose)
    elif precision != "fp32":
        raise UserError(f"the precision {precision} needs the folder fast/ of this package")
    else:
        warn("the folder fast/ is not here: all is computed as it is written, long texts and training more slowly")


def generator_of(llama: Llama, precision: str, place: Place, tokens: int, cuda_graphs: bool = False) -> Any:
    """What generates so many tokens in the model's place, by a method `generate` like its own; perhaps itself."""
    fast = import_folder("fast") if place.kernels == "auto" else None
    if fast is not None and precision == "fp32" and place.device.type == "cpu" and fast.is_little(llama, tokens):
        return llama  # choosing kernels would take longer
    compute_fast(llama, precision, place, trains=False, generates=True)
    return llama if fast is None else fast.decoder(llama, precision, tokens=tokens, cuda_graphs=cuda_graphs)


def search_of(
    llama: Llama, generator: Any, beams: int | None = None, contrastive: tuple[float, int] | None = None
) -> Any:
    """What searches for a text in the place of `generator`, by a method `generate`; None where nothing is asked for."""
    if beams is None and contrastive is None:
        return None
    decoding = advanced_folder().part("decoding")
    if beams is not None:
        return decoding.BeamSearch(generator, beams)
    return decoding.ContrastiveSearch(llama, *contrastive)


# ---------------------------------------------------------------------------------------------------------- fine-tuning


def saver_for(run: Run, model_path: Path, resume_path: Path) -> Saver:
    """What saves a run under these names."""
    plan = run.plan
    return Saver(
        model_path=model_path,
        resume_path=resume_path,
        record=record_of(run.model, run.tokenizer, plan.label_names, plan.batch_size, plan.precision),
        identity=plan.identity(),
        epochs=plan.epochs,
        methods=run.methods,
        world=run.world,
    )


def fine_tune(
    run: Run,
    train: Sentences,
    dev: Sentences,
    saver: Saver,
    *,
    history: Iterable[EpochResult] = (),
    progress: bool = True,
    watch: Watch | None = None,
) -> Iterator[EpochResult]:
    """Train as the plan says; yields what `fit` yields. dev: what epochs are chosen on, perhaps held out of train."""
    batches = run.config, run.plan.batch_size, run.place.device
    return fit(
        run.model,
        run.optimizer,
        loader_of(train, *batches, shuffle=True),
        loader_of(dev, *batches),
        methods=run.methods,
        epochs=run.plan.epochs,
        seed=run.plan.seed,
        saver=saver,
        history=history,
        train_eval=run.plan.train_eval,
        progress=progress,
        world=run.world,
        watch=watch,
    )
