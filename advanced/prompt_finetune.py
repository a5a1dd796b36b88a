"""Prompt-based fine-tuning: the language model is trained to predict the label's word, without new parameters (Gao et
al. 2021, "Making Pre-trained Language Models Better Few-shot Learners" (LM-BFF), arXiv:2012.15723, section 4).

With M(y) the word of the label y and h the state at the answer slot, the end of sentence and question,

    p(y | x) = P(M(y) | x, question) / sum_y' P(M(y') | x, question) = softmax over y of  w_{M(y)} . h

The last form is for words of one token, with w a row of the tied output matrix; of longer words all tokens count, by
teacher forcing (`label_words.py`). Before training this is `direct` zero-shot classification.

In a bidirectional model, too, the answer slot is the last real token, and padding is hidden: the base reads the last
position of the padded batch, which is the answer slot of the longest text only. There is no dropout before the answer:
`hidden_dropout_prob` belongs to the linear head.

The authors' code trains for 1,000 steps and chooses among three rates and three batch sizes for each draw of sentences.

Controls (Webson & Pavlick 2022, arXiv:2109.01247, found that models learn as fast with senseless questions, but not
with other words): `shuffled-words` gives each label the word of another label, always the same for a number of labels;
`null-template` puts no question between the sentence and the answer.

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

    remark: a notice about the words, or "".
    """

    name = "prompt-finetune"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        control = self.settings.get("control")
        if control == "shuffled-words":  # the question stays as it is
            order = derangement(self.num_labels)
            self.words, self.word_ids = ([each[place] for place in order] for each in (self.words, self.word_ids))
        if control == "null-template":
            self.prompt_suffix = None
        if not llama.config.is_causal:
            reading_of(self).hides_padding = True
        several = [word for word, ids in zip(self.words, self.word_ids, strict=True) if len(ids) > 1]
        asked_again = f"words of several tokens, for which the model is asked again: {join_names(several)}"
        self.remark = asked_again if several else ""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        return F.log_softmax(self.log_likelihoods(token_ids), dim=-1)


def derangement(count: int) -> list[int]:
    """An order of the numbers below `count` that leaves none in its place; always the same. count: at least 2."""
    drawing, order = random.Random(count), list(range(count))
    while any(place == number for place, number in enumerate(order)):
        drawing.shuffle(order)
    return order
