"""The package that lies beside the grading scripts, and what of it a submission holds.

A submission is the student's files and what these need to run. Of this package it may hold

- the course's own files (`llama.py`, `README.md`, ...), which are the student's to hand in and are never added;
- the other modules of the root, and the folders of code in `CODE_FOLDERS`: their Python files, and the JSON, HTML,
  style and script files that the code reads; no pages, pictures or results of experiments;
- `checkpoints/parts.json`, which `sanity_check.py --parts` reads, the label mappings, and the requirements files.

Of `CODE_FOLDERS`, `engine/` and `grading/` hold what every run and check needs. The others are optional: code in these
folders imports them inside of functions and says in one sentence what is missing.

To a folder that lacks them, the package's files are added where the student's files need them; an optional folder only
where a student's own file imports it. Made from the package's own folder, a submission holds all folders of code and
the student's own files, and leaves out tests, pages, builders, notebooks, benchmarks, results, pictures and data sets.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from grading.archive import FormatError
from grading.editions import EDITIONS, LABEL_NAMES
from grading.programs import ROOT

OPTIONAL_FOLDERS = ("advanced", "bert", "convert", "explore", "fast")
CODE_FOLDERS = ("engine", "grading", *OPTIONAL_FOLDERS)
READ_BY_CODE = (".py", ".json", ".html", ".css", ".js")
RESULTS = "results"  # a folder of finished experiments
REQUIREMENTS = "requirements"  # the folder, and the file in the root
PARTS = "checkpoints/parts.json"
MAPPINGS = tuple(f"data/{dataset}-label-mapping.json" for dataset in LABEL_NAMES)
# Of the package's own folder, what no submission holds: what it is tested, measured, described and built with, and what
# setup.sh fetches.
OWN_FOLDERS = (*CODE_FOLDERS, REQUIREMENTS, "benchmarks", "checkpoints", "docs", "notebooks", "tests", ".ci", ".github")
OWN_FILES = ("pyproject.toml", ".gitattributes", ".gitignore")
FETCHED = ("tokenizer.model", "rotary_embedding_actual.data", "optimizer_test.npy")
DATA_SETS = (*LABEL_NAMES, "films")
MAX_DEPTH = 10  # of a module in packages
# What the course hands out and asks for, in any edition.
OF_THE_COURSE = frozenset(
    name for edition in EDITIONS.values() for name in (*edition.required, *edition.listed, *edition.optional)
)


class Files:
    """Files by their name below a folder, and how the bytes of one are read (`FormatError` for a damaged file)."""

    def __init__(self, sizes: Mapping[str, int], read: Callable[[str], bytes]):
        self.sizes, self.read = sizes, read
        self._names = sorted(sizes)

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def below(self, folder: str) -> list[str]:
        """The files whose names begin with `folder`, which ends in a slash."""
        start = bisect.bisect_left(self._names, folder)
        return self._names[start : bisect.bisect_left(self._names, folder[:-1] + "0")]  # "0" follows "/"

    def is_folder(self, path: str) -> bool:
        index = bisect.bisect(self._names, f"{path}/")
        return index < len(self._names) and self._names[index].startswith(f"{path}/")

    def find(self, name: str) -> tuple[list[str], str | None]:
        """The files that importing `a.b.c` runs, and the first module of `a`, `a.b`, `a.b.c` that is not there."""
        found, parts = [], name.split(".")
        for depth in range(1, min(len(parts), MAX_DEPTH) + 1):
            module = ".".join(parts[:depth])
            path = module.replace(".", "/")
            package = f"{path}/__init__.py"
            if package in self or self.is_folder(path):
                found += [package] if package in self else []
            elif f"{path}.py" in self:
                return [*found, f"{path}.py"], None
            else:
                return found, module
        return found, None


def files_of(paths: Mapping[str, Path]) -> Files:
    """The files of a disk, by the names that they are given here."""

    def read(name: str) -> bytes:
        try:
            return paths[name].read_bytes()
        except OSError as error:
            raise FormatError(f"cannot be read: {error.strerror}") from None

    return Files({name: path.stat().st_size for name, path in paths.items()}, read)


class Package:
    """The package beside the grading scripts: its modules, and what of it may be added to a submission."""

    def __init__(self) -> None:
        self.root = ROOT
        self.paths = {path.relative_to(ROOT).as_posix(): path for path in self._candidates() if path.is_file()}
        self.files = files_of(self.paths)
        self.code = files_of({name: path for name, path in self.paths.items() if name.endswith(".py")})

    def _candidates(self) -> Iterable[Path]:
        yield from self.root.glob("*.py")
        yield from self.root.glob("*/*.py")
        for folder in CODE_FOLDERS:
            yield from self.root.glob(f"{folder}/**/*")
        yield from self.root.glob(f"{REQUIREMENTS}/*.txt")
        yield from (self.root / name for name in (f"{REQUIREMENTS}.txt", PARTS, *MAPPINGS))

    def has(self, module: str) -> bool:
        """Whether a module `a.b.c` is this package's, or one that the course hands out."""
        path = module.replace(".", "/")
        return f"{path}.py" in self.code or self.code.is_folder(path) or f"{path}.py" in OF_THE_COURSE

    def is_beyond_the_course(self, module: str) -> bool:
        """Whether a module is this package's, and not one of the course's files."""
        return self.has(module) and f"{module}.py" not in OF_THE_COURSE

    def additions(self, missing: str) -> dict[str, Path]:
        """The files that are added for what is missing: a file, or all of a folder, whose name ends in a slash."""
        return {
            name: path
            for name, path in self.paths.items()
            if (name == missing or (missing.endswith("/") and name.startswith(missing)))
            and name not in OF_THE_COURSE
            and is_carried(name)
        }


def is_carried(name: str) -> bool:
    """Whether a file that lies in the package's own folder belongs in a submission. See the top of this file.

    Files that the package does not know are the student's own, and belong there.
    """
    top, _, rest = name.partition("/")
    if name == PARTS or top == REQUIREMENTS:
        return True
    if top in CODE_FOLDERS and rest:
        return os.path.splitext(name)[1] in READ_BY_CODE and RESULTS not in name.split("/")
    if top == "data":
        return not (rest.startswith(DATA_SETS) and rest.endswith(".txt"))
    return not (top in OWN_FOLDERS and rest) and name not in OWN_FILES and name not in FETCHED
