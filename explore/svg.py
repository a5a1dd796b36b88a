"""Drawings as SVG: boxes with words in them, words beside them, and lines.

A drawing has a white page of its own, so that it reads alike in light and in dark mode, and a title and a description
for those who have it read to them. How wide words are is estimated; what does not fit is an error, not a bad drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

WIDTH = 760  # of every drawing
MARGIN = 20
SIZE = 14  # of letters
LINE = 20  # from one line of words to the next
CELL = 28  # how high a box with one line is
LEFT = 150  # where the columns of a table begin, after their labels
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
SANS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, FAINT = "#1f2328", "#59636e"


class Paint(NamedTuple):
    """The inside of a box, and its edge."""

    fill: str
    stroke: str


WHITE, GREY = Paint("#ffffff", "#d1d9e0"), Paint("#eff2f5", "#818b98")
BLUE, GREEN = Paint("#ddf4ff", "#0969da"), Paint("#dafbe1", "#1a7f37")
ORANGE, PURPLE = Paint("#fff1e5", "#bc4c00"), Paint("#fbefff", "#8250df")
SEGMENTS = (BLUE, ORANGE)  # the first and the second


def width_of(words: str, size: float = SIZE, mono: bool = True, bold: bool = False) -> float:
    """About as wide as the widest of the fonts that are named makes them."""
    return len(words) * size * (0.61 if mono else 0.64 if bold else 0.58)


def columns(*rows: Sequence[str], left: float = LEFT, gap: float = 4) -> Iterator[tuple[float, float]]:
    """Where the columns of a table of such words begin, and how wide they are."""
    for cells in zip(*rows, strict=True):
        width = round(max(map(width_of, cells)) + 8)
        yield left, width
        left += width + gap


class Drawing:
    """A page that grows downwards with what is drawn on it. Raises `ValueError` for words that do not fit."""

    def __init__(self, title: str, description: str):
        self.bottom = 0.0
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        for name, words in (("title", title), ("desc", description)):
            ElementTree.SubElement(self._root, name, id=name).text = words
        self._root.set("aria-labelledby", "title desc")
        self._page = self._add("rect", x=0.5, y=0.5, rx=8, fill=WHITE.fill, stroke=WHITE.stroke)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: float = SIZE,
        colour: str = INK,
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Words whose letters stand on y, and begin at x, or have it as their "middle"."""
        width = width_of(words, size, mono, bold)
        left = x - width / 2 if anchor == "middle" else x
        if left < 0 or left + width > WIDTH:
            raise ValueError(f"{words!r} at {x:g} does not fit on the page")
        style = {"font-family": MONO if mono else SANS, "font-size": f"{size:g}", "fill": colour}
        if bold:
            style["font-weight"] = "bold"
        if anchor != "start":
            style["text-anchor"] = anchor
        self._add("text", x=x, y=y, **style).text = words
        self._reach(y)

    def box(self, x: float, y: float, width: float, height: float, *lines: str, paint: Paint = WHITE, **style) -> None:
        """A box with lines of words in its middle. style: of `text`."""
        style = {"mono": True, **style}
        widest = max(
            (width_of(line, style.get("size", SIZE), style["mono"], style.get("bold", False)) for line in lines),
            default=0,
        )
        if widest > width or len(lines) * LINE > height + 1:
            raise ValueError(f"{' / '.join(lines)!r} does not fit into a box of {width:g} x {height:g}")
        self._add("rect", x=x, y=y, width=width, height=height, rx=4, fill=paint.fill, stroke=paint.stroke)
        first = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * LINE, line, anchor="middle", **style)
        self._reach(y + height)

    def line(self, *points: tuple[float, float], arrow: bool = False, colour: str = FAINT) -> None:
        """From point to point; an arrow's head is at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._add("polyline", points=path, fill="none", stroke=colour, **{"stroke-width": "1.5"})
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            across, along = 4 * (y - y0) / length, 4 * (x - x0) / length  # sine and cosine, as long as the head is wide
            corners = (
                (x, y),
                (x - 2 * along - across, y - 2 * across + along),
                (x - 2 * along + across, y - 2 * across - along),
            )
            self._add("polygon", points=" ".join(f"{a:g},{b:g}" for a, b in corners), fill=colour)
        self._reach(max(y for _, y in points))

    def xml(self) -> str:
        """The file."""
        height = round(self.bottom + MARGIN)
        self._root.set("viewBox", f"0 0 {WIDTH} {height}")
        self._root.set("width", str(WIDTH))
        self._root.set("height", str(height))
        self._page.set("width", str(WIDTH - 1))
        self._page.set("height", str(height - 1))
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, **attributes: str | float) -> ElementTree.Element:
        named = {name: value if isinstance(value, str) else f"{value:g}" for name, value in attributes.items()}
        return ElementTree.SubElement(self._root, tag, named)

    def _reach(self, y: float) -> None:
        self.bottom = max(self.bottom, y)
