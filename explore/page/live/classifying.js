// A classifier word by word: what becomes of the decision without a word, or with another one in its place.

const edited = { words: [], out: new Set() };

function setUpWords() {
  byId("words").hidden = false;
  for (const id of ["next-card", "made-card", "compare-card"]) byId(id).hidden = true; // it continues no text
  drawWords();
}

/** The words of the text in the field; none is left out. */
function drawWords() {
  edited.words = live.text.split(/\s+/).filter(Boolean);
  edited.out.clear();
  byId("word-chips").replaceChildren(...edited.words.map((word, place) => {
    const input = make("input", { class: "word-text", value: word, size: Math.max(2, [...word].length), "aria-label": word });
    const button = make("button", { type: "button", "aria-pressed": false, class: "leaves-out", onclick: () => leaveOut(place, button, input) }, "\u2212");
    input.addEventListener("input", () => { edited.words[place] = input.value; input.size = Math.max(2, input.value.length); wordsChanged(); });
    return make("span", { class: "word-edit" }, input, button);
  }), make("button", { type: "button", "data-say": "words.all", onclick: () => typed(byId("live-text").value) }, t("words.all")));
  nameWords();
}

/** The buttons' names, in the language that is chosen. */
function nameWords() {
  byId("word-chips").querySelectorAll(".leaves-out").forEach((button, place) => {
    button.setAttribute("aria-label", t(edited.out.has(place) ? "words.in" : "words.out", edited.words[place]));
  });
}

function leaveOut(place, button, input) {
  const isOut = !edited.out.has(place);
  edited.out[isOut ? "add" : "delete"](place);
  input.classList.toggle("word-out", isOut);
  input.disabled = isOut;
  button.textContent = isOut ? "+" : "\u2212";
  button.setAttribute("aria-pressed", isOut);
  nameWords();
  wordsChanged();
}

function wordsChanged() {
  live.text = edited.words.filter((_, place) => !edited.out.has(place)).join(" ");
  writeAddress();
  readAll();
}

/** The decision of both columns. */
function drawDecision(shown) {
  const columns = { right: shown.decision.probabilities, now: shown.broken ?? [] };
  byId("live-decision").replaceChildren(...SEMANTICS.map((name) => {
    const rows = page.model.label_names.map((label, index) => row(make("th", { scope: "row" }, label), bar(columns[name][index] ?? 0), number(percent(columns[name][index]))));
    const head = ["", make("th", { scope: "col", "aria-hidden": "true" }), make("th", { scope: "col", class: "number" }, t("next.chance"))];
    return filled(make("div", { class: "card" }, titleOf(name)), {}, [table(t("words.decision"), head, rows, { class: "full" })]);
  }));
}

async function askOcclusion(shown, given) {
  const { decision } = shown;
  for (let first = 0; first !== null;) {
    const part = await ask("occlusion", { ...given, first }, "occlusion").catch(failed);
    if (!part || page.texts[0] !== shown) return;
    decision.occlusion = part.occlusion.map((value, at) => value ?? decision.occlusion[at]);
    decision.together = part.together;
    first = part.next;
  }
  await show(shown);
}
