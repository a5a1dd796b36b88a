"""Compute the worked examples of the pages about components.

    python -m explore.components [NAME ...]

NAME is a page, such as `rope`; without a name all pages are written. Each example stands in its page; its output is
written below it.
"""

from __future__ import annotations

import sys

from engine.programs import ArgumentParser, run_main
from utils import UserError, atomic_write


def main() -> None:
    parser = ArgumentParser(prog="python -m explore.components", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="a page, as in rope; all if none is named")
    names = parser.parse_args().names

    from explore.components.pages import pages

    found = pages()
    if unknown := {*names} - {page.name for page in found}:
        raise UserError(f"there is no page {min(unknown)}; there are {', '.join(page.name for page in found)}")
    for page in found:
        if not names or page.name in names:
            text = page.rewritten()
            with atomic_write(page.path) as file:
                file.write(text)
            print(f"wrote {page.path}")


if __name__ == "__main__":
    sys.exit(run_main(main))
