"""`--method vote` and `--method soup`: predictions or weights of saved models, combined; nothing is trained.

The data, the output files and the printed accuracies are those of a fine-tuning. --epochs, --lr and --batch_size do not
matter: each model predicts in the batches that it was saved with.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.data import Example, divide
from engine.files import check_overlaps, files_of_model, model_candidates
from engine.flags import TRAINING
from engine.plan import InputFile
from engine.predicting import compute_as_saved
from engine.programs import import_part
from engine.reports import (
    encode,
    predict_and_report,
    read_data,
    report_predictions,
    warn_of_long_sentences,
)
from utils import UserError, join_names, sha256_of, warn

if TYPE_CHECKING:
    from torch import nn

    from engine.plan import ComputeSettings
    from engine.saved import SavedRun
    from engine.tasks import Evaluation

ON_DATA = ("train", "seed", "shots", "hold_out")  # entries of a run's identity that say which sentences it has seen


class Member(NamedTuple):
    """A saved model that is combined with others."""

    path: str
    model: nn.Module
    about: SavedRun


def combine(args: Namespace, compute: ComputeSettings) -> None:
    """Predict dev and test with several saved models, or with the mean of their weights, which is saved.

    Raises `UserError` for models with other labels than the data, and for weights that have no mean.
    """
    from engine.saved import load_classifier

    splits, label_names = read_data(args)
    members = [Member(path, *load_classifier(path)) for path in args.combined]
    for member in members:
        print(f"load model from {member.path}")
        if list(member.about.label_names) != label_names:
            theirs, own = (join_names(names) for names in (member.about.label_names, label_names))
            raise UserError(f"{member.path} has the labels {theirs}, and the data have {own}; see --label-names")
    {"predictions": vote, "weights": soup}[args.combines](args, compute, members, splits, label_names)


def vote(
    args: Namespace, compute: ComputeSettings, members: list[Member], splits: dict[str, list[Example]], names: list[str]
) -> None:
    from engine.runs import compute_fast
    from engine.saved import predict
    from engine.tasks import Evaluation

    for member in members:
        compute_fast(member.model, compute_as_saved(args, compute, member.about.precision))
    sentences = {split: [example.sentence for example in splits[split]] for split in ("dev", "test")}

    def evaluated(split: str) -> Evaluation:
        probabilities = []
        for member in members:
            predictions = [*predict(member.model, member.about, sentences[split])]
            warn_of_long_sentences(sum(each.is_too_long for each in predictions), member.about.config, member.path)
            probabilities.append([each.probabilities for each in predictions])
        labels = import_part("advanced.vote", "--method vote").vote(probabilities)
        return Evaluation(labels, [example.label for example in splits[split]])

    report_predictions(args, sentences, evaluated, names)
    print("a vote is no model: --option predict takes one of its models at a time")


def soup(
    args: Namespace, compute: ComputeSettings, members: list[Member], splits: dict[str, list[Example]], names: list[str]
) -> None:
    from engine.processes import SINGLE_PROCESS
    from engine.runs import compute_fast
    from engine.saved import loader_of
    from engine.training import evaluate

    require_alike(members)
    mixing, first, kind = (
        import_part("advanced.soup", "--method soup"),
        members[0],
        dict(args.methods[0].settings)["kind"],
    )
    if kind == "greedy" and args.hold_out:
        splits["held-out"] = divide(splits["train"], args.seed, args.shots, args.hold_out)[1]
    chosen_on = "held-out" if "held-out" in splits else "dev"
    splits.pop("train", None)
    states = [{name: tensor.clone() for name, tensor in each.model.state_dict().items()} for each in members]
    compute_fast(first.model, compute_as_saved(args, compute, first.about.precision))
    datasets = encode(args, splits, first.about.tokenizer, first.model)
    loader = loader_of(datasets[chosen_on], first.about.config, first.about.batch_size, compute.device)

    def score(state: dict[str, Any]) -> float:
        first.model.load_state_dict(state)
        return evaluate(first.model, loader, desc=f"{chosen_on} acc").score

    with ExitStack() as held:  # the lock on the name of the model
        path = model_path(args, kind, held) if args.option in TRAINING else None
        kept, scores = mixing.soup(states, kind, score)
        if kind == "greedy":
            print_choice(args, members, kept, scores, chosen_on)
        first.model.load_state_dict(mixing.mean_of([states[number] for number in kept]))
        if path is not None:
            save_mean(path, first, identity_of(args, kind))
    as_saved = Namespace(**{**vars(args), "batch_size": first.about.batch_size})
    predict_and_report(as_saved, first.model, datasets, names, compute.device, SINGLE_PROCESS)


def require_alike(members: list[Member]) -> None:
    """Raise `UserError` unless all weights have a mean: models of one kind, shape, head and tokenizer."""
    import torch

    first = facts_of(members[0])
    for member in members[1:]:
        for what, fact in facts_of(member).items():
            is_same = torch.equal(fact, first[what]) if isinstance(fact, torch.Tensor) else fact == first[what]
            if not is_same:
                raise UserError(f"{member.path} has another {what} than {members[0].path}, so there is no mean of both")


def facts_of(member: Member) -> dict[str, Any]:
    """What must be equal in all models of a soup, by the words of the error line."""
    from engine.saved import record_of
    from engine.storage import load_tensors

    record = record_of(member.model, member.about.tokenizer, member.about.label_names, 1)
    config = record["model_config"]
    return {
        "kind of model": record["family"],
        "shape": config["model_args"],
        "head": [config["head"], config["head_settings"], record["prompt_suffix"]],
        "tokenizer": record["tokenizer"],
        "--max_sentence_len": record["max_sentence_len"],
        "method": {name: each["settings"] for name, each in load_tensors(member.path)["methods"].items()},
        "tensor": {name: tensor.shape for name, tensor in member.model.state_dict().items()},
    }


def print_choice(args: Namespace, members: list[Member], kept: list[int], scores: list[float], chosen_on: str) -> None:
    """Print what greedy soup has chosen, and on which data; warn of models that may have seen the data."""
    print(f"greedy: the models are sorted and kept by their accuracy on {chosen_on}")
    own = {"train": InputFile.of(args.train, columns=args.columns).sha256} if args.train else {}
    own |= {name: getattr(args, name, None) for name in ON_DATA[1:]}
    for number, (member, score) in enumerate(zip(members, scores, strict=True)):
        print(f"{member.path}: {chosen_on} acc :: {score:.3f}{', kept' if number in kept else ''}")
        if chosen_on != "dev" and any(member.about.identity.get(name) != own[name] for name in own):
            warn(f"{member.path} is not of the same training data, --seed and --hold_out: it may have seen that part")


def identity_of(args: Namespace, kind: str) -> dict[str, Any]:
    """What decides the weights of a soup, as plain values."""
    made_of = {"soup": {"kind": kind, "models": [sha256_of(path) for path in args.combined]}}
    seen = {name: getattr(args, name) for name in ON_DATA[1:]}
    return {"option": args.option, "train": InputFile.of(args.train, columns=args.columns).sha256, **seen} | {
        "dev": InputFile.of(args.dev, columns=args.columns).sha256,
        "methods": made_of,
    }


def model_path(args: Namespace, kind: str, held: ExitStack) -> Path:
    """The file of the new model. Raises `UserError` for one that holds something else. held: will release its lock."""
    from engine.checkpointer import choose_model_path

    identity = identity_of(args, kind)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    (path,) = model_candidates(args, digest)
    check_overlaps(args, files_of_model(path))
    return choose_model_path([path], identity, False, held)[0]


def save_mean(path: Path, first: Member, identity: dict[str, Any]) -> None:
    """Save the first model, which has the mean of the weights now, in the form in which its own file is."""
    from engine.saved import record_of, save_classifier
    from engine.storage import load_tensors

    about, state, saved = first.about, first.model.state_dict(), load_tensors(first.path)
    content = {
        "model": {name: state[name] for name in saved["model"]},
        "methods": {
            method: {**own, "tensors": {name: state[name] for name in own["tensors"]}}
            for method, own in saved["methods"].items()
        },
        "identity": identity,
    }
    record = record_of(first.model, about.tokenizer, about.label_names, about.batch_size, about.precision)
    save_classifier(path, first.model, record | content)
    print(f"save the model to {path}")
