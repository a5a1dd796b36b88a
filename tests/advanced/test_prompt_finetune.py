"""Prompt-based fine-tuning: the language model itself answers, with every token of a word, and is trained to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES, random_llama
from steps import check_kernels, two_processes_as_one
from test_methods import ADVANCED
from torch import nn

from advanced import choose, create_head
from advanced.label_words import ids_of_words
from advanced.prompt_finetune import derangement
from classifier import read_last
from engine import families
from engine import runs as saved_runs
from engine.data import Example
from engine.storage import load_tensors
from fast import accelerate
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

NAMES = ["bad", "good", "goodness", "a baker"]  # of several tokens; one is the beginning of another
ATTENTIONS = ["bidirectional", "causal"]


def head(llama: Llama, tokenizer: Tokenizer, names: Sequence[str] = NAMES, name="prompt-finetune", **more) -> nn.Module:
    return create_head(name, more, llama, tokenizer, list(names)).eval()


def tokens_of(model: nn.Module, tokenizer: Tokenizer, sentences: Sequence[str] = SENTENCES[:3]) -> torch.Tensor:
    """A batch. Returns b s"""
    examples = [Example(text, 0) for text in sentences]
    dataset = families.encode_for(model, tokenizer, examples)
    return dataset.collate_fn([dataset[place] for place in range(len(dataset))])["token_ids"]


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [tokenizer.bos_id] + [number for text in texts for number in tokenizer.sp_model.encode(text)]


def nats(llama: Llama, given: list[int], said: list[int]) -> torch.Tensor:
    """log P(said | given): a pass for every token, of a text without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for place, token in enumerate(said):
        logits = llama(torch.tensor([given + said[:place]]))[0][0, -1].double()  # v
        total = total + logits[token] - logits.exp().sum().log()
    return total


def slowly(llama: Llama, tokenizer: Tokenizer, question: str, names: Sequence[str], text: str) -> torch.Tensor:
    """log P(name | text, question) for every name: c"""
    given = ids_of(tokenizer, *filter(None, (text, question)))
    return torch.stack([nats(llama, given, tokenizer.sp_model.encode(name)) for name in names])


def normalised(scores: torch.Tensor) -> torch.Tensor:
    return (scores - scores.exp().sum().log()).float()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("control", ["none", "shuffled-words", "null-template"])
def test_all_tokens_of_each_word_count_and_gradients_flow_through_them(
    tokenizer: Tokenizer, attention: str, control: str
):
    llama = random_llama(attention=attention, max_seq_len=128)
    model, slow = head(llama, tokenizer, control=control), copy.deepcopy(llama)
    question = None if control == "null-template" else "Is this movie bad, good, goodness, or a baker? This movie is"
    assert model.prompt_suffix == question and max(map(len, model.word_ids)) > 2
    words = [NAMES[place] for place in derangement(4)] if control == "shuffled-words" else NAMES
    outputs = model(tokens_of(model, tokenizer))
    expected = [normalised(slowly(slow, tokenizer, question or "", words, text)) for text in SENTENCES[:3]]
    expected = torch.stack(expected)
    torch.testing.assert_close(outputs, expected, atol=3e-5, rtol=1e-4)
    weights = torch.randn_like(outputs)
    for each in (outputs, expected):
        (each * weights).sum().backward()
    for (name, one), other in zip(llama.named_parameters(), slow.parameters(), strict=True):
        assert other.grad.abs().sum() > 0
        torch.testing.assert_close(one.grad, other.grad, atol=2e-4, rtol=1e-3, msg=lambda text, at=name: f"{at} {text}")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_sentence_is_classified_alike_in_every_batch(tokenizer: Tokenizer, attention: str):
    model = head(random_llama(attention=attention, max_seq_len=128), tokenizer)
    together = model(tokens_of(model, tokenizer, SENTENCES))
    alone = torch.cat([model(tokens_of(model, tokenizer, [text])) for text in SENTENCES])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("words", ["", "the+a+s+b"])
def test_before_training_it_is_direct_zero_shot_classification(tokenizer: Tokenizer, words: str):
    llama = random_llama(attention="causal", max_seq_len=128)
    model, direct = (head(llama, tokenizer, name=name, words=words) for name in ("prompt-finetune", "direct"))
    assert model.prompt_suffix == direct.prompt_suffix
    tokens = tokens_of(model, tokenizer)
    assert torch.equal(model(tokens), direct(tokens))


def test_words_of_one_token_are_a_softmax_over_their_logits(tokenizer: Tokenizer):
    llama = random_llama(attention="causal", max_seq_len=128)
    model = head(llama, tokenizer, ["0", "1"], words="the+a")
    assert all(len(ids) == 1 for ids in model.word_ids) and model.room == 0 and not model.remark
    tokens = tokens_of(model, tokenizer)
    logits = llama.output(read_last(llama, tokens, 3))  # b v
    (the,), (a,) = model.word_ids
    torch.testing.assert_close(model(tokens), logits[:, [the, a]].log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_no_parameters_are_made(tokenizer: Tokenizer):
    llama = random_llama()
    model = head(llama, tokenizer)
    assert {name.removeprefix("llama.") for name in model.state_dict()} == {*llama.state_dict()}
    assert [*model.parameters()] == [*llama.parameters()] and all(each.requires_grad for each in model.parameters())


def test_the_reader_can_be_another_one(tokenizer: Tokenizer):
    for attention in ATTENTIONS:
        model = head(random_llama(attention=attention, max_seq_len=128), tokenizer)
        tokens = tokens_of(model, tokenizer)
        before, read = model(tokens), model.read
        if isinstance(read, nn.Module):
            read.register_forward_hook(lambda module, inputs, output: 1.1 * output)
        else:
            model.read = lambda *inputs, read=read: 1.1 * read(*inputs)
        assert not torch.allclose(model(tokens), before, atol=1e-3)


@pytest.mark.parametrize("count", range(2, 30))
def test_shuffled_words_all_leave_their_place(count: int):
    order = derangement(count)
    assert sorted(order) == [*range(count)] and all(place != number for place, number in enumerate(order))
    assert order == derangement(count)


def test_the_words_that_are_warned_of_are_those_that_are_asked_for(tokenizer: Tokenizer):
    pieces = [tokenizer.sp_model.id_to_piece(token) for token in range(tokenizer.n_words)]
    plain = [piece[1:] for piece in pieces if piece.startswith("▁") and piece[1:].isalpha()]
    sizes = {word: len(tokenizer.encode_all(word)) for word in (*plain, *(word + "s" for word in plain))}
    one, two = (next(word for word, size in sizes.items() if size == wanted) for wanted in (1, 2))
    model = head(random_llama(attention="causal", max_seq_len=128), tokenizer, "ab", words=f"{one}+{two}")
    assert model.remark == f"words of several tokens, for which the model is asked again: {two}"
    settings = dict(words=f"{one}+{two}", control="shuffled-words")
    shuffled = head(random_llama(attention="causal", max_seq_len=128), tokenizer, "ab", **settings)
    assert shuffled.words == [two, one] and shuffled.remark == model.remark
    assert shuffled.word_ids == ids_of_words(shuffled.words, tokenizer) != model.word_ids


@pytest.mark.parametrize("other", ["linear-probe", "pooling", "direct"])
def test_what_makes_no_sense_beside_it_is_refused(other: str):
    with pytest.raises(UserError, match="cannot be combined|not for finetune"):
        choose(f"prompt-finetune,{other}")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_compute_the_same(tokenizer: Tokenizer, attention: str, precision: str):
    plain, fast = (head(random_llama(attention=attention, max_seq_len=128), tokenizer) for _ in range(2))
    accelerate(fast, precision, generates=False)
    weight, tokens = "llama.layers.0.attention.compute_query.weight", tokens_of(plain, tokenizer)
    check_kernels(plain, fast, precision, weight, rounded=1.0, cosine=0.95, tokens=tokens)


# ------------------------------------------------------------------------------------------------------------ driven

QUESTION = "It was"  # a short one: the tiny model has few positions


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_run_trains_saves_and_predicts(
    tmp_path: Path, drive: Callable, classify_flags: Callable, capfd: pytest.CaptureFixture, attention: str
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--attention", attention, "--epochs", 4, "--lr", 0.003]
    flags += ["--batch_size", 4, "--method", "prompt-finetune", "--method-args", f"template={QUESTION}"]
    flags += ["--model_out", "prompted.pt"]
    out = drive(*flags)
    losses = [float(each) for each in re.findall(r"train loss :: (\d+\.\d+)", out)]
    # 2026-11-26, AMD EPYC, 2 cores, 24 seeds: by 1.33 (sd 0.30) and 1.40 (0.23); 2 epochs at 0.01 by 0.68 (0.37)
    assert losses[-1] < losses[0] - 0.2
    (warning,) = (line for line in capfd.readouterr().err.splitlines() if "words of several" in line)
    assert warning == "warning: words of several tokens, for which the model is asked again: bad, good"
    lines = (tmp_path / "films-dev-advanced-output.txt").read_text().splitlines()
    assert all(line.endswith(f" {QUESTION}") for line in lines)
    model, about = saved_runs.load_classifier(tmp_path / "prompted.pt")
    assert about.prompt_suffix == QUESTION and model.name == "prompt-finetune"
    sentences = [line[6:].removesuffix(f" {QUESTION}") for line in lines]
    predictions = saved_runs.predict(model, about, sentences, batch_size=4)
    assert [each.label for each in predictions] == [int(line[0]) for line in lines]
    saved = load_tensors(tmp_path / "prompted.pt")
    assert all(name.startswith("llama.") for name in saved["model"]) and saved["methods"] == {}


def test_words_of_one_token_are_no_reason_to_warn(
    drive: Callable, classify_flags: Callable, capfd: pytest.CaptureFixture
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "prompt-finetune"]
    drive(*flags, "--method-args", "words=the+a", f"template={QUESTION}")
    assert "words of several tokens" not in capfd.readouterr().err


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_cut_sentence_keeps_its_question(
    tmp_path: Path, drive: Callable, classify_flags: Callable, attention: str, tokenizer: Tokenizer
):
    flags = [*classify_flags("finetune"), *ADVANCED, "--epochs", 1, "--method", "prompt-finetune"]
    flags += ["--method-args", f"template={QUESTION}", "--attention", attention]
    drive(*flags, "--max_sentence_len", 5, "--model_out", "prompted.pt")
    model, about = saved_runs.load_classifier(tmp_path / "prompted.pt")
    asked = about.tokenizer.sp_model.encode(QUESTION)
    tokens = tokens_of(model, about.tokenizer)
    assert tokens.shape == (3, 1 + 5 + len(asked)) and tokens[:, 6:].tolist() == 3 * [asked]
    predictions = saved_runs.predict(model, about, SENTENCES[:3], batch_size=3)
    predicted = torch.tensor([each.probabilities for each in predictions])
    torch.testing.assert_close(predicted, model(tokens).exp(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_two_processes_that_share_the_model_train_as_one(tmp_path: Path, classify_flags: Callable, attention: str):
    flags = [*classify_flags("finetune"), *ADVANCED, "--attention", attention, "--epochs", "2", "--lr", "0.01"]
    flags += ["--batch_size", "4", "--method", "prompt-finetune", "--method-args", f"template={QUESTION}"]
    assert two_processes_as_one(tmp_path, flags).stderr.count("words of several tokens") == 1
