"""The scores of a SentencePiece vocabulary as an ordered list of pairs, which a `tokenizer.json` has in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise


def merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that make another one, the best first. scores: of pieces, in the order of their ids.

    SentencePiece merges whatever pair makes the piece with the highest score; a list of pairs says the same in order.
    """
    places = {piece: place for place, piece in enumerate(scores)}
    found = []
    for piece, score in scores.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [(left, right) for left, right in cuts if left in places and right in places]
        found += [(-score, places[left], places[right], (left, right)) for left, right in pairs]
    return [pair for *_, pair in sorted(found)]


def equal_scores(scores: Mapping[str, float], pairs: Iterable[Sequence[str]]) -> list[str]:
    """Two pieces of the same score that pairs are merged to, if there are such and a text may be cut otherwise by it.

    SentencePiece and llama.cpp merge the one that stands first in a text; in a list of pairs one always comes first.
    """
    pairs, same = [tuple(pair) for pair in pairs], {}
    for pair in pairs:
        same.setdefault(scores["".join(pair)], {}).setdefault("".join(pair))
    harmful = (list(tied) for tied in same.values() if len(tied) > 1 and not _cut_alike(tied, pairs, scores))
    return next(harmful, [])[:2]


def _cut_alike(tied: Iterable[str], pairs: list[tuple[str, str]], scores: Mapping[str, float]) -> bool:
    """Whether the order of pieces of one score changes no text, as of Llama's, which are two to sixteen spaces.

    They must be one letter again and again, and no part of what is merged before them. Then each run of that letter
    is cut by itself, and runs of up to four times the longest piece are tried.
    """
    tied = set(tied)
    letters, score = set("".join(tied)), scores[next(iter(tied))]
    if len(letters) > 1 or any(scores["".join(pair)] > score and tied.intersection(pair) for pair in pairs):
        return False
    ranks = {pair: rank for rank, pair in enumerate(pairs) if "".join(pair) in tied}
    runs = (min(letters) * length for length in range(2, 4 * max(map(len, tied)) + 1))
    return all(_merged(run, ranks) == _merged(run, dict.fromkeys(ranks, 0)) for run in runs)


def _merged(text: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Pieces of a text: the pair of the lowest rank is merged first, of equal ones that which stands first."""
    parts = list(text)
    while found := [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, at = min(found)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts
