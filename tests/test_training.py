from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_llama

from batches import EncodingRules, LlamaDataset
from classifier import LlamaEmbeddingClassifier
from course import Example
from optimizer import AdamW
from saver import Checkpoints
from storage import load_tensors, save_tensors
from tasks import Evaluation
from tokenizer import Tokenizer
from training import Method, evaluate, fit, load_best
from utils import UserError

CPU = torch.device("cpu")
SUFFIX = "Is this movie bad or good? This movie is "


# --------------------------------------------------------------------------------------------------- encoding


def test_sentences_are_framed_by_bos_and_the_suffix_and_padded_on_the_right(tokenizer: Tokenizer):
    examples = [Example("a thin joke", 0), Example("I laughed twice, once by accident", 1)]
    for is_causal in (False, True):
        dataset = LlamaDataset(examples, tokenizer, EncodingRules(SUFFIX, 500, is_causal))
        assert dataset.sentences == [f"{example.sentence} {SUFFIX}" for example in examples]
        expected = [tokenizer.encode(sentence, bos=True, eos=False) for sentence in dataset.sentences]
        assert dataset.token_ids == expected and dataset.too_long == 0
        batch = next(iter(dataset.loader(2)))
        longest = max(map(len, expected))
        assert batch["token_ids"].tolist() == [ids + [3] * (longest - len(ids)) for ids in expected]
        assert batch["labels"].tolist() == [0, 1] and batch["sents"] == dataset.sentences


@pytest.mark.parametrize("suffix", [None, SUFFIX])
def test_long_sentences_are_used_whole_or_cut_before_the_suffix(tokenizer: Tokenizer, suffix: str | None):
    examples = [Example("slow " * 200, 0), Example("short", 1)]
    whole = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 120, is_causal=False))
    assert whole.too_long == 1 and len(whole.token_ids[0]) > 200
    cut = LlamaDataset(examples, tokenizer, EncodingRules(suffix, 120, is_causal=True))
    assert cut.too_long == 1 and len(cut.token_ids[0]) == 120
    tail = tokenizer.encode(suffix or "", bos=False, eos=False)
    assert cut.token_ids[0][120 - len(tail) :] == tail
    assert cut.token_ids[0][: 120 - len(tail)] == whole.token_ids[0][: 120 - len(tail)]
    assert cut.token_ids[1] == whole.token_ids[1]


def test_max_len_cuts_the_whole_text_as_the_reference_or_the_sentence_alone(tiny_tokenizer: Path):
    short = Tokenizer(4, tiny_tokenizer)
    suffix_ids = Tokenizer(None, tiny_tokenizer).encode(SUFFIX, bos=False, eos=False)
    examples = [Example("slow slow slow slow", 0)]
    assert len(LlamaDataset(examples, short, EncodingRules(SUFFIX, 500, False)).token_ids[0]) == 5
    causal = LlamaDataset(examples, short, EncodingRules(SUFFIX, 500, True)).token_ids[0]
    assert len(causal) == 5 + len(suffix_ids) and causal[5:] == suffix_ids


def test_a_suffix_that_leaves_no_room_is_refused(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="max_seq_len=20"):
        LlamaDataset([Example("a", 0)], tokenizer, EncodingRules(SUFFIX, 20, True))
    least = len(tokenizer.sp_model.encode(SUFFIX)) + 2  # bos and one token of the sentence
    assert len(LlamaDataset([Example("abc", 0)], tokenizer, EncodingRules(SUFFIX, least, True)).token_ids[0]) == least
    with pytest.raises(UserError, match=f"max_seq_len={least - 1}"):
        LlamaDataset([Example("abc", 0)], tokenizer, EncodingRules(SUFFIX, least - 1, True))


# ------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_figures():
    result = Evaluation(predictions=[0, 1, 1, 2], labels=[0, 1, 2, 1])
    assert result.accuracy == 0.5 and result.majority_accuracy == 0.5 and result.has_gold_labels
    assert not Evaluation([0, 1], [0, 0]).has_gold_labels


def small_dataset(tokenizer: Tokenizer, size: int = 22) -> LlamaDataset:
    words = ("warm", "little", "film", "storm", "boat")
    texts = [" ".join(words[: 1 + i % 5]) for i in range(size)]
    return LlamaDataset([Example(text, int("film" in text)) for text in texts], tokenizer)


def new_model(seed: int = 0, dropout: float = 0.3, num_labels: int = 2, **changes) -> LlamaEmbeddingClassifier:
    settings = SimpleNamespace(num_labels=num_labels, hidden_dropout_prob=dropout, option="finetune")
    llama = random_llama(seed, **{"max_seq_len": 256, **changes})
    return LlamaEmbeddingClassifier(settings, llama=llama)


def test_evaluate_keeps_the_order_and_draws_no_dropout(tokenizer: Tokenizer):
    dataset, model = small_dataset(tokenizer), new_model()
    model.train()
    result = evaluate(model, dataset.loader(4), CPU, progress=False)
    assert result.labels == dataset.labels
    expected = []
    for batch in dataset.loader(4):
        expected += model(batch["token_ids"]).argmax(-1).tolist()
    assert result.predictions == expected and not model.training


# --------------------------------------------------------------------------------------------- length buckets


def varied_dataset(tokenizer: Tokenizer, size: int = 203) -> LlamaDataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (size,), generator=generator).tolist()
    return LlamaDataset([Example("warm storm boat " * n, n % 2) for n in lengths], tokenizer)


@pytest.mark.parametrize("shuffle", [True, False])
def test_buckets_hold_every_sentence_once_and_little_padding(tokenizer: Tokenizer, shuffle: bool):
    dataset = varied_dataset(tokenizer)
    padded, seen = {}, []
    for bucket in (True, False):
        batches = list(dataset.loader(8, shuffle=shuffle, bucket=bucket))
        assert len(batches) == 26
        padded[bucket] = sum(batch["token_ids"].numel() for batch in batches)
        seen = sorted(index for batch in batches for index in batch["indices"])
        assert seen == list(range(203))
    real = sum(map(len, dataset.token_ids))
    assert padded[True] < 1.2 * real < 1.5 * real < padded[False]


def test_buckets_come_in_random_order_with_new_neighbours_each_epoch(tokenizer: Tokenizer):
    loader = varied_dataset(tokenizer, 2000).loader(8, shuffle=True, bucket=True)
    epochs = [[tuple(batch["indices"]) for batch in loader] for _ in range(2)]
    assert set(epochs[0]) != set(epochs[1])
    widths = [batch["token_ids"].shape[1] for batch in loader]
    halves = sum(widths[:125]) / 125, sum(widths[125:]) / 125
    assert widths != sorted(widths) and abs(halves[0] - halves[1]) < 25  # of 3 to 120 tokens: no half is all short
    torch.manual_seed(4)
    one = [batch["indices"] for batch in loader]
    torch.manual_seed(4)
    assert one == [batch["indices"] for batch in loader]


def test_a_causal_model_predicts_the_same_with_and_without_buckets(tokenizer: Tokenizer):
    dataset, model = varied_dataset(tokenizer, 60), new_model(attention="causal")
    plain, bucketed = (
        evaluate(model, dataset.loader(8, bucket=bucket), CPU, progress=False) for bucket in (False, True)
    )
    assert plain.predictions == bucketed.predictions and plain.labels == bucketed.labels == dataset.labels
    assert len(set(plain.predictions)) == 2


# --------------------------------------------------------------------------------------------------- training


def checkpoints(folder: Path, **identity) -> Checkpoints:
    return Checkpoints(folder / "model.pt", folder / "model.resume", {"num_labels": 2}, {"lr": 0.01}, identity)


def train(folder: Path, tokenizer: Tokenizer, epochs: int, methods=(), lr: float = 1e-2, seed: int = 0):
    """A whole small run; returns its model and results."""
    dataset, model = small_dataset(tokenizer), new_model(seed)
    saved = checkpoints(folder)
    saved.methods = methods
    for method in methods:
        method.prepare(model)
    optimizer = AdamW(model.parameters(), lr=lr)
    loaders = dataset.loader(8, shuffle=True), dataset.loader(8)
    results = list(fit(model, optimizer, *loaders, epochs=epochs, device=CPU, checkpoints=saved, progress=False))
    return model, results


def slow_train(tokenizer: Tokenizer, epochs: int, factor: float) -> list[tuple[float, float]]:
    """The assignment's loop spelled out: what `fit` must equal, random numbers included."""
    dataset, model = small_dataset(tokenizer), new_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train_loader, dev_loader = dataset.loader(8, shuffle=True), dataset.loader(8)
    figures = []
    for _ in range(epochs):
        model.train()
        losses = []
        for batch in train_loader:
            optimizer.zero_grad()
            log_probs = model(batch["token_ids"])
            loss = -log_probs[torch.arange(len(log_probs)), batch["labels"]].sum() / 8
            loss = loss + factor * model.classifier_head.weight.square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for loader in (train_loader, dev_loader):
            right = 0
            model.eval()
            for batch in loader:
                with torch.no_grad():
                    right += (model(batch["token_ids"]).argmax(-1) == batch["labels"]).sum().item()
        figures.append((sum(losses) / len(losses), right / len(dataset)))
    return figures


class Shrink(Method):
    """A penalty of the head, large or none at all."""

    def __init__(self, factor: float):
        self.factor = factor

    def penalty(self, model: torch.nn.Module, batch: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor | float:
        return self.factor * model.classifier_head.weight.square().sum()


@pytest.mark.parametrize("methods", [(), (Method(),), (Shrink(3.0), Method(), Shrink(2.0))], ids=len)
def test_fit_equals_the_loop_spelled_out(tmp_path: Path, tokenizer: Tokenizer, methods: tuple[Method, ...]):
    torch.manual_seed(3)
    _, results = train(tmp_path, tokenizer, 2, methods)
    torch.manual_seed(3)
    expected = slow_train(tokenizer, 2, 5.0 * (len(methods) == 3))
    assert [result.dev_acc for result in results] == [accuracy for _, accuracy in expected]
    assert [result.train_loss for result in results] == pytest.approx([loss for loss, _ in expected], abs=1e-6)


def test_the_saved_model_is_that_of_the_best_epoch_and_plain_data(tmp_path: Path, tokenizer: Tokenizer):
    _, results = train(tmp_path, tokenizer, 6)
    best = max(results, key=lambda result: (result.dev_acc, -result.epoch))
    assert [result.improved for result in results] == [
        all(result.dev_acc > earlier.dev_acc for earlier in results[: result.epoch]) for result in results
    ]
    saved = load_tensors(tmp_path / "model.pt")  # weights_only=True
    assert (saved["epoch"], saved["dev_acc"]) == (best.epoch, best.dev_acc)
    assert isinstance(saved["args"], dict) and isinstance(saved["model_config"], dict)
    model = new_model(seed=9)
    load_best(model, tmp_path / "model.pt")
    dev = evaluate(model, small_dataset(tokenizer).loader(8), CPU, progress=False)
    assert dev.accuracy == best.dev_acc


def test_no_epoch_at_zero_accuracy_goes_unsaved(tmp_path: Path, tokenizer: Tokenizer):
    dataset, model = small_dataset(tokenizer), new_model()
    wrong = LlamaDataset([Example("warm", 1)], tokenizer)
    with torch.no_grad():
        model.classifier_head.bias.copy_(torch.tensor([1e3, -1e3]))  # always answers 0
    optimizer = AdamW(model.parameters(), lr=1e-9)
    loaders = dataset.loader(8), wrong.loader(1)
    saved = checkpoints(tmp_path)
    (result,) = fit(model, optimizer, *loaders, epochs=1, device=CPU, checkpoints=saved, progress=False)
    assert result.dev_acc == 0.0 and result.improved and saved.model_path.is_file()


class Interrupted(Checkpoints):
    """Stops each run of an epoch right after its resume point, or right before it: the model is saved then."""

    stops_before = False

    def save_resume_point(self, *state: Any) -> None:
        if not self.stops_before:
            super().save_resume_point(*state)
        raise KeyboardInterrupt


def test_a_run_that_is_interrupted_again_and_again_ends_as_an_undisturbed_one(tmp_path: Path, tokenizer: Tokenizer):
    torch.manual_seed(5)
    (whole := tmp_path / "whole").mkdir()
    undisturbed, expected = train(whole, tokenizer, 4)
    assert expected[1].improved  # so that its model is saved between two resume points

    torch.manual_seed(5)
    (parts := tmp_path / "parts").mkdir()
    dataset, saved = small_dataset(tokenizer), Interrupted(**vars(checkpoints(parts)))
    loaders = dataset.loader(8, shuffle=True), dataset.loader(8)
    for saved.stops_before in (False, True, False, False, False):  # a new process each, so to speak
        model, history = new_model(), []
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if saved.resume_path.exists():
            torch.manual_seed(999)
            history = saved.load_resume_point(model, optimizer)
        settings = dict(epochs=4, device=CPU, checkpoints=saved, history=history, progress=False)
        with pytest.raises(KeyboardInterrupt):
            next(fit(model, optimizer, *loaders, **settings))
    history = saved.load_resume_point(model, optimizer)
    for one, other in zip(history, expected, strict=True):
        assert (one.train_loss, one.train_acc, one.dev_acc) == (other.train_loss, other.train_acc, other.dev_acc)
    for one, other in zip(model.state_dict().values(), undisturbed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_run_whose_epochs_are_all_done_is_taken_up_and_one_with_more_is_not(tmp_path: Path, tokenizer: Tokenizer):
    train(tmp_path, tokenizer, 2)
    model, saved = new_model(), checkpoints(tmp_path)
    saved.args = {"epochs": 2}
    assert len(saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))) == 2
    saved.args = {"epochs": 1}
    with pytest.raises(UserError, match="damaged"):
        saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))


def test_a_model_of_another_run_is_not_taken_for_the_best_one(tmp_path: Path, tokenizer: Tokenizer):
    train(tmp_path, tokenizer, 2)
    model, saved = new_model(), checkpoints(tmp_path)
    content = load_tensors(saved.model_path, mmap=False)
    for change in ({"identity": {"--seed": 2}}, {"epoch": -1}, {"identity": None}):
        save_tensors(saved.model_path, {**content, **change})
        with pytest.raises(UserError, match=r"model\.pt is not of the run"):
            saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))
    saved.model_path.unlink()
    with pytest.raises(UserError, match=r"model\.pt does not exist; without it"):
        saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))


class Recorder(Method):
    """Counts its hooks, adds nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare(self, model: torch.nn.Module) -> None:
        self.calls.append("prepare")

    def penalty(self, model: torch.nn.Module, batch: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor | float:
        self.calls.append("penalty")
        return 0.0

    def after_step(self, model: torch.nn.Module) -> None:
        self.calls.append("after_step")

    def export(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls.append("export")
        return {name: tensor * 0 for name, tensor in state.items()}


def test_methods_are_called_around_each_step_and_shape_what_is_saved(tmp_path: Path, tokenizer: Tokenizer):
    recorder = Recorder()
    train(tmp_path, tokenizer, 1, methods=[Method(), recorder])
    assert recorder.calls == ["prepare", *["penalty", "after_step"] * 3, "export"]  # 22 sentences in batches of 8
    assert all((tensor == 0).all() for tensor in load_tensors(tmp_path / "model.pt")["model"].values())
