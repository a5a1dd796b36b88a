"""Documents as rows: pairs of segments, of which the second follows the first or does not (Devlin et al. 2019, section
3.1, task 2), or whole sentences for models without that task. No PyTorch.

The code published with the paper (`create_pretraining_data.py`) makes pairs otherwise in four points:

    short pairs         it draws once for each document and pass, so that all pairs of a document are short or none is;
                        a short length says where a stretch ends, and a pair may still fill the row
    a single sentence   that is left of a document, or fills a row, gets a random second segment; so more than half of
                        the pairs do not follow
    a random segment    may be of the same document, after ten tries to find another
    what is too long    each token is taken from the beginning or from the end of the longer segment, by chance
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from bert.wordpiece import shares

SHORT_PAIRS = 0.1  # the share of rows that are made shorter on purpose: fine-tuning has short texts too

Document = list[list[int]]  # the token ids of each of its sentences


class SegmentPair(NamedTuple):
    """Two segments, and whether the second one follows the first. Without a second one it is a text of its own."""

    a: list[int]
    b: list[int]
    is_next: bool


def pairs_of(documents: Sequence[Document], length: int, has_next: bool, drawing: Random) -> list[SegmentPair]:
    """All documents, as pairs of at most `length` tokens, special ones included.

    A document is cut into stretches of whole sentences that fill a row; a stretch is divided between two sentences,
    and with probability 1/2 its second part is replaced by a stretch of another document; what was replaced begins the
    next pair. A single sentence that is left of a document makes none. What does not fit is left out. has_next: False
    for rows without a second segment, for models without next sentences: as many whole sentences as fit (Liu et al.
    2019, section 4.2, "DOC-SENTENCES", which has no rows that are short on purpose); one that is too long goes on in
    the next row.
    """
    if not has_next:
        return [SegmentPair(row, [], True) for document in documents for row in _rows_of(document, length, drawing)]
    pairs = []
    for number, document in enumerate(documents):
        first, last = 0, len(document)
        while first < last:
            room = _room(length, 3, drawing)
            end = _end_of(document, first, room)
            if end - first < 2:  # nothing can follow it here
                end = first + 2
                if end > last:
                    break
            middle = drawing.randrange(first + 1, end)
            a, is_next = document[first:middle], drawing.random() < 0.5
            b = document[middle:end]
            if not is_next:
                b = _elsewhere(documents, number, room - sum(map(len, a)), drawing)
            pairs.append(SegmentPair(*_cut(_joined(a), _joined(b), room), is_next))
            first = end if is_next else middle
    return pairs


def _rows_of(document: Document, length: int, drawing: Random) -> Iterator[list[int]]:
    row, room = [], _room(length, 2, drawing)
    for sentence in document:
        if row and len(row) + len(sentence) > room:
            yield row
            row, room = [], _room(length, 2, drawing)
        row = row + sentence
        while len(row) > room:
            yield row[:room]
            row, room = row[room:], _room(length, 2, drawing)
    if row:
        yield row


def _room(length: int, special: int, drawing: Random) -> int:
    """How many tokens of text a row is to have. special: [CLS], and the [SEP] of each segment."""
    room = length - special
    return drawing.randint(min(2, room), room) if drawing.random() < SHORT_PAIRS else room


def _end_of(document: Document, first: int, room: int) -> int:
    """Where a stretch ends that begins at a sentence and fills the room, perhaps more than that."""
    size, end = 0, first
    while end < len(document) and size < room:
        size += len(document[end])
        end += 1
    return end


def _elsewhere(documents: Sequence[Document], number: int, room: int, drawing: Random) -> Document:
    """A stretch of another document than that of this number."""
    other = drawing.randrange(len(documents) - 1)
    document = documents[other + (other >= number)]
    first = drawing.randrange(len(document))
    return document[first : max(first + 1, _end_of(document, first, room))]


def _joined(sentences: Sequence[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _cut(a: list[int], b: list[int], room: int) -> tuple[list[int], list[int]]:
    """Two segments that fit. Cuts a at its beginning, and b at its end, so that the rest of a still meets b."""
    before, after = shares([len(a), len(b)], room)
    return a[len(a) - before :], b[:after]
