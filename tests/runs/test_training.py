from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_llama
from torch import nn

from advanced.ema import EMA
from classifier import LlamaEmbeddingClassifier
from engine import finetuning, training
from engine.checkpointer import Checkpointer
from engine.data import Example
from engine.methods import EpochResult, Method, Step, prepare
from engine.processes import SINGLE_PROCESS
from engine.storage import load_tensors, save_tensors
from engine.tasks import EncodingRules, Evaluation, LlamaDataset, NextToken, TextWindows
from engine.training import Trainer, evaluate
from fast import accelerate
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError

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


def test_evaluate_keeps_the_order_and_draws_no_dropout(tokenizer: Tokenizer, capsys: pytest.CaptureFixture):
    dataset, model = small_dataset(tokenizer), new_model()
    model.train()
    result = evaluate(model, dataset.loader(4), progress=False)
    assert result.labels == dataset.labels
    expected = []
    for batch in dataset.loader(4):
        expected += model(batch["token_ids"]).argmax(-1).tolist()
    assert result.predictions == expected and not model.training
    assert capsys.readouterr().err == ""  # no progress bar


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
        assert len(batches) == len(dataset.loader(8, shuffle=shuffle, bucket=bucket)) == 26
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
    plain, bucketed = (evaluate(model, dataset.loader(8, bucket=bucket), progress=False) for bucket in (False, True))
    assert plain.predictions == bucketed.predictions and plain.labels == bucketed.labels == dataset.labels
    assert len(set(plain.predictions)) == 2


# --------------------------------------------------------------------------------------------------- training


def saver_in(folder: Path, **more) -> Checkpointer:
    record, identity = {"model_config": {"num_labels": 2}}, {"seed": 1}
    return Checkpointer(folder / "model.pt", folder / "model.resume", record, identity, **more)


def train(folder: Path, tokenizer: Tokenizer, epochs: int, methods=(), lr: float = 1e-2, **more):
    """A whole small run; returns its model and results."""
    dataset, model = small_dataset(tokenizer), new_model()
    prepare(model, methods)
    for method in methods:
        method.start(model)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    loaders = dataset.loader(8, shuffle=True), dataset.loader(8)
    settings = dict(methods=methods, checkpointer=saver_in(folder, methods=methods), progress=False, **more)
    results = list(Trainer(model, optimizer, **settings).fit(*loaders, epochs))
    return model, results


def slow_train(tokenizer: Tokenizer, epochs: int, factor: float) -> list[tuple[float, float]]:
    """The assignment's loop spelled out: what `Trainer.fit` must equal, random numbers included."""
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
        super().__init__(factor=factor)
        self.factor = factor

    def penalty(self, step: Step) -> torch.Tensor | float:
        return self.factor * step.model.classifier_head.weight.square().sum()


@pytest.mark.parametrize("methods", [(), (Method(),), (Shrink(3.0), Method(), Shrink(2.0))], ids=len)
def test_fit_equals_the_loop_spelled_out(tmp_path: Path, tokenizer: Tokenizer, methods: tuple[Method, ...]):
    torch.manual_seed(3)
    _, results = train(tmp_path, tokenizer, 2, methods)
    torch.manual_seed(3)
    expected = slow_train(tokenizer, 2, 5.0 * (len(methods) == 3))
    assert [result.dev_score for result in results] == [accuracy for _, accuracy in expected]
    assert [result.train_loss for result in results] == pytest.approx([loss for loss, _ in expected], abs=1e-6)


def test_the_saved_model_is_that_of_the_best_epoch_and_plain_data(tmp_path: Path, tokenizer: Tokenizer):
    _, results = train(tmp_path, tokenizer, 6)
    best = max(results, key=lambda result: (result.dev_score, -result.epoch))
    assert [result.improved for result in results] == [
        all(result.dev_score > earlier.dev_score for earlier in results[: result.epoch]) for result in results
    ]
    saved = load_tensors(tmp_path / "model.pt")  # weights_only=True
    assert (saved["epoch"], saved["dev_score"]) == (best.epoch, best.dev_score)
    assert saved["identity"] == {"seed": 1} and saved["model_config"] == {"num_labels": 2} and saved["methods"] == {}
    model = new_model(seed=9)
    model.load_state_dict(saved["model"])
    dev = evaluate(model, small_dataset(tokenizer).loader(8), progress=False)
    assert dev.accuracy == best.dev_score


def test_no_epoch_at_zero_accuracy_goes_unsaved(tmp_path: Path, tokenizer: Tokenizer):
    dataset, model = small_dataset(tokenizer), new_model()
    wrong = LlamaDataset([Example("warm", 1)], tokenizer)
    with torch.no_grad():
        model.classifier_head.bias.copy_(torch.tensor([1e3, -1e3]))  # always answers 0
    optimizer = AdamW(model.parameters(), lr=1e-9)
    loaders = dataset.loader(8), wrong.loader(1)
    saved = saver_in(tmp_path)
    (result,) = Trainer(model, optimizer, checkpointer=saved, progress=False).fit(*loaders, epochs=1)
    assert result.dev_score == 0.0 and result.improved and saved.model_path.is_file()


class Interrupted(Checkpointer):
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
    dataset, saved = small_dataset(tokenizer), Interrupted(**vars(saver_in(parts)))
    loaders = dataset.loader(8, shuffle=True), dataset.loader(8)
    for saved.stops_before in (False, True, False, False, False):  # a new process each, so to speak
        model, history = new_model(), []
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if saved.resume_path.exists():
            torch.manual_seed(999)
            history = saved.load_resume_point(model, optimizer)
        trainer = Trainer(model, optimizer, checkpointer=saved, history=history, progress=False)
        with pytest.raises(KeyboardInterrupt):
            next(trainer.fit(*loaders, epochs=4))
    history = saved.load_resume_point(model, optimizer)
    for one, other in zip(history, expected, strict=True):
        assert one.train_loss == other.train_loss
        assert (one.train_score, one.dev_score) == (other.train_score, other.dev_score)
    for one, other in zip(model.state_dict().values(), undisturbed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_run_whose_epochs_are_all_done_is_taken_up_and_one_with_more_is_not(tmp_path: Path, tokenizer: Tokenizer):
    train(tmp_path, tokenizer, 2)
    model, saved = new_model(), saver_in(tmp_path)
    saved.epochs = 2
    assert len(saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))) == 2
    saved.epochs = 1
    with pytest.raises(UserError, match="damaged"):
        saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))


def test_a_resume_point_after_a_single_step_is_taken_up(tmp_path: Path, tokenizer: Tokenizer):
    dataset, model, again = small_dataset(tokenizer, 8), new_model(), new_model(1)
    trainer = Trainer(model, AdamW(model.parameters(), lr=1e-2), checkpointer=saver_in(tmp_path), progress=False)
    expected = [*trainer.fit(dataset.loader(8), dataset.loader(8), 1)]
    assert saver_in(tmp_path).load_resume_point(again, AdamW(again.parameters(), lr=1e-2)) == expected
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(("apart", "points"), [(0.0, [1, 2, 3, 4]), (1e9, [4]), (2.0, [2, 4])])
def test_resume_points_of_short_epochs_are_apart_and_the_last_is_always_there(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, apart: float, points: list[int]
):
    """An epoch takes a second, by this clock."""
    saved: list[int] = []

    class Counted(Checkpointer):
        def save_resume_point(
            self, model: nn.Module, optimizer: AdamW, history: list[EpochResult], *begun: Any
        ) -> None:
            saved.append(len(history))
            super().save_resume_point(model, optimizer, history, *begun)

    dataset, model = small_dataset(tokenizer), new_model()
    files = Counted(tmp_path / "a.pt", tmp_path / "a.resume", epochs=4, apart=apart, saved_at=0.0)
    trainer = Trainer(model, AdamW(model.parameters(), lr=1e-2), checkpointer=files, progress=False)
    monkeypatch.setattr("engine.checkpointer.time.monotonic", lambda: float(len(trainer.history)))
    assert len([*trainer.fit(dataset.loader(8, shuffle=True), dataset.loader(8), 4)]) == 4
    assert saved == points


def test_a_resume_point_from_before_an_option_of_the_optimizer_is_taken_up(tmp_path: Path, tokenizer: Tokenizer):
    train(tmp_path, tokenizer, 1)
    point = load_tensors(tmp_path / "model.resume", mmap=False)
    for group in point["optimizer"]["param_groups"]:
        assert group.pop("max_grad_norm") is None
    save_tensors(tmp_path / "model.resume", point)
    model = new_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    assert len(saver_in(tmp_path).load_resume_point(model, optimizer)) == 1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_a_model_of_another_run_is_not_taken_for_the_best_one(tmp_path: Path, tokenizer: Tokenizer):
    train(tmp_path, tokenizer, 2)
    model, saved = new_model(), saver_in(tmp_path)
    content = load_tensors(saved.model_path, mmap=False)
    for change in ({"identity": {"seed": 2}}, {"epoch": -1}, {"identity": None}):
        save_tensors(saved.model_path, {**content, **change})
        with pytest.raises(UserError, match=r"model\.pt is not of the run"):
            saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))
    saved.model_path.unlink()
    with pytest.raises(UserError, match=r"model\.pt does not exist; without it"):
        saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))


class Recorder(Method):
    """Notes its hooks and what they see; what it exports is zero."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.steps: list[Step] = []

    def prepare(self, model: torch.nn.Module) -> None:
        self.calls.append("prepare")

    def start(self, model: torch.nn.Module) -> None:
        self.calls.append("start")

    def penalty(self, step: Step) -> torch.Tensor | float:
        self.calls.append("penalty")
        self.steps.append(step)
        return 0.0

    def after_step(self, step: Step) -> None:
        assert step is self.steps[-1]
        self.calls.append("after_step")

    @contextmanager
    def evaluation_weights(self, model: torch.nn.Module) -> Iterator[None]:
        self.calls.append("judged")
        yield
        self.calls.append("as before")

    def finish(self, model: torch.nn.Module, evaluate: Callable[[], float]) -> bool:
        self.calls.append("finish")
        return False

    def export(self, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        self.calls.append("export")
        return {name: tensor * 0 for name, tensor in state.items()}, {"own": torch.ones(1)}

    def state(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}


def test_methods_are_called_around_each_step_and_shape_what_is_saved(tmp_path: Path, tokenizer: Tokenizer):
    recorder = Recorder()
    _, (result,) = train(tmp_path, tokenizer, 1, methods=[Method(), recorder])
    steps = ["penalty", "after_step"] * 3  # 22 sentences in batches of 8
    judged = ["judged", "export", "as before", "judged", "finish", "as before"]
    assert recorder.calls == ["prepare", "start", *steps, *judged]
    assert [(step.epoch, step.number, step.total) for step in recorder.steps] == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]
    saved, point = load_tensors(tmp_path / "model.pt"), load_tensors(tmp_path / "model.resume")
    assert all((tensor == 0).all() for tensor in saved["model"].values())
    assert saved["methods"] == {"recorder": {"settings": {}, "tensors": {"own": torch.ones(1)}}}
    assert point["methods"] == {"plain": {}, "recorder": {"calls": 11}}
    assert result.improved and not result.is_finish


def test_a_second_pass_has_the_masks_of_the_first_or_new_ones(tmp_path: Path, tokenizer: Tokenizer):
    class TwoPasses(Method):
        def penalty(self, step: Step) -> torch.Tensor | float:
            before = torch.get_rng_state()
            same, other = step.forward(), step.forward(same_masks=False)
            assert torch.equal(same, step.outputs) and not torch.equal(other, step.outputs)
            assert not torch.equal(before, torch.get_rng_state())
            shifted = step.forward(token_ids=step.batch["token_ids"].clamp(min=9))
            assert not torch.equal(shifted, step.outputs)
            seen.append(step.normal(2, 3))
            assert torch.equal(torch.randn(len(step.outputs), 2, 3, generator=fresh(step)), seen[-1])
            return 0.0

    def fresh(step: Step) -> torch.Generator:
        return torch.Generator().manual_seed(step.generator.initial_seed())

    seen: list[torch.Tensor] = []
    torch.manual_seed(3)
    train(tmp_path, tokenizer, 1, methods=[TwoPasses()])
    assert [len(each) for each in seen] == [8, 8, 6] and not torch.equal(seen[0], seen[1])
    train(tmp_path, tokenizer, 1, methods=[TwoPasses()], seed=1)
    assert not torch.equal(seen[0], seen[3])  # of another seed


def test_second_passes_with_the_same_masks_move_no_random_number(tmp_path: Path, tokenizer: Tokenizer):
    class SamePass(Method):
        def penalty(self, step: Step) -> torch.Tensor | float:
            return 0.0 * step.forward().sum()

    results = []
    for methods in ((), [SamePass()]):
        torch.manual_seed(3)
        results.append([result.train_loss for result in train(tmp_path, tokenizer, 2, methods)[1]])
    assert results[0] == results[1]


def test_the_weights_that_are_judged_are_those_that_are_saved_and_not_those_that_are_trained(
    tmp_path: Path, tokenizer: Tokenizer
):
    class Negated(Method):
        @contextmanager
        def evaluation_weights(self, model: torch.nn.Module) -> Iterator[None]:
            for sign in (-1, 1):
                with torch.no_grad():
                    model.classifier_head.weight.mul_(-1)
                    model.classifier_head.bias.mul_(-1)
                if sign == -1:
                    yield

    torch.manual_seed(3)
    plain_model, plain = train(tmp_path, tokenizer, 1)
    torch.manual_seed(3)
    model, judged = train(tmp_path, tokenizer, 1, methods=[Negated()])
    assert plain[0].train_loss == judged[0].train_loss and plain[0].dev_score != judged[0].dev_score
    assert all(map(torch.equal, model.state_dict().values(), plain_model.state_dict().values()))
    saved = load_tensors(tmp_path / "model.pt")
    assert torch.equal(saved["model"]["classifier_head.weight"], -model.classifier_head.weight)
    other = new_model(seed=9)
    other.load_state_dict(saved["model"])
    assert evaluate(other, small_dataset(tokenizer).loader(8), progress=False).accuracy == saved["dev_score"]


class Finishing(Method):
    """Doubles the head's bias after the last epoch."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.scores = factor, []

    def finish(self, model: torch.nn.Module, evaluate: Callable[[], float]) -> bool:
        self.scores.append(evaluate())
        with torch.no_grad():
            model.classifier_head.bias.add_(self.factor)
            model.classifier_head.weight.mul_(self.factor)
        return True


def test_what_methods_make_of_the_model_after_the_last_epoch_is_judged_as_an_epoch_is(
    tmp_path: Path, tokenizer: Tokenizer
):
    method = Finishing(-1.0)
    _, results = train(tmp_path, tokenizer, 2, methods=[method])
    assert [result.is_finish for result in results] == [False, False, True] and results[2].epoch == 2
    assert method.scores == [results[1].dev_score] != [results[2].dev_score]
    assert results[2].improved == (results[2].dev_score > max(result.dev_score for result in results[:2]))
    model, saved = new_model(), saver_in(tmp_path, methods=[method])
    history = saved.load_resume_point(model, AdamW(model.parameters(), lr=1e-2))
    assert str(history) == str(results)  # NaN equals nothing
    again = train(tmp_path / "..", tokenizer, 2, methods=[method], history=history)[1]
    assert again == []


def test_what_methods_finish_is_what_they_judge(tmp_path: Path, tokenizer: Tokenizer):
    """Beside one that swaps weights: the average, not what is trained, is finished, scored and saved."""
    method = Finishing(-1.0)
    _, results = train(tmp_path, tokenizer, 2, methods=[EMA(0.9), method])
    assert method.scores == [results[1].dev_score] and results[2].dev_score != results[1].dev_score


def test_the_schedule_scales_each_step_and_leaves_the_rate_alone(tmp_path: Path, tokenizer: Tokenizer):
    asked = []

    class Schedule(Method):
        def rate(self, number: int, total: int) -> float:
            asked.append((number, total))
            return 0.0 if number < 3 else 1.0

    torch.manual_seed(3)
    model, results = train(tmp_path, tokenizer, 1, methods=[Schedule()])
    assert asked == [(0, 3), (1, 3), (2, 3)]
    torch.manual_seed(3)
    assert all(map(torch.equal, model.state_dict().values(), new_model().state_dict().values()))
    assert load_tensors(tmp_path / "model.resume")["optimizer"]["param_groups"][0]["lr"] == 1e-2
    _, longer = train(tmp_path, tokenizer, 2, methods=[Schedule()])
    assert longer[1].train_loss != longer[0].train_loss == pytest.approx(results[0].train_loss, 0.2)


def test_gradients_are_clipped_to_a_norm(tmp_path: Path, tokenizer: Tokenizer):
    class Norms(Method):
        def after_step(self, step: Step) -> None:
            gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
            norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])).item())

    norms: list[float] = []
    train(tmp_path, tokenizer, 1, methods=[Norms()])
    unclipped, norms = norms, []
    train(tmp_path, tokenizer, 1, methods=[Norms()], clip=min(unclipped) / 2)
    assert norms == pytest.approx([min(unclipped) / 2] * 3, rel=1e-3)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_kernels_draw_the_dropout_masks_of_the_plain_model(attention: str):
    """Also where a kernel could compute the last layer at one position, which it does without dropout."""
    tokens = torch.tensor([[1, 45, 299, 7, 120], [1, 8, 260, 3, 3]])
    settings = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.3, option="finetune")
    for dropout in (0.0, 0.2):
        found = []
        for is_fast in (False, True):
            model = LlamaEmbeddingClassifier(settings, llama=random_llama(attention=attention, dropout=dropout)).train()
            nn.init.normal_(model.classifier_head.weight, generator=torch.Generator().manual_seed(1))
            if is_fast:
                accelerate(model, generates=False)
            widths: list[int] = []
            last = model.llama.layers[-1].feed_forward
            last.register_forward_hook(lambda part, inputs, output, widths=widths: widths.append(output.shape[1]))
            torch.manual_seed(3)
            outputs = model(tokens)
            outputs[:, 0].sum().backward()
            found.append((outputs, model.llama.tok_embeddings.weight.grad, torch.get_rng_state(), widths))
        (plain, gradient, drawn, _), (fast, its, its_drawn, widths) = found
        assert widths == [1 if dropout == 0.0 else 5]
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(its, gradient, atol=1e-4, rtol=1e-4)
        assert torch.equal(its_drawn, drawn)


def test_the_file_of_figures_is_closed_when_a_run_ends(tmp_path: Path):
    args, compute = SimpleNamespace(log_dir=tmp_path / "log", html=None), SimpleNamespace(device=torch.device("cpu"))
    run = SimpleNamespace(compute=compute, trainer=SimpleNamespace(distributed=SINGLE_PROCESS))
    with ExitStack() as held:
        look = finetuning.look_at(args, run, saver_in(tmp_path), [], held)
        assert not look.log.file.closed
    assert look.log.file.closed


def test_training_stops_where_asked_to(tmp_path: Path, tokenizer: Tokenizer):
    class ThreeEpochs(Method):
        def stop(self, history: list[EpochResult]) -> bool:
            return len(history) == 3

    _, results = train(tmp_path, tokenizer, 9, methods=[ThreeEpochs()])
    assert len(results) == 3


def test_the_time_left_is_that_of_the_steps_to_come(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A step takes two seconds, all else none."""
    clock, shown = [100.0], []

    class TwoSeconds(Method):
        def after_step(self, step: Step) -> None:
            clock[0] += 2.0

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(training.tqdm, "set_postfix", lambda bar, left, **others: shown.append(left))
    train(tmp_path, tokenizer, 2, methods=[TwoSeconds()])  # three steps each
    assert shown == ["00:10", "00:08", "00:06", "00:04", "00:02", "00:00"]


class SetEpoch(list):
    """Batches that know the epoch."""

    batch_size, epochs = 8, ()

    def set_epoch(self, epoch: int) -> None:
        self.epochs = (*self.epochs, epoch)


def test_batches_are_told_the_epoch(tokenizer: Tokenizer, tmp_path: Path):
    dataset, model, batches = small_dataset(tokenizer), new_model(), SetEpoch([[0, 1], [2]])
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate_fn)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, checkpointer=saver_in(tmp_path), progress=False)
    list(trainer.fit(loader, dataset.loader(8), epochs=3))
    assert batches.epochs == (0, 1, 2)


def test_next_tokens_are_a_task_like_any_other(tmp_path: Path):
    """A causal model on windows of a text, against the loss written out."""
    torch.manual_seed(0)
    text, model = torch.randint(4, 300, (70,)).tolist(), random_llama(attention="causal")
    windows = TextWindows(text, 1, 16)
    rows = [torch.tensor([[1, *text[i : i + 16]]]) for i in range(0, 70, 16)]
    logits = [model(row[:, :-1], row[:, 1:])[0] for row in rows]
    pairs = zip(logits, rows, strict=True)
    nats = [-each.log_softmax(-1).gather(-1, row[:, 1:, None]).sum().item() for each, row in pairs]
    result = evaluate(model, windows.loader(2), task=NextToken(), progress=False)
    assert result.tokens == 70 and result.nats == pytest.approx(sum(nats), rel=1e-5)
    assert result.score == -result.loss == pytest.approx(-sum(nats) / 70, rel=1e-5)

    class Windows(list):
        batch_size = 2

    batches = Windows([[0, 1], [2, 3]])
    loader = torch.utils.data.DataLoader(windows, batch_sampler=batches, collate_fn=windows.collate_fn)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(tmp_path / "text.pt", tmp_path / "text.resume", saves_model=False)
    trainer = Trainer(model, optimizer, NextToken(), checkpointer=checkpointer, progress=False)
    results = list(trainer.fit(loader, loader, epochs=3))
    assert results[0].train_loss > results[2].train_loss and results[2].dev_score > results[0].dev_score
    assert results[0].dev_score < 0 and checkpointer.load_resume_point(model, optimizer) == results
