"""What a page about a component says of the code: quoted lines, tests, messages, links, pictures, numbers.

Three more of its sections have a fixed form:

- "In the code": a link to a file, then lines of this file in a block of Python.
- "Judged by": tests as `tests/file.py::name`, and parts of `sanity_check.py --parts` by their names.
- "A common mistake": a line that begins with > quotes a grading script's message about it.
"""

from __future__ import annotations

import re
from pathlib import Path

from explore.components.pages import Page

SECTIONS = ("Formula", "Shapes", "In the code", "Judged by", "With numbers", "A common mistake", "Read more")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def section(page: Page, title: str) -> str:
    """The text below a heading; empty if the page has no such heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def prose(page: Page) -> str:
    """The page without its blocks of code and formulas."""
    return re.sub(r"```.*?```", "", page.text, flags=re.DOTALL)


def links(page: Page) -> list[str]:
    """All links to files of the project, pictures included, as they stand in the text."""
    return [link for link in re.findall(r"\]\(([^)]+)\)", prose(page)) if not link.startswith("https://")]


def pictures(page: Page) -> list[tuple[str, Path]]:
    """The description and the file of each picture."""
    found = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", page.text)
    return [(words, page.path.parent / link) for words, link in found]


def quotes(page: Page) -> list[tuple[Path, tuple[str, ...]]]:
    """Every block of Python in "In the code": the file of the last link before it, and the lines."""
    found, file = [], page.path
    for link, block in re.findall(r"\]\(([^)]+)\)|```python\n(.*?)```", section(page, "In the code"), re.DOTALL):
        if link:
            file = (page.path.parent / link).resolve()
        else:
            found.append((file, tuple(line.strip() for line in block.splitlines() if line.strip())))
    return found


def named_tests(page: Page) -> list[tuple[str, str]]:
    """File and name of every test on the page."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.text)


def named_parts(page: Page) -> list[str]:
    """The names of the sanity check's parts on the page."""
    return re.findall(r'"([^"]+)"', section(page, "Judged by"))


def verdicts(page: Page) -> list[str]:
    """The grading scripts' messages about the mistake."""
    return re.findall(r"^> (.+)$", section(page, "A common mistake"), re.MULTILINE)


def has_lines(file: Path, quoted: tuple[str, ...]) -> bool:
    """Whether the file has these lines in this order, without other lines between; indentation does not count."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = len(quoted)
    return any(tuple(lines[first : first + count]) == quoted for first in range(len(lines) - count + 1))


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
