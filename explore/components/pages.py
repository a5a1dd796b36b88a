"""What a page about a component holds that can be wrong: lines of code, tests, numbers, links.

A page is Markdown for GitHub. Four of its sections are read here:

- "In the code": a link to a file, then lines that stand in it, in a block of Python.
- "Judged by": tests as `tests/file.py::name`, and parts of `sanity_check.py --parts` by their names.
- "With numbers": a block of Python that anybody can run in the project's folder, then a block of what it prints.
- "A common mistake": a line that begins with > holds what a grading script says to it.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (ROOT / "docs" / "components", ROOT / "bert" / "components")
SECTIONS = ("Formula", "Shapes", "In the code", "Judged by", "With numbers", "A common mistake", "Read more")
EXAMPLE = re.compile(r"(## With numbers\n.*?```python\n)(.*?)(```\n\n```\n)(.*?)(```\n)", re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


class Quote(NamedTuple):
    """Lines of code, and the file that is said to hold them."""

    file: Path
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """One component."""

    path: Path
    text: str

    @classmethod
    def of(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        return self.path.stem

    def section(self, title: str) -> str:
        """What stands below a heading; nothing where there is none."""
        found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", self.text, re.DOTALL | re.MULTILINE)
        return found[1] if found else ""

    def links(self) -> list[str]:
        """Of files of the project, as they are written; those of pictures too."""
        prose = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)
        return [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith("https://")]

    def pictures(self) -> list[tuple[str, Path]]:
        """The description and the file of each picture."""
        found = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", self.text)
        return [(words, self.path.parent / target) for words, target in found]

    def quotes(self) -> list[Quote]:
        """Every block of Python in "In the code", with the last file that was linked before it."""
        found, file = [], self.path
        for link, block in re.findall(r"\]\(([^)]+)\)|```python\n(.*?)```", self.section("In the code"), re.DOTALL):
            if link:
                file = (self.path.parent / link).resolve()
            else:
                found.append(Quote(file, tuple(line.strip() for line in block.splitlines() if line.strip())))
        return found

    def tests(self) -> list[tuple[str, str]]:
        """File and name of every test that is said to judge it."""
        return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", self.text)

    def parts(self) -> list[str]:
        """What the sanity check calls the parts that it judges."""
        return re.findall(r'"([^"]+)"', self.section("Judged by"))

    def verdicts(self) -> list[str]:
        """What a grading script says to the mistake."""
        return re.findall(r"^> (.+)$", self.section("A common mistake"), re.MULTILINE)

    def example(self) -> tuple[str, str]:
        """The worked example, and what it is said to print. Raises `UserError` where the page has none."""
        found = EXAMPLE.search(self.text)
        if not found:
            raise UserError(f'{self.path.name}: there is no Python and no output below "With numbers"')
        return found[2], found[4]

    def rewritten(self) -> str:
        """The page with what its example prints now."""
        printed = run(self.example()[0], self.path)
        return EXAMPLE.sub(lambda found: "".join((*found.group(1, 2, 3), printed, found[5])), self.text)


def pages() -> list[Page]:
    """All of them, but the lists of them."""
    return [Page.of(path) for folder in FOLDERS for path in sorted(folder.glob("*.md")) if path.stem != "README"]


def run(code: str, path: Path) -> str:
    """What an example prints. It is computed in this process, in a space of its own."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"<{path.name}>", "exec"), {"__name__": "example"})
    return printed.getvalue()


def stands_in(quote: Quote) -> bool:
    """Whether the lines stand in the file one after another, however they are indented."""
    lines = [line.strip() for line in quote.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = len(quote.lines)
    return any(tuple(lines[first : first + count]) == quote.lines for first in range(len(lines) - count + 1))


def is_close(one: str, other: str, tolerance: float = 2.0) -> bool:
    """Whether two texts say the same, their decimal numbers up to so many units of their last digit."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= tolerance * max(_unit(a), _unit(b)) * 1.001 for a, b in pairs)


def _unit(number: str) -> float:
    """Of the last digit that is written."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
