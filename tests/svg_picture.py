"""The committed SVG pictures as words, boxes and lines, which tests compare with what the code computes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
WHITE, GREY, BLUE, GREEN = "#ffffff", "#eff2f5", "#ddf4ff", "#dafbe1"
ORANGE, PURPLE = "#fff1e5", "#fbefff"
SEGMENTS = (BLUE, ORANGE)  # the first and the second


class Box(NamedTuple):
    """A rectangle and the words in it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    words: str


class Picture:
    """words: all texts in the order of the file; boxes: without the page itself; curves: lines by color."""

    def __init__(self, path: Path):
        root = ElementTree.parse(path).getroot()
        self.name, self.root = path.stem, root
        self.title, self.description = root.find(f"{SVG}title").text, root.find(f"{SVG}desc").text
        texts = [*root.iter(f"{SVG}text")]
        self.words = [text.text for text in texts]
        self.colors = {text.get("fill"): text.text for text in texts}  # the last text of each color
        self.boxes: list[Box] = []
        for rect in [*root.iter(f"{SVG}rect")][1:]:
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            inside = [text.text for text in texts if self._is_inside(text, x, y, width, height)]
            self.boxes.append(Box(x, y, width, height, rect.get("fill"), " ".join(inside)))
        self.curves = [
            (line.get("stroke"), [tuple(map(float, point.split(","))) for point in line.get("points").split()])
            for line in root.iter(f"{SVG}polyline")
        ]

    @staticmethod
    def _is_inside(text: ElementTree.Element, x: float, y: float, width: float, height: float) -> bool:
        return x <= float(text.get("x")) <= x + width and y <= float(text.get("y")) <= y + height

    def rows(self) -> list[list[Box]]:
        """The boxes that stand at one height, from left to right."""
        heights = sorted({box.y for box in self.boxes})
        return [sorted(box for box in self.boxes if box.y == height) for height in heights]

    def check(self) -> None:
        """It has a title and a description for those who hear it, and nothing that runs."""
        ids = [self.root.find(f"{SVG}{tag}").get("id") for tag in ("title", "desc")]
        assert self.root.get("role") == "img" and self.root.get("aria-labelledby").split() == ids
        assert len(self.title) > 5 and len(self.description) > 50
        tags = {element.tag.removeprefix(SVG) for element in self.root.iter()}
        assert tags <= {"svg", "title", "desc", "rect", "text", "polyline", "polygon"}
