"""The committed pictures of `docs/components/` show what the code computes now."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from page_parts import is_close, pictures
from svg_picture import BLUE, GREY, ORANGE, Box, Picture

from base_llama import causal_mask
from engine.decoding import logits_after
from engine.weights import load_llama_model
from explore.components.pages import pages
from explore.look import lenses, match_at_distance, read, rotated
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer

FOLDER = ROOT / "docs" / "components" / "pictures"
NAMES = [path.stem for path in sorted(FOLDER.iterdir())]
TESTED = "adamw attention grouped-queries masks residual-stream rope sampling swiglu tokens".split()
SPACE = "\u2581"  # before a word; drawn as an underscore


@pytest.fixture(scope="module")
def bundled() -> Llama:
    """The bundled model, which is causal."""
    return load_llama_model(str(ROOT / "checkpoints/minllama1M.pt")).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_model=ROOT / "checkpoints/minllama1M.model")


def picture(name: str) -> Picture:
    return Picture(FOLDER / f"{name}.svg")


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.sp_model.id_to_piece(id).replace(SPACE, "_") for id in ids]


def test_pictures_are_shown_described_and_readable_by_all():
    shown = {path.name: words for page in pages() for words, path in pictures(page)}
    assert NAMES == TESTED and {f"{name}.svg" for name in NAMES} <= {*shown}
    assert all(len(words) > 20 for words in shown.values())
    for name in NAMES:
        picture(name).check()


# ------------------------------------------------------------------------------------------------------ curves


def check_curves(found: Picture, lines: dict[str, Sequence[float]], first: float, last: float) -> None:
    """lines: the values of each named curve, at equal distances from `first` to `last`."""
    values = [value for line in lines.values() for value in line]
    low, high = min(values), max(values)
    labels = [f"{value:.2f}" for value in (low, (low + high) / 2, high)]
    labels += [f"{value:g}" for value in (first, (first + last) / 2, last)]
    assert found.words[1:7] == labels
    (_, corners), *curves = found.curves
    (left, top), (_, bottom), (right, _) = corners
    drawn = {found.colors[color]: points for color, points in curves}
    assert {*drawn} == {*lines}
    for name, line in lines.items():
        for number, (value, (x, y)) in enumerate(zip(line, drawn[name], strict=True)):
            assert x == pytest.approx(left + number / (len(line) - 1) * (right - left), abs=0.1)
            assert y == pytest.approx(bottom - (value - low) / (high - low) * (bottom - top), abs=0.2), name


def test_rope(bundled: Llama):
    pairs = rotated(bundled.config, 33)[..., 0]  # s d/2: the cosines
    lines = {f"pair {pair}": pairs[:, pair].tolist() for pair in (0, 2, 4, 8)}
    lines["all pairs, mean"] = match_at_distance(bundled.config, 33).tolist()
    check_curves(picture("rope"), lines, 0, 32)


def test_swiglu():
    x = torch.linspace(-4, 4, 81)
    functions = {"SiLU": F.silu, "ReLU": F.relu, "GELU": F.gelu, "sigmoid": torch.sigmoid}
    check_curves(picture("swiglu"), {name: function(x).tolist() for name, function in functions.items()}, -4, 4)


def test_adamw():
    lines = {}
    for name, correct in (("corrected", True), ("not corrected", False)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = AdamW([parameter], lr=1.0, correct_bias=correct)
        lines[name] = []
        for _ in range(40):
            before, parameter.grad = parameter.item(), torch.ones(1)
            optimizer.step()
            lines[name].append(before - parameter.item())
    check_curves(picture("adamw"), lines, 1, 40)


# ------------------------------------------------------------------------------------------------------- boxes


def test_tokens(tokenizer: Tokenizer):
    expected, colors = [], []
    for text in ("An unwatchable film.", "A slow café film!"):
        ids = tokenizer.encode(text, bos=True, eos=False)
        pieces = pieces_of(tokenizer, ids)
        expected += [word for pair in zip(pieces, map(str, ids), strict=True) for word in pair]
        colors += [GREY, *(ORANGE if piece.startswith("<") else BLUE for piece in pieces[1:])]
    found = picture("tokens")
    assert found.words == expected and [box.fill for box in found.boxes] == colors


def squares(boxes: list[Box], count: int) -> torch.Tensor:
    """The weights of a map of count x count squares, of which 0 is white and 1 is blue: their roots are drawn."""
    assert len(boxes) == count * count
    red = torch.tensor([int(box.fill[1:3], 16) for box in boxes]).view(count, count)
    return (255 - red) / (255 - 9)


def test_attention(bundled: Llama, tokenizer: Tokenizer):
    ids = tokenizer.encode("The film is a delight from start to finish.", bos=True, eos=False)
    found = picture("attention")
    for number, kind in enumerate(("causal", "bidirectional")):
        drawn = squares(found.boxes[196 * number : 196 * number + 196], len(ids))
        weights = read(bundled, ids, kind).attention[3][0]
        torch.testing.assert_close(drawn, weights.sqrt(), atol=0.015, rtol=0)
    assert found.words[:-1] == ["causal", *pieces_of(tokenizer, ids), "bidirectional"]
    assert (
        f"head 0 in layer {len(bundled.layers) - 1} of" in found.description and f"{len(ids)} tok" in found.description
    )


def test_masks():
    found = picture("masks")
    masks = torch.ones(6, 6), causal_mask(6).float()
    for number, mask in enumerate(masks):
        assert torch.equal(squares(found.boxes[36 * number : 36 * number + 36], 6), mask)
    assert found.words == ["no mask: bidirectional", "causal_mask(6)"]


def test_grouped_queries(bundled: Llama):
    found, config = picture("grouped-queries"), bundled.config
    queries, keys = found.rows()
    assert [box.words for box in queries] == [f"query {head}" for head in range(config.n_heads)]
    assert [box.words for box in keys] == [f"key/value {head}" for head in range(config.n_kv_heads)]
    shared = torch.arange(config.n_kv_heads).repeat_interleave(config.n_heads // config.n_kv_heads).tolist()
    for query, group, (_, points) in zip(queries, shared, found.curves, strict=True):
        ends = query.x + query.width / 2, keys[group].x + keys[group].width / 2
        assert (points[0][0], points[-1][0]) == ends and query.fill == keys[group].fill
    assert found.description.startswith(f"{config.n_heads} query heads and {config.n_kv_heads} key/value heads.")


def check_probabilities(found: list[str], expected: list[str]) -> None:
    """Words and probabilities, which may differ by two units of their last digit: other processors round otherwise."""
    assert is_close("\n".join(found), "\n".join(expected))


def test_residual_stream(bundled: Llama, tokenizer: Tokenizer):
    story = "Once upon a time there was a little"
    ids = tokenizer.encode(story, bos=True, eos=False)
    expected = [f"after: {story}"]
    for layer, lens in enumerate(lenses(bundled, read(bundled, ids, "causal"), ids, 3)):
        expected.append(f"after layer {layer - 1}" if layer else "embedding")
        likely = zip(pieces_of(tokenizer, lens.ids[-1].tolist()), lens.probabilities[-1].tolist(), strict=True)
        expected += [f"{piece} {probability:.2f}" for piece, probability in likely]
    check_probabilities(picture("residual-stream").words, expected)


def test_sampling(bundled: Llama, tokenizer: Tokenizer):
    ids = torch.tensor([tokenizer.encode("It was the best film of the", bos=True, eos=False)])
    with torch.inference_mode():
        logits = logits_after(bundled, ids)[0]  # v
    best = logits.topk(6).indices
    expected = []
    for temperature in (0.5, 1.0, 2.0):
        expected.append(f"temperature {temperature:g}")
        likely = zip(
            pieces_of(tokenizer, best.tolist()), (logits / temperature).softmax(-1)[best].tolist(), strict=True
        )
        expected += [word for piece, share in likely for word in ([piece] * (temperature == 0.5) + [f"{share:.3f}"])]
    found = picture("sampling")
    check_probabilities(found.words, expected)
    shares = [float(word) for word in found.words if word[:2] == "0."]
    assert [box.width for box in found.boxes] == pytest.approx([max(1, round(130 * share)) for share in shares], abs=1)
