"""The rules of the layout: who may import whom, no circles, no star imports, nothing happens at import."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# the others import without it
NEED_NUMBA = {"loops", "loop_engine", "loops_together", "loops_head", "together"}
MODEL_HALF = {"config", "utils", "rope", "tokenizer", "optimizer", "base_llama", "llama", "classifier"}
GRADERS = {"sanity_check", "rope_test", "optimizer_test", "prepare_submit"}
# a folder imports those with a smaller number, and itself; of one number none imports another
FLOORS = {
    "engine": 1,
    "explore": 2, "convert": 2, "fast": 2,
    "advanced": 3,
    "bert": 4,
    "benchmarks": 5, "checkpoints": 5, "handout": 5, "notebooks": 5,
}  # fmt: skip
CORE_LIBRARIES = {"torch", "numpy", "sentencepiece", "tqdm", "sklearn"}
OPTIONAL_LIBRARIES = {  # imported inside of functions, named in pyproject.toml
    "convert": {"gguf", "onnx", "onnxruntime", "onnxscript", "tokenizers", "safetensors"},
    "engine": {"tensorboard", "filelock"},  # the latter comes with PyTorch; storage.py alone takes it
}
SOURCES = sorted(
    path
    for pattern in ("*.py", "*/*.py", "*/*/*.py", "*/*/*/*.py")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(".") and not path.match("notebooks/part_*.py")
)
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]


def folder_of(path: Path) -> str:
    """The first folder of a file, "" for one in the root."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def name_of(path: Path) -> str:
    """`engine.text.flags`; of a package, its own."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in PRODUCT} | {
    path.stem: path for path in PRODUCT if folder_of(path) == "checkpoints"
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The modules that an import names; of `from a import b`, `a.b` where that is a file of this package, else `a`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    full = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in FILES else node.module for name in full}


@cache
def imports(path: Path) -> frozenset[str]:
    """All modules that a file imports, inside of functions or not."""
    nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return frozenset().union(*map(modules_of, nodes))


def top_names(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ------------------------------------------------------------------------------------------------ who imports whom


def test_the_root_holds_the_modules_of_the_assignment_and_no_other():
    assert {path.stem for path in ROOT.glob("*.py")} == MODEL_HALF | GRADERS | {"run_llama"}


@pytest.mark.parametrize("name", sorted(MODEL_HALF))
def test_the_model_half_is_closed(name: str):
    """Its files import one another, and of all else the standard library and the five libraries alone."""
    foreign = top_names(ROOT / f"{name}.py") - set(sys.stdlib_module_names) - CORE_LIBRARIES
    assert foreign <= MODEL_HALF - {name}


@pytest.mark.parametrize("path", [path for path in PRODUCT if folder_of(path) in FLOORS], ids=ids)
def test_folders_import_downwards(path: Path):
    folder = folder_of(path)
    for name in imports(path):
        top = name.partition(".")[0]
        if top in FLOORS and top != folder:
            assert FLOORS[top] < FLOORS[folder], f"{ids(path)} imports {name}"
        assert top not in GRADERS | {"run_llama"}, f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", [path for path in PRODUCT if folder_of(path) == "engine"], ids=ids)
def test_the_engine_asks_other_folders_by_name(path: Path):
    """By way of `programs.import_folder` and `import_part`, which say in one line that a folder is absent."""
    assert top_names(path) - set(sys.stdlib_module_names) - CORE_LIBRARIES - OPTIONAL_LIBRARIES["engine"] <= {
        "engine", "grading", *MODEL_HALF,
    }  # fmt: skip


def test_no_file_imports_one_that_imports_it():
    graph = {}
    for path in PRODUCT:
        mine = name_of(path)
        graph[mine] = {name_of(FILES[name]) for name in imports(path) if name in FILES} - {mine}
        assert mine not in imports(path)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


@cache
def names_in(path: Path) -> set[str]:
    """The names that a file binds outside its functions and classes."""
    names, waiting = set(), list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, (ast.stmt, ast.ExceptHandler))]
    return names


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_what_is_imported_is_there(path: Path):
    """Also inside functions, which run where a benchmark or an option asks for them."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            there = names_in(FILES[node.module])
            for alias in node.names:
                is_lazy = "__getattr__" in there
                assert is_lazy or alias.name in there or f"{node.module}.{alias.name}" in FILES, ast.unparse(node)


def test_the_graders_serve_nobody_else():
    """But for what made the table of parts, the data set's label names, the hand-out that holds them, the notebook."""
    importers = {ids(path) for path in PRODUCT if "grading" in top_names(path) and folder_of(path) != "grading"}
    handout = {f"handout/{name}.py" for name in ("__main__", "editions", "writing", "tests/test_parts")}
    others = {"checkpoints/build.py", "checkpoints/parts.py", "notebooks/checks.py", *handout}
    assert importers == {*(f"{name}.py" for name in GRADERS), *others}


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_nothing_imports_the_driver(path: Path):
    assert "run_llama" not in imports(path)


@pytest.mark.parametrize("path", [path for path in PRODUCT if folder_of(path) == "convert"], ids=ids)
def test_convert_imports_other_libraries_inside_of_functions(path: Path):
    foreign = top_names(path) - set(sys.stdlib_module_names) - MODEL_HALF - {"convert", "engine"}
    assert foreign <= CORE_LIBRARIES | OPTIONAL_LIBRARIES["convert"]
    for node in tree_of(path).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not OPTIONAL_LIBRARIES["convert"] & {name.partition(".")[0] for name in modules_of(node)}


BERT_KERNELS = {"kernels"}  # which fast/ imports by name; without it, it is not imported


@pytest.mark.parametrize("path", sorted((ROOT / "bert").glob("*.py")), ids=ids)
def test_bert_needs_the_core_libraries_alone(path: Path):
    folders = {"advanced", "bert", "convert", "engine"} | ({"fast"} if path.stem in BERT_KERNELS else set())
    assert top_names(path) - set(sys.stdlib_module_names) - MODEL_HALF - folders <= CORE_LIBRARIES


def test_the_table_of_editions_imports_nothing():
    """Of what the graders import, `tests/grading/test_copies.py` tells."""
    assert not top_names(ROOT / "grading" / "editions.py") - set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        *((f"engine/{name}", {"torch"}) for name in ("data", "tables", "flags")),
        *((f"engine/{name}", {"torch"}) for name in ("arguments", "text/flags")),
        *(
            (name, {"torch"})
            for name in ("config", "tokenizer", "advanced/__init__", "advanced/table", "advanced/entries")
        ),
        *(
            (f"engine/{name}", {"argparse", "engine.arguments", "engine.reports"})
            for name in (
                "training",
                "methods",
                "checkpointer",
                "tasks",
                "processes",
                "families",
                "runs",
            )
        ),
        *((f"bert/{name}", {"torch"}) for name in ("__init__", "basic", "categories", "config", "names", "wordpiece")),
    ],
)
def test_what_a_module_must_not_import(module: str, banned: set[str]):
    assert not imports(ROOT / f"{module}.py") & banned


# ------------------------------------------------------------------------------------------------------- the code


def test_modules_are_as_long_as_the_page_says():
    """structure.md gives a bound for each folder, and names the files that are longer, with their reasons."""
    page = (ROOT / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `?([a-z_]+\.py|[a-z]+/|others)`? \| at most (\d+)", page, re.MULTILINE)
    bounds = {name: int(lines) for name, lines in rows}
    longer = dict(re.findall(r"^\| `([\w/]+\.py)` \| (\d+) lines: ", page, re.MULTILINE))
    assert {"llama.py", "base_llama.py", "utils.py", "engine/", "grading/"} <= bounds.keys()
    for path in PRODUCT:
        limit = bounds.get(ids(path), bounds.get(f"{folder_of(path)}/", bounds["others"]))
        length = len(path.read_text(encoding="utf-8").splitlines())
        assert (length > limit) == (ids(path) in longer), f"{ids(path)} has {length} lines, the bound is {limit}"
        assert longer.get(ids(path), str(length)) == str(length), f"{ids(path)} has {length} lines"


PRINT = {"equivalence", "finetuning", "inference", "reports", "programs", "text/runs", "text/flags"}


@pytest.mark.parametrize(
    "path",
    [ROOT / f"{name}.py" for name in sorted(MODEL_HALF - {"utils"})]
    + [path for path in PRODUCT if folder_of(path) == "engine" and name_of(path)[7:].replace(".", "/") not in PRINT],
    ids=ids,
)
def test_only_programs_print(path: Path):
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_no_star_imports_no_globals_no_module_level_statements(path: Path):
    tree = tree_of(path)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        assert not (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
    for node in tree.body:
        if isinstance(node, ast.Expr):
            is_docstring = isinstance(node.value, ast.Constant)
            is_path_insert = folder_of(path) == "checkpoints" and "sys.path" in ast.unparse(node)
            assert is_docstring or is_path_insert, ast.unparse(node)


READ = [path for path in PRODUCT if folder_of(path) not in ("benchmarks", "checkpoints")]


@pytest.mark.parametrize("path", READ, ids=ids)
def test_functions_fit_on_a_screen(path: Path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 45, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def test_importing_everything_prints_nothing_and_writes_nothing(tmp_path: Path):
    absent = set() if importlib.util.find_spec("numba") else NEED_NUMBA
    folders = ("", "engine", "fast", "bert", "grading")
    names = [name_of(path) for path in PRODUCT if folder_of(path) in folders and path.stem not in {"__main__", *absent}]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True; import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


PROGRAMS = (
    "advanced.experiments", "advanced.pretrain", "bert.pretrain", "bert.run", "convert", "grading", "grading.similar",
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_answers_help_without_pytorch(program: str):
    code = f"import runpy, sys; sys.argv[1:] = ['--help']\ntry: runpy.run_module({program!r}, run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code in (0, None)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_what_the_readmes_import_is_there():
    """Of every `from module import names` in a block of code."""
    pages = [ROOT / "README.md", *ROOT.glob("*/README.md"), *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    assert nodes
    for node in nodes:
        module = importlib.import_module(node.module)
        assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("folder", ["engine", "grading"])
def test_the_page_of_a_folder_lists_its_files_in_reading_order(folder: str):
    """Every file, each below those that it imports."""
    page = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+\.py)`", page, re.MULTILINE)
    files = [path.relative_to(ROOT / folder).as_posix() for path in PRODUCT if folder_of(path) == folder]
    assert sorted(listed) == sorted(name for name in files if not name.endswith("__init__.py"))
    order = {name_of(ROOT / folder / name): number for number, name in enumerate(listed)}
    for name, number in order.items():
        later = {other for other in imports(FILES[name]) if order.get(other, -1) >= number}
        assert not later, f"{name} imports {later}"


def test_modules_of_the_tests_have_names_of_their_own():
    """pytest imports all of them as top modules: of two with one name, it finds the first."""
    found = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in found.items() if count > 1] == []


def test_a_class_name_stands_for_one_class():
    """In one file alone, so that a name in a message or a trace says which is meant."""
    found: dict[str, set[str]] = {}
    for path in PRODUCT:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(ids(path))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_the_page_for_contributors_names_tests_of_every_file():
    """Each file has a row of its own or that of its folder, and all tests that it names are there."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| .* \|$", page, re.MULTILINE)
    named = [name for files, _ in rows for name in re.findall(r"`([\w./]+)`", files)]
    assert not [name for name in named if not (ROOT / name).exists()]
    assert not [
        name for _, tests in rows for name in re.findall(r"tests/[\w/.]*\w", tests) if not (ROOT / name).exists()
    ]
    folders = tuple(name for name in named if name.endswith("/"))
    assert not [ids(path) for path in PRODUCT if ids(path) not in named and not ids(path).startswith(folders)]
