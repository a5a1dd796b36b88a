"""One run of a table: from its description to its line of figures."""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import time
from datetime import date
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from advanced import choose
from advanced.experiments.grid import Trial, path_of
from advanced.experiments.models import Model
from engine.data import create_data, divide, has_gold_labels, pack, read_label_names
from engine.lineage import checksum, files_of
from engine.programs import peak_memory
from utils import warn

if TYPE_CHECKING:
    from torch import nn

    from engine.checkpointer import Checkpointer
    from engine.data import Example
    from engine.methods import EpochResult
    from engine.plan import ComputeSettings, InputFile, Plan
    from engine.runs import Run
    from engine.tasks import Evaluation
    from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
TUNING_SAMPLE = 1000  # training sentences for tuning a zero-shot method


def compute_trial(
    trial: Trial, model: Model, work: Path, device: str, threads: int, commit: str | None
) -> dict[str, Any]:
    """The figures of a run, with threads, date, machine and commit, that of the code when it was imported."""
    import torch

    from engine.plan import ComputeSettings
    from utils import choose_device

    torch.set_num_threads(threads)
    figures = run_trial(trial, model, work, ComputeSettings(choose_device(device)))
    return {**figures, "threads": threads, "commit": commit, "date": str(date.today()), "machine": machine()}


def end_with_parent() -> None:
    """Let this process end when its parent has been killed, because no process would wait for it then."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def commit_of_code() -> str | None:
    """The commit, with -dirty if code or tables differ from it; results, which grow during a grid, do not count."""
    if shutil.which("git") is None:
        return None
    git = partial(subprocess.run, cwd=HERE, capture_output=True, text=True, check=False)
    commit = git(["git", "describe", "--always", "--abbrev=12"]).stdout.strip()
    is_changed = git(["git", "diff", "--quiet", "HEAD", "--", ":/*.py", ":/*/tables/*.json"]).returncode == 1
    return commit + "-dirty" * is_changed if commit else None


def run_trial(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """The figures of a run. model: that of the whole table. work: the folder for its weights.

    A run that was stopped goes on from its files in `work`. These stay until `clear` deletes them.
    """
    start = time.perf_counter()
    key, model = trial.key(model), trial.model(model)
    run = {"finetune": _fine_tune, "prompt": _ask}[trial.option]
    figures = run(trial, model, work / key, compute)
    return {
        "key": key,
        "family": model.family,
        "checksums": model.checksums,
        "weights": checksum(model.checkpoint),
        **named(trial, model),
        "settings": dict(trial.settings),
        **figures,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "peak_mb": peak_memory(compute.device),
    }


def named(trial: Trial, model: Model) -> dict[str, Any]:
    """How a table names and describes a run. model: the model that the run starts from."""
    names = ("row", "option", "method", "data", "shots", "seed", "phase")
    own = {name: getattr(trial, name) for name in names}
    return {"model": model.name, **own, "arguments": list(trial.arguments)}


def _fine_tune(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    from advanced.added import trainable_parameters
    from engine.checkpointer import best_of
    from engine.families import encode_for
    from engine.runs import assemble, checkpointer_for, compute_fast, fine_tune
    from engine.saved import load_classifier
    from utils import seed_everything

    plan, names = _plan(trial, model)
    seed_everything(plan.seed)
    run = assemble(plan, compute)
    train, held_out = divide(create_data(plan.train.path, len(names)), plan.seed, plan.shots, plan.hold_out)
    path = work.with_suffix(".pt")
    checkpointer = checkpointer_for(run, path, path.with_suffix(".resume"))
    history = _epochs_done(checkpointer, run)
    chosen_on = held_out or create_data(plan.dev.path)
    datasets = [encode_for(run.model, run.tokenizer, examples) for examples in (train, chosen_on)]
    trainable = trainable_parameters(run.model)
    history += fine_tune(run, *datasets, checkpointer, history=history, progress=False)
    best = best_of(history)
    figures = {
        "selection": best.dev_score,
        "epoch": best.epoch,
        "epoch_scores": [round(result.dev_score, 4) for result in history],
        "train_losses": [round(result.train_loss, 4) for result in history],
        "trainable": trainable,
        "train_sentences": len(train),
        "seconds": round(sum(result.seconds for result in history), 1),
        "figures": {method.name: found for method in run.trainer.methods if (found := method.figures())},
    }
    tokenizer = run.tokenizer
    del run
    if trial.phase == "final":
        saved, _ = load_classifier(path)
        compute_fast(saved, compute._replace(precision=plan.precision), trains=False)
        figures |= _judge(saved, tokenizer, trial, compute)
    return figures


def clear(trial: Trial, model: Model, work: Path) -> None:
    """Delete the weights of a run whose figures are written."""
    for suffix in (".pt", ".resume"):
        (work / trial.key(model)).with_suffix(suffix).unlink(missing_ok=True)


def _epochs_done(checkpointer: Checkpointer, run: Run) -> list[EpochResult]:
    """Load the resume point and return the epochs that are done; none if the files are of another run."""
    if not checkpointer.resume_path.is_file():
        return []
    from engine.checkpointer import OtherRun

    try:
        return checkpointer.load_resume_point(run.model, run.trainer.optimizer)
    except OtherRun as error:
        warn(f"{error}; this one starts anew")
        return []


def _ask(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """The figures of a zero-shot run; a tuning run uses a sample of the training data."""
    from engine.families import load_llama
    from engine.runs import assemble_zero_shot

    settings, names = dict(trial.settings), read_label_names(path_of(trial.data, "label_names"))
    llama, tokenizer = load_llama(
        model.checkpoint, model.tokenizer, settings["attention"], settings["max_sentence_len"]
    )
    train = create_data(path_of(trial.data, "train"), len(names))
    methods = choose(trial.method, trial.arguments, "prompt") if trial.method else ()
    texts = [example.sentence for example in train]
    precise = compute._replace(precision=settings["precision"])
    asked = assemble_zero_shot(llama, tokenizer, names, methods, texts, compute=precise)
    sample = random.Random(trial.seed).sample(train, min(TUNING_SAMPLE, len(train)))
    if trial.phase == "tune":
        return {"selection": _scores(_evaluate(asked, tokenizer, sample, trial, compute))["macro_f1"]}
    return _judge(asked, tokenizer, trial, compute)


def _plan(trial: Trial, model: Model) -> tuple[Plan, list[str]]:
    from engine.plan import InputFile, Plan

    names = read_label_names(path_of(trial.data, "label_names"))
    files = {split: InputFile.of(path_of(trial.data, split)) for split in ("train", "dev")}
    settings = dict(trial.settings)
    if model.family != "llama":  # which has one kind of attention
        settings["attention"] = None
    plan = Plan(
        family=model.family,
        checkpoint=checkpoint_of(model),
        tokenizer=InputFile.of(model.tokenizer),
        label_names=tuple(names),
        methods=choose(trial.method, trial.arguments, family=model.family) if trial.method else (),
        seed=trial.seed,
        shots=trial.shots,
        train_eval=False,
        **files,
        **settings,
    )
    return plan, names


def checkpoint_of(model: Model) -> InputFile:
    """The checkpoint of a plan: the file, or the directory with those of its files that matter."""
    from engine.plan import InputFile

    return InputFile.of(model.checkpoint, files_of(model.checkpoint) if Path(model.checkpoint).is_dir() else ())


def _judge(model: nn.Module, tokenizer: Tokenizer, trial: Trial, compute: ComputeSettings) -> dict[str, Any]:
    """The figures on dev and, if it has gold labels, on test: used once, after everything is chosen."""
    figures = {}
    for split in ("dev", "test"):
        examples = create_data(path_of(trial.data, split), is_test=split == "test")
        if has_gold_labels([example.label for example in examples]):
            result = _evaluate(model, tokenizer, examples, trial, compute)
            figures[split] = {**_scores(result), "predictions": pack(result.predictions)}
    return figures


def _evaluate(
    model: nn.Module, tokenizer: Tokenizer, examples: list[Example], trial: Trial, compute: ComputeSettings
) -> Evaluation:
    from engine.families import encode_for
    from engine.methods import pretrained_of
    from engine.saved import loader_of
    from engine.training import evaluate

    dataset = encode_for(model, tokenizer, examples)
    loader = loader_of(dataset, pretrained_of(model).config, dict(trial.settings)["batch_size"], compute.device)
    return evaluate(model, loader, progress=False)


def _scores(result: Evaluation) -> dict[str, float]:
    from sklearn.metrics import f1_score

    macro = f1_score(result.labels, result.predictions, average="macro", zero_division=0)
    return {"accuracy": round(result.accuracy, 5), "macro_f1": round(float(macro), 5)}
