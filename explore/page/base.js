"use strict";
// What every part of the page shares: the figures, what is looked at, and how elements are made.

const page = JSON.parse(document.getElementById("data").textContent);
const COLUMNS = page.columns ?? {
  bidirectional: { title: "Bidirectional", remark: "every token sees all others" },
  causal: { title: "Causal", remark: "a token sees itself and those before it" },
};
const SEMANTICS = page.live ? ["right", "now"] : Object.keys(COLUMNS); // the two columns of every figure
const isBothKinds = !page.live && !page.columns; // else the first column is the model itself

const byId = (id) => document.getElementById(id);

/** What is looked at. Parts are told of a change by the names of what has changed. */
const state = { text: 0, pair: null, token: 0, layer: 0, head: 0, semantics: "causal", method: "occlusion", label: 0, run: 0, over: -1, sorted: "" };
const parts = [];

function update(changes) {
  const changed = Object.keys(changes).filter((name) => state[name] !== changes[name]);
  Object.assign(state, changes);
  if (changed.length) for (const part of parts) part(new Set(changed));
}

/** A part of the page: drawn at the beginning, and when one of these changes. */
function part(names, draw) {
  parts.push((changed) => {
    if (changed === null || names.some((name) => changed.has(name))) draw();
  });
}

const text = () => page.texts[state.text];
const count = () => text().ids.length;

// ------------------------------------------------------------------------------------------------- elements

/** An element; texts from the figures are always text, never HTML. */
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** One of a drawing. */
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(byId("drawing").namespaceURI, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, index) => make("option", { value: index }, name)));
  select.value = chosen;
}

/** Radio buttons in a row. choices: [value, name]. */
function segments(fieldset, choices, chosen, onChoice) {
  const row = make("span", { class: "row" }, choices.map(([value, name]) => {
    const input = make("input", { type: "radio", name: fieldset.id, value, onchange: () => onChoice(value) });
    input.checked = value === chosen;
    return make("label", {}, input, name);
  }));
  fieldset.querySelector(".row")?.remove();
  fieldset.append(row);
}

/** rows: of cells; each cell is an element of its own (th, td) or the content of one. */
function table(caption, head, rows, attributes = {}) {
  const header = make("tr", {}, head.map((name) => name instanceof Element ? name : make("th", { scope: "col" }, name)));
  return make("table", attributes, make("caption", {}, caption), make("thead", {}, header), make("tbody", {}, rows));
}

const row = (...cells) => make("tr", {}, cells);
const number = (value) => make("td", { class: "number" }, value);

/** A bar for a share from 0 to 1, said by the number beside it. */
const bar = (share, kind = "for") =>
  make("td", { class: "bar", "aria-hidden": "true" }, make("i", { class: kind, style: `width:${100 * (share || 0)}%` }));

/** What a summary opens is made when it is opened, and anew when it changes. */
function opened(id, names, content) {
  const details = byId(id);
  const fill = () => {
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const region = { class: "scroll", tabindex: 0, role: "region", "aria-label": details.firstElementChild.textContent };
    details.append(make("div", region, content()));
  };
  details.addEventListener("toggle", fill);
  part(names, fill);
}

/** Words of a drawing in English; a live page says them in its language. {0}, {1}, ... stand for values. */
function told(english, ...values) {
  return placed(inLanguage(english), values).join("");
}

/** The same with elements among the values: a list of children. */
function toldWith(english, ...values) {
  return placed(inLanguage(english), values);
}

const inLanguage = (english) => (page.live && language !== "en" ? TOLD[english] ?? english : english);

/** Words in parts, with the values at their places. */
const placed = (words, values) => words.split(/\{(\d)\}/).map((part, at) => (at % 2 ? values[part] : part));

// --------------------------------------------------------------------------------------------------- tokens

const pieceOf = (id) => page.pieces[id] ?? String(id);

/** A token in a table: the space before a word is a faint sign. */
function piece(id) {
  const name = pieceOf(id);
  const begins = name.startsWith("\u2581");
  const rest = begins ? name.slice(1) : name;
  return make("bdi", { class: "piece" }, begins ? make("span", { class: "space" }, "\u2581") : "", rest);
}

/** A token in words: of the text at a place. */
const wordAt = (place) => pieceOf(text().ids[place]).replace(/^\u2581/, "") || told("space");

/** Which way the text is written: as its first letter is. */
function direction() {
  const words = text().ids.map(pieceOf).filter((name) => !/^<.*>$/.test(name)).join("");
  const letter = words.match(/\p{L}/u)?.[0] ?? "";
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/.test(letter) ? "rtl" : "ltr";
}

/** A button or span that shows a token of the text. */
function chip(tag, place, attributes) {
  const name = pieceOf(text().ids[place]);
  const isSpecial = /^<.*>$/.test(name);
  const kind = `chip${name.startsWith("\u2581") ? " word" : ""}${isSpecial ? " special word" : ""}`;
  return make(tag, { ...attributes, class: kind, "data-place": place }, name.replace(/^\u2581/, "") || "\u00a0");
}

// -------------------------------------------------------------------------------------------------- numbers

/** A probability for people: percents, and one in so many where it is small. */
function percent(p) {
  if (p === null || p === undefined || Number.isNaN(p)) return "-";
  if (p === 0) return "0 %";
  if (p >= 0.1) return `${(100 * p).toFixed(1)} %`;
  if (p >= 0.001) return `${(100 * p).toFixed(2)} %`;
  return p >= 1e-9 ? told("1 in {0}", brief(1 / p)) : told("under 1 in 10\u2079");
}

/** A number with so many digits that count. */
function brief(value, digits = 2) {
  if (value === null || value === undefined) return "-";
  if (value !== 0 && (Math.abs(value) < 1e-5 || Math.abs(value) >= 1e9)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 7 });
}

const signed = (value, digits = 2) => `${value < 0 ? "\u2212" : "+"}${brief(Math.abs(value), digits)}`;
const bits = (p) => -Math.log2(Math.max(p, 1e-30));

// ----------------------------------------------------------------------------------------- stored in few bytes

/** The bytes of a text in base64, in zlib's format. */
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const unpacked = new Map();

/** Unpacked once, and kept. What a live page computes is not packed. */
function kept(packed) {
  if (packed instanceof Uint8Array) return packed.buffer;
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
}

/** Tell those who do not see the page. */
function say(words) {
  byId("said").textContent = words;
}
