"""Training text of a language model, and a run on it: from files to rows of tokens, rounds of about `--every` steps.

In: files of any kind. Out: documents, one row of tokens of all of them, a trained tokenizer; a training with
`Trainer` under a lock on its name, which can be resumed.

Shapes: b batch, s position.
"""

from __future__ import annotations

import io
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import sentencepiece
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from engine.arguments import columns_of
from engine.checkpointer import Checkpointer, OtherRun
from engine.data import SEPARATOR, create_data
from engine.families import create_methods
from engine.methods import EpochResult, Method
from engine.plan import InputFile
from engine.processes import device_of
from engine.programs import check_new
from engine.runs import update_fast
from engine.storage import NameLock
from engine.tables import USUAL, Columns, check_format, has_columns, read_texts
from engine.tasks import Task, TextWindows
from engine.text.flags import Outputs
from engine.training import Trainer
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError, read_text


def read_documents(path: str, columns: Columns = USUAL) -> list[str]:
    """The documents of a file, each of one or more lines.

    In a file with columns each text is a document, and in a data file of the assignment each line, without its label.
    In any other text, blank lines separate the documents. Raises `UserError` if there is no document.
    """
    if has_columns(path):
        return read_texts(path, columns)
    check_format(path)
    text = read_text(path)
    lines = [line for line in text.split("\n") if line.strip()]
    if lines and all(SEPARATOR in line for line in lines):
        return [example.sentence for example in create_data(path, is_test=True, skip_empty=columns.skip_empty)]
    documents, block = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            block.append(line.strip())
        elif block:
            documents.append("\n".join(block))
            block = []
    if not documents:
        raise UserError(f"{path} holds no text")
    return documents


def hold_out(documents: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on, and held-out documents, both in their order; a single document is cut near its end."""
    if len(documents) == 1:
        lines = documents[0].split("\n")
        if len(lines) < 2:
            raise UserError("the text has one line, of which nothing can be held out")
        cut = max(1, len(lines) - max(1, round(share * len(lines))))
        return ["\n".join(lines[:cut])], ["\n".join(lines[cut:])]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {*order[: min(len(documents) - 1, max(1, round(share * len(documents))))]}
    parts = [[text for place, text in enumerate(documents) if (place in held) == wanted] for wanted in (False, True)]
    return parts[0], parts[1]


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """All documents as one row of token ids, each between bos and eos. A space joins the lines of a document."""
    texts = [" ".join(document.split("\n")) for document in documents]
    return [token for ids in tokenizer.encode_batch(texts, bos=True, eos=True) for token in ids]


class Passes(Sampler[list[int]]):
    """Batches of windows for one epoch of `steps` batches: pass after pass over all windows, each in a new order.

    The order depends only on the seed and the number of the pass, so a resumed run continues in the same order.
    """

    def __init__(self, windows: int, batch_size: int, steps: int, seed: int):
        self.windows, self.batch_size, self.steps, self.seed = windows, batch_size, steps, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * self.steps * self.batch_size  # counted over all epochs
        for start in range(first, first + self.steps * self.batch_size, self.batch_size):
            yield [self._drawn(place) for place in range(start, start + self.batch_size)]

    def _drawn(self, place: int) -> int:
        number, index = divmod(place, self.windows)
        if number != getattr(self, "_number", None):
            generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
            self._number, self._order = number, torch.randperm(self.windows, generator=generator).tolist()
        return self._order[index]


def training_batches(
    token_ids: Sequence[int], tokenizer: Tokenizer, length: int, batch_size: int, steps: int, seed: int
) -> DataLoader:
    """A loader of `steps` batches per epoch: token_ids and targets, b s each. Only windows of full length are drawn.

    Raises `UserError` if the text is shorter than one window.
    """
    windows = TextWindows(token_ids, tokenizer.bos_id, length)
    whole = len(token_ids) // length
    if whole < 1:
        raise UserError(f"the text has {len(token_ids)} tokens, fewer than one window of {length}")
    batches = Passes(whole, batch_size, steps, seed)
    return DataLoader(windows, batch_sampler=batches, collate_fn=windows.collate_fn)


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a SentencePiece model like Llama's: BPE, bytes for unknown characters, `<0x00>` is id 3, digits are single.

    It runs in one thread, so that the same lines give the same bytes. Raises `UserError` if the text is too short for
    this size of vocabulary, or has too many different characters for it.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            required_chars="".join(map(chr, range(33, 127))),
            byte_fallback=True,
            split_digits=True,
            add_dummy_prefix=True,
            remove_extra_whitespaces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:  # its text names source lines of SentencePiece
        most = re.search(r"<= (\d+)", str(error))
        what = f"at most {most[1]}" if most else "larger: each of the text's characters takes a piece"
        raise UserError(f"--vocab_size {vocab_size} does not fit the text; it must be {what}") from None
    return model.getvalue()


# ------------------------------------------------------------------------------------------------------ a run in rounds

PACE = ("epochs", "lr", "warmup", "batch_size", "length", "weight_decay", "clip", "held_out", "every", "seed")


def train_and_held_out(args: Namespace) -> tuple[list[str], list[str]]:
    """The documents to train on, and the held-out documents; a share of each text is held out."""
    train: list[str] = []
    held: list[str] = []
    for number, path in enumerate(args.text):
        documents = read_documents(path, columns_of(args, args.text))
        print(f"load {len(documents)} documents from {path}")
        for part, more in zip((train, held), hold_out(documents, args.held_out, args.seed + number), strict=True):
            part += more
    return train, held


def identity_of(args: Namespace, **more: Any) -> dict[str, Any]:
    """The values that must be equal to resume a run: its texts, the flags in PACE, and `more`."""
    train = [InputFile.of(path, columns=columns_of(args, args.text)).sha256 for path in args.text]
    return {"train": train, **more, **{name: getattr(args, name) for name in PACE}}


class Rounds(NamedTuple):
    """The number of measurements of a run, and the number of steps between two of them."""

    total: int
    steps: int

    @classmethod
    def of(cls, args: Namespace, rows: int) -> Rounds:
        """rows: the number of rows in one pass over the training data."""
        steps = max(1, math.ceil(args.epochs * rows / args.batch_size))
        count = max(1, round(steps / args.every))
        return cls(count, math.ceil(steps / count))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float = 0.1) -> AdamW:
    """AdamW with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    gains = [p for p in trained if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def paced(args: Namespace) -> Method:
    """The method for the learning rate: it rises during `--warmup`, then falls to 0 at the end (cosine)."""
    (schedule,) = create_methods([("schedule", (("warmup", args.warmup), ("decay", "cosine")))])
    return schedule


@dataclass
class TextSaver(Checkpointer):
    """A checkpointer that writes the files beside the model with the first model, so not before training.

    Saving raises `UserError` if another program has made one of these files since the run began.
    """

    epochs: int = 0  # the number of rounds, never unknown
    has_saved: bool = False
    flag: str = "--out"

    def save_model(self, model: nn.Module, result: EpochResult) -> None:
        if not self.has_saved:
            check_new(self.model_path, self.flag)
            self.save_beside()
        self.save_anew(model, result)

    def save_beside(self) -> None:
        """Called at the first measurement, or when a run is resumed; subclasses write their files here."""
        self.has_saved = True

    def save_anew(self, model: nn.Module, result: EpochResult) -> None:
        super().save_model(model, result)


def alone(args: Namespace, outputs: Outputs, rows: Callable[[], Iterator]) -> Iterator:
    """Yield the values of `rows` while holding the lock on the run's name. Raises `UserError` if it is taken."""
    lock = NameLock(outputs.lock)
    if not lock.acquire():
        raise UserError(f"{outputs.flag} {args.out} is in use by another process")
    try:
        outputs.check(args)  # again: another run may have ended in the meantime
        yield from rows()
    finally:
        lock.release()


def train_in_rounds(
    args: Namespace,
    model: nn.Module,
    train: DataLoader,
    held_out: DataLoader,
    checkpointer: TextSaver,
    task: Task,
    methods: Sequence[Method],
) -> Iterator[EpochResult]:
    """Train a language model; yield the result of each round, first those that a resumed run had finished.

    A round is about `--every` steps, then a measurement. `dev_score`: minus the held-out loss.
    """
    optimizer = update_fast(make_optimizer(model, args.lr, args.weight_decay))
    history = resume(args, checkpointer, model, optimizer)
    yield from history
    with watched(args, checkpointer, model, history) as callback:
        trainer = Trainer(
            model,
            optimizer,
            task,
            methods,
            checkpointer,
            seed=args.seed,
            clip=args.clip,
            train_eval=False,
            progress=False,
            callback=callback,
            history=list(history),
        )
        yield from trainer.fit(train, held_out, checkpointer.epochs)
    checkpointer.resume_path.unlink(missing_ok=True)


@contextmanager
def watched(args: Namespace, checkpointer: Checkpointer, model: nn.Module, history: list[EpochResult]) -> Iterator[Any]:
    """A callback that records the figures of the steps, if --log_dir is given; else None."""
    if args.log_dir is None:
        yield None
        return
    from engine.metrics import MetricsLog

    log = MetricsLog(args.log_dir, checkpointer.identity, device_of(model), history)
    try:
        yield log
    finally:
        log.close()


def resume(
    args: Namespace, checkpointer: TextSaver, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[EpochResult]:
    """With --resume, restore the state after the last measurement, if there is one. Returns the finished rounds."""
    if not args.resume:
        return []
    if not checkpointer.resume_path.is_file():
        print(f"there is no resume point {checkpointer.resume_path}; starting from the beginning")
        return []
    try:
        history = checkpointer.load_resume_point(model, optimizer)
    except OtherRun as error:
        raise UserError(f"{error}; use the same arguments, or name another {checkpointer.flag}") from None
    print(f"resuming from {checkpointer.resume_path}")
    checkpointer.save_beside()
    return history
