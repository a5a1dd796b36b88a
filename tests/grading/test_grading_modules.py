"""The rules of `grading/`: no module that a student may replace, short files, short functions."""

import ast
import sys

import pytest
from conftest import ROOT

CHECKER = {"archive", "editions", "entries", "imports", "lines", "needs", "outputs", "package", "packing"}
CHECKER |= {"pdf", "programs", "rules", "submission"}
PATHS = sorted((ROOT / "grading").glob("*.py"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_grader_imports_no_module_that_a_student_may_replace(path):
    allowed = {"grading", *sys.stdlib_module_names} | (set() if path.stem in CHECKER else {"torch", "numpy"})
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 320
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 45, node.name
