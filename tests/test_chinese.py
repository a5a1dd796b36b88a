"""The Chinese pages say what the English ones say, and are written as one writes in Taiwan.

A Chinese page has the headings, blocks, formulas, code, numbers and links of its English page. Its last line holds that
page's checksum: when the English page changes, the test of the Chinese one fails and says how to renew it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, asset
from page_parts import SECTIONS

COMPONENTS = ROOT / "docs" / "components"
CHINESE = COMPONENTS / "zh-TW"
ENGLISH_OF = {
    ROOT / "README.zh-TW.md": ROOT / "README.md",
    **{CHINESE / page.name: page for page in sorted(COMPONENTS.glob("*.md"))},
    ROOT / "bert/components/zh-TW/wordpiece.md": ROOT / "bert/components/wordpiece.md",
}
CHINESE_OF = {english: chinese for chinese, english in ENGLISH_OF.items()}
TITLES = ("公式", "形狀", "程式碼", "檢查方式", "用數字看", "常見錯誤", "延伸閱讀")  # of SECTIONS
OTHER_LANGUAGE = re.compile(r"^\[English\]\(.*\n|\[繁體中文\]\([^)]+\)", re.MULTILINE)
ADDED = "\n## 流傳的筆記裡的三個錯誤\n"  # what follows stands in the Chinese index alone
STAMP = "<!-- SHA-256 of the English page: {} -->\n"

BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE, FORMULA, LINK = re.compile(r"`[^`\n]+`"), re.compile(r"\$[^$\n]+\$"), re.compile(r"!?\[([^]]*)\]\(([^)]+)\)")
MAINLAND = re.compile(
    "代碼|數據|默認|循環|運行|信息|內存|程序|字符|變量|數組|打印|網絡|軟件|硬件|優化器|詞表|似然|概率|文本|視頻|屏幕|調用|接口|用戶|緩存|線程|進程|字節|服務器|質量"
)
HAN, MARKS = "[\u3400-\u9fff]", "[，。；：、！？（）「」]"

of_page = pytest.mark.parametrize("page", ENGLISH_OF, ids=lambda page: page.relative_to(ROOT).as_posix())


def common(page: Path) -> str:
    """What a page has in both languages, without the last line."""
    text = page.read_text(encoding="utf-8").partition("\n<!-- SHA-256")[0].partition(ADDED)[0]
    return OTHER_LANGUAGE.sub("", text)


def untold(block: str) -> str | list[str]:
    """A block; of a tree of files only the names, since the remarks beside them are translated."""
    return re.findall(r"[\w{},-]+[./][\w]*", block, re.ASCII) if block.startswith("```\nID/\n") else block


def prose(text: str) -> str:
    """Without blocks and the addresses of links."""
    return LINK.sub(r"\1", BLOCK.sub("", text))


def targets(page: Path, text: str) -> list[tuple[Path | str, str]]:
    """The addresses of links, or the files and headings; of a page in two languages the Chinese file."""
    found = []
    for _, link in LINK.findall(BLOCK.sub("", text)):
        name, _, heading = link.partition("#")
        path = (page.parent / name).resolve()
        found.append((link, "") if link.startswith("https://") else (CHINESE_OF.get(path, path), heading))
    return found


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_page_has_its_counterpart():
    assert {*CHINESE.glob("*.md")} == {page for page in ENGLISH_OF if page.parent == CHINESE}
    for english in (ROOT / "README.md", COMPONENTS / "README.md"):
        assert (CHINESE_OF[english], "") in targets(english, english.read_text(encoding="utf-8"))


@of_page
def test_the_english_page_is_the_one_that_was_translated(page: Path):
    english = ENGLISH_OF[page]
    stamp = STAMP.format(hashlib.sha256(english.read_text(encoding="utf-8").encode()).hexdigest())
    assert page.read_text(encoding="utf-8").endswith(f"\n{stamp}"), (
        f"{english.relative_to(ROOT)} has changed since {page.relative_to(ROOT)} was written: bring that page in step "
        f"(git log -p {english.relative_to(ROOT)}), then make this its last line:\n{stamp}"
    )


@of_page
def test_headings_blocks_formulas_code_numbers_and_links_are_the_english_ones(page: Path):
    english = ENGLISH_OF[page]
    there, here = common(english), common(page)
    assert [*map(untold, BLOCK.findall(here))] == [*map(untold, BLOCK.findall(there))]
    assert re.findall(r"^#+ ", prose(here), re.MULTILINE) == re.findall(r"^#+ ", prose(there), re.MULTILINE)
    if page.name != "README.md" and page.parent.name == "zh-TW":
        assert tuple(re.findall(r"^## (.+)$", here, re.MULTILINE)) == TITLES and len(TITLES) == len(SECTIONS)
    assert len(re.split(r"\n{2,}", prose(here).strip())) == len(re.split(r"\n{2,}", prose(there).strip()))  # paragraphs
    for what in (FORMULA, CODE):
        assert Counter(what.findall(prose(here))) == Counter(what.findall(prose(there)))
    numbers = [re.findall(r"\d+(?:[.,]\d+)*", CODE.sub("", FORMULA.sub("", prose(text)))) for text in (here, there)]
    assert Counter(numbers[0]) == Counter(numbers[1])
    assert Counter(targets(page, here)) == Counter(targets(english, there))
    for line in (r"^\|.*\|$", r"^- ", r"^> .*"):  # rows of tables, items, what a grading script says
        found = [re.findall(line, prose(text), re.MULTILINE) for text in (here, there)]
        assert found[0] == found[1] if ">" in line else len(found[0]) == len(found[1])


@of_page
def test_links_lead_to_files_and_headings(page: Path):
    for target, heading in targets(page, page.read_text(encoding="utf-8")):
        assert isinstance(target, str) or target.exists(), target
        assert not heading or heading in anchors(target), heading


@of_page
def test_the_chinese_is_traditional_with_full_width_marks_and_spaces_around_latin(page: Path):
    text = prose(page.read_text(encoding="utf-8"))
    "".join(re.findall(HAN, text)).encode("big5")  # which has no simplified characters
    assert not MAINLAND.findall(text)
    plain = re.sub(r"\*+", "", CODE.sub("`", FORMULA.sub("$", text)))
    for wrong in (f"{HAN}[A-Za-z0-9`$]", f"[A-Za-z0-9`$%]{HAN}", f"{HAN}[,.;:?!()]", f"[,.;:?!()]{HAN}"):
        assert not re.findall(f".{{0,9}}{wrong}.{{0,9}}", plain)


@of_page
def test_github_shows_the_chinese_as_it_is_meant(page: Path):
    """It takes a line's end for a space, `$` after a mark for a dollar, `**` between a mark and a word for stars."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert not re.findall(f"(?:{HAN}|{MARKS})\n(?:{HAN}|{MARKS})", text)
    assert {text[found.start() - 1] for found in FORMULA.finditer(text)} <= {" ", "\n"}
    for bold, after in re.findall(r"\*\*([^*\n]+)\*\*(\w?)", text):
        assert not re.fullmatch(MARKS, bold[-1]) or not after, bold


def test_the_errors_of_the_notes_are_told_as_the_data_and_the_page_of_adamw_have_them(assets: Path):
    told = (CHINESE / "README.md").read_text(encoding="utf-8").partition(ADDED)[2].partition("\n## ")[0]
    lines = asset(assets, "data/cfimdb-test.txt").read_text(encoding="utf-8").splitlines()
    assert {line.split(" ")[0] for line in lines} == {"0"} and f"{len(lines)} 個 0" in told
    assert json.loads((ROOT / "data" / "cfimdb-label-mapping.json").read_text())[0] == "bad"
    page = {*FORMULA.findall((CHINESE / "adamw.md").read_text(encoding="utf-8"))}
    assert any(formula in page and "alpha_t (" in formula for formula in FORMULA.findall(told))
