"""One plan, one run: assembling, fine-tuning, opening what was saved, and predicting with it.

The model that a run saves is enough by itself: `load_classifier` needs no other file. Nothing here parses arguments or
prints.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from batches import Sentences, TextWindows
from config import PRECISIONS
from course import NO_GOLD_LABEL, Example, prompt_suffix
from families import LLAMAS, advanced_folder, family_named, family_of, model_settings
from families import load_llama as load_llama  # for who imports it from here
from llama import Llama
from optimizer import AdamW
from plan import Place, Plan
from saver import KINDS, Saver
from storage import load_tensors, save_tensors
from tasks import ALONE, NextToken, World, perplexity_of
from tokenizer import Tokenizer
from training import Method, evaluate, fit, prepare, pretrained_of
from utils import UserError, import_folder, some, warn
from weights import is_finite

if TYPE_CHECKING:
    from training import EpochResult, Watch

# --------------------------------------------------------------------------------------------------- assembly


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
    the place of the course's, see `course.prompt_suffix`. Raises `UserError` for one where another is asked, or none.
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


def create_methods(chosen: Sequence[tuple[str, Any]]) -> list[Method]:
    """Of names and settings. Raises `UserError` where the folder advanced/ is not here."""
    return [advanced_folder().create(name, dict(settings)) for name, settings in chosen]


def head_among(chosen: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any] | None, list[tuple[str, Any]]]:
    """What is predicted, if a method says that, and the other methods: names and settings."""
    heads = [each for each in chosen if advanced_folder().METHODS[each[0]].is_head]
    return heads[0] if heads else None, [each for each in chosen if each not in heads]


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


# ------------------------------------------------------------------------------------------------ fine-tuning


def encode_for(model: nn.Module, tokenizer: Any, examples: Sequence[Example]) -> Sentences:
    """A data set as this classifier reads it."""
    return family_of(model).encode(model, tokenizer, examples)


def loader_of(
    dataset: Sentences, config: Any, batch_size: int, device: torch.device, *, shuffle: bool = False
) -> DataLoader:
    """Batches as the model and its device want them."""
    how = dict(bucket=config.ignores_padding, pin_memory=device.type == "cuda")
    return dataset.loader(batch_size, shuffle=shuffle, **how)


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


# ------------------------------------------------------------------------------------------------- saved runs


@dataclass(frozen=True)
class SavedRun:
    """What a prediction needs besides the model, and what is known of how it came about.

    batch_size, precision: those that it was judged with. prompt_suffix: what follows every sentence, if anything does.
    identity: of the run, see `Plan.identity`; epoch, dev_score: of the model. None or empty where nobody trained it.
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
    """What is saved beside the weights of a classifier, so that they are enough by themselves."""
    family = family_of(model)
    return {
        "family": family.name,
        "model_config": {
            **family.settings_of(model),
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
    """Save a classifier that no run has trained, so that `load_classifier` opens it. record: see `record_of`."""
    save_tensors(path, {"kind": KINDS["model"], "model": model.state_dict(), "methods": {}, **record})


def load_classifier(path: str | os.PathLike, world: World = ALONE) -> tuple[nn.Module, SavedRun]:
    """A saved classifier: token ids b s -> log-probabilities b c, on the CPU, in evaluation mode; and what it needs.

    Raises `UserError` if the file is missing, damaged, or not such a file.
    """
    saved = world.from_first(lambda: load_tensors(path))
    if not isinstance(saved, dict) or saved.get("kind") != KINDS["model"]:
        raise UserError(f"{path} is not a saved classifier")
    try:
        model, about = _open(saved, str(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # whatever a foreign file holds in the places of these values
        raise UserError(f"{path} holds another kind of model ({type(error).__name__})") from None
    return model, about


def _open(saved: dict[str, Any], path: str) -> tuple[nn.Module, SavedRun]:
    settings, state = saved["model_config"], saved["model"]
    family = family_named(saved.get("family", LLAMAS.name))
    config, prefix = family.config(settings["model_args"]), f"{family.part}."
    pretrained = {str(name).removeprefix(prefix): state[name] for name in state if str(name).startswith(prefix)}
    if found := family.misfits(pretrained, config):  # before a model of this shape is made
        raise UserError(f"the model does not fit its model_args: {some(found)}")
    tokenizer = family.tokenizer(saved["tokenizer"].numpy().tobytes(), saved["max_sentence_len"], path)
    names, suffix, batch_size = saved["label_names"], saved["prompt_suffix"], saved["batch_size"]
    most, precision = saved["max_sentence_len"], saved["precision"]
    is_possible = len(names) == settings["num_labels"] and all(isinstance(name, str) for name in names)
    is_possible &= all(type(size) is int and size >= 1 for size in (batch_size, 1 if most is None else most))
    is_possible &= isinstance(suffix, str | None) and precision in PRECISIONS
    if not is_possible:
        raise ValueError("settings that cannot be")
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced at once
        settings = {"head_settings": {}, **settings}
        model = family.make_classifier(settings, family.make(config), tokenizer, names)
        model.prompt_suffix = suffix
        own = saved["methods"]  # of the methods that could not be merged into the plain model
        prepare(model, create_methods([(name, own[name]["settings"]) for name in reversed(own)]))
    model.load_state_dict(_joined(state, *(each["tensors"] for each in own.values())))
    if damaged := [name for name, tensor in model.state_dict().items() if not is_finite(tensor)]:
        raise UserError(f"not all numbers are finite in {damaged[0]}")
    about = SavedRun(
        tuple(names), tokenizer, suffix, batch_size, precision, config,
        saved.get("identity", {}), saved.get("epoch"), saved.get("dev_score"),
    )  # fmt: skip
    return model.requires_grad_(False).eval(), about


def _joined(*states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State dicts as one. Raises `ValueError` for a name that stands in two."""
    joined = {name: tensor for state in states for name, tensor in state.items()}
    if len(joined) < sum(map(len, states)):
        raise ValueError("a tensor stands there twice")
    return joined


# ------------------------------------------------------------------------------------------------- prediction


class Prediction(NamedTuple):
    """What a classifier says of one sentence. probabilities: one for each label, in their order.

    is_too_long: the sentence has more tokens than the model has positions.
    """

    sentence: str
    label: int
    probabilities: list[float]
    is_too_long: bool


BUCKETED = 50  # batches of a model that ignores padding among which sentences of like length are put together


def predict(
    model: nn.Module, about: SavedRun, sentences: Iterable[str | None], *, batch_size: int | None = None
) -> Iterator[Prediction]:
    """Classify sentences one after the other, however many: what is kept is a few batches.

    model, about: what `load_classifier` gave, on any device. sentences: a None among them says that no more are at hand
    for the moment. A bidirectional Llama, whose predictions depend on the batch, gets full batches of the size that it
    was judged with, in the order of the sentences; only the last is short. Any other model gets what is at hand.
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
        # scores of label words are log-probabilities of a word among all words: they are compared with one another
        probabilities = log_probs.float().softmax(dim=-1).tolist()
        for index, label, row in zip(batch["indices"], log_probs.argmax(-1).tolist(), probabilities, strict=True):
            predictions[index] = Prediction(sentences[index], label, row, dataset.is_too_long[index])
    return predictions


class Perplexity(NamedTuple):
    """How well a language model predicts a text."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nats_per_token)


def perplexity(llama: Llama, tokenizer: Tokenizer, text: str, batch_size: int = 8) -> Perplexity:
    """Of every token of a text, in windows of `max_seq_len` that begin with bos.

    Raises `UserError` for a bidirectional model, which has seen what it would predict, and for an empty text.
    """
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; use attention causal")
    ids = tokenizer.encode_all(text)
    if not ids:
        raise UserError("there is no text")
    windows = TextWindows(ids, tokenizer.bos_id, llama.config.max_seq_len)
    result = evaluate(llama, windows.loader(batch_size), task=NextToken(), desc="perplexity")
    return Perplexity(result.loss, result.nats / math.log(2) / len(text.encode()), result.tokens)
