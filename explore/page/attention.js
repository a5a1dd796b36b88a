// Who attends to whom: two maps side by side, all heads small below them, and the weights of one token in words.

const SCALE = 255 * 255; // what is stored are square roots in 255 steps
const EVEN = 16; // among so many tokens even attention would have the deepest colour's weight
const LABELLED = 36; // tokens of a map whose rows and columns can have names

/** What shows each semantics. */
const maps = new Map();

/** The weight with which a token looks at another. weights: bytes, layer by layer, head by head, row by row. */
function weightAt(weights, layer, head, query, key) {
  const shown = text().shown;
  const stored = weights[((layer * page.model.n_heads + head) * shown + query) * shown + key];
  return (stored * stored) / SCALE;
}

/** A weight for people, with no more digits than its byte holds. */
function share(weight) {
  if (weight >= 0.1) return `${(100 * weight).toFixed(0)} %`;
  return weight >= 0.001 ? `${(100 * weight).toFixed(1)} %` : weight ? told("under 0.1 %") : "0 %";
}

/** The weight that has the deepest colour. Among many tokens none has much of the attention. */
const deepest = () => Math.min(1, EVEN / text().shown);

/** For each stored byte, its colour. */
function coloursOfBytes() {
  const colours = ramp();
  return Array.from({ length: 256 }, (_, stored) => colours[Math.round(255 * Math.sqrt(Math.min(1, (stored * stored) / SCALE / deepest())))]);
}

/** The bytes of the text's attention under one semantics; null where there are none. */
async function weightsOf(name) {
  const reading = text().semantics[name];
  return reading ? new Uint8Array(await kept(reading.attention)) : null;
}

async function drawAttention() {
  const [asked, colours] = [state.text, coloursOfBytes()];
  for (const name of SEMANTICS) {
    const weights = await weightsOf(name);
    if (asked !== state.text) return; // another text was chosen meanwhile
    if (weights === null) continue;
    drawMap(maps.get(name), weights, colours);
    drawHeads(maps.get(name), weights, colours);
    drawLooks(maps.get(name), weights);
  }
  byId("maps").dataset.drawn = `${state.text}.${state.layer}.${state.head}.${state.token}`;
}

/** A canvas with as many dots as its place has on this screen. */
function sized(canvas, ratio) {
  const width = canvas.parentElement.clientWidth || 320;
  const dots = window.devicePixelRatio || 1;
  const inner = width - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft);
  [canvas.width, canvas.height] = [inner * dots, inner * ratio * dots].map(Math.round);
  const context = canvas.getContext("2d");
  context.setTransform(dots, 0, 0, dots, 0, 0);
  return [context, inner, inner * ratio];
}

/** Where the cells of a map lie. */
function layout(context, width) {
  const shown = text().shown;
  const most = Math.min(96, width * 0.24);
  context.font = `${Math.max(8, Math.min(13, (0.75 * (width - most)) / shown))}px ${getComputedStyle(document.body).fontFamily}`;
  const words = Array.from({ length: shown }, (_, place) => context.measureText(wordAt(place)).width);
  const margin = shown <= LABELLED ? Math.min(most, Math.max(...words) + 8) : 0;
  return { shown, margin, cell: (width - margin) / shown };
}

function drawMap(map, weights, colours) {
  const [context, width, height] = sized(map.canvas, 1);
  const { shown, margin, cell } = layout(context, width);
  context.clearRect(0, 0, width, height);
  for (let query = 0; query < shown; query++) {
    for (let key = 0; key < shown; key++) {
      const weight = weightAt(weights, state.layer, state.head, query, key);
      context.fillStyle = inWords(colours[Math.round(Math.sqrt(weight * SCALE))]);
      context.fillRect(margin + key * cell, margin + query * cell, cell + 0.5, cell + 0.5);
    }
  }
  context.strokeStyle = inWords(colour("--line"));
  context.strokeRect(margin + 0.5, margin + 0.5, shown * cell - 1, shown * cell - 1);
  if (margin) nameCells(context, margin, cell, shown);
  if (state.token < shown) {
    context.strokeStyle = inWords(colour("--mark"));
    context.lineWidth = 2;
    context.strokeRect(margin + 1, margin + state.token * cell + 1, shown * cell - 2, Math.max(cell - 2, 1));
  }
}

function nameCells(context, margin, cell, shown) {
  context.fillStyle = inWords(colour("--ink"));
  context.textBaseline = "middle";
  for (let place = 0; place < shown; place++) {
    const word = fitting(context, wordAt(place), margin - 8);
    context.textAlign = "right";
    context.fillText(word, margin - 5, margin + (place + 0.5) * cell);
    context.save();
    context.translate(margin + (place + 0.5) * cell, margin - 5);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(word, 0, 0);
    context.restore();
  }
}

function fitting(context, word, width) {
  let letters = [...word];
  while (letters.length > 1 && context.measureText(letters.join("")).width > width) letters = letters.slice(0, -1);
  return letters.join("");
}

/** All heads, a row for each layer; the chosen one has a frame. */
function drawHeads(map, weights, colours) {
  const { n_layers: layers, n_heads: heads } = page.model;
  const side = Math.min(1 / heads, 0.16);
  const [context, width] = sized(map.heads, layers * side);
  const [size, shown] = [side * width, text().shown];
  const picture = new OffscreenCanvas(shown, shown);
  const inside = picture.getContext("2d");
  const image = inside.createImageData(shown, shown);
  const dots = new Uint32Array(image.data.buffer);
  const inBytes = new Uint32Array(Uint8Array.from(colours.flatMap((each) => [...each, 255])).buffer);
  context.clearRect(0, 0, width, layers * size);
  context.imageSmoothingQuality = "high";
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) {
      const first = (layer * heads + head) * shown * shown;
      for (let cell = 0; cell < shown * shown; cell++) dots[cell] = inBytes[weights[first + cell]];
      inside.putImageData(image, 0, 0);
      context.drawImage(picture, head * size + 2, layer * size + 2, size - 4, size - 4);
    }
  }
  context.strokeStyle = inWords(colour("--mark"));
  context.lineWidth = 2.5;
  context.strokeRect(state.head * size + 1, state.layer * size + 1, size - 2, size - 2);
}

/** Where one token looks, as a table. */
function drawLooks(map, weights) {
  const shown = text().shown;
  if (state.token >= shown) {
    map.looks.replaceChildren(make("p", { class: "soft" }, told("Token {0} is beyond the {1} that are shown.", state.token + 1, shown)));
    return;
  }
  const all = Array.from({ length: shown }, (_, key) => [key, weightAt(weights, state.layer, state.head, state.token, key)]);
  const most = all.filter(([, weight]) => weight > 0).sort((a, b) => b[1] - a[1]).slice(0, 6);
  const rows = most.map(([key, weight]) => row(
    make("th", { scope: "row" }, piece(text().ids[key]), make("span", { class: "own" }, ` ${key + 1}`)), bar(weight), number(share(weight)),
  ));
  const caption = make("span", {}, toldWith("{0} in layer {1}, head {2} attends to", piece(text().ids[state.token]), state.layer + 1, state.head + 1));
  const head = [told("Token"), make("th", { scope: "col", "aria-hidden": "true" }), told("Weight")];
  map.looks.replaceChildren(table(caption, head, rows, { class: "full" }));
}

function setUpAttention() {
  if (!page.texts) return;
  byId("attention").hidden = false;
  if (page.columns) byId("attention").querySelector(".lead").textContent = "Each row of a map is a token that looks, each column one that it may look at; a row adds up to 1. One map for each model.";
  const numbers = (most) => Array.from({ length: most }, (_, index) => String(index + 1));
  for (const [name, most] of [["layer", page.model.n_layers], ["head", page.model.n_heads]]) {
    options(byId(name), numbers(most), state[name]);
    byId(name).addEventListener("change", (event) => update({ [name]: Number(event.target.value) }));
    part([name], () => { byId(name).value = state[name]; });
  }
  for (const name of SEMANTICS) byId("maps").append(mapOf(name));
  part(["text"], () => {
    const all = count() === text().shown ? "" : told("The first {0} of {1} tokens: more would not fit into the page. ", text().shown, count());
    byId("shown").textContent = all + told(deepest() < 1 ? "The deepest colour is {0} % or more." : "The deepest colour is {0} %.", (100 * deepest()).toFixed(0));
  });
  part(["text", "token", "layer", "head"], drawAttention);
  opened("weights-table", ["text", "layer", "head"], weightTables);
}

function mapOf(name) {
  const card = make("div", { class: "card" }, titleOf(name));
  if (page.live) part(["text"], () => card.firstElementChild.replaceWith(titleOf(name)));
  if (!page.live && !page.texts[0].semantics[name]) return filled(card, {}, [noOther()]);
  const map = {
    canvas: make("canvas", { class: "map", role: "img" }),
    readout: make("p", { class: "readout", "aria-hidden": "true" }),
    looks: make("div", { class: "looks" }),
    heads: make("canvas", { class: "heads", role: "img" }),
  };
  const cellAt = (event) => {
    const { margin, cell, shown } = layout(map.canvas.getContext("2d"), map.canvas.clientWidth);
    const place = [event.offsetY, event.offsetX].map((offset) => Math.floor((offset - margin) / cell));
    return place.every((each) => each >= 0 && each < shown) ? place : null;
  };
  map.canvas.addEventListener("mousemove", async (event) => {
    const [place, weights] = [cellAt(event), await weightsOf(name)];
    if (!place || !weights) return;
    map.readout.replaceChildren(...inOneLine(weights, ...place));
    const [query, key] = place;
    if (page.live && (pair.query !== query || pair.key !== key || pair.column !== name)) update({ pair: { query, key, column: name } });
  });
  map.canvas.addEventListener("click", (event) => { if (cellAt(event)) update({ token: cellAt(event)[0] }); });
  map.heads.addEventListener("click", (event) => {
    const size = Math.min(1 / page.model.n_heads, 0.16) * map.heads.clientWidth;
    const [layer, head] = [event.offsetY, event.offsetX].map((offset) => Math.floor(offset / size));
    if (layer < page.model.n_layers && head < page.model.n_heads) update({ layer, head });
  });
  maps.set(name, map);
  const all = make("h4", { class: "own" });
  part(["language", "text"], () => {
    const title = COLUMNS[name].title;
    map.canvas.setAttribute("aria-label", told("Attention weights, {0}: the map of the chosen head. The table below it has the weights of the chosen token.", title));
    map.heads.setAttribute("aria-label", told("All heads, {0}: a row for each layer. Layer and head are chosen above.", title));
    map.readout.textContent = told("Point at a cell to read it; click to choose its row.");
    all.textContent = told("All heads: layer 1 above, layer {0} below. Click to choose one.", page.model.n_layers);
  });
  return filled(card, {}, [map.canvas, map.readout, map.looks, all, map.heads]);
}

function inOneLine(weights, query, key) {
  const weight = weightAt(weights, state.layer, state.head, query, key);
  return toldWith("{0} ({1}) to {2} ({3}): {4}", piece(text().ids[query]), query + 1, piece(text().ids[key]), key + 1, share(weight));
}

/** Filled when their numbers are unpacked. */
function weightTables() {
  const region = make("div");
  const asked = { ...state };
  Promise.all(SEMANTICS.map(weightsOf)).then((both) => {
    both.forEach((weights, index) => {
      if (weights === null) return;
      const places = Array.from({ length: text().shown }, (_, place) => place);
      const heads = [told("looks"), ...places.map((key) => make("th", { scope: "col" }, piece(text().ids[key])))];
      const rows = places.map((query) => row(
        make("th", { scope: "row" }, piece(text().ids[query])),
        ...places.map((key) => number((100 * weightAt(weights, asked.layer, asked.head, query, key)).toFixed(0))),
      ));
      const name = told("{0}, layer {1}, head {2}: weights in percent", isBothKinds ? SEMANTICS[index] : COLUMNS[SEMANTICS[index]].title, asked.layer + 1, asked.head + 1);
      region.append(table(name, heads, rows));
    });
  });
  return region;
}
