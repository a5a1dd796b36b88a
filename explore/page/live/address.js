// The address keeps what is looked at, so that a link opens the same page: #text=...&temperature=0&steps=20&break=scores

const SAMPLING = { temperature: [1, 0, 2, 0.05], top_k: [0, 0, 200, 1], top_p: [1, 0.01, 1, 0.01], min_p: [0, 0, 1, 0.01] };
const MOST_STEPS = 1000;

/** The live page's state: a text, what was made of it, how tokens are chosen, what is broken. */
const live = {
  text: "", made: [], seed: 1,
  sampling: Object.fromEntries(Object.entries(SAMPLING).map(([name, [usual]]) => [name, usual])),
  switches: { attention: null, breaks: [], off: [], uniform: [] },
};

/** A number of the address within its bounds; what is no number is the usual one. */
function bounded(words, usual, least, most) {
  const value = Number(words);
  return words === null || words.trim() === "" || !Number.isFinite(value) ? usual : Math.min(most, Math.max(least, value));
}

/** Take over the state of the address. Returns the number of tokens to make. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const listed = (name, isKnown) => [...new Set((given.get(name) ?? "").split(","))].filter(isKnown);
  live.text = given.get("text") ?? page.live.text;
  live.made = [];
  live.seed = Math.round(bounded(given.get("seed"), 1, 0, 2 ** 31));
  for (const [name, [usual, least, most]] of Object.entries(SAMPLING)) live.sampling[name] = bounded(given.get(name), usual, least, most);
  live.sampling.top_k = Math.round(live.sampling.top_k);
  const { n_layers: layers, n_heads: heads } = page.model;
  const isHead = (part) => /^\d+\.\d+$/.test(part) && part.split(".").every((each, at) => each >= 1 && each <= [layers, heads][at]);
  live.switches = {
    attention: ["causal", "bidirectional"].find((kind) => kind === given.get("attention")) ?? null,
    breaks: listed("break", (name) => page.live.breaks.some((each) => each.name === name)),
    off: listed("off", (part) => isHead(part) || (/^\d+$/.test(part) && part >= 1 && part <= layers)),
    uniform: listed("uniform", isHead),
  };
  state.layer = Math.round(bounded(given.get("layer"), 1, 1, layers)) - 1;
  state.head = Math.round(bounded(given.get("head"), 1, 1, heads)) - 1;
  language = Object.keys(LANGUAGES).find((name) => name === given.get("lang")) ?? ownLanguage();
  return Math.round(bounded(given.get("steps"), 0, 0, MOST_STEPS));
}

let writing = 0;

/** Soon, so that a slider that is drawn does not write at every step: browsers limit that. */
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const { attention, breaks, off, uniform } = live.switches;
    const values = { text: live.text, steps: live.made.length || null, attention, break: breaks.join(","), off: off.join(","), uniform: uniform.join(",") };
    for (const [name, [usual]] of Object.entries(SAMPLING)) values[name] = live.sampling[name] === usual ? null : live.sampling[name];
    Object.assign(values, { seed: live.seed === 1 ? null : live.seed, layer: state.layer ? state.layer + 1 : null, head: state.head ? state.head + 1 : null });
    if (language !== "en" || ownLanguage() !== "en") values.lang = language;
    const given = Object.entries(values).filter(([name, value]) => name === "text" || (value !== null && value !== ""));
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }, 300);
}

const isSwitched = () => {
  const { attention, breaks, off, uniform } = live.switches;
  return (attention !== null && attention !== page.model.attention) || breaks.length + off.length + uniform.length > 0;
};

/** The switches of each column. While nothing is switched, the second one shows the other kind of attention. */
function switchesOf(column) {
  if (column === "right") return { attention: page.model.attention, breaks: [], off: [], uniform: [] };
  const other = { attention: page.model.attention === "causal" ? "bidirectional" : "causal", breaks: [], off: [], uniform: [] };
  return isSwitched() ? { ...live.switches, attention: live.switches.attention ?? page.model.attention } : other;
}
