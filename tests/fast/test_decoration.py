"""No function is decoration: where a command passes through a function, a change of it is seen in the output.

The commands are traced without kernels (`--kernels plain`). Every function of the root modules that they pass through
is then broken, and the commands run with kernels, as by default: what a command prints, writes or saves must change, or
it must fail. What people read is the same with kernels and without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import random_llama, save_checkpoint
from error_helpers import TEXT_FLAGS
from sentencepiece import SentencePieceProcessor
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import base_llama
import fast.decode
import rope
import utils
from engine import finetuning, training
from engine.equivalence import EquivalenceCheck
from fast import compiled

TRAINING = ("tasks", "processes", "methods", "training", "checkpointer")
MODULES = ("llama", "rope", "base_llama", "classifier", "optimizer", "tokenizer", "utils")
MODULES += tuple(f"engine.{name}" for name in ("decoding", "weights", *TRAINING))
DRIVERS = ("finetuning", "inference", "reports", "runs", "families")
DRIVERS = ("run_llama", *(f"engine.{name}" for name in DRIVERS))
# where to be seen in one command is enough
WITHOUT_KERNELS = ("tokenizer", *(f"engine.{name}" for name in TRAINING))
OF_UTILS = ("seed_everything",)
OVERRIDDEN = ("engine.decoding.Decoder.generate",)  # each decoder of fast/ has its own
EXCEPTIONS = {  # what rightly shows nowhere, and why
    "rope.table_rows": "says how many rows a table has; one more is never read",
    "engine.decoding.Sampling.__post_init__": "an error for settings that the flags have refused already",
    "engine.decoding.Sampling.limits": "one token more to choose from is never drawn: this model is sure",
    "engine.decoding.why_own_generate": "says which of two ways that give the same text is taken",
    "engine.decoding._sides": "makes the comparison of both; another one that holds changes nothing",
    "engine.decoding._cases": "the same",
    "engine.decoding.truncate": "only which probabilities are 0 counts, and the change keeps zeros",
    "engine.weights.Unfilled.__torch_function__": "saves time where there are no numbers",
    "engine.weights._tensor_error": "an error for what is no weight",
    "engine.weights._asks_for_too_much": "an error for a damaged config, before it costs memory or time",
    "engine.weights._require_finite": "an error for damaged weights",
    "engine.weights.computable_kinds": "says which models are compared, not what a command computes",
    "engine.weights.numbers_in": "tells large models, and no command here has one",
    "engine.weights.keeper": "the same",
    "engine.tasks.Sentences.too_long": "counts what is warned of, on standard error",
    "engine.tasks.Classification.check": "an error for outputs that are no log-probabilities",
    "engine.tasks.Evaluation.finish": "puts the predictions of several processes together",
    "engine.processes.Distributed.spread": "moves a model to a GPU; on a CPU it is where it computes",
    "engine.methods.Step.rewind": "returns to the masks of a step's first pass; the commands take one pass",
    "engine.methods.prepare": "lets methods prepare a model, of which the commands have none",
    "engine.training.Trainer.__post_init__": "`fit` sets the same; for who evaluates without it",
    "engine.training.Trainer._time_left": "stands in the progress bar",
    "engine.training._progress_bar": "stands on standard error while one waits",
    "engine.checkpointer.Checkpointer.is_due": "asks for a resume point after ten minutes, which no command here takes",
    "engine.checkpointer._checked_begun": "an error for a damaged resume point; here each is between two epochs",
    "engine.checkpointer.Checkpointer._check_best_model": "an error where the saved model is not this run's",
}
# Without these comparisons `Llama.generate` itself computes. Its draws are the same but for rounding: twice, beside
# other tests, one was seen to be another token: which kernels are fastest is measured, and they round differently.
SOMETIMES = {"engine.decoding._sides", "engine.decoding._cases"}
DRIVER = importlib.import_module("run_llama")  # by name: it is run here as a program
# compute once, unless they are told
KEPT = (rope.rope_table, base_llama.causal_mask, fast.plan._settings_as_made)
TOLERANCE = 1e-5  # of saved numbers, absolute: kernels round in another order

# ---------------------------------------------------------------------------------- functions of the root modules


class Function(NamedTuple):
    """A function or method, and where it stands."""

    name: str
    owner: ModuleType | type
    attribute: str
    value: Any  # what stands there: the function, perhaps decorated, or a property

    @property
    def code(self) -> CodeType | None:
        """Of the function as it is written, without decorators."""
        return getattr(inspect.unwrap(getattr(self.value, "fget", self.value)), "__code__", None)

    def places(self) -> Iterator[tuple[Any, str]]:
        """Where it is looked up: here, and in the modules that have imported its name."""
        yield self.owner, self.attribute
        if isinstance(self.owner, ModuleType):
            for name, module in list(sys.modules.items()):
                if name in (*MODULES, *DRIVERS) or name.startswith("fast."):
                    names = [key for key, value in vars(module).items() if value is self.value]
                    yield from ((module, key) for key in names if module is not self.owner)


def functions_of(module_name: str) -> Iterator[Function]:
    """The functions and methods that are written in a module."""
    module = importlib.import_module(module_name)
    for owner in (module, *(part for part in vars(module).values() if isinstance(part, type))):
        if owner is not module and owner.__module__ != module_name:
            continue
        prefix = module_name if owner is module else f"{module_name}.{owner.__qualname__}"
        for attribute, value in list(vars(owner).items()):
            function = Function(f"{prefix}.{attribute}", owner, attribute, value)
            is_written_here = function.code is not None and function.code.co_filename == module.__file__
            is_written_here &= function.name not in OVERRIDDEN
            if is_written_here and (module_name != "utils" or attribute in OF_UTILS):
                yield function


# ----------------------------------------------------------------------------------------------------- breaking them


def broken(value: Any, is_skipped: bool) -> Any:
    """What takes a function's place. is_skipped: it returns nothing, so not calling it is the change."""
    if isinstance(value, property):
        return property(broken(value.fget, is_skipped))
    if isinstance(value, classmethod):
        return classmethod(broken(value.__func__, is_skipped))

    @functools.wraps(value)  # checks look through it at the function itself, so that only numbers can tell
    def instead(*args: Any, **kwargs: Any) -> Any:
        return None if is_skipped else changed(value(*args, **kwargs))

    return instead


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if dataclasses.is_dataclass(value):
        return type(value)(*map(changed, vars(value).values()))
    kinds = (change for kind, change in CHANGES.items() if isinstance(value, kind))
    change = next(kinds, None)
    assert change is not None, f"no change is known for a {type(value).__name__}"
    return change(value)


def changed_tensor(value: torch.Tensor) -> torch.Tensor:
    """Neither turned nor permuted, which would not be seen where two such tensors are multiplied."""
    if value.dtype == torch.bool:
        return ~value
    if not value.is_floating_point():
        return value ^ 1  # a token stays one
    return value * torch.linspace(-1, 2, value.shape[-1]) if value.dim() and value.shape[-1] > 1 else 0.5 * value + 1


def changed_tuple(value: tuple) -> tuple:
    items = map(changed, value)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def changed_module(value: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in value.parameters():
            parameter.copy_(changed(parameter.detach()))
    return value


CHANGES = {  # the first kind that fits
    type(None): lambda value: value,
    torch.Tensor: changed_tensor,
    bool: lambda value: not value,
    (int, float): lambda value: value + 1,
    str: lambda value: value[::-1],
    Path: lambda value: value.with_stem(value.stem[::-1]),
    dict: lambda value: {key: changed(item) for key, item in value.items()},
    list: lambda value: value[1:-1] or ["one too many"],
    tuple: changed_tuple,
    GeneratorType: lambda value: itertools.islice(value, 1, None),
    nn.Module: changed_module,
    DataLoader: lambda value: DataLoader(value.dataset, batch_size=1, collate_fn=value.collate_fn),
    tqdm: lambda value: tqdm(disable=True),
}


# ------------------------------------------------------------------------------------------------ running the commands


class Run(NamedTuple):
    """One run of `run_llama.py`, perhaps interrupted after its first epoch."""

    flags: list[str]
    is_interrupted: bool = False


class Outcome(NamedTuple):
    """What a command leaves behind: what it printed, the errors that ended its runs, and its files."""

    text: str
    errors: list[str]
    files: dict[str, Any]

    def is_like(self, other: Outcome) -> bool:
        return self.text == other.text and self.errors == other.errors and is_alike(self.files, other.files)

    def is_told_like(self, other: Outcome) -> bool:
        """Whether people read the same, with other kernels. How an error is worded may depend on them."""
        if self.errors or other.errors:
            return len(self.errors) == len(other.errors)
        return self._told() == other._told()

    def _told(self) -> tuple[str, dict[str, Any]]:
        text = self.text.replace("'kernels': 'plain', ", "")
        return text, {name: text for name, text in self.files.items() if name.endswith(".txt")}


class Bench:
    """Runs commands, each one or more runs in an empty folder, and remembers what they give unbroken."""

    def __init__(self, folder: Path, commands: dict[str, list[Run]]):
        self.folder, self.commands = folder, commands
        self.unbroken: dict[tuple[str, str], Outcome] = {}
        self.passed: dict[str, set[CodeType]] = {}  # what each command passes through as it is written
        self.answering: set[CodeType] = set()  # what returns something

    def trace(self) -> None:
        self.passed = {command: self.traced(command, "plain") for command in self.commands}

    def traced(self, command: str, kernels: str) -> set[CodeType]:
        """What a command passes through; what returns something is noted as well."""
        passed: set[CodeType] = set()

        def note(frame: FrameType, event: str, value: Any) -> None:
            passed.add(frame.f_code)
            if event == "return" and value is not None:
                self.answering.add(frame.f_code)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            self.run(command, kernels)
        finally:
            sys.setprofile(before)
        return passed

    def run(self, command: str, kernels: str) -> Outcome:
        text, errors, files = "", [], {}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for number, run in enumerate(self.commands[command]):
            for kept in KEPT:
                kept.cache_clear()
            printed, error = carried_out(run, kernels, self.folder)
            text, errors = text + printed, errors + error
            files |= {f"{number} {path.name}": content(path) for path in sorted(self.folder.iterdir())}
        return Outcome(text, errors, files)

    def is_seen(self, outcome: Outcome, command: str, kernels: str) -> bool:
        """Whether it is another than that of the command as it is."""
        if (command, kernels) not in self.unbroken:
            self.unbroken[command, kernels] = self.run(command, kernels)
        return not outcome.is_like(self.unbroken[command, kernels])

    def run_without(self, function: Function, command: str, kernels: str) -> Outcome:
        """What a command gives once a function is broken."""
        instead = broken(function.value, function.code not in self.answering)
        with pytest.MonkeyPatch.context() as patch:
            for owner, attribute in list(function.places()):
                patch.setattr(owner, attribute, instead)
            return self.run(command, kernels)


def carried_out(run: Run, kernels: str, folder: Path) -> tuple[str, list[str]]:
    """What a run prints, and the error that ends it, if one does."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["run_llama.py", *run.flags, "--kernels", kernels])
        patch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # seconds are printed
        patch.setattr(fast.decode, "LOAD_SECONDS", 0.0)  # so that the loops pay for six tokens
        patch.setattr(fast, "LITTLE", 0)  # and kernels for a tiny model
        patch.setattr(utils.os, "fsync", lambda _: None)  # nothing here need outlive the machine
        if run.is_interrupted:
            patch.setattr(finetuning, "print_epoch", interrupt)
        torch.manual_seed(99)  # what is not seeded is the same each time nevertheless
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                DRIVER.main()
        except (Exception, KeyboardInterrupt) as error:
            return said.getvalue(), [f"{type(error).__name__}: {error}"]
    return said.getvalue(), []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def content(path: Path) -> Any:
    """A text, or what a saved model or resume point holds."""
    return path.read_bytes() if path.suffix == ".txt" else torch.load(path, weights_only=True)


def is_alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        is_same_kind = mine.shape == other.shape and mine.dtype == other.dtype
        return is_same_kind and torch.allclose(mine.double(), other.double(), rtol=0.0, atol=TOLERANCE)
    if isinstance(mine, dict) and isinstance(other, dict):
        return mine.keys() == other.keys() and all(is_alike(mine[key], other[key]) for key in mine)
    if isinstance(mine, list) and isinstance(other, list):
        return len(mine) == len(other) and all(map(is_alike, mine, other))
    return mine == other


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def sensitive_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A model whose next token depends on all that it reads. That of the tiny one hardly depends on anything."""
    folder = tmp_path_factory.mktemp("sensitive")
    shutil.copy(tiny_tokenizer, folder / "sensitive.model")
    model = random_llama(gain=12.0)
    with torch.no_grad():
        model.tok_embeddings.weight.mul_(10.0)
    return save_checkpoint(folder / "sensitive.pt", model)


@pytest.fixture(scope="module")
def label_names(tiny_tokenizer: Path) -> list[str]:
    """Words of one token, so that none has an advantage."""
    pieces = SentencePieceProcessor(model_file=str(tiny_tokenizer))
    starts = [piece for piece in map(pieces.id_to_piece, range(len(pieces))) if piece.startswith("\u2581")]
    return [piece[1:] for piece in starts if piece[1:].isalpha() and len(pieces.encode(piece[1:])) == 1][:8]


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory,
    sensitive_checkpoint: Path,
    label_names: list[str],
    classify_flags: Callable[[str], list[str]],
) -> Bench:
    if compiled.why_no_loops() is None and not compiled.are_compiled("fp32"):
        with contextlib.suppress(compiled.NotReady):
            compiled.compile_now("fp32")
    folder = tmp_path_factory.mktemp("bench")
    names = folder / "names.json"
    names.write_text(json.dumps(label_names), encoding="utf-8")
    checkpoint = ["--pretrained-model-path", str(sensitive_checkpoint)]
    generate = [*checkpoint, "--prompt", "A thin joke", "--max_new_tokens", "6", *TEXT_FLAGS]
    prompt = [*classify_flags("prompt"), *checkpoint, "--label-names", str(names)]
    finetune = [*classify_flags("finetune"), "--epochs", "2", "--lr", "0.003"]  # the best epoch is not the last
    causal = ["--attention", "causal"]
    bench = Bench(
        folder / "run",
        {
            "generate": [Run(generate)],
            "generate, causal": [Run(generate + causal)],
            "generate, sampled": [Run([*generate, *causal, "--top_k", "2", "--repetition_penalty", "1.5"])],
            "prompt": [Run(prompt)],
            "prompt, causal": [Run(prompt + causal)],
            "finetune": [Run(finetune)],
            "finetune, causal, resumed": [
                Run(finetune + causal, is_interrupted=True),
                Run([*finetune, *causal, "--resume"]),
            ],
        },
    )
    bench.trace()
    return bench


COMMANDS = ("generate", "generate, causal", "generate, sampled", "prompt", "prompt, causal")
COMMANDS += ("finetune", "finetune, causal, resumed")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_gives_the_same_each_time_and_with_kernels(bench: Bench, command: str):
    plain, fast = (bench.run(command, kernels) for kernels in ("plain", "auto"))
    assert not bench.is_seen(plain, command, "plain") and not bench.is_seen(fast, command, "auto")
    assert fast.is_told_like(plain) and fast.files.keys() == plain.files.keys()
    assert [error.split(":")[0] for error in plain.errors] == ["KeyboardInterrupt"] * ("resumed" in command)
    assert plain.text.count("Wrote generated sentence") == 2 or "test macro-F1" in plain.text


@pytest.mark.parametrize("command", COMMANDS)
def test_kernels_compute_while_nothing_is_broken(bench: Bench, command: str):
    bench.run(command, "auto")  # compares them with llama.py
    passed = bench.traced(command, "auto")
    names = {function.name for module in MODULES for function in functions_of(module) if function.code in passed}
    replaced = {"optimizer.AdamW.step", "llama.Attention.compute_query_key_value_scores", "llama.Llama.generate"}
    if "generate" not in command:  # whose few rows are not worth these kernels
        replaced |= {"llama.RMSNorm._norm", "llama.FeedForward.forward", "classifier.read_last"}
    assert not names & replaced
    if compiled.are_compiled("fp32") and command == "generate, causal":
        assert importlib.import_module("fast.loop_engine").DecodeEngine.next_logits.__code__ in passed


def forget_comparisons() -> None:
    """Code of engine/ that was broken had a part in them, and no comparison follows that code."""
    for each in gc.get_objects():
        if type(each) is EquivalenceCheck:  # `isinstance` asks each object, and some answer with warnings
            each._verdict = None


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_what_a_command_passes_through_is_seen_in_its_output(bench: Bench, module: str):
    decoration, ignored = set(), []
    for function in functions_of(module):
        forget_comparisons()
        commands = [command for command in COMMANDS if function.code in bench.passed[command]]
        seen: list[bool] = []
        for command in commands:
            if any(seen) and module in WITHOUT_KERNELS:
                break
            outcome = bench.run_without(function, command, "auto")
            seen.append(bench.is_seen(outcome, command, "auto"))
            if seen[-1] and "finetune" in command:  # which takes long
                continue
            plain = bench.run_without(function, command, "plain")
            if bench.is_seen(plain, command, "plain") != seen[-1] or not outcome.is_told_like(plain):
                ignored.append(f"{function.name} by {command}")
        if commands and not any(seen):
            decoration.add(function.name)
    assert ignored == [], "kernels compute something else than the functions"
    expected = {name for name in EXCEPTIONS if name.startswith(f"{module}.")}
    assert decoration - SOMETIMES == expected - SOMETIMES
