// The text, and which token of it is looked at.

/** The probability of each token after those before it; none of the first one. */
const ownProbability = (name, place) => (place ? text().semantics[name]?.lens.at(-1).next[place - 1] : null) ?? null;

function drawTokens() {
  const chips = Array.from({ length: count() }, (_, place) => {
    const p = isBothKinds ? ownProbability("causal", place) ?? ownProbability("bidirectional", place) : ownProbability(SEMANTICS[0], place);
    const full = p === null ? 0 : Math.min(100, (100 * bits(p)) / 12);
    const label = told("{0}, token {1} of {2}", wordAt(place), place + 1, count()) + (p === null ? "" : told(", probability {0}", percent(p)));
    const button = chip("button", place, {
      type: "button", role: "radio", "aria-label": label, title: p === null ? told("nothing stands before it") : percent(p),
      onclick: () => update({ token: place }), "--fill": "var(--surprise)", "--full": `${full}%`,
    });
    return button;
  });
  byId("chips").replaceChildren(...chips);
  byId("chips").dir = direction();
  const limit = page.model.max_seq_len;
  const tooLong = count() > limit ? ` It has ${count()} tokens, and the model was made for ${limit}.` : "";
  const hasSeen = isBothKinds ? !text().semantics.causal : page.model.attention === "bidirectional";
  const seen = hasSeen ? told(" The colours are those of bidirectional attention, which has seen the token already.") : "";
  byId("text-note").textContent = `${text().note ? `This text is ${text().note}.` : ""}${tooLong}${seen}`;
}

/** Marks the token, which alone is in the order of the tab key. */
function markToken() {
  byId("chips").querySelectorAll(".chip").forEach((each, place) => {
    each.setAttribute("aria-checked", place === state.token);
    each.tabIndex = place === state.token ? 0 : -1;
  });
  byId("at").replaceChildren(...toldWith("Token {0} of {1}: {2}", state.token + 1, count(), piece(text().ids[state.token])));
  byId("earlier").disabled = state.token === 0;
  byId("later").disabled = state.token === count() - 1;
}

/** What the model expects after the token, side by side. */
function drawExpected() {
  const cards = SEMANTICS.map((name) => {
    const reading = text().semantics[name];
    const card = make("div", { class: "card" }, titleOf(name));
    if (!reading) return filled(card, {}, [noOther()]);
    const last = reading.lens.at(-1);
    const rows = candidatesAt(last, state.token).map(([id, p]) => row(make("th", { scope: "row" }, piece(id)), bar(p), number(percent(p))));
    const caption = make("span", {}, toldWith("Expected after {0}", piece(text().ids[state.token])));
    card.append(table(caption, [told("Token"), make("th", { scope: "col", "aria-hidden": "true" }), told("Probability")], rows, { class: "full" }));
    card.append(make("p", { class: "readout" }, cameNext(last)));
    return card;
  });
  byId("expected").replaceChildren(...cards);
}

function titleOf(name) {
  const { title, remark } = COLUMNS[name];
  const isOwn = name === page.model.attention;
  return make("h3", {}, title, make("span", { class: "own" }, ` ${remark}${isOwn ? "; so this model is run" : ""}`));
}

const noOther = () => make("p", { class: "soft" }, page.live ? "\u2026" : "The attention of this code takes no mask, so it can be read in one way only.");

/** [id, probability] of the likeliest tokens after a place. */
function candidatesAt(layer, place) {
  const k = layer.ids.length / count();
  return Array.from({ length: k }, (_, index) => [layer.ids[place * k + index], layer.p[place * k + index]]);
}

function cameNext(layer) {
  if (state.token === count() - 1) return [told("The text ends here.")];
  const [p, rank] = [layer.next[state.token], layer.rank[state.token]];
  const place = rank === 1 ? told("the likeliest") : told("number {0} of {1}", rank.toLocaleString("en"), page.model.vocab_size.toLocaleString("en"));
  return toldWith("What comes is {0}: {1}, {2}.", piece(text().ids[state.token + 1]), percent(p), place);
}

function tokenTable() {
  const head = [told("Place"), told("Token"), told("Id"), ...SEMANTICS.map((name) => told("Probability, {0}", COLUMNS[name].title.toLowerCase()))];
  const rows = text().ids.map((id, place) => row(
    make("th", { scope: "row" }, place + 1), make("td", {}, piece(id)), number(id),
    ...SEMANTICS.map((name) => number(percent(ownProbability(name, place)))),
  ));
  return table(told("Each token after those before it. Bidirectional attention has seen it already."), head, rows);
}

function moveBy(event) {
  const isRtl = getComputedStyle(byId("chips")).direction === "rtl";
  const forward = isRtl ? "ArrowLeft" : "ArrowRight";
  const backward = isRtl ? "ArrowRight" : "ArrowLeft";
  const steps = { [forward]: 1, ArrowDown: 1, [backward]: -1, ArrowUp: -1, Home: -count(), End: count() };
  if (!(event.key in steps)) return;
  event.preventDefault();
  go(steps[event.key]);
  byId("chips").children[state.token].focus();
}

function go(step) {
  update({ token: Math.max(0, Math.min(count() - 1, state.token + step)) });
}

function setUpTokens() {
  if (!page.texts) return;
  byId("tokens").hidden = byId("cursor").hidden = false;
  byId("chips").addEventListener("keydown", moveBy);
  byId("earlier").addEventListener("click", () => go(-1));
  byId("later").addEventListener("click", () => go(1));
  byId("choose-text").hidden = page.texts.length < 2;
  options(byId("text"), page.texts.map((each, index) => `${index + 1}. ${shortened(each)}`), 0);
  byId("text").addEventListener("change", (event) => chooseText(Number(event.target.value)));
  part(["text"], drawTokens);
  part(["text", "token"], () => { markToken(); drawExpected(); });
  opened("token-table", ["text"], tokenTable);
}

function chooseText(index) {
  state.token = -1; // so that everything is told
  update({ text: index, token: page.texts[index].ids.length - 1 });
}

function shortened(each) {
  const words = each.text.length > 70 ? `${each.text.slice(0, 67)}...` : each.text;
  return each.note ? `${words} (${each.note})` : words;
}
