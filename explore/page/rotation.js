// RoPE: the pairs of a query before and after they are turned, and what that does to a product.

/** The query of the chosen token and head in the first layer: pairs [x, y] before and after. */
async function pairsOf() {
  const { shown, unit, data } = text().queries;
  const stored = new Int16Array(await kept(data));
  const { n_heads: heads, head_dim: dim } = page.model;
  if (state.token >= shown) return null;
  return [0, 1].map((half) => {
    const first = ((half * heads + state.head) * shown + state.token) * dim;
    return Array.from({ length: dim / 2 }, (_, pair) => [0, 1].map((side) => stored[first + 2 * pair + side] * unit));
  });
}

/** The angle from one pair to another, counter-clockwise, in degrees from 0 to below 360. */
function angle([x0, y0], [x1, y1]) {
  const degrees = (Math.atan2(x0 * y1 - y0 * x1, x0 * x1 + y0 * y1) * 180) / Math.PI;
  return degrees < -0.5 ? degrees + 360 : Math.max(degrees, 0);
}

/** How many positions make a whole turn, from how far apart (1, 0) lies at positions 0 and 1. */
function period(pair) {
  const half = page.rope.head_dim / 2;
  const at = (place) => [0, 1].map((side) => page.rope.turned[2 * (place * half + pair) + side]);
  let place = 1;
  while (2 * place < page.rope.positions && angle(at(0), at(place)) < 90) place *= 2;
  const turn = angle(at(0), at(place));
  return turn ? (360 * place) / turn : Infinity;
}

async function drawDials() {
  const asked = { ...state };
  const pairs = await pairsOf();
  if (asked.text !== state.text || asked.token !== state.token || asked.head !== state.head) return;
  byId("turning").replaceChildren(
    ...toldWith("The query of {0} at position {1} (the first token is at 0), layer 1, head {2}. Dashed before, full after.", piece(text().ids[state.token]), state.token, state.head + 1),
  );
  if (pairs === null) {
    byId("dials").replaceChildren(make("p", { class: "soft" }, told("Queries are shown of the first {0} tokens.", text().queries.shown)));
    return;
  }
  const [before, after] = pairs;
  const longest = Math.max(...before.map(([x, y]) => Math.hypot(x, y)), 1e-9);
  byId("dials").replaceChildren(...before.map((pair, index) => dial(index, pair, after[index], longest)));
}

function dial(index, before, after, longest) {
  const end = ([x, y]) => {
    const length = 0.35 + 0.65 * Math.sqrt(Math.hypot(x, y) / longest);
    const whole = Math.hypot(x, y) || 1;
    return [(40 * length * x) / whole, (-40 * length * y) / whole];
  };
  const turn = angle(before, after);
  const [from, to] = [end(before), end(after)];
  const svg = draw("svg", { viewBox: "-48 -48 96 96", "aria-hidden": "true" },
    draw("circle", { class: "ring", cx: 0, cy: 0, r: 44 }),
    draw("path", { class: "arc", d: arc(before, turn) }),
    draw("line", { class: "before", x1: 0, y1: 0, x2: from[0], y2: from[1] }),
    draw("line", { class: "after", x1: 0, y1: 0, x2: to[0], y2: to[1] }));
  const words = told("a turn in {0} tokens", brief(period(index)));
  return make("div", { class: "dial", role: "listitem" }, svg, make("strong", {}, told("Pair {0}", index + 1)), ` ${turn.toFixed(0)}\u00b0`, make("br"), words);
}

/** From a pair's own direction onwards by so many degrees; counter-clockwise is positive. */
function arc([x, y], turn) {
  const start = Math.atan2(y, x);
  const end = start + (turn * Math.PI) / 180;
  const at = (radians) => `${(16 * Math.cos(radians)).toFixed(2)} ${(-16 * Math.sin(radians)).toFixed(2)}`;
  return `M ${at(start)} A 16 16 0 ${turn > 180 ? 1 : 0} 0 ${at(end)}`;
}

function anglesTable() {
  const region = make("div");
  pairsOf().then((pairs) => {
    if (pairs === null) return;
    const rows = pairs[0].map((before, index) => {
      const after = pairs[1][index];
      const both = [before, after].map((pair) => number(pair.map((value) => brief(value, 3)).join(", ")));
      return row(make("th", { scope: "row" }, index + 1), ...both, number(`${angle(before, after).toFixed(1)}\u00b0`), number(brief(period(index), 3)));
    });
    const head = [told("Pair"), told("Before the rotation"), told("After it"), told("Turned by"), told("Tokens for a whole turn")];
    region.append(table(told("The query's pairs"), head, rows));
  });
  return region;
}

function drawMatch() {
  const match = page.rope.match;
  const line = { name: told("match"), x: match.map((_, index) => index), y: match };
  const note = told("1 is a perfect match. Near tokens match best without having learned to; what is far may match again where pairs have come round.");
  const figure = chart(told("How well two equal vectors match, by how far apart they stand"), told("tokens apart"), [line], { zero: true, note });
  byId("match").replaceChildren(figure);
}

function setUpRotation() {
  if (!page.texts) return;
  byId("rotation").hidden = false;
  part(["language"], drawMatch);
  part(["text", "token", "head"], drawDials);
  opened("angles-table", ["text", "token", "head"], anglesTable);
}
