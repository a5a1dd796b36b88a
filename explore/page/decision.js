// What a classifier says, and which tokens that hangs on.

const METHODS = {
  occlusion: () => [told("occlusion"), told("Occlusion: the token is left out, and the probability falls by so many percentage points."), told("Points")],
  gradient: () => [told("gradient \u00d7 input"), told("Gradient \u00d7 input: the gradient of the log-probability by the token's embedding, times that embedding; in nats."), told("Nats")],
};
const labels = () => page.model.label_names;
const likeliest = (probabilities) => probabilities.indexOf(Math.max(...probabilities));

/** For the chosen class: a number for each token, null where there is none. */
function contributions() {
  const values = text().decision[state.method];
  return text().ids.map((_, place) => values[place * labels().length + state.label]);
}

const inUnits = (value) => value === null ? "-" : state.method === "occlusion" ? `${signed(100 * value)}` : signed(value);

function drawVerdict() {
  const { probabilities } = text().decision;
  const said = likeliest(probabilities);
  const gold = text().gold;
  const verdict = gold === null ? "" : gold === said ? told(", which is right") : told("; the gold label is \u201c{0}\u201d", labels()[gold]);
  byId("verdict").textContent = told("It says \u201c{0}\u201d", labels()[said]) + verdict;
  const rows = probabilities.map((p, index) => {
    const marks = [index === said ? told("chosen") : null, index === gold ? told("gold") : null].filter(Boolean).join(", ");
    const name = make("th", { scope: "row" }, labels()[index], make("span", { class: "own" }, marks ? ` ${marks}` : ""));
    return filled(row(name, bar(p), number(percent(p))), { class: index === said ? "came" : null }, []);
  });
  const head = [told("Class"), make("th", { scope: "col", "aria-hidden": "true" }), told("Probability")];
  byId("classes").replaceChildren(table(told("Probability of each class"), head, rows, { class: "full" }));
}

function drawContributions() {
  const values = contributions();
  const most = Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-12);
  const together = text().decision.together;
  const groups = state.method === "occlusion" && together > 1 ? told(" In this long text {0} neighbours at a time.", together) : "";
  const [, explained, unit] = METHODS[state.method]();
  byId("method-says").textContent = explained + groups;
  byId("contributions").dir = direction();
  byId("contributions").replaceChildren(...values.map((value, place) => chip("span", place, {
    title: inUnits(value), "--fill": `var(--${value < 0 ? "against" : "for"})`, "--full": `${(100 * Math.abs(value ?? 0)) / most}%`,
  })));
  const order = values.map((value, place) => [value, place]).filter(([value]) => value !== null) // bos is never left out
    .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
  const rows = order.slice(0, 6).map(([value, place]) => row(
    make("th", { scope: "row" }, piece(text().ids[place]), make("span", { class: "own" }, ` ${place + 1}`)),
    splitBar(value / most),
    number(inUnits(value)),
  ));
  const head = [told("Token"), make("th", { scope: "col", "aria-hidden": "true" }), unit];
  byId("weightiest").replaceChildren(table(told("What weighs most for \u201c{0}\u201d", labels()[state.label]), head, rows, { class: "full" }));
}

/** A bar to the right of the middle, or to the left; share: from -1 to 1. */
function splitBar(share) {
  const inner = make("i", { class: share < 0 ? "against" : "for", style: `width:${100 * Math.abs(share)}%` });
  return make("td", { class: "bar", "aria-hidden": "true" }, make("div", { class: "split" }, inner));
}

function markContribution() {
  byId("contributions").querySelectorAll(".chip").forEach((each, place) => each.classList.toggle("at", place === state.token));
}

function contributionTable() {
  const classes = labels();
  const rows = text().ids.map((id, place) => row(
    make("th", { scope: "row" }, place + 1), make("td", {}, piece(id)),
    ...classes.map((_, index) => {
      const value = text().decision[state.method][place * classes.length + index];
      return number(inUnits(value));
    }),
  ));
  return table(told("By {0}, for each class", METHODS[state.method]()[0]), [told("Place"), told("Token"), ...classes], rows);
}

function setUpDecision() {
  if (!page.texts || !page.texts[0].decision) return;
  byId("decision").hidden = false;
  part(["language"], () => {
    const there = Object.keys(METHODS).filter((value) => text().decision[value]);
    segments(byId("method"), there.map((value) => [value, METHODS[value]()[0]]), state.method, (value) => update({ method: value }));
  });
  options(byId("label"), labels(), 0);
  byId("label").addEventListener("change", (event) => update({ label: Number(event.target.value) }));
  part(["text"], () => {
    state.label = likeliest(text().decision.probabilities);
    byId("label").value = state.label;
    drawVerdict();
  });
  part(["text", "method", "label"], drawContributions);
  part(["text", "method", "label", "token"], markContribution);
  opened("contribution-table", ["text", "method"], contributionTable);
}
