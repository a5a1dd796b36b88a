"""The parts of a page about a component that can be wrong: lines of code, tests, numbers, pictures, links.

A page is Markdown for GitHub. Four of its sections have a fixed form:

- "In the code": a link to a file, then lines of this file in a block of Python.
- "Judged by": tests as `tests/file.py::name`, and parts of `sanity_check.py --parts` by their names.
- "With numbers": a block of Python that runs in the project's folder, then a block with its output.
- "A common mistake": a line that begins with > quotes a grading script's message about it.
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
    """Lines of code that a page quotes, and the file that it names for them."""

    file: Path
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page about one component."""

    path: Path
    text: str

    @classmethod
    def of(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        return self.path.stem

    def section(self, title: str) -> str:
        """The text below a heading; empty if the page has no such heading."""
        found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", self.text, re.DOTALL | re.MULTILINE)
        return found[1] if found else ""

    def links(self) -> list[str]:
        """All links to files of the project, pictures included, as they stand in the text."""
        prose = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)
        return [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith("https://")]

    def pictures(self) -> list[tuple[str, Path]]:
        """The description and the file of each picture."""
        found = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", self.text)
        return [(words, self.path.parent / target) for words, target in found]

    def quotes(self) -> list[Quote]:
        """Every block of Python in "In the code", each with the last link before it."""
        found, file = [], self.path
        for link, block in re.findall(r"\]\(([^)]+)\)|```python\n(.*?)```", self.section("In the code"), re.DOTALL):
            if link:
                file = (self.path.parent / link).resolve()
            else:
                found.append(Quote(file, tuple(line.strip() for line in block.splitlines() if line.strip())))
        return found

    def tests(self) -> list[tuple[str, str]]:
        """File and name of every test on the page."""
        return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", self.text)

    def parts(self) -> list[str]:
        """The names of the sanity check's parts on the page."""
        return re.findall(r'"([^"]+)"', self.section("Judged by"))

    def verdicts(self) -> list[str]:
        """The grading scripts' messages about the mistake."""
        return re.findall(r"^> (.+)$", self.section("A common mistake"), re.MULTILINE)

    def example(self) -> tuple[str, str]:
        """The worked example and its output on the page. Raises `UserError` if the page has none."""
        found = EXAMPLE.search(self.text)
        if not found:
            raise UserError(f'{self.path.name}: there is no Python and no output below "With numbers"')
        return found[2], found[4]

    def rewritten(self) -> str:
        """The page with the example's present output."""
        printed = run(self.example()[0], self.path)
        return EXAMPLE.sub(lambda found: "".join((*found.group(1, 2, 3), printed, found[5])), self.text)


def pages() -> list[Page]:
    """All pages about components, without the README files."""
    return [Page.of(path) for folder in FOLDERS for path in sorted(folder.glob("*.md")) if path.stem != "README"]


def run(code: str, path: Path) -> str:
    """Run an example in this process, with its own globals. Returns its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"<{path.name}>", "exec"), {"__name__": "example"})
    return printed.getvalue()


def stands_in(quote: Quote) -> bool:
    """Whether the file has these lines in this order, without other lines between; indentation does not count."""
    lines = [line.strip() for line in quote.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = len(quote.lines)
    return any(tuple(lines[first : first + count]) == quote.lines for first in range(len(lines) - count + 1))


def is_close(one: str, other: str, tolerance: float = 2.0) -> bool:
    """Whether two texts are equal, up to `tolerance` units of the last digit of each decimal number."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= tolerance * max(_unit(a), _unit(b)) * 1.001 for a, b in pairs)


def _unit(number: str) -> float:
    """The value of one unit of the last digit."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
