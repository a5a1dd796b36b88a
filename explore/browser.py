"""A headless Chromium, driven over Chrome's DevTools protocol through a pipe: the standard library is enough."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils import UserError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SWITCHES = (
    "--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--force-color-profile=srgb", "--mute-audio",
)  # fmt: skip
PATIENCE = 60.0  # seconds
DRAWN = "${state.text}.${state.layer}.${state.head}.${state.token}"  # what the maps say that they show


def find_browser() -> str | None:
    """Its path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` are what it said of itself, `requests` what it asked the network for."""

    def __init__(self, process: subprocess.Popen, commands: int, answers: int):
        self.process, self.commands, self.answers = process, commands, answers
        self.number, self.rest = 0, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = 0
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = ""
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers. Raises `RuntimeError` where it refuses or does not answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if getattr(self, "session", ""):
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while (answer := self.hear(end)).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def hear(self, end: float) -> dict[str, Any]:
        """The next message, of which events are noted."""
        while b"\0" not in self.rest:
            if not select.select([self.answers], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RuntimeError(f"the browser has not answered for {PATIENCE:.0f} s")
            piece = os.read(self.answers, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value", each)) for each in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired":
            self.loaded += 1

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page, and wait until it is drawn."""
        self.errors.clear()
        self.requests.clear()
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        loaded = self.loaded
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.loaded == loaded:
            self.hear(end)
        self.wait("typeof page !== 'undefined' && (!page.texts || byId('maps').dataset.drawn !== undefined)")

    def size(self, width: int, height: int) -> None:
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)

    def value(self, expression: str) -> Any:
        """Of JavaScript on the page; a promise is waited for. Raises `RuntimeError` where it fails."""
        how = dict(returnByValue=True, awaitPromise=True)
        answer = self.ask("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            if time.monotonic() > end:
                raise RuntimeError(f"waited in vain for {expression}")
            time.sleep(0.02)

    def look_at(self, state: str) -> None:
        """What the page is to be about, as `token=3,layer=1`. Raises `UserError` for anything else."""
        try:
            wanted = {name: int(value) for name, _, value in (each.partition("=") for each in state.split(",") if each)}
        except ValueError:
            raise UserError(f"--state {state}: expected names and numbers, as in token=3,layer=1") from None
        self.value(f"update({json.dumps(wanted)})")
        self.wait(f"byId('maps').dataset.drawn === `{DRAWN}` || !page.texts")

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """With the mouse, at a place in the element from (0, 0) to (1, 1)."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{chosen}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box, scrolled = self.box_of(selector), self.value("scrollY")
        place = dict(x=box["x"] + x * box["width"], y=box["y"] - scrolled + y * box["height"])
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def box_of(self, selector: str) -> dict[str, float]:
        """Where an element lies on the whole page."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return self.value(f"(({{x, y, width, height}}) => ({{x, y: y + scrollY, width, height}}))({box})")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, clip: str = "html") -> bytes:
        """A PNG of an element, else of the whole page."""
        how = dict(format="png", captureBeyondViewport=True, clip=self.box_of(clip) | {"scale": 1})
        return base64.b64decode(self.ask("Page.captureScreenshot", **how)["data"])


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """profile: a new folder. A browser of its own, which has ended afterwards. Raises `RuntimeError`."""
    path = find_browser()
    if path is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
    heard, commands = os.pipe()  # the browser reads commands from 3 and writes answers to 4
    answers, said = os.pipe()
    switches = [*SWITCHES, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        switches.append("--no-sandbox")
    script = f'exec "$0" "$@" 3<&{heard} 4>&{said}'
    process = subprocess.Popen(
        ["bash", "-c", script, path, *switches, "about:blank"],
        pass_fds=(heard, said), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(heard)
    os.close(said)
    try:
        yield Browser(process, commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
