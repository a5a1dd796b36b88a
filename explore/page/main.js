// The head of the page, its theme, and the first drawing.

function setUpHead() {
  byId("name").textContent = page.model ? page.model.name : page.run.name;
  const facts = page.model ? [
    `${page.model.parameters.toLocaleString("en")} parameters`, `${page.model.n_layers} layers`,
    page.model.n_kv_heads === page.model.n_heads ? `${page.model.n_heads} heads` : `${page.model.n_heads} heads over ${page.model.n_kv_heads} of keys and values`,
    `${page.model.vocab_size.toLocaleString("en")} pieces`, `attention: ${page.model.attention}`,
    page.model.label_names.length ? `classes: ${page.model.label_names.join(", ")}` : null,
  ] : [`${page.run.runs.length} run${page.run.runs.length > 1 ? "s" : ""}`];
  byId("facts").textContent = facts.filter(Boolean).join(" \u00b7 ");
  const shown = [...document.querySelectorAll("main section")].filter((section) => !section.hidden);
  byId("sections").replaceChildren(...shown.map((section) =>
    make("li", {}, make("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))));
  if (page.live) byId("sections").addEventListener("click", goToSection);
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
  if (page.live) setUpNumbers();
  setUpHead();
  segments(byId("theme"), ["system", "light", "dark"].map((name) => [name, name]), "system", setTheme);
  for (const part of parts) part(null);
  if (!page.texts) return;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAttention);
  let width = window.innerWidth;
  addEventListener("resize", () => {
    if (window.innerWidth !== width) drawAttention();
    width = window.innerWidth;
  });
  part(["token", "text"], () => say(told("Token {0} of {1}: ", state.token + 1, count()) + wordAt(state.token)));
}

if (page.live) startLive(setUp);
else setUp();
