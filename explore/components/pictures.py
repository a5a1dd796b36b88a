"""Pictures of the components: what the code computes, drawn.

Shapes: s query position, t key position, h heads, g key/value heads, d head dim, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from base_llama import causal_mask, padded_causal_mask
from engine.weights import load_pretrained
from explore.look import lenses, match_at_distance, read, turned
from explore.svg import BLUE, CELL, FAINT, GREEN, GREY, INK, MARGIN, ORANGE, PURPLE, WIDTH, Drawing, Paint
from explore.svg import columns as placed
from llama import Llama
from optimizer import AdamW
from tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "components" / "pictures"
CHECKPOINT, VOCABULARY = "checkpoints/minllama1M.pt", "checkpoints/minllama1M.model"
SENTENCE = "The film is a delight from start to finish."
STORY, OPENING = "Once upon a time there was a little", "It was the best film of the"
COLOURS = (BLUE.stroke, ORANGE.stroke, GREEN.stroke, PURPLE.stroke, FAINT)
PLOT = 300.0  # height of a plot


@lru_cache(maxsize=1)
def bundled() -> tuple[Llama, Tokenizer]:
    """The bundled model, which is causal, and its tokenizer."""
    return load_pretrained(CHECKPOINT).eval(), Tokenizer(tokenizer_model=VOCABULARY)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Tokens as they are shown: a space before a word is an underscore."""
    return [tokenizer.sp_model.id_to_piece(id).replace("\u2581", "_") for id in ids]


def shade(weight: float) -> Paint:
    """White at 0, blue at 1; small weights are told apart, as their roots are shown."""
    part = max(0.0, min(1.0, weight)) ** 0.5
    colour = "#" + "".join(f"{round(255 + (end - 255) * part):02x}" for end in (9, 105, 218))
    return Paint(colour, GREY.fill)


def heat(drawing: Drawing, x: float, y: float, rows: Sequence[Sequence[float]], size: float) -> None:
    """A square for each number from 0 to 1."""
    for line, row in enumerate(rows):
        for column, weight in enumerate(row):
            drawing.box(x + column * size, y + line * size, size - 1, size - 1, paint=shade(weight))


def curves(drawing: Drawing, lines: dict[str, Sequence[tuple[float, float]]], across: str, upwards: str) -> None:
    """A plot of some lines over one another, each named at its right end. Points are in the data's own units."""
    points = [point for line in lines.values() for point in line]
    (low, high), (bottom, top) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    left, right, above, below = MARGIN + 50, WIDTH - 150, 50.0, 50.0 + PLOT

    def at(x: float, y: float) -> tuple[float, float]:
        place = left + (x - low) / (high - low) * (right - left), below - (y - bottom) / (top - bottom) * PLOT
        return round(place[0], 1), round(place[1], 1)

    drawing.text(MARGIN, 32, upwards, colour=FAINT)
    drawing.line((left, above), (left, below), (right, below))
    for value in (bottom, (bottom + top) / 2, top):
        drawing.text(MARGIN, at(low, value)[1] + 5, f"{value:.2f}", size=12, colour=FAINT)
    for value in (low, (low + high) / 2, high):
        drawing.text(at(value, bottom)[0], below + 20, f"{value:g}", anchor="middle", size=12, colour=FAINT)
    drawing.text((left + right) / 2, below + 40, across, anchor="middle", colour=FAINT)
    ends: list[float] = []
    for colour, (name, line) in zip(COLOURS, sorted(lines.items(), key=lambda item: -item[1][-1][1]), strict=False):
        drawing.line(*(at(*point) for point in line), colour=colour)
        ends.append(max(at(*line[-1])[1], ends[-1] + 18 if ends else 0))
        drawing.text(right + 8, ends[-1] + 5, name, colour=colour)


# --------------------------------------------------------------------------------------------------- pictures


def tokens() -> Drawing:
    """A sentence as pieces and their ids."""
    _, tokenizer = bundled()
    drawing = Drawing("Two sentences as tokens", "Each piece of the sentences stands in a box above its id.")
    for row, text in enumerate(("An unwatchable film.", "A slow café film!")):
        ids = tokenizer.encode(text, bos=True, eos=False)
        pieces = pieces_of(tokenizer, ids)
        y = 20 + row * 76
        for (x, width), piece, id in zip(placed(pieces, [*map(str, ids)], left=MARGIN), pieces, ids, strict=True):
            paint = GREY if id == tokenizer.bos_id else ORANGE if piece.startswith("<") else BLUE
            drawing.box(x, y, width, CELL, piece, paint=paint)
            drawing.text(x + width / 2, y + CELL + 18, str(id), anchor="middle", mono=True, size=12, colour=FAINT)
    return drawing


def rope() -> Drawing:
    """Where a pair is turned to, for pairs of different speed; and what that does to a product."""
    model, _ = bundled()
    pairs = turned(model.config, 33)[..., 0]  # s d/2: the cosines
    match = match_at_distance(model.config, 33)
    lines = {f"pair {pair}": [*enumerate(pairs[:, pair].tolist())] for pair in (0, 2, 4, 8)}
    lines["all pairs, mean"] = [*enumerate(match.tolist())]
    drawing = Drawing(
        "Rotary embedding: fast pairs and slow ones",
        "The cosine of the angle between a query and an equal key that stands so many positions before it, for four "
        "pairs of a head, and the mean of all pairs. The first pair goes round every 6.3 positions, later ones slower.",
    )
    curves(drawing, lines, "distance between query and key", "cosine of the angle between them")
    return drawing


def attention() -> Drawing:
    """What the bundled model's last layer attends to, under both semantics."""
    model, tokenizer = bundled()
    ids = tokenizer.encode(SENTENCE, bos=True, eos=False)
    pieces = pieces_of(tokenizer, ids)
    layer = model.config.n_layers - 1
    drawing = Drawing(
        "One head, two semantics",
        f"Attention of head 0 in layer {layer} of the bundled model among {len(ids)} tokens. A row is a query and a "
        "column a key. Causal: all squares above the diagonal are white. Bidirectional: every square has some colour.",
    )
    size, left = 20.0, MARGIN + 80
    for number, kind in enumerate(("causal", "bidirectional")):
        x = left + number * (len(ids) * size + 40)
        drawing.text(x, 32, kind, bold=True)
        heat(drawing, x, 44, read(model, ids, kind).attention[layer][0].tolist(), size)
        for row, piece in enumerate(pieces if number == 0 else ()):
            drawing.text(MARGIN, 44 + row * size + 15, piece, mono=True, size=12)
    drawing.text(MARGIN, 44 + len(ids) * size + 20, "rows: queries, columns: keys, in the same order", colour=FAINT)
    return drawing


def masks() -> Drawing:
    """Who sees whom: without a mask, with the causal one, with padding before the text."""
    kinds = {
        "no mask: bidirectional": torch.ones(6, 6),
        "causal_mask(6, 6)": causal_mask(6, 6).float(),
        "padded, pad = 2": padded_causal_mask(torch.tensor([2]), 6, 6)[0, 0].float(),
    }
    drawing = Drawing(
        "Three masks",
        "Rows are queries and columns keys; a blue square says that the query sees the key. Without a mask all are "
        "blue. The causal mask is a lower triangle. With two padding tokens before the text, their columns are white "
        "but for the two squares where they see themselves.",
    )
    for number, (name, mask) in enumerate(kinds.items()):
        x = MARGIN + number * 245
        drawing.text(x, 34, name, bold=True, size=13)
        heat(drawing, x, 48, mask.tolist(), 30)
    return drawing


def swiglu() -> Drawing:
    """SiLU beside the activations that are taken for it."""
    x = torch.linspace(-4, 4, 81)
    kinds: dict[str, Callable] = {"SiLU": F.silu, "ReLU": F.relu, "GELU": F.gelu, "sigmoid": torch.sigmoid}
    lines = {name: [*zip(x.tolist(), call(x).tolist(), strict=True)] for name, call in kinds.items()}
    drawing = Drawing(
        "SiLU beside other activations",
        "SiLU is x times its sigmoid: near 0 for very negative x, a little below 0 around -1.3, near x for large x.",
    )
    curves(drawing, lines, "x", "activation of x")
    return drawing


def groups() -> Drawing:
    """Which query heads read which key/value head."""
    config = bundled()[0].config
    drawing = Drawing(
        "Grouped queries",
        f"{config.n_heads} query heads and {config.n_kv_heads} key/value heads. Neighbouring query heads share one.",
    )
    shared = torch.arange(config.n_kv_heads).repeat_interleave(config.n_heads // config.n_kv_heads).tolist()
    wide, gap = 130.0, 170.0
    for head, group in enumerate(shared):
        paint = (BLUE, ORANGE)[group % 2]
        drawing.box(MARGIN + 30 + head * gap, 30, wide, CELL, f"query {head}", paint=paint)
        end = MARGIN + 30 + (group * 2 + 0.5) * gap + wide / 2
        drawing.line((MARGIN + 30 + head * gap + wide / 2, 30 + CELL), (end, 118), arrow=True)
    for group in range(config.n_kv_heads):
        x = MARGIN + 30 + (group * 2 + 0.5) * gap
        drawing.box(x, 120, wide, CELL, f"key/value {group}", paint=(BLUE, ORANGE)[group % 2])
    return drawing


def lens() -> Drawing:
    """What each layer's residual stream would say comes next."""
    model, tokenizer = bundled()
    ids = tokenizer.encode(STORY, bos=True, eos=False)
    each = lenses(model, read(model, ids, "causal"), ids, 3)
    drawing = Drawing(
        "The residual stream, layer by layer",
        f"After '{STORY}': the three likeliest next tokens by the embedding alone and by the stream after each layer.",
    )
    drawing.text(MARGIN, 32, f"after: {STORY}", mono=True, bold=True)
    for row, found in enumerate(each):
        y = 48 + row * 40
        drawing.text(MARGIN, y + 19, "embedding" if row == 0 else f"after layer {row - 1}")
        likely = zip(pieces_of(tokenizer, found.ids[-1].tolist()), found.probabilities[-1].tolist(), strict=True)
        for column, (piece, probability) in enumerate(likely):
            drawing.box(150 + column * 198, y, 190, CELL, f"{piece} {probability:.2f}", paint=shade(probability * 0.4))
    return drawing


def sampling() -> Drawing:
    """The next token's probabilities at three temperatures."""
    model, tokenizer = bundled()
    ids = torch.tensor([tokenizer.encode(OPENING, bos=True, eos=False)])
    with torch.inference_mode():
        logits = model.next_logits(ids)[0]  # v
    best = logits.topk(6).indices
    drawing = Drawing(
        "One set of logits, three temperatures",
        f"The six likeliest tokens after '{OPENING}' and their probabilities at temperatures 0.5, 1 and 2: the higher "
        "it is, the more alike they are.",
    )
    for column, temperature in enumerate((0.5, 1.0, 2.0)):
        drawing.text(150 + column * 200, 32, f"temperature {temperature:g}", bold=True)
        chances = (logits / temperature).softmax(-1)[best].tolist()
        for row, (piece, chance) in enumerate(zip(pieces_of(tokenizer, best.tolist()), chances, strict=True)):
            y = 46 + row * 30
            if column == 0:
                drawing.text(MARGIN, y + 17, piece, mono=True)
            drawing.box(150 + column * 200, y, max(1, round(chance * 130)), 22, paint=BLUE)
            drawing.text(156 + column * 200 + round(chance * 130), y + 16, f"{chance:.3f}", size=12, colour=INK)
    return drawing


def adamw() -> Drawing:
    """How far the first steps go, with the bias correction and without it."""
    lines = {}
    for name, correct in (("corrected", True), ("not corrected", False)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = AdamW([parameter], lr=1.0, correct_bias=correct)
        taken = []
        for step in range(1, 41):
            before, parameter.grad = parameter.item(), torch.ones(1)
            optimizer.step()
            taken.append((float(step), before - parameter.item()))
        lines[name] = taken
    drawing = Drawing(
        "The first steps of AdamW",
        "The size of each step, in learning rates, where every gradient is 1: with the bias correction it is 1 from "
        "the first step on; without it, the first step is 3.2 times as long and the next ones longer still.",
    )
    curves(drawing, lines, "step", "length of the step / learning rate")
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "tokens": tokens,
    "rope": rope,
    "attention": attention,
    "masks": masks,
    "swiglu": swiglu,
    "grouped-queries": groups,
    "residual-stream": lens,
    "sampling": sampling,
    "adamw": adamw,
}
