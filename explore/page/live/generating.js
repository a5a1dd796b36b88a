// What comes next: its probabilities, and the text that is made of it, token by token.

const DRAWN_MS = 100; // how often a text is drawn while it is made

const making = { isRunning: false, ahead: null };

/** A number from 0 to below 1 for each place, the same for the same seed: going back and forth makes the same text. */
function randomAt(place) {
  let mixed = Math.imul(live.seed ^ 0x9e3779b9, 0x85ebca6b) ^ Math.imul(place + 1, 0xc2b2ae35);
  mixed = Math.imul(mixed ^ (mixed >>> 15), 0x2c1b3c6d);
  mixed = Math.imul(mixed ^ (mixed >>> 12), 0x297a2d39);
  return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
}

const added = () => live.made.map((each) => each.id);

function askNext() {
  const { temperature, top_k: topK, top_p: topP, min_p: minP } = live.sampling;
  const sampling = { temperature, topK: topK || null, topP: topP < 1 ? topP : null, minP: minP || null };
  const given = { text: live.text, added: added(), switches: { ...live.switches, attention: live.switches.attention ?? page.model.attention } };
  return ask("next", { ...given, sampling, random: randomAt(live.made.length) }, "next");
}

/** Ask what comes next; returns whether it is known. */
async function lookAhead(isDrawn = true) {
  const answer = await askNext().catch(failed);
  if (!answer) return false;
  making.ahead = answer;
  if (isDrawn) drawNext(answer);
  return !answer.broken && answer.id !== undefined;
}

function drawNext({ broken, top, kept }) {
  speak("live-kept", () => broken ? t("live.broken") : kept === undefined ? "" : t("next.kept", kept.toLocaleString(language), page.model.vocab_size.toLocaleString(language)));
  if (!top) {
    byId("live-next").replaceChildren();
    return;
  }
  const rows = top.map((each) => {
    const words = t("next.put", plainly(each.piece), percent(each.p));
    const button = make("button", { type: "button", class: "put", "aria-label": words, "data-id": each.id, onclick: () => put(each) }, shownPiece(each.piece));
    return filled(row(make("th", { scope: "row" }, button), bar(each.p), number(percent(each.p)), number(percent(each.plain))), { class: each.p ? null : "dropped" }, []);
  });
  const head = [t("next.token"), make("th", { scope: "col", "aria-hidden": "true" }), make("th", { scope: "col", class: "number" }, t("next.chance")), make("th", { scope: "col", class: "number" }, t("next.model"))];
  byId("live-next").replaceChildren(table(t(isSwitched() ? "next.switched" : "next.caption"), head, rows, { class: "full" }));
}

const plainly = (name) => name.replaceAll("\u2581", " ").trim() || told("space");

/** A piece by its name, with a faint sign for the space before it. */
const shownPiece = (name) => name.startsWith("\u2581")
  ? make("bdi", { class: "piece" }, make("span", { class: "space" }, "\u2581"), name.slice(1)) : make("bdi", { class: "piece" }, name);

// ------------------------------------------------------------------------------------------------- making a text

/** Put a token there, whether or not it would have been drawn. */
async function put({ id, piece: name, plain }) {
  pauseMaking();
  live.made.push({ id, piece: name, p: plain });
  await madeChanged();
}

/** One token more; returns whether another can follow. */
async function makeOne(isDrawn = true) {
  if (making.ahead?.id === undefined && !(await lookAhead())) return false;
  const { id, piece: name, p } = making.ahead;
  live.made.push({ id, piece: name, p });
  making.ahead = null;
  await Promise.all([isDrawn ? drawMade() : null, lookAhead(isDrawn)]);
  return !page.live.stops.includes(id) && Boolean(making.ahead?.id !== undefined);
}

/** Make tokens until paused, or so many. */
async function makeMany(count = MOST_STEPS) {
  if (making.isRunning) return;
  making.isRunning = true;
  drawButtons();
  const [start, before] = [performance.now(), live.made.length];
  let drawn = 0;
  const isDue = () => performance.now() - drawn > DRAWN_MS && (drawn = performance.now()) > 0;
  while (making.isRunning && live.made.length - before < count && await makeOne(isDue()));
  const speed = (live.made.length - before) / ((performance.now() - start) / 1000);
  speak("live-speed", () => speed > 0 ? t("made.speed", brief(speed)) : "");
  pauseMaking();
  if (making.ahead) drawNext(making.ahead);
  await drawMade();
  await madeEnded();
}

function pauseMaking() {
  making.isRunning = false;
  drawButtons();
}

async function step() {
  pauseMaking();
  await makeOne();
  madeEnded();
}

/** Back to before the token of a number, the last one if none is given. */
async function back(number = live.made.length - 1) {
  pauseMaking();
  live.made.length = Math.max(0, number);
  await madeChanged();
}

async function madeChanged() {
  making.ahead = null;
  await Promise.all([drawMade(), lookAhead()]);
  madeEnded();
}

function madeEnded() {
  drawButtons();
  writeAddress();
  return readAll();
}

/** The tokens that were made; those that stand there already stay. */
async function drawMade() {
  const box = byId("live-made");
  box.hidden = !live.made.length;
  let same = 0;
  while (same < live.made.length && box.children[same]?.dataset.id === String(live.made[same].id)) same++;
  while (box.children.length > same) box.lastElementChild.remove();
  box.append(...live.made.slice(same).map((each, at) => chipOfMade(each, same + at)));
  const answer = await ask("written", { text: live.text, added: added() }, "written").catch(failed);
  if (answer) byId("live-generated").textContent = answer.text;
}

function chipOfMade({ id, piece: name, p }, number) {
  const words = t("made.token", plainly(name), number + 1, percent(p));
  const full = { "--fill": "var(--surprise)", "--full": `${Math.min(100, (100 * bits(p)) / 12)}%` };
  const kind = `chip${name.startsWith("\u2581") ? " word" : ""}`;
  return make("button", { type: "button", class: kind, "data-id": id, title: percent(p), "aria-label": words, onclick: () => back(number), ...full }, name.replaceAll("\u2581", "") || "\u00a0");
}

// ----------------------------------------------------------------------------------------------------- controls

function setUpMaking() {
  const buttons = [["run", () => (making.isRunning ? pauseMaking() : makeMany())], ["step", step], ["back", () => back()], ["clear", () => back(0)]];
  byId("making").replaceChildren(...buttons.map(([name, act]) => make("button", { type: "button", id: `made-${name}`, onclick: act })));
  for (const [name, [, least, most, each]] of [...Object.entries(SAMPLING), ["seed", [1, 0, 9999, 1]]]) {
    const isSeed = name === "seed";
    const input = make("input", { type: isSeed ? "number" : "range", id: `sampling-${name}`, min: least, max: most, step: each });
    const said = isSeed ? null : make("output", { for: input.id });
    input.addEventListener("input", () => {
      if (isSeed) live.seed = Math.round(bounded(input.value, 1, least, most));
      else live.sampling[name] = Number(input.value);
      if (said) said.textContent = input.value;
      making.ahead = null;
      lookAhead();
      writeAddress();
    });
    byId("sampling").append(make("label", {}, make("span", { "data-say": `sampling.${name}` }), input, said));
  }
  drawControls();
}

/** The controls show the state, which an address may have changed. */
function drawControls() {
  for (const [name, value] of [...Object.entries(live.sampling), ["seed", live.seed]]) {
    const input = byId(`sampling-${name}`);
    input.value = value;
    if (input.nextElementSibling) input.nextElementSibling.textContent = value;
  }
  drawButtons();
}

function drawButtons() {
  byId("made-run").textContent = t(making.isRunning ? "made.pause" : "made.run");
  for (const name of ["step", "back", "clear"]) byId(`made-${name}`).textContent = t(`made.${name}`);
  byId("made-back").disabled = byId("made-clear").disabled = !live.made.length;
}
