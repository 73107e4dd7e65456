// One step of the pipeline: each stage group's passes as predicted, and below them as its first rank measured them.

import { byId, duration, layerText, make, makeSvg, plural, setText } from "./format.js";

const WIDTH = 1000;
const ROW = 22;
const GAP = 6;
const MEASURED_ROW = 16;
const SUMS = 5;
const NAMES_MAX = 4;

export function renderTimeline(doc, found) {
  const box = byId("timeline");
  const plan = doc.plan;
  if (!plan) {
    setText(byId("timeline-note"), doc.job && !doc.job.phase ? "The job does not run." : "There is no plan yet.");
    box.replaceChildren();
    byId("timeline-box").hidden = true;
    box.dataset.key = "";
    return;
  }
  const measured = doc.job?.measured?.iteration_s;
  const predicted = doc.job?.predicted?.iteration_s;
  const times = [predicted && `predicted ${duration(predicted)}`, measured && `measured ${duration(measured)}`].filter(Boolean);
  const pipelines = plan.pipelines.length;
  const drawn = found?.timeline?.pipelines.length;
  const both = found?.sha256 === plan.sha && found.timeline ? found : null;
  const step = both?.measured;
  setText(byId("timeline-note"), `${plural(pipelines, "pipeline")}; ${times.join(", ") || "nothing was predicted"}`
    + (step ? `; below the predicted rows: step ${step.step} as measured ${duration(step.age_s + (Date.now() - both.readAt) / 1000)} ago` : "")
    + (drawn && found.timeline.shapes > drawn ? `; ${drawn} of ${found.timeline.shapes} different ones are drawn` : "")
    + (found?.why_none ? `; no schedule: ${found.why_none}` : ""));
  const busy = doc.busy ?? {};
  const key = JSON.stringify([plan.sha, found?.sha256, !!found?.timeline, step?.step, busy]);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const drawing = both?.timeline.pipelines.map((each, index) => ({ each, rows: step?.pipelines[index]?.groups ?? [] })) ?? [];
  const length_s = both ? Math.max(both.timeline.iteration_s, step?.length_s ?? 0) : 0;
  box.replaceChildren(...drawing.map((one) => drawPipeline(one, length_s, doc, busy)), ...(both ? [legend()] : []));
  byId("timeline-box").hidden = !both;
  byId("timeline-table").tBodies[0].replaceChildren(...drawing.flatMap(tableRows));
}

/** The names of the nodes that compute a stage of these pipelines, as in " on a1, b1". */
function nodesOf(doc, pipelines, number) {
  const stages = pipelines.map((pipeline) => doc.plan.pipelines[pipeline]?.stages[number]).filter(Boolean);
  const ids = stages.flatMap((stage) => stage.places ?? [stage]).map((place) => place.node).filter(Boolean);
  const names = [...new Set(ids)].map((id) => doc.nodes?.[id]?.name ?? id.split(".")[0]);
  const rest = names.length - NAMES_MAX;
  return names.length ? ` on ${names.slice(0, NAMES_MAX).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}` : "";
}

const nameOf = (each) => each.numbers.length === 1 ? `pipeline ${each.numbers[0]}` : `pipeline ${each.numbers[0]}, and ${each.numbers.length - 1} more like it`;

function drawPipeline({ each, rows }, length_s, doc, busy) {
  const pitch = ROW + GAP + (rows.length ? MEASURED_ROW + GAP : 0);
  const height = each.groups.length * pitch;
  const x = (seconds) => (seconds / length_s) * WIDTH;
  const svg = makeSvg("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${nameOf(each)}: ${rows.length ? "predicted and measured" : "predicted"} passes of ${plural(each.groups.length, "stage")} over ${duration(length_s)}`,
  });
  svg.style.height = `${height}px`;
  const labels = make("ul", { class: "stages" });
  each.groups.forEach((group, row) => {
    const top = row * pitch;
    svg.append(makeSvg("rect", { x: 0, y: top, width: WIDTH, height: ROW, class: "idle" }));
    svg.append(...sums(group, x, top + ROW - SUMS, ""));
    svg.append(...bars(group, x, top, ROW - SUMS - 1, ""));
    const measured = rows[row];
    if (measured && !measured.why_none) {
      svg.append(makeSvg("rect", { x: 0, y: top + ROW + 2, width: WIDTH, height: MEASURED_ROW, class: "idle" }));
      const below = top + ROW + 2;
      const drawn = [...sums(measured, x, below + MEASURED_ROW - SUMS, "measured: "), ...bars(measured, x, below, MEASURED_ROW - SUMS - 1, "measured ")];
      svg.append(makeSvg("g", { class: "measured" }, ...drawn));
    }
    const [is, was] = busy[group.rank] ?? [];
    const compared = is === undefined ? "" : ` computes ${duration(is)}${was ? `, predicted ${duration(was)}` : ""}`;
    const item = make("li", {}, make("b", {}, layerText(group.layers)), ` ${group.gpu}${group.tp > 1 ? ` × ${group.tp}` : ""}`,
      make("small", {}, nodesOf(doc, each.numbers, group.stage), compared));
    if (measured) item.append(make("small", { class: "measured", title: measured.why_none }, measured.why_none ? `not measured: ${measured.why_none}` : `below: rank ${measured.rank}, measured`));
    item.style.height = `${pitch}px`;
    labels.append(item);
  });
  return make("div", { class: "pipeline" }, make("h3", {}, nameOf(each)), make("div", { class: "rows" }, labels, svg));
}

function sums(group, x, y, which) {
  return (group.sync ?? []).map(([start, end]) => bar("sync", x(start), x(end), y, SUMS, `${which}gradients are summed`));
}

function bars(group, x, top, height, which) {
  const found = group.passes.map(([kind, start, end, batch]) => {
    const name = kind === "F" ? "forward" : "backward";
    return bar(name, x(start), x(end), top, height, `${which}${name} of micro batch ${batch}: ${duration(end - start)}`);
  });
  const [start, end] = group.update;
  return end === undefined ? found : [...found, bar("update", x(start), x(end), top, height, `${which}optimizer step`)];
}

/** What the picture shows, in numbers: from when to when each stage computes, and for how long. */
function tableRows({ each, rows }) {
  const cells = (group) => {
    const passes = group?.passes ?? [];
    const sum = passes.reduce((seconds, [, start, end]) => seconds + end - start, 0);
    const texts = passes.length ? [`${duration(passes[0][1])} to ${duration(passes.at(-1)[2])}`, duration(sum)] : [group?.why_none || "–", "–"];
    return texts.map((text) => make("td", { class: "number" }, text));
  };
  return each.groups.map((group, row) => make("tr", {},
    make("th", { scope: "row" }, `${nameOf(each)}: ${layerText(group.layers)}`), ...cells(group), ...cells(rows[row])));
}

function bar(kind, from, to, y, height, text) {
  const rect = makeSvg("rect", { x: from.toFixed(2), y, width: Math.max(to - from, 0.3).toFixed(2), height, class: kind });
  rect.append(makeSvg("title", {}, text));
  return rect;
}

const legend = () => make("ul", { class: "legend", "aria-label": "Colours of the schedule" },
  ...["forward", "backward", "update", "sync", "idle"].map((kind) =>
    make("li", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }),
      { forward: "forward", backward: "backward", update: "optimizer step", sync: "gradients are summed", idle: "waits" }[kind])));
