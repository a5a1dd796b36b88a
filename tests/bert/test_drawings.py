"""The committed pictures of `bert/README.md` say what the code says now."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from conftest import ROOT
from svg_picture import BLUE, GREEN, GREY, ORANGE, PURPLE, SEGMENTS, WHITE, Box, Picture
from torch import nn

import bert.model
import llama
from bert.basic import words
from bert.config import BertConfig
from bert.examples import Noise, PretrainingData, sentences_of
from bert.heads import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from bert.spans import windows_of
from bert.squad import Answer, Question
from bert.wordpiece import SPECIAL, WordPiece
from config import LlamaConfig
from engine.tasks import NO_TARGET

DRAWINGS = ROOT / "bert" / "drawings"
PICTURES = {path.stem: Picture(path) for path in sorted(DRAWINGS.glob("*.svg"))}


def tokenizer_of(*texts: str) -> WordPiece:
    """A vocabulary of the words of texts."""
    found = [word.text for text in texts for word in words(text, lower_case=True)]
    return WordPiece([*SPECIAL, *dict.fromkeys(found)])


def test_the_pictures_are_readable_by_all():
    assert [*PICTURES] == ["embeddings", "layers", "next-sentence", "noise", "set-ups"]
    for picture in PICTURES.values():
        picture.check()


# -------------------------------------------------------------------------------------------------- embeddings


def test_the_numbers_of_the_first_drawing_are_the_rows_that_are_summed():
    picture = PICTURES["embeddings"]
    tokenizer = WordPiece([*SPECIAL, *"the tide is ris ##ing it covers sand".split()])
    ids, segments, _ = tokenizer.encode_pair("The tide is rising", "It covers the sand")
    with torch.device("meta"):
        parts = dict(bert.model.Embeddings(BertConfig()).named_children())
    tables = [name for name, part in parts.items() if isinstance(part, nn.Embedding)]
    expected = ["WordPiece", *(tokenizer.pieces[id] for id in ids)]
    for name, row in zip(tables, (ids, range(len(ids)), segments), strict=True):
        size = f"{parts[name].num_embeddings} x {parts[name].embedding_dim}"
        expected += [name if name == "tokens" else f"+ {name}", size, *map(str, row)]
    for name, part in parts.items():
        expected += [] if name in tables else [name, type(part).__name__]
    assert picture.words[:-1] == expected
    assert f"as {len(ids)} tokens" in picture.description and f"tables: {', '.join(tables)}." in picture.description
    rows = picture.rows()
    colors = [SEGMENTS[segment] for segment in segments]
    assert [[box.fill for box in row] for row in rows[:4]] == [colors, [GREY] * 12, [GREY] * 12, colors]

    module = bert.model.Embeddings(BertConfig.from_preset("mini", dropout=0.0)).eval()
    tokens, positions, segments = (torch.tensor([int(box.words) for box in row]) for row in rows[1:4])
    summed = module.tokens.weight[tokens] + module.positions.weight[positions] + module.segments.weight[segments]
    torch.testing.assert_close(module(tokens[None], segments[None])[0], module.norm(summed))


# ----------------------------------------------------------------------------------------------- masked tokens


def fates_of(old: list[int], new: list[int], targets: list[int], mask_id: int) -> list[str]:
    """The color of each token: it is masked, kept, replaced, or not to be predicted."""
    colors = [ORANGE if n == mask_id else GREEN if n == o else PURPLE for o, n in zip(old, new, strict=True)]
    return [WHITE if target == NO_TARGET else color for color, target in zip(colors, targets, strict=True)]


def test_the_drawn_noise_is_that_of_its_seed_and_shows_all_three():
    picture, noise = PICTURES["noise"], Noise()
    rows = picture.rows()
    sentence = " ".join(box.words for row in (rows[1], rows[4]) for box in row if not box.words.startswith("["))
    tokenizer = tokenizer_of(sentence)
    ids = tokenizer.encode(sentence)
    seed = int(re.search(r"^Noise\(\)\.apply\(ids, tokenizer, Random\((\d+)\)\), the first", picture.words[-1])[1])
    draws = [noise.apply(ids, tokenizer, Random(each)) for each in range(seed + 1)]
    fates = [fates_of(ids, *draw, tokenizer.mask_id) for draw in draws]
    assert [{ORANGE, GREEN, PURPLE} <= {*each} for each in fates] == [False] * seed + [True]
    (noisy, _), colors = draws[-1], fates[-1]
    assert len(colors) - colors.count(WHITE) == 3

    old, new = ([tokenizer.pieces[id] for id in row] for row in (ids, noisy))
    half = len(ids) // 2
    for first, part in ((1, slice(half)), (4, slice(half, None))):
        text, read, asked = rows[first : first + 3]
        assert [(box.words, box.fill) for box in text] == [(piece, WHITE) for piece in old[part]]
        assert [(box.words, box.fill) for box in read] == [*zip(new[part], colors[part], strict=True)]
        found = zip(text, old[part], colors[part], strict=True)
        assert [(box.x, box.words, box.fill) for box in asked] == [
            (above.x, piece, color) for above, piece, color in found if color != WHITE
        ]
    rule = (noise.mask, "become [MASK]"), (noise.random, "another token"), (1 - noise.mask - noise.random, "stay")
    assert [box.words for box in rows[0]] == [f"{share:.0%} {fate}" for share, fate in rule]
    assert [box.fill for box in rows[0]] == [ORANGE, PURPLE, GREEN]
    assert picture.words[0] == f"{noise.share:.0%} of the tokens are to be predicted, here 3 of {len(ids) - 2}:"
    assert picture.description.startswith(f"A sentence of {len(ids) - 2} tokens, of which 3 are to be predicted")


# ---------------------------------------------------------------------------------------------- next sentences


def test_the_drawn_pairs_are_those_of_the_first_document():
    picture = PICTURES["next-sentence"]
    said = [(label, text) for label, text in itertools.pairwise(picture.words) if re.fullmatch(r"\d\.\d", label)]
    sentences = {label: text for label, text in said if text.endswith(".")}
    texts = ["\n".join(text for label, text in sentences.items() if label[0] == number) for number in "12"]
    tokenizer = tokenizer_of(*texts)
    documents = [*sentences_of(texts, tokenizer)]
    assert [len(document) for document in documents] == [6, 4] and tokenizer.unk_id not in sum(documents[0], [])

    length, seed = map(int, re.search(r"tokenizer, (\d+), seed=(\d+)\)\.pairs\(0\)$", picture.words[-1]).groups())
    assert f"of at most {length} tokens" in " ".join(picture.words)
    data = PretrainingData(documents, tokenizer, length, seed=seed)
    starts = {tuple(sentence) for sentence in documents[0]}
    expected = [
        (a, b, data[0, place]["next"])
        for place, (a, b, _) in enumerate(data.pairs(0))
        if any(tuple(a[: len(start)]) == start for start in starts)
    ]
    verdicts = [re.fullmatch(r"class (\d): (.*)", text) for text in picture.words]
    verdicts = [(int(found[1]), found[2]) for found in verdicts if found]
    pairs = [segments_of(row) for row in picture.rows()]
    encoded = [[[*itertools.chain(*(documents[d][s] for d, s in part))] for part in pair] for pair in pairs]
    assert [(*pair, target) for pair, (target, _) in zip(encoded, verdicts, strict=True)] == expected
    assert {*verdicts} == {(0, "B follows A"), (1, "another document")}
    assert f"{len(documents[0])} sentences gives {len(pairs)} pairs" in picture.description

    begin = (0, 0)  # a pair begins where the last one ended, or with what another document replaced
    for (a, b), (target, _) in zip(pairs, verdicts, strict=True):
        after = (0, a[-1][1] + 1)
        assert a[0] == begin and (b[0] == after if target == 0 else b[0][0] == 1)
        begin = (0, b[-1][1] + 1) if target == 0 else after


def segments_of(row: list[Box]) -> list[list[tuple[int, int]]]:
    """The two segments of a drawn pair, each as places (document, sentence), from 0."""
    first = [box.words for box in row].index("[SEP]")
    assert [row[0].words, row[-1].words] == ["[CLS]", "[SEP]"]
    segments = [row[1:first], row[first + 1 : -1]]
    for box in (*segments[0], *segments[1]):
        assert box.fill == SEGMENTS[int(box.words[0]) - 1]
    return [[tuple(int(digit) - 1 for digit in box.words.split(".")) for box in segment] for segment in segments]


# ----------------------------------------------------------------------------------------------------- set-ups


def probe_head(model: nn.Module, ids: list[int], segments: list[int]) -> tuple[tuple, list[bool], bool]:
    """The outputs of a model with a head, which of the last hidden states they depend on, and whether through the
    pooler."""
    states: list[torch.Tensor] = []

    def cut(layer: nn.Module, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        states.append(hidden.detach().requires_grad_())
        return states[0]

    model.encoder.layers[-1].register_forward_hook(cut)
    outputs = model(torch.tensor([ids]), torch.tensor([segments]))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(map(mixed, outputs)).backward()
    pooler = model.encoder.pooler
    return outputs, depends(states[0].grad[0]), pooler is not None and pooler.weight.grad is not None


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """One number that depends on all of them, on each in its own way."""
    return (numbers * torch.arange(1.0, numbers.numel() + 1).view_as(numbers)).sum()


def depends(gradient: torch.Tensor) -> list[bool]:
    """s D -> s"""
    return (gradient != 0).any(dim=-1).tolist()


DRAWN_WORDS = "who won ? it rains outside the street is wet a warm little film our team ada lives in basel"
TOKENIZER = WordPiece([*SPECIAL, *dict.fromkeys(DRAWN_WORDS.split())])
SPAN_QUESTION = Question("", "who won ?", "our team won", (Answer("our team", 0),))
(WINDOW,) = windows_of(0, SPAN_QUESTION, TOKENIZER, length=32, stride=16)
TOKEN_CLASSES = {1: "person", 2: "neither", 3: "neither", 4: "place"}
SPAN = {WINDOW.start: "first", WINDOW.end: "last"}
SET_UPS = {  # the class of the head, its number of classes, the texts, and the answer at each token that has one
    "One text": (BertForSequenceClassification, [5], ["a warm little film"], {0: "good"}),
    "A pair of texts": (BertForSequenceClassification, [3], ["it rains outside", "the street is wet"], {0: "follows"}),
    "Each token": (BertForTokenClassification, [3], ["ada lives in basel"], TOKEN_CLASSES),
    "An answer": (BertForQuestionAnswering, [], [SPAN_QUESTION.text, SPAN_QUESTION.context], SPAN),
}


@pytest.mark.parametrize("number", range(4), ids=SET_UPS)
def test_what_heads_read(number: int):
    title, (head_class, classes, texts, answers) = [*SET_UPS.items()][number]
    ids, segments, _ = TOKENIZER.encode_pair(*texts)
    config = BertConfig.from_preset("mini", vocab_size=len(TOKENIZER))
    model = head_class(bert.model.Bert(config), *classes).eval()
    outputs, is_read, is_pooled = probe_head(model, ids, segments)
    head = ["pooler"] * is_pooled + [name for name, _ in model.named_children() if name != "encoder"]
    sizes = " and ".join(" x ".join(map(str, output.shape)) for output in outputs)
    expected = [title, type(model).__name__, "is read", "last states", "head", "answer", sizes, ", ".join(head)]
    for place, id in enumerate(ids):
        expected += [TOKENIZER.pieces[id], str(place), *filter(None, [answers.get(place)])]
    picture = PICTURES["set-ups"]
    begins = [picture.words.index(title) for title in SET_UPS] + [-1]
    assert picture.words[begins[number] : begins[number + 1]] == expected and "[UNK]" not in expected

    pieces, states, _, answered = picture.rows()[4 * number : 4 * number + 4]
    assert [box.fill for box in pieces] == [SEGMENTS[segment] for segment in segments]
    assert [box.fill == GREEN for box in states] == is_read == [number > 1 or place == 0 for place in range(len(ids))]
    assert {box.x: box.words for box in answered} == {pieces[place].x: text for place, text in answers.items()}
    assert is_pooled == (number < 2)
    arrows = [points[0][0] for _, points in picture.curves if points[0][1] == states[0].y + states[0].height]
    assert arrows == [box.x + box.width / 2 for box in states if box.fill == GREEN]


# ------------------------------------------------------------------------------------------------------ layers


def order_of(layer: nn.Module, dim: int) -> list[str]:
    """The names of a layer's parts, in the order in which they compute."""
    names: list[str] = []
    for name, part in layer.named_children():
        part.register_forward_hook(lambda *_, name=name: names.append(name))
    layer(torch.zeros(1, 1, dim))
    return names


def who_sees_whom(layer: Callable[[torch.Tensor], torch.Tensor], dim: int) -> list[list[bool]]:
    """For each of 5 real positions, on which of 6 its output depends; the last is padding. layer: 1 s D -> 1 s D"""
    x = torch.randn(1, 6, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    states = layer(x)[0, :5]  # s D
    return [depends(torch.autograd.grad(mixed(state), x, retain_graph=True)[0][0]) for state in states]


BERT_SHAPE, LLAMA_SHAPE = BertConfig.from_preset("mini"), LlamaConfig.from_preset("tiny", attention="causal")
SIDES = {
    "BERT": (
        bert.model.BertLayer(BERT_SHAPE).eval(),
        BERT_SHAPE.dim,
        f"positions: {BERT_SHAPE.positions}, added to the tokens",
    ),
    "Llama": (llama.LlamaLayer(0, LLAMA_SHAPE).eval(), LLAMA_SHAPE.dim, "positions: RoPE of queries and keys"),
}


@pytest.mark.parametrize("title", SIDES)
def test_what_is_said_of_the_layers(title: str):
    layer, dim, positions = SIDES[title]
    order = order_of(layer, dim)
    is_pre_norm = order[0].endswith("norm")
    drawn = [part for name in order for part in ([name] if name.endswith("norm") else [name, "+"])]
    formula = re.search(r"w2\(.*\)", type(layer.feed_forward).__doc__)[0]
    has_biases = any(isinstance(part, nn.Linear) and part.bias is not None for part in layer.modules())
    expected = [title, "x: b s D", *drawn]
    expected.append(f"{type(layer.attention_norm).__name__}, {'pre' if is_pre_norm else 'post'}-norm")
    expected += [formula, positions, f"matrices {'with' if has_biases else 'without'} biases"]
    picture = PICTURES["layers"]
    begin = picture.words.index(title)
    assert picture.words[begin : begin + len(expected)] == expected
    assert f"{title}: {', '.join(order)}" in picture.description
    column = [box for box in picture.boxes if box.words in drawn and (box.x < 380) == (title == "BERT")]
    assert [box.words for box in column] == drawn
    kinds = {"+": GREY, "attention": BLUE, "feed_forward": BLUE}
    assert [box.fill for box in column] == [kinds.get(name, ORANGE) for name in drawn]

    x = torch.randn(1, 3, dim)
    functions = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "x": x}
    matrices = dict(layer.feed_forward.named_children())
    computed = eval(re.sub(r"(w\d) x", r"\1(x)", formula), functions | matrices)
    torch.testing.assert_close(computed, layer.feed_forward(x))


def test_who_sees_whom_is_what_gradients_say():
    layer, dim, _ = SIDES["BERT"]
    is_real = torch.arange(6) < 5
    seen = {"BERT": who_sees_whom(lambda x: layer(x, is_real[None, None, None]), dim)}
    for kind in ("causal", "bidirectional"):
        config = LlamaConfig.from_preset("tiny", attention=kind)
        seen[f"Llama, {kind}"] = who_sees_whom(llama.LlamaLayer(0, config).eval(), config.dim)
    assert seen["BERT"] == [[True] * 5 + [False]] * 5
    picture = PICTURES["layers"]
    grids = [[box for box in row if box.width == 24] for row in picture.rows()[-5:]]
    for number, rows in enumerate(seen.values()):
        drawn = [[box.fill == BLUE for box in row[6 * number : 6 * number + 6]] for row in grids]
        assert drawn == rows
    places = [*"01234", "pad", *"01234"]
    assert picture.words[-36:] == [word for title in seen for word in (title, *places)]


def test_only_the_llamas_layer_knows_the_order_of_what_it_reads():
    """BERT's positions are in what its first layer reads; the Llama's are in each layer's queries and keys."""
    torch.manual_seed(0)
    config = LlamaConfig.from_preset("tiny", attention="bidirectional")
    layers = bert.model.BertLayer(BertConfig.from_preset("mini")).eval(), llama.LlamaLayer(0, config).eval()
    for layer, knows in zip(layers, (False, True), strict=True):
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5)
        x = torch.randn(1, 6, 32)
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        assert torch.allclose(layer(x)[:, order], layer(x[:, order]), atol=1e-4) == (not knows)
