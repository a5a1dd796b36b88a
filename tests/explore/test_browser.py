"""The page in a real browser: it draws what it was given, answers the mouse and the keyboard, and can be read by all.

Skipped where Playwright or a Chromium is not installed.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import DRAWN, Browser, browsing, looks
from conftest import ROOT, random_llama
from pages import Trained, data_of, trained  # noqa: F401

from engine.runs import load_classifier
from explore import __main__ as program
from explore.inspected import InspectedModel, InspectedText, page_of_model
from explore.look import read
from explore.page import write_page
from tokenizer import Tokenizer

ROWS = "[...document.querySelectorAll('{} tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"

CUT = "(each) => each.scrollWidth > each.clientWidth"
CONTRAST, COMPARED = ((Path(__file__).parent / name).read_text("utf-8") for name in ("contrast.js", "compared.js"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture
def page(browser: Browser, trained: Trained) -> Iterator[Browser]:
    """The page of a fine-tuning; nothing may have gone wrong on it."""
    browser.open(trained.page)
    yield browser
    assert browser.errors == [] and len(browser.requests) == 1


def rows(browser: Browser, selector: str) -> list[list[str]]:
    return browser.value(ROWS.format(selector))


def number_in(percent: str) -> float:
    return float(percent.removesuffix(" %"))


# ------------------------------------------------------------------------------------------------ what is shown


def test_it_shows_the_model_s_numbers(page: Browser, trained: Trained):
    content = data_of(trained.page)
    model, _ = load_classifier(trained.model)
    ids, place = content["texts"][0]["ids"], 3
    page.update(f"token: {place}, layer: 1, head: 2")
    for number, attention in enumerate(("bidirectional", "causal")):
        record = read(model.llama, ids, attention)
        weights = record.attention[1][2, place]
        shown = rows(page, f"#maps .card:nth-child({number + 1}) .looks")
        for (token, _, percent), most in zip(shown, weights.sort(descending=True).values.tolist(), strict=False):
            own = float(weights[int(token.rpartition(" ")[2]) - 1])  # of the token with that number
            last = 10.0 ** -len(percent.removesuffix(" %").partition(".")[2])  # one of its last digit
            assert number_in(percent) == pytest.approx(100 * own, abs=last) == pytest.approx(100 * most, abs=2 * last)
        probabilities, likeliest = record.logits[place].softmax(-1).topk(5)
        shown, pieces = rows(page, f"#expected .card:nth-child({number + 1})"), content["pieces"]
        assert [row[0] for row in shown] == [pieces[str(id)] for id in likeliest.tolist()]
        percents = [number_in(row[2]) for row in shown]
        assert percents == pytest.approx([100 * p for p in probabilities.tolist()], abs=0.06)
        layers = [row[0] for row in rows(page, f"#layers .card:nth-child({number + 1})")]
        assert layers == [*(f"layer {layer}" for layer in range(len(layers) - 1, 0, -1)), "no layer"]
    classes = rows(page, "#classes")
    expected = content["texts"][0]["decision"]["probabilities"]
    assert [number_in(row[2]) for row in classes] == pytest.approx([100 * p for p in expected], abs=0.06)


def test_a_weight_has_no_more_digits_than_its_byte(page: Browser):
    said = page.value(
        "[0.5, 0.98, 0.25, 0.1, 0.04, 0.002, 1e-4, 0].map((p) => share((Math.round(255 * p ** 0.5) / 255) ** 2))"
    )
    assert said == ["50 %", "98 %", "25 %", "10 %", "4.0 %", "0.2 %", "under 0.1 %", "0 %"]


def test_a_token_that_is_never_left_out_weighs_nothing_by_occlusion(browser: Browser, trained: Trained, tmp_path: Path):
    """It has no number, and a short text has place for it among those that weigh most."""
    inspected = InspectedModel.open(str(trained.model))
    content = page_of_model(inspected, [InspectedText("bad")])
    write_page(str(tmp_path / "p.html"), content)
    browser.open(tmp_path / "p.html")
    (text,) = content["texts"]
    assert 1 < len(text["ids"]) <= 6
    places = sorted(int(row[0].rpartition(" ")[2]) for row in rows(browser, "#weightiest"))
    assert places == list(range(2, len(text["ids"]) + 1)) and browser.errors == []


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_colours_of_what_the_model_has_seen_are_said_to_be(
    attention: str, browser: Browser, tokenizer: Tokenizer, tmp_path: Path
):
    inspected = InspectedModel("random", random_llama(attention=attention), tokenizer)
    for other in (None, inspected):  # without another model the colours are causal in any case
        write_page(str(tmp_path / "p.html"), page_of_model(inspected, [InspectedText("A thin joke")], other))
        browser.open(tmp_path / "p.html")
        is_said = "bidirectional attention, which has seen the token" in browser.value("byId('text-note').textContent")
        assert is_said == (attention == "bidirectional" and other is not None)


def test_the_map_has_the_colours_of_the_weights(page: Browser, trained: Trained):
    """Of a causal model nothing above the diagonal; where the most of a row is, the deepest colour."""
    page.update("layer: 0, head: 0")
    model, _ = load_classifier(trained.model)
    ids = data_of(trained.page)["texts"][0]["ids"]
    weights = read(model.llama, ids, "causal").attention[0][0]
    shades = page.value("""(() => {
      const { canvas } = maps.get("causal");
      const { margin, cell, shown } = layout(canvas.getContext("2d"), canvas.width);
      const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const at = (n) => Math.round(margin + (n + 0.5) * cell);
      return Array.from({ length: shown }, (_, query) => Array.from({ length: shown }, (_, key) =>
        [...context.getImageData(at(key), at(query), 1, 1).data.slice(0, 3)].reduce((a, b) => a + b)));
    })()""")
    for query, row in enumerate(shades):
        assert all(shade == 765 for shade in row[query + 1 :]) and min(row) == row[int(weights[query].argmax())]


def test_the_run_is_shown(page: Browser, trained: Trained):
    (run,) = data_of(trained.page)["run"]["runs"]
    figures = page.value("[...document.querySelectorAll('#curves figcaption')].map((each) => each.textContent)")
    assert len(figures) == 7 and "Gradient norm" in figures and figures[0].startswith("Score after each epoch")
    points = page.value("document.querySelectorAll('#curves .line')[3].getAttribute('points').split(' ').length")
    assert points == 6
    shown = rows(page, "#judged .card:first-child")
    assert [[int(cell) for cell in row[1:]] for row in shown] == run["judged"][0]["confusion"]
    errors = [row[0] for row in rows(page, "#errors > :first-child")]
    assert errors == [error["sentence"] for error in run["judged"][0]["errors"]]


# --------------------------------------------------------------------------------------------- mouse and keyboard


def test_the_numbers_beside_a_curve_are_inside_its_chart(page: Browser):
    """Whatever their size: a learning rate of 0.000125 was cut to .000125."""
    for scale in (1.13e-6, 1.25e-4, 1.7, 3.3e4, 9.7e5, 8e8, 5e11):
        line = f"{{ name: 'a', x: [0, {max(scale, 10)}], y: [{scale}, {1.1 * scale}] }}"
        page.value(f"byId('curves').append(chart('Learning rate', 'step', [{line}]))")
    outside = """[...document.querySelectorAll('svg.chart text')].filter((each) => {
        const { x, width } = each.getBBox(), room = each.ownerSVGElement.viewBox.baseVal;
        return x < 0 || x + width > room.width || !each.textContent;
    }).map((each) => each.textContent)"""
    assert page.value("document.querySelectorAll('svg.chart text').length") > 60
    assert page.value(outside) == []


def test_ticks_and_steps_have_all_their_digits(page: Browser):
    words = page.value("""(() => {
      const svg = chart("Score", "step", [{ name: "a", x: [0, 12345], y: [0.5311, 0.5325] }]).querySelector("svg");
      const ends = [...svg.querySelectorAll("text[text-anchor=end]")].map((each) => each.textContent);
      return [svg.getAttribute("aria-label"), ...ends];
    })()""")
    assert words[0].startswith("Score, from 0 to 12,345 step: ")
    assert words[1:-1] == ["0.5315", "0.532", "0.5325"] and words[-1] == "step"


def test_the_run_stands_first_and_its_curves_say_the_values_under_the_pointer(page: Browser, trained: Trained):
    assert page.value("document.querySelector('main section:not([hidden])').id") == "run"
    (run,) = data_of(trained.page)["run"]["runs"]
    (loss,) = (curve for curve in run["curves"] if curve["key"] == "loss")
    chart = "#curves figure:nth-child(3) svg"
    box = page.tab.locator(chart).bounding_box()
    page.tab.locator(chart).hover(position={"x": box["width"] - 30, "y": box["height"] / 2})
    said = page.value(f"document.querySelector('{chart} text.pointed').textContent")
    step, value = re.fullmatch(r"step ([\d,]+): ([\d.]+)", said).groups()
    assert int(step) == loss["x"][-1] and float(value) == pytest.approx(loss["y"][-1], rel=1e-3)
    page.tab.mouse.move(0, 0)
    page.wait(f"document.querySelector('{chart} text.pointed') === null")


def test_clicks_change_what_they_should(page: Browser, trained: Trained):
    before = rows(page, "#expected .card:first-child")
    page.click('#chips [data-place="2"]')
    page.wait(DRAWN)
    assert page.value("state.token") == 2 and rows(page, "#expected .card:first-child") != before
    assert page.value("byId('at').textContent").startswith("Token 3 of ")
    looks = rows(page, "#maps .card:first-child .looks")
    config = data_of(trained.page)["model"]
    page.click("#maps .card:last-child .heads", x=2.5 * min(1 / config["n_heads"], 0.16), y=1.5 / config["n_layers"])
    page.wait(DRAWN)
    assert page.value("[state.layer, state.head, byId('layer').value, byId('head').value]") == [1, 2, "1", "2"]
    assert rows(page, "#maps .card:first-child .looks") != looks
    page.click("#maps .card:first-child .map", x=0.9, y=0.995)  # the last row
    assert page.value("state.token === count() - 1 && byId('later').disabled")
    weights = rows(page, "#weightiest")
    page.click("#method label:last-child")
    assert page.value("state.method") == "gradient" and rows(page, "#weightiest") != weights
    page.click("#semantics label:first-child")
    assert page.value("state.semantics") == "bidirectional"
    page.click("#grid tbody tr:first-child td:nth-of-type(2)")
    assert page.value("state.token") == 1
    page.click("#token-table summary")
    page.wait("document.querySelector('#token-table table') !== null")
    assert len(rows(page, "#token-table")) == page.value("count()")


def test_another_text_is_another_page(page: Browser, trained: Trained):
    texts = data_of(trained.page)["texts"]
    page.value("byId('text').value = 1, byId('text').dispatchEvent(new Event('change'))")
    page.wait(DRAWN)
    assert page.value("document.querySelectorAll('#chips .chip').length") == len(texts[1]["ids"])
    assert page.value("document.querySelectorAll('#contributions .chip').length") == len(texts[1]["ids"])
    assert page.value("byId('label').selectedIndex") == max(
        range(2), key=texts[1]["decision"]["probabilities"].__getitem__
    )


def test_the_keyboard_is_enough(page: Browser):
    page.value("document.body.focus(), scrollTo(0, 0)")
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    seen = []
    while not page.value("document.activeElement === document.body") and len(seen) < 200:
        page.press("Tab")
        seen.append(page.value("document.activeElement.id || document.activeElement.closest('[id]')?.id"))
    order = ["theme", "sections", "text", "later", "chips", "method", "label", "layer", "head", "semantics", "grid"]
    assert sorted(order, key=seen.index) == order
    assert seen.count("chips") == 1  # the arrow keys go on from there
    page.value("byId('chips').querySelector('[tabindex=\"0\"]').focus()")
    start = page.value("state.token")
    for key, place in (("ArrowRight", start + 1), ("ArrowLeft", start), ("Home", 0), ("ArrowUp", 0)):
        page.press(key)
        assert page.value("state.token") == place == page.value("Number(document.activeElement.dataset.place)")
    page.press("End")
    assert page.value("state.token === count() - 1")
    assert page.value("byId('said').textContent").startswith("Token ")


@pytest.mark.slow
def test_all_that_can_be_used_has_a_name(page: Browser):
    page.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    nodes = page.accessibility_tree()
    roles = {node["role"]["value"] for node in nodes}
    assert {"button", "radio", "combobox", "table", "image", "main", "navigation", "status", "region"} <= roles
    named = {"button", "radio", "combobox", "link", "image", "table", "region", "radiogroup", "heading"}
    for node in nodes:
        assert node["role"]["value"] not in named or node["name"]["value"].strip(), node
    levels = page.value("[...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1 and all(later - earlier <= 1 for earlier, later in zip(levels, levels[1:], strict=False))


# ----------------------------------------------------------------------------------------------- how it looks


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), looks(390, 1200))
def test_it_can_be_read_at_every_width_and_in_both_themes(browser: Browser, trained: Trained, width: int, dark: bool):
    browser.open(trained.page, width=width, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('#errors .scroll, #judged .over, #epochs .scroll, .segments')]"
    assert browser.value(f"{wide}.filter({CUT}).length") == 0
    assert browser.value(CONTRAST) == []
    assert len(browser.picture()) > 50_000 and browser.errors == []
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 20, 24)") == dark
    chosen = "light" if dark else "dark"
    browser.click(f"#theme label:nth-of-type({2 if dark else 3})")
    assert browser.value("document.documentElement.dataset.theme") == chosen
    assert browser.value("getComputedStyle(document.body).backgroundColor") != ground
    assert browser.value(CONTRAST) == []


def test_texts_stay_texts(browser: Browser, tokenizer: Tokenizer, tmp_path: Path):
    """Markup in a text, in label names and titles does nothing; what is written from right to left is set so."""
    inspected = InspectedModel(HOSTILE, random_llama(attention="causal"), tokenizer)
    texts = [
        InspectedText(HOSTILE, note=HOSTILE),
        InspectedText("שלום לכל האנשים הטובים"),
        InspectedText("👩‍👩‍👧 🐐 and a film"),
    ]
    content = page_of_model(inspected, texts)
    hebrew = dict.fromkeys(content["texts"][1]["ids"][1:], "\u2581שלום")  # this vocabulary has bytes alone
    write_page(str(tmp_path / "p.html"), content)
    browser.open(tmp_path / "p.html")
    assert browser.value("byId('name').textContent") == HOSTILE
    assert browser.value("document.title").endswith("min-llama") and "broken" != browser.value("document.title")
    assert browser.value("[document.images.length, document.scripts.length]") == [0, 2]
    browser.value("chooseText(2)")
    assert browser.value("byId('chips').dir") == "ltr"
    browser.value(f"Object.assign(page.pieces, {json.dumps(hebrew)})")
    browser.value("chooseText(1)")
    assert browser.value("byId('chips').dir") == "rtl" and browser.errors == []


def test_a_page_without_a_model_and_one_of_many_runs(browser: Browser, tmp_path: Path):
    run = {"settings": {}, "steps": 0, "chosen_on": "dev", "curves": [], "judged": [],
           "epochs": [{"epoch": 0, "train_loss": 1.0, "dev_score": 0.5, "is_best": True}]}  # fmt: skip
    names = ["first", "a name that is wider than a narrow screen " * 3 + "."]
    write_page(str(tmp_path / "p.html"), {"run": {"name": "table", "runs": [{**run, "name": name} for name in names]}})
    browser.open(tmp_path / "p.html")
    assert browser.value("[byId('tokens').hidden, byId('cursor').hidden, byId('run').hidden]") == [True, True, False]
    assert browser.value("[...byId('which').options].map((each) => each.textContent)") == names
    browser.value("byId('which').value = 1, byId('which').dispatchEvent(new Event('change'))")
    assert browser.value("state.run") == 1 and browser.errors == []
    browser.size(390, 800)
    assert browser.value("document.documentElement.scrollWidth") == 390


def test_runs_are_sorted_and_drawn_over_each_other(browser: Browser, tmp_path: Path):
    def run(name: str, scores: list[float]) -> dict:
        epochs = [
            {"epoch": at, "train_loss": 2 - score, "dev_score": score, "is_best": False}
            for at, score in enumerate(scores)
        ]
        curve = {"key": "loss", "title": "Loss", "x": [1, 2, 3], "y": [3.0, 2.0, scores[0]]}
        return {
            "name": name,
            "settings": {},
            "steps": 3,
            "chosen_on": "dev",
            "curves": [curve],
            "judged": [],
            "epochs": epochs,
        }

    runs = [run("b", [0.5, 0.6]), run("a", [0.9]), run("c", [0.1, 0.2, 0.3])]
    runs[0]["epochs"].append({"epoch": 2, "train_loss": 1.4, "dev_score": 0.55, "is_finish": True, "is_best": False})
    write_page(str(tmp_path / "p.html"), {"run": {"name": "three", "runs": runs}})
    browser.open(tmp_path / "p.html")
    names = "[...document.querySelectorAll('#runs tbody th')].map((cell) => cell.textContent).join('')"
    assert browser.value(names) == "bac"
    assert rows(browser, "#runs")[0] == ["b", "0.6", "1.4", "2"]  # what a method did afterwards is no epoch
    assert rows(browser, "#epochs")[-1] == ["after", "-", "0.55"]
    dots = "[...document.querySelectorAll('#curves figure')].map((each) => each.querySelectorAll('.dot').length)"
    assert browser.value(dots) == [2, 2, 0]
    for key, order in (("score", "abc"), ("score", "cba"), ("name", "cba"), ("name", "abc"), ("epochs", "cba")):
        browser.click(f"#runs [data-key={key}]")
        assert browser.value(names) == order, key
    assert browser.value("document.activeElement.dataset.key") == "epochs"
    browser.click("#runs tbody tr:first-child button")
    assert browser.value("[state.run, byId('which').value]") == [2, "2"]
    browser.value("byId('over').value = 2, byId('over').dispatchEvent(new Event('change'))")
    points = browser.value(
        "[...document.querySelectorAll('#curves figure:last-child .line')].map((each) => each.getAttribute('points'))"
    )
    assert len(points) == 2 and points[0] != points[1]
    figures = browser.value("[...document.querySelectorAll('#curves figcaption')].map((each) => each.textContent)")
    names = ("Score after each epoch", "Train loss of each epoch", "Loss")
    assert figures == [f"{name}: c (full line), a (dashed)" for name in names] and browser.errors == []


# ------------------------------------------------------------------------------------------- docs/looking.md

LOOKING = (ROOT / "docs" / "looking.md").read_text(encoding="utf-8")
PICTURED = dict(re.findall(r"!\[([^]]+)\]\(looking/(\w+)\.png\)", LOOKING))


@pytest.fixture(scope="module")
def documented(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Browser]:
    """Opens the page that the first command of docs/looking.md makes."""
    command = re.search(r"^python -m explore (checkpoints/.*) --out page\.html$", LOOKING, re.MULTILINE)[1]
    page = tmp_path_factory.mktemp("documented") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["explore", *shlex.split(command), "--out", str(page)])
        program.main()

    def opened() -> Browser:
        browser.open(page, width=900)
        browser.tab.mouse.move(0, 0)
        browser.update("token: 8, layer: 2, head: 1")
        return browser

    if opened().width_of("The quick brown fox") != 161.6171875:
        pytest.skip("the pictures were taken with other fonts")
    return opened


@pytest.mark.parametrize("name", ["attention", "rotation", "lens"])
def test_a_picture_of_the_documentation_is_what_the_page_shows(documented: Callable[[], Browser], name: str):
    """Cells that stay in sight keep the edges of their letters from the window's first size, which a busy machine may
    change while the page is loaded; loading it again is what helps."""
    stored = base64.b64encode((ROOT / f"docs/looking/{name}.png").read_bytes()).decode()
    for _ in range(5):
        page = documented()
        shown = base64.b64encode(page.picture(f"#{name}")).decode()
        width, height, *size, different = page.tab.evaluate(COMPARED, [stored, shown])
        if different < 20:
            break
    assert [width, height] == size and different < 20


@pytest.mark.slow
def test_every_picture_of_the_documentation_is_a_described_section(page: Browser):
    assert {*PICTURED.values()} == {path.stem for path in (ROOT / "docs" / "looking").iterdir()}
    assert all(len(words) > 30 and page.value(f"!byId('{name}').hidden") for words, name in PICTURED.items())
