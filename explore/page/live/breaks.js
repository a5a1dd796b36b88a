// Break it: the switches, and the model with them beside the right one.

const GOES_ON = 12; // tokens that are made to compare

/** Turn a name of a list of switches on or off. */
function toggle(list, name, isOn) {
  live.switches[list] = live.switches[list].filter((each) => each !== name).concat(isOn ? [name] : []);
  switchesChanged();
}

function check(list, name, words, ...more) {
  const input = make("input", { type: "checkbox", value: name, onchange: (event) => toggle(list, name, event.target.checked) });
  input.checked = live.switches[list].includes(name);
  return make("div", { class: "check" }, make("label", {}, input, make("span", {}, words)), ...more);
}

function drawSwitches() {
  const isAlike = (name) => ["heads", "repeat"].includes(name) && page.model.n_kv_heads === page.model.n_heads;
  const mistakes = page.live.breaks.map((each) => {
    const name = each.name === "mask" && page.model.attention === "bidirectional" ? "mask_on" : each.name;
    const where = each.line ? t("break.where", each.file, each.line) : each.file;
    const link = language === "en" ? each.link : each.link.replace(/[^/]+$/, `${language}/$&`);
    const page_ = each.is_link ? make("a", { href: link }, link.split("/").at(-1)) : make("code", {}, link);
    const note = isAlike(each.name) ? make("p", { class: "soft" }, t("break.same")) : null;
    return check("breaks", each.name, t(`break.${name}`), make("p", { class: "where" }, make("code", { title: each.code }, where), " ", page_), note);
  });
  refill("mistakes", mistakes);
  const { off, uniform } = live.switches;
  const chosen = [`${state.layer + 1}`, `${state.layer + 1}.${state.head + 1}`];
  const words = (list, part) => list === "uniform" ? t("break.uniform", ...part.split(".")) : part.includes(".") ? t("break.head_off", ...part.split(".")) : t("break.layer_off", part);
  const listed = [...new Set([...chosen, ...off])].sort().map((part) => ["off", part]);
  listed.push(...[...new Set([chosen[1], ...uniform])].sort().map((part) => ["uniform", part]));
  refill("parts", [make("p", { class: "soft" }, t("break.part_of")), ...listed.map(([list, part]) => check(list, part, words(list, part)))]);
  segments(byId("live-attention"), ["causal", "bidirectional"].map((kind) => [kind, t(`attention.${kind}`)]), live.switches.attention ?? page.model.attention, (kind) => {
    live.switches.attention = kind === page.model.attention ? null : kind;
    switchesChanged();
  });
  byId("break-none").disabled = !isSwitched();
}

/** A fieldset keeps its legend, and the element that has the focus is found again by its value. */
function refill(id, children) {
  const fieldset = byId(id);
  const focused = fieldset.contains(document.activeElement) ? document.activeElement.value : null;
  fieldset.replaceChildren(fieldset.querySelector("legend"), ...children);
  if (focused !== null) fieldset.querySelector(`[value="${focused}"]`)?.focus();
}

function switchesChanged() {
  drawSwitches();
  describeColumns();
  making.ahead = null;
  if (!page.live.classifier) lookAhead();
  readAll();
  compare();
  writeAddress();
}

const NAMED = 3; // switches that the bar names; it counts the others

/** The titles of the two columns of every figure; the bar, always in sight, names the switches that are on. */
function describeColumns() {
  const { attention, breaks, off, uniform } = switchesOf("now");
  COLUMNS.right = { title: t("compare.right"), remark: t(`kind.${page.model.attention}`) };
  const listed = [
    ...(attention === page.model.attention && isSwitched() ? [] : [t(`kind.${attention}`)]), ...breaks.map((name) => t(`break.${name}`)),
    ...off.map((part) => t(part.includes(".") ? "break.head_off" : "break.layer_off", ...part.split("."))),
    ...uniform.map((part) => t("break.uniform", ...part.split("."))),
  ];
  COLUMNS.now = { title: t(isSwitched() ? "compare.now" : "compare.other"), remark: listed.join("; ") };
  const named = listed.slice(0, NAMED).concat(listed.length > NAMED ? [t("break.more", listed.length - NAMED)] : []);
  byId("switched").textContent = isSwitched() ? t("break.on", named.join("; ")) : "";
}

// --------------------------------------------------------------------------------------------------- side by side

/** What the model goes on with from the text, each time with the likeliest token. null: out of date. */
async function goesOn(column) {
  const made = [];
  for (let count = 0; count < GOES_ON; count++) {
    const given = { text: live.text, added: [...added(), ...made], switches: switchesOf(column), use: `goes on ${column}` };
    const answer = await ask("next", { ...given, sampling: { temperature: 0 }, random: 0 }, `goes on ${column}`);
    if (answer === null) return null;
    if (answer.broken || answer.id === undefined || page.live.stops.includes(answer.id)) break;
    made.push(answer.id);
  }
  const all = await ask("written", { text: live.text, added: [...added(), ...made] });
  return all.text.slice((await ask("written", { text: live.text, added: added() })).text.length) || "-";
}

/** Whether a column's model sees only what stands before: else it has no perplexity. */
const isCausal = (column) => (switchesOf(column).attention === "causal") !== switchesOf(column).breaks.includes("mask");

const comparing = { number: 0, shown: {} };

async function compare() {
  const number = ++comparing.number;
  if (page.live.classifier) return;
  for (const column of SEMANTICS) {
    const answer = await goesOn(column).catch(failed);
    if (number !== comparing.number || !answer) return;
    comparing.shown[column] = { ...comparing.shown[column], goesOn: answer };
    drawCompared();
  }
}

async function measure() {
  for (const column of SEMANTICS) {
    comparing.shown[column] = { ...comparing.shown[column], perplexity: () => t("compare.measuring") };
    drawCompared();
    const given = { text: byId("measured").value, bos: page.live.bos, switches: switchesOf(column) };
    const answer = isCausal(column) ? await ask("perplexity", given, `measure ${column}`).catch(failed) : null;
    const sees = isCausal(column) ? () => "-" : () => t("compare.sees");
    comparing.shown[column].perplexity = answer?.tokens ? () => `${brief(Number(answer.value), 4)} ${t("compare.tokens", answer.tokens)}` : sees;
    drawCompared();
  }
}

function drawCompared() {
  const columns = SEMANTICS.map((name) => comparing.shown[name] ?? {});
  const line = (words, cells) => row(make("th", { scope: "row" }, words), ...cells);
  const rows = [line(t("compare.goes_on"), columns.map((each) => make("td", { class: "goes-on" }, each.goesOn ?? "\u2026")))];
  if (columns.some((each) => each.perplexity)) rows.push(line(t("compare.perplexity"), columns.map((each) => make("td", {}, each.perplexity?.() ?? "-"))));
  const head = ["", ...SEMANTICS.map((name) => make("th", { scope: "col" }, COLUMNS[name].title, make("span", { class: "own" }, ` ${COLUMNS[name].remark}`)))];
  byId("compare").replaceChildren(table(make("span", { class: "unseen" }, t("compare.title")), head, rows, { class: "full compared" }));
}

function setUpBreaks() {
  byId("cursor").firstElementChild.prepend(make("span", { id: "switched" }));
  describeColumns();
  drawSwitches();
  byId("break-none").addEventListener("click", () => {
    live.switches = { attention: null, breaks: [], off: [], uniform: [] };
    switchesChanged();
  });
  byId("measured").value = page.live.text;
  byId("measure").addEventListener("click", measure);
  part(["layer", "head"], () => { drawSwitches(); writeAddress(); });
}
