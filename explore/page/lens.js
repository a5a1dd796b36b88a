// The logit lens: what each layer would predict, for one token in detail and for all of them in a grid.

const nameOfLayer = (index) => index ? told("layer {0}", index) : told("no layer");

function drawLayers() {
  const cards = SEMANTICS.map((name) => {
    const reading = text().semantics[name];
    const card = make("div", { class: "card" }, titleOf(name));
    return filled(card, {}, [reading ? layerTable(reading.lens) : noOther()]);
  });
  byId("layers").replaceChildren(...cards);
}

function layerTable(lens) {
  const hasNext = state.token < count() - 1;
  const rows = lens.map((layer, index) => {
    const candidates = candidatesAt(layer, state.token).slice(0, 4).map(([id, p]) => make("span", {}, piece(id), ` ${percent(p)}`));
    const came = hasNext ? number(percent(layer.next[state.token])) : null;
    const size = layer.norm ? number(brief(layer.norm[state.token], 3)) : null; // a live page's
    return row(make("th", { scope: "row" }, nameOfLayer(index)), make("td", {}, make("div", { class: "candidates" }, candidates)), size, came);
  });
  const caption = make("span", {}, toldWith("Next after {0}", piece(text().ids[state.token])));
  const came = make("th", { scope: "col", class: "number" }, toldWith("of {0}", hasNext ? piece(text().ids[state.token + 1]) : ""));
  const size = lens[0].norm ? [make("th", { scope: "col", class: "number" }, "|x|")] : [];
  return table(caption, [told("After"), told("Likeliest"), ...size, ...(hasNext ? [came] : [])], rows.reverse(), { class: "full" });
}

function drawGrid() {
  const reading = text().semantics[state.semantics];
  if (!reading) {
    byId("grid").replaceChildren(noOther());
    return;
  }
  const places = text().ids.map((_, place) => place);
  const rows = reading.lens.map((layer, index) => row(
    make("th", { scope: "row" }, nameOfLayer(index)),
    ...places.map((place) => {
      const [id, p] = candidatesAt(layer, place)[0];
      const how = { class: "tint", "--p": p.toFixed(3), title: percent(p), "data-place": place, onclick: () => update({ token: place }) };
      return make("td", how, piece(id));
    }),
  ));
  const head = [make("th", { scope: "col" }, told("After")), ...places.map((place) => make("th", { scope: "col", "data-place": place }, piece(text().ids[place])))];
  byId("grid").replaceChildren(table(told("The deeper the colour, the surer"), head, rows.reverse(), { class: "lens" }));
}

function markColumn() {
  byId("grid").querySelectorAll(".here").forEach((cell) => cell.classList.remove("here"));
  byId("grid").querySelectorAll(`[data-place="${state.token}"]`).forEach((cell) => cell.classList.add("here"));
}

function setUpLens() {
  if (!page.texts) return;
  byId("lens").hidden = false;
  if (page.columns) byId("semantics").querySelector("legend").textContent = "Model";
  state.semantics = isBothKinds ? page.model.attention : SEMANTICS[0];
  part(["language", "text"], () => {
    const titles = SEMANTICS.map((name) => [name, isBothKinds ? name : COLUMNS[name].title]);
    segments(byId("semantics"), titles, state.semantics, (value) => update({ semantics: value }));
  });
  part(["text", "token"], drawLayers);
  part(["text", "semantics"], drawGrid);
  part(["text", "semantics", "token"], markColumn);
}
