"""Basic tokenisation: a text as the words that WordPiece then cuts up. What is done, in this order:

    cleaning      control characters, U+0000 and U+FFFD go; every kind of white space becomes a space
    CJK           a space is put around each Chinese character: Chinese is written without spaces
    accents       (if lower-cased) letters are taken apart, and the marks above and below them dropped: café -> cafe
    lower case    (if lower-cased) each letter by itself
    words         split at spaces; each punctuation mark is a word of its own: don't -> don ' t

The rules are those of the code published with Devlin et al. 2019 (arXiv:1810.04805), in the variant of the tokenizers
library. That code keeps characters for private use, writes a sigma at a word's end as one, has another block of Chinese
characters (U+2B820 to U+2B91F), and asks the Unicode of its Python (see `categories.py`). Each character that is kept
knows the place in the text that it comes from.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from bert.categories import category

CJK = (  # blocks of Chinese characters; the third of the extensions begins where the library lets it begin
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
ASCII_SYMBOLS = frozenset("$+<=>^`|~")  # which Unicode does not call punctuation
REMEMBERED = 1 << 16  # characters: more than most texts have


class Word(NamedTuple):
    """A word, normalised, and for each of its characters the place in the text."""

    text: str
    places: tuple[int, ...]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The first place and the place after the last one, in the text, of its characters `start` to `end`."""
        return self.places[start], self.places[end - 1] + 1


def words(
    text: str, lower_case: bool, strip_accents: bool | None = None, spaces_chinese: bool = True
) -> Iterator[Word]:
    """The words of a text, in order. strip_accents: None means the value of `lower_case`."""
    return words_of(normalized(text, lower_case, strip_accents, spaces_chinese))


def normalized(
    text: str, lower_case: bool, strip_accents: bool | None = None, spaces_chinese: bool = True
) -> Iterator[tuple[str, int]]:
    """The characters of a text, normalised, each with its place in the text."""
    characters = clean(text, spaces_chinese)
    if lower_case if strip_accents is None else strip_accents:
        characters = without_accents(characters)
    return lowered(characters) if lower_case else characters


def words_of(characters: Iterable[tuple[str, int]]) -> Iterator[Word]:
    """The words that normalised characters are."""
    word: list[tuple[str, int]] = []
    for char, place in characters:
        if char != " " and not is_punctuation(char):
            word.append((char, place))
            continue
        if word:
            yield _word(word)
            word = []
        if char != " ":
            yield Word(char, (place,))
    if word:
        yield _word(word)


def _word(characters: list[tuple[str, int]]) -> Word:
    chars, places = zip(*characters, strict=True)
    return Word("".join(chars), places)


# ---------------------------------------------------------------- steps: from characters with places to the same


def clean(text: str, spaces_chinese: bool) -> Iterator[tuple[str, int]]:
    """The text's characters, cleaned. spaces_chinese: put spaces around each Chinese character."""
    for place, char in enumerate(text):
        for kept in cleaned(char, spaces_chinese):
            yield kept, place


def without_accents(characters: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Letters without their marks, by canonical decomposition (NFD)."""
    characters = list(characters)
    places = (place for _, place in characters)
    place = 0
    for part, begins in in_canonical_order(char for char, _ in characters):
        if begins:  # where marks change their order, places do not: as in the library
            place = next(places)
        if not is_accent(part):
            yield part, place


def in_canonical_order(characters: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The parts of each character (NFD), and which of them is the first. Sorts the marks of one letter by class."""

    def combining_class(part: tuple[str, bool]) -> int:
        return unicodedata.combining(part[0])  # 0 of a letter

    parts = ((part, number == 0) for char in characters for number, part in enumerate(decomposed(char)))
    for _, neighbours in groupby(parts, key=lambda part: combining_class(part) > 0):
        yield from sorted(neighbours, key=combining_class)


def lowered(characters: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Lower case, letter by letter: a sigma at a word's end is one like any other."""
    for char, place in characters:
        for small in char.lower():
            yield small, place


# ------------------------------------------------------------------------------------------ kinds of characters


@lru_cache(REMEMBERED)
def cleaned(char: str, spaces_chinese: bool) -> str:
    """The replacement of a character: nothing, a space, itself, or itself between spaces."""
    if char in " \t\n\r" or category(char) in ("Zs", "Zl", "Zp"):
        return " "
    if char in "\0\ufffd" or category(char) in ("Cc", "Cf", "Co", "Cs"):
        return ""
    return f" {char} " if spaces_chinese and any(first <= ord(char) <= last for first, last in CJK) else char


@lru_cache(REMEMBERED)
def decomposed(char: str) -> str:
    """The canonical decomposition (NFD) of a character: a letter and its marks."""
    return unicodedata.normalize("NFD", char)


@lru_cache(REMEMBERED)
def is_accent(char: str) -> bool:
    """A mark that takes no space of its own."""
    return category(char) == "Mn"


@lru_cache(REMEMBERED)
def is_punctuation(char: str) -> bool:
    return char in ASCII_SYMBOLS or category(char).startswith("P")
