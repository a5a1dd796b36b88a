"""SST for the lines of epochs: the real sentences if their files are here, else random ones of the same lengths."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import SEED
from classifier import PAD_ID
from engine.data import Example, create_data
from tokenizer import TOKENIZER_MODEL, Tokenizer
from utils import ROOT

# Tokens of an SST sentence, bos included, measured with Llama 2's tokenizer on the training data (the dev data's differ
# by one token at most below the longest): the length that a share of the sentences does not exceed.
SST_LENGTHS = ((0.0, 3), (0.01, 5), (0.05, 8), (0.1, 11), (0.25, 17), (0.5, 25), (0.75, 35), (0.9, 44), (0.95, 50))
SST_LENGTHS += ((0.99, 61), (1.0, 93))
SST_SIZES = {"train": 8544, "dev": 1101}
FIRST_WORD_ID = 259  # after the special ids and the bytes


class MeasuredSentences(NamedTuple):
    """train and dev examples, the tokenizer that encodes them, and where they come from."""

    train: Sequence[Example]
    dev: Sequence[Example]
    tokenizer: Tokenizer | IdTokenizer
    source: str


class IdTokenizer:
    """The replacement of a tokenizer for random data: a "sentence" is its token ids, written out."""

    bos_id, eos_id, pad_id = 1, 2, PAD_ID

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return [self.bos_id] * bos + [int(word) for word in s.split()] + [self.eos_id] * eos

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        return [self.encode(text, bos, eos) for text in texts]


def length_at(share: float) -> int:
    """The inverse of the lengths' distribution function, linear between the quantiles."""
    for (low, shorter), (high, longer) in zip(SST_LENGTHS, SST_LENGTHS[1:], strict=False):
        if share <= high:
            return round(shorter + (longer - shorter) * (share - low) / (high - low))
    return SST_LENGTHS[-1][1]


def random_sentences(vocab_size: int, sizes: dict[str, int]) -> MeasuredSentences:
    """Random ids of SST's lengths, five labels."""
    draw = random.Random(SEED)

    def example() -> Example:
        words = (str(draw.randrange(FIRST_WORD_ID, vocab_size)) for _ in range(length_at(draw.random()) - 1))
        return Example(" ".join(words), draw.randrange(5))

    train, dev = ([example() for _ in range(sizes[split])] for split in ("train", "dev"))
    return MeasuredSentences(
        train, dev, IdTokenizer(), "random token ids with SST's lengths; tokenising them costs little"
    )


def find_tokenizers(vocab_size: int) -> list[Path]:
    """Each `tokenizer.model` of this many pieces, in $MINLLAMA_ASSETS and beside this code."""
    folders = [Path(folder) for folder in (os.environ.get("MINLLAMA_ASSETS"), ROOT) if folder]
    paths = [folder / TOKENIZER_MODEL for folder in folders if (folder / TOKENIZER_MODEL).is_file()]
    return [path for path in paths if Tokenizer(tokenizer_model=path).n_words == vocab_size]


def load_sentences(vocab_size: int) -> MeasuredSentences:
    """SST with a tokenizer of `vocab_size` pieces, if both lie in one folder; else random sentences."""
    for path in find_tokenizers(vocab_size):
        train, dev = (path.parent / f"data/sst-{split}.txt" for split in ("train", "dev"))
        if train.is_file() and dev.is_file():
            tokenizer = Tokenizer(tokenizer_model=path)
            return MeasuredSentences(create_data(train), create_data(dev), tokenizer, "SST with Llama's tokenizer")
    return random_sentences(vocab_size, SST_SIZES)
