"""Makes the bundled checkpoint and the bundled data set from nothing but a seed.

    python checkpoints/build.py

text -> data set -> tokenizer -> training -> checkpoint -> reference tensors -> measured figures (`figures.json`).
Training saves its progress every `SAVE_EVERY` steps in `minllama1M.resume`; started again, it goes on from there.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import sentencepiece  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from generate_text import LABEL_NAMES, SEED, data_set, documents  # noqa: E402
from reference import write_reference  # noqa: E402

from batches import EncodingRules, LlamaDataset
from classifier import LlamaZeroShotClassifier  # noqa: E402
from config import LlamaConfig  # noqa: E402
from course import LABEL_NAMES as COURSE_LABEL_NAMES  # noqa: E402
from course import create_data, format_line, prompt_suffix  # noqa: E402
from llama import Llama, load_pretrained  # noqa: E402
from storage import load_tensors, save_tensors  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from training import evaluate
from utils import atomic_write  # noqa: E402

CHECKPOINT = HERE / "minllama1M.pt"
TOKENIZER = HERE / "minllama1M.model"
RESUME = HERE / "minllama1M.resume"
FIGURES = HERE / "figures.json"
MAPPINGS = {"films": LABEL_NAMES, **COURSE_LABEL_NAMES}
SHAPE = dict(vocab_size=2048, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, max_seq_len=256, attention="causal")

STEPS, BATCH, LENGTH = 1900, 16, 256
LR, WARMUP, HORIZON, CLIP = 4e-3, 100, 1500, 1.0
ORDERED_FROM = 1200  # from this step on, the text of ordered reviews
ANSWER_WEIGHT, ANSWER_FROM = 10.0, 500  # from this step on, the answer to a question counts as much as ten other tokens
HELD_OUT = 0.02  # the share of each text that is not trained on
LOG_EVERY, SAVE_EVERY = 100, 100


def write_data(folder: Path) -> None:
    """The three splits and the label mappings."""
    for split, rows in data_set().items():
        with atomic_write(folder / f"films-{split}.txt") as file:
            file.writelines(f"{format_line(level, sentence)}\n" for level, sentence in rows)
    for name, labels in MAPPINGS.items():
        with atomic_write(folder / f"{name}-label-mapping.json") as file:
            file.write(json.dumps(labels) + "\n")


def write_tokenizer(texts: Iterable[str], path: Path) -> None:
    """Train Llama's kind of tokenizer: BPE, bytes for what is unknown, `<0x00>` as id 3, each digit a token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=SHAPE["vocab_size"],
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
    with atomic_write(path, "wb") as file:
        file.write(model.getvalue())


def check_label_names(tokenizer: Tokenizer) -> None:
    """Every label name must be one token: a zero-shot score reads one position."""
    for name in (name for names in MAPPINGS.values() for name in names):
        if len(tokenizer.encode(name, bos=False, eos=False)) != 1:
            raise ValueError(f"the label name {name!r} is not a single token")


class Corpus:
    """Documents as one long row of token ids, and where each begins."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        ids = tokenizer.encode_batch(texts, bos=True, eos=True)
        starts = torch.tensor([0, *map(len, ids)]).cumsum(0)[:-1]  # one for each document
        self.ids = torch.tensor([token for document in ids for token in document])
        self.starts = starts[starts < len(self.ids) - LENGTH]

    def batch(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows that begin with a document, as every prompt does. Returns tokens and next tokens, each b s."""
        generator = torch.Generator().manual_seed(seed)
        chosen = self.starts[torch.randint(len(self.starts), (rows,), generator=generator)]  # b
        windows = self.ids[chosen[:, None] + torch.arange(LENGTH + 1)]  # b s+1
        return windows[:, :-1], windows[:, 1:]


def split_corpus(texts: list[str], tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """The documents to train on, and those held out."""
    cut = round(len(texts) * (1 - HELD_OUT))
    return Corpus(texts[:cut], tokenizer), Corpus(texts[cut:], tokenizer)


def next_token_losses(model: Llama, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies in nats; the matrix products in bfloat16, the loss in float32. tokens, targets: b s -> b s"""
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(tokens, targets)  # b s v
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def answer_positions(tokens: torch.Tensor, tokenizer: Tokenizer) -> torch.Tensor:
    """Where an answer comes next: after "? It is" and "? This movie is". tokens: b s -> bool b s"""
    verbs = torch.tensor([tokenizer.sp_model.piece_to_id(piece) for piece in ("▁is", "▁was")])
    asked = tokens == tokenizer.sp_model.piece_to_id("?")
    two_back, three_back = (F.pad(asked, (gap, -gap)) for gap in (2, 3))
    return torch.isin(tokens, verbs) & (two_back | three_back)


@torch.no_grad()
def held_out_loss(model: Llama, corpus: Corpus) -> float:
    """The loss on 64 fixed windows of text that is not trained on."""
    model.eval()
    losses = [next_token_losses(model, *corpus.batch(BATCH, seed)).mean().item() for seed in range(4)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate(step: int) -> float:
    """A linear rise, a cosine through the first text, a line to zero through the second."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    if step >= ORDERED_FROM:
        return learning_rate(ORDERED_FROM - 1) * (STEPS - step) / (STEPS - ORDERED_FROM)
    progress = (step - WARMUP) / (HORIZON - WARMUP)
    return 0.01 * LR + 0.495 * LR * (1 + math.cos(math.pi * progress))


def make_optimizer(model: Llama) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(model: Llama, tokenizer: Tokenizer, corpora: Sequence[Corpus], held_out: Sequence[Corpus]) -> dict:
    """Train from scratch or from the resume point, on the first text, then on the second.

    Returns the loss curve and the seconds.
    """
    optimizer = make_optimizer(model)
    log = {"curve": [], "seconds": 0.0}
    first = 0
    if RESUME.exists():
        point = load_tensors(RESUME)
        model.load_state_dict(point["model"])
        optimizer.load_state_dict(point["optimizer"])
        log, first = point["log"], point["step"]
    begin, before, recent = time.perf_counter(), log["seconds"], []
    for step in range(first, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        text = int(step >= ORDERED_FROM)
        tokens, targets = corpora[text].batch(BATCH, SEED + step)
        losses = next_token_losses(model, tokens, targets)  # b s
        weights = torch.ones_like(losses)
        if step >= ANSWER_FROM:
            weights[answer_positions(tokens, tokenizer)] = ANSWER_WEIGHT
        optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        recent.append(losses.mean().item())
        done = step + 1
        if done % LOG_EVERY == 0:
            log["seconds"] = before + time.perf_counter() - begin
            row = {"step": done, "train": sum(recent) / len(recent), "held_out": held_out_loss(model, held_out[text])}
            log["curve"].append(row)
            recent = []
            print({**row, "seconds": round(log["seconds"])}, flush=True)
        if done % SAVE_EVERY == 0:
            save_tensors(
                RESUME,
                {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": log},
            )
    return log


@torch.no_grad()
def zero_shot(model: Llama, tokenizer: Tokenizer, split: str) -> dict[str, float]:
    """Accuracy of the prompt on a split of the bundled data, and that of the most frequent class."""
    names = list(LABEL_NAMES)
    rules = EncodingRules(prompt_suffix(names), SHAPE["max_seq_len"], is_causal=True)
    loader = LlamaDataset(create_data(ROOT / f"data/films-{split}.txt"), tokenizer, rules).loader(50)
    classifier = LlamaZeroShotClassifier(SimpleNamespace(num_labels=len(names)), tokenizer, names, llama=model)
    result = evaluate(classifier, loader, torch.device("cpu"), progress=False)
    return {"accuracy": round(result.accuracy, 3), "majority": round(result.majority_accuracy, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the bundled data set and checkpoint.")
    parser.add_argument("--threads", type=int, default=1, help="2 are faster on an idle machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)

    write_data(ROOT / "data")
    texts, ordered_texts = list(documents()), list(documents(ordered=True, scale=0.6))
    write_tokenizer(texts, TOKENIZER)
    tokenizer = Tokenizer(tokenizer_model=TOKENIZER)
    check_label_names(tokenizer)
    corpora, held_out = zip(*(split_corpus(each, tokenizer) for each in (texts, ordered_texts)), strict=True)
    size = {
        "documents": len(texts) + len(ordered_texts),
        "characters": sum(map(len, texts + ordered_texts)),
        "tokens": sum(len(corpus.ids) for corpus in corpora + held_out),
    }
    print(size, flush=True)

    model = Llama(LlamaConfig(**SHAPE))
    log = train(model, tokenizer, corpora, held_out)
    val_loss = log["curve"][-1]["held_out"]
    save_tensors(
        CHECKPOINT,
        {"model": model.state_dict(), "model_args": SHAPE, "iter_num": STEPS, "val_loss": val_loss},
    )
    write_reference()
    model = load_pretrained(CHECKPOINT)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **size,
        "tokens_trained_on": STEPS * BATCH * LENGTH,
        "zero_shot": {split: zero_shot(model, tokenizer, split) for split in ("dev", "test")},
        **log,
    }
    with atomic_write(FIGURES) as file:
        file.write(json.dumps(figures, indent=1) + "\n")
    RESUME.unlink(missing_ok=True)
    print({name: value for name, value in figures.items() if name != "curve"})


if __name__ == "__main__":
    main()
