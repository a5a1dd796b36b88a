"""`--option finetune`: from flags to a plan, the files of the run, one printed line for each epoch, predictions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from engine.combining import combine
from engine.data import divide, set_aside
from engine.files import check_overlaps, files_of_model, model_candidates
from engine.interrupts import and_kept, hears_termination
from engine.programs import import_part
from engine.reports import (
    encode,
    naming_the_flag,
    predict_and_report,
    print_epoch,
    print_epoch_table,
    print_figures,
    print_model,
    read_data,
)
from utils import UserError, join_names

if TYPE_CHECKING:
    from engine.checkpointer import Checkpointer
    from engine.data import Example
    from engine.methods import EpochResult
    from engine.plan import ComputeSettings, Plan
    from engine.processes import Distributed
    from engine.runs import Run


@hears_termination()
def finetune(args: Namespace, compute: ComputeSettings, distributed: Distributed) -> None:
    """Train a head and the model below it, keep the epoch with the best score, predict dev and test with its model."""
    from engine.checkpointer import best_of
    from engine.methods import pretrained_of
    from engine.runs import assemble, compute_fast, fine_tune
    from engine.saved import load_classifier

    if args.combined:
        combine(args, compute)
        return
    splits, label_names = read_data(args)
    rest = set_aside(splits["train"], args.seed, args.shots, args.hold_out)
    splits["train"], held_out = divide(splits["train"], args.seed, args.shots, args.hold_out)
    if args.shots or held_out:
        print(f"train on {len(splits['train'])} sentences; {len(held_out)} others are held out")
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

    names = ("seed", "epochs", "lr", "batch_size", "hidden_dropout_prob", "dropout", "weight_decay", "clip")
    names += ("max_sentence_len", "methods", "attention", "norm", "shots", "hold_out")
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
        **{name: getattr(args, name, None) for name in names},
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
