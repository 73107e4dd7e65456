// Where the last state is, and a list of all checkpoints, which is read from their storage only while it is open.

import { byId, bytes, count, duration, make, setText } from "./format.js";
import { ask } from "./stream.js";

const EVERY_MS = 10_000;
const SHOWN_MAX = 20;
let asked = { key: "", job: "", at: 0 };

export function renderCheckpoints(doc, now) {
  const { job } = doc;
  const box = byId("checkpoints-box");
  box.hidden = !job?.uri;
  setText(byId("checkpoints-note"), noteText(job, now));
  if (box.hidden || !box.open) return;
  const key = `${job.id} ${job.durable_step}`;
  if (key === asked.key || (asked.job === job.id && Date.now() < asked.at + EVERY_MS)) return;
  if (asked.job !== job.id) byId("checkpoints").tBodies[0].replaceChildren();
  const mine = { key, job: job.id, at: Date.now() };
  asked = mine;
  ask(`/v1/jobs/${encodeURIComponent(job.id)}/checkpoints`).catch((error) => {
    mine.key = "";
    return { checkpoints: [], unreadable: [], trouble: error.message };
  }).then((found) => {
    if (asked.job === mine.job) fill(found);
  });
}

function noteText(job, now) {
  if (!job) return "";
  if (!job.uri) return "The job names no storage: its state is in the memory of its nodes only.";
  if (job.durable_step === undefined) return `None yet; they will be in ${job.uri}`;
  const age = job.durable_at ? `, written ${duration(Math.max(now - job.durable_at, 0))} ago` : "";
  return `Step ${count(job.durable_step)} is durable${age}, in ${job.uri}`;
}

const STATES = { newest: "durable; the job goes on from here if its nodes lose their copies", ordered: "durable; a rollback to it is ordered", older: "durable", discarded: "durable, but a rollback left its steps" };

function fill({ checkpoints, unreadable, trouble, unfinished_bytes: unfinished }) {
  const now = Date.now() / 1000;
  const rows = checkpoints.toReversed().slice(0, SHOWN_MAX).map((each) => [
    count(each.step), count(each.generation), bytes(each.bytes), each.at ? `${duration(Math.max(now - each.at, 0))} ago` : "–",
    STATES[each.role] + (each.is_pinned ? "; pinned: it is not deleted" : ""),
  ]);
  if (unfinished) rows.unshift(["", "", bytes(unfinished), "", "uploading, or an upload that was abandoned"]);
  const rest = checkpoints.length - Math.min(checkpoints.length, SHOWN_MAX);
  if (rest > 0) rows.push(["", "", "", "", `${count(rest)} older ones`]);
  rows.push(...unreadable.map((each) => [count(each.step), count(each.generation), "", "", `cannot be read: ${each.why}`]));
  if (trouble) rows.push(["", "", "", "", trouble]);
  byId("checkpoints").tBodies[0].replaceChildren(...rows.map(([step, generation, size, age, note]) => make("tr", {},
    make("th", { scope: "row" }, step), make("td", { class: "number" }, generation), make("td", { class: "number" }, size), make("td", {}, age), make("td", {}, note))));
}
