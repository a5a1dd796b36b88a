"""Zero-shot classification by likelihoods: four ways to score a label y for a text x, without training.

    direct      log P(y | x, question)                                Brown et al. 2020, arXiv:2005.14165, section 2.4
    calibrated  log P(y | x, question) - log p_cf(y)                  Zhao et al. 2021, arXiv:2102.09690, section 5
    pmi         log P(y | x, question) - log P(y | premise)           Holtzman et al. 2021, arXiv:2104.08315, PMI_DC
    channel     log P(x | "This movie is y.")                         Min et al. 2022, arXiv:2108.04106, section 3

All tokens of a label count (`label_words.py`). Only a causal model has such likelihoods; a bidirectional one sees the
tokens that it would predict. The outputs are the scores, normalised over the labels.

The authors' code for pmi ends the labels of SST-5 with eos and has " The quote has a tone that is" as its premise; here
a label ends with its last word, and the premise is the question's last clause. Their code for channel counts the eos
behind the sentence, too, takes the mean over its tokens, which changes no prediction, and reports the mean accuracy of
four templates; here there is no eos, a sum, and one template.

Shapes: b batch   s position   p tokens of a premise, or before a sentence   n texts, or tokens   D model dim
        c classes
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from advanced.label_words import LabelWords, ids_of_words, words_of_labels
from advanced.reading import Listening, context_after, is_within
from advanced.table import METHODS
from base_llama import sequence_lengths
from engine.context import hidden_states
from engine.data import NO_GOLD_LABEL, Example
from engine.processes import Batch, Distributed
from engine.tasks import Classification, EncodingRules, LlamaDataset, ids_before
from engine.training import evaluate
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError


class Direct(LabelWords):
    """normalized: use the mean over a label's tokens, not the sum, so that long labels have no disadvantage."""

    name = "direct"

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        scores = self.log_likelihoods(token_ids)  # b c
        if self.settings["normalized"]:
            scores = scores / torch.tensor([len(ids) for ids in self.word_ids], device=scores.device)
        return F.log_softmax(scores, dim=-1)


# ----------------------------------------------------------------------------------------------------- calibrated

CONTENT_FREE = ("N/A", "")  # the paper's third, "[MASK]", is no token of Llama's
CALIBRATION_BATCH = 16


class Calibrated(LabelWords):
    """Contextual calibration: p_cf are the label probabilities for texts without content.

    With p the probabilities normalised over the labels, and p_cf their mean over content-free texts, the paper takes
    the argmax of W p + b with W = diag(p_cf)^-1, b = 0. Here W p is normalised again, which changes no prediction. (The
    authors' code normalises the mean, not each p, so texts count by the total probability of their labels; here all
    texts count equally.)

    source: "content-free", or "train": p_cf is the mean over the training sentences, without their labels, which is
    calibration to the domain. (A mean over the texts to be classified is "batch calibration", Zhou et al. 2023,
    arXiv:2309.17249.) `estimate` computes p_cf, which is saved with the model; before that all outputs are NaN.
    """

    name = "calibrated"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        self.remark = ""
        self.register_buffer("log_p_cf", torch.full((self.num_labels,), torch.nan))  # c

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        return F.log_softmax(self.log_likelihoods(token_ids) - self.log_p_cf, dim=-1)

    def estimate(self, texts: Sequence[str] | None = None) -> None:
        """Compute p_cf. texts: the training sentences, for source=train; raises `UserError` if there are none."""
        if self.settings["source"] == "content-free":
            texts = CONTENT_FREE
        elif texts:
            self.remark = f"domain calibration: estimated from {len(texts)} unlabelled training sentences"
        else:
            raise UserError("source=train estimates from training sentences, and there are none")
        self.average(texts)

    def average(self, texts: Sequence[str]) -> None:
        """Set p_cf to the mean over these texts."""
        config = self.llama.config
        rules = EncodingRules(self.prompt_suffix, config.max_seq_len, config.is_causal, self.room)
        dataset = LlamaDataset([Example(text, NO_GOLD_LABEL) for text in texts], self.tokenizer, rules)
        self.log_p_cf.zero_()
        loader = dataset.loader(CALIBRATION_BATCH, bucket=True)
        log_probs = evaluate(self, loader, task=_Probabilities(), desc="calibrate").score  # n c
        self.log_p_cf.copy_(log_probs.logsumexp(dim=0) - math.log(len(texts)))


class _Probabilities(Classification):
    """An evaluation that keeps all outputs."""

    def evaluation(self, dataset: LlamaDataset) -> _Kept:
        return _Kept([])


@dataclass
class _Kept:
    """The log-probabilities of all texts, b c each. All processes of a run compute the same ones."""

    log_probs: list[torch.Tensor]

    @property
    def score(self) -> torch.Tensor:
        """n c"""
        return torch.cat(self.log_probs)

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        self.log_probs.append(log_probs)

    def finish(self, distributed: Distributed) -> None:
        """Each process has all outputs already."""


# ------------------------------------------------------------------------------------------------------------- pmi


class PMI(LabelWords):
    """Domain-conditional pointwise mutual information: how much likelier the text makes a label.

    Some words are likely after every text; dividing by the likelihood without the text removes that. premise: the text
    that replaces sentence and question; "": the last clause of the question.
    """

    name = "pmi"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        self.premise_ids()  # raises `UserError` if the premise is too long

    def premise_ids(self) -> torch.Tensor:
        """The tokens of the premise: 1 p. Raises `UserError` if it is too long.

        They are computed anew each time, because the question may be set after the head was made.
        """
        text = self.settings["premise"].strip() or re.split(r"[.?!]\s+", self.prompt_suffix)[-1]
        ids = [*self.begin, *self.tokenizer.encode_all(text)] or [self.tokenizer.bos_id]
        size = self.llama.config.max_seq_len
        if len(ids) + self.room > size:
            raise UserError(f"the premise takes {len(ids)} tokens, which leaves no room in {size}")
        return torch.tensor([ids], device=self.llama.tok_embeddings.weight.device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        scores = self.log_likelihoods(token_ids) - self.log_likelihoods(self.premise_ids())  # b c - 1 c
        return F.log_softmax(scores, dim=-1)


# --------------------------------------------------------------------------------------------------------- channel

LOGITS_AT_ONCE = 512  # positions; the logits of a whole batch would need much memory


class Channel(nn.Module):
    """The noisy channel: the label after which the sentence is likeliest; all labels are equally likely a priori.

    template: the text before the sentence, with {label} in it. Of a sentence that is too long the same end is cut for
    all labels, so that they explain the same tokens. Raises `UserError` as `LabelWords` does.
    """

    name = "channel"
    follows = True  # every sentence: `before` stands in front of it

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__()
        self.settings = METHODS[self.name].defaults | settings
        self.llama, self.pad_id, self.num_labels = llama, tokenizer.pad_id, len(label_names)
        words = words_of_labels(self.settings["words"], label_names)
        verbalised = [self.settings["template"].replace("{label}", word).rstrip() for word in words]
        self.before, self.begin = ids_of_words(verbalised, tokenizer, is_first=True), ids_before(tokenizer)
        self.room = max(map(len, self.before))
        self.prompt_suffix = None

    def read_before(self) -> Listening | None:
        """A text that the model has read, and that stands before every text; None: no text."""
        return None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> log-probabilities b c"""
        scores = [self.log_likelihood(token_ids, torch.tensor(ids, device=token_ids.device)) for ids in self.before]
        return F.log_softmax(torch.stack(scores, dim=-1), dim=-1)

    def log_likelihood(self, token_ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """sum_t log P(x_t | before, x_<t) of the sentence's own tokens. token_ids: b s, before: p -> b"""
        n = len(self.begin)
        sentence = token_ids[:, n:]  # b t
        text = torch.cat((token_ids[:, :n], before.expand(len(sentence), -1), sentence), dim=1)  # b p+s
        text, context = context_after(self.read_before(), text, n)
        states = hidden_states(self.llama, text, context)  # b p+s D, or without bos
        states = states[:, -sentence.shape[1] - 1 : -1]  # b t D: each before the token that it predicts
        is_real = is_within(sequence_lengths(token_ids, self.pad_id), token_ids.shape[1])[:, n:]  # b t
        parts = zip(states[is_real].split(LOGITS_AT_ONCE), sentence[is_real].split(LOGITS_AT_ONCE), strict=True)
        losses = [F.cross_entropy(self.llama.output(x).float(), targets, reduction="none") for x, targets in parts]  # n
        scores = torch.zeros_like(is_real, dtype=torch.float32)  # b t
        return -scores.masked_scatter(is_real, torch.cat(losses)).sum(dim=1)
