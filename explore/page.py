"""Write an HTML page: the HTML, the style and the scripts of `page/`, with the values that they show.

The page needs no other file and no network: its content policy forbids both.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils import UserError, atomic_write

PAGE_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("base", "charts", "tokens", "attention", "rotation", "lens", "decision", "run", "main")
MAX_PAGE_BYTES = 5_000_000


def write_page(path: str, content: Mapping[str, Any]) -> None:
    """Write the page whole or not at all.

    content: plain values, see `inspected` and `trained`. Raises `UserError` if the page would be too large.
    """
    page = render(content).encode()
    if len(page) > MAX_PAGE_BYTES:
        size, most = (f"{each / 1e6:.1f} MB" for each in (len(page), MAX_PAGE_BYTES))
        raise UserError(f"the page would have {size}, and {most} is the most; give fewer or shorter texts")
    with atomic_write(path, "wb") as file:
        file.write(page)


def render(content: Mapping[str, Any]) -> str:
    """The page as HTML."""
    parts = {
        "title": html.escape(title_of(content)),
        "style": _part("style.css"),
        "data": as_script(content),
        "script": "\n".join(_part(f"{name}.js") for name in SCRIPTS),
    }
    return re.sub("<!--(title|style|data|script)-->", lambda mark: parts[mark[1]], _part("page.html"))


def title_of(content: Mapping[str, Any]) -> str:
    return content["model"]["name"] if "model" in content else content["run"]["name"]


def as_script(content: Mapping[str, Any]) -> str:
    """JSON inside of an HTML page, where no `</script>` or `<!--` in a text may end it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _part(name: str) -> str:
    return (PAGE_FOLDER / name).read_text(encoding="utf-8")
