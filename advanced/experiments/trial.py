"""One run of a table: from its description to its line of figures.

Shapes: n sentences, c classes.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing import parent_process
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced import choose
from advanced.experiments.judging import Splits, answers, fit_of, judge, judged, probabilities
from advanced.experiments.models import Model
from advanced.experiments.rows import Trial, label_names_of, plan_of
from advanced.experiments.solved import bag_of_words, frozen_regression
from engine.plan import checksum
from engine.programs import peak_memory
from utils import warn

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.checkpointer import Checkpointer
    from engine.data import Example
    from engine.methods import EpochResult
    from engine.plan import ComputeSettings
    from engine.runs import Run

HERE = Path(__file__).resolve().parent
KERNELS, DIRTY = "plain", "-dirty"
PROBABILITIES = "probabilities"  # of plain training: the only entry of figures that is in no line
RESUME_SECONDS = 300.0  # between resume points: of a model of 135 million parameters one takes ten seconds
TUNING_SAMPLE = 1000  # training sentences for tuning a zero-shot method


def compute_trial(
    trial: Trial, model: Model, work: Path, device: str, threads: int, commit: str | None
) -> dict[str, Any]:
    """The figures of a run, with what they were computed with. commit: that of the code when it was imported.

    Always as the code is written: which kernels are the fastest, and so how sums are rounded, differs by machine.
    """
    import torch

    from engine.plan import ComputeSettings
    from utils import choose_device

    torch.set_num_threads(threads)
    compute = ComputeSettings(choose_device(device), kernels=KERNELS)
    if compute.device.type == "cuda":  # where one process does several runs
        torch.cuda.reset_peak_memory_stats(compute.device)
    return {**run_trial(trial, model, work, compute), "threads": threads, "commit": commit}


def end_with_parent() -> None:
    """Let this process end when its parent has been killed, because no process would wait for it then."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def processor(device: torch.device) -> str:
    """The name of the processor or GPU, which decides how sums are rounded."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        named = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        flags = next((line for line in lines if line.startswith("flags")), "").split()
        return " ".join([named, *(flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags)])
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit_of_code() -> str | None:
    """The commit, with -dirty if code or tables differ from it; results, which grow during a grid, do not count."""
    if shutil.which("git") is None:
        return None
    git = partial(subprocess.run, cwd=HERE, capture_output=True, text=True, check=False)
    commit = git(["git", "describe", "--always", "--abbrev=12"]).stdout.strip()
    is_changed = git(["git", "diff", "--quiet", "HEAD", "--", ":/*.py", ":/*/tables/*.json"]).returncode == 1
    return commit + DIRTY * is_changed if commit else None


def run_trial(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """The figures of a run. model: that of the whole table. work: the folder for its weights.

    A run that was stopped goes on from its files in `work`. These stay until `clear` deletes them.
    """
    start = time.perf_counter()
    key, model = trial.key(model), trial.model(model)
    figures = run_of(trial)(trial, model, work, compute)
    return {
        "key": key,
        "family": model.family,
        "checksums": model.checksums,
        "weights": checksum(model.checkpoint),
        **named(trial, model),
        "settings": dict(trial.settings),
        **figures,
        "draw": trial.draw,
        "members": trial.members,
        "date": str(date.today()),
        "machine": machine(),
        "processor": processor(compute.device),
        "torch": version("torch"),
        "kernels": compute.kernels,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "peak_mb": peak_memory(compute.device),
    }


def named(trial: Trial, model: Model) -> dict[str, Any]:
    """How a table names and describes a run. model: the model that the run starts from."""
    names = ("row", "option", "method", "data", "shots", "seed", "phase")
    own = {name: getattr(trial, name) for name in names}
    return {"model": model.name, **own, "arguments": list(trial.arguments)}


def run_of(trial: Trial) -> Callable[..., dict[str, Any]]:
    """The function that does such a run."""
    if trial.members > 1:
        return _combine
    return {"finetune": _fine_tune, "prompt": _ask, "bag-of-words": bag_of_words, "frozen-states": frozen_regression}[
        trial.option
    ]


class Trained(NamedTuple):
    """A fine-tuned model in a file. figures: of its training."""

    path: Path
    tokenizer: Any
    splits: Splits
    figures: dict[str, Any]


def _train(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> Trained:
    """Train, or go on, or take what is there. The weights lie in `work`, named by the key of the run."""
    from advanced.added import trainable_parameters
    from engine.checkpointer import best_of
    from engine.families import encode_for
    from engine.runs import assemble, checkpointer_for, fine_tune
    from utils import seed_everything

    plan, splits, path = plan_of(trial, model), Splits.of(trial), work / f"{trial.key(model)}.pt"
    seed_everything(plan.seed)
    run = assemble(plan, compute, examples=splits.train)
    checkpointer = replace(checkpointer_for(run, path, path.with_suffix(".resume")), apart=RESUME_SECONDS)
    history = _epochs_done(checkpointer, run)
    chosen_on = splits.held_out or splits.dev
    datasets = [encode_for(run.model, run.tokenizer, examples) for examples in (splits.train, chosen_on)]
    trainable = trainable_parameters(run.model)
    rest = encode_for(run.model, run.tokenizer, splits.rest) if splits.rest and run.uses_unlabelled else None
    history += fine_tune(run, *datasets, checkpointer, unlabelled=rest, history=history, progress=False)
    best = best_of(history)
    figures = {
        "selection": best.dev_score,
        "epoch": best.epoch,
        "epoch_scores": [round(result.dev_score, 4) for result in history],
        "train_losses": [round(result.train_loss, 4) for result in history],
        "trainable": trainable,
        "train_sentences": len(splits.train),
        "seconds": round(sum(result.seconds for result in history), 1),
        "figures": {method.name: found for method in run.trainer.methods if (found := method.figures())},
    }
    return Trained(path, run.tokenizer, splits, figures)


def _fine_tune(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    from engine.runs import compute_fast, load_classifier
    from engine.training import Diverged

    try:
        trained = _train(trial, model, work, compute)
    except Diverged as error:
        if trial.phase == "final":
            raise
        return {"selection": 0.0, "diverged": str(error)}  # so large a rate is not chosen
    if trial.phase == "tune":
        return trained.figures
    saved, _ = load_classifier(trained.path)
    compute_fast(saved, compute._replace(precision=dict(trial.settings)["precision"]), trains=False)
    ask = partial(probabilities, saved, trained.tokenizer, trial=trial)
    fit, found = fit_of(ask, trained.splits, trial), answers(ask, trained.splits)
    kept = {} if trial.method else {PROBABILITIES: found}
    return {**trained.figures, **fit, **judge(found, trained.splits), **kept}


def _combine(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """Several plain models of one division of the data, put together: the simplest gain there is, and so a baseline.

    A vote (`advanced/vote.py`), and a uniform and a greedy soup (`advanced/soup.py`) of them; the greedy one is chosen
    on what all of them have held out. The fit is that of the worst model.
    """
    import numpy as np

    from advanced.soup import mean_of, soup
    from engine.runs import compute_fast, load_classifier

    trained = [_train(member, model, work, compute) for member in trial.each_member()]
    splits = trained[0].splits
    model_of_all, _ = load_classifier(trained[0].path)
    first = {name: tensor.clone() for name, tensor in model_of_all.state_dict().items()}
    each = [first, *(load_classifier(one.path)[0].state_dict() for one in trained[1:])]
    compute_fast(model_of_all, compute, trains=False)
    ask = partial(probabilities, model_of_all, trained[0].tokenizer, trial=trial)

    def asked(weights: dict[str, torch.Tensor], examples: list[Example]) -> np.ndarray:
        model_of_all.load_state_dict(weights)
        return ask(examples)  # n c

    def score(weights: dict[str, torch.Tensor]) -> float:
        return judged(asked(weights, splits.held_out), splits.held_out)["accuracy"]

    fit = max((fit_of(partial(asked, one), splits, trial) for one in each), key=itemgetter("fit_loss"))
    soups = {}
    for kind in ("uniform", "greedy"):
        kept, _ = soup(each, kind, score)
        soups[f"{kind} soup"] = mean_of([each[number] for number in kept])
    ways = {"vote": lambda examples: np.mean([asked(one, examples) for one in each], axis=0)}
    ways |= {name: partial(asked, weights) for name, weights in soups.items()}
    combined = {name: judge(answers(way, splits), splits) for name, way in ways.items()}
    seconds = sum(one.figures["seconds"] for one in trained)
    figures = {name: trained[0].figures[name] for name in ("trainable", "train_sentences")}
    return {**figures, **fit, "seconds": round(seconds, 1), "combined": combined, **combined["vote"]}


def clear(trial: Trial, model: Model, work: Path, kept: Collection[str] = ()) -> None:
    """Delete the weights of a run whose figures are written. kept: keys of models that other runs will combine."""
    keys = {one.key(model) for one in trial.each_member()} if trial.members > 1 else {trial.key(model)} - {*kept}
    for key in keys:
        for suffix in (".pt", ".resume"):
            (work / key).with_suffix(suffix).unlink(missing_ok=True)


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

    settings, names, splits = dict(trial.settings), label_names_of(trial), Splits.of(trial)
    llama, tokenizer = load_llama(
        model.checkpoint, model.tokenizer, settings["attention"], settings["max_sentence_len"]
    )
    methods = choose(trial.method, trial.arguments, "prompt") if trial.method else ()
    texts = [example.sentence for example in splits.train]
    precise = compute._replace(precision=settings["precision"])
    shown = dict(examples=splits.train, seed=trial.seed)
    asked = assemble_zero_shot(llama, tokenizer, names, methods, texts, compute=precise, **shown)
    ask = partial(probabilities, asked, tokenizer, trial=trial)
    if trial.phase == "tune":
        sample = random.Random(trial.seed).sample(splits.train, min(TUNING_SAMPLE, len(splits.train)))
        return {"selection": judged(ask(sample), sample)["macro_f1"]}
    return judge(answers(ask, splits), splits)
