"""What BERT reads and what is asked of it: embeddings, masked tokens, next sentences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import nn

from bert.basic import words
from bert.config import BertConfig
from bert.examples import Noise, PretrainingData, sentences_of
from bert.model import Embeddings
from bert.pairs import Document
from bert.wordpiece import SPECIAL, WordPiece
from engine.tasks import NO_TARGET
from explore.svg import CELL, FAINT, GREEN, GREY, MARGIN, ORANGE, PURPLE, SEGMENTS, WHITE, WIDTH, Drawing, columns

SENTENCE = "The ferry leaves the harbour at dawn and comes back with the evening tide full of salt and gulls"
LAMP = """The lamp was lit at dusk.
A ship saw it from far away.
Her captain turned to the north.
By midnight the wind had dropped.
At dawn the keeper went to bed.
Nobody had called that night."""
BREAD = """Flour and water stand overnight.
In the morning salt is added.
The dough rests once more.
Then the oven must be hot."""


def tokenizer_of(*texts: str) -> WordPiece:
    """A vocabulary of the words of texts."""
    found = [word.text for text in texts for word in words(text, lower_case=True)]
    return WordPiece([*SPECIAL, *dict.fromkeys(found)])


# ------------------------------------------------------------------------------------------------- embeddings


def embeddings() -> Drawing:
    """The sum of three embeddings."""
    tokenizer = WordPiece([*SPECIAL, *"the tide is ris ##ing it covers sand".split()])
    ids, segments, _ = tokenizer.encode_pair("The tide is rising", "It covers the sand")
    with torch.device("meta"):
        parts = dict(Embeddings(BertConfig()).named_children())
    tables = {name: part for name, part in parts.items() if isinstance(part, nn.Embedding)}
    numbers = {"tokens": ids, "positions": range(len(ids)), "segments": segments}
    drawing = Drawing(
        "The sum of three embeddings",
        f"Two sentences as {len(ids)} tokens. The vector of each token is the sum of a row of each of these tables: "
        f"{', '.join(tables)}. Then follow {' and '.join(name for name in parts if name not in tables)}.",
    )
    pieces = [tokenizer.pieces[id] for id in ids]
    places = [*columns(pieces)]
    drawing.text(MARGIN, 39, "WordPiece", bold=True)
    for (x, width), piece, segment in zip(places, pieces, segments, strict=True):
        drawing.box(x, 20, width, CELL, piece, paint=SEGMENTS[segment])
    y = 64.0
    for number, (name, table) in enumerate(tables.items()):
        drawing.text(MARGIN, y + 14, f"{'+ ' if number else ''}{name}", mono=True, bold=True)
        drawing.text(MARGIN, y + 32, f"{table.num_embeddings} x {table.embedding_dim}", colour=FAINT, size=12)
        for (x, width), row, segment in zip(places, numbers[name], segments, strict=True):
            drawing.box(x, y + 4, width, CELL, str(row), paint=SEGMENTS[segment] if name == "segments" else GREY)
        y += 48
    left, right = places[0][0], sum(places[-1])
    for name, part in parts.items():
        if name not in tables:
            drawing.text(MARGIN, y + 19, name, mono=True, bold=True)
            drawing.box(left, y, right - left, CELL, type(part).__name__, paint=GREEN)
            y += CELL + 6
    drawing.text(left, y + 18, "The numbers are rows of the tables; these are as large as in BERT base.", colour=FAINT)
    return drawing


# ---------------------------------------------------------------------------------------------- masked tokens


class Draw(NamedTuple):
    """A draw of the noise: its seed, what is read, and what is asked for."""

    seed: int
    noisy: list[int]
    targets: list[int]


def draw_of_all_kinds(noise: Noise, ids: list[int], tokenizer: WordPiece) -> Draw:
    """Of the first seed with which one token is masked, one replaced by a word and one left."""
    for seed in itertools.count():
        draw = Draw(seed, *noise.apply(ids, tokenizer, Random(seed)))
        asked = [(old, new) for old, new, target in zip(ids, *draw[1:], strict=True) if target != NO_TARGET]
        others = [new for old, new in asked if new not in (old, tokenizer.mask_id)]
        is_any = any(old == new for old, new in asked), any(new == tokenizer.mask_id for _, new in asked), bool(others)
        if all(is_any) and all(tokenizer.pieces[id] not in SPECIAL for id in others):
            return draw


def noise_rule() -> Drawing:
    """Which tokens are asked for, and what stands there instead."""
    noise, tokenizer = Noise(), tokenizer_of(SENTENCE)
    ids = tokenizer.encode(SENTENCE)
    seed, noisy, targets = draw_of_all_kinds(noise, ids, tokenizer)
    asked, count = sum(target != NO_TARGET for target in targets), len(ids) - 2
    drawing = Drawing(
        "Masked tokens",
        f"A sentence of {count} tokens, of which {asked} are to be predicted: one became [MASK], one another token, "
        "and one stayed what it was.",
    )
    drawing.text(
        MARGIN, 36, f"{noise.share:.0%} of the tokens are to be predicted, here {asked} of {count}:", bold=True
    )
    kept = 1 - noise.mask - noise.random
    rule = ((ORANGE, noise.mask, "become [MASK]"), (PURPLE, noise.random, "another token"), (GREEN, kept, "stay"))
    for number, (paint, share, fate) in enumerate(rule):
        drawing.box(MARGIN + number * 244, 50, 232, CELL, f"{share:.0%} {fate}", paint=paint, mono=False)
    old, new = ([tokenizer.pieces[id] for id in row] for row in (ids, noisy))
    answers = ["" if target == NO_TARGET else tokenizer.pieces[target] for target in targets]
    half = len(ids) // 2
    for part, y in ((slice(half), 100.0), (slice(half, None), 220.0)):
        for number, label in enumerate(("text", "is read", "is asked for")):
            drawing.text(MARGIN, y + 19 + number * 32, label, bold=True)
        for (x, width), *cells in zip(columns(old[part], new[part]), old[part], new[part], answers[part], strict=True):
            paint = ORANGE if cells[1] == "[MASK]" else GREEN if cells[0] == cells[1] else PURPLE
            for number, cell in enumerate(cells):
                if cell:
                    drawing.box(x, y + number * 32, width, CELL, cell, paint=paint if cells[2] and number else WHITE)
    drawing.text(
        MARGIN, 340, f"Noise().apply(ids, tokenizer, Random({seed})), the first seed that shows all three", colour=FAINT
    )
    return drawing


# --------------------------------------------------------------------------------------------- next sentences


class Drawn(NamedTuple):
    """A pair: which sentences each segment has, as numbers of a document and in it, and the class it has for BERT."""

    a: list[tuple[int, int]]
    b: list[tuple[int, int]]
    target: int


def sentences_in(segment: list[int], documents: Sequence[Document]) -> list[tuple[int, int]]:
    """The sentences of a segment; none where it is not made of whole ones."""
    for number, document in enumerate(documents):
        for first, last in itertools.combinations(range(len(document) + 1), 2):
            if list(itertools.chain(*document[first:last])) == segment:
                return [(number, place) for place in range(first, last)]
    return []


def pairs_of_both_kinds(documents: Sequence[Document], tokenizer: WordPiece, length: int) -> tuple[int, list[Drawn]]:
    """What the first document gives with the first seed with which it gives both kinds, of whole sentences."""
    for seed in itertools.count():
        data = PretrainingData(documents, tokenizer, length, seed=seed)
        pairs = []
        for place, (a, b, _) in enumerate(data.pairs(0)):
            pairs.append(Drawn(sentences_in(a, documents), sentences_in(b, documents), data[0, place]["next"]))
        of_first = [pair for pair in pairs if not pair.a or pair.a[0][0] == 0]
        if len({pair.target for pair in of_first}) == 2 and all(pair.a and pair.b for pair in of_first):
            return seed, of_first


def next_sentence() -> Drawing:
    """How a document becomes pairs of segments."""
    texts, length = (LAMP, BREAD), 34
    tokenizer = tokenizer_of(*texts)
    documents = [*sentences_of(texts, tokenizer)]
    seed, pairs = pairs_of_both_kinds(documents, tokenizer, length)
    drawing = Drawing(
        "Next sentences",
        f"A document of {len(documents[0])} sentences gives {len(pairs)} pairs of segments. The second segment follows "
        "the first one, or it is of another document; then what it replaced begins the next pair.",
    )
    for number, (text, paint) in enumerate(zip(texts, SEGMENTS, strict=True)):
        x = MARGIN + number * WIDTH / 2
        drawing.text(x, 36, f"Document {number + 1}", bold=True)
        for place, sentence in enumerate(text.split("\n")):
            drawing.text(x, 62 + 24 * place, f"{number + 1}.{place + 1}", mono=True, bold=True, colour=paint.stroke)
            drawing.text(x + 36, 62 + 24 * place, sentence)
    y = 204.0
    drawing.text(
        MARGIN, y + 14, f"The pairs of document 1, of at most {length} tokens, and the class of each", bold=True
    )
    for pair in pairs:
        y += 36
        _draw_pair(drawing, y, pair)
    drawing.text(MARGIN, y + 54, "What another document's sentences have replaced begins the next pair.")
    drawing.text(MARGIN, y + 78, f"PretrainingData(documents, tokenizer, {length}, seed={seed}).pairs(0)", colour=FAINT)
    return drawing


def _draw_pair(drawing: Drawing, y: float, pair: Drawn) -> None:
    cells = [("[CLS]", WHITE)]
    for segment in (pair.a, pair.b):
        cells += [(f"{number + 1}.{place + 1}", SEGMENTS[number]) for number, place in segment] + [("[SEP]", WHITE)]
    for (x, width), (cell, paint) in zip(columns([cell for cell, _ in cells], left=MARGIN), cells, strict=True):
        drawing.box(x, y, width, CELL, cell, paint=paint)
    says = "another document" if pair.target else "B follows A"
    drawing.text(WIDTH - 240, y + 19, f"class {pair.target}: {says}")
