"""An installed Chromium without a window, driven by Playwright: the pages of `explore/` are opened in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRAWN = "byId('maps').dataset.drawn === `${state.text}.${state.layer}.${state.head}.${state.token}`"


class Browser:
    """One tab. `errors`: the page's errors and warnings; `requests`: the addresses that it requested."""

    def __init__(self, tab: Any):
        self.tab = tab  # playwright.sync_api.Page
        self.errors: list[str] = []
        self.requests: list[str] = []
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", self._note)
        tab.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.errors.append(message.text)

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it is drawn. width, height: of the window, in pixels."""
        self.errors.clear()
        self.requests.clear()
        self.size(width, height)
        self.tab.emulate_media(color_scheme="dark" if dark else "light")
        self.tab.goto(path.resolve().as_uri())
        self.wait("typeof page !== 'undefined' && (!page.texts || byId('maps').dataset.drawn !== undefined)")

    def size(self, width: int, height: int) -> None:
        self.tab.set_viewport_size({"width": width, "height": height})

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        return self.tab.evaluate(expression)

    def wait(self, expression: str) -> None:
        """Wait until the JavaScript expression is true. Playwright's own waiting is refused by the page's policy."""
        for _ in range(3000):
            if self.value(expression):
                return
            self.tab.wait_for_timeout(20)  # ms
        raise TimeoutError(expression)

    def update(self, state: str) -> None:
        """Choose a part of the page, such as `layer: 1, head: 2`, and wait until its maps are drawn."""
        self.value(f"update({{ {state} }})")
        self.wait(DRAWN)

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click with the mouse at a place in the element, from (0, 0) to (1, 1)."""
        element = self.tab.locator(selector).first
        box = element.bounding_box()
        element.click(position={"x": x * box["width"], "y": y * box["height"]})

    def press(self, key: str) -> None:
        self.tab.keyboard.press(key)

    def accessibility_tree(self) -> list[dict[str, Any]]:
        """The nodes that assistive technology sees."""
        nodes = self.tab.context.new_cdp_session(self.tab).send("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def width_of(self, words: str) -> float:
        """The width of words in the page's font, in pixels."""
        script = """(words) => {
          const context = new OffscreenCanvas(1, 1).getContext("2d");
          context.font = getComputedStyle(document.body).font;
          return context.measureText(words).width;
        }"""
        return self.tab.evaluate(script, words)

    def picture(self, selector: str = "html") -> bytes:
        """A PNG of an element, without the bar that stays in the window."""
        self.value("scrollTo(0, 0)")
        whole = {side: round(pixels) for side, pixels in self.tab.locator(selector).bounding_box().items()}
        return self.tab.screenshot(full_page=True, clip=whole)  # browsers differ in what they do with parts of a pixel


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that ends with the block. Skips the test where there is no Playwright or no Chromium that starts."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no page is opened")
    path = next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed: no page is opened")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path)
        except playwright.Error as error:
            pytest.skip(f"{path} does not start here: {error}")
        yield Browser(browser.new_page())
        browser.close()


def looks(narrow: int, wide: int) -> list:
    """Parameters of a test: a width and whether the theme is dark. Two of the four are done with `-m slow` alone."""
    rare = [pytest.param(*look, marks=pytest.mark.slow) for look in ((narrow, False), (wide, True))]
    return [(narrow, True), (wide, False), *rare]
