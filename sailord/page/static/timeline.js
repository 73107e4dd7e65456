// One step of the pipeline: each stage group's passes as predicted, and what its ranks measured.

import { byId, duration, layerText, make, makeSvg, plural, setText } from "./format.js";

const WIDTH = 1000;
const ROW = 22;
const GAP = 6;
const NAMES_MAX = 4;

export function renderTimeline(doc, found) {
  const box = byId("timeline");
  const plan = doc.plan;
  if (!plan) {
    setText(byId("timeline-note"), "There is no plan yet.");
    box.replaceChildren();
    box.dataset.key = "";
    return;
  }
  const measured = doc.job?.measured?.iteration_s;
  const predicted = doc.job?.predicted?.iteration_s;
  const times = [predicted && `predicted ${duration(predicted)}`, measured && `measured ${duration(measured)}`].filter(Boolean);
  const pipelines = plan.pipelines.length;
  const drawn = found?.timeline?.pipelines.length;
  setText(byId("timeline-note"), `${plural(pipelines, "pipeline")}; ${times.join(", ") || "nothing was predicted"}`
    + (drawn && found.timeline.shapes > drawn ? `; ${drawn} of ${found.timeline.shapes} different ones are drawn` : "")
    + (found?.why_none ? `; no schedule: ${found.why_none}` : ""));
  const busy = doc.busy ?? {};
  const key = JSON.stringify([plan.sha, found?.sha256, !!found?.timeline, busy]);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  if (found?.sha256 === plan.sha && found.timeline) {
    box.replaceChildren(...found.timeline.pipelines.map((each) => drawPipeline(each, found.timeline.iteration_s, doc, busy)), legend());
  } else {
    box.replaceChildren();
  }
}

/** The names of the nodes that compute a stage of these pipelines, as in " on a1, b1". */
function nodesOf(doc, pipelines, number) {
  const stages = pipelines.map((pipeline) => doc.plan.pipelines[pipeline]?.stages[number]).filter(Boolean);
  const ids = stages.flatMap((stage) => stage.places ?? [stage]).map((place) => place.node).filter(Boolean);
  const names = [...new Set(ids)].map((id) => doc.nodes?.[id]?.name ?? id.split(".")[0]);
  const rest = names.length - NAMES_MAX;
  return names.length ? ` on ${names.slice(0, NAMES_MAX).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}` : "";
}

function drawPipeline(each, iteration_s, doc, busy) {
  const height = each.groups.length * (ROW + GAP);
  const x = (seconds) => (seconds / iteration_s) * WIDTH;
  const name = each.numbers.length === 1 ? `pipeline ${each.numbers[0]}` : `pipeline ${each.numbers[0]}, and ${each.numbers.length - 1} more like it`;
  const svg = makeSvg("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: predicted passes of ${plural(each.groups.length, "stage")} over ${duration(iteration_s)}`,
  });
  svg.style.height = `${height}px`;
  const labels = make("ul", { class: "stages" });
  each.groups.forEach((group, row) => {
    const top = row * (ROW + GAP);
    svg.append(makeSvg("rect", { x: 0, y: top, width: WIDTH, height: ROW, class: "idle" }));
    for (const [start, end] of group.sync) svg.append(bar("sync", x(start), x(end), top + ROW - 5, 5, "gradients are summed"));
    for (const [kind, start, end, batch] of group.passes) {
      svg.append(bar(kind === "F" ? "forward" : "backward", x(start), x(end), top, ROW - 6,
        `${kind === "F" ? "forward" : "backward"} of micro batch ${batch}: ${duration(end - start)}`));
    }
    const [start, end] = group.update;
    svg.append(bar("update", x(start), x(end), top, ROW - 6, "optimizer step"));
    const [is, was] = busy[group.rank] ?? [];
    const compared = is === undefined ? "" : ` computes ${duration(is)}${was ? `, predicted ${duration(was)}` : ""}`;
    labels.append(make("li", {}, make("b", {}, layerText(group.layers)), ` ${group.gpu}${group.tp > 1 ? ` × ${group.tp}` : ""}`,
      make("small", {}, nodesOf(doc, each.numbers, group.stage), compared)));
  });
  return make("div", { class: "pipeline" }, make("h3", {}, name), make("div", { class: "rows" }, labels, svg));
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
