"""Compute the worked examples of the pages about components, and draw their pictures.

    python -m explore.components [NAME ...]

A NAME is that of a page, as in `rope`; without one all are made. Each example stands in its page; what it prints is
written below it. The pictures go to `docs/components/pictures/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.programs import ArgumentParser, run_main
from utils import UserError, atomic_write


def main() -> None:
    parser = ArgumentParser(prog="python -m explore.components", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="a page, as in rope; all if none is named")
    names = parser.parse_args().names

    from explore.components.pages import pages
    from explore.components.pictures import FOLDER, PICTURES

    found = pages()
    if unknown := {*names} - {page.name for page in found}:
        raise UserError(f"there is no page {min(unknown)}; there are {', '.join(page.name for page in found)}")
    for page in found:
        if not names or page.name in names:
            write(page.path, page.rewritten())
    for name, draw in PICTURES.items():
        if not names or name in names:
            write(FOLDER / f"{name}.svg", draw().xml())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(run_main(main))
