"""A live page in English and Chinese: both say the same, nothing is said elsewhere, and a switch changes every word."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from chromium import Browser
from conftest import ROOT
from pages import Trained, trained  # noqa: F401
from test_chinese import HAN, MAINLAND
from test_live_page import browser, live_file, opened, written  # noqa: F401

from explore.broken import BREAKS
from explore.page import LIVE_SCRIPTS, PAGE_FOLDER

SENTENCE = r'"((?:[^"\\]|\\.)*)"'
ELEMENT = r'data-say="([\w.]+)"[^>]*>(.*?)</(?:a|h2|h3|legend|p|span|summary)>'
WORDS_LEFT = (Path(__file__).parent / "words_left.js").read_text("utf-8")
NAMES = {"min", "llama", "RoPE", "Top", "Min", "SiLU", "GELU", "RMSNorm", "Logit", "lens", "python", "explore", "nats"}


def words_of(name: str) -> dict[str, Any]:
    """One table of page/live/words.js."""
    table = re.search(rf"^const {name} = (.*?);$", read_part("live/words.js"), re.DOTALL | re.MULTILINE)[1]
    return json.loads(re.sub(r",(\s*[}\]])", r"\1", table))


def read_part(name: str) -> str:
    return (PAGE_FOLDER / name).read_text("utf-8")


def sentences_of_drawings() -> set[str]:
    """Each sentence inside of a call of `told` or `toldWith`."""
    found: set[str] = set()
    for path in PAGE_FOLDER.glob("*.js"):
        for start in re.finditer(r"\btold(?:With)?\(", text := path.read_text("utf-8")):
            call, depth = re.compile(rf"{SENTENCE}|[()]"), 1
            for part in call.finditer(text, start.end()):
                depth += {"(": 1, ")": -1}.get(part[0], 0)
                if depth == 0:
                    break
                if part[1] and depth == 1:
                    found.add(json.loads(part[0]))
    return found


def english_elements() -> dict[str, str]:
    """What page.html says by itself, by name."""
    page = read_part("page.html")
    labels = re.findall(r'data-label="([\w.]+)" aria-label="([^"]+)"', page)
    return dict(re.findall(ELEMENT, page, re.DOTALL)) | dict(labels)


def test_the_words_are_in_one_file():
    """Every word that a script or an element asks for is there, and no other; so is every switch's."""
    words, told = words_of("WORDS"), words_of("TOLD")
    sources = "".join(read_part(f"live/{name}.html") for name in ("live", "numbers"))
    sources += "".join(read_part(f"live/{name}.js") for name in LIVE_SCRIPTS if name != "words")
    elements = english_elements()
    asked = set(re.findall(r'"((?:live|next|sampling|made|copy|break|compare|numbers|words)\.[a-z_]+)"', sources))
    asked |= {f"break.{name}" for name in (*BREAKS, "mask_on")}
    asked |= {f"{what}.{kind}" for what in ("kind", "attention") for kind in ("causal", "bidirectional")}
    asked |= {f"sampling.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    asked |= {f"made.{name}" for name in ("run", "step", "back", "clear")}
    asked |= {f"numbers.{name}" for name in ("pair", "q", "q_turned", "k", "k_turned", "adds")}
    assert words.keys() == asked | (words.keys() & elements.keys())
    assert told.keys() == (elements.keys() - words.keys()) | sentences_of_drawings()


def test_both_languages_say_the_same():
    """The same places for values, numbers and names of code; Chinese as it is written in Taiwan."""
    assert [*words_of("LANGUAGES")] == ["en", "zh-TW"]
    pairs = [*words_of("WORDS").values()]
    pairs += [(english_elements().get(name, name), chinese) for name, chinese in words_of("TOLD").items()]
    for english, chinese in pairs:
        for same in (r"\{\d\}", r"\d+", r"\b\w*[A-Z]\w*[A-Z]\w*"):
            assert Counter(re.findall(same, chinese, re.ASCII)) == Counter(re.findall(same, english, re.ASCII)), chinese
        assert {*re.findall("[a-z]+", chinese.lower())} <= {*re.findall("[a-z]+", english.lower())}, chinese
        "".join(re.findall(HAN, chinese)).encode("big5")  # which has no simplified characters
        plain = re.sub(r"\{\d\}", "", chinese)
        assert not MAINLAND.findall(plain) and not re.findall(f"{HAN}[A-Za-z0-9,;:?!]|[A-Za-z0-9]{HAN}", plain), chinese
        assert re.search(HAN, chinese) or chinese.lower() == english.lower()


def test_a_chinese_page_links_to_chinese_pages():
    for each in BREAKS.values():
        assert (ROOT / "docs" / "components" / "zh-TW" / each.page).is_file()


# ------------------------------------------------------------------------------------------------ in a browser


def check_language(browser: Browser, name: str, *own: str) -> None:
    """No word of the other language is left on the page. own: words of the text or of labels."""
    browser.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.wait("document.querySelectorAll('details:not([hidden]) .scroll').length > 0")
    assert browser.value("document.documentElement.lang") == name
    pattern, known = ("[A-Za-z]{2,}", NAMES | {*own}) if name == "zh-TW" else ("\\p{Script=Han}+", set())
    browser.wait(f"byId('maps').dataset.drawn && !({WORDS_LEFT})('\u2026').length")  # nothing is being computed
    assert {*browser.tab.evaluate(WORDS_LEFT, pattern)} <= known


@pytest.mark.slow
def test_the_language_is_a_switch(browser: Browser, live_file: Path):
    """All words change at once, the address keeps the choice, and links lead to the pages in that language."""
    opened(
        browser, live_file, text="Once upon a time", temperature=0, steps=3, **{"break": "scores,gelu", "off": "1.1"}
    )
    browser.tab.locator("#measured").fill("The film was long.")
    browser.click("#measure")
    browser.wait("/^[0-9.,]+ of/.test(comparing.shown.now?.perplexity?.() ?? '')")
    check_language(browser, "en")
    browser.click("#language label:nth-of-type(2)")
    check_language(browser, "zh-TW")
    assert browser.value("byId('live-status').textContent").startswith("9 個詞元")
    assert "分數沒有除以 √d" in browser.value("byId('compare').textContent")
    browser.wait("location.hash.includes('lang=zh-TW')")
    links = browser.value(
        "[...document.querySelectorAll('#mistakes .where')].map((each) => each.lastChild.textContent)"
    )
    assert links[1] == "docs/components/zh-TW/attention.md"
    browser.click("#language label:nth-of-type(1)")
    check_language(browser, "en")
    browser.wait("!location.hash.includes('lang')")
    browser.value("location.hash = 'text=The+film&lang=zh-TW'")
    browser.wait("byId('live').dataset.opened.includes('zh-TW') && byId('live').dataset.read === 'The film'")
    check_language(browser, "zh-TW", "film")
    assert browser.value("document.querySelector('#language :checked').value") == "zh-TW" and browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("languages", "given", "expected"),
    [
        (["zh-TW"], {}, "zh-TW"),
        (["zh-HK", "en"], {}, "zh-TW"),
        (["de", "en-GB", "zh-TW"], {}, "en"),
        (["de"], {}, "en"),
        (["zh-TW"], {"lang": "en"}, "en"),
        (["zh-TW"], {"lang": "toString"}, "zh-TW"),
    ],
    ids=str,
)
def test_the_reader_s_language_comes_first(
    browser: Browser, live_file: Path, languages: list, given: dict, expected: str
):
    page = browser.tab.context.browser.new_page()
    page.add_init_script(f"Object.defineProperty(navigator, 'languages', {{ value: {json.dumps(languages)} }})")
    page.goto(f"{live_file.as_uri()}#{urlencode(given)}")
    assert page.evaluate("[language, document.documentElement.lang]") == [expected, expected]
    page.close()


@pytest.mark.slow
def test_a_classifier_s_page_in_chinese(browser: Browser, trained: Trained, tmp_path: Path):
    page = written(tmp_path / "page.html", trained.model)
    opened(browser, page, text="A warm little film.")
    browser.tab.locator(".word-edit button").nth(1).click()
    browser.click("#language label:nth-of-type(2)")
    browser.wait("text().decision.occlusion.at(-1) !== null")
    check_language(browser, "zh-TW", "good", "bad", "film")
    names = browser.value("[...document.querySelectorAll('.word-edit button')].map((each) => each.ariaLabel)")
    assert names == ["拿掉 A", "放回 warm", "拿掉 little", "拿掉 film."] and browser.errors == []
