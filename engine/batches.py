"""Texts as batches of token ids: labelled sentences, padded and perhaps grouped by length, and windows of a text.

Shapes: b batch, s position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.data import Example
from tokenizer import Tokenizer
from utils import UserError


class Sentences(Dataset):
    """Labelled sentences with their token ids, encoded once.

    sentences: the texts for the output file. is_too_long: for each sentence, whether it has more tokens than fit.
    """

    labels: list[int]
    sentences: list[str]
    token_ids: list[list[int]]
    is_too_long: list[bool]
    pad_id: int

    @property
    def too_long(self) -> int:
        """The number of sentences with more tokens than fit into the model."""
        return sum(self.is_too_long)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[int], int, str, int]:
        return self.token_ids[index], self.labels[index], self.sentences[index], index

    def collate_fn(self, items: list[tuple[list[int], int, str, int]]) -> dict[str, Any]:
        """A batch, right-padded to its longest row: token_ids b s, labels b, sents, and indices in the data set."""
        token_ids, labels, sentences, indices = zip(*items, strict=True)
        longest = max(map(len, token_ids))
        padded = [ids + [self.pad_id] * (longest - len(ids)) for ids in token_ids]
        return {
            "token_ids": torch.tensor(padded),
            "labels": torch.tensor(labels),
            "sents": list(sentences),
            "indices": list(indices),
        }

    def loader(
        self, batch_size: int, *, shuffle: bool = False, bucket: bool = False, pin_memory: bool = False
    ) -> DataLoader:
        """Batches in file order, or in an order drawn from PyTorch's global random generator.

        bucket: put sentences of similar length into one batch, so that there is little padding; for models whose
        predictions do not depend on the batch. pin_memory: CUDA copies from such memory while the program goes on.
        """
        if bucket:
            batches = LengthBuckets([len(ids) for ids in self.token_ids], batch_size, shuffle)
            return DataLoader(self, batch_sampler=batches, collate_fn=self.collate_fn, pin_memory=pin_memory)
        return DataLoader(self, batch_size, shuffle, collate_fn=self.collate_fn, pin_memory=pin_memory)


class LengthBuckets(Sampler[list[int]]):
    """Batches of sentences of similar length.

    shuffle: divide the sentences at random into groups of `GROUP` batches, sort each group by length, cut it into
    batches, and draw the order of the batches: each epoch has other batches, with short and long sentences mixed over
    the epoch. Otherwise sort all sentences, the longest first: a batch that is too large for the memory fails at once.
    """

    GROUP = 50

    def __init__(self, lengths: Sequence[int], batch_size: int, shuffle: bool):
        self.lengths, self.batch_size, self.shuffle = lengths, batch_size, shuffle

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.lengths)
        order = torch.randperm(count).tolist() if self.shuffle else list(range(count))
        size = self.GROUP * self.batch_size if self.shuffle else count
        batches = []
        for start in range(0, count, size):
            group = sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            batches += [group[first : first + self.batch_size] for first in range(0, len(group), self.batch_size)]
        order = torch.randperm(len(batches)).tolist() if self.shuffle else range(len(batches))
        yield from (batches[position] for position in order)


class EncodingRules(NamedTuple):
    """How sentences become token ids: the text after each sentence, and the largest length in tokens.

    room: the number of positions to leave free at the end; if it is not None, the prompt suffix is never cut.
    follows: whether the model puts other text between bos and each sentence, so that a space is before the sentence.
    """

    prompt_suffix: str | None = None
    max_seq_len: int | None = None
    is_causal: bool = False
    room: int | None = None
    follows: bool = False


class LlamaDataset(Sentences):
    """Sentences as a Llama reads them: bos, sentence, prompt suffix; no eos.

    `sentences` include the suffix. The bidirectional reference uses a text longer than `max_seq_len` whole; for a
    causal model the sentence is cut, never the suffix. Raises `UserError` if the suffix leaves no room for a sentence.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, rules: EncodingRules | None = None):
        rules = rules or EncodingRules()
        self.labels = [example.label for example in examples]
        self.pad_id = tokenizer.pad_id
        suffix = "" if rules.prompt_suffix is None else f" {rules.prompt_suffix}"
        self.sentences = [example.sentence + suffix for example in examples]
        if rules.is_causal or rules.room is not None:
            suffix_ids = [] if rules.prompt_suffix is None else tokenizer.encode_next(rules.prompt_suffix)
            sentence_ids = _sentence_ids([example.sentence for example in examples], tokenizer, rules)
        else:
            sentence_ids = tokenizer.encode_batch(self.sentences, bos=True, eos=False)
            suffix_ids = []
        taken = len(suffix_ids) + (rules.room or 0)
        limit = float("inf") if rules.max_seq_len is None else rules.max_seq_len - taken
        if rules.is_causal and taken and limit < 2:
            raise UserError(f"the prompt takes {taken} tokens, which leaves no room in max_seq_len={rules.max_seq_len}")
        self.is_too_long = [len(ids) > limit for ids in sentence_ids]
        cut = int(limit) if rules.is_causal and rules.max_seq_len is not None else None
        self.token_ids = [ids[:cut] + suffix_ids for ids in sentence_ids]


def ids_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text: bos, or none."""
    framed, bare = (tokenizer.encode("a", bos=bos, eos=False) for bos in (True, False))
    return tuple(framed[: len(framed) - len(bare)])


def _sentence_ids(sentences: list[str], tokenizer: Tokenizer, rules: EncodingRules) -> list[list[int]]:
    """The token ids of each sentence without its suffix, behind what the tokenizer puts before a text."""
    if rules.follows:
        begin = list(ids_before(tokenizer))
        return [begin + tokenizer.encode_next(sentence)[: tokenizer.max_len] for sentence in sentences]
    encoded = tokenizer.encode_batch(sentences, bos=True, eos=False)
    if rules.prompt_suffix is None or all(sentences):
        return encoded
    # alone, an empty text gets bos from a tokenizer that puts none before others; here the suffix follows it
    begin = list(ids_before(tokenizer))
    return [ids if sentence else begin for ids, sentence in zip(encoded, sentences, strict=True)]


class TextWindows(Dataset):
    """A long text, cut into windows so that every token of the text is predicted once.

    Each window begins with bos and predicts the next `length` tokens of the text. The last window may be shorter; it
    is a batch by itself.
    """

    def __init__(self, token_ids: Sequence[int], bos_id: int, length: int):
        self.token_ids, self.bos_id, self.length = torch.tensor(token_ids), bos_id, length

    def __len__(self) -> int:
        return -(-len(self.token_ids) // self.length)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.token_ids[index * self.length : (index + 1) * self.length]

    def collate_fn(self, windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """token_ids and targets, b s each: the target of a position is the next token."""
        targets = torch.stack(windows)  # b s
        bos = torch.full_like(targets[:, :1], self.bos_id)
        return {"token_ids": torch.cat((bos, targets[:, :-1]), dim=1), "targets": targets}

    def loader(self, batch_size: int) -> DataLoader:
        """Batches in the order of the text."""
        whole = len(self.token_ids) // self.length
        batches = [list(range(whole)[first : first + batch_size]) for first in range(0, whole, batch_size)]
        batches += [[whole]] if whole < len(self) else []
        return DataLoader(self, batch_sampler=batches, collate_fn=self.collate_fn)
