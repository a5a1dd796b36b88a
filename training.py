"""Encoded data, batches, the one evaluation loop, the one training loop, the hooks of training methods, and saved runs.

Every task goes through here: `prompt`, `finetune`, and every method added later. Two independent choices make an
experiment: *what is predicted* (a module from token ids to log-probabilities over classes) and *how the weights move*
(a list of `Method`s around `fit`). Nothing here prints or parses arguments.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from course import NO_GOLD_LABEL, Example, has_gold_labels, majority_accuracy
from storage import load_tensors, save_tensors
from tokenizer import Tokenizer
from utils import UserError, some

# ------------------------------------------------------------------------------------------------------ data


class EncodingRules(NamedTuple):
    """How sentences become token ids: what follows them, and how long they may be."""

    prompt_suffix: str | None = None
    max_seq_len: int | None = None
    is_causal: bool = False


AS_IT_IS = EncodingRules()


class LlamaDataset(Dataset):
    """Examples with their token ids, encoded once: bos, sentence, prompt suffix; no eos.

    `sentences` are what is written to the output file (with the suffix). `too_long` counts the examples beyond
    `max_seq_len`: the bidirectional reference uses them whole; in causal mode the sentence, never the suffix, is cut.
    Raises `UserError` if the suffix alone leaves no room for a sentence.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, rules: EncodingRules = AS_IT_IS):
        self.labels = [example.label for example in examples]
        self.pad_id = tokenizer.pad_id
        suffix = "" if rules.prompt_suffix is None else f" {rules.prompt_suffix}"
        self.sentences = [example.sentence + suffix for example in examples]
        if rules.is_causal:
            bare = [example.sentence for example in examples]
            sentence_ids = tokenizer.encode_batch(bare, bos=True, eos=False)
            suffix_ids = _suffix_ids(tokenizer, rules)
        else:
            sentence_ids = tokenizer.encode_batch(self.sentences, bos=True, eos=False)
            suffix_ids = []
        limit = float("inf") if rules.max_seq_len is None else rules.max_seq_len - len(suffix_ids)
        self.too_long = sum(len(ids) > limit for ids in sentence_ids)
        cut = int(limit) if rules.is_causal and rules.max_seq_len is not None else None
        self.token_ids = [ids[:cut] + suffix_ids for ids in sentence_ids]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[int], int, str, int]:
        return self.token_ids[index], self.labels[index], self.sentences[index], index

    def collate_fn(self, items: list[tuple[list[int], int, str, int]]) -> dict[str, Any]:
        """A batch, right-padded to its longest row: token_ids b s, labels b, sents, and where they stand, indices."""
        token_ids, labels, sentences, indices = zip(*items, strict=True)
        longest = max(map(len, token_ids))
        padded = [ids + [self.pad_id] * (longest - len(ids)) for ids in token_ids]
        return {
            "token_ids": torch.tensor(padded),
            "labels": torch.tensor(labels),
            "sents": list(sentences),
            "indices": list(indices),
        }

    def loader(
        self, batch_size: int, *, shuffle: bool = False, bucket: bool = False, pin_memory: bool = False
    ) -> DataLoader:
        """Batches in file order, or in an order drawn from PyTorch's global random generator.

        bucket: sentences of like length together, so that little is padding. For causal models, whose predictions do
        not depend on the batch. pin_memory: for CUDA, which copies from such memory without making anybody wait.
        """
        how = dict(collate_fn=self.collate_fn, pin_memory=pin_memory)
        if bucket:
            batches = LengthBuckets([len(ids) for ids in self.token_ids], batch_size, shuffle)
            return DataLoader(self, batch_sampler=batches, **how)
        return DataLoader(self, batch_size=batch_size, shuffle=shuffle, **how)


class LengthBuckets(Sampler[list[int]]):
    """Batches of sentences of like length.

    shuffle: the sentences are dealt at random into groups of `GROUP` batches, each group is sorted by length and cut
    into batches, and the batches come in random order: who meets whom changes from epoch to epoch, and no length is
    seen before another. Otherwise all are sorted, the longest first, so that a batch too large for the memory fails
    at once.
    """

    GROUP = 50

    def __init__(self, lengths: Sequence[int], batch_size: int, shuffle: bool):
        self.lengths, self.batch_size, self.shuffle = lengths, batch_size, shuffle

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.lengths)
        order = torch.randperm(count).tolist() if self.shuffle else list(range(count))
        size = self.GROUP * self.batch_size if self.shuffle else count
        batches = []
        for start in range(0, count, size):
            group = sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            batches += [group[first : first + self.batch_size] for first in range(0, len(group), self.batch_size)]
        order = torch.randperm(len(batches)).tolist() if self.shuffle else range(len(batches))
        yield from (batches[position] for position in order)


def _suffix_ids(tokenizer: Tokenizer, rules: EncodingRules) -> list[int]:
    """The suffix's own ids. Pieces never cross a space, so they equal the tail of the whole text's ids."""
    if rules.prompt_suffix is None:
        return []
    ids = tokenizer.sp_model.encode(rules.prompt_suffix)
    if rules.max_seq_len is not None and len(ids) + 2 > rules.max_seq_len:
        raise UserError(f"the prompt takes {len(ids)} tokens, which leaves no room in max_seq_len={rules.max_seq_len}")
    return ids


# ----------------------------------------------------------------------------------------------- processes


class World:
    """The processes that share a run. This one is alone; `fast.distributed.Group` is one of several.

    All go through the same batches in the same order, compute their `part` of each, and meet in the other methods,
    which all of them must therefore call alike.
    """

    is_first = True  # who prints, and writes files
    share = 1.0  # how much of the present batch this process computes

    def spread(self, model: nn.Module, device: torch.device) -> None:
        """Put `model` where it computes; the copies of several processes become one. Before its optimizer is made."""
        model.to(device)

    def part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of a batch that this process computes, padded as the whole batch is.

        Where a batch has fewer rows than there are processes, some get a row that counts for nothing: it has no index,
        and a label that no loss counts.
        """
        return batch

    def forward(self, model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """What `model` computes from a part. token_ids: b s -> b c"""
        return model(token_ids)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the sum of all processes' losses."""
        loss.backward()

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' values."""
        return value

    def merge(self, predictions: list[int]) -> list[int]:
        """All processes' predictions, from lists that hold `NO_GOLD_LABEL` where another process predicts."""
        return predictions

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first process, where alone it is called. For what only its disk holds."""
        return make()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of the whole, plain model; of use on the first process alone."""
        return model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state dict of the optimizer of the whole, plain model; of use on the first process alone."""
        return optimizer.state_dict()

    def load_model(self, model: nn.Module, state: dict[str, Any]) -> None:
        """The inverse of `model_state`."""
        model.load_state_dict(state)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """The inverse of `optimizer_state`."""
        optimizer.load_state_dict(state)


ALONE = World()


# ------------------------------------------------------------------------------------------------ evaluation


@dataclass
class Evaluation:
    """Predictions beside the gold labels, in the order of the data, whatever that of the batches was."""

    predictions: list[int]
    labels: list[int]

    @property
    def accuracy(self) -> float:
        return sum(map(int.__eq__, self.predictions, self.labels)) / len(self.labels)

    @property
    def majority_accuracy(self) -> float:
        """The accuracy of always answering the most frequent gold label."""
        return majority_accuracy(self.labels)

    @property
    def has_gold_labels(self) -> bool:
        """Whether the labels can be gold: placeholders are all the same."""
        return has_gold_labels(self.labels)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    device: torch.device,
    *,
    desc: str = "eval",
    progress: bool = True,
    world: World = ALONE,
) -> Evaluation:
    """Predict every batch of `loader` with dropout off. Leaves the model in evaluation mode."""
    model.eval()
    labels = loader.dataset.labels
    result = Evaluation([NO_GOLD_LABEL] * len(labels), list(labels))
    with _progress_bar(loader, desc, progress) as bar:
        for batch in loader:
            part = world.part(batch)
            log_probs = world.forward(model, part["token_ids"].to(device, non_blocking=True))  # b c
            if world.total(log_probs.isnan().sum()) > 0:
                raise UserError(
                    f"{desc}: the predictions are not finite; training diverged (try a smaller --lr), or the model "
                    "computes them wrongly"
                )
            for index, prediction in zip(part["indices"], log_probs.argmax(dim=-1).tolist(), strict=False):
                result.predictions[index] = prediction
            bar.update(len(batch["labels"]))
    result.predictions = world.merge(result.predictions)
    return result


def _progress_bar(loader: DataLoader, desc: str, progress: bool) -> tqdm:
    total = len(loader.dataset)
    return tqdm(total=total, desc=desc, unit=" sentences", leave=False, mininterval=0.5, disable=not progress)


# -------------------------------------------------------------------------------------------------- training


class Method:
    """How the weights move. Every hook defaults to plain fine-tuning; methods compose around one loop."""

    def prepare(self, model: nn.Module) -> None:
        """Once, before the optimizer is made: wrap, freeze, snapshot. The evaluation-mode output must not change."""

    def penalty(self, model: nn.Module, batch: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor | float:
        """A term added to the task loss of a batch: a mean over its rows, or of the weights alone."""
        return 0.0

    def after_step(self, model: nn.Module) -> None:
        """After each optimizer step: moving averages, projections."""

    def export(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict of the plain model, which is what is saved."""
        return state


@dataclass
class EpochResult:
    """What one epoch brought. `train_loss` is the mean over batches of summed loss / batch size."""

    epoch: int
    train_loss: float
    train_acc: float
    dev_acc: float
    seconds: float
    improved: bool


MEND = "remove it, or leave out --resume to start anew"
KINDS = {"model": "fine-tuned classifier", "resume": "resume point"}  # what the files that a run saves say they are


@dataclass
class Checkpoints:
    """Where a run saves its best model and its resume point, and what identifies the run.

    model_path: the best epoch's model; resume_path: everything needed to go on after the last finished epoch.
    model_config, args: plain values, saved beside the weights. identity: what must be equal for a resume point to be
    taken up, for example the seed and the data.
    """

    model_path: Path
    resume_path: Path
    model_config: dict[str, Any]
    args: dict[str, Any]
    identity: dict[str, Any]
    methods: Sequence[Method] = field(default=())

    def save_model(self, model: nn.Module, result: EpochResult, world: World = ALONE) -> None:
        state = world.model_state(model)
        if not world.is_first:
            return
        for method in self.methods:
            state = method.export(state)
        save_tensors(
            self.model_path,
            {
                "kind": KINDS["model"],
                "model": state,
                "model_config": self.model_config,
                "args": self.args,
                "identity": self.identity,
                "epoch": result.epoch,
                "dev_acc": result.dev_acc,
            },
        )

    def save_resume_point(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        history: list[EpochResult],
        world: World = ALONE,
    ) -> None:
        point = {
            "kind": KINDS["resume"],
            "identity": self.identity,
            "history": [asdict(result) for result in history],
            "model": world.model_state(model),
            "optimizer": world.optimizer_state(optimizer),
            "rng": _rng_state(),
        }
        if world.is_first:
            save_tensors(self.resume_path, point)

    def load_resume_point(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World = ALONE
    ) -> list[EpochResult]:
        """Put model, optimizer and random generators where they were, and return the epochs that are done.

        Raises `UserError` if the resume point is damaged or belongs to another run, naming what differs.
        """
        point = world.from_first(self._read_resume_point)
        try:
            history = _checked_history(point["history"], self.args.get("epochs"))
            best_epoch = best_of(history).epoch
            world.load_model(model, point["model"])
            _load_optimizer(optimizer, point["optimizer"], world)
            _set_rng_state(point["rng"])
        except Exception:  # whatever each of them meets in a damaged file
            raise UserError(f"{self.resume_path} is damaged; {MEND}") from None
        world.from_first(lambda: self._check_best_model(best_epoch))
        return history

    def _read_resume_point(self) -> dict[str, Any]:
        try:
            point = load_tensors(self.resume_path, mmap=False)  # the optimizer keeps these tensors
        except UserError as error:
            raise UserError(f"{error}; {MEND}") from None
        if not isinstance(point, dict) or not isinstance(point.get("identity"), dict):
            raise UserError(f"{self.resume_path} is not a resume point; {MEND}")
        if differing := differences(self.identity, point["identity"]):
            raise UserError(
                f"{self.resume_path} belongs to a run with another {some(differing)}; "
                "use the same arguments, or leave out --resume to start anew"
            )
        return point

    def _check_best_model(self, best_epoch: int) -> None:
        """Raise `UserError` unless the saved model is this run's, of its best epoch so far or a later one.

        Later: a run may have been stopped after saving its model and before its resume point; that epoch is run again.
        """
        try:
            saved = load_tensors(self.model_path)
            fits = saved["identity"] == self.identity and saved["epoch"] >= best_epoch
        except UserError as error:
            raise UserError(f"{error}; without it {self.resume_path} cannot be taken up") from None
        except Exception:  # whatever a foreign file holds in their places
            fits = False
        if not fits:
            raise UserError(f"{self.model_path} is not of the run that {self.resume_path} belongs to; start anew")


def differences(identity: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not equal in the identity of another run, which may come from a damaged file."""
    return [
        key
        for key, value in identity.items()
        if not isinstance(other.get(key), type(value)) or other[key] != value
    ]


def identity_of(path: str | os.PathLike) -> dict[str, Any]:
    """What a saved model or resume point says of its run; nothing if the file is not one of ours, or is damaged."""
    try:
        saved = load_tensors(path, warns=False)
    except UserError:
        return {}
    identity = saved.get("identity") if isinstance(saved, dict) else None
    return identity if isinstance(identity, dict) else {}


def best_of(history: list[EpochResult]) -> EpochResult:
    """The epoch whose model is kept."""
    return [result for result in history if result.improved][-1]


def _checked_history(entries: list[dict[str, Any]], epochs: int | None) -> list[EpochResult]:
    """The results of epochs 0, 1, ... Raises an error of some kind unless a run can have written them."""
    history: list[EpochResult] = []
    numbers = dict.fromkeys(("train_loss", "train_acc", "dev_acc", "seconds"), float)
    types = {"epoch": int, **numbers, "improved": bool}
    for number, entry in enumerate(entries):
        if {name: type(value) for name, value in entry.items()} != types or entry["epoch"] != number:
            raise ValueError("not an epoch's result")
        if not 0.0 <= entry["dev_acc"] <= 1.0 or not math.isfinite(entry["train_loss"]):
            raise ValueError("not an epoch's figures")
        if entry["improved"] != all(entry["dev_acc"] > earlier.dev_acc for earlier in history):
            raise ValueError("not the best epoch")
        history.append(EpochResult(**entry))
    if not history or (epochs is not None and len(history) > epochs):
        raise ValueError("not so many epochs")
    return history


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], world: World) -> None:
    """As `World.load_optimizer`. Raises `ValueError` for other settings, and for what cannot be a parameter's state."""

    def settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    if not isinstance(state, dict) or settings(state["param_groups"]) != settings(optimizer.param_groups):
        raise ValueError("other settings")
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    saved = [value for values in state["state"].values() for value in values.values()]
    if any(isinstance(value, torch.Tensor) and value.dtype not in dtypes for value in saved):
        raise ValueError("other number formats")  # which loading would round to these
    world.load_optimizer(optimizer, state)
    for parameter, values in optimizer.state.items():
        for value in values.values():
            is_moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if not is_moment and not (isinstance(value, int) and value >= 1):
                raise ValueError("another parameter's state")


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_loader: DataLoader,
    dev_loader: DataLoader,
    *,
    epochs: int,
    device: torch.device,
    checkpoints: Checkpoints,
    history: Iterable[EpochResult] = (),
    train_eval: bool = True,
    progress: bool = True,
    world: World = ALONE,
) -> Iterator[EpochResult]:
    """Train, and yield each epoch's result after its model (if it is the best on dev) and resume point are saved.

    history: the epochs that a resumed run has already done. train_eval: measure the accuracy on the training data as
    the reference does; without it `train_acc` is NaN. world: the processes that share the run; `model` was spread.
    Raises `UserError` when the loss is not finite; what earlier epochs saved stays.
    """
    history = list(history)
    shared = dict(progress=progress, world=world)
    for epoch in range(len(history), epochs):
        start = time.perf_counter()
        train_loss = _train_epoch(model, optimizer, train_loader, epoch, device, checkpoints.methods, **shared)
        train_acc = math.nan
        if train_eval:
            train_acc = evaluate(model, train_loader, device, desc=f"train acc {epoch}", **shared).accuracy
        dev_acc = evaluate(model, dev_loader, device, desc=f"dev acc {epoch}", **shared).accuracy
        improved = all(dev_acc > earlier.dev_acc for earlier in history)
        result = EpochResult(epoch, train_loss, train_acc, dev_acc, time.perf_counter() - start, improved)
        history.append(result)
        if improved:
            checkpoints.save_model(model, result, world)
        checkpoints.save_resume_point(model, optimizer, history, world)
        yield result


LARGEST_LOG_PROBABILITY = 1e-3  # of probability 1, give or take what half precision rounds


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epoch: int,
    device: torch.device,
    methods: Sequence[Method],
    progress: bool,
    world: World,
) -> float:
    """One pass over the data; returns the mean batch loss."""
    model.train()
    total = 0.0
    with _progress_bar(loader, f"train {epoch}", progress) as bar:
        for step, batch in enumerate(loader, 1):
            optimizer.zero_grad()
            part = world.part(batch)
            log_probs = world.forward(model, part["token_ids"].to(device, non_blocking=True))  # b c
            labels = part["labels"].to(device, non_blocking=True)
            # divided by the nominal batch size even in a short last batch: the reference numbers rest on it
            loss = F.nll_loss(log_probs, labels, reduction="sum") / loader.batch_sampler.batch_size
            for method in methods:
                loss = loss + world.share * method.penalty(model, part, log_probs)
            if step == 1 and bool((log_probs > LARGEST_LOG_PROBABILITY).any()):
                raise UserError("the classifier's outputs are not log-probabilities (log_softmax), so the loss is none")
            value = world.total(loss.detach()).item()
            if not math.isfinite(value):
                raise UserError(f"epoch {epoch}, batch {step}: the loss is {value}, training stops; try a smaller --lr")
            world.backward(loss)
            optimizer.step()
            for method in methods:
                method.after_step(model)
            total += value
            bar.set_postfix(loss=f"{total / step:.3f}", refresh=False)
            bar.update(len(batch["labels"]))
    return total / len(loader)


# ------------------------------------------------------------------------------------------------ saved runs


def load_best(
    model: nn.Module,
    path: str | os.PathLike,
    world: World = ALONE,
    *,
    identity: dict[str, Any] | None = None,
    epoch: int | None = None,
) -> None:
    """Load the weights that `Checkpoints.save_model` wrote into a model of the same kind.

    identity, epoch: those of the run that wants them, if they must be its own. Raises `UserError` if the file is
    missing, damaged, of another kind of model, or of another run.
    """
    saved = world.from_first(lambda: load_tensors(path))
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict) or saved.get("kind") == KINDS["resume"]:
        raise UserError(f"{path} is not a saved classifier")
    if identity is not None and (saved.get("identity"), saved.get("epoch")) != (identity, epoch):
        raise UserError(f"{path} is not what this run saved after epoch {epoch}: another process has replaced it")
    try:
        world.load_model(model, saved["model"])
    except Exception:  # a mapping that is not a state dict fails in many ways
        raise UserError(f"{path} holds another kind of model") from None


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # of the one device in use, whose number may differ on resuming
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
