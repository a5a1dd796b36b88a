"""Prompt-based fine-tuning: the language model is trained to say the label's word, and no new parameters are made (Gao
et al. 2021, "Making Pre-trained Language Models Better Few-shot Learners" (LM-BFF), arXiv:2012.15723, section 4).

With M(y) the word of the label y and h the state at the answer slot, which is the end of sentence and question,

    p(y | x) = P(M(y) | x, question) / sum_y' P(M(y') | x, question) = softmax over y of  w_{M(y)} . h

The last is for words of one token, w being the tied output matrix; of words with several tokens all count, by teacher
forcing (`label_words.py`). Before training this is `direct` zero-shot classification.

A bidirectional model reads the answer slot as a causal one does, at the last real token, and padding is hidden from it:
the base's position, the last one of the padded batch, would be the slot of its longest text alone. There is no dropout
before the answer: `hidden_dropout_prob` is the linear head's.

Controls (Webson & Pavlick 2022, arXiv:2109.01247: models learn as fast with questions that make no sense, and not with
other words): `shuffled-words` gives each label the word of another one, always the same for a number of labels;
`null-template` asks nothing between the sentence and the answer.

Shapes: b batch   s position   c classes
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from advanced.label_words import LabelWords
from advanced.reading import reading_of
from llama import Llama
from tokenizer import Tokenizer
from utils import join_names


class PromptFinetune(LabelWords):
    """template, words: see `LabelWords`. control: "none", "shuffled-words" or "null-template".

    remark: what is to be known of the words before training, if anything is.
    """

    name = "prompt-finetune"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        control = self.settings["control"]
        if control == "shuffled-words":  # the question stays as it is
            order = derangement(self.num_labels)
            self.words, self.word_ids = ([each[place] for place in order] for each in (self.words, self.word_ids))
        if control == "null-template":
            self.prompt_suffix = None
        if not llama.config.is_causal:
            reading_of(self).hides_padding = True
        several = [word for word, ids in zip(self.words, self.word_ids, strict=True) if len(ids) > 1]
        self.remark = (
            f"words of several tokens, for which the model is asked again: {join_names(several)}" if several else ""
        )

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        return F.log_softmax(self.log_likelihoods(token_ids), dim=-1)


def derangement(count: int) -> list[int]:
    """The numbers below `count`, at least two, in an order that leaves none in its place, the same one every time."""
    drawing, order = random.Random(count), list(range(count))
    while any(place == number for place, number in enumerate(order)):
        drawing.shuffle(order)
    return order
