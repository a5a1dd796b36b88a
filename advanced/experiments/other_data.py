"""Two more data sets for the tables, made of files that the Natural Language Toolkit's data collection has.

    python -m advanced.experiments.other_data subjectivity.zip pros_cons.zip

https://github.com/nltk/nltk_data has both in packages/corpora, under the licence CC BY 4.0: sentences about films that
tell the plot or judge it (Pang & Lee 2004, arXiv:cs/0409058), and what people praised and blamed in products
(Ganapathibhotla & Liu 2008, aclanthology.org/C08-1031). `data/` gets lines `LABEL ||| sentence` of each. Dev, test and
train are drawn once, with as many of each class; a text that is there twice counts once, and one of both classes not at
all.
"""

from __future__ import annotations

import html
import json
import random
import re
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine.data import format_line
from engine.programs import ArgumentParser, check_writable, run_main
from utils import ROOT, UserError, atomic_write

SPLITS = {"dev": 500, "test": 1000, "train": 3000}  # sentences of each class
LARGEST = 2**24  # bytes of a file in an archive
FEWEST_WORDS = 3


class Source(NamedTuple):
    """name: of the data set. members: the file with each class's texts, one a line. label_names: in their order."""

    name: str
    members: tuple[str, str]
    label_names: tuple[str, str]


SOURCES = {
    "subjectivity.zip": Source(
        "subj", ("subjectivity/plot.tok.gt9.5000", "subjectivity/quote.tok.gt9.5000"), ("objective", "subjective")
    ),
    "pros_cons.zip": Source(
        "pros-cons", ("pros_cons/IntegratedCons.txt", "pros_cons/IntegratedPros.txt"), ("bad", "good")
    ),
}


def texts_of(archive: zipfile.ZipFile, member: str) -> Iterator[str]:
    """The texts of a file in an archive, without tags. Raises `KeyError` if it has no such file."""
    if archive.getinfo(member).file_size > LARGEST:
        raise UserError(f"{member} is larger than {LARGEST} bytes")
    for line in archive.read(member).split(b"\n"):
        try:
            line = line.decode("utf-8")
        except UnicodeDecodeError:  # a part of each file is older
            line = line.decode("latin-1")
        text = " ".join(html.unescape(html.unescape(re.sub(r"</?\w+>", " ", line))).split())
        if len(text.split()) >= FEWEST_WORDS and "|||" not in text:
            yield text


def divided(path: Path, source: Source) -> dict[str, list[tuple[int, str]]]:
    """The labels and texts of each split. Raises `UserError` for a file that is not that archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            each = [dict.fromkeys(texts_of(archive, member)) for member in source.members]
    except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path} is not the {path.name} of nltk_data: {error}") from None
    drawing, splits = random.Random(0), {name: [] for name in SPLITS}
    for label, texts in enumerate(each):
        own = sorted(texts.keys() - each[1 - label].keys())
        if len(own) < sum(SPLITS.values()):
            raise UserError(f"{path} has {len(own)} texts of the class {source.label_names[label]}, too few")
        drawing.shuffle(own)
        for name, count in SPLITS.items():
            splits[name] += [(label, text) for text in own[:count]]
            del own[:count]
    for lines in splits.values():
        drawing.shuffle(lines)
    return splits


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments.other_data", description=__doc__.split("\n\n")[0])
    parser.add_argument("archives", nargs="+", metavar="ZIP", help=f"{' and '.join(SOURCES)}")
    parser.add_argument("--out", default=str(ROOT / "data"), metavar="FOLDER", help="where the lines are written")
    return parser.parse_args(argv)


def main() -> None:
    args = get_args()
    for path in map(Path, args.archives):
        if path.name not in SOURCES:
            raise UserError(f"{path}: must be named {' or '.join(SOURCES)}")
        source, folder = SOURCES[path.name], Path(args.out)
        check_writable(folder / f"{source.name}-train.txt", "--out")
        for split, lines in divided(path, source).items():
            with atomic_write(folder / f"{source.name}-{split}.txt") as file:
                file.writelines(f"{format_line(label, text)}\n" for label, text in lines)
        with atomic_write(folder / f"{source.name}-label-mapping.json") as file:
            file.write(json.dumps(source.label_names) + "\n")
        print(f"wrote {folder / source.name}-{{{','.join(SPLITS)}}}.txt and its label mapping")


if __name__ == "__main__":
    sys.exit(run_main(main))
