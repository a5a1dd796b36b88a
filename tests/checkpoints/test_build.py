"""How the bundled checkpoint is trained: the one training loop, given what it needs, against every step spelled out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from config import LlamaConfig
from engine.checkpointer import Checkpointer
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError

NEEDED = pytest.importorskip("transformers", reason="build.py has it write the reference tensors")

import build  # noqa: E402
from generate_text import documents  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = dict(
    BATCH=4, LENGTH=48, EPOCH=3, TRAINING_STEPS=15, WARMUP=2, HORIZON=9, ANSWER_FROM=3, ORDERED_FROM=9, CLIP=0.1
)
TINY_SHAPE = dict(vocab_size=2048, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, max_seq_len=48, attention="causal")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_model=ROOT / "checkpoints/minllama1M.model")


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    return list(documents(scale=0.01)), list(documents(ordered=True, scale=0.01))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Tokenizer, texts) -> Callable[[], tuple]:
    """Trains a tiny model for a few epochs that have all that the real ones have; returns the model and the log."""
    for name, value in TINY.items():
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(build, "BUNDLED_SHAPE", TINY_SHAPE)
    monkeypatch.setattr(build, "RESUME", tmp_path / "tiny.resume")

    def train() -> tuple[Llama, dict]:
        corpora, held_out = zip(*(build.split_corpus(each, tokenizer) for each in texts), strict=True)
        model = new_model()
        return model, build.train(model, tokenizer, corpora, held_out)

    return train


def test_the_committed_data_are_written_again(tmp_path: Path):
    build.write_data(tmp_path)
    written = [*tmp_path.iterdir()]
    assert len(written) == 6  # three splits and three label mappings
    assert all(path.read_bytes() == (ROOT / "data" / path.name).read_bytes() for path in written)


def test_a_label_name_of_several_tokens_is_refused(tokenizer: Tokenizer, tiny_tokenizer: Path):
    build.check_label_names(tokenizer)
    with pytest.raises(ValueError, match="is not a single token"):
        build.check_label_names(Tokenizer(tokenizer_model=tiny_tokenizer))


def new_model() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**TINY_SHAPE))


class SpelledOut:
    """Every step by itself, without loop, task, loaders and schedule of the package."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer, texts: tuple):
        self.model, self.optimizer, self.losses, self.held_out = model, optimizer, [], []
        self.question = tokenizer.sp_model.piece_to_id("?")
        self.verbs = [tokenizer.sp_model.piece_to_id(piece) for piece in ("▁is", "▁was")]
        documents = [[tokenizer.encode(text, bos=True, eos=True) for text in each] for each in texts]
        cuts = [round(len(each) * 0.98) for each in documents]
        self.trained_on = [each[:cut] for each, cut in zip(documents, cuts, strict=True)]
        self.tested_on = [each[cut:] for each, cut in zip(documents, cuts, strict=True)]

    def batch(self, documents: list[list[int]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, starts, rows, length = sum(documents, []), [0], TINY["BATCH"], TINY["LENGTH"]
        for document in documents[:-1]:
            starts.append(starts[-1] + len(document))
        starts = [start for start in starts if start < len(ids) - length]
        chosen = torch.randint(len(starts), (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
        windows = torch.tensor([ids[starts[each] : starts[each] + length + 1] for each in chosen])
        return windows[:, :-1], windows[:, 1:]

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = self.model(tokens, targets)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def is_answer(self, row: list[int], position: int) -> bool:
        asked = [position >= gap and row[position - gap] == self.question for gap in (2, 3)]
        return row[position] in self.verbs and any(asked)

    def step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(
                step, *(TINY[name] for name in ("TRAINING_STEPS", "WARMUP", "HORIZON", "ORDERED_FROM"))
            )
        text = int(step >= TINY["ORDERED_FROM"])
        tokens, targets = self.batch(self.trained_on[text], build.SEED + step)
        losses = self.token_losses(tokens, targets)
        weights = torch.tensor([[self.weight_at(row, at, step) for at in range(len(row))] for row in tokens.tolist()])
        self.optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), TINY["CLIP"])
        self.optimizer.step()
        self.losses.append(losses.mean().item())
        if (step + 1) % TINY["EPOCH"] == 0:
            with torch.no_grad():
                batches = [self.batch(self.tested_on[text], seed) for seed in range(4)]
                self.held_out.append(sum(self.token_losses(*each).mean().item() for each in batches) / 4)

    def weight_at(self, row: list[int], position: int, step: int) -> float:
        return 10.0 if step >= TINY["ANSWER_FROM"] and self.is_answer(row, position) else 1.0


def rate_at(step: int, steps: int = 1900, warmup: int = 100, horizon: int = 1500, ordered_from: int = 1200) -> float:
    """The learning rate of the bundled checkpoint's training."""
    if step < warmup:
        return 4e-3 * (step + 1) / warmup
    if step >= ordered_from:
        before = rate_at(ordered_from - 1, steps, warmup, horizon, ordered_from)
        return before * (steps - step) / (steps - ordered_from)
    return 0.01 * 4e-3 + 0.495 * 4e-3 * (1 + math.cos(math.pi * (step - warmup) / (horizon - warmup)))


def groups_of(model: Llama) -> list[dict]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("made", "tolerance"), [((AdamW, {"eps": 1e-8}), 1e-6), ((torch.optim.AdamW, {}), 3e-4)], ids=["own", "pytorch"]
)
def test_every_step_is_what_it_is_spelled_out(
    tiny: Callable, tokenizer: Tokenizer, texts: tuple, made: tuple, tolerance: float
):
    """Windows, answers' weights, rates, clipping, weight decay and held-out windows.

    PyTorch's AdamW decays before the update and adds eps elsewhere.
    """
    model, log = tiny()
    twin, (optimizer, settings) = new_model(), made
    slow = SpelledOut(twin, optimizer(groups_of(twin), betas=(0.9, 0.95), **settings), tokenizer, texts)
    for step in range(TINY["TRAINING_STEPS"]):
        slow.step(step)
    epoch, steps = TINY["EPOCH"], TINY["TRAINING_STEPS"]
    assert [row["step"] for row in log["curve"]] == list(range(epoch, steps + 1, epoch))
    trained = [sum(slow.losses[first : first + epoch]) / epoch for first in range(0, steps, epoch)]
    assert [row["train"] for row in log["curve"]] == pytest.approx(trained, abs=tolerance)
    assert [row["held_out"] for row in log["curve"]] == pytest.approx(slow.held_out, abs=tolerance)
    if optimizer is AdamW:
        start, found, expected = new_model().state_dict(), model.state_dict(), twin.state_dict()
        assert all(torch.allclose(found[name], expected[name], atol=1e-6, rtol=0) for name in start)
        assert max((found[name] - start[name]).abs().max().item() for name in start) > 0.02


def test_the_rates_of_all_steps():
    factors = [build.rate_factor(step, build.TRAINING_STEPS) * build.LR for step in range(build.TRAINING_STEPS)]
    assert factors == pytest.approx([rate_at(step) for step in range(1900)], rel=1e-12)
    assert max(factors) == build.LR and 0.0 < factors[-1] < 1e-5


def test_what_changes_on_the_way_changes_between_two_epochs():
    assert not any(each % build.EPOCH for each in (build.TRAINING_STEPS, build.ANSWER_FROM, build.ORDERED_FROM))


def test_an_interrupted_training_goes_on(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    """From the last whole epoch, with the same weights and the same curve at the end."""
    whole, log = tiny()
    build.RESUME.unlink()
    save, saved = Checkpointer.save_resume_point, []

    def save_twice(*args: object) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(save(*args))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpointer, "save_resume_point", save_twice)
        tiny()
    before = []
    monkeypatch.setattr(Checkpointer, "save_resume_point", lambda *args: before.append(len(args[-1])) or save(*args))
    model, resumed = tiny()
    assert before == [3, 4, 5] and resumed["curve"] == log["curve"] and resumed["seconds"] > 0.0
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in whole.state_dict().items())
    again, unchanged = tiny()  # nothing is left to do
    assert unchanged == resumed and torch.equal(again.output.weight, whole.output.weight)


def test_the_resume_point_of_another_training_is_refused(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    tiny()
    monkeypatch.setattr(build, "LR", 1e-3)
    with pytest.raises(UserError, match="tiny.resume belongs to a run with another lr; remove it"):
        tiny()
