"""Masked words and next sentences as a task: against transformers' loss, and against counting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small import batch, hf_directory, hf_model

from bert.load import load_model
from bert.tasks import Pretraining, PretrainingEvaluation, PretrainingOutputs
from engine.processes import SINGLE_PROCESS, Batch
from engine.tasks import NO_TARGET
from engine.training import Diverged, evaluate

TASK = Pretraining()
MASK_ID = 4


def batch_of(size: int = 4, length: int = 20, has_next: bool = True) -> Batch:
    """Random targets at some real tokens of each row."""
    ids, segments, mask = batch(size, length)
    drawing = torch.Generator().manual_seed(1)
    asked = (torch.rand(ids.shape, generator=drawing) < 0.3) & mask.bool()
    asked[:, 0] = False
    targets = torch.where(asked, torch.randint(1, 300, ids.shape, generator=drawing), NO_TARGET)
    made = {"token_ids": ids, "segment_ids": segments, "is_real": mask.bool(), "targets": targets}
    made["weights"] = asked / asked.sum()
    return made | ({"next": torch.randint(2, (size,), generator=drawing)} if has_next else {})


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str):
    theirs = hf_model(name)
    ours, new = load_model(hf_directory(tmp_path, theirs))
    has_next = name == "BertForPreTraining"
    assert new == []
    asked = batch_of(has_next=has_next)
    labels = {"next_sentence_label": asked["next"]} if has_next else {}
    with torch.no_grad():
        labels |= {"labels": asked["targets"], "token_type_ids": asked["segment_ids"]}
        expected = theirs(asked["token_ids"], attention_mask=asked["token_ids"] != 0, **labels).loss
        outputs = TASK.forward(ours, asked)
        assert outputs.words.shape == (int((asked["targets"] != NO_TARGET).sum()), 300)
        assert torch.allclose(TASK.loss(outputs, asked, 4), expected, atol=1e-4)
    assert (outputs.next is not None) == has_next


def test_the_losses_of_the_parts_of_a_batch_add_up():
    whole, outputs = batch_of(6), None
    asked = whole["targets"] != NO_TARGET
    outputs = PretrainingOutputs(torch.randn(6, 2).log_softmax(-1), torch.randn(int(asked.sum()), 300).log_softmax(-1))
    total, first = 0.0, 0
    for rows in (slice(0, 2), slice(2, 3), slice(3, 6)):
        part = {name: value[rows] for name, value in whole.items()}
        count = int((part["targets"] != NO_TARGET).sum())
        total += TASK.loss(PretrainingOutputs(outputs.next[rows], outputs.words[first : first + count]), part, 6)
        first += count
    assert torch.allclose(total, TASK.loss(outputs, whole, 6))


def answering(words: Callable[[torch.Tensor], torch.Tensor], nexts: torch.Tensor | None) -> Callable:
    def network(token_ids: torch.Tensor, segment_ids: torch.Tensor, is_real: torch.Tensor, at: torch.Tensor):
        found = F.log_softmax(words(token_ids[at]), dim=-1)
        return found if nexts is None else (F.log_softmax(nexts, dim=-1), found)

    return network


def test_the_evaluation_counts_and_sums():
    asked = batch_of()
    targets = asked["targets"][asked["targets"] != NO_TARGET]
    count = len(targets)
    sure = F.one_hot(targets, 300).float() * 5.0
    sure[: count // 3] = sure[: count // 3].roll(1, dims=-1)  # a third is wrong
    nexts = F.one_hot(asked["next"], 2).float()
    nexts[0] = 1 - nexts[0]
    evaluation = PretrainingEvaluation()
    for _ in range(2):
        evaluation.add(TASK.forward(answering(lambda tokens: sure, nexts), asked), asked)
    evaluation.finish(SINGLE_PROCESS)
    assert evaluation.words.count == 2 * count and evaluation.words.accuracy == pytest.approx(1 - (count // 3) / count)
    assert evaluation.nexts.count == 8 and evaluation.nexts.accuracy == 0.75
    assert evaluation.words.loss == pytest.approx(F.cross_entropy(sure, targets).item(), rel=1e-5)
    assert evaluation.nexts.loss == pytest.approx(F.cross_entropy(nexts, asked["next"]).item(), rel=1e-5)
    assert evaluation.words.perplexity == pytest.approx(math.exp(evaluation.words.loss))
    assert evaluation.score == -(evaluation.words.loss + evaluation.nexts.loss)


def test_what_mask_hides_is_counted_apart():
    """A model that says again what it sees is right where nothing hides a token, and nowhere else."""
    asked = batch_of()
    places = (asked["targets"] != NO_TARGET).nonzero()
    for number, (row, place) in enumerate(places.tolist()):
        asked["token_ids"][row, place] = MASK_ID if number % 3 else asked["targets"][row, place]
    repeat = answering(lambda tokens: F.one_hot(tokens, 300).float() * 5.0, None)
    evaluation = PretrainingEvaluation(MASK_ID)
    for _ in range(2):
        evaluation.add(TASK.forward(repeat, asked), asked)
    evaluation.finish(SINGLE_PROCESS)
    seen = len(range(0, len(places), 3))
    assert evaluation.hidden.count == 2 * (len(places) - seen) and evaluation.words.right == 2 * seen
    assert evaluation.hidden.accuracy == 0.0 < evaluation.words.accuracy
    assert evaluation.hidden.perplexity == pytest.approx(math.exp(5.0) + 299, rel=1e-5)


def test_without_next_sentences_only_words_count():
    asked = batch_of(has_next=False)
    evaluation = PretrainingEvaluation()
    evaluation.add(TASK.forward(answering(lambda tokens: torch.zeros(len(tokens), 300), None), asked), asked)
    assert evaluation.words.loss == pytest.approx(math.log(300)) and evaluation.score == -evaluation.words.loss
    assert math.isnan(evaluation.nexts.accuracy) and evaluation.nexts.count == 0
    assert math.isnan(evaluation.hidden.accuracy) and math.isnan(evaluation.hidden.perplexity)


@pytest.mark.parametrize("part", ["next", "words"])
def test_numbers_that_are_none_are_seen_in_both_parts(part: str):
    asked = batch_of()

    class Broken(torch.nn.Linear):
        def forward(self, token_ids: torch.Tensor, segment_ids: torch.Tensor, is_real: torch.Tensor, at: torch.Tensor):
            answers = PretrainingOutputs(torch.zeros(4, 2), torch.zeros(int(at.sum()), 300))
            getattr(answers, part)[0, 0] = math.nan
            return tuple(answers)

    class Examples(tuple):
        tokenizer = SimpleNamespace(mask_id=MASK_ID)

    class Loader(list):
        dataset = Examples()

    with pytest.raises(Diverged, match="not finite"):
        evaluate(Broken(1, 1), Loader([asked]), task=TASK, progress=False)
