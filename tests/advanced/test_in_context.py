"""In-context learning, against one long text that is scored token by token, and against the methods without shots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES, random_llama
from steps import passes_through, two_processes_as_one
from test_methods import ADVANCED
from test_prompt_finetune import nats, normalised
from test_zero_shot import outputs_of
from torch import nn

from advanced import choose
from advanced.in_context import draw
from advanced.zero_shot import CONTENT_FREE
from engine import runs
from engine.data import Example
from engine.plan import ComputeSettings
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

NAMES = ["bad", "good", "a baker"]
EXAMPLES = [Example(text, number % 3) for number, text in enumerate(SENTENCES)]
ASKED = ["Two boats and no goat", "She sings"]
PLAIN = ComputeSettings(torch.device("cpu"), kernels="plain")
SCORINGS = pytest.mark.parametrize("scoring", ["direct", "calibrated", "channel"])


class WithoutBos(Tokenizer):
    """Puts bos before an empty text alone, as tokenizers of directories may."""

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        return ids or [self.bos_id] * bos


@pytest.fixture
def llama() -> Llama:
    return random_llama(attention="causal", max_seq_len=512)


def head(llama: Llama, tokenizer: Tokenizer, name: str = "in-context", seed: int = 1, **settings) -> nn.Module:
    chosen = [(each, {**dict(defaults), **settings}) for each, defaults in choose(name, option="prompt")]
    return runs.assemble_zero_shot(
        llama, tokenizer, NAMES, chosen, SENTENCES, compute=PLAIN, examples=EXAMPLES, seed=seed
    ).eval()


def texts_of(tokenizer: Tokenizer, model: nn.Module, shots: Sequence[Example], text: str) -> list[tuple[list, list]]:
    """For each label what is given and what is said, as tokens of one long text."""
    encode = tokenizer.sp_model.encode
    newline = [encode("\n")[-1]]
    begin, own = tokenizer.encode("a", bos=True, eos=False)[: -len(encode("a"))], encode(text)
    if model.prompt_suffix is None:
        labels = [encode(f"This movie is {name}.") for name in NAMES]
        given = begin + sum(([*labels[each.label], *encode(each.sentence), *newline] for each in shots), [])
        return [([*given, *label], own) for label in labels]
    question, words = encode(model.prompt_suffix), [encode(name) for name in NAMES]
    shown = ([*encode(each.sentence), *question, *words[each.label], *newline] for each in shots)
    given = begin + sum(shown, []) + own + question
    return [(given, word) for word in words]


@SCORINGS
def test_without_shots_it_is_the_method_of_its_scoring(llama: Llama, tokenizer: Tokenizer, scoring: str):
    asked = {} if scoring == "channel" else {"template": "It was"}
    mine = head(llama, tokenizer, shots=0, scoring=scoring, **asked)
    other = head(llama, tokenizer, scoring, **asked)
    assert torch.equal(*(outputs_of(model, tokenizer, SENTENCES) for model in (mine, other)))


def test_the_demonstrations_do_not_repeat_the_names_of_all_labels(llama: Llama, tokenizer: Tokenizer):
    shown = tokenizer.decode(head(llama, tokenizer, shots=3).shown.tolist())
    assert shown.count("Sentiment:") == 3 and [shown.count(f"Sentiment: {name}") for name in NAMES] == [1, 1, 1]


@pytest.mark.parametrize("kind", [Tokenizer, WithoutBos])
@pytest.mark.parametrize("shots", [1, 4])
@SCORINGS
def test_it_scores_one_long_text(llama: Llama, tiny_tokenizer: Path, scoring: str, shots: int, kind: type):
    tokenizer = kind(tokenizer_model=tiny_tokenizer)
    model, drawn = head(llama, tokenizer, shots=shots, scoring=scoring), draw(EXAMPLES, shots, 1)

    def scores_of(text: str) -> torch.Tensor:
        texts = texts_of(tokenizer, model, drawn, text)
        return normalised(torch.stack([nats(llama, given, said) for given, said in texts]))

    log_p_cf = torch.tensor(0.0)
    if scoring == "calibrated":
        log_p_cf = torch.stack([scores_of(text) for text in CONTENT_FREE]).exp().mean(0).log()
    for row, text in zip(outputs_of(model, tokenizer, ASKED), ASKED, strict=True):
        torch.testing.assert_close(row, normalised(scores_of(text) - log_p_cf), atol=1e-5, rtol=1e-5)
    without = outputs_of(head(llama, tokenizer, scoring), tokenizer, ASKED)
    assert not torch.allclose(outputs_of(model, tokenizer, ASKED), without, atol=1e-2)


def test_the_demonstrations_are_read_once(llama: Llama, tokenizer: Tokenizer):
    passes = passes_through(llama)
    model = head(llama, tokenizer)
    outputs_of(model, tokenizer, SENTENCES, batch_size=5)
    shown = (1, 1 + len(model.shown), 0)
    assert passes.count(shown) == 1 and all(each[1] < shown[1] for each in passes if each != shown)
    assert len(passes) == 1 + 2 * 2  # the texts and the words behind them, in two batches


def test_the_draw_is_balanced_and_of_the_seed():
    uneven = [Example(f"text {number}", 0 if number < 20 else number % 3) for number in range(30)]
    for shots, counts in ((2, [1, 1]), (3, [1, 1, 1]), (4, [1, 1, 2]), (9, [3, 3, 3]), (30, None)):
        drawn = draw(uneven, shots, seed=5)
        assert len(set(drawn)) == shots and set(drawn) <= set(uneven)
        assert counts is None or sorted(Counter(each.label for each in drawn).values()) == counts
        assert drawn == draw(uneven, shots, seed=5)
    assert len({tuple(draw(uneven, 4, seed)) for seed in range(20)}) > 15
    labels = [tuple(each.label for each in draw(uneven, 3, seed)) for seed in range(20)]
    assert len(set(labels)) > 3  # no class is always the last
    turns = [[each.label for each in draw(uneven, 6, seed)] for seed in range(20)]
    assert any(labels[:3] != labels[3:] for labels in turns)


@SCORINGS
def test_long_demonstrations_are_cut_and_the_question_never(tokenizer: Tokenizer, scoring: str):
    llama = random_llama(attention="causal", max_seq_len=200)
    model = head(llama, tokenizer, scoring=scoring, template="" if scoring == "channel" else "It was")
    said = r"in-context: 4 shots of \d+ tokens together; [1-4] of them have .* cut to \d+ tokens"
    assert re.fullmatch(said, model.remark)
    passes = passes_through(llama)
    long = " ".join(SENTENCES * 3)
    outputs = outputs_of(model, tokenizer, [long, SENTENCES[0]])
    assert max(length + start for _, length, start in passes) == 200 and outputs.isfinite().all()
    kept = max(len(ids) for ids in tokenizer.encode_batch(list(SENTENCES), bos=False, eos=False))
    assert model.own_room + 1 + len(model.shown) <= 200 - min(kept, 60)
    with pytest.raises(UserError, match="shots=10 take .* positions without their sentences; name fewer"):
        head(random_llama(attention="causal", max_seq_len=128), tokenizer, shots=10, scoring=scoring)


def test_a_saved_head_is_enough_by_itself(tmp_path: Path, llama: Llama, tokenizer: Tokenizer):
    for scoring in ("calibrated", "channel"):
        model = head(llama, tokenizer, scoring=scoring)
        runs.save_classifier(tmp_path / "head.pt", model, runs.record_of(model, tokenizer, NAMES, 4))
        opened, about = runs.load_classifier(tmp_path / "head.pt")
        expected = outputs_of(model, tokenizer, ASKED)
        assert torch.equal(outputs_of(opened, about.tokenizer, ASKED), expected)
    model.shown = model.shown + 10**6
    runs.save_classifier(tmp_path / "head.pt", model, runs.record_of(model, tokenizer, NAMES, 4))
    with pytest.raises(UserError, match="holds another kind of model"):
        runs.load_classifier(tmp_path / "head.pt")


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["scoring=channel", "template=It was"], "with scoring=channel the template must be a text with {label} in it"),
        (["template=It is {label}"], "with scoring=direct the template must be what stands before the label"),
        (["template= "], "with scoring=direct the template must be"),
        (["shots=-1"], "from 0"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(assignments: list[str], words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        choose("in-context", assignments, "prompt")


def test_the_driver_draws_from_train_alone_with_the_seed(
    drive: Callable, classify_flags: Callable, films: dict[str, Path], tmp_path: Path
):
    flags = [*classify_flags("prompt"), *ADVANCED, "--attention", "causal", "--method", "in-context"]
    flags += ["--method-args", "template=It was", "words=the+a", "shots=2"]
    assert "in-context: 2 shots of " in drive(*flags)
    first = (tmp_path / "films-dev-advanced-output.txt").read_bytes()
    drive(*flags)
    assert (tmp_path / "films-dev-advanced-output.txt").read_bytes() == first
    train = tmp_path / "few.txt"
    train.write_text(films["train"].read_text().split("\n")[0] + "\n")
    with pytest.raises(UserError, match="shots=2: there are 1 training sentences to draw from"):
        drive(*flags, "--train", train)


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["calibrated", "channel"])
def test_two_processes_that_share_the_model_predict_as_one(tmp_path: Path, classify_flags: Callable, scoring: str):
    flags = [*classify_flags("prompt"), *ADVANCED, "--attention", "causal", "--method", "in-context"]
    template = "{label}:" if scoring == "channel" else "It was"
    flags += ["--method-args", f"template={template}", "words=the+a", "shots=2", f"scoring={scoring}"]
    assert "in-context: 2 shots of " in two_processes_as_one(tmp_path, flags).stdout
