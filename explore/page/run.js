// A run: its curves, which labels were taken for which, its worst errors.

const run = () => page.run.runs[state.run];

/** The run that is drawn over it; null: none. */
const over = () => (state.over < 0 || state.over === state.run ? null : page.run.runs[state.over]);

const COLUMNS_OF_RUNS = {
  name: ["Run", (each) => each.name],
  score: ["Best score", (each) => best(each.epochs.map((one) => one.dev_score))],
  loss: ["Last train loss", (each) => each.epochs.at(-1)?.train_loss ?? null],
  epochs: ["Epochs", (each) => trainedEpochs(each).length],
};

/** Without what a method made of the model after the last one. */
const trainedEpochs = (each) => each.epochs.filter((one) => !one.is_finish);
const best = (values) => values.filter((value) => typeof value === "number").reduce((a, b) => (a === null || b > a ? b : a), null);

/** All runs; a click on a column's name sorts by it, a second one the other way round. state.sorted: "score" or "-score". */
function drawRuns() {
  const [, sign, column] = state.sorted.match(/^(-?)(.*)$/);
  const order = page.run.runs.map((each, index) => ({ each, index }));
  if (column) {
    const value = ({ each }) => COLUMNS_OF_RUNS[column][1](each);
    const compared = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -Infinity) - (b ?? -Infinity));
    order.sort((a, b) => (sign ? -1 : 1) * compared(value(a), value(b)));
  }
  const rows = order.map(({ each, index }) => {
    const name = make("button", { type: "button", onclick: () => update({ run: index }) }, each.name);
    const cells = Object.entries(COLUMNS_OF_RUNS).slice(1).map(([, [, value]]) => number(brief(value(each), 4)));
    return filled(row(make("th", { scope: "row" }, name), ...cells), { class: index === state.run ? "came" : null }, []);
  });
  const head = Object.entries(COLUMNS_OF_RUNS).map(([key, [title]]) => {
    const isBy = column === key;
    const button = make("button", { type: "button", "data-key": key, onclick: () => update({ sorted: state.sorted === `-${key}` ? key : `-${key}` }) }, title);
    return make("th", { scope: "col", class: key === "name" ? null : "number", "aria-sort": isBy ? (sign ? "descending" : "ascending") : null }, button);
  });
  const focused = document.activeElement?.dataset?.key;
  byId("runs").replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs" }, table("Runs", head, rows)));
  byId("runs").querySelector(`[data-key="${focused}"]`)?.focus();
}

function drawSettings() {
  const shown = (value) => typeof value === "object" ? JSON.stringify(value) : String(value);
  const facts = Object.entries(run().settings).map(([name, value]) =>
    make("div", {}, make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, shown(value))));
  byId("settings").replaceChildren(...facts);
}

function drawCurves() {
  const figures = run().curves.map((curve) => {
    const other = over()?.curves.find((each) => each.key === curve.key);
    const line = { name: other ? run().name : "each step", x: curve.x, y: curve.y };
    if (other) return chart(curve.title, "step", [line, { name: over().name, x: other.x, y: other.y, kind: "second" }], { zero: true });
    if (curve.key !== "loss" || curve.y.length < 20) return chart(curve.title, "step", [line], { zero: true });
    return chart(curve.title, "step", [{ ...line, kind: "faint" }, { name: "smoothed", x: curve.x, y: smoothed(curve.y) }], { zero: true });
  });
  const epochs = trainedEpochs(run());
  const x = epochs.map((each) => each.epoch);
  const scores = [["train_score", "train", "second"], ["dev_score", run().chosen_on, ""]]
    .map(([key, name, kind]) => ({ name, kind, dots: true, x, y: epochs.map((each) => each[key] ?? null) }))
    .filter((line) => line.y.some((value) => value !== null));
  if (over()) {
    const theirs = trainedEpochs(over());
    const line = { name: over().name, kind: "second", dots: true, x: theirs.map((each) => each.epoch), y: theirs.map((each) => each.dev_score ?? null) };
    scores.splice(0, scores.length, ...scores.filter((each) => !each.kind).map((each) => ({ ...each, name: run().name })), line);
  }
  if (scores.length) figures.unshift(chart("Score after each epoch", "epoch", scores));
  if (epochs.length > 1) {
    const lossOf = (each, kind) => ({ name: each.name, kind, dots: true, x: trainedEpochs(each).map((one) => one.epoch), y: trainedEpochs(each).map((one) => one.train_loss ?? null) });
    const losses = over() ? [lossOf(run(), ""), lossOf(over(), "second")] : [lossOf({ ...run(), name: "train" }, "")];
    figures.splice(1, 0, chart("Train loss of each epoch", "epoch", losses));
  }
  byId("curves").replaceChildren(...figures.filter(Boolean));
}

function drawEpochs() {
  const names = { epoch: "Epoch", train_loss: "Train loss", train_score: "Score on train", dev_score: `Score on ${run().chosen_on}`, seconds: "Seconds" };
  const keys = Object.keys(names).filter((key) => run().epochs.some((each) => each[key] !== undefined && each[key] !== null));
  const best = run().epochs.filter((each) => each.improved ?? each.is_best).at(-1);
  const rows = run().epochs.map((each) => filled(row(
    make("th", { scope: "row" }, each.is_finish ? "after" : each.epoch, each === best ? make("span", { class: "own" }, " best") : ""),
    ...keys.slice(1).map((key) => number(each.is_finish && key === "train_loss" ? "-" : brief(each[key], 4))),
  ), { class: each === best ? "came" : null }, []));
  if (!rows.length) return byId("epochs").replaceChildren();
  const head = keys.map((key) => make("th", { scope: "col", class: key === "epoch" ? null : "number" }, names[key]));
  byId("epochs").replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Epochs" }, table("Epochs", head, rows)));
}

function drawJudged() {
  byId("judged").replaceChildren(...run().judged.map((each) => {
    const facts = [["accuracy", each.accuracy], ["macro-F1", each.macro_f1], ["majority class", each.majority]]
      .filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${value.toFixed(3)}`);
    const words = facts.length ? `${facts.join(", ")}${each.count ? `, of ${each.count} sentences` : ""}` : "no gold labels, so no accuracy";
    const card = make("div", { class: "card" }, make("h3", {}, `Judged on ${each.split}`), make("p", {}, words));
    return filled(card, {}, [each.confusion ? confusionTable(each) : null].filter(Boolean));
  }));
  byId("judged").className = "pair";
}

function confusionTable({ confusion, label_names: names, split }) {
  const rows = confusion.map((counts, label) => {
    const total = counts.reduce((a, b) => a + b, 0) || 1;
    const cells = counts.map((value, predicted) => make("td", {
      class: `tint ${label === predicted ? "right" : "wrong"}`, "--p": Math.sqrt(value / total).toFixed(3), title: percent(value / total),
    }, value));
    return row(make("th", { scope: "row" }, names[label]), ...cells);
  });
  const head = [make("td"), ...names];
  const caption = `Confusion matrix, ${split}: gold labels in rows, predicted ones in columns`;
  return make("div", { class: "over", tabindex: 0, role: "region", "aria-label": caption }, table(caption, head, rows, { class: "confusion" }));
}

function drawErrors() {
  const tables = run().judged.filter((each) => each.errors?.length).map((each) => {
    const names = each.label_names;
    const rows = each.errors.map((error) => row(
      make("td", { class: "said", dir: "auto" }, error.sentence), labelled(names[error.label], error.gold_probability),
      labelled(names[error.prediction], error.probability),
    ));
    const head = ["Sentence", "Gold label", "Predicted"];
    return errorsOf(`Worst errors on ${each.split}: the gold label was thought the least likely`, head, rows);
  });
  if (page.run.hard?.length) {
    const rows = page.run.hard.map((each) => row(
      make("td", { class: "said", dir: "auto" }, each.sentence), make("td", {}, each.label), make("td", {}, each.prediction),
      number(`${each.wrong} of ${each.runs}`), make("td", {}, each.data),
    ));
    tables.push(errorsOf("What most runs got wrong on dev", ["Sentence", "Gold", "Mostly predicted", "Runs", "Data"], rows));
  }
  byId("errors").replaceChildren(...tables);
}

const labelled = (name, p) => make("td", {}, name, make("span", { class: "own" }, ` ${percent(p)}`));

function errorsOf(caption, head, rows) {
  const region = { class: "scroll", tabindex: 0, role: "region", "aria-label": caption };
  return make("div", region, table(caption, head, rows, { class: "errors full" }));
}

function setUpRun() {
  if (!page.run) return;
  byId("run").hidden = false;
  for (const id of ["choose-run", "choose-over", "runs"]) byId(id).hidden = page.run.runs.length < 2;
  options(byId("which"), page.run.runs.map((each) => each.name), 0);
  byId("which").addEventListener("change", (event) => update({ run: Number(event.target.value) }));
  options(byId("over"), ["none", ...page.run.runs.map((each) => each.name)], 0);
  byId("over").addEventListener("change", (event) => update({ over: Number(event.target.value) - 1 }));
  part(["run", "sorted"], drawRuns);
  part(["over"], () => { byId("over").value = state.over + 1; drawCurves(); });
  part(["run"], () => { byId("which").value = state.run; drawSettings(); drawCurves(); drawEpochs(); drawJudged(); drawErrors(); });
}
