"""Draw what the page shows.

    python -m bert.drawings [--out FOLDER]

Each drawing is an SVG file; without --out they are written to `bert/drawings/`, where `bert/README.md` shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from engine.programs import ArgumentParser, run_main
from explore.svg import Drawing
from utils import UserError, atomic_write

FOLDER = Path(__file__).parent


def drawings() -> dict[str, Callable[[], Drawing]]:
    """What draws each file."""
    from bert.drawings import inputs, models

    return {
        "embeddings": inputs.embeddings,
        "noise": inputs.noise_rule,
        "next-sentence": inputs.next_sentence,
        "set-ups": models.set_ups,
        "layers": models.layers,
    }


def main() -> None:
    parser = ArgumentParser(prog="python -m bert.drawings", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", metavar="FOLDER", default=str(FOLDER), help="where the SVG files are written")
    folder = Path(parser.parse_args().out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror or error}") from None
    for name, draw in drawings().items():
        file = folder / f"{name}.svg"
        with atomic_write(file) as out:
            out.write(draw().xml())
        print(f"wrote {file}")


if __name__ == "__main__":
    sys.exit(run_main(main))
