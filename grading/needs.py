"""Which files a submission needs to run and does not hold, and which of the package's files it may hold.

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

import ast
import bisect
import os
import posixpath
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grading.archive import MAX_NAME, MB, FormatError
from grading.editions import ADAPTERS, ALLOWED, EDITIONS, LABEL_NAMES, Edition
from grading.findings import Finding
from grading.programs import PARTS_FILE, ROOT, few, printable
from grading.rules import Report

OPTIONAL_FOLDERS = ("advanced", "bert", "convert", "explore", "fast")
CODE_FOLDERS = ("engine", "grading", *OPTIONAL_FOLDERS)
NOT_HANDED_OUT = ("engine/context.py", "engine/decoding.py")  # they give answers away; engine/ goes on without them
READ_BY_CODE = (".py", ".json", ".html", ".css", ".js")
RESULTS = "results"  # a folder of finished experiments
REQUIREMENTS = "requirements"  # the folder, and the file in the root
MAPPINGS = tuple(f"data/{dataset}-label-mapping.json" for dataset in LABEL_NAMES)
# Of the package's own folder no submission holds its tests, benchmarks, pages and builders, and what setup.sh fetches.
OWN_FOLDERS = (
    *CODE_FOLDERS, REQUIREMENTS, "benchmarks", "checkpoints", "docs", "handout", "notebooks", "tests", ".ci", ".github",
)  # fmt: skip
OWN_FILES = (
    "pyproject.toml", ".editorconfig", ".gitattributes", ".gitignore", ".pre-commit-config.yaml", "CONTRIBUTING.md",
    "README.zh-TW.md",
)  # fmt: skip
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


# ------------------------------------------------------------------------------------------- what is needed and missing
# Nothing is executed. Imports are read from the syntax trees and followed from file to file. If a module of this
# package is absent, the copy beside the grading scripts is read in its place, so that everything that is missing is
# named at once.

# Bytes of Python that are parsed, in a file and in all: a syntax tree takes a thousand times its text.
MAX_MODULE, MAX_CODE = 100_000, MB
MAX_FAULTS, MAX_LIBRARIES, MAX_REQUIREMENTS = 20, 10, 20  # names in a message: a submission can make up any number
MAX_TEXTS = 100  # given to `exec` and `eval` in a file
REQUIRED_CODES = ("E034-python", "E030-needs", "E032-library")  # of faults, absent files and libraries
OTHER_CODES = ("E035-python-others", "E031-needs-others", "E033-library-others")
SETUP, DRIVER, SANITY_CHECK = "setup.sh", "run_llama.py", "sanity_check.py"
_IN_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # what `_block` returns
# A requirements file that a script names, and does not write (`> requirements.txt`).
_REQUIREMENTS = re.compile(rf"(?<![>\w./-])(?<!> )(?:\./)?({REQUIREMENTS}(?:/[\w-]+)?\.txt)")
_INCLUDED = re.compile(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)")


# --------------------------------------------------------------------------------------------------- imports of a file


class Import(NamedTuple):
    """One imported name. Of `from a import b` it is `a.b`, which may be a module or not."""

    line: int
    name: str
    is_optional: bool  # the code provides for the module's absence
    is_lazy: bool  # inside of a function

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def parse(source: bytes) -> ast.AST:
    """The syntax tree of a stranger's file. Raises `FormatError` where it is not Python."""
    # Python's parser takes memory that grows with the square of a dotted name.
    if any(run.count(b".") > MAX_NAME for run in re.findall(rb"(?:[\w\x80-\xff.\t\f ]|\\\r?\n)+", source)):
        raise FormatError("line 1: not Python, or too deeply nested")
    size = threading.stack_size(128 << 20)  # deep: Python 3.10 does not stop before its stack ends
    try:
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
            warnings.simplefilter("ignore")
            return thread.submit(ast.parse, source).result()
    except SyntaxError as error:
        raise FormatError(f"line {error.lineno or 1}: not Python ({printable(error.msg)})") from None
    except (ValueError, LookupError, MemoryError, RecursionError):
        raise FormatError("line 1: not Python, or too deeply nested") from None
    finally:
        threading.stack_size(size)


def _imported(tree: ast.AST, package: list[str], most_texts: int = MAX_TEXTS) -> Iterator[Import]:
    """Every import statement of a tree, without those for type checkers alone; and what calls with a text import.

    most_texts: so many texts given to `exec` and `eval` are looked at.
    """
    waiting = [(tree, False, False)]
    for node, is_optional, is_lazy in waiting:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, is_optional, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + (node.level == 0):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])[:MAX_NAME]
            for alias in node.names:
                yield Import(node.lineno, f"{module}.{alias.name}", is_optional, is_lazy)
        for part in ast.iter_child_nodes(node):  # also the managers of a `with`, the defaults of a function
            for call in () if isinstance(part, _IN_BLOCKS) else ast.walk(part):
                name, text = _called_with(call)
                if name in ("import_module", "__import__") and not text.startswith("."):
                    yield Import(call.lineno, text[:MAX_NAME], is_optional, is_lazy)
                elif name in ("exec", "eval") and most_texts > 0:
                    most_texts -= 1
                    yield from (Import(call.lineno, each, is_optional, is_lazy) for each in _named_in(text))
        inner = is_optional or _provides_for_absence(node)
        lazy = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if not _is_for_type_checkers(node):
            waiting += [(statement, inner, lazy) for statement in _block(node, "body")]
        for part in ("handlers", "orelse", "finalbody", "cases"):
            waiting += [(statement, is_optional, lazy) for statement in _block(node, part)]


def _called_with(call: ast.AST) -> tuple[str, str]:
    """The name of what is called with a text as first argument, and the text; two empty ones for all else."""
    if isinstance(call, ast.Call):
        given = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "name")]
        if given and isinstance(given[0], ast.Constant) and isinstance(text := given[0].value, str | bytes):
            text = text if isinstance(text, str) else text.decode("utf-8", "replace")
            return getattr(call.func, "id", getattr(call.func, "attr", "")), text
    return "", ""


def _named_in(text: str) -> list[str]:
    """The names that a text of Python imports; none if it is not Python."""
    try:
        return [each.name for each in _imported(parse(text.encode("utf-8", "surrogatepass")), [], most_texts=0)]
    except FormatError:
        return []


def _block(node: ast.AST, part: str) -> list[ast.AST]:
    """The statements in a part of a statement; a lambda's or a conditional expression's parts are no lists."""
    block = getattr(node, part, [])
    return block if isinstance(block, list) else []


def _provides_for_absence(node: ast.AST) -> bool:
    """Whether it is `with suppress(ImportError):`, or `try: ... except ImportError:` after which the code goes on."""
    if isinstance(node, ast.With):
        managers = [item.context_expr for item in node.items]
        return _is_about_absence([argument for manager in managers for argument in getattr(manager, "args", [])])
    handlers = getattr(node, "handlers", [])
    return any(_is_about_absence([handler.type]) and not _ends_the_program(handler.body[-1]) for handler in handlers)


def _is_about_absence(caught: list[ast.AST | None]) -> bool:
    """Whether an absent module is among the exceptions that are caught; None catches every exception."""
    names = {getattr(part, "id", getattr(part, "attr", "")) for kind in caught if kind for part in ast.walk(kind)}
    return None in caught or not names.isdisjoint({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _ends_the_program(statement: ast.stmt) -> bool:
    """Whether a statement raises, exits or returns a status: the code then does not go on without the module."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return getattr(called, "id", getattr(called, "attr", "")) in ("exit", "_exit", "quit")
    value = getattr(statement, "value", None)
    is_status = isinstance(value, ast.Constant) and type(value.value) is int and value.value != 0
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Return) and is_status)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"


# ----------------------------------------------------------------------------------------------------- needs of files


@dataclass
class Needs:
    """The needs of some files that are not met, each with the place of the first import or mention.

    absent: files of this package, and folders, whose names end in a slash. libraries: those that the course's set-up
    does not install. faults: files that are not Python.
    """

    faults: list[Finding] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)


class Follower:
    """Follows imports through a submission's modules and, where these are absent, through the package's copies."""

    def __init__(self, files: Files, package: Package):
        self.files, self.package = files, package
        self.imported: dict[tuple[str, bool], list[Import]] = {}  # by file, and whether it is the package's copy
        self.copied: dict[str, set[str]] = {}  # the imports of the package's copies of files, as far as read
        # A script may put any of its folders on Python's path: the name of a file or folder is no library.
        self.own_names = {part for name in files.sizes for part in name.removesuffix(".py").split("/")}
        self.unread: list[str] = []
        self.bytes_left = MAX_CODE

    def follow(self, start: Iterable[str]) -> Needs:
        """The needs of these files and of all that they import, without files that an earlier call has reached."""
        needs, waiting = Needs(), [(name, False) for name in start]
        for file, is_copy in waiting:
            if (file, is_copy) in self.imported:
                continue
            try:
                imports = self._read(file, is_copy)
            except FormatError as error:
                imports = []
                needs.faults.append(Finding(f"{printable(file)} {error}", "E034-python", file))
            self.imported[file, is_copy] = imports
            # A file that provides once for a package's absence has found out by then whether it is there.
            guarded = {each.top for each in imports if each.is_optional}
            for each in imports:
                found, missing = self.files.find(each.name)
                waiting += [(path, False) for path in found]
                if missing and not each.is_optional and missing not in guarded:
                    waiting += self._miss(file, is_copy, each, missing, needs)
        return needs

    def _read(self, file: str, is_copy: bool) -> list[Import]:
        """The imports of a file; none if it is damaged, which another check reports, or too large."""
        source = self.package.code if is_copy else self.files
        if not is_copy:
            if source.sizes[file] > min(MAX_MODULE, self.bytes_left):
                self.unread.append(file)
                return []
            self.bytes_left -= source.sizes[file]
        try:
            raw = source.read(file)
        except FormatError:
            return []
        return list(_imported(parse(raw), file.split("/")[:-1]))

    def is_of_this_package(self, script: str) -> bool:
        """Whether a script is this package's and not the course's own: it imports modules of this package."""
        tops = {each.top for each in self.imported.get((script, False), [])} - ALLOWED
        return any(self.package.has(top) and f"{top}.py" not in OF_THE_COURSE for top in tops)

    def _miss(self, file: str, is_copy: bool, each: Import, missing: str, needs: Needs) -> Iterator[tuple[str, bool]]:
        """Note that a module is missing. Yields the package's copies of the missing files, to be followed."""
        top, place = missing.partition(".")[0], f"{file} line {each.line}"
        is_own_code = file.split("/")[0] in CODE_FOLDERS
        if top not in ALLOWED and self.package.has(missing):
            path, is_for_options = missing.replace(".", "/"), top in OPTIONAL_FOLDERS and not file.startswith(f"{top}/")
            if is_own_code and each.is_lazy and (is_for_options or f"{path}.py" in NOT_HANDED_OUT):
                return  # engine/ says what it lacks without that folder or file
            copies = [path for path in self.package.code.find(each.name)[0] if path not in self.files]
            for name in copies or [f"{path}/" if self.package.code.is_folder(path) else f"{path}.py"]:
                needs.absent.setdefault(outermost(name, self.files), place)
            yield from ((name, True) for name in copies)
        elif missing == top and top not in ALLOWED | self.own_names and not is_copy:
            if not (is_own_code and (each.is_lazy or self._is_in_copy(file, top))):
                needs.libraries.setdefault(top, place)

    def _is_in_copy(self, file: str, library: str) -> bool:
        """Whether the package's copy of a file imports a library as well."""
        if file not in self.copied:
            imports = self._read(file, is_copy=True) if file in self.package.code else []
            self.copied[file] = {each.top for each in imports}
        return library in self.copied[file]


def outermost(name: str, files: Files) -> str:
    """The outermost folder around a file or folder that is absent as a whole; else the name itself."""
    parts = name.rstrip("/").split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    return next((f"{folder}/" for folder in folders if not files.is_folder(folder)), name)


def find_needs(files: Files, edition: Edition, package: Package) -> tuple[Needs, Needs, list[str]]:
    """Everything that is missing in a submission: imported modules, and files that its scripts and setup.sh read.

    Returns the needs of the required files, without which it cannot run, those of its other scripts, and the files that
    are too large to look into.
    """
    follower = Follower(files, package)
    start = [name for name in edition.required if name.endswith(".py") and name in files]
    required = follower.follow(start)
    others = follower.follow(sorted(name for name in files.sizes if "/" not in name and name.endswith(".py")))
    for name, place in _absent_requirements(files, package):
        required.absent.setdefault(outermost(name, files), place)
    for script, needs, names in ((DRIVER, required, MAPPINGS), (SANITY_CHECK, others, (PARTS_FILE,))):
        absent = [name for name in names if name not in files and name in package.paths]
        if follower.is_of_this_package(script):
            needs.absent |= {name: f"read by {script}" for name in absent}
    for name in edition.required:  # named as missing already
        required.absent.pop(name, None)
        others.absent.pop(name, None)
    others.absent = {name: place for name, place in others.absent.items() if name not in required.absent}
    others.libraries = {name: place for name, place in others.libraries.items() if name not in required.libraries}
    return required, others, follower.unread


def _absent_requirements(files: Files, package: Package) -> Iterator[tuple[str, str]]:
    """The requirements files that setup.sh names, and those of this package that these include, each with its place."""
    waiting, told = _named_in_setup(files), set()
    for name, place in waiting:
        if name in told:
            continue
        told.add(name)
        if name not in files:
            yield name, place
        text = _text(files if name in files else package.files, name)
        for included in _INCLUDED.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), included))
            waiting += [(path, name)] if path in package.paths else []


def _named_in_setup(files: Files) -> list[tuple[str, str]]:
    """The first requirements files that setup.sh names outside of comments, each with its line."""
    found = {}
    for number, line in enumerate(_text(files, SETUP).splitlines(), 1):
        if not line.lstrip().startswith("#"):
            for name in _REQUIREMENTS.findall(line):
                found.setdefault(name, f"{SETUP} line {number}")
    return list(found.items())[:MAX_REQUIREMENTS]


def _text(files: Files, name: str) -> str:
    """The text of a small file; "" if it is absent, large or damaged."""
    if files.sizes.get(name, MAX_MODULE + 1) > MAX_MODULE:
        return ""
    try:
        return files.read(name).decode("utf-8", "replace")
    except FormatError:
        return ""


def check_needs(files: Files, edition: Edition, package: Package, report: Report) -> None:
    """Report what the required files need and do not have, and what other scripts do, such as graders."""
    required, others, unread = find_needs(files, edition, package)
    for each, by, end, (fault, absent, library) in (
        (required, "", ", which cannot run without", REQUIRED_CODES),
        (others, " by other scripts", "", OTHER_CODES),
    ):
        report.findings += [Finding(one, fault, one.file) for one in each.faults[:MAX_FAULTS]]
        if each.absent:
            said = f"imported or read{by} but not in the submission{end}: {_placed(each.absent, None)}"
            report.findings.append(Finding(said, absent if edition.packs_listed else OTHER_CODES[1]))
        if libraries := {name: place for name, place in each.libraries.items() if name not in edition.libraries}:
            what = "but neither in the submission nor among the libraries that the course's set-up installs"
            report.findings.append(Finding(f"imported{by}, {what}: {_placed(libraries, MAX_LIBRARIES)}", library))
    if unread:
        said = f"too large to look at what they import: {few(unread)}"
        report.findings.append(Finding(said, "E036-unread", unread[0]))


def _placed(names: dict[str, str], most: int | None) -> str:
    """Names with their places. most: None gives all."""
    return few([f"{name} ({place})" for name, place in names.items()], most or len(names))
