"""What BERT computes: which states each head reads, and a layer beside one of the Llama."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

import bert.model
import llama
from bert.config import BertConfig
from bert.drawings.probe import ProbeResult, order_of, reading_of, who_sees_whom
from bert.heads import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from bert.spans import windows_of
from bert.squad import Answer, Question
from bert.wordpiece import SPECIAL, Encoding, WordPiece
from config import LlamaConfig
from explore.svg import BLUE, CELL, FAINT, GREEN, GREY, MARGIN, ORANGE, PURPLE, SEGMENTS, WHITE, Drawing, columns

# ---------------------------------------------------------------------------------------------------- set-ups

KINDS = ("person", "place", "neither")
WORDS = "who won ? it rains outside the street is wet a warm little film our team ada lives in basel"


class SetUp(NamedTuple):
    """A kind of task: its title, its model on an encoder, what is read, and the answer at each token that has one."""

    title: str
    make: Callable[[bert.model.Bert], nn.Module]
    encoding: Encoding
    answers: dict[int, str]


def set_ups_of(tokenizer: WordPiece) -> list[SetUp]:
    """The four of the paper's figure 4."""
    text = tokenizer.encode_pair("a warm little film")
    pair = tokenizer.encode_pair("it rains outside", "the street is wet")
    tokens = tokenizer.encode_pair("ada lives in basel")
    context = "our team won"
    question = Question("", "who won ?", context, (Answer("our team", 0),))
    (window,) = windows_of(0, question, tokenizer, length=32, stride=16)
    asked = tokenizer.encode_pair(question.text, context)
    return [
        SetUp("One text", lambda encoder: BertForSequenceClassification(encoder, 5), text, {0: "good"}),
        SetUp("A pair of texts", lambda encoder: BertForSequenceClassification(encoder, 3), pair, {0: "follows"}),
        SetUp(
            "Each token",
            lambda encoder: BertForTokenClassification(encoder, len(KINDS)),
            tokens,
            {place: KINDS[kind] for place, kind in enumerate((0, 2, 2, 1), start=1)},
        ),
        SetUp("An answer", BertForQuestionAnswering, asked, {window.start: "first", window.end: "last"}),
    ]


def set_ups() -> Drawing:
    """Which of the last hidden states each head reads."""
    tokenizer = WordPiece([*SPECIAL, *dict.fromkeys(WORDS.split())])
    drawing = Drawing(
        "Fine-tuning set-ups",
        "Four models on the same encoder. For one text and a pair of texts the head reads the state of [CLS] alone, "
        "through the pooler; for each token, and for the span of an answer, the states of all tokens.",
    )
    y = 20.0
    for set_up in set_ups_of(tokenizer):
        _draw_set_up(drawing, y, set_up, tokenizer)
        y += 192
    drawing.text(MARGIN, y + 6, "Green: the last hidden states that the head reads, as gradients say.", colour=FAINT)
    return drawing


def _draw_set_up(drawing: Drawing, y: float, set_up: SetUp, tokenizer: WordPiece) -> None:
    ids, segments, _ = set_up.encoding
    model = set_up.make(bert.model.Bert(BertConfig.from_preset("mini", vocab_size=len(tokenizer)))).eval()
    reading = reading_of(model, ids, segments)
    pieces = [tokenizer.pieces[id] for id in ids]
    answers = [set_up.answers.get(place, "") for place in range(len(ids))]
    places = [*columns(pieces, answers)]
    drawing.text(MARGIN, y + 14, set_up.title, bold=True)
    drawing.text(places[0][0], y + 14, type(model).__name__, mono=True, colour=FAINT)
    for row, label in enumerate(("is read", "last states", "head", "answer")):
        drawing.text(MARGIN, y + 45 + 36 * row, label)
    sizes = " and ".join(" x ".join(map(str, output.shape)) for output in reading.outputs)
    drawing.text(MARGIN, y + 169, sizes, size=12, colour=FAINT)
    right = sum(places[-1])
    drawing.box(places[0][0], y + 98, right - places[0][0], CELL, ", ".join(head_of(model, reading)), paint=PURPLE)
    for number, ((x, width), piece, answer) in enumerate(zip(places, pieces, answers, strict=True)):
        is_read = reading.is_read[number]
        drawing.box(x, y + 26, width, CELL, piece, paint=SEGMENTS[segments[number]])
        drawing.box(x, y + 62, width, CELL, str(number), paint=GREEN if is_read else WHITE)
        if is_read:
            drawing.line((x + width / 2, y + 90), (x + width / 2, y + 98), arrow=True)
        if answer:
            drawing.line((x + width / 2, y + 126), (x + width / 2, y + 134), arrow=True)
            drawing.box(x, y + 134, width, CELL, answer)


def head_of(model: nn.Module, reading: ProbeResult) -> list[str]:
    """The parts that stand on the encoder, in the order in which they were made."""
    own = [name for name, _ in model.named_children() if name != "encoder"]
    return ["pooler", *own] if reading.is_pooled else own


# ----------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class Beside:
    """A layer, its width D, the class of its feed-forward, and where it has positions from."""

    title: str
    layer: nn.Module
    dim: int
    feed_forward: type[nn.Module]
    positions: str

    @property
    def lines(self) -> list[str]:
        """What the code says of the layer's norms, feed-forward, biases and positions."""
        norm = type(self.layer.attention_norm).__name__
        formula = re.search(r"w2\(.*\)", self.feed_forward.__doc__)[0]
        has_biases = any(isinstance(part, nn.Linear) and part.bias is not None for part in self.layer.modules())
        return [
            f"{norm}, {'pre' if self.is_pre_norm else 'post'}-norm",
            formula,
            self.positions,
            f"matrices {'with' if has_biases else 'without'} biases",
        ]

    @property
    def order(self) -> list[str]:
        return order_of(self.layer, self.dim)

    @property
    def is_pre_norm(self) -> bool:
        return self.order[0].endswith("norm")


def both() -> tuple[Beside, Beside]:
    """A layer of each, small and in evaluation mode."""
    ours = BertConfig.from_preset("mini")
    theirs = LlamaConfig.from_preset("tiny", attention="causal")
    return (
        Beside(
            "BERT",
            bert.model.BertLayer(ours).eval(),
            ours.dim,
            bert.model.BertFeedForward,
            f"positions: {ours.positions}, added to the tokens",
        ),
        Beside(
            "Llama",
            llama.LlamaLayer(0, theirs).eval(),
            theirs.dim,
            llama.FeedForward,
            "positions: RoPE of queries and keys",
        ),
    )


def layers() -> Drawing:
    """A layer of BERT beside one of the Llama, and who sees whom in each."""
    sides = both()
    order = "; ".join(f"{side.title}: {', '.join(side.order)}" for side in sides)
    drawing = Drawing(
        "A layer of BERT and one of the Llama",
        f"What a layer computes, in order. {order}. In BERT every token sees every other one but padding; in a causal "
        "Llama itself and those before it; in a bidirectional Llama all of them and padding.",
    )
    for number, side in enumerate(sides):
        _draw_layer(drawing, MARGIN + number * 370, side)
    y = drawing.bottom + 34
    drawing.text(MARGIN, y, "Who sees whom: a row for a token that looks, a column for one that is seen", bold=True)
    for number, (title, seen) in enumerate(attentions().items()):
        _draw_grid(drawing, MARGIN + number * 245, y + 18, title, seen)
    return drawing


def _draw_layer(drawing: Drawing, x: float, side: Beside) -> None:
    """Two halves, each of a norm and what it stands before or after; the sum is where the half's input is added."""
    left, width, y = x + 40, 200.0, 60.0
    middle = left + width / 2
    drawing.text(x, 36, side.title, bold=True, size=16)
    drawing.text(middle - 50, y - 6, "x: b s D", mono=True)
    order = side.order
    for half in (order[:2], order[2:]):
        fork = y + 8
        for name in half:
            is_norm = name.endswith("norm")
            drawing.line((middle, y), (middle, y + 20), arrow=True)
            drawing.box(left, y + 20, width, CELL, name, paint=ORANGE if is_norm else BLUE)
            y += 20 + CELL
            if not is_norm:
                drawing.line((middle, y), (middle, y + 16), arrow=True)
                drawing.box(middle - 14, y + 16, 28, 24, "+", paint=GREY)
                around = x + 14
                drawing.line((middle, fork), (around, fork), (around, y + 28), (middle - 14, y + 28), arrow=True)
                y += 40
    drawing.line((middle, y), (middle, y + 20), arrow=True)
    for number, line in enumerate(side.lines):
        drawing.text(x, y + 50 + 22 * number, line, mono=line.startswith("w2"))


def attentions(length: int = 6) -> dict[str, list[list[bool]]]:
    """Whom each token sees among so many, of which the last one is padding."""
    config = BertConfig.from_preset("mini")
    layer = bert.model.BertLayer(config).eval()
    is_real = torch.arange(length) < length - 1
    seen = {"BERT": who_sees_whom(lambda x: layer(x, is_real[None, None, None]), length, config.dim)}
    for kind in ("causal", "bidirectional"):
        theirs = LlamaConfig.from_preset("tiny", attention=kind)
        seen[f"Llama, {kind}"] = who_sees_whom(llama.LlamaLayer(0, theirs).eval(), length, theirs.dim)
    return {title: rows[:-1] for title, rows in seen.items()}


def _draw_grid(drawing: Drawing, x: float, y: float, title: str, seen: list[list[bool]]) -> None:
    drawing.text(x, y + 14, title)
    small = dict(mono=True, size=12, colour=FAINT, anchor="middle")
    names = [*map(str, range(len(seen))), "pad"]
    for column, name in enumerate(names):
        drawing.text(x + 42 + 28 * column, y + 38, name, **small)
    for row, sees in enumerate(seen):
        drawing.text(x + 12, y + 62 + 28 * row, names[row], **small)
        for column, is_seen in enumerate(sees):
            drawing.box(x + 30 + 28 * column, y + 46 + 28 * row, 24, 24, paint=BLUE if is_seen else WHITE)
