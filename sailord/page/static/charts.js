// Charts of one line over time, with a mark at each reconfiguration.

import { digits, make, makeSvg, moment, plural, short } from "./format.js";

const WIDTH = 600;
const HEIGHT = 160;
const GAP_S = 10;
const GAP_TIMES = 5;

/** Parts of a line: it breaks where no point came for much longer than usual, as while the job waits. */
function partsOf(points) {
  const pauses = points.slice(1).map(([at], index) => at - points[index][0]);
  const most = Math.max(GAP_S, GAP_TIMES * [...pauses].sort((a, b) => a - b)[pauses.length >> 1]);
  const starts = [0, ...pauses.flatMap((pause, index) => (pause > most ? [index + 1] : []))];
  return starts.map((start, index) => points.slice(start, starts[index + 1]));
}

/**
 * Draw points [at, value] with marks [at, text]; `unit` follows the last value. Of a job that does not train, `rests`
 * has the present moment and what is said in place of the last value.
 */
export function drawChart(figure, { points, marks, unit, empty, floor = null, rests = null }) {
  const key = JSON.stringify([points.length, points.at(-1), marks.length, empty, rests]);
  if (figure.dataset.key === key) return;
  figure.dataset.key = key;
  if (points.length < 2) {
    figure.replaceChildren(make("p", { class: "note" }, empty));
    return;
  }
  const from = points[0][0];
  const last = points.at(-1)[0];
  const to = Math.max(last, Math.min(rests?.at ?? last, 2 * last - from)); // A long rest takes half of the chart.
  const values = points.map((point) => point[1]);
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (floor !== null) low = Math.min(low, floor);
  if (high - low < 1e-9) high = low + Math.max(Math.abs(low) * 0.1, 1e-6);
  const x = (at) => ((at - from) / Math.max(to - from, 1e-9)) * WIDTH;
  const y = (value) => HEIGHT - ((value - low) / (high - low)) * (HEIGHT - 8) - 4;
  const parts = partsOf(points);
  const line = (part) => part.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("L");
  const under = (part) => `M${x(part[0][0])},${HEIGHT}L${line(part)}L${x(part.at(-1)[0])},${HEIGHT}Z`;
  const inside = marks.filter(([at]) => at >= from && at <= to);
  const summary = `from ${digits(values[0])} to ${digits(values.at(-1))}${unit}, ${moment(from)} to ${moment(to)}; `
    + plural(inside.length, "reconfiguration");
  const svg = makeSvg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": summary,
  });
  for (const share of [0, 0.5, 1]) {
    const at = 4 + share * (HEIGHT - 8);
    svg.append(makeSvg("line", { x1: 0, x2: WIDTH, y1: at, y2: at, class: "grid" }));
  }
  svg.append(makeSvg("path", { d: parts.map(under).join(""), class: "area" }));
  for (const [at, text] of inside) {
    const mark = makeSvg("line", { x1: x(at), x2: x(at), y1: 0, y2: HEIGHT, class: "mark" });
    mark.append(makeSvg("title", {}, text));
    svg.append(mark);
  }
  svg.append(makeSvg("path", { d: parts.map((part) => `M${line(part)}h0`).join(""), class: "curve" }));
  const axis = make("div", { class: "axis", "aria-hidden": "true" },
    make("span", {}, short(high)), make("span", {}, short((high + low) / 2)), make("span", {}, short(low)));
  figure.replaceChildren(
    make("figcaption", {}, make("b", {}, rests?.text ?? short(values.at(-1)) + unit)),
    make("div", { class: "plot" }, axis, svg),
    make("div", { class: "times", "aria-hidden": "true" }, make("span", {}, moment(from)), make("span", {}, moment(to))),
  );
}
