// Lines over an axis, and colours.

/** A colour of the style, as it is in this theme: [r, g, b]. */
function colour(name) {
  const probe = make("span", { style: `color: var(${name})`, hidden: "" });
  document.body.append(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return [r, g, b];
}

const inWords = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** From nothing to all, in 256 steps, each [r, g, b]. */
function ramp() {
  const stops = ["--r0", "--r1", "--r2", "--r3", "--r4"].map(colour);
  return Array.from({ length: 256 }, (_, step) => {
    const at = (step / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (at - low)));
  });
}

/** About four round numbers from low to high. */
function ticks(low, high) {
  const rough = (high - low || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

/** A round number, short enough for the margin of a chart: a learning rate as 2e-5. All its digits count. */
function onAxis(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return Number(value.toPrecision(3)).toExponential().replace("+", "");
  return brief(value, 6);
}

const whole = (value) => value.toLocaleString("en"); // the number of a step or an epoch

const BOX = { width: 420, height: 194, left: 62, right: 26, top: 10, bottom: 36 };

/** lines: [{name, x, y, kind, dots}]; what is null is left out. Returns a figure with a table of its numbers. */
function chart(title, xName, lines, { zero = false, note = "" } = {}) {
  const points = lines.flatMap((line) => line.x.map((x, index) => [x, line.y[index]])).filter(([, y]) => y !== null);
  if (!points.length) return null;
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const least = (values) => values.reduce((a, b) => Math.min(a, b));
  const most = (values) => values.reduce((a, b) => Math.max(a, b));
  let [x0, x1, y0, y1] = [least(xs), most(xs), zero ? Math.min(0, least(ys)) : least(ys), most(ys)];
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) / 2, y1 + Math.abs(y1) / 2];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const toX = (x) => BOX.left + ((x - x0) / (x1 - x0)) * (BOX.width - BOX.left - BOX.right);
  const toY = (y) => BOX.height - BOX.bottom - ((y - y0) / (y1 - y0)) * (BOX.height - BOX.top - BOX.bottom);
  const svg = draw("svg", { class: "chart", viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img" });
  svg.setAttribute("aria-label", told("{0}, from {1} to {2} {3}: {4}", title, whole(least(xs)), whole(most(xs)), xName, lines.map(inShort).join("; ")));
  for (const value of ticks(y0, y1)) {
    svg.append(draw("line", { class: "axis", x1: BOX.left, x2: BOX.width - BOX.right, y1: toY(value), y2: toY(value) }));
    svg.append(draw("text", { x: BOX.left - 6, y: toY(value) + 4, "text-anchor": "end" }, onAxis(value)));
  }
  for (const value of ticks(x0, x1).filter((each) => xName !== "epoch" || Number.isInteger(each))) {
    svg.append(draw("text", { x: toX(value), y: BOX.height - BOX.bottom + 16, "text-anchor": "middle" }, onAxis(value)));
  }
  svg.append(draw("text", { x: BOX.width - BOX.right, y: BOX.height - 5, "text-anchor": "end" }, xName));
  for (const line of lines) {
    const shown = line.x.map((x, index) => [x, line.y[index]]).filter(([, y]) => y !== null);
    const path = shown.map(([x, y]) => `${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join(" ");
    svg.append(draw("polyline", { class: `line ${line.kind ?? ""}`, points: path }));
    if (line.dots) svg.append(...shown.map(([x, y]) => draw("circle", { class: `dot ${line.kind ?? ""}`, cx: toX(x), cy: toY(y), r: 3.5 })));
  }
  showUnderPointer(svg, xName, lines, toX);
  const caption = [title, lines.length > 1 ? make("span", { class: "own" }, `: ${lines.map(signOf).join(", ")}`) : ""];
  return make("figure", { class: "card" }, make("figcaption", {}, caption), svg, note ? make("p", { class: "own" }, note) : null);
}

/** A line through the points under the pointer, and their values. */
function showUnderPointer(svg, xName, lines, toX) {
  const across = draw("line", { class: "pointed", y1: BOX.top, y2: BOX.height - BOX.bottom });
  const words = draw("text", { class: "pointed", y: BOX.top + 12, "aria-hidden": "true" });
  const all = [...new Set(lines.flatMap((line) => line.x.filter((_, index) => line.y[index] !== null)))];
  svg.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / svg.clientWidth) * BOX.width;
    const x = all.reduce((a, b) => (Math.abs(toX(b) - at) < Math.abs(toX(a) - at) ? b : a));
    const said = lines.map((line) => [line.name, line.y[line.x.indexOf(x)] ?? null]).filter(([, y]) => y !== null);
    const isLeft = toX(x) < BOX.width / 2;
    const where = { x: toX(x) + (isLeft ? 5 : -5), "text-anchor": isLeft ? "start" : "end" };
    const values = said.map(([name, y]) => `${said.length > 1 ? `${name.slice(0, 24)} ` : ""}${brief(y, 4)}`);
    words.replaceChildren(...[`${xName} ${whole(x)}: `, ...values].map((line, at) => draw("tspan", { ...where, dy: at ? 16 : 0 }, line)));
    for (const name of ["x1", "x2"]) across.setAttribute(name, toX(x));
    svg.append(across, words);
  });
  svg.addEventListener("pointerleave", () => { across.remove(); words.remove(); });
}

const SIGNS = { second: "dashed", faint: "faint" };
const signOf = (line) => `${line.name} (${SIGNS[line.kind] ?? "full line"})`;

function inShort(line) {
  const values = line.y.filter((value) => value !== null);
  return told("{0} begins at {1} and ends at {2}", line.name, brief(values[0], 3), brief(values.at(-1), 3));
}

/** A moving mean over about a thirtieth of all, exponential, without a bias to its beginning. */
function smoothed(values) {
  const keep = 1 - 1 / Math.max(4, values.length / 30);
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, weight] = [keep * sum + value, keep * weight + 1];
    return sum / weight;
  });
}
