"""The drawings: they are what the code says now, they can be read, and nothing in them runs into anything else."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch

import bert.model
import llama
from bert.config import BertConfig
from bert.drawings import __main__ as program
from bert.drawings import inputs, models, probe
from bert.examples import Noise, sentences_of
from config import LlamaConfig
from explore.svg import WIDTH, Drawing
from utils import UserError

NAMES = sorted(program.drawings())
SVG = "{http://www.w3.org/2000/svg}"
# Widths of letters in 1/100 em, about those of DejaVu Sans, the widest of the fonts that are named.
NARROW, WIDE = dict.fromkeys(" .,:;'()[]ijltfr", 40), dict.fromkeys("mwMW", 97)
MONO = 60.2


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fresh run of the program."""
    folder = tmp_path_factory.mktemp("drawings") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bert.drawings", "--out", str(folder)])
        program.main()
    return folder


def root_of(name: str) -> ElementTree.Element:
    return ElementTree.parse(program.FOLDER / f"{name}.svg").getroot()


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_file_is_what_the_program_draws(drawn: Path, name: str):
    assert (program.FOLDER / f"{name}.svg").read_bytes() == (drawn / f"{name}.svg").read_bytes()


def test_there_are_no_other_files(drawn: Path):
    assert sorted(path.stem for path in drawn.iterdir()) == NAMES
    assert sorted(path.stem for path in program.FOLDER.glob("*.svg")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_has_a_title_a_description_and_no_script(name: str):
    root = root_of(name)
    said = {element.get("id"): element.text for element in root if element.tag in (f"{SVG}title", f"{SVG}desc")}
    assert root.get("role") == "img" and root.get("aria-labelledby").split() == [*said]
    assert len(said["title"]) > 5 and len(said["desc"]) > 50
    assert {element.tag.removeprefix(SVG) for element in root} == {*"title desc rect text".split()} | (
        {"polyline", "polygon"} if name in ("layers", "set-ups") else set()
    )


def test_out_that_is_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["bert.drawings", "--out", str(tmp_path / "file")])
    with pytest.raises(UserError, match="--out .*file"):
        program.main()
    assert (tmp_path / "file").read_text() == "mine"


# ----------------------------------------------------------------------------------------------------- layout


class Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Area) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def meets(self, other: Area) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def area_of_text(element: ElementTree.Element) -> Area:
    size, x, y = (float(element.get(name)) for name in ("font-size", "x", "y"))
    if "Mono" in element.get("font-family"):
        width = len(element.text) * MONO
    else:
        width = sum(NARROW.get(letter, WIDE.get(letter, 61)) for letter in element.text)
    width *= (
        size / 100 * (1.12 if element.get("font-weight") == "bold" and "Mono" not in element.get("font-family") else 1)
    )
    left = x - width / 2 if element.get("text-anchor") == "middle" else x
    return Area(left, y - 0.75 * size, left + width, y + 0.2 * size)


def area_of_box(element: ElementTree.Element) -> Area:
    x, y, width, height = (float(element.get(name)) for name in ("x", "y", "width", "height"))
    return Area(x, y, x + width, y + height)


def layout(root: ElementTree.Element) -> tuple[Area, list[Area], list[tuple[str, Area]]]:
    """The page, the boxes on it, and the texts."""
    page, *boxes = (area_of_box(element) for element in root.iter(f"{SVG}rect"))
    return page, boxes, [(element.text, area_of_text(element)) for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", NAMES)
def test_words_are_in_their_boxes_and_run_into_nothing(name: str):
    page, boxes, texts = layout(root_of(name))
    for text, area in texts:
        assert page.holds(area), text
        assert all(box.holds(area) for box in boxes if box.meets(area)), text
    for (text, area), (other, its) in itertools.combinations(texts, 2):
        assert not area.meets(its), (text, other)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.meets(other)
    assert all(page.holds(box) for box in boxes)


@pytest.mark.parametrize("name", NAMES)
def test_lines_stay_on_the_page(name: str):
    root = root_of(name)
    page, _, _ = layout(root)
    for element in (*root.iter(f"{SVG}polyline"), *root.iter(f"{SVG}polygon")):
        for point in element.get("points").split():
            x, y = map(float, point.split(","))
            assert page.holds(Area(x, y, x, y))


def test_words_that_do_not_fit_are_an_error():
    drawing = Drawing("a title", "a description")
    drawing.box(0, 0, 60, 28, "[MASK]")
    with pytest.raises(ValueError, match=r"'\[MASK\]' does not fit into a box of 40 x 28"):
        drawing.box(0, 0, 40, 28, "[MASK]")
    with pytest.raises(ValueError, match="does not fit into a box of 60 x 28"):
        drawing.box(0, 0, 60, 28, "two", "lines")
    for x, anchor in ((WIDTH - 20, "start"), (10, "middle")):
        with pytest.raises(ValueError, match="does not fit on the page"):
            drawing.text(x, 20, "some words", anchor=anchor)


# -------------------------------------------------------------------------------------------------- what is said


def test_the_numbers_of_the_first_drawing_are_the_rows_that_are_summed():
    _, boxes, texts = layout(root_of("embeddings"))
    cells = [(area.top, text) for text, area in texts if any(box.holds(area) for box in boxes)]
    rows = [[text for _, text in row] for _, row in itertools.groupby(cells, lambda cell: cell[0])]
    rows = [[*map(int, row)] for row in rows if all(map(str.isdigit, row))]
    config = BertConfig.from_preset("mini", dropout=0.0)
    module = bert.model.Embeddings(config).eval()
    tokens, positions, segments = (torch.tensor(row) for row in rows)
    summed = module.tokens.weight[tokens] + module.positions.weight[positions] + module.segments.weight[segments]
    torch.testing.assert_close(module(tokens[None], segments[None])[0], module.norm(summed))


def test_the_drawn_noise_is_that_of_its_seed_and_shows_all_three():
    texts = [element.text for element in root_of("noise").iter(f"{SVG}text")]
    (seed,) = (int(found[1]) for text in texts if (found := re.search(r"Random\((\d+)\)", text)))
    tokenizer = inputs.tokenizer_of(inputs.SENTENCE)
    ids = tokenizer.encode(inputs.SENTENCE)
    noisy, targets = Noise().apply(ids, tokenizer, Random(seed))
    changes = [(old, new) for old, new, target in zip(ids, noisy, targets, strict=True) if target >= 0]
    kinds = ["mask" if new == tokenizer.mask_id else "same" if new == old else "other" for old, new in changes]
    assert sorted(kinds) == ["mask", "other", "same"]
    assert texts.count("[MASK]") == 1 and f"here {len(changes)} of {len(ids) - 2}:" in texts[0]
    for old, new in changes:
        assert tokenizer.pieces[old] in texts and tokenizer.pieces[new] in texts


def test_a_pair_begins_where_the_last_one_ended_or_was_replaced():
    texts = (inputs.LAMP, inputs.BREAD)
    tokenizer = inputs.tokenizer_of(*texts)
    _, pairs = inputs.pairs_of_both_kinds([*sentences_of(texts, tokenizer)], tokenizer, 34)
    assert {pair.target for pair in pairs} == {0, 1}
    begin = (0, 0)
    for a, b, target in pairs:
        assert a[0] == begin
        after = (0, a[-1][1] + 1)
        assert (b[0] == after) if target == 0 else b[0][0] == 1
        begin = (0, b[-1][1] + 1) if target == 0 else after


def test_what_heads_read():
    tokenizer = models.WordPiece([*models.SPECIAL, *dict.fromkeys(models.WORDS.split())])
    text, pair, tokens, answer = models.set_ups_of(tokenizer)
    encoder = bert.model.Bert(BertConfig.from_preset("mini", vocab_size=len(tokenizer)))
    for set_up, is_all in ((text, False), (pair, False), (tokens, True), (answer, True)):
        ids, segments, _ = set_up.encoding
        reading = probe.reading_of(set_up.make(encoder).eval(), ids, segments)
        assert reading.is_read == [is_all or place == 0 for place in range(len(ids))]
        assert reading.is_pooled == (not is_all)
        encoder.zero_grad()
        assert len({*segments}) == (1 if set_up in (text, tokens) else 2)
        assert tokenizer.unk_id not in ids
    spans = {words: place for place, words in answer.answers.items()}
    pieces = [tokenizer.pieces[id] for id in answer.encoding.ids]
    assert pieces[spans["first"] : spans["last"] + 1] == ["our", "team"]


def test_who_sees_whom_of_layers_that_are_known():
    def next_alone(x: torch.Tensor) -> torch.Tensor:
        return x.roll(-1, dims=1)

    cases: list[tuple[Callable, torch.Tensor]] = [
        (lambda x: x.cumsum(dim=1), torch.ones(4, 4).tril()),
        (lambda x: -x.cumsum(dim=1), torch.ones(4, 4).tril()),
        (lambda x: x + x.mean(dim=1, keepdim=True), torch.ones(4, 4)),
        (next_alone, torch.eye(4).roll(1, dims=1)),
    ]
    for layer, wanted in cases:
        assert torch.equal(torch.tensor(probe.who_sees_whom(layer, 4, 8)), wanted.bool())


def test_what_is_said_of_the_layers():
    ours, theirs = models.both()
    assert ours.order == ["attention", "attention_norm", "feed_forward", "ffn_norm"]
    assert theirs.order == ["attention_norm", "attention", "ffn_norm", "feed_forward"]
    assert ours.lines[0] == "LayerNorm, post-norm" and theirs.lines[0] == "RMSNorm, pre-norm"
    assert ours.lines[3] == "matrices with biases" and theirs.lines[3] == "matrices without biases"
    seen = models.attentions()
    assert all(len(rows) == 5 and len(rows[0]) == 6 for rows in seen.values())
    assert all(row == [True] * 5 + [False] for row in seen["BERT"])
    assert torch.equal(torch.tensor(seen["Llama, causal"]), torch.ones(5, 6).tril().bool())
    assert all(all(row) for row in seen["Llama, bidirectional"])


@pytest.mark.parametrize("number", [0, 1])
def test_the_formula_of_the_feed_forward_is_what_it_computes(number: int):
    side = models.both()[number]
    part = side.layer.feed_forward
    code = re.sub(r"(w\d) x", r"\1(x)", side.lines[1])
    x = torch.randn(1, 3, side.dim)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    matrices = {name: getattr(part, name) for name in ("w1", "w2", "w3") if hasattr(part, name)}
    torch.testing.assert_close(eval(code, {"x": x, "silu": silu, "gelu": gelu, **matrices}), part(x))


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
