"""`--option finetune`: from flags to a plan, the files of the run, one printed line for each epoch, predictions.

With `--method vote` and `--method soup` saved models are combined and nothing is trained: the data, the output
files and the printed accuracies are those of a fine-tuning. --epochs, --lr and --batch_size do not matter then:
each model predicts in the batches that it was saved with.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.arguments import check_overlaps
from engine.data import Example, divide, set_aside
from engine.flags import TRAINING
from engine.inference import compute_as_saved
from engine.plan import InputFile, files_of_model, model_candidates
from engine.programs import and_kept, import_part
from engine.reports import (
    encode,
    naming_the_flag,
    predict_and_report,
    print_epoch,
    print_epoch_table,
    print_figures,
    print_model,
    read_data,
    report_predictions,
    warn_of_long_sentences,
)
from utils import UserError, join_names, sha256_of, warn

if TYPE_CHECKING:
    from torch import nn

    from engine.checkpointer import Checkpointer
    from engine.methods import EpochResult
    from engine.plan import ComputeSettings, Plan
    from engine.processes import Distributed
    from engine.runs import Run, SavedRun
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
    from engine.runs import load_classifier

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
    from engine.runs import compute_fast, predict
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
    from engine.runs import compute_fast, loader_of
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
    from engine.runs import record_of
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
    own: dict[str, Any] = {"train": InputFile.of(args.train, columns=args.columns).sha256} if args.train else {}
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
    from engine.runs import record_of, save_classifier
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


# ------------------------------------------------------------------------------------------------------ one fine-tuning


def finetune(args: Namespace, compute: ComputeSettings, distributed: Distributed) -> None:
    """Train a head and the model below it, keep the epoch with the best score, predict dev and test with its model."""
    from engine.checkpointer import best_of
    from engine.methods import pretrained_of
    from engine.runs import assemble, compute_fast, fine_tune, load_classifier

    if args.combined:
        combine(args, compute)
        return
    splits, label_names = read_data(args)
    rest = set_aside(splits["train"], args.seed, args.shots, args.hold_out)
    splits["train"], held_out = divide(splits["train"], args.seed, args.shots, args.hold_out)
    if args.shots or held_out:
        others = f"; {len(held_out)} others are held out" if held_out else ""
        print(f"train on {len(splits['train'])} sentences{others}")
    if held_out:
        splits["held-out"] = held_out
    with naming_the_flag():
        run = assemble(plan_of(args, label_names, compute.precision), compute, distributed, splits["train"])
    print_model(args, pretrained_of(run.model))
    splits |= _used_unlabelled(run, rest)
    datasets = encode(args, splits, run.tokenizer, run.model)
    with ExitStack() as held:  # the lock on the run's name
        checkpointer = open_checkpointer(args, run, held)
        history = resume(args, run, checkpointer) if args.resume else []
        look = look_at(args, run, checkpointer, history, held)
        train, dev = datasets["train"], datasets["held-out" if held_out else "dev"]
        unlabelled, callback = datasets.get("unlabelled"), look and look.log
        epochs = fine_tune(run, train, dev, checkpointer, unlabelled=unlabelled, history=history, callback=callback)
        run_epochs(args, epochs, history, checkpointer)
        del run, epochs  # the model is loaded again from its file
        model, saved = load_classifier(checkpointer.model_path, distributed)
        if (saved.identity, saved.epoch) != (checkpointer.identity, best_of(history).epoch):
            raise UserError(f"{checkpointer.model_path} is not what this run saved: another process has replaced it")
        compute_fast(model, compute)
        distributed.spread(model, compute.device)
        print(f"load model from {checkpointer.model_path}")
        judged = predict_and_report(args, model, datasets, label_names, compute.device, distributed, look and look.task)
        print_epoch_table(history, chosen_on(args))
        for method in checkpointer.methods:
            print_figures(method.name, method.figures())
        if look is not None:
            look.finish(datasets, judged, label_names)
        if distributed.is_first:
            checkpointer.resume_path.unlink(missing_ok=True)


def _used_unlabelled(run: Run, rest: list[Example]) -> dict[str, list[Example]]:
    """The sentences without labels, if a method uses some; print how many, and what the head has learned."""
    if hasattr(run.model, "learn"):
        print(run.model.remark)
    if not rest or not run.uses_unlabelled:
        return {}
    print(f"{len(rest)} training sentences are used without their labels")
    return {"unlabelled": rest}


def chosen_on(args: Namespace) -> str:
    """The name of the data on which the best epoch is chosen."""
    return "held-out" if args.hold_out else "dev"


def plan_of(args: Namespace, label_names: list[str], precision: str) -> Plan:
    from engine.plan import InputFile, Plan

    names = ["seed", "epochs", "lr", "batch_size", "hidden_dropout_prob", "dropout", "weight_decay", "clip"]
    names += ["max_sentence_len", "methods", "attention", "norm", "shots", "hold_out"]
    flags: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    return Plan(
        checkpoint=InputFile.of(args.pretrained_model_path, getattr(args, "model_files", ())),
        tokenizer=InputFile.of(args.tokenizer),
        train=InputFile.of(args.train, columns=args.columns),
        dev=InputFile.of(args.dev, columns=args.columns),
        label_names=tuple(label_names),
        precision=precision,
        train_eval=not args.no_train_eval,
        family=getattr(args, "family", "llama"),
        method_files=tuple(map(InputFile.of_several, getattr(args, "method_files", ()))),
        **flags,
    )


def open_checkpointer(args: Namespace, run: Run, held: ExitStack) -> Checkpointer:
    """Choose the files of this run; print which files it will overwrite. held: will release the lock on their name."""
    from engine.checkpointer import choose_model_path
    from engine.runs import checkpointer_for

    candidates, identity = model_candidates(args, run.plan.digest), run.plan.identity()
    if args.methods:  # their name is known only now
        check_overlaps(args, files_of_model(candidates[0]))
    path, kept = run.trainer.distributed.from_first(lambda: choose_model_path(candidates, identity, args.resume, held))
    if kept:
        print(f"{'; '.join(kept)}; this run saves to {path}")
    checkpointer = checkpointer_for(run, path, path.with_suffix(".resume"), 60 * args.resume_every)
    has_resume_point = run.trainer.distributed.from_first(checkpointer.resume_path.exists)
    if not (args.resume and has_resume_point):
        if has_resume_point:
            point = checkpointer.resume_path
            print(f"{point} is the resume point of an interrupted run; the new run will overwrite it")
            print("(to go on with that run instead, stop this one now and add --resume)", flush=True)
        if path.exists():
            print(f"{path} holds an earlier model of the same training data; the first epoch will overwrite it")
    return checkpointer


def resume(args: Namespace, run: Run, checkpointer: Checkpointer) -> list[EpochResult]:
    """Restore the state of the resume point. Returns the results of the finished epochs."""
    from engine.checkpointer import BadResumePoint, OtherRun, other_resume_points

    if not run.trainer.distributed.from_first(checkpointer.resume_path.is_file):
        print(f"there is no resume point {checkpointer.resume_path}; starting from the beginning")
        for path, differing in run.trainer.distributed.from_first(
            lambda: other_resume_points(f"{args.option}-*", checkpointer.identity)
        ):
            print(f"{path} is of a run with another {join_names(map(name_of, differing))}")
        return []
    try:
        history = checkpointer.load_resume_point(run.model, run.trainer.optimizer)
    except OtherRun as error:
        other = f"{checkpointer.resume_path} belongs to a run with another {join_names(map(name_of, error.differing))}"
        raise UserError(f"{other}; use the same arguments, or leave out --resume to start anew") from None
    except BadResumePoint as error:
        raise UserError(f"{error}, or leave out --resume to start anew") from None
    print(f"resuming from {checkpointer.resume_path}")
    for result in history:
        print_epoch(result, checkpointer.model_path, chosen_on(args))
    if checkpointer.begun is not None:
        print(f"epoch {len(history)} goes on after {checkpointer.begun.steps} of its batches")
    return history


def name_of(entry: str) -> str:
    """The user's name of an entry of a run's identity: a kind of file, or a flag."""
    files = ("train", "dev", "checkpoint", "tokenizer", "label_names", "attention", "option")
    flags = {"methods": "--method", "train_eval": "--no_train_eval"}
    return entry.replace("_", " ") if entry in files else flags.get(entry, f"--{entry}")


def look_at(args: Namespace, run: Run, checkpointer: Checkpointer, history: list[EpochResult], held: ExitStack) -> Any:
    """The report of this run, for --log_dir and --html; None without both flags. held: will close its files."""
    if args.log_dir is None and args.html is None:
        return None
    finetuned = import_part("explore.finetuned", "--log_dir and --html")
    look = finetuned.RunReport(
        args.log_dir, args.html, checkpointer, run.compute.device, history, run.trainer.distributed.is_first
    )
    held.callback(look.log.close)
    return look


def run_epochs(
    args: Namespace, epochs: Iterator[EpochResult], history: list[EpochResult], checkpointer: Checkpointer
) -> None:
    """Train to the end; add each epoch's result to `history` and print it. An error says which files are kept."""
    from engine.training import Diverged

    try:
        for result in epochs:
            history.append(result)
            print_epoch(result, checkpointer.model_path, chosen_on(args))
    except Diverged as error:
        raise UserError(f"{error}; try a smaller --lr; {what_is_kept(history, checkpointer)}") from None
    except KeyboardInterrupt as error:
        raise and_kept(error, what_is_kept(history, checkpointer)) from None
    except UserError as error:
        raise UserError(f"{error}; {what_is_kept(history, checkpointer)}") from None


def what_is_kept(history: list[EpochResult], checkpointer: Checkpointer) -> str:
    if history:
        finished = f"the best of {len(history)} finished epochs stays in {checkpointer.model_path}, and"
    elif checkpointer.begun is not None:
        finished = f"no epoch was finished; after {checkpointer.begun.steps} batches of the first one"
    else:
        return "no epoch was finished, nothing was saved"
    return f"{finished} --resume goes on from {checkpointer.resume_path}"
