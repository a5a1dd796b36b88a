"""The worked example of a page about a component.

A page is Markdown for GitHub. Below its heading "With numbers" stand a block of Python, which runs in the project's
folder, and then a block with its output.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from utils import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (ROOT / "docs" / "components", ROOT / "bert" / "components")
EXAMPLE = re.compile(r"(## With numbers\n.*?```python\n)(.*?)(```\n\n```\n)(.*?)(```\n)", re.DOTALL)


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
