"""A live page in a real browser: its numbers are those of `llama.py`, and typing, making a text and breaking it work.

Skipped where Playwright or a Chromium is not installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from chromium import Browser, browsing, looks
from conftest import ROOT
from pages import Trained, trained  # noqa: F401
from test_browser import CONTRAST, CUT
from test_live_model import PROMPTS, TEXT, close
from thread import ASKED, rounded

from engine.training import perplexity
from explore import __main__ as program
from explore.broken import BREAKS, Switches, broken, read_broken
from explore.decision import probabilities
from explore.inspected import InspectedModel

HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">\u2028"
NEXT = "[...document.querySelectorAll('#live-next tbody tr')]"
BUNDLED = ROOT / "checkpoints" / "minllama1M.pt"
# A thread of the page's own scripts and weights, that answers tests as well; `askTest` asks it.
OPEN_TEST = f"""() => {{
  const worker = new Worker(URL.createObjectURL(new Blob([byId("worker").textContent, {json.dumps(ASKED)}])));
  window.askTest = (kind, given) => new Promise((resolve) => {{
    worker.onmessage = ({{ data }}) => resolve(data);
    worker.postMessage({{ number: 1, kind, given }});
  }});
  const {{ tensors, config, tokenizer, classifier }} = page.live;
  return askTest("open", {{ tensors, config, tokenizer, classifier, weights: window.weights }});
}}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def bundled() -> InspectedModel:
    return rounded(InspectedModel.open(str(BUNDLED)))


def written(out: Path, *flags: object) -> Path:
    """The page that `python -m explore` writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["explore", *map(str, flags), "--live", "--out", str(out)])
        program.main()
    return out


@pytest.fixture(scope="module")
def live_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("live") / "page.html", BUNDLED)


def opened(browser: Browser, path: Path, **state: object) -> Browser:
    """Open the page at an address, and wait until all that it asks for is computed."""
    browser.errors.clear()
    browser.requests.clear()
    browser.tab.goto("about:blank")
    browser.tab.goto(f"{path.as_uri()}#{urlencode(state)}")
    browser.wait(
        "document.getElementById('live')?.dataset.compared !== undefined && byId('live').dataset.opened !== undefined"
    )
    return browser


def typed(browser: Browser, text: str) -> None:
    browser.tab.locator("#live-text").fill(text)
    browser.wait(f"byId('live').dataset.compared === JSON.stringify([{json.dumps(text)}, live.switches])")


def continued(inspected: InspectedModel, text: str, count: int) -> str:
    """What the model goes on with at temperature 0."""
    ids = torch.tensor([inspected.encode(text)])
    made = inspected.llama.generate(ids, count, 0.0)[0].tolist()
    decode = inspected.tokenizer.decode
    return decode(made)[len(decode(ids[0].tolist())) :]


def test_the_page_is_one_small_file_without_network(live_file: Path):
    text = live_file.read_text("utf-8")
    assert len(text.encode()) < 4_000_000
    assert not re.search(r'(src|href)="?https?:|@import|url\(http', text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'") and "worker-src blob:" in policy and "http" not in policy
    assert "connect-src" not in policy


@pytest.mark.slow
def test_the_browser_computes_what_the_python_does(browser: Browser, live_file: Path, bundled: InspectedModel):
    """Logits within 1e-3 under both semantics and every switch; the likeliest ids after 20 prompts."""
    weights = re.search(r'id="weights">([^<]+)<', live_file.read_text("utf-8"))[1]
    opened(browser, live_file, text=TEXT)
    browser.tab.evaluate("(weights) => { window.weights = weights; }", weights)
    assert "failed" not in browser.tab.evaluate(OPEN_TEST)
    ids = bundled.encode(TEXT)
    ask = "([kind, given]) => askTest(kind, given)"
    for attention in ("causal", "bidirectional"):
        for breaks in ([], *([name] for name in BREAKS)):
            given = {"ids": ids, "switches": {"attention": attention, "breaks": breaks}}
            rows = browser.tab.evaluate(ask, ["logits", given])["answer"]["logits"]
            close(torch.tensor(rows), read_broken(bundled.llama, ids, Switches(attention, breaks)).logits)
    for prompt in PROMPTS:
        added: list[int] = []
        for _ in range(10):
            given = dict(text=prompt, added=added, switches={}, sampling={"temperature": 0}, random=0)
            added.append(browser.tab.evaluate(ask, ["next", given])["answer"]["id"])
        start = torch.tensor([bundled.encode(prompt)])
        assert bundled.llama.generate(start, 10, 0.0)[0, start.shape[1] :].tolist() == added
    assert browser.errors == [] and all(each.startswith(("file:", "blob:")) for each in browser.requests)


def test_what_is_typed_is_read_at_once(browser: Browser, live_file: Path, bundled: InspectedModel):
    opened(browser, live_file)
    assert browser.value("byId('live-text').value") == program.SAMPLE_TEXT
    typed(browser, "Once upon a")
    p = bundled.llama(torch.tensor([bundled.encode("Once upon a")]))[0][0, 0].detach().softmax(-1)
    shown = browser.value(f"{NEXT}.map((row) => [row.querySelector('button').dataset.id, row.cells[2].textContent])")
    assert [int(id) for id, _ in shown[:5]] == p.topk(5).indices.tolist()
    assert float(shown[0][1].removesuffix(" %")) == pytest.approx(100 * float(p.max()), abs=0.1)
    assert browser.value("document.querySelectorAll('#chips .chip').length") == len(bundled.encode("Once upon a"))
    typed(browser, "")
    assert browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches", [{}, {"break": "scores"}, {"attention": "bidirectional"}, {"off": "2.1,4", "uniform": "1.3"}], ids=str
)
def test_an_address_is_computed_on_opening(browser: Browser, live_file: Path, bundled: InspectedModel, switches: dict):
    opened(browser, live_file, text="Once upon a time", temperature=0, steps=8, **switches)
    parts = {name: switches[name].split(",") for name in ("off", "uniform") if name in switches}
    if "break" in switches:
        parts["breaks"] = [switches["break"]]
    if "attention" in switches:
        ids = bundled.encode("Once upon a time")
        for _ in range(8):
            ids.append(int(read_broken(bundled.llama, ids, Switches(**switches)).logits[-1].argmax()))
        decode = bundled.tokenizer.decode
        expected = decode(ids)[len("Once upon a time") :]
    else:
        with broken(bundled.llama, Switches(**parts)):
            expected = continued(bundled, "Once upon a time", 8)
    assert browser.value("byId('live-generated').textContent") == expected
    browser.tab.wait_for_timeout(400)
    address = browser.value("location.hash")
    assert "text=Once+upon+a+time" in address and "steps=8" in address and "temperature=0" in address
    checked = browser.value(
        "[...document.querySelectorAll('#break input:checked[type=checkbox]')].map((each) => each.value)"
    )
    assert sorted(checked) == sorted(each for part in parts.values() for each in part)
    assert browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"off": "2"}, "Switched on: Layer 2 off"),
        ({"off": "2", "lang": "zh-TW"}, "已打開的開關：關掉第 2 層"),
        (
            {"break": "scores,gelu", "off": "1,1.2", "uniform": "2.1"},
            "Switched on: Scores not divided by \u221ad; GELU for SiLU; Layer 1 off; 2 more",
        ),
        ({}, ""),
    ],
)
def test_the_bar_names_the_switches_of_an_address(browser: Browser, live_file: Path, switches: dict, words: str):
    opened(browser, live_file, text="Once upon a time", **switches)
    said = "[byId('cursor').innerText.split('\\n')[0], byId('switched').checkVisibility()]"
    if words:
        assert browser.value(said) == [words, True]
        browser.click("#break-none")
    assert browser.value("[byId('switched').textContent, byId('switched').checkVisibility()]") == ["", False]


@pytest.mark.slow
def test_an_address_is_read_with_care(browser: Browser, live_file: Path):
    """What is empty, out of bounds, said twice or of no such head; then the switches by hand."""
    given = {"temperature": " ", "min_p": "2", "top_k": "2.6", "seed": "7", "attention": "causal"}
    opened(browser, live_file, text="The film", **given, **{"break": "scores,scores", "off": "0.1,1.0,1.1,1.1,0"})
    assert browser.value("[live.sampling.temperature, live.sampling.min_p, live.sampling.top_k, live.seed]") == [
        1,
        1,
        3,
        7,
    ]
    none = {"attention": None, "breaks": [], "off": [], "uniform": []}
    assert browser.value("live.switches") == none | {"attention": "causal", "breaks": ["scores"], "off": ["1.1"]}
    browser.wait("location.hash.includes('seed=7')")
    shown = "[live.switches, byId('break-none').disabled, COLUMNS.now.title]"
    browser.click("#break-none")
    assert browser.value(shown) == [none, True, "The other attention"]
    assert browser.value("switchesOf('now').attention") == "bidirectional"
    browser.click("#live-attention label:nth-of-type(2)")
    assert browser.value(shown) == [none | {"attention": "bidirectional"}, False, "With your switches"]
    browser.click("#live-attention label:nth-of-type(1)")
    assert browser.value(shown) == [none, True, "The other attention"]
    browser.value("live.switches.attention = 'causal', switchesChanged()")  # as the model is
    assert browser.value(shown)[1:] == [True, "The other attention"]
    assert browser.errors == []


@pytest.mark.slow
def test_what_the_two_models_say(browser: Browser, live_file: Path):
    """A model that sees what follows has no perplexity; a text ends at the model's end; alike heads are told."""
    opened(browser, live_file, text="The film", temperature=0)
    assert browser.value("document.querySelectorAll('#mistakes p.soft').length") == 0
    assert browser.value("page.model.n_kv_heads = page.model.n_heads, drawSwitches(), 0") == 0
    assert browser.value("document.querySelectorAll('#mistakes p.soft').length") == 2
    assert len(browser.tab.evaluate("goesOn('right')")) > 10
    assert browser.tab.evaluate("page.live.stops = [making.ahead.id], goesOn('right')") == "-"
    browser.click("#mistakes input[value=mask]")
    browser.click("#measure")
    browser.wait("comparing.shown.now?.perplexity?.() === 'sees what it predicts'")
    assert browser.value("comparing.shown.right.perplexity()").endswith("tokens") and browser.errors == []


@pytest.mark.slow
def test_a_text_is_made_token_by_token(browser: Browser, live_file: Path, bundled: InspectedModel):
    opened(browser, live_file, text="The film", temperature=0)
    made = "live.made.map((each) => each.id)"
    for count in (1, 2, 3):
        browser.click("#made-step")
        browser.wait(f"live.made.length === {count} && making.ahead !== null")
    ids = browser.value(made)
    browser.click("#made-back")
    browser.wait("live.made.length === 2 && making.ahead !== null")
    browser.click("#live-next tbody tr:nth-child(3) button")  # another one is put there
    browser.wait("live.made.length === 3 && making.ahead !== null")
    start = bundled.encode("The film")
    third = bundled.llama(torch.tensor([start + ids[:2]]))[0][0, 0].topk(3).indices[2]
    assert browser.value(made) == [*ids[:2], int(third)] and int(third) != ids[2]
    browser.click("#made-run")
    browser.wait("live.made.length > 6")
    browser.click("#made-run")
    browser.wait("!making.isRunning")
    count = browser.value("live.made.length")
    browser.tab.wait_for_timeout(300)
    assert browser.value("live.made.length") in (count, count + 1)
    following = browser.value(made)
    expected = bundled.llama.generate(torch.tensor([start + following[:3]]), len(following) - 3, 0.0)[0].tolist()
    assert following == expected[len(start) :]
    browser.click("#live-made button:nth-child(2)")
    browser.wait("live.made.length === 1")
    assert browser.errors == []


def test_settings_move_the_probabilities(browser: Browser, live_file: Path):
    opened(browser, live_file, text="The film was")
    chances = f"{NEXT}.map((row) => row.cells[2].textContent)"
    before = browser.value(chances)
    for name, value in (("top_k", 2), ("temperature", 0.3)):
        browser.tab.locator(f"#sampling-{name}").fill(str(value))
    browser.wait("byId('live-kept').textContent.startsWith('2 of')")
    browser.wait("document.querySelectorAll('#live-next .dropped').length === 10")
    assert browser.value(chances)[:2] != before[:2]
    assert browser.errors == []


@pytest.mark.slow
def test_a_switch_shows_both_models(browser: Browser, live_file: Path, bundled: InspectedModel):
    opened(browser, live_file, text=TEXT)
    assert browser.value("COLUMNS.now.title") == "The other attention"
    browser.click("#mistakes input[value=scores]")
    browser.wait(f"byId('live').dataset.compared === JSON.stringify([{json.dumps(TEXT)}, live.switches])")
    ids = bundled.encode(TEXT)
    browser.value("update({ token: 3 })")
    for column, switches in (("right", Switches()), ("now", Switches(breaks=["scores"]))):
        record = read_broken(bundled.llama, ids, switches)
        lens = f"page.texts[0].semantics.{column}.lens"
        assert browser.value(f"{lens}.at(-1).ids[3 * {lens}.at(-1).ids.length / count()]") == int(
            record.logits[3].argmax()
        )
        weights = browser.value(f"[...page.texts[0].semantics.{column}.attention]")
        stored = torch.tensor(weights).view(4, 4, len(ids), len(ids)).div(255).square()
        torch.testing.assert_close(stored, torch.stack(record.attention), atol=5e-3, rtol=0)
    text = "There was a girl who lived in a town between two hills."
    browser.tab.locator("#measured").fill(text)
    browser.click("#measure")
    browser.wait("/^[0-9.,]+ of/.test(comparing.shown.now?.perplexity?.() ?? '')")
    for column, breaks in (("right", []), ("now", ["scores"])):
        with broken(bundled.llama, Switches(breaks=breaks)):
            expected = perplexity(bundled.llama, bundled.tokenizer, text).perplexity
        shown = float(browser.value(f"comparing.shown.{column}.perplexity()").split()[0].replace(",", ""))
        assert shown == pytest.approx(expected, rel=1e-2)
    links = browser.value("document.querySelectorAll('#mistakes .where').length")
    assert links == len(BREAKS) and browser.errors == []


def test_one_head_in_numbers(browser: Browser, live_file: Path, bundled: InspectedModel):
    opened(browser, live_file, text=TEXT, layer=2, head=3)
    browser.value("update({ pair: { query: 6, key: 2, column: 'right' } })")
    browser.wait("byId('of-query').value === '6' && byId('of-key').value === '2'")
    record = read_broken(bundled.llama, bundled.encode(TEXT), Switches())
    weight = 100 * float(record.attention[1][2, 6, 2])
    browser.wait(f"Math.abs(parseFloat(byId('sum').textContent.match(/weight ([0-9.]+) %/)?.[1]) - {weight}) < 0.5")
    assert browser.errors == []


def test_what_is_seen_can_be_taken_along(browser: Browser, live_file: Path):
    opened(browser, live_file, text="Once upon a time", temperature=0, steps=5)
    made = browser.value("byId('live-generated').textContent")
    browser.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    browser.click("#copying button:nth-child(1)")
    browser.wait("byId('said').textContent === t('copy.done')")
    lines = browser.tab.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0] == f"Once upon a time{made}" and lines[2].endswith(" %") and "#text=Once" in lines[-1]
    with browser.tab.expect_download() as download:
        browser.click("#copying button:nth-child(2)")
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_texts_stay_texts(browser: Browser, live_file: Path):
    opened(
        browser,
        live_file,
        text=HOSTILE,
        seed="x",
        temperature="NaN",
        steps="-5",
        layer="1e9",
        head="<b>",
        off="9.9,a",
        **{"break": "nothing"},
    )
    assert browser.value("byId('live-text').value") == HOSTILE
    assert "broken" not in browser.value("document.title")
    assert browser.value("[document.images.length, state.layer, state.head]") == [0, 3, 0]
    assert browser.value("live.switches") == {"attention": None, "breaks": [], "off": [], "uniform": []}
    assert browser.errors == []


@pytest.mark.slow
def test_a_classifier_word_by_word(browser: Browser, trained: Trained, tmp_path: Path):
    """A word is left out, replaced and put back; the decision is the Python's for what is left."""
    page = written(tmp_path / "page.html", trained.model)
    opened(browser, page, text="A warm little film.")
    inspected = rounded(InspectedModel.open(str(trained.model)))

    def check(text: str) -> None:
        browser.wait(f"page.texts[0].text === {json.dumps(text)} && page.texts[0].broken")
        tokens = torch.tensor([inspected.encode(text)])
        expected = probabilities(inspected.classifier(tokens)[0])
        shown = browser.value("page.texts[0].decision.probabilities")
        close(torch.tensor(shown), expected)

    check("A warm little film.")
    browser.tab.locator(".word-edit button").nth(1).click()
    check("A little film.")
    browser.tab.locator(".word-edit input").nth(2).fill("dull")
    check("A dull film.")
    browser.click("#word-chips > button")
    check("A warm little film.")
    browser.wait("text().decision.occlusion.at(-1) !== null && byId('verdict').textContent.length > 0")
    assert browser.value("byId('next-card').hidden && !byId('words').hidden") and browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), looks(390, 1600))
def test_it_can_be_read_at_every_width_and_in_both_themes(browser: Browser, live_file: Path, width: int, dark: bool):
    browser.size(width, 900)
    browser.tab.emulate_media(color_scheme="dark" if dark else "light")
    opened(browser, live_file, text="Once upon a time", temperature=0, steps=5, off="1.1", **{"break": "scores,gelu"})
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(f"[...document.querySelectorAll('#compare, .segments')].filter({CUT}).length") == 0
    assert browser.value(CONTRAST) == [] and browser.errors == []
    for node in browser.accessibility_tree():
        named = {
            "button",
            "checkbox",
            "radio",
            "slider",
            "spinbutton",
            "textbox",
            "combobox",
            "table",
            "region",
            "heading",
        }
        assert node["role"]["value"] not in named or node["name"]["value"].strip(), node


def test_the_keyboard_is_enough(browser: Browser, live_file: Path):
    """From the text to the switches by Tab; a switch is turned by the space bar and keeps the focus."""
    opened(browser, live_file, text="The film")
    browser.value("byId('live-text').focus()")
    seen = []
    while "mistakes" not in seen:
        browser.press("Tab")
        seen.append(browser.value("document.activeElement.closest('[id]').id"))
        assert len(seen) < 60
    order = ["live-next", "sampling-temperature", "sampling-seed", "made-run", "made-step", "copying", "mistakes"]
    assert sorted(order, key=seen.index) == order
    browser.press("Space")
    browser.wait("live.switches.breaks.length === 1")
    assert browser.value("document.activeElement.value") == "mask"
