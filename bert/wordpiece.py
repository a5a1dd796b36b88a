"""WordPiece: a word as the longest pieces of a vocabulary, from left to right.

    WordPiece.from_file("vocab.txt").encode("unaffable")    [CLS] una ##ffa ##ble [SEP]

A piece that does not begin a word is written with ## in front. Both are of the code published with Devlin et al. 2019
(arXiv:1810.04805); the name and how pieces are chosen, of Schuster and Nakajima 2012 and Wu et al. 2016, section 4.1
(arXiv:1609.08144); Song et al. 2021 (arXiv:2012.15524) analyse longest match first. What a text is made of before that
is in `basic.py`. The result is that of transformers' `BertTokenizer`, special tokens in the text included: "[MASK]"
there is the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert.added import finders
from bert.basic import Word, normalized, words_of
from convert.directory import TOKENIZER_CONFIG, VOCABULARY, require_file
from utils import UserError, atomic_write, read_text, short_repr, warn

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUED = "##"
MOST_BYTES = 2**26  # of a vocabulary; those of known models have at most 3 MB
LONGEST_WORD = 100  # characters, 200 in the published code; a longer one is not cut up but unknown
CLOSING = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")  # written without a space before them
THEIR_NAMES = {  # of the tokenizer's settings in that file
    "lower_case": "do_lower_case",
    "strip_accents": "strip_accents",
    "spaces_chinese": "tokenize_chinese_chars",
    "splits_special": "split_special_tokens",
}


class Token(NamedTuple):
    """A token's id, and its place in the text: the first character, and the one after the last."""

    id: int
    start: int
    end: int


class Encoding(NamedTuple):
    """One text, or a pair of texts, as the input of a model. The three lists have one length.

    segment_ids: 0 for `[CLS] a [SEP]`, 1 for `b [SEP]`, one more where `WordPiece.first_segment` is 1. offsets: where
    each token stands in its own text, (0, 0) for the special tokens around.
    """

    ids: list[int]
    segment_ids: list[int]
    offsets: list[tuple[int, int]]


class WordPiece:
    """A tokenizer of a vocabulary: a list of pieces, whose places are their ids.

    lower_case: as the vocabulary was made, "uncased": lower case and, unless `strip_accents` says otherwise, no
    accents. spaces_chinese: each Chinese character is a word. An empty piece is never used, and of one that stands
    there twice the first place is not, as with other programs; that is said, naming `path`. Raises `UserError` where a
    special token is absent.

    added: tokens that a text holds as a whole, see `added.py`; one that is no piece gets the next id. splits_special:
    what is a special token's text in a text is text.
    first_segment: the number of the first segment in the model that reads the ids, see `BertConfig`.
    """

    first_segment = 0

    def __init__(
        self,
        pieces: Iterable[str],
        lower_case: bool = True,
        path: str = VOCABULARY,
        strip_accents: bool | None = None,
        spaces_chinese: bool = True,
        added: Sequence[dict[str, Any]] = (),
        splits_special: bool = False,
    ):
        self.pieces = list(pieces)
        self.lower_case, self.strip_accents, self.spaces_chinese = lower_case, strip_accents, spaces_chinese
        self.max_len: int | None = None  # the most tokens that a classifier is to read, special ones not counted
        self.ids = {piece: number for number, piece in enumerate(self.pieces) if piece}
        if vain := [number for number, piece in enumerate(self.pieces) if self.ids.get(piece) != number]:
            what = f"{short_repr(self.pieces[vain[0]])} stands there again" if self.pieces[vain[0]] else "it is empty"
            warn(f"{path}: {len(vain)} of {len(self.pieces)} lines are never used; line {vain[0] + 1}, because {what}")
        if absent := [token for token in SPECIAL if token not in self.ids]:
            raise UserError(f"{path} is no vocabulary of a BERT: it lacks {', '.join(absent)}")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self.ids[token] for token in SPECIAL)
        self.vocabulary_size, self.added, self.splits_special = len(self.pieces), list(added), splits_special
        self._piece_ids = dict(self.ids)  # what a word is made of: an added token is no part of one
        for text in (token["content"] for token in self.added):
            if self.ids.setdefault(text, len(self.pieces)) == len(self.pieces):
                self.pieces.append(text)
        tokens = {text: {"content": text, "special": True} for text in SPECIAL}
        tokens |= {token["content"]: token for token in self.added}
        self._special = {text for text, token in tokens.items() if token.get("special")}
        found = [token for text, token in tokens.items() if not (splits_special and text in self._special)]
        self._as_written, self._folded = finders(found, self.ids, self._normalized)

    @classmethod
    def from_file(cls, vocab_txt: str | os.PathLike, lower_case: bool = True, **more: bool) -> WordPiece:
        """The tokenizer of a `vocab.txt`: UTF-8, one piece a line."""
        require_file(Path(vocab_txt), MOST_BYTES)
        text = read_text(vocab_txt)
        return cls(text.removesuffix("\n").split("\n") if text else (), lower_case, str(vocab_txt), **more)

    def save(self, folder: str | os.PathLike) -> None:
        """Write `vocab.txt`, and beside it the settings from which transformers makes the same tokenizer."""
        # the vocabulary last: where it stands alone, it is taken for an uncased one
        with atomic_write(Path(folder, TOKENIZER_CONFIG)) as file:
            told = {THEIR_NAMES[name]: value for name, value in self._told.items() if name in THEIR_NAMES}
            if self.added:
                told["added_tokens_decoder"] = {str(self.ids[token["content"]]): token for token in self.added}
            file.write(json.dumps({"tokenizer_class": "BertTokenizer", **told}) + "\n")
        with atomic_write(Path(folder, VOCABULARY)) as file:
            file.writelines(f"{piece}\n" for piece in self.pieces[: self.vocabulary_size])

    def to_bytes(self) -> bytes:
        """The vocabulary and how it was made, which `from_bytes` reads."""
        return json.dumps({**self._told, "pieces": self.pieces[: self.vocabulary_size]}).encode()

    @classmethod
    def from_bytes(cls, saved: bytes, path: str = VOCABULARY) -> WordPiece:
        """The inverse of `to_bytes`. path: the name of the vocabulary in errors."""
        return cls(path=path, **json.loads(saved))

    @property
    def _told(self) -> dict[str, Any]:
        """The case, and the settings that differ from the defaults."""
        told: dict[str, Any] = {"lower_case": self.lower_case}
        if self.added:
            told["added"] = self.added
        if self.splits_special:
            told["splits_special"] = True
        if self.strip_accents is not None:
            told["strip_accents"] = self.strip_accents
        return told if self.spaces_chinese else {**told, "spaces_chinese": False}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """`[CLS] text [SEP]`, of at most `max_len` tokens."""
        return self.encode_pair(text, max_len=max_len).ids

    def encode_pair(self, a: str, b: str | None = None, max_len: int | None = None) -> Encoding:
        """`[CLS] a [SEP]` or, unless b is None or empty, `[CLS] a [SEP] b [SEP]`.

        max_len: the most tokens, special ones included. Of a pair, the longer text is cut first, then both alike.
        Raises `ValueError` for a `max_len` that has no room for the special tokens.
        """
        texts = [self.tokenize(text) for text in ((a, b) if b else (a,))]
        if max_len is not None:
            room = max_len - 1 - len(texts)
            if room < 0:
                raise ValueError(f"max_len={max_len} has no room for {1 + len(texts)} special tokens")
            texts = [tokens[:length] for tokens, length in zip(texts, shares([*map(len, texts)], room), strict=True)]
        ids, segment_ids, offsets = [self.cls_id], [self.first_segment], [(0, 0)]
        for segment, tokens in enumerate(texts, self.first_segment):
            ids += [token.id for token in tokens] + [self.sep_id]
            segment_ids += [segment] * (len(tokens) + 1)
            offsets += [(token.start, token.end) for token in tokens] + [(0, 0)]
        return Encoding(ids, segment_ids, offsets)

    def tokenize(self, text: str) -> list[Token]:
        """The tokens of a text, without [CLS] and [SEP] around it."""
        tokens: list[Token] = []
        for part, id, start in self._as_written.parts(text):
            if id is not None:
                tokens.append(Token(id, start, start + len(part)))
                continue
            characters = [*self._normalized(part)]
            for piece, id, first in self._folded.parts("".join(char for char, _ in characters)):
                inside = [(char, start + place) for char, place in characters[first : first + len(piece)]]
                if id is not None:
                    tokens.append(Token(id, inside[0][1], inside[-1][1] + 1))
                else:
                    tokens += [token for word in words_of(inside) for token in self._pieces_of(word)]
        return tokens

    def _normalized(self, text: str) -> Iterator[tuple[str, int]]:
        return normalized(text, self.lower_case, self.strip_accents, self.spaces_chinese)

    def _pieces_of(self, word: Word) -> Iterator[Token]:
        """Greedy: the longest piece that the word begins with, then the longest that its rest begins with."""
        found, start, length = [], 0, len(word.text)
        while start < length <= LONGEST_WORD:
            for end in range(length, start, -1):
                id = self._piece_ids.get(CONTINUED * (start > 0) + word.text[start:end])
                if id is not None:
                    break
            else:
                break  # no piece: then the whole word is unknown
            found.append(Token(id, *word.span(start, end)))
            start = end
        return iter(found if start == length else [Token(self.unk_id, *word.span(0, length))])

    def decode(self, ids: Iterable[int]) -> str:
        """The pieces as a text; special tokens become nothing. Case, accents and spaces are not what they were.

        Raises `ValueError` for an id that is not in the vocabulary.
        """
        text = ""
        for id in ids:
            if not 0 <= id < len(self.pieces):
                raise ValueError(f"there is no token {short_repr(id)} in a vocabulary of {len(self.pieces)}")
            piece = self.pieces[id]
            if piece in self._special:
                continue
            if text and piece.startswith(CONTINUED):
                text += piece.removeprefix(CONTINUED)
            else:
                text += piece if not text or piece.startswith(CLOSING) else f" {piece}"
        return text


def shares(lengths: list[int], room: int) -> list[int]:
    """How many tokens of one or two texts fit into `room`. Cuts the longer text first; two long ones get half each."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(min(lengths), room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]
