"""Three more data sets for the tables: two of files that the Natural Language Toolkit's data collection has, and one
that is SST as two classes.

    python -m advanced.experiments.other_data subjectivity.zip pros_cons.zip
    python -m advanced.experiments.other_data --sst2

https://github.com/nltk/nltk_data has both in packages/corpora, under the licence CC BY 4.0: sentences about films that
tell the plot or judge it (Pang & Lee 2004, arXiv:cs/0409058), and what people praised and blamed in products
(Ganapathibhotla & Liu 2008, aclanthology.org/C08-1031). `data/` gets lines `LABEL ||| sentence` of each. Dev, test and
train are drawn once, with as many of each class; a text that is there twice counts once, and one of both classes not at
all. `sst2` is SST without its neutral sentences, the lower two classes against the upper two, so that it and CFIMDB can
judge each other's models.
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

from engine.data import create_data, format_line
from engine.programs import ArgumentParser, check_writable, run_main
from utils import ROOT, UserError, atomic_write, find_asset

SPLITS = {"dev": 500, "test": 1000, "train": 3000}  # sentences of each class
LARGEST = 2**24  # bytes of a file in an archive
FEWEST_WORDS = 3
SST_CLASSES, NEUTRAL = 5, 2


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


def sst_as_two_classes() -> dict[str, list[tuple[int, str]]]:
    """The labels and texts of each split. Raises `UserError` if a file of SST is not here."""
    splits = {}
    for name in SPLITS:
        if (path := find_asset(f"data/sst-{name}.txt")) is None:
            raise UserError(f"data/sst-{name}.txt does not exist; setup.sh fetches the course's data")
        lines = create_data(path, SST_CLASSES)
        splits[name] = [(int(each.label > NEUTRAL), each.sentence) for each in lines if each.label != NEUTRAL]
    return splits


def write(folder: Path, name: str, splits: dict[str, list[tuple[int, str]]], label_names: tuple[str, str]) -> None:
    check_writable(folder / f"{name}-train.txt", "--out")
    for split, lines in splits.items():
        with atomic_write(folder / f"{name}-{split}.txt") as file:
            file.writelines(f"{format_line(label, text)}\n" for label, text in lines)
    with atomic_write(folder / f"{name}-label-mapping.json") as file:
        file.write(json.dumps(label_names) + "\n")
    print(f"wrote {folder / name}-{{{','.join(SPLITS)}}}.txt and its label mapping")


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments.other_data", description=__doc__.split("\n\n")[0])
    parser.add_argument("archives", nargs="*", metavar="ZIP", help=f"{' and '.join(SOURCES)}")
    parser.add_argument("--sst2", action="store_true", help="also write sst2, of the course's data/sst-*.txt")
    parser.add_argument("--out", default=str(ROOT / "data"), metavar="FOLDER", help="where the lines are written")
    return parser.parse_args(argv)


def main() -> None:
    args = get_args()
    if not (args.archives or args.sst2):
        raise UserError(f"name {' or '.join(SOURCES)}, or say --sst2")
    for path in map(Path, args.archives):
        if path.name not in SOURCES:
            raise UserError(f"{path}: must be named {' or '.join(SOURCES)}")
        source = SOURCES[path.name]
        write(Path(args.out), source.name, divided(path, source), source.label_names)
    if args.sst2:
        write(Path(args.out), "sst2", sst_as_two_classes(), ("bad", "good"))


if __name__ == "__main__":
    sys.exit(run_main(main))
