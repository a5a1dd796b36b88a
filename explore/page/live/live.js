// The live page: a text that is typed, and everything that is drawn of it.

let started = false;

function failed(error) {
  speak("live-status", () => t("live.failed", error.message));
  return null;
}

/** Read the text with the model as it is, draw it, then with the switches. */
async function readAll() {
  const begun = performance.now();
  speak("live-status", () => t("live.computing"));
  const given = (column) => ({ text: live.text, added: added(), use: column, switches: switchesOf(column) });
  const right = await ask("read", given("right"), "read right").catch(failed);
  if (!right) return;
  if (!right.record) {
    speak("live-status", () => right.bad.length ? t("live.unknown", right.bad[0]) : t("live.nothing"));
    return;
  }
  const time = Math.round(performance.now() - begun);
  speak("live-status", () => `${t("live.ready", right.ids.length, time)} ${right.first ? t("live.cut", right.ids.length, right.first + right.ids.length) : ""}`);
  Object.assign(page.pieces, right.pieces);
  const shown = { text: live.text, gold: null, note: "", ids: right.ids, shown: right.record.shown, queries: right.queries, semantics: { right: right.record, now: null } };
  if (right.probabilities) shown.decision = { probabilities: right.probabilities, occlusion: right.probabilities.map(() => null).concat(Array((right.ids.length - 1) * right.probabilities.length).fill(null)), together: 1 };
  if (started) shown.semantics.now = sameIds(right.ids) ? page.texts[0].semantics.now : null;
  await show(shown);
  byId("live").dataset.read = live.text;
  const now = await ask("read", given("now"), "read now").catch(failed);
  if (!now?.record || page.texts[0] !== shown) return;
  Object.assign(page.pieces, now.pieces);
  shown.semantics.now = now.record;
  shown.broken = now.probabilities;
  await show(shown);
  byId("live").dataset.compared = JSON.stringify([live.text, live.switches]);
  if (shown.decision) await askOcclusion(shown, given("right"));
}

const sameIds = (ids) => ids.length === count() && ids.every((id, place) => id === text().ids[place]);

/** Draw a text; all parts are told of it. */
async function show(shown) {
  page.texts = [shown];
  if (shown.decision) drawDecision(shown);
  if (!started) {
    started = true;
    drawAtLast();
    return;
  }
  state.token = Math.max(0, Math.min(state.token, shown.ids.length - 1));
  for (const part of parts) part(new Set(["text"]));
}

let drawAtLast = null;

/** Open what computes, and draw the rest of the page when the first text is read. draw: the set-up of the page. */
async function startLive(draw) {
  drawAtLast = draw;
  let steps = readAddress();
  document.documentElement.lang = language;
  setUpLanguages((name) => { setLanguage(name); writeAddress(); });
  setUpMaking();
  setUpBreaks();
  setUpCopying();
  if (page.live.classifier) setUpWords();
  sayAll();
  drawHead();
  const area = byId("live-text");
  area.value = live.text;
  area.addEventListener("input", () => typed(area.value));
  addEventListener("hashchange", () => {
    steps = readAddress();
    area.value = live.text;
    setLanguage(language);
    openAt(steps);
  });
  await openMachine().catch(failed);
  await openAt(steps);

  async function openAt(count) {
    drawSwitches();
    describeColumns();
    if (started) for (const part of parts) part(new Set(["layer", "head"]));
    if (!page.live.classifier) await lookAhead();
    if (count && !page.live.classifier) await makeMany(count); // it ends with reading all
    else await Promise.all([drawMade(), readAll()]);
    byId("live").dataset.opened = location.hash;
    compare();
  }
}

/** Say everything in a language. */
function setLanguage(name) {
  language = document.documentElement.lang = name;
  byId("language").querySelector(`[value="${name}"]`).checked = true;
  sayAll();
  drawHead();
  describeColumns();
  drawControls();
  drawSwitches();
  drawCompared();
  nameWords();
  say("");
  byId("live-made").replaceChildren();
  drawMade();
  if (making.ahead) drawNext(making.ahead);
  if (!started) return;
  if (text().decision) drawDecision(text());
  for (const part of parts) part(new Set(["language", "text"]));
}

async function typed(words) {
  pauseMaking();
  live.text = words;
  live.made = [];
  making.ahead = null;
  drawMade();
  if (page.live.classifier) drawWords();
  else lookAhead();
  writeAddress();
  await readAll();
  compare();
}

// ------------------------------------------------------------------------------------------------------ copying

/** What is seen, as text: the prompt and what was made of it, the next tokens with their probabilities. */
function asText() {
  const next = (making.ahead?.top ?? []).map((each) => `${plainly(each.piece)}\t${percent(each.p)}`);
  const decision = text().decision?.probabilities.map((p, index) => `${page.model.label_names[index]}\t${percent(p)}`) ?? [];
  return [live.text + byId("live-generated").textContent, "", ...next, ...decision, "", location.href].join("\n");
}

function setUpCopying() {
  const copy = async () => say(t(await navigator.clipboard.writeText(asText()).then(() => "copy.done", () => "copy.failed")));
  const save = () => maps.get("right").canvas.toBlob((picture) => {
    const link = make("a", { href: URL.createObjectURL(picture), download: "attention.png" });
    link.click();
    URL.revokeObjectURL(link.href);
  });
  byId("copying").replaceChildren(
    make("button", { type: "button", onclick: copy, "data-say": "copy.text" }), make("button", { type: "button", onclick: save, "data-say": "copy.picture" }));
}
