// One head in numbers: how the weight of a query and a key comes about.

/** Tokens of the pair, and the model that is asked. */
const pair = { query: 1, key: 0, column: "right" };

function setUpNumbers() {
  for (const name of ["query", "key"]) {
    byId(`of-${name}`).addEventListener("change", (event) => { pair[name] = Number(event.target.value); drawNumbers(); });
  }
  byId("of-column").addEventListener("change", (event) => { pair.column = SEMANTICS[event.target.value]; drawNumbers(); });
  part(["text"], drawNumbers);
  part(["layer", "head"], drawNumbers);
  part(["pair"], () => { Object.assign(pair, state.pair); drawNumbers(); });
  part(["token"], () => { pair.query = state.token; pair.key = Math.min(pair.key, state.token); drawNumbers(); });
}

async function drawNumbers() {
  const last = count() - 1;
  [pair.query, pair.key] = [pair.query, pair.key].map((place) => Math.max(0, Math.min(last, place)));
  const names = text().ids.map((id, place) => `${place + 1} ${plainly(pieceOf(id))}`);
  for (const name of ["query", "key"]) options(byId(`of-${name}`), names, pair[name]);
  options(byId("of-column"), SEMANTICS.map((name) => COLUMNS[name].title), SEMANTICS.indexOf(pair.column));
  const given = { text: live.text, added: added(), use: pair.column, switches: switchesOf(pair.column) };
  const answer = await ask("numbers", { ...given, layer: state.layer, head: state.head, query: pair.query, key: pair.key }, "numbers").catch(failed);
  if (answer) drawProducts(answer);
}

function drawProducts({ plain, rotated, product, divisor, score, keyHead, of, weight, isHidden, isOther }) {
  const three = (value) => brief(Number(value), 3);
  const heads = of[0] === of[1] ? "" : ` ${t("numbers.heads", state.head + 1, of[0], keyHead + 1, of[1])}`;
  byId("sum").textContent = t(isOther ? "numbers.other" : isHidden ? "numbers.hidden" : "numbers.sum", three(product), three(divisor), three(score), percent(weight)) + heads;
  const two = (values, index) => number(`${three(values[2 * index])}, ${three(values[2 * index + 1])}`);
  const rows = Array.from({ length: plain.query.length / 2 }, (_, index) => {
    const adds = [0, 1].reduce((sum, side) => sum + rotated.query[2 * index + side] * rotated.key[2 * index + side], 0);
    const cells = [plain.query, rotated.query, plain.key, rotated.key].map((values) => two(values, index));
    return row(make("th", { scope: "row" }, index + 1), ...cells, number(three(adds)));
  });
  const head = ["pair", "q", "q_turned", "k", "k_turned", "adds"].map((name, at) => make("th", { scope: "col", class: at ? "number" : null }, t(`numbers.${name}`)));
  byId("products").replaceChildren(table(t("numbers.caption"), head, rows, { class: "full" }));
}
