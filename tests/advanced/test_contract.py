"""What every method must be like: it begins as the base, it does something, what is judged is what is saved, the saved
file is enough by itself, a run goes on after a stop as if nothing had been, and any two combine or refuse."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import SENTENCES, slow_among
from torch import nn

from advanced import METHODS, choose, named_files
from engine import families, runs
from engine import runs as saved_runs
from engine.checkpointer import Checkpointer, best_of
from engine.data import Example, create_data, divide, set_aside
from engine.methods import EpochResult
from engine.plan import ComputeSettings, InputFile, Plan
from engine.runs import record_of, save_classifier
from utils import UserError

PLAIN = ComputeSettings(torch.device("cpu"), kernels="plain")
TRAINED = [name for name, entry in METHODS.items() if "finetune" in entry.options and not entry.combines]
ARGUMENTS = {  # where the defaults are for larger models or longer runs
    "adapter": ["width=4"],
    "early-stopping": ["patience=1"],
    "ema": ["ema.decay=0.8"],
    "mixout": ["mixout.p=0.5"],
    "prefix": ["prefix.length=3"],
    "prompt-tuning": ["prompt-tuning.length=3"],
    "self-training": ["threshold=0.5"],
    "swa": ["swa.start=0.3"],
    "wise-ft": ["points=3"],
}
REQUIRED_PAIRS = ["smart,wise-ft", "lora,ema", "smart,ema", "lora,smart", "prompt-finetune,smart,wise-ft"]
AT_THE_END = {"early-stopping", "wise-ft"}  # what is done after an epoch; their own tests have them at work


class Done(NamedTuple):
    """A run that has ended: what it trained, and what it saved."""

    run: runs.Run
    history: list[EpochResult]
    saved: nn.Module
    about: saved_runs.SavedRun


class Laboratory:
    """Fine-tunes the tiny model on the tiny data, as the driver does, in a folder."""

    family = "llama"

    def __init__(self, folder: Path, checkpoint: Path, films: dict[str, Path]):
        self.folder, self.checkpoint, self.films = folder, checkpoint, films

    def pretrained(self) -> tuple[InputFile, InputFile]:
        """The checkpoint and its tokenizer."""
        return InputFile.of(self.checkpoint), InputFile.of(self.checkpoint.with_suffix(".model"))

    def arguments(self, names: str) -> list[str]:
        """Those of `ARGUMENTS`, and a teacher: an untrained classifier."""
        teacher = self.folder / "teacher.pt"
        if "distill" in names and not teacher.exists():
            run = self.assemble(self.plan("", seed=8))
            save_classifier(teacher, run.model, record_of(run.model, run.tokenizer, ["bad", "good"], 4))
        given = {**ARGUMENTS, "distill": [f"teacher={teacher}"]}
        return [each for name in names.split(",") for each in given.get(name, ())]

    def plan(self, names: str, **changes) -> Plan:
        checkpoint, vocabulary = self.pretrained()
        methods = choose(names, self.arguments(names)) if names else ()
        settings = dict(seed=1, epochs=2, lr=0.01, batch_size=4, train_eval=False, attention="bidirectional")
        settings["shots"] = 5 if any(METHODS[name].needs_shots for name in names.split(",") if name) else None
        settings["hold_out"] = 0.25 if any(METHODS[name].holds_out for name in names.split(",") if name) else 0.0
        return Plan(
            checkpoint=checkpoint,
            tokenizer=vocabulary,
            family=self.family,
            train=InputFile.of(self.films["train"]),
            dev=InputFile.of(self.films["dev"]),
            label_names=("bad", "good"),
            methods=methods,
            method_files=tuple(map(InputFile.of_several, named_files(methods))),
            **(settings | changes),
        )

    def assemble(self, plan: Plan) -> runs.Run:
        torch.manual_seed(plan.seed)
        return runs.assemble(plan, PLAIN, examples=divide(self.examples, *how_of(plan))[0])

    @property
    def examples(self) -> list[Example]:
        return create_data(self.films["train"])[1:]  # so that one class is rarer

    def checkpointer(self, run: runs.Run) -> Checkpointer:
        path = self.folder / f"{run.plan.digest[:12]}.pt"
        return runs.checkpointer_for(run, path, path.with_suffix(".resume"))

    def watched(self, run: runs.Run) -> tuple[Checkpointer, list[torch.Tensor]]:
        """A checkpointer, and the outputs of the model whenever it is saved."""
        checkpointer, seen = self.checkpointer(run), []
        save = checkpointer.save_model
        checkpointer.save_model = lambda model, result: (save(model, result), seen.append(outputs_of(model, run)))
        return checkpointer, seen

    def train(
        self, run: runs.Run, checkpointer: Checkpointer, history: Sequence[EpochResult] = (), epochs: int | None = None
    ) -> list[EpochResult]:
        """To the end, or so many more epochs. Returns all results."""
        return [*history, *itertools.islice(self.epochs(run, checkpointer, history), epochs)]

    def epochs(
        self, run: runs.Run, checkpointer: Checkpointer, history: Sequence[EpochResult] = ()
    ) -> Iterator[EpochResult]:
        """Train one epoch after another."""
        train, dev = divide(self.examples, *how_of(run.plan))
        chosen_on, rest = dev or create_data(run.plan.dev.path), set_aside(self.examples, *how_of(run.plan))
        parts = [families.encode_for(run.model, run.tokenizer, examples) for examples in (train, chosen_on, rest)]
        return runs.fine_tune(run, *parts[:2], checkpointer, unlabelled=parts[2] if rest else None, history=history)

    def done(self, names: str, **changes) -> Done:
        run = self.assemble(self.plan(names, **changes))
        checkpointer = self.checkpointer(run)
        history = self.train(run, checkpointer)
        return Done(run, history, *saved_runs.load_classifier(checkpointer.model_path))


def how_of(plan: Plan) -> tuple[int, int | None, float]:
    """How the training data are divided."""
    return plan.seed, plan.shots, plan.hold_out


@pytest.fixture
def laboratory(tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path]) -> Laboratory:
    return Laboratory(tmp_path, tiny_checkpoint, films)


@torch.inference_mode()
def outputs_of(model: nn.Module, run: runs.Run) -> torch.Tensor:
    """Of texts of several lengths in one batch. Returns b c"""
    dataset = families.encode_for(model, run.tokenizer, [Example(text, 0) for text in SENTENCES[:4]])
    (batch,) = saved_runs.loader_of(dataset, run.config, 4, torch.device("cpu"))
    return model.eval()(batch["token_ids"])


@functools.cache
def outputs_of_plain(
    kind: type[Laboratory], checkpoint: Path, films: tuple[tuple[str, Path], ...], **changes: Any
) -> torch.Tensor:
    """Of the model that one epoch without methods saves; trained once for all methods that are compared with it."""
    with tempfile.TemporaryDirectory() as folder:
        plain = kind(Path(folder), checkpoint, dict(films)).done("", epochs=1, **changes)
        return outputs_of(plain.saved, plain.run)


def skip_what_is_refused(names: str, attention: str) -> None:
    if names == "padding-mask" and attention == "causal":
        pytest.skip("a causal model never sees padding, and the method says so")


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", [name for name in TRAINED if not METHODS[name].is_head])
def test_a_method_begins_as_the_base(laboratory: Laboratory, name: str, attention: str):
    skip_what_is_refused(name, attention)
    plain, run = (laboratory.assemble(laboratory.plan(each, attention=attention)) for each in ("", name))
    outputs = outputs_of(run.model, run)
    if not run.trainer.methods[0].begins_as_base:
        assert not torch.allclose(outputs, outputs_of(plain.model, plain), atol=1e-4)  # else it should not say so
        return
    assert torch.equal(outputs, outputs_of(plain.model, plain))
    with run.trainer.methods[0].evaluation_weights(run.model):
        assert torch.equal(outputs_of(run.model, run), outputs)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("names", [*TRAINED, *REQUIRED_PAIRS])
def test_what_is_judged_is_what_is_saved_and_the_file_is_enough(laboratory: Laboratory, names: str, attention: str):
    skip_what_is_refused(names, attention)
    run = laboratory.assemble(laboratory.plan(names, attention=attention, epochs=1))
    checkpointer, seen = laboratory.watched(run)
    history = laboratory.train(run, checkpointer)
    model, about = saved_runs.load_classifier(checkpointer.model_path)
    torch.testing.assert_close(outputs_of(model, run), seen[-1], rtol=0, atol=1e-6)
    assert about.epoch == best_of(history).epoch and about.identity == checkpointer.identity
    if not METHODS[names.split(",")[0]].is_head and names not in AT_THE_END:  # another head has no plain run
        made_of = type(laboratory), laboratory.checkpoint, tuple(laboratory.films.items())
        changes = dict(attention=attention, hold_out=run.plan.hold_out, shots=run.plan.shots)
        assert not torch.allclose(outputs_of(model, run), outputs_of_plain(*made_of, **changes), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_epoch_runs_with_its_defaults(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, name: str):
    """The other methods have theirs in every test."""
    monkeypatch.delitem(ARGUMENTS, name)
    done = laboratory.done(name, epochs=1)
    assert laboratory.arguments(name) == [] and outputs_of(done.saved, done.run).isfinite().all()


def stop_in_the_second_epoch(laboratory: Laboratory, run: runs.Run) -> None:
    checkpointer = laboratory.checkpointer(run)
    checkpointer.seconds, save = 0.0, checkpointer.save_resume_point

    def save_and_stop(*state: Any) -> None:
        save(*state)
        if len(state[2]) == 1 and checkpointer.begun is not None and checkpointer.begun.steps == 2:
            raise KeyboardInterrupt

    checkpointer.save_resume_point = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        laboratory.train(run, checkpointer)


WITHIN = pytest.param(True, id="within an epoch", marks=pytest.mark.slow)


@pytest.mark.parametrize("is_within", [pytest.param(False, id="after an epoch"), WITHIN])
@pytest.mark.parametrize("names", [*TRAINED, *slow_among(REQUIRED_PAIRS, REQUIRED_PAIRS[1:])])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(laboratory: Laboratory, names: str, is_within: bool):
    undisturbed = laboratory.assemble(laboratory.plan(names))
    checkpointer = laboratory.checkpointer(undisturbed)
    epochs = laboratory.epochs(undisturbed, checkpointer)
    expected, files = [next(epochs)], (checkpointer.model_path, checkpointer.resume_path)
    stopped = [path.read_bytes() for path in files]  # what a run leaves that ends here
    expected += epochs
    expected_model = saved_runs.load_classifier(checkpointer.model_path)[0]
    for path in files:
        path.unlink()
    if is_within:
        stop_in_the_second_epoch(laboratory, laboratory.assemble(laboratory.plan(names)))
    else:
        for path, content in zip(files, stopped, strict=True):
            path.write_bytes(content)
    run = laboratory.assemble(laboratory.plan(names))
    torch.manual_seed(99)  # the resume point has the state of the generators
    checkpointer = laboratory.checkpointer(run)
    history = laboratory.train(run, checkpointer, checkpointer.load_resume_point(run.model, run.trainer.optimizer))
    figures = [[(each.train_loss, each.dev_score) for each in results] for results in (history, expected)]
    assert figures[0] == figures[1]
    states = run.model.state_dict(), undisturbed.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    saved = saved_runs.load_classifier(checkpointer.model_path)[0]
    assert torch.equal(outputs_of(saved, run), outputs_of(expected_model, run))


@pytest.fixture(scope="module")
def alone() -> dict[tuple, torch.Tensor]:
    """What one method without another gives, by its name and how the data are divided: made once for all pairs."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("names", [f"{one},{other}" for one, other in itertools.combinations(TRAINED, 2)])
def test_any_two_combine_or_refuse(laboratory: Laboratory, names: str, alone: dict[tuple, torch.Tensor]):
    try:
        choose(names, laboratory.arguments(names))
    except UserError as error:
        assert "cannot be combined" in str(error)
        return
    done = laboratory.done(names, epochs=1)
    both = outputs_of(done.saved, done.run)
    assert both.isfinite().all()
    for name in names.split(","):
        case = name, *how_of(done.run.plan)
        if case not in alone:
            single = laboratory.done(name, epochs=1, hold_out=done.run.plan.hold_out, shots=done.run.plan.shots)
            alone[case] = outputs_of(single.saved, single.run)
        idle = AT_THE_END | ({"class-weights"} if done.run.plan.shots else set())  # as many of each class
        assert {*names.split(",")} - {name} <= idle or not torch.equal(alone[case], both)
