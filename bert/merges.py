"""How pieces of words are learned, step by step: short, to be read, and slow on large texts.

A text is a number of words, each spelled as a row of parts, at first its letters. Again and again, of all pairs of
neighbours the one with the highest score becomes a part of its own:

    by_count        count(ab)                          BPE: Sennrich et al. 2016, arXiv:1508.07909, section 3.2
    by_likelihood   count(ab) / (count(a) count(b))    WordPiece: Schuster and Nakajima 2012

The second asks how much likelier the text becomes with the pair as one part, under a model that draws each part by
itself: at each place where the pair stands, by the factor p(ab) / (p(a) p(b)), which is the score times the number of
parts. What a spelling adds to the letters tells a piece inside of a word from one at its edge. `bert/tokenizers.md`
shows all of it on a small text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from bert.vocabulary import LEAST_SEEN
from bert.wordpiece import CONTINUED

WORD_END, SPACE_MARK = "</w>", "\u2581"

Parts = tuple[str, ...]  # of one word
Score = Callable[[int, int, int], float]


def by_count(pair: int, first: int, second: int) -> int:
    return pair


def by_likelihood(pair: int, first: int, second: int) -> float:
    return pair / (first * second)


def with_end(word: str) -> Parts:
    """As Sennrich et al. do it: a part of its own says where the word ends."""
    return (*word, WORD_END)


def with_space(word: str) -> Parts:
    """As SentencePiece does it: the space in front of a word is a character."""
    return (SPACE_MARK, *word)


def continued(word: str) -> Parts:
    """As WordPiece does it: every part but the first one of a word has ## in front."""
    return (word[0], *(f"{CONTINUED}{letter}" for letter in word[1:]))


def joined(first: str, second: str) -> str:
    return first + second.removeprefix(CONTINUED)


class MergeStep(NamedTuple):
    """A pair that became a piece, how often the pair and its two parts were seen before that, and its score."""

    first: str
    second: str
    piece: str
    seen: int
    parts_seen: tuple[int, int]
    score: float


def learn(words: Iterable[str], spell: Callable[[str], Parts], score: Score, steps: int) -> Iterator[MergeStep]:
    """The first steps, as long as there are pairs that occur at least `LEAST_SEEN` times.

    Of pairs with equal scores, that of the parts wins that are known the longest: at the beginning letters in the order
    of their code points, and behind them those with ##.
    """
    spelled = {spell(word): times for word, times in Counter(words).items()}
    parts, pairs = Counter(), Counter()
    for word, times in spelled.items():
        count(word, times, parts, pairs)
    known = {part: number for number, part in enumerate(sorted(parts, key=_begins_a_word_first))}
    for _ in range(steps):
        scores = {(a, b): score(n, parts[a], parts[b]) for (a, b), n in pairs.items() if n >= LEAST_SEEN}
        if not scores:
            return
        highest = max(scores.values())
        best = [pair for pair in scores if scores[pair] == highest]
        first, second = min(best, key=lambda pair: (known[pair[0]], known[pair[1]]))
        seen, parts_seen = pairs[first, second], (parts[first], parts[second])
        step = MergeStep(first, second, joined(first, second), seen, parts_seen, highest)
        yield step
        known.setdefault(step.piece, len(known))
        for word in [word for word in spelled if first in word]:
            times = spelled.pop(word)
            count(word, -times, parts, pairs)  # and once more, as it is now
            word = merge(word, step)
            spelled[word] = times
            count(word, times, parts, pairs)


def _begins_a_word_first(part: str) -> tuple[bool, str]:
    return part.startswith(CONTINUED), part


def count(word: Parts, times: int, parts: Counter[str], pairs: Counter[tuple[str, str]]) -> None:
    """Add a word that stands in a text so many times to the counts of its parts, and of its pairs of neighbours."""
    for part in word:
        parts[part] += times
    for pair in pairwise(word):
        pairs[pair] += times


def merge(word: Parts, step: MergeStep) -> Parts:
    """A word in which each pair of this step is one part, from left to right."""
    if step.first not in word:
        return word
    found: list[str] = []
    place = 0
    while place < len(word):
        is_pair = word[place : place + 2] == step[:2]
        found.append(step.piece if is_pair else word[place])
        place += 1 + is_pair
    return tuple(found)


def read(word: str, spell: Callable[[str], Parts], steps: Sequence[MergeStep]) -> Parts:
    """The pieces of a word in BPE: every merge of `steps`, in that order. (WordPiece looks for the longest piece.)"""
    parts = spell(word)
    for step in steps:
        parts = merge(parts, step)
    return parts
