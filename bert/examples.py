"""What BERT is pre-trained on: pairs of segments with masked tokens (Devlin et al. 2019, section 3.1 and appendix A.2).

    [CLS] the man went to the [MASK] [SEP] he bought a gallon of milk [SEP]     IsNext

Everything here is drawn from a seed, the number of a pass and the place of an example, so that a run which was stopped
goes on with the examples that it would have seen.

Shapes: b batch   s position
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bert.pairs import Document, SegmentPair, pairs_of
from bert.wordpiece import CONTINUED, WordPiece
from engine.tasks import NO_TARGET, padded
from engine.text.runs import Passes
from utils import UserError


@dataclass(frozen=True)
class Noise:
    """How tokens are masked (section 3.1, task 1).

    share: of the tokens that are to be predicted. mask, random: of these, how many become [MASK], and how many another
    token; the rest stays. whole_words: all pieces of a word are chosen together, as in the authors' later models.

    The share is of the text's tokens. In the code published with the paper it is of all tokens, [CLS] and [SEP]
    included, so a row of 64 has one target more; and `max_predictions_per_seq` (20) limits the targets of a row.
    """

    share: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False

    def apply(self, ids: list[int], tokenizer: WordPiece, drawing: Random) -> tuple[list[int], list[int]]:
        """The noisy ids, and the targets: the original ids at masked places, `NO_TARGET` at all others."""
        noisy, targets = [*ids], [NO_TARGET] * len(ids)
        for place in self._chosen(ids, tokenizer, drawing):
            targets[place] = ids[place]
            chance = drawing.random()
            if chance < self.mask:
                noisy[place] = tokenizer.mask_id
            elif chance < self.mask + self.random:
                noisy[place] = drawing.randrange(len(tokenizer))
        return noisy, targets

    def _chosen(self, ids: list[int], tokenizer: WordPiece, drawing: Random) -> list[int]:
        """The places to predict, at least one. Passes over a word that would exceed the share."""
        units = self._units(ids, tokenizer)
        wanted = max(1, round(self.share * sum(map(len, units))))
        drawing.shuffle(units)
        chosen: list[int] = []
        for unit in units:
            if len(chosen) + len(unit) <= wanted:
                chosen += unit
        return chosen or units[0][:1]

    def _units(self, ids: list[int], tokenizer: WordPiece) -> list[list[int]]:
        """Groups of places that are chosen together: single tokens, or all tokens of a word; no special tokens."""
        units: list[list[int]] = []
        for place, token in enumerate(ids):
            if token in (tokenizer.cls_id, tokenizer.sep_id):
                continue
            if self.whole_words and units and tokenizer.pieces[token].startswith(CONTINUED):
                units[-1].append(place)
            else:
                units.append([place])
        return units


# ---------------------------------------------------------------------------------------------------- batches


@dataclass
class PretrainingData(Dataset):
    """Examples by the number of the pass and the place in it. Raises `UserError` if the documents give no example.

    is_dynamic: pairs and masks are drawn anew in every pass (Liu et al. 2019, "RoBERTa", arXiv:1907.11692, section
    4.1); else those of the first pass are seen again and again.
    """

    documents: Sequence[Document]
    tokenizer: WordPiece
    length: int
    noise: Noise = Noise()
    has_next: bool = True
    is_dynamic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._made: tuple[int, list[SegmentPair]] = (-1, [])
        least = 5 if self.has_next else 3
        if self.length < least:
            raise UserError(f"a row of {self.length} tokens has no room for text; it needs {least}")
        if self.has_next and len(self.documents) < 2:
            raise UserError("random next sentences are of another document, and there is only one")
        if not self.count:
            raise UserError("no document of the text has two sentences, so none follows another")

    @cached_property
    def count(self) -> int:
        """The number of examples in every pass: that of the first one."""
        return len(self.pairs(0))

    def __len__(self) -> int:
        return self.count

    def pairs(self, number: int) -> list[SegmentPair]:
        """The pairs of a pass. Keeps those of the last pass that was read."""
        if self._made[0] != number:
            drawing = Random(f"pairs {self.seed} {number}")
            self._made = number, pairs_of(self.documents, self.length, self.has_next, drawing)
        return self._made[1]

    def __getitem__(self, key: tuple[int, int]) -> dict[str, list[int] | int]:
        number, place = key if self.is_dynamic else (0, key[1])
        pairs = self.pairs(number)
        a, b, is_next = pairs[place * len(pairs) // self.count]  # a longer pass skips some pairs, evenly
        special = self.tokenizer
        ids = [special.cls_id, *a, special.sep_id, *([*b, special.sep_id] if self.has_next else ())]
        first = special.first_segment
        segment_ids = [first] * (len(a) + 2) + [first + 1] * (len(ids) - len(a) - 2)
        noisy, targets = self.noise.apply(ids, special, Random(f"noise {self.seed} {number} {place}"))
        return {"token_ids": noisy, "segment_ids": segment_ids, "targets": targets, "next": 0 if is_next else 1}

    def collate_fn(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """token_ids, segment_ids, targets, is_real: b s; weights: b s, 1 / the number of targets at each; next: b."""
        lengths = torch.tensor([len(example["token_ids"]) for example in examples])
        fill = {"token_ids": self.tokenizer.pad_id, "segment_ids": 0, "targets": NO_TARGET}
        batch = {name: padded([example[name] for example in examples], value) for name, value in fill.items()}
        batch["is_real"] = torch.arange(int(lengths.max())) < lengths[:, None]  # a random token may be [PAD] too
        is_asked = batch["targets"] != NO_TARGET
        batch["weights"] = is_asked / is_asked.sum()
        if self.has_next:
            batch["next"] = torch.tensor([example["next"] for example in examples])
        return batch

    def training_batches(self, batch_size: int, steps: int) -> DataLoader:
        """An epoch of so many batches, pass after pass over all examples."""
        batches = NumberedPasses(self.count, batch_size, steps, self.seed)
        return DataLoader(self, batch_sampler=batches, collate_fn=self.collate_fn)

    def batches(self, batch_size: int) -> DataLoader:
        """Every example of the first pass once, in the order of the text."""
        keys = [(0, place) for place in range(self.count)]
        each = [keys[first : first + batch_size] for first in range(0, len(keys), batch_size)]
        return DataLoader(self, batch_sampler=each, collate_fn=self.collate_fn)


class NumberedPasses(Passes):
    """`Passes` whose places come with the number of their pass."""

    def _drawn(self, place: int) -> tuple[int, int]:
        return place // self.windows, super()._drawn(place)


def sentences_of(documents: Sequence[str], tokenizer: WordPiece) -> Iterator[Document]:
    """The token ids of documents that have a sentence in each line.

    Leaves out sentences without tokens. Leaves out special tokens that the text spells out, as "[SEP]": they would end
    a segment, or stand for a token that no target names.
    """
    special = {tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id}
    for document in documents:
        lines = map(tokenizer.tokenize, document.split("\n"))
        sentences = [[token.id for token in line if token.id not in special] for line in lines]
        if kept := [sentence for sentence in sentences if sentence]:
            yield kept
