"""The rules of the layout: who may import whom, no star imports, nothing happens at import, functions fit a screen."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEED_NUMBA = {"loops", "engine", "head"}  # the others import without it
LEVELS = (
    {"utils"},
    {"storage", "course"},
    {"columns", "config", "rope", "tokenizer", "optimizer"},
    {"plan", "sentences"},
    {"base_llama"},
    {"cache", "sampling"},
    {"llama"},
    {"weights"},
    {"classifier", "batches", "tasks"},
    {"training"},
    {"saver", "families"},
    {"runs"},
    {"arguments", "reports"},
    {"finetuning", "generation"},
    {"run_llama"},
)
LAZILY = {("llama", "weights")}  # the course's scripts look for `load_pretrained` in llama.py
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
GRADERS = {"sanity_check", "rope_test", "optimizer_test", "prepare_submit"}
FOLDERS = (*"advanced benchmarks bert checkpoints convert explore fast grading parallel tests".split(),)
LAZY = {"advanced", "bert", "convert", "explore", "fast", "parallel"}  # imported where they are wanted
ALLOWED_LIBRARIES = {"torch", "numpy", "sentencepiece", "tqdm", "sklearn"}
PARTS = ("bert/drawings", "explore/components")  # folders in those folders
SOURCES = sorted(
    path
    for pattern in ("", *(f"{folder}/" for folder in (*FOLDERS, *PARTS)), "notebooks/__", "tests/*/")
    for path in ROOT.glob(f"{pattern}*.py")
    if path.is_file()
)
ROOT_SOURCES = [path for path in SOURCES if path.parent == ROOT]
FAST_SOURCES = [path for path in SOURCES if path.parent == ROOT / "fast"]
BERT_SOURCES = [path for path in SOURCES if path.parent == ROOT / "bert"]
CONVERT_SOURCES = [path for path in SOURCES if path.parent == ROOT / "convert"]
CONVERT_LEVELS = (
    {"__init__", "directory", "formats"},
    {"tokenizer", "vocabulary"},
    {"gguf", "hugging_face", "llama2c", "onnx"},
    {"__main__", "compare"},
)
CONVERT_LIBRARIES = {"gguf", "onnx", "onnxruntime", "onnxscript", "tokenizers"}  # and safetensors, by its name
BERT_LEVELS = (
    {"__init__", "categories", "config", "questions", "squad", "tasks"},
    {"basic", "model", "names", "unpadded"},
    {"attention", "heads", "wordpiece"},
    {"kernels", "load", "package", "pairs", "spans", "vocabulary"},
    {"examples", "family", "merges", "save", "texts"},
    {"directory", "pretrain"},
    {"answering", "pretraining"},
    {"compare", "run"},
)
BERT_LAZILY = {("pretrain", "pretraining")}  # flags are checked before PyTorch is imported
BERT_KERNELS = {"attention", "kernels"}  # which fast/ asks for by name; without it, they are not imported
HELD = {*LAZY, "grading", "drawings", "components"}
PACKAGE = [path for path in SOURCES if path.parent == ROOT or path.parent.name in HELD]


def imports(path: Path) -> set[str]:
    """The top names of all modules that a file imports, lazily or not."""
    return set().union(*map(names_of, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))


def names_of(node: ast.AST) -> set[str]:
    """The top names that one import statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_the_root_holds_the_modules_of_the_layout_and_no_other():
    assert {path.stem for path in ROOT_SOURCES} == set(LEVEL) | GRADERS


@pytest.mark.parametrize("path", ROOT_SOURCES, ids=lambda path: path.name)
def test_imports_point_one_way(path: Path):
    for name in imports(path) & (set(LEVEL) | GRADERS):
        assert name not in GRADERS
        if path.stem in LEVEL and (path.stem, name) not in LAZILY:
            assert LEVEL[name] < LEVEL[path.stem], f"{path.stem} imports {name}"


def test_what_is_imported_against_the_order_is_imported_inside_of_a_function():
    for module, name in LAZILY:
        assert not any(name in names_of(node) for node in ast.parse((ROOT / f"{module}.py").read_text()).body)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_imports_the_driver(path: Path):
    assert "run_llama" not in imports(path)


@pytest.mark.parametrize("path", ROOT_SOURCES, ids=lambda path: path.name)
def test_the_root_modules_need_the_core_libraries_alone(path: Path):
    foreign = imports(path) - set(sys.stdlib_module_names) - set(LEVEL) - ALLOWED_LIBRARIES
    assert foreign <= {*LAZY, *({"grading"} if path.stem in GRADERS else ())}


@pytest.mark.parametrize("path", ROOT_SOURCES, ids=lambda path: path.name)
def test_the_root_imports_its_folders_only_inside_of_functions(path: Path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_for_types:
            assert not any(LAZY & names_of(inner) for inner in ast.walk(node))


@pytest.mark.parametrize("path", BERT_SOURCES, ids=lambda path: path.name)
def test_bert_imports_point_one_way_and_need_the_core_libraries_alone(path: Path):
    level = {name: level for level, names in enumerate(BERT_LEVELS) for name in names}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "bert":
            names = [node.module.partition(".")[2]] if "." in node.module else [alias.name for alias in node.names]
            later = {name for name in names if level[name] >= level[path.stem]}
            assert not later or (path.stem, *later) in BERT_LAZILY, ast.unparse(node)
    folders = {"advanced", "bert", "convert"} | ({"fast"} if path.stem in BERT_KERNELS else set())
    assert imports(path) - set(sys.stdlib_module_names) - set(LEVEL) - folders <= ALLOWED_LIBRARIES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("path", CONVERT_SOURCES, ids=lambda path: path.name)
def test_convert_imports_point_one_way_and_other_libraries_inside_of_functions(path: Path):
    level = {name: level for level, names in enumerate(CONVERT_LEVELS) for name in names}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "convert":
            names = [node.module.partition(".")[2]] if "." in node.module else [alias.name for alias in node.names]
            assert all(level[name] < level[path.stem] for name in names), ast.unparse(node)
    foreign = imports(path) - set(sys.stdlib_module_names) - set(LEVEL) - {"convert"}
    assert foreign <= ALLOWED_LIBRARIES | CONVERT_LIBRARIES
    assert not any(CONVERT_LIBRARIES & names_of(node) for node in tree.body)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


def test_root_modules_are_as_long_as_the_page_says():
    """structure.md gives a bound, and names those that are longer, with their reasons."""
    page = (ROOT / "structure.md").read_text(encoding="utf-8")
    bound, of_llama = re.search(r"have (\d+) lines at most, `llama.py` (\d+)", page).groups()
    reasons = page[page.index("Longer are") : page.index("\n\n", page.index("Longer are"))]
    named = {*re.findall(r"`(\w+\.py)`", reasons)}
    for path in ROOT.glob("*.py"):
        length = len(path.read_text(encoding="utf-8").splitlines())
        limit = int(of_llama if path.name == "llama.py" else bound)
        assert (length > limit) == (path.name in named), f"{path.name} has {length} lines"


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        *((name, {"torch"}) for name in ("columns", "config", "course", "sentences", "tokenizer")),
        *((name, {"torch"}) for name in ("advanced/__init__", "advanced/table")),
        *((name, {"argparse", "arguments", "reports"}) for name in ("training", "saver", "tasks", "batches")),
        *((name, {"argparse", "arguments", "reports"}) for name in ("families", "runs")),
        *((f"bert/{name}", {"torch"}) for name in ("__init__", "basic", "categories", "config", "names", "wordpiece")),
    ],
)
def test_what_a_module_must_not_import(module: str, banned: set[str]):
    assert not imports(ROOT / f"{module}.py") & banned


@pytest.mark.parametrize("module", sorted(set(LEVEL) - {"run_llama", "finetuning", "generation", "reports", "utils"}))
def test_only_programs_print(module: str):
    calls = (node for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())) if isinstance(node, ast.Call))
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_star_imports_no_globals_no_module_level_statements(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        assert not (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
    for node in tree.body:
        if isinstance(node, ast.Expr):
            is_docstring = isinstance(node.value, ast.Constant)
            is_path_insert = path.parent.name == "checkpoints" and "sys.path" in ast.unparse(node)
            assert is_docstring or is_path_insert, ast.unparse(node)


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_functions_fit_on_a_screen(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 45, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def test_importing_everything_prints_nothing_and_writes_nothing(tmp_path: Path):
    absent = set() if importlib.util.find_spec("numba") else NEED_NUMBA
    fast = [f"fast.{path.stem}" for path in FAST_SOURCES if path.stem not in {"__init__", *absent}]
    bert = [f"bert.{path.stem}" for path in BERT_SOURCES]
    names = ", ".join(sorted(set(LEVEL) | GRADERS) + fast + bert)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True; import {names}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


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


def test_modules_of_the_tests_have_names_of_their_own():
    """pytest imports all of them as top modules: of two with one name, it finds the first."""
    found = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in found.items() if count > 1] == []
