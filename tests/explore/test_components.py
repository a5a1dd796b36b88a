"""The pages about components say what the code says: lines, tests, numbers, pictures, links."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from page_parts import SECTIONS, has_lines, is_close, links, named_parts, named_tests, prose, quotes, section, verdicts

from explore.components import __main__ as program
from explore.components.pages import Page, pages
from grading import adamw, mistakes, parts, questions, rotary
from grading.editions import ATTENTION_KINDS
from utils import UserError

INDEX = Page.of(ROOT / "docs" / "components" / "README.md")
PAGES = pages()
JUDGES = (mistakes, parts, rotary, adamw, questions)
of_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def functions_of(path: Path) -> set[str]:
    """The names of a file's functions."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@of_page
def test_a_page_has_all_sections_in_order_and_is_short(page: Page):
    assert tuple(re.findall(r"^## (.+)$", page.text, re.MULTILINE)) == SECTIONS
    assert page.text.startswith("# ")
    assert 40 <= len(page.text.splitlines()) <= 90
    assert "https://" in section(page, "Read more")
    assert "$" in section(page, "Formula") or "```math" in section(page, "Formula")


@of_page
def test_formulas_between_words_are_safe_from_markdown(page: Page):
    r"""GitHub reads a backslash before punctuation as its own, and `}_` as emphasis: such formulas want a block."""
    for formula in re.findall(r"\$[^$]+\$", prose(page)):
        assert not re.search(r"\\[^a-zA-Z]|\}_|\*|\n", formula), formula


@of_page
def test_lines_of_code_stand_in_the_file_that_is_linked(page: Page):
    assert quotes(page)
    for file, lines in quotes(page):
        assert file.suffix == ".py", "no link to a file before the lines"
        assert has_lines(file, lines), f"{file.name} has not: {lines}"


@of_page
def test_tests_and_checks_that_are_named_exist(page: Page):
    assert named_tests(page)
    for file, name in named_tests(page):
        assert name in functions_of(ROOT / file), f"{file}::{name}"
    known = {part.name for part in parts.all_parts(ATTENTION_KINDS)}
    assert {*named_parts(page)} <= known


@of_page
def test_what_a_grading_script_says_to_the_mistake_is_what_it_says(page: Page):
    said = "\n".join(Path(judge.__file__).read_text(encoding="utf-8") for judge in JUDGES)
    assert all(f'"{verdict}"' in said for verdict in verdicts(page))


@of_page
def test_numbers_are_what_the_code_computes(page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    _, written = page.example()
    computed = Page(page.path, page.rewritten()).example()[1]
    assert written and is_close(written, computed), f"python -m explore.components {page.name}\n{computed}"


@of_page
def test_links_lead_somewhere(page: Page):
    for target in links(page):
        assert (page.path.parent / target.partition("#")[0]).is_file(), target


def test_the_index_has_every_page_and_leads_there():
    assert all((INDEX.path.parent / target).is_file() for target in links(INDEX))
    linked = {(INDEX.path.parent / target).resolve() for target in links(INDEX)}
    assert {page.path for page in PAGES} <= linked
    assert "docs/components/README.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_pages_name_every_part_that_the_sanity_check_judges():
    """But the loading of files, which is no component."""
    known = {re.sub(", .*", "", part.name) for part in parts.all_parts(ATTENTION_KINDS)}
    named = {re.sub(", .*", "", part) for page in PAGES for part in named_parts(page)}
    assert known - named == {parts.IMPORT, "loading"}


# -------------------------------------------------------------------------------------------------- the program


def test_lines_must_follow_one_another():
    file = ROOT / "classifier.py"
    assert has_lines(file, ("import torch", "import torch.nn.functional as F"))
    assert not has_lines(file, ("import torch", "from torch import nn"))
    assert not has_lines(file, ("import torc",))


@pytest.mark.parametrize(
    ("one", "other", "close"),
    [
        ("loss 0.123", "loss 0.125", True),
        ("loss 0.123", "loss 0.126", False),
        ("loss 0.123", "lose 0.123", False),
        ("b 12", "b 13", False),
        ("1.5e-05", "1.7e-05", True),
        ("1.5e-05", "1.5e-04", False),
        ("0.1, 0.2", "0.1", False),
    ],
)
def test_what_counts_as_the_same_numbers(one: str, other: str, close: bool):
    assert is_close(one, other) == close


def test_a_page_is_written_with_what_its_example_prints(tmp_path: Path):
    path = tmp_path / "small.md"
    path.write_text("# Small\n\n## With numbers\n\n```python\nprint(1 + 1)\n```\n\n```\n3\n```\n\n## Read more\n")
    assert Page.of(path).rewritten() == path.read_text().replace("\n3\n", "\n2\n")
    path.write_text("# Small\n")
    with pytest.raises(UserError, match="small.md"):
        Page.of(path).rewritten()


def test_a_page_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["explore.components", "nonsense"])
    with pytest.raises(UserError, match="no page nonsense; there are"):
        program.main()
