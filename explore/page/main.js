// The head of the page, its theme, and the first drawing.

function drawHead() {
  byId("name").textContent = page.model ? page.model.name : page.run.name;
  const facts = page.model ? [
    told("{0} parameters", page.model.parameters.toLocaleString("en")), told("{0} layers", page.model.n_layers),
    page.model.n_kv_heads === page.model.n_heads ? told("{0} heads", page.model.n_heads) : told("{0} heads over {1} of keys and values", page.model.n_heads, page.model.n_kv_heads),
    told("{0} pieces", page.model.vocab_size.toLocaleString("en")),
    page.model.attention === "causal" ? told("attention: causal") : told("attention: bidirectional"),
    page.model.label_names.length ? told("classes: {0}", page.model.label_names.join(", ")) : null,
  ] : [`${page.run.runs.length} run${page.run.runs.length > 1 ? "s" : ""}`];
  byId("facts").textContent = facts.filter(Boolean).join(" \u00b7 ");
  const shown = [...document.querySelectorAll("main section")].filter((section) => !section.hidden);
  byId("sections").replaceChildren(...shown.map((section) =>
    make("li", {}, make("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))));
  const themes = [["system", told("system")], ["light", told("light")], ["dark", told("dark")]];
  segments(byId("theme"), themes, document.documentElement.dataset.theme ?? "system", setTheme);
}

/** The address of a live page has its state, which the name of a section must not replace. */
function goToSection(event) {
  const section = byId(event.target.getAttribute("href")?.slice(1) ?? "");
  if (!section) return;
  event.preventDefault();
  section.scrollIntoView();
}

/** Colours of canvases are taken from the style, so they are drawn anew. */
function setTheme(value) {
  if (value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  if (page.texts) drawAttention();
}

function setUp() {
  if (page.texts) state.token = page.live ? count() - 1 : Math.min(4, count() - 1);
  for (const each of [setUpTokens, setUpDecision, setUpAttention, setUpRotation, setUpLens, setUpRun]) each();
  if (page.live) {
    setUpNumbers();
    byId("sections").addEventListener("click", goToSection);
  }
  part(["language"], drawHead);
  for (const part of parts) part(null);
  if (!page.texts) return;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAttention);
  let width = window.innerWidth;
  addEventListener("resize", () => {
    if (window.innerWidth !== width) drawAttention();
    width = window.innerWidth;
  });
  part(["token", "text"], () => say(told("Token {0} of {1}: {2}", state.token + 1, count(), wordAt(state.token))));
}

if (page.live) startLive(setUp);
else setUp();
