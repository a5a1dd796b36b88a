"""Sentences without labels: who gets them; distillation and self-training, which learn from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import SENTENCES
from steps import prepared, step_of, two_processes_as_one
from test_contract import Laboratory
from test_methods import ADVANCED, LABELS, TOKENS, classifier
from torch import nn

from advanced.distill import Distill, DistilledTask, divergence
from advanced.self_training import SelfTraining
from advanced.unlabelled import outputs_for, places_at
from engine import families, runs
from engine.data import NO_GOLD_LABEL, Example, create_data, divide, set_aside
from engine.methods import Method
from engine.tasks import CLASSIFICATION, LlamaDataset
from tokenizer import Tokenizer
from utils import UserError

TRAIN = SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=3))


@pytest.fixture
def laboratory(tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path]) -> Laboratory:
    return Laboratory(tmp_path, tiny_checkpoint, films)


@pytest.fixture
def unlabelled(tokenizer: Tokenizer) -> LlamaDataset:
    return LlamaDataset([Example(text, NO_GOLD_LABEL) for text in SENTENCES], tokenizer)


def teacher(path: Path, tokenizer: Tokenizer, seed: int, names: tuple[str, ...] = ("bad", "good")) -> nn.Module:
    """A saved classifier with large weights."""
    model = classifier(seed=seed, attention="causal")
    with torch.no_grad():
        model.classifier_head.weight.mul_(5)
    runs.save_classifier(path, model, runs.record_of(model, tokenizer, names, 4))
    return model


# ---------------------------------------------------------------------------------------------------------- the seam


def test_what_shots_leave_aside_comes_without_labels_and_once():
    examples = [Example(f"text {number}", number % 2) for number in range(20)]
    for hold_out in (0.0, 0.2):
        train, held_out = divide(examples, 3, 4, hold_out)
        rest = set_aside(examples, 3, 4, hold_out)
        assert {each.label for each in rest} == {NO_GOLD_LABEL} and len(train) == 8
        assert sorted(each.sentence for each in (*train, *held_out, *rest)) == sorted(
            each.sentence for each in examples
        )
    assert set_aside(examples, 3, None, 0.2) == []


def test_a_method_that_asks_gets_the_sentences_and_no_label(
    drive: Callable, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch
):
    seen, see = [], SelfTraining.see
    monkeypatch.setattr(SelfTraining, "see", lambda self, *shown: seen.append(shown) or see(self, *shown))
    monkeypatch.setattr(Method, "see", lambda self, *shown: seen.append(shown))
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "self-training,ema", "--shots", 5]
    assert "14 training sentences are used without their labels" in drive(*flags)
    (mine, names), (other, _) = seen
    assert other is None and names == ("bad", "good") and mine.labels == [NO_GOLD_LABEL] * 14
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "ema", "--shots", 5]
    out = drive(*flags)
    assert "without their labels" not in out and "\ntrain on 10 sentences\n" in out


def test_every_sentence_has_its_turn():
    model = classifier()
    steps = [step_of(model, number=number) for number in range(8)]
    places = [place for step in steps for place in places_at(step, 6, 3)]
    assert all(sorted(places[first : first + 6]) == [*range(6)] for first in (0, 6, 12, 18))
    assert places[:6] != places[6:12] and places == [place for step in steps for place in places_at(step, 6, 3)]


def test_processes_share_the_sentences_of_a_step(unlabelled: LlamaDataset):
    model = prepared(classifier(), method := SelfTraining(threshold=0.0))
    method.see(unlabelled, ["bad", "good"])
    method.task(CLASSIFICATION, TRAIN)
    method.labels = torch.tensor([0, 1] * 5)
    whole = method.penalty(step_of(model))
    parts = [step_of(model, rows=rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 3))]
    torch.testing.assert_close(sum(step.local.share * method.penalty(step) for step in parts[:2]), whole)
    places = places_at(parts[0], 10, 3)
    assert [len(outputs_for(step, unlabelled, places)) for step in parts] == [2, 1, 1]


# ------------------------------------------------------------------------------------------------------- distillation


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_that_of_the_paper(temperature: float):
    drawn = torch.Generator().manual_seed(0)
    logits, theirs = torch.randn(6, 4, generator=drawn), torch.randn(10, 4, generator=drawn)
    labels, places = torch.tensor([0, 1, 2, 3, 1, 0]), [9, 0, 4, 4, 2, 7]
    task = DistilledTask(CLASSIFICATION, theirs.log_softmax(-1), temperature, 0.7)
    loss = task.loss(logits.log_softmax(-1), {"labels": labels, "indices": places}, 8)
    soft = F.kl_div((logits / temperature).log_softmax(-1), (theirs[places] / temperature).softmax(-1), reduction="sum")
    expected = 0.3 * F.cross_entropy(logits, labels, reduction="sum") + 0.7 * temperature**2 * soft
    torch.testing.assert_close(loss, expected / 8)
    spare = {"labels": torch.tensor([-100]), "indices": []}  # of a process without rows
    assert task.loss(logits[:1].log_softmax(-1), spare, 8) == 0.0
    assert divergence(theirs.log_softmax(-1), theirs.log_softmax(-1), temperature).abs().max() < 1e-5


def test_several_teachers_vote_and_read_the_bare_sentences(
    tmp_path: Path, tokenizer: Tokenizer, unlabelled: LlamaDataset
):
    models = [teacher(tmp_path / f"{seed}.pt", tokenizer, seed) for seed in (1, 2)]
    method = Distill(teacher=f"{tmp_path / '1.pt'},{tmp_path / '2.pt'}", temperature=1.5, weight=0.4)
    student = classifier(seed=5)
    student.prompt_suffix = "It was"
    prepared(student, method)
    examples = [Example(f"{text} It was", 1) for text in SENTENCES[:4]]
    train = SimpleNamespace(dataset=LlamaDataset(examples, tokenizer), batch_sampler=TRAIN.batch_sampler)
    method.see(unlabelled, ["bad", "good"])
    task = method.task(CLASSIFICATION, train)
    bare = [torch.tensor([tokenizer.encode(text, bos=True, eos=False)]) for text in SENTENCES]
    with torch.inference_mode():
        mean = torch.cat([sum(model(ids).exp() for model in models) / 2 for ids in bare])
    torch.testing.assert_close(task.taught.exp(), mean[:4], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(method.taught.exp(), mean, atol=1e-5, rtol=1e-4)
    right = (mean[:4].argmax(-1) == 1).float().mean().item()
    assert method.figures() == {"teacher's train acc": right, "sentences without labels": 10}

    step = step_of(student.eval(), number=1, task=task, tokens=TOKENS, labels=LABELS)
    places = places_at(step, 10, 3)
    ids = unlabelled.collate_fn([unlabelled[place] for place in places])["token_ids"]
    expected = (
        F.kl_div((student(ids) / 1.5).log_softmax(-1), (mean[places].log() / 1.5).softmax(-1), reduction="sum") / 3
    )
    torch.testing.assert_close(method.penalty(step), 0.4 * 1.5**2 * expected, atol=1e-5, rtol=1e-4)


def test_a_student_becomes_like_its_teacher(laboratory: Laboratory, tokenizer: Tokenizer):
    """The teacher's labels are the gold labels turned: with weight=1 the student must learn these."""
    path = laboratory.folder / "teacher.pt"
    teacher(path, tokenizer, 3)
    model, about = runs.load_classifier(path)
    done = laboratory.done("distill", attention="causal", epochs=12, shots=4)
    texts = [example.sentence for example in laboratory.examples]
    theirs = torch.tensor([each.probabilities for each in runs.predict(model, about, texts)])
    outcome = []
    for each in (done, laboratory.done("", attention="causal", epochs=12, shots=4)):
        mine = torch.tensor([one.probabilities for one in runs.predict(each.run.model.eval(), each.about, texts)])
        outcome.append((mine - theirs).abs().mean().item())
    assert outcome[0] < 0.5 * outcome[1]


def test_a_teacher_of_other_labels_or_none_is_refused(
    tmp_path: Path, drive: Callable, classify_flags: Callable, tokenizer: Tokenizer, films: dict[str, Path]
):
    teacher(tmp_path / "other.pt", tokenizer, 1, ("good", "bad"))
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "distill", "--method-args"]
    for value, words in (
        ("other.pt", "other.pt tells good, bad apart, and this run bad, good; no epoch was finished"),
        ("absent.pt", "--method-args: absent.pt does not exist, or is no file"),
        (films["train"], "films-train.txt"),
        ("", "name its teacher"),
        ("other.pt,", "must be files that finetune has saved"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            drive(*flags, f"teacher={value}")
    with pytest.raises(UserError, match=r"the fine-tuned model, other.pt.* is also other.pt of --method-args"):
        drive(*flags, "teacher=other.pt", "--model_out", "other.pt")


def test_the_teachers_content_is_part_of_the_run_and_its_name_is_not(
    tmp_path: Path, drive: Callable, classify_flags: Callable, tokenizer: Tokenizer
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--model_out", "student.pt", "--method", "distill"]
    digests = []
    for name, seed in (("one.pt", 1), ("two.pt", 1), ("two.pt", 2)):
        teacher(tmp_path / name, tokenizer, seed)
        out = drive(*flags, "--method-args", f"teacher={name}")
        assert re.search(r"^distill: teacher's train acc 0\.\d+, sentences without labels 0$", out, re.MULTILINE)
        digests.append(runs.load_classifier(tmp_path / "student.pt")[1].identity)
    assert digests[0] == digests[1] != digests[2]


# ------------------------------------------------------------------------------------------------------ self-training


def test_who_joins_is_sure_and_as_many_of_each_class():
    sure = torch.tensor([0.99, 0.9, 0.8, 0.7, 0.6, 0.55, 0.95, 0.75, 0.51])
    predicted = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    probabilities = torch.stack((sure, 1 - sure), dim=-1)
    probabilities[predicted == 1] = probabilities[predicted == 1].flip(1)

    def chosen(**settings) -> list[int]:
        return SelfTraining(**settings).choose(probabilities).tolist()

    n = NO_GOLD_LABEL
    assert chosen(threshold=0.5) == [0, 0, 0, n, n, n, 1, 1, 1]
    assert chosen(threshold=0.7) == [0, 0, n, n, n, n, 1, 1, n]
    assert chosen(threshold=0.7, per_class=1) == [0, n, n, n, n, n, 1, n, n]
    assert chosen(threshold=0.98) == [0, *[n] * 8]
    assert chosen(threshold=1.0) == [n] * 9
    assert chosen(threshold=0.5) == SelfTraining(threshold=0.5).choose(probabilities).tolist()


def test_from_then_on_the_predicted_labels_are_learned(unlabelled: LlamaDataset):
    """The labels are those of the model before, which stands for a teacher; the loss is that of the paper."""
    model = prepared(classifier(seed=2), method := SelfTraining(after=0.5, threshold=0.0, weight=0.3))
    method.see(unlabelled, ["bad", "good"])
    assert method.task(CLASSIFICATION, TRAIN) is CLASSIFICATION
    for number in range(5):
        step = step_of(model, number=number, total=10)
        assert method.penalty(step) == 0.0 and method.labels is None
        method.after_step(step)
    assert model.training and method.labels is not None
    with torch.inference_mode():
        batch = unlabelled.collate_fn([unlabelled[place] for place in range(10)])["token_ids"]
    joined = (method.labels != NO_GOLD_LABEL).nonzero().flatten().tolist()
    labels = method.labels.clone()
    assert 0 < len(joined) <= 10 and batch.shape[0] == 10
    step = step_of(model, number=5)
    places = [joined[place] for place in places_at(step, len(joined), 3)]
    ids = unlabelled.collate_fn([unlabelled[place] for place in places])["token_ids"]
    torch.testing.assert_close(method.penalty(step), 0.3 * F.nll_loss(model(ids), labels[places]))
    method.after_step(step)
    assert torch.equal(method.labels, labels)  # labelled once
    assert method.figures()["of"] == 10 and "of class" in method.figures()["joined"]


def test_the_labels_are_those_of_the_model_without_dropout(laboratory: Laboratory):
    run = laboratory.assemble(laboratory.plan("self-training", attention="causal", shots=6, hidden_dropout_prob=0.9))
    (method,) = run.trainer.methods
    models, choose = [], method.choose

    def watched(probabilities: torch.Tensor) -> torch.Tensor:
        models.append((probabilities, {name: each.clone() for name, each in run.model.state_dict().items()}))
        return choose(probabilities)

    method.choose = watched
    laboratory.train(run, laboratory.checkpointer(run))
    ((probabilities, state),) = models
    run.model.load_state_dict(state)
    dataset = method.unlabelled
    assert dataset.labels == [NO_GOLD_LABEL] * 11
    with torch.inference_mode():
        ids = dataset.collate_fn([dataset[place] for place in range(11)])["token_ids"]
        torch.testing.assert_close(run.model.eval()(ids).exp(), probabilities, atol=1e-5, rtol=1e-4)


def test_none_that_joins_is_said_and_shots_are_asked_for(
    drive: Callable, classify_flags: Callable, capfd: pytest.CaptureFixture, laboratory: Laboratory
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "self-training"]
    with pytest.raises(UserError, match="self-training learns from .* which --shots N leaves aside; add --shots N"):
        drive(*flags)
    with pytest.raises(UserError, match="add --shots N, or a smaller N"):
        drive(*flags, "--shots", 12)  # which leaves none
    out = drive(*flags, "--shots", 5, "--method-args", "threshold=1")
    assert re.search("^self-training: joined none, of 14$", out, re.MULTILINE)
    assert "warning: self-training: no sentence has a probability of 1.0 or more (the highest" in capfd.readouterr().err
    run = laboratory.assemble(laboratory.plan("self-training", shots=6))
    dataset = families.encode_for(run.model, run.tokenizer, create_data(laboratory.films["dev"]))
    with pytest.raises(UserError, match="add --shots N"):
        next(runs.fine_tune(run, dataset, dataset, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "self-training"])
def test_two_processes_that_share_the_model_train_as_one(
    tmp_path: Path, classify_flags: Callable, tokenizer: Tokenizer, name: str
):
    teacher(tmp_path / "teacher.pt", tokenizer, 1)
    more = f"teacher={tmp_path / 'teacher.pt'}" if name == "distill" else "threshold=0"
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", "2", "--lr", "0.01", "--batch_size", "4"]
    two_processes_as_one(tmp_path, [*flags, "--shots", "5", "--method", name, "--method-args", more])
