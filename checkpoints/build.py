"""Makes the bundled checkpoint and the bundled data set from a seed.

    python checkpoints/build.py

text -> data set -> tokenizer -> training -> checkpoint -> reference tensors -> measured figures (`figures.json`).
Training saves its progress every `EPOCH` steps in `minllama1M.resume`; started again, it goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from generate_text import LABEL_NAMES, SEED, data_set, documents  # noqa: E402
from reference import CHECKPOINT, write_reference  # noqa: E402
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler  # noqa: E402

from classifier import LlamaZeroShotClassifier  # noqa: E402
from config import LlamaConfig  # noqa: E402
from engine.checkpointer import Checkpointer, OtherRun  # noqa: E402
from engine.data import create_data, format_line  # noqa: E402
from engine.methods import EpochResult, Method, Step  # noqa: E402
from engine.processes import Batch  # noqa: E402
from engine.programs import run_main  # noqa: E402
from engine.storage import save_tensors  # noqa: E402
from engine.tasks import EncodingRules, LlamaDataset, NextToken, next_token_losses  # noqa: E402
from engine.text.runs import make_optimizer, train_tokenizer  # noqa: E402
from engine.training import Trainer, evaluate  # noqa: E402
from engine.weights import load_llama_model  # noqa: E402
from grading.editions import LABEL_NAMES as COURSE_LABEL_NAMES  # noqa: E402
from llama import Llama  # noqa: E402
from optimizer import AdamW  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from utils import UserError, atomic_write, prompt_suffix  # noqa: E402

TOKENIZER = HERE / "minllama1M.model"
RESUME = HERE / "minllama1M.resume"
FIGURES = HERE / "figures.json"
LABEL_MAPPINGS = {"films": LABEL_NAMES, **COURSE_LABEL_NAMES}
BUNDLED_SHAPE = dict(vocab_size=2048, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, max_seq_len=256, attention="causal")

TRAINING_STEPS, BATCH, LENGTH = 1900, 16, 256
EPOCH = 100  # steps; then the loss on held-out text is measured and the progress saved, and what is read may change
LR, WARMUP, HORIZON, CLIP = 4e-3, 100, 1500, 1.0
ORDERED_FROM = 1200  # from this step on, the text of ordered reviews
ANSWER_WEIGHT, ANSWER_FROM = 10.0, 500  # from this step on, the answer to a question counts as much as ten other tokens
HELD_OUT_SHARE = 0.02  # the share of each text that is not trained on
HELD_OUT_BATCHES = 4


def write_data(folder: Path) -> None:
    """The three splits and the label mappings."""
    for split, rows in data_set().items():
        with atomic_write(folder / f"films-{split}.txt") as file:
            file.writelines(f"{format_line(level, sentence)}\n" for level, sentence in rows)
    for name, labels in LABEL_MAPPINGS.items():
        with atomic_write(folder / f"{name}-label-mapping.json") as file:
            file.write(json.dumps(labels) + "\n")


def check_label_names(tokenizer: Tokenizer) -> None:
    """Every label name must be one token: a zero-shot score reads one position."""
    for name in (name for names in LABEL_MAPPINGS.values() for name in names):
        if len(tokenizer.encode(name, bos=False, eos=False)) != 1:
            raise ValueError(f"the label name {name!r} is not a single token")


class BundledCorpus(Dataset):
    """Documents as one long row of token ids. Each item is a window that begins with a document, as a prompt does."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        ids = tokenizer.encode_batch(texts, bos=True, eos=True)
        starts = torch.tensor([0, *map(len, ids)]).cumsum(0)[:-1]  # one for each document
        self.ids = torch.tensor([token for document in ids for token in document])
        self.starts = starts[starts < len(self.ids) - LENGTH]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return self.ids[start : start + LENGTH + 1]


def split_corpus(texts: list[str], tokenizer: Tokenizer) -> tuple[BundledCorpus, BundledCorpus]:
    """The documents to train on, and those held out."""
    cut = round(len(texts) * (1 - HELD_OUT_SHARE))
    return BundledCorpus(texts[:cut], tokenizer), BundledCorpus(texts[cut:], tokenizer)


class Draws(Sampler[list[int]]):
    """Batches from the first text, then, from step `ORDERED_FROM` on, from the second; each drawn with its own seed.

    The numbers of the windows of both texts are those of `ConcatDataset`. seeds: epoch -> the seeds of its batches.
    """

    def __init__(self, corpora: Sequence[BundledCorpus], seeds: Callable[[int], range]):
        self.corpora, self.seeds, self.batch_size = corpora, seeds, BATCH
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.seeds(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        text = int(self.epoch * EPOCH >= ORDERED_FROM)
        first = text * len(self.corpora[0])
        for seed in self.seeds(self.epoch):
            generator = torch.Generator().manual_seed(seed)
            end = first + len(self.corpora[text])
            yield torch.randint(first, end, (self.batch_size,), generator=generator).tolist()


def training_loader(corpora: Sequence[BundledCorpus], tokenizer: Tokenizer) -> DataLoader:
    """One batch for each step; the answers have a larger weight from step `ANSWER_FROM` on."""
    draws = Draws(corpora, lambda epoch: range(SEED + epoch * EPOCH, SEED + (epoch + 1) * EPOCH))

    def collate(windows: list[torch.Tensor]) -> Batch:
        batch = as_batch(windows)
        if draws.epoch * EPOCH >= ANSWER_FROM:
            is_answer = answer_positions(batch["token_ids"], tokenizer)
            weights = torch.ones(is_answer.shape).masked_fill(is_answer, ANSWER_WEIGHT)  # b s
            batch["weights"] = weights / weights.sum()
        return batch

    return DataLoader(ConcatDataset(corpora), batch_sampler=draws, collate_fn=collate)


def held_out_loader(corpora: Sequence[BundledCorpus]) -> DataLoader:
    """The same windows in every epoch, from the text that the epoch trains on."""
    draws = Draws(corpora, lambda epoch: range(HELD_OUT_BATCHES))
    return DataLoader(ConcatDataset(corpora), batch_sampler=draws, collate_fn=as_batch)


def as_batch(windows: list[torch.Tensor]) -> Batch:
    """windows: s+1 each. Returns tokens and next tokens, each b s."""
    rows = torch.stack(windows)
    return {"token_ids": rows[:, :-1], "targets": rows[:, 1:]}


def answer_positions(tokens: torch.Tensor, tokenizer: Tokenizer) -> torch.Tensor:
    """True where the next token is an answer: after "? It is" and "? This movie is". tokens: b s -> bool b s"""
    verbs = torch.tensor([tokenizer.sp_model.piece_to_id(piece) for piece in ("▁is", "▁was")])
    asked = tokens == tokenizer.sp_model.piece_to_id("?")
    two_back, three_back = (F.pad(asked, (gap, -gap)) for gap in (2, 3))
    return torch.isin(tokens, verbs) & (two_back | three_back)


class HalfPrecisionProducts(NextToken):
    """The matrix products in bfloat16, the loss in float32."""

    def forward(self, network: Callable, batch: Batch, **changed: object) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(network, batch, **changed)  # b s v


class PlainLoss(Method):
    """Records each epoch's mean loss with equal weights for all tokens; training minimizes a weighted loss."""

    name = "plain loss"

    def __init__(self):
        super().__init__()
        self.sums: list[float] = []  # one for each epoch

    def after_step(self, step: Step) -> None:
        if step.epoch == len(self.sums):
            self.sums.append(0.0)
        self.sums[step.epoch] += next_token_losses(step.outputs.detach(), step.batch["targets"]).mean().item()

    def state(self) -> dict:
        return {"sums": self.sums}

    def load_state(self, state: dict, piece: Callable[..., torch.Tensor]) -> None:
        self.sums = list(state["sums"])


def rate_factor(step: int, total: int) -> float:
    """The share of the peak rate: a linear rise, a cosine through the first text, a line to zero through the second."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    if step >= ORDERED_FROM:
        return rate_factor(ORDERED_FROM - 1, total) * (total - step) / (total - ORDERED_FROM)
    progress = (step - WARMUP) / (HORIZON - WARMUP)
    return 0.01 + 0.495 * (1 + math.cos(math.pi * progress))


class TwoTexts(Method):
    """Its rate rises, falls through the first text, and ends with a line through the second."""

    name = "two texts"
    rate = staticmethod(rate_factor)


def train(
    model: Llama, tokenizer: Tokenizer, corpora: Sequence[BundledCorpus], held_out: Sequence[BundledCorpus]
) -> dict:
    """Train from scratch or from the resume point, on the first text, then on the second.

    Returns the loss curve and the seconds.
    """
    optimizer, plain_loss = make_optimizer(model, LR), PlainLoss()
    shape, tokens = {"model_args": BUNDLED_SHAPE, "seed": SEED}, [len(corpus.ids) for corpus in corpora]
    checkpointer = Checkpointer(
        model_path=CHECKPOINT,
        resume_path=RESUME,
        identity={**shape, "steps": TRAINING_STEPS, "lr": LR, "tokens": tokens},
        epochs=TRAINING_STEPS // EPOCH,
        methods=[plain_loss, TwoTexts()],
        saves_model=False,
    )
    history = resume(checkpointer, model, optimizer)
    trainer = Trainer(
        model,
        optimizer,
        HalfPrecisionProducts(),
        checkpointer.methods,
        checkpointer,
        clip=CLIP,
        train_eval=False,
        progress=False,
        history=list(history),
    )
    for result in trainer.fit(training_loader(corpora, tokenizer), held_out_loader(held_out), checkpointer.epochs):
        history.append(result)
        print({**row_of(result, plain_loss), "seconds": round(seconds_of(history))}, flush=True)
    return {"curve": [row_of(result, plain_loss) for result in history], "seconds": seconds_of(history)}


def resume(checkpointer: Checkpointer, model: Llama, optimizer: AdamW) -> list[EpochResult]:
    """Go back to the last finished epoch, if there is one. Returns the epochs that are done."""
    if not checkpointer.resume_path.exists():
        return []
    try:
        return checkpointer.load_resume_point(model, optimizer)
    except OtherRun as error:
        raise UserError(f"{error}; remove it to start anew") from None


def row_of(result: EpochResult, plain_loss: PlainLoss) -> dict[str, float]:
    """One row of the loss curve."""
    train = plain_loss.sums[result.epoch] / EPOCH
    return {"step": (result.epoch + 1) * EPOCH, "train": train, "held_out": -result.dev_score}


def seconds_of(history: Sequence[EpochResult]) -> float:
    return sum(result.seconds for result in history)


@torch.no_grad()
def zero_shot(model: Llama, tokenizer: Tokenizer, split: str) -> dict[str, float]:
    """Accuracy of the prompt on a split of the bundled data, and that of the most frequent class."""
    names = list(LABEL_NAMES)
    rules = EncodingRules(prompt_suffix(names), BUNDLED_SHAPE["max_seq_len"], is_causal=True)
    loader = LlamaDataset(create_data(ROOT / f"data/films-{split}.txt"), tokenizer, rules).loader(50)
    classifier = LlamaZeroShotClassifier(SimpleNamespace(num_labels=len(names)), tokenizer, names, llama=model)
    result = evaluate(classifier, loader, progress=False)
    return {"accuracy": round(result.accuracy, 3), "majority": round(result.majority_accuracy, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the bundled data set and checkpoint.")
    parser.add_argument("--threads", type=int, default=1, help="2 are faster on an idle machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)

    write_data(ROOT / "data")
    texts, ordered_texts = list(documents()), list(documents(ordered=True, scale=0.6))
    TOKENIZER.write_bytes(train_tokenizer(texts, BUNDLED_SHAPE["vocab_size"]))
    tokenizer = Tokenizer(tokenizer_model=TOKENIZER)
    check_label_names(tokenizer)
    corpora, held_out = zip(*(split_corpus(each, tokenizer) for each in (texts, ordered_texts)), strict=True)
    size = {
        "documents": len(texts) + len(ordered_texts),
        "characters": sum(map(len, texts + ordered_texts)),
        "tokens": sum(len(corpus.ids) for corpus in corpora + held_out),
    }
    print(size, flush=True)

    model = Llama(LlamaConfig(**BUNDLED_SHAPE))
    log = train(model, tokenizer, corpora, held_out)
    val_loss = log["curve"][-1]["held_out"]
    save_tensors(
        CHECKPOINT,
        {"model": model.state_dict(), "model_args": BUNDLED_SHAPE, "iter_num": TRAINING_STEPS, "val_loss": val_loss},
    )
    write_reference()
    model = load_llama_model(CHECKPOINT)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **size,
        "tokens_trained_on": TRAINING_STEPS * BATCH * LENGTH,
        "zero_shot": {split: zero_shot(model, tokenizer, split) for split in ("dev", "test")},
        **log,
    }
    with atomic_write(FIGURES) as file:
        file.write(json.dumps(figures, indent=1) + "\n")
    RESUME.unlink(missing_ok=True)
    print({name: value for name, value in figures.items() if name != "curve"})


if __name__ == "__main__":
    sys.exit(run_main(main))
