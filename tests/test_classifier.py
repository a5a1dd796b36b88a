from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_llama

from base_llama import sequence_lengths
from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier, read_last
from engine.weights import load_llama_model
from tokenizer import Tokenizer

PAD = 3
NAMES = ["bad", "warm little", "film"]
BATCH = torch.tensor([[1, 70, 80, 90, 5], [1, 60, PAD, PAD, PAD], [1, PAD, 70, PAD, PAD]])


def settings(path: Path, **more) -> SimpleNamespace:
    """What the course's driver hands over: a namespace."""
    return SimpleNamespace(
        pretrained_model_path=str(path), num_labels=3, hidden_dropout_prob=0.3, option="finetune", **more
    )


def test_lengths_count_trailing_padding_only():
    assert sequence_lengths(BATCH, PAD).tolist() == [5, 2, 3]
    assert sequence_lengths(torch.full((1, 4), PAD), PAD).tolist() == [1]


def test_read_last_takes_the_last_position_or_the_last_real_token():
    for attention, expected in (("bidirectional", [4, 4, 4]), ("causal", [4, 1, 2])):
        llama = random_llama(attention=attention)
        states = llama(BATCH)[1][torch.arange(3), expected]
        torch.testing.assert_close(read_last(llama, BATCH, PAD), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_zero_shot_scores_are_sums_of_log_probabilities(tiny_checkpoint: Path, tokenizer: Tokenizer, attention: str):
    model = LlamaZeroShotClassifier(settings(tiny_checkpoint, attention=attention), tokenizer, NAMES)
    llama = load_llama_model(tiny_checkpoint, attention=attention)
    scores = model(BATCH)
    for row, length in enumerate((5, 2, 3)):
        # causal: as if the row had been alone and unpadded; bidirectional: the whole padded row
        alone = BATCH[row : row + 1, : length if attention == "causal" else 5]
        log_probs = llama(alone)[0][0, -1].double().log_softmax(-1)
        for index, name in enumerate(NAMES):
            expected = sum(log_probs[token].item() for token in tokenizer.encode(name, bos=False, eos=False))
            assert scores[row, index].item() == pytest.approx(expected, abs=1e-3)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_zero_shot_wants_a_name_for_every_label(tiny_checkpoint: Path, tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="2 label names for 3 labels"):
        LlamaZeroShotClassifier(settings(tiny_checkpoint), tokenizer, NAMES[:2])


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_embedding_classifier_is_a_head_on_the_hidden_state(tiny_checkpoint: Path, attention: str):
    model = LlamaEmbeddingClassifier(settings(tiny_checkpoint, attention=attention)).eval()
    llama = load_llama_model(tiny_checkpoint, attention=attention)
    log_probs = model(BATCH)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3))
    for row, length in enumerate((5, 2, 3)):
        hidden = llama(BATCH[row : row + 1, : length if attention == "causal" else 5])[1][0, -1]
        expected = (model.classifier_head.weight @ hidden + model.classifier_head.bias).log_softmax(-1)
        torch.testing.assert_close(log_probs[row], expected, atol=1e-4, rtol=1e-4)


def test_dropout_acts_on_the_hidden_state_in_training_only(tiny_checkpoint: Path):
    model = LlamaEmbeddingClassifier(settings(tiny_checkpoint))
    assert model.dropout.p == 0.3
    assert not torch.equal(model.train()(BATCH), model(BATCH))
    assert torch.equal(model.eval()(BATCH), model(BATCH))


def test_option_pretrain_freezes_the_llama(tiny_checkpoint: Path):
    frozen = settings(tiny_checkpoint)
    frozen.option = "pretrain"
    trained = {name for name, p in LlamaEmbeddingClassifier(frozen).named_parameters() if p.requires_grad}
    assert trained == {"classifier_head.weight", "classifier_head.bias"}
    assert all(p.requires_grad for p in LlamaEmbeddingClassifier(settings(tiny_checkpoint)).parameters())


def test_a_loaded_llama_can_be_handed_over(tokenizer: Tokenizer):
    llama = random_llama()
    assert LlamaEmbeddingClassifier(settings(Path("nowhere.pt")), llama=llama).llama is llama
    assert LlamaZeroShotClassifier(SimpleNamespace(num_labels=3), tokenizer, NAMES, llama=llama).llama is llama
