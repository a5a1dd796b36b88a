"""Label words that are found in the training data (Gao et al. 2021, "Making Pre-trained Language Models Better Few-shot
Learners" (LM-BFF), arXiv:2012.15723, section 5.1).

For each class y, V_y are the words of one token with the largest

    sum over the training sentences x of class y of log P(w | x, question)

Of all assignments of a word of V_y to each y, no two the same, the one that classifies the most training sentences
right is taken (the likeliest word is the prediction); of several such, the one with the largest sum of these scores.
With option finetune, the model is then trained as by `prompt_finetune.py`.

The paper trains with each of the best assignments and takes the one that is best on dev; for TREC, the authors' script
also keeps only the words of V_y that are like hand-written ones. Both are left out here: nothing but the training data
chooses. Their code lets two classes have the same word, does not ask for letters alone, and tries 100 words of a class.

Shapes: b batch   n training sentences   D model dim   v vocabulary   w words   a assignments   c classes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advanced.prompt_finetune import PromptFinetune
from engine.data import Example
from engine.families import encode_for
from engine.runs import loader_of
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix

MOST = 10**6  # assignments
AT_ONCE = 256  # sentences whose probabilities of all words are in memory, or assignments that are scored together


class AutoWords(PromptFinetune):
    """candidates: the size of V_y. template: the question; {labels} in it are the label names, not the words.

    words: those that `learn` has found, joined by +; "" before that, when the label names stand for them. remark: the
    words, as a notice.
    """

    name = "auto-words"

    def __init__(self, llama: Llama, tokenizer: Tokenizer, label_names: Sequence[str], **settings: Any):
        super().__init__(llama, tokenizer, label_names, **settings)
        self.prompt_suffix = prompt_suffix(label_names, self.settings["template"]).rstrip()
        self.label_names, self.remark = list(label_names), ""

    @torch.inference_mode()
    def learn(self, examples: Sequence[Example], seed: int) -> None:
        """Find the words. seed: not used. Raises `UserError` for a class without examples, or too many candidates."""
        candidates, labels = self.settings["candidates"], torch.tensor([each.label for each in examples])
        if candidates**self.num_labels > MOST:
            most = int(MOST ** (1 / self.num_labels) + 1e-9)
            raise UserError(f"candidates={candidates} of {self.num_labels} classes are too many; at most {most}")
        if missing := {*range(self.num_labels)} - {each.label for each in examples}:
            name = self.label_names[min(missing)]
            raise UserError(f"auto-words finds words in training sentences, and there is none of the class {name}")
        self.room = 0
        words, parts = self.all_words(), self.states_of(examples).split(AT_ONCE)  # b D each
        ids = torch.tensor([*words])
        sums = torch.zeros(self.num_labels, len(ids))  # c w
        for part, label in zip(parts, labels.split(AT_ONCE), strict=True):
            sums.index_add_(0, label, self.log_probabilities(part).cpu()[:, ids])
        scores, places = sums.topk(min(candidates, len(ids)), dim=1)  # c k
        # the probabilities of the candidates alone are kept, since those of all words would need much memory
        tried, places = places.unique(return_inverse=True)
        log_probs = torch.cat([self.log_probabilities(part).cpu()[:, ids[tried]] for part in parts])  # n w
        best, right = best_assignment(log_probs, places, scores, labels)
        found = ids[tried[best]].tolist()
        self.words = [words[each] for each in found]
        self.word_ids = [(each,) for each in found]
        self.settings = {**self.settings, "words": "+".join(self.words)}
        pairs = ", ".join(f"{name}: {word}" for name, word in zip(self.label_names, self.words, strict=True))
        self.remark = f"auto-words: {pairs}; with them {right} of {len(examples)} training sentences are right so far"

    def states_of(self, examples: Sequence[Example]) -> torch.Tensor:
        """The states at the answer slot: n D"""
        dataset, device = encode_for(self, self.tokenizer, examples), self.llama.tok_embeddings.weight.device
        states = torch.empty(len(examples), self.llama.config.dim, device=device)
        for batch in loader_of(dataset, self.llama.config, 16, device):
            states[batch["indices"]] = self.read(self.llama, batch["token_ids"].to(device), self.pad_id).float()
        return states

    def all_words(self) -> dict[int, str]:
        """The words of one token that can stand after a text, by their ids; no special and no byte tokens."""
        tokenizer, found = self.tokenizer, {}
        for number in range(tokenizer.n_words):
            piece = tokenizer.piece(number)
            word = piece[1:]
            if piece.startswith("\u2581") and word.isalpha() and list(tokenizer.encode_next(word)) == [number]:
                found[number] = word
        return found


def best_assignment(
    log_probs: torch.Tensor, places: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor
) -> tuple[list[int], int]:
    """The word of each class, and how many sentences are classified right by the likelier words.

    log_probs: n w, of the words that are tried. places, scores: c k, of the candidates of each class. labels: n.
    Raises `UserError` if the classes have not enough different candidates.
    """
    classes, candidates = places.shape
    best: tuple[int, float, list[int]] = (-1, 0.0, [])
    every = torch.cartesian_prod(*[torch.arange(candidates)] * classes)  # a c
    for part in every.split(AT_ONCE):
        words = places[torch.arange(classes), part]  # a c
        is_distinct = (words.sort().values.diff() != 0).all(-1)  # a
        words, sums = words[is_distinct], scores[torch.arange(classes), part][is_distinct].sum(-1)
        right = (log_probs[:, words].argmax(-1) == labels[:, None]).sum(0)  # a
        for row in (right >= best[0]).nonzero().flatten().tolist():
            best = max(best, (int(right[row]), float(sums[row]), words[row].tolist()), key=lambda each: each[:2])
    if not best[2]:
        raise UserError(f"candidates={candidates} are too few: the classes have the same words")
    return best[2], best[0]
