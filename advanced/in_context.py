"""In-context learning: k labelled training sentences stand before the sentence that is classified; nothing is trained
(Brown et al. 2020, arXiv:2005.14165, section 2.4). With x_i, y_i the demonstrations and q the question,

    direct       log P(y | x_1 q y_1, ... x_k q y_k, x q)
    calibrated   the same, minus log p_cf(y) behind the same demonstrations    Zhao et al. 2021, arXiv:2102.09690
    channel      log P(x | v(y_1) x_1, ... v(y_k) x_k, v(y))                   Min et al. 2022, arXiv:2108.04106

v(y) is the channel's template with the label. Every demonstration ends in a newline, if the vocabulary has one. Without
demonstrations these are the scores of `zero_shot.py` for the same question.

The question is "Sentiment:", as in the paper of Zhao et al. (there on a line of its own, with "Review: " before the
sentence and an empty line between demonstrations), and not the course's, which names all labels. When each
demonstration repeats those names, the labels of the demonstrations are a few among many words of their kind.

Brown et al. draw new demonstrations for each sentence, and the code of Zhao et al. draws them without regard to their
classes; here one draw stands before all sentences and has as many of each class as k allows. So keys and values of the
demonstrations are computed once, and each sentence continues them. The code of Min et al. shows all its training
sentences, with spaces between them, and cuts the beginning of a text that is too long; here long sentences are cut.

Shapes: b batch   s position   p tokens of the demonstrations   c classes
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from advanced.prompts import CHANNEL_TEMPLATE
from advanced.reading import Listening
from advanced.zero_shot import CONTENT_FREE, Calibrated, Channel
from engine.context import AttentionContext, hidden_states
from engine.data import Example
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError


def in_context(
    llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any
) -> InContext | InContextChannel:
    """The head for settings["scoring"]."""
    kind = InContextChannel if settings.get("scoring") == "channel" else InContext
    return kind(llama, tokenizer, label_names, **settings)


class Demonstrations(nn.Module):
    """What both heads share: drawing the demonstrations, reading them once, and saving their tokens.

    `learn` draws them; before that there are none.
    """

    name = "in-context"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        self.tokenizer, self.remark = tokenizer, ""
        self.own_room = self.room  # without the demonstrations
        self.shown = torch.empty(0, dtype=torch.long)  # p
        self.heard: Listening | None = None

    def tokens_of(self, sentences: Sequence[str]) -> list[list[int]]:
        """The tokens of each sentence, as they stand in a demonstration."""
        raise NotImplementedError

    def demonstration(self, sentence: list[int], label: int) -> list[int]:
        """The tokens of a demonstration, from those of its sentence."""
        raise NotImplementedError

    def learn(self, examples: Sequence[Example], seed: int) -> None:
        """Draw the demonstrations. Raises `UserError` if there are too few examples, or if they do not fit.

        They get the positions that the longest of all examples leaves, and at least half; for that, the longest of
        their sentences are cut.
        """
        shots = self.settings["shots"]
        if shots > len(examples):
            raise UserError(f"shots={shots}: there are {len(examples)} training sentences to draw from")
        drawn = draw(examples, shots, seed)
        newline = self.tokenizer.encode_all("\n")[-1:]  # SentencePiece puts a space before it
        sentences, everything = (self.tokens_of([each.sentence for each in some]) for some in (drawn, examples))
        frames = sum(len(self.demonstration([], each.label)) + len(newline) for each in drawn)
        question = self.tokenizer.encode_next(self.prompt_suffix) if self.prompt_suffix else []
        free = self.llama.config.max_seq_len - len(self.begin) - len(question) - self.own_room
        cut = longest = max(map(len, everything), default=0)
        while cut and frames + sum(min(len(ids), cut) for ids in sentences) > max(free - longest, free // 2):
            cut -= 1
        if shots and not cut:
            raise UserError(f"shots={shots} take {frames} of {free} positions without their sentences; name fewer")
        whole: list[int] = []
        for ids, each in zip(sentences, drawn, strict=True):
            whole += [*self.demonstration(ids[:cut], each.label), *newline]
        self.set_extra_state(torch.tensor(whole, dtype=torch.long))
        shorter = sum(len(ids) > cut for ids in sentences)
        self.remark = f"in-context: {shots} shots of {len(self.shown)} tokens together" if shots else ""
        self.remark += f"; {shorter} of them have their sentences cut to {cut} tokens" if shorter else ""

    def get_extra_state(self) -> torch.Tensor:
        """The tokens of the demonstrations, which are saved with the model: p"""
        return self.shown

    def set_extra_state(self, shown: torch.Tensor) -> None:
        if shown.dtype != torch.long or shown.dim() != 1 or not ((shown >= 0) & (shown < self.llama.vocab_size)).all():
            raise ValueError("not the tokens of demonstrations")
        self.shown, self.heard, self.room = shown, None, self.own_room + len(shown)

    def read_before(self) -> Listening | None:
        if not len(self.shown):
            return None
        device = self.llama.tok_embeddings.weight.device
        if self.heard is None or self.heard.heard[0][0].device != device:
            tokens = torch.tensor([[*self.begin, *self.shown.tolist()]], device=device)  # 1 p
            self.heard = Listening()
            context = AttentionContext.of_text(tokens.shape[1], True, device)._replace(cache=self.heard)
            hidden_states(self.llama, tokens, context)
        return self.heard


class InContext(Demonstrations, Calibrated):
    """shots: k. scoring: "direct" or "calibrated". template, words: see `LabelWords`."""

    question = "Sentiment:"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        if self.settings["scoring"] == "direct":
            self.log_p_cf.zero_()

    def tokens_of(self, sentences: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(sentences, bos=False, eos=False)

    def demonstration(self, sentence: list[int], label: int) -> list[int]:
        return [*sentence, *self.tokenizer.encode_next(self.prompt_suffix), *self.word_ids[label]]

    def estimate(self, texts: Sequence[str] | None = None) -> None:
        """Compute p_cf, if it is needed. texts: not used."""
        if self.settings["scoring"] == "calibrated":
            self.average(CONTENT_FREE)


class InContextChannel(Demonstrations, Channel):
    """shots: k. template: as that of `Channel`. words: see `LabelWords`."""

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        template = settings.get("template") or CHANNEL_TEMPLATE.default
        super().__init__(llama, tokenizer, label_names, **{**settings, "template": template})

    def tokens_of(self, sentences: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode_next(sentence)[: self.tokenizer.max_len] for sentence in sentences]

    def demonstration(self, sentence: list[int], label: int) -> list[int]:
        return [*self.before[label], *sentence]


def draw(examples: Sequence[Example], shots: int, seed: int) -> list[Example]:
    """Draw examples, as many of each class as possible, in a random order."""
    drawing = random.Random(seed)
    places: dict[int, list[int]] = {}
    for place, example in enumerate(examples):
        places.setdefault(example.label, []).append(place)
    classes = [places[label] for label in sorted(places)]
    for each in (*classes, classes):
        drawing.shuffle(each)
    turns = [place for turn in zip_longest(*classes) for place in turn if place is not None]
    drawn = turns[:shots]
    drawing.shuffle(drawn)
    return [examples[place] for place in drawn]
