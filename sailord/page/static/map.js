// The map: zones, their nodes, and which layers each computes.

import { byId, count, fillPairs, layerText, make, moment, plural, rangesText, setText, words } from "./format.js";
import { otherJob } from "./jobs.js";
import { ask } from "./stream.js";

const COMPACT_FROM = 120;
const LOSS_EVERY_MS = 2000;
const GLYPHS = { good: "●", wait: "◐", calm: "○", bad: "✕", leave: "⚑", other: "◇" };
const LEGEND = [
  ["good", "trains"], ["wait", "moves, or boots"], ["calm", "unused, or its job is held"], ["leave", "draining"], ["bad", "lost or unfit"],
  ["other", "of another job"],
];

const tiles = new Map();
let zonesShown = "";
let selected = null;
let loss = { id: null, askedAt: 0, text: "" };

/** By node: the parts of the plan that it computes. */
export function partsByNode(plan) {
  const found = new Map();
  plan?.pipelines.forEach((pipeline, p) => {
    pipeline.stages.forEach((stage, s) => {
      for (const place of stage.places ?? [stage]) {
        if (!place.node) continue;
        const parts = found.get(place.node) ?? [];
        parts.push({ pipeline: p, stage: s, of: pipeline.stages.length, layers: stage.layers, tp: stage.tp, devices: place.devices ?? [] });
        found.set(place.node, parts);
      }
    });
  });
  return found;
}

const isHeld = (job) => job?.phase?.name === "held";

export function moodOf(node, part, job, other) {
  if (["lost", "suspect", "unreadable"].includes(node.state)) return "bad";
  if (node.state === "draining") return "leave";
  if (node.state === "slow" || (node.why && node.state !== "ready")) return "bad";
  if (other) return "other";
  if (part && isHeld(job)) return "calm";
  if (part && node.taking === "running") return "good";
  if (part || node.state === "joining") return "wait";
  return "calm";
}

export function renderMap(doc, onSelect) {
  const parts = partsByNode(doc.plan);
  const ids = Object.keys(doc.nodes ?? {});
  const isCompact = ids.length >= COMPACT_FROM;
  const byZone = new Map();
  for (const id of ids) {
    const zone = doc.kinds[doc.nodes[id].kind]?.[0] || "unknown zone";
    if (!byZone.has(zone)) byZone.set(zone, []);
    byZone.get(zone).push(id);
  }
  const zones = [...byZone.keys()].sort();
  for (const zone of zones) {
    byZone.get(zone).sort((a, b) => doc.nodes[a].name.localeCompare(doc.nodes[b].name, "en", { numeric: true }));
  }
  const layout = JSON.stringify([isCompact, zones.map((zone) => [zone, byZone.get(zone)])]);
  if (layout !== zonesShown) {
    zonesShown = layout;
    layOut(zones, byZone, isCompact, onSelect);
  }
  for (const id of ids) update(id, doc, parts.get(id), isCompact);
  for (const zone of zones) setText(byId(`zone-${zones.indexOf(zone)}`), zoneText(zone, byZone.get(zone), doc, parts));
  setText(byId("counts"), countsText(doc));
  const legend = LEGEND.filter(([mood]) => mood !== "other" || ids.some((id) => otherJob(doc, doc.nodes[id])));
  if (byId("legend").childElementCount !== legend.length) {
    byId("legend").replaceChildren(...legend.map(([mood, text]) =>
      make("li", {}, make("span", { class: "glyph", "data-mood": mood, "aria-hidden": "true" }, GLYPHS[mood]), text)));
  }
  if (selected) renderDetails(doc, parts);
}

function layOut(zones, byZone, isCompact, onSelect) {
  const focused = document.activeElement?.dataset?.id;
  const known = new Set();
  byId("map").replaceChildren(...zones.map((zone, index) => {
    const list = make("ul", { class: isCompact ? "tiles compact" : "tiles", "aria-labelledby": `zone-${index}` });
    byZone.get(zone).forEach((id, place) => {
      known.add(id);
      let tile = tiles.get(id);
      if (!tile) {
        const button = make("button", { type: "button", class: "node", "data-id": id });
        button.addEventListener("click", () => { selected = id; onSelect(); });
        tile = { button, shown: "" };
        tiles.set(id, tile);
      }
      tile.button.tabIndex = place === 0 ? 0 : -1;
      list.append(make("li", {}, tile.button));
    });
    list.addEventListener("keydown", walk);
    return make("section", { class: "zone" }, make("h3", { id: `zone-${index}` }), list);
  }));
  for (const id of tiles.keys()) if (!known.has(id)) tiles.delete(id);
  if (focused && tiles.has(focused)) tiles.get(focused).button.focus();
}

/** Arrow keys walk through the nodes of a zone, so that Tab leaves it in one step. */
function walk(event) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const buttons = [...event.currentTarget.querySelectorAll("button")];
  const here = buttons.indexOf(document.activeElement);
  let next = here + (steps[event.key] ?? NaN);
  if (event.key === "Home") next = 0;
  if (event.key === "End") next = buttons.length - 1;
  if (!buttons[next]) return;
  event.preventDefault();
  buttons[here].tabIndex = -1;
  buttons[next].tabIndex = 0;
  buttons[next].focus();
}

function update(id, doc, parts, isCompact) {
  const tile = tiles.get(id);
  const node = doc.nodes[id];
  const part = parts?.[0];
  const other = otherJob(doc, node);
  const mood = moodOf(node, part, doc.job, other);
  const [, machine, gpu, gpus] = doc.kinds[node.kind] ?? ["", "", "", 0];
  const work = (parts ?? []).map((each) => layerText(each.layers));
  const layers = [...new Set(work)].join(", ");
  const shown = JSON.stringify([mood, node, other, layers, part?.stage, part?.of, isCompact]);
  if (tile.shown === shown) return;
  tile.shown = shown;
  const button = tile.button;
  button.dataset.mood = mood;
  button.style.setProperty("--depth", part && part.of > 1 ? (part.stage / (part.of - 1)).toFixed(2) : "0");
  button.dataset.works = part ? "yes" : "no";
  const state = stateText(node, other, !!part && isHeld(doc.job));
  button.setAttribute("aria-label", `${node.name}: ${state}, ${gpus} ${gpu}, ${layers || "no layers"}`);
  button.title = `${node.name} · ${machine} · ${state}${layers ? ` · ${layers}` : ""}`;
  if (isCompact) {
    button.replaceChildren();
  } else {
    button.replaceChildren(
      make("span", { class: "glyph", "data-mood": mood, "aria-hidden": "true" }, GLYPHS[mood]),
      make("span", { class: "name" }, node.name),
      make("span", { class: "what" }, `${gpus} × ${gpu}`),
      make("span", { class: "what" }, [node.slow && "slow", part && isHeld(doc.job) && "held", layers || state].filter(Boolean).join(": ")),
    );
  }
}

function stateText(node, other, isHeldHere = false) {
  if (node.state !== "ready") return node.state;
  if (isHeldHere) return "its job is held";
  const what = node.taking === "running" ? "trains" : words(node.taking ?? "ready");
  return other ? `${other}: ${what}` : what;
}

/** A ready node that no plan uses. */
const isFree = (id, doc, parts) => doc.nodes[id].state === "ready" && !doc.nodes[id].cordoned && !parts.has(id) && !otherJob(doc, doc.nodes[id]);

function zoneText(zone, ids, doc, parts) {
  const gpus = ids.reduce((sum, id) => sum + (doc.nodes[id].state === "lost" ? 0 : doc.kinds[doc.nodes[id].kind]?.[3] ?? 0), 0);
  const free = ids.filter((id) => isFree(id, doc, parts)).length;
  return `${zone} · ${plural(ids.length, "node")}, ${plural(gpus, "GPU")}${free ? `, ${plural(free, "node")} unused` : ""}`;
}

function countsText(doc) {
  const counts = Object.entries(doc.counts ?? {}).map(([state, number]) => `${count(number)} ${state}`);
  const rented = doc.capacity ? `; rented: ${doc.capacity.up} of ${doc.capacity.wanted} wanted` : "";
  const slow = Object.values(doc.nodes ?? {}).filter((node) => node.slow).map((node) => node.name);
  const speed = !doc.job ? "" : slow.length ? `; slow: ${slow.join(", ")}` : "; no node was found slow";
  const resting = doc.capacity?.resting ? `; ${plural(doc.capacity.resting, "pool")} in cooldown after a refusal` : "";
  return (counts.join(", ") || "no node has joined yet") + speed + rented + resting;
}

export const selectedNode = () => selected;
export function unselect() {
  const tile = tiles.get(selected);
  selected = null;
  byId("details").hidden = true;
  tile?.button.focus();
}

export function renderDetails(doc, parts = partsByNode(doc.plan)) {
  const node = doc.nodes?.[selected];
  byId("details").hidden = false;
  if (!node) {
    fillPairs(byId("details-facts"), [["state", "it no longer exists"]]);
    return;
  }
  const [zone, machine, gpu, gpus, spot] = doc.kinds[node.kind];
  setText(byId("details-name"), node.name);
  const mine = parts.get(selected);
  fillPairs(byId("details-facts"), [
    ["state", stateText(node, otherJob(doc, node), parts.has(selected) && isHeld(doc.job)) + (node.safe ? ", safe to stop" : "")],
    ["why", node.why],
    ["ends", node.leaves_at ? moment(node.leaves_at) : ""],
    ["machine", `${machine}, ${gpus} × ${gpu}${spot ? ", Spot" : ""}`],
    ["zone", zone],
    ["computes", (mine ?? []).map(partText).join("; ")],
    ["if it died now", node.state === "lost" ? "" : lossText(selected, () => renderDetails(doc, parts))],
  ]);
}

/** As in "GPU 0–3: layers 0–12, pipeline 1, stage 0, TP 4"; the plan may leave the choice of GPUs to the node. */
function partText({ devices, layers, pipeline, stage, tp }) {
  const where = devices.length ? `GPU ${rangesText(devices)}: ` : "";
  return `${where}${layerText(layers)}, pipeline ${pipeline}, stage ${stage}${tp > 1 ? `, TP ${tp}` : ""}`;
}

/** What the job would lose with a node: asked for while its details are open, since it changes with each step. */
function lossText(id, onAnswer) {
  const isKnown = loss.id === id;
  if (!isKnown || Date.now() > loss.askedAt + LOSS_EVERY_MS) {
    loss = { id, askedAt: Date.now(), text: isKnown ? loss.text : "…" };
    const asked = loss;
    ask(`/v1/nodes/${encodeURIComponent(id)}`).then(
      (found) => found.nodes[0]?.loss?.text ?? "nothing: no job has begun",
      (error) => `not known: ${error.message}`,
    ).then((text) => {
      asked.text = text;
      if (loss === asked && selected === id) onAnswer();
    });
  }
  return loss.text;
}
