"""The package beside the grading scripts, and which of its files a submission holds.

A submission holds the student's files and the files that these need to run. Of this package these may be

- the course's own files (`llama.py`, `README.md`, ...): the student hands them in, and they are never added;
- the other modules of the root, and of `CODE_FOLDERS` the Python files and the JSON, HTML, style and script files that
  the code reads;
- `checkpoints/parts.json`, which `sanity_check.py --parts` reads, the label mappings, and the requirements files.

Of `CODE_FOLDERS`, every run and check needs `engine/` and `grading/`. The others are optional: they are added only if a
student's own file imports them. A submission of the package's own folder holds all folders of code and the student's
own files, but no tests, pages, builders, notebooks, benchmarks, results, pictures and data sets.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from grading.archive import FormatError
from grading.editions import ADAPTERS, EDITIONS, LABEL_NAMES
from grading.programs import PARTS_FILE, ROOT

OPTIONAL_FOLDERS = ("advanced", "bert", "convert", "explore", "fast")
CODE_FOLDERS = ("engine", "grading", *OPTIONAL_FOLDERS)
READ_BY_CODE = (".py", ".json", ".html", ".css", ".js")
RESULTS = "results"  # a folder of finished experiments
REQUIREMENTS = "requirements"  # the folder, and the file in the root
MAPPINGS = tuple(f"data/{dataset}-label-mapping.json" for dataset in LABEL_NAMES)
# Of the package's own folder no submission holds its tests, benchmarks, pages and builders, and what setup.sh fetches.
OWN_FOLDERS = (
    *CODE_FOLDERS, REQUIREMENTS, "benchmarks", "checkpoints", "docs", "handout", "notebooks", "tests", ".ci", ".github",
)  # fmt: skip
OWN_FILES = ("pyproject.toml", ".gitattributes", ".gitignore", "README.zh-TW.md")
FETCHED = ("tokenizer.model", "rotary_embedding_actual.data", "optimizer_test.npy")
DATA_SETS = (*LABEL_NAMES, "films", "pros-cons", "subj")
MAX_DEPTH = 10  # of a module in packages
# The files that the course hands out or asks for, in any edition.
OF_THE_COURSE = frozenset(
    name for edition in EDITIONS.values() for name in (*edition.required, *edition.listed, *edition.optional)
)


class Files:
    """Files by their name below a folder. read: returns the bytes of one; raises `FormatError` if it is damaged."""

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
        """The files that importing `a.b.c` runs, and the first module of `a`, `a.b`, `a.b.c` that is absent."""
        found, path = [], ""
        for part in name.split(".")[:MAX_DEPTH]:
            path = f"{path}/{part}".removeprefix("/")
            if f"{path}/__init__.py" in self:
                found.append(f"{path}/__init__.py")
            elif not self.is_folder(path):
                return ([*found, f"{path}.py"], None) if f"{path}.py" in self else (found, path.replace("/", "."))
        return found, None


def files_of(paths: Mapping[str, Path]) -> Files:
    """The files of a disk, under these names."""

    def read(name: str) -> bytes:
        try:
            return paths[name].read_bytes()
        except OSError as error:
            raise FormatError(f"cannot be read: {error.strerror}") from None

    return Files({name: path.stat().st_size for name, path in paths.items()}, read)


class Package:
    """The package beside the grading scripts: its modules, and the files that may be added to a submission."""

    def __init__(self) -> None:
        self.root = ROOT
        patterns = ["*.py", "*/*.py", *(f"{folder}/**/*" for folder in CODE_FOLDERS)]
        patterns += [f"{REQUIREMENTS}/*.txt", f"{REQUIREMENTS}.txt", PARTS_FILE, *MAPPINGS]
        candidates = (path for pattern in patterns for path in ROOT.glob(pattern))
        self.paths = {path.relative_to(ROOT).as_posix(): path for path in candidates if path.is_file()}
        self.files = files_of(self.paths)
        self.code = files_of({name: path for name, path in self.paths.items() if name.endswith(".py")})

    def has(self, module: str) -> bool:
        """Whether a module `a.b.c` is this package's, or one that the course hands out."""
        path = module.replace(".", "/")
        return f"{path}.py" in self.code or self.code.is_folder(path) or f"{path}.py" in OF_THE_COURSE

    def additions(self, missing: str) -> dict[str, Path]:
        """The files that are added for a missing one, or for a folder, whose name ends in a slash: for all of it."""
        names = self.files.below(missing) if missing.endswith("/") else [missing] if missing in self.files else []
        return {name: self.paths[name] for name in names if name not in OF_THE_COURSE and is_carried(name)}


def is_carried(name: str) -> bool:
    """Whether a file of the package's own folder belongs in a submission: see the docstring of this module.

    A file that the package does not know is the student's own, and belongs there.
    """
    top, _, rest = name.partition("/")
    if name in (PARTS_FILE, ADAPTERS) or top == REQUIREMENTS:
        return True
    if top in CODE_FOLDERS and rest:
        return os.path.splitext(name)[1] in READ_BY_CODE and RESULTS not in name.split("/")
    if top == "data":
        return not (rest.startswith(DATA_SETS) and rest.endswith(".txt"))
    return not (top in OWN_FOLDERS and rest) and name not in OWN_FILES and name not in FETCHED
