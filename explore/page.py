"""Write an HTML page: the HTML, the style and the scripts of `page/`, with the values that they show.

The page needs no other file and no network: its content policy forbids both.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils import UserError, atomic_write

PAGE_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("base", "charts", "tokens", "attention", "rotation", "lens", "decision", "run", "main")
LIVE_SCRIPTS = (  # before main
    "words", "language", "machine", "address", "breaks", "numbers", "generating", "classifying", "live",
)  # fmt: skip
WORKER_SCRIPTS = ("model", "tokenizer", "sampling", "reading", "worker")
MAX_PAGE_BYTES, MAX_LIVE_BYTES = 5_000_000, 60_000_000


def write_page(path: str, content: Mapping[str, Any], weights: bytes | None = None) -> None:
    """Write the page whole or not at all.

    content: plain values, see `inspected`, `trained` and `live`. weights: of a live page. Raises `UserError` if the
    page would be too large.
    """
    page = render(content, weights).encode(errors="replace")  # the name of a file may be no text
    most, remedy = (
        (MAX_PAGE_BYTES, "give fewer or shorter texts") if weights is None else (MAX_LIVE_BYTES, "use --serve")
    )
    if len(page) > most:
        raise UserError(f"the page would have {len(page) / 1e6:.1f} MB, and {most / 1e6:.1f} MB is the most; {remedy}")
    with atomic_write(path, "wb") as file:
        file.write(page)


def render(content: Mapping[str, Any], weights: bytes | None = None) -> str:
    """The page as HTML. A live page whose weights are None is a served one."""
    parts = {
        "title": html.escape(title_of(content)),
        "style": _part("style.css"),
        "data": as_script(content),
        "script": "\n".join(_part(f"{name}.js") for name in SCRIPTS),
        "policy": "",
        "live": "",
        "numbers": "",
    }
    if "live" in content:
        names = [*SCRIPTS[:-1], *(f"live/{name}" for name in LIVE_SCRIPTS), SCRIPTS[-1]]
        parts["script"] = "\n".join(_part(f"{name}.js") for name in names)
        parts["style"] += _part("live/live.css")
        parts["live"], parts["numbers"] = _part("live/live.html"), _part("live/numbers.html")
        parts["policy"] = "worker-src blob:; " if weights is not None else "connect-src 'self'; "
        parts["weights"] = "" if weights is None else base64.b64encode(weights).decode()
        parts["worker"] = "" if weights is None else worker_script()
    page = re.sub(
        "<!--(title|style|data|script|policy|live|numbers)-->", lambda mark: parts[mark[1]], _part("page.html")
    )
    return page.replace("<!--held-->", _held(parts), 1)


def worker_script() -> str:
    """All that the thread runs which computes a live page."""
    return "\n".join(_part(f"live/{name}.js") for name in WORKER_SCRIPTS)


def _held(parts: Mapping[str, str]) -> str:
    """The elements that hold a live page's weights and the script of its thread: no browser runs or shows them."""
    held = {name: parts[name] for name in ("weights", "worker") if parts.get(name)}
    return "".join(f'<script type="text/plain" id="{name}">{text}</script>\n' for name, text in held.items())


def title_of(content: Mapping[str, Any]) -> str:
    return content["model"]["name"] if "model" in content else content["run"]["name"]


def as_script(content: Mapping[str, Any]) -> str:
    """JSON inside of an HTML page, where no `</script>` or `<!--` in a text may end it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _part(name: str) -> str:
    return (PAGE_FOLDER / name).read_text(encoding="utf-8")
