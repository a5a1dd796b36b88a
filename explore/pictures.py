"""Pictures of a page, taken in a headless Chromium: those of `docs/looking.md`.

    python -m explore.pictures page.html --out FOLDER --sections attention lens [--width 900] [--dark]

A PNG for each section that is named, with what is first looked at on the page.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import zlib
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.programs import ArgumentParser, run_main
from explore.browser import Browser, browsing, find_browser
from utils import UserError, atomic_write

SECTIONS = ("tokens", "decision", "attention", "rotation", "lens", "run", "curves")


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m explore.pictures", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("page", metavar="PAGE.html", help="made by python -m explore")
    add("--out", metavar="FOLDER", required=True, help="where the pictures are written, each named after its section")
    add("--sections", nargs="+", choices=SECTIONS, required=True, help="which of them")
    add("--width", type=int, default=900, help="of the page, in points")
    add("--dark", action="store_true", help="as people see it who prefer dark pages")
    add("--state", default="", metavar="NAME=NUMBER,...", help="what is looked at: text, token, layer, head, from 0")
    return parser.parse_args(argv)


def main() -> None:
    args = get_args()
    page, folder = Path(args.page), Path(args.out)
    if not page.is_file():
        raise UserError(f"{page} does not exist, or is no file")
    if find_browser() is None:
        raise UserError("no Chromium is installed here (on Debian: apt-get install chromium)")
    if not folder.is_dir():
        raise UserError(f"--out {folder} is no folder; create it first")
    with TemporaryDirectory() as profile, browsing(Path(profile) / "profile") as browser:
        browser.open(page, width=args.width, dark=args.dark)
        browser.look_at(args.state)
        for name in args.sections:
            if browser.value(f"byId('{name}').hidden"):
                raise UserError(f"{page} has no section {name}")
            with atomic_write(folder / f"{name}.png", "wb") as file:
                file.write(in_few_colours(browser, browser.picture(clip=f"#{name}")))
            print(f"wrote {folder / f'{name}.png'}")


# Of a picture the 256 colours that it has most of, and for each dot the nearest of them.
REDUCED = """(async (data) => {
  const picture = new Image();
  picture.src = `data:image/png;base64,${data}`;
  await picture.decode();
  const { width, height } = picture, context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(picture, 0, 0);
  const dots = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer), counts = new Map();
  for (const dot of dots) counts.set(dot, (counts.get(dot) ?? 0) + 1);
  const palette = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, 256);
  const channels = (dot) => [dot & 255, (dot >> 8) & 255, (dot >> 16) & 255], chosen = palette.map(channels);
  const nearest = new Map();
  for (const dot of counts.keys()) {
    const [r, g, b] = channels(dot);
    const far = chosen.map(([x, y, z]) => (x - r) ** 2 + (y - g) ** 2 + (z - b) ** 2);
    nearest.set(dot, far.indexOf(Math.min(...far)));
  }
  let indices = "";
  for (const dot of dots) indices += String.fromCharCode(nearest.get(dot));
  return { width, height, palette: chosen.flat(), indices: btoa(indices) };
})"""


def in_few_colours(browser: Browser, png: bytes) -> bytes:
    """The same picture as a PNG with a palette, which takes a quarter of the bytes. The browser reads its dots."""
    found = browser.value(f"{REDUCED}({json.dumps(base64.b64encode(png).decode())})")
    width, height, indices = found["width"], found["height"], base64.b64decode(found["indices"])
    rows = b"".join(b"\0" + indices[row * width : (row + 1) * width] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # a byte for each dot: its place in the palette
    parts = (b"IHDR", header), (b"PLTE", bytes(found["palette"])), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


if __name__ == "__main__":
    sys.exit(run_main(main))
