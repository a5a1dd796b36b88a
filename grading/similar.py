"""Which submissions hold code of one another, or of a public solution: pairs for a person to look at, never a grade.

python -m grading.similar SUBMISSIONS --handouts DIR [--public DIR] [--out DIR]

copydetect compares (winnowing: Schleimer et al. 2003). It sees each file as Python's own parser writes it back: without
layout, comments and docstrings, and with a wall around every function, so that their order does not matter; names do
not matter to it.
"""

from __future__ import annotations

import ast
import html
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from grading.archive import ARCHIVES, FormatError, read_archive, read_entry
from grading.needs import parse
from grading.programs import (
    ROOT,
    GradingError,
    GradingParser,
    atomic_write,
    check_writable,
    decimal_number,
    printable,
    run_main,
)
from grading.uploads import read_payload, read_upload

if TYPE_CHECKING:
    import numpy as np

# The files with holes, and how alike two people's may be: halfway between the most alike of independent public
# solutions and a copy. Those of classifier.py are equal often, and are no evidence.
THRESHOLDS = {"llama.py": 0.91, "rope.py": 0.84, "optimizer.py": 0.91, "classifier.py": None}
K = 25  # characters that must be equal to count, after names and strings have become one letter each
MAX_SOURCE = 300_000  # bytes of a file
WALL = ast.unparse(ast.Constant(10 ** (K + 5)))  # longer than K, so that nothing alike reaches across it
LEAST = 100  # of a file's characters, names as one letter: what is less beside the hand-out says nothing
OWN = "public: this package"
EXPLAINED = (
    "A share of 1.00: all of one file that no hand-out holds stands in the other. Lines with something alike are "
    "marked. Layout, comments and docstrings are left out. For a person to look at: two people may write the same."
)
HEAD = (
    "<!doctype html><meta charset=utf-8><title>Similar submissions</title><style>body{font:14px sans-serif}td{vertical-"
    "align:top;width:50%}pre{white-space:pre-wrap}mark{background:#fd8}table{table-layout:fixed;width:100%}</style>"
)


People = dict[str, dict[str, str]]  # of each person or hand-out, the sources by their files' names
Prints = dict[str, dict[str, Any]]  # of each file, the fingerprints by person


class Pair(NamedTuple):
    """Two submissions' versions of a file. alike: the larger share of one that the other holds, the hand-outs aside."""

    file: str
    alike: float
    first: str
    second: str
    marks: tuple[np.ndarray, np.ndarray]


# ----------------------------------------------------------------------------------------------------- reading


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Name, size and reader of every file that a folder or zip has of the four names."""
    if path.is_dir():
        for each in path.rglob("*.py"):
            if each.name in THRESHOLDS and each.is_file() and not each.is_symlink():
                yield each.relative_to(path).as_posix(), each.stat().st_size, each.read_bytes
        return
    archive = read_archive(read_payload(path, ""))
    for entry in archive.entries:
        if PurePosixPath(entry.name).name in THRESHOLDS and entry.local and not entry.is_folder:
            yield entry.name, entry.central.file_size, partial(read_entry, archive, entry, keep=True)


def read_sources(path: Path) -> dict[str, str]:
    """The four files of a folder or zip, of several with one name the highest. Raises `FormatError`."""
    found: dict[str, str] = {}
    for name, size, read in sorted(_members(path), key=lambda member: (member[0].count("/"), member[0])):
        file = PurePosixPath(name).name
        if file not in found and "__MACOSX" not in name and size <= MAX_SOURCE:
            found[file] = read().decode("utf-8-sig", "replace")
    return found


def read_folder(folder: str) -> People:
    """The sources of every folder and zip in a folder. Raises `GradingError` if there are none."""
    if not Path(folder).is_dir():
        raise GradingError(f"the folder {printable(folder)} does not exist")
    found = {}
    for path in sorted(Path(folder).iterdir()):
        if path.is_dir() or path.name.lower().endswith(ARCHIVES):
            try:
                if sources := read_sources(path):
                    found[path.name] = sources
            except FormatError as error:
                print(f"warning: {printable(path)} is left out: {error}", file=sys.stderr)
    if not found:
        raise GradingError(f"{printable(folder)} holds no folder or zip with one of {', '.join(THRESHOLDS)}")
    return found


def plain(code: str) -> str:
    """A file without layout, comments and docstrings, walls around its definitions; as it is if it is no Python."""
    try:
        tree = parse(code.encode("utf-8", "replace"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                has_docstring = ast.get_docstring(node, clean=False) is not None
                node.body = [each for part in node.body[has_docstring:] for each in _walled(part)] or [ast.Pass()]
        return ast.unparse(tree)
    except (FormatError, RecursionError, MemoryError):
        return code


def _walled(node: ast.stmt) -> list[ast.stmt]:
    wall = ast.Expr(ast.Constant(int(WALL)))
    return [wall, node, wall] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [node]


# --------------------------------------------------------------------------------------------------- comparing


class CodeComparison:
    """Fingerprints of many sources, without those of the hand-outs."""

    def __init__(self, handouts: Iterable[dict[str, str]]):
        try:
            import copydetect
        except ModuleNotFoundError as error:
            said = f"similar code is found with copydetect: {error.name} is not installed; pip install copydetect"
            raise GradingError(said) from None
        self.copydetect, self.given, hashes = copydetect, {}, {}
        for name, code in [each for sources in handouts for each in sources.items()]:
            hashes.setdefault(name, set()).update(self.fingerprint(name, code).hashes)
        self.given = hashes

    def fingerprint(self, name: str, code: str) -> Any:
        given = sorted(self.given.get(name, ()))
        return self.copydetect.CodeFingerprint(name, K, 1, boilerplate=given, fp=io.StringIO(plain(code)))

    def fingerprints(self, people: People) -> Prints:
        """Of each file, those of the people who wrote something of their own there."""
        found: Prints = {name: {} for name in THRESHOLDS}
        for who, sources in people.items():
            for name, code in sources.items():
                one = self.fingerprint(name, code)
                if one.token_coverage >= LEAST:
                    found[name][who] = one
        return found

    def pair(self, name: str, first: tuple[str, Any], second: tuple[str, Any]) -> Pair:
        _, shares, marks = self.copydetect.compare_files(first[1], second[1])
        return Pair(name, float(max(shares)), first[0], second[0], marks)


def all_pairs(comparison: CodeComparison, prints: Prints, public: Prints) -> list[Pair]:
    """Every submission beside every later one and beside every public solution, the most alike first.

    Uploads of one student, as Canvas names them, are not put beside one another.
    """
    pairs = [
        comparison.pair(name, first, second)
        for name, mine in prints.items()
        for first, second in [*itertools.combinations(mine.items(), 2),
                              *itertools.product(mine.items(), public.get(name, {}).items())]
        if not is_one_student(first[0], second[0])
    ]  # fmt: skip
    return sorted(pairs, key=lambda pair: (-pair.alike, pair.file, pair.first, pair.second))


def is_one_student(first: str, second: str) -> bool:
    user = read_upload(Path(first)).user
    return user != "" and user == read_upload(Path(second)).user


def is_suspicious(pair: Pair, thresholds: dict[str, float | None]) -> bool:
    least = thresholds[pair.file]
    return least is not None and pair.alike >= least


# --------------------------------------------------------------------------------------------------------- the page


def marked(code: str, slices: np.ndarray) -> str:
    """A file as HTML, its lines with something alike marked; lines of walls are left out."""
    lines, begin = [], 0
    for line in code.split("\n"):
        end = begin + len(line)
        is_alike = slices.size and ((slices[0] < end) & (slices[1] > begin)).any()
        if line.strip() != WALL:
            lines.append(f"<mark>{html.escape(line)}</mark>" if is_alike else html.escape(line))
        begin = end + 1
    return "\n".join(lines)


def write_page(path: Path, pairs: list[Pair], prints: Prints) -> None:
    """One HTML file, which loads nothing: the pairs side by side. All that comes from submissions is escaped."""
    body = [HEAD, f"<p>{len(pairs)} pairs. {html.escape(EXPLAINED)}</p>"]
    for pair in pairs:
        title = html.escape(f"{pair.alike:.2f}  {pair.file}: {pair.first} and {pair.second}")
        sides = zip((pair.first, pair.second), pair.marks, strict=True)
        columns = [f"<td><b>{html.escape(who)}</b><pre>{marked(prints[pair.file][who].raw_code, marks)}</pre></td>"
                   for who, marks in sides]  # fmt: skip
        body.append(f"<details><summary>{title}</summary><table><tr>{''.join(columns)}</tr></table></details>")
    with atomic_write(path) as file:
        file.write("\n".join(body).encode("utf-8", "replace"))


# ------------------------------------------------------------------------------------------------------ the program


def main() -> int:
    parser = GradingParser(prog="python -m grading.similar", description="Find submissions with code of one another.")
    parser.add_argument("folder", help="a folder of submissions: zips, folders")
    parser.add_argument("--handouts", metavar="DIR", required=True, help="a folder with each edition's hand-out")
    parser.add_argument("--public", metavar="DIR", help="a folder of public solutions, like that of submissions")
    parser.add_argument("--threshold", metavar="FILE=SHARE", action="append", default=[], help="replaces the usual")
    parser.add_argument("--out", metavar="DIR", default=".", help="where similar.html is written: pairs side by side")
    args = parser.parse_args()
    thresholds = THRESHOLDS | dict(map(read_threshold, args.threshold))
    comparison = CodeComparison(read_folder(args.handouts).values())
    people = read_folder(args.folder)
    page = Path(args.out, "similar.html")
    check_writable(page, "--out")
    public = {f"public: {who}": sources for who, sources in (read_folder(args.public) if args.public else {}).items()}
    public[OWN] = {name: (ROOT / name).read_text(encoding="utf-8") for name in THRESHOLDS if (ROOT / name).is_file()}
    prints, others = comparison.fingerprints(people), comparison.fingerprints(public)
    pairs = [pair for pair in all_pairs(comparison, prints, others) if is_suspicious(pair, thresholds)]
    write_page(page, pairs, {name: prints[name] | others[name] for name in prints})
    for pair in pairs:
        print(f"{pair.alike:.2f}  {pair.file:14}{printable(pair.first)}, {printable(pair.second)}")
    print(f"{len(pairs)} pairs to look at, of {len(people)} submissions and {len(public)} public solutions: {page}")
    return 0


def read_threshold(text: str) -> tuple[str, float | None]:
    """`llama.py=0.9`, or `none` in place of the number."""
    name, _, value = text.partition("=")
    try:
        share = None if value == "none" else decimal_number(value)
    except ValueError:
        share = -1.0
    if name not in THRESHOLDS or (share is not None and not 0 < share <= 1):
        raise GradingError(f"--threshold {printable(text)}: give {'|'.join(THRESHOLDS)}=SHARE, up to 1, or =none")
    return name, share


if __name__ == "__main__":
    sys.exit(run_main(main))
