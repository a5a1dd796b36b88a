"""Label words behind a text, with a tokenizer that puts no space before a text's first word, and perhaps no bos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
from conftest import random_llama  # noqa: E402
from shapes import bytes_of_text  # noqa: E402

from advanced import METHODS, choose  # noqa: E402
from advanced.in_context import draw  # noqa: E402
from engine.data import Example  # noqa: E402
from engine.families import encode_for, read_tokenizer  # noqa: E402
from engine.runs import assemble_zero_shot  # noqa: E402
from llama import Llama  # noqa: E402

NAMES = ["bad", "good"]
SHOWN = [Example("a film", 1), Example("two boats", 0)]
ASKED = "She sings"


def texts_of(scoring: str, shown: list[Example], word: str) -> tuple[str, str]:
    """What is given and what is said, as one long text has it."""
    if scoring == "channel":
        before = "".join(f"This movie is {NAMES[each.label]}. {each.sentence}\n" for each in shown)
        return f"{before}This movie is {word}.", f" {ASKED}"
    return "".join(f"{each.sentence} It was {NAMES[each.label]}\n" for each in shown) + f"{ASKED} It was", f" {word}"


def slowly(llama: Llama, tokenizer: Any, given: str, said: str) -> torch.Tensor:
    """log P(said | given), of one long text."""
    ids, length = tokenizer.encode(given + said, bos=True, eos=False), len(tokenizer.encode_all(said))
    log_probs = llama(torch.tensor([ids]), targets=torch.tensor(0))[0][0].log_softmax(-1)  # s v
    return sum(log_probs[place - 1, ids[place]] for place in range(len(ids) - length, len(ids)))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("scoring", ["direct", "channel"])
@torch.inference_mode()
def test_they_are_scored_as_they_stand_in_one_long_text(tmp_path: Path, begins: bool, shots: int, scoring: str):
    tokenizer = read_tokenizer(bytes_of_text(tmp_path / "bpe", begins) / "tokenizer.json")
    llama = random_llama(attention="causal", vocab_size=tokenizer.n_words, max_seq_len=512)
    own = {"shots": shots, "scoring": scoring, "template": "" if scoring == "channel" else "It was"}
    chosen = [("in-context", METHODS["in-context"].defaults | own)]
    model = assemble_zero_shot(llama, tokenizer, NAMES, chosen, examples=SHOWN)
    scores = [slowly(llama, tokenizer, *texts_of(scoring, draw(SHOWN, shots, 0), word)) for word in NAMES]
    tokens = torch.tensor([encode_for(model, tokenizer, [Example(ASKED, 0)]).token_ids[0]])
    torch.testing.assert_close(model(tokens)[0], torch.stack(scores).log_softmax(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("name", ["pmi", "calibrated"])
@torch.inference_mode()
def test_the_question_alone_begins_as_texts_do(tmp_path: Path, begins: bool, name: str):
    """A text of no tokens would get bos from a tokenizer that puts none before others; the question is no such text."""
    tokenizer = read_tokenizer(bytes_of_text(tmp_path / "bpe", begins) / "tokenizer.json")
    llama = random_llama(attention="causal", vocab_size=tokenizer.n_words, max_seq_len=512)
    model = assemble_zero_shot(llama, tokenizer, NAMES, choose(name, ["template=It was"], "prompt"))

    def asked(given: str) -> torch.Tensor:
        return torch.stack([slowly(llama, tokenizer, given, f" {word}") for word in NAMES])

    if name == "pmi":
        taken = asked("It was")
    else:
        taken = torch.stack([asked(f"{text} It was").softmax(0) for text in ("N/A", "")]).mean(0).log()
    tokens = torch.tensor([encode_for(model, tokenizer, [Example(ASKED, 0)]).token_ids[0]])
    expected = (asked(f"{ASKED} It was").log_softmax(0) - taken).log_softmax(0)
    torch.testing.assert_close(model(tokens)[0], expected, atol=1e-4, rtol=1e-4)
