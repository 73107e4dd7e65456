// Orders of an operator: each is confirmed, and named by an id, so that it takes effect once.

import { byId, make, setText } from "./format.js";
import { stoppedJobs } from "./jobs.js";
import { ask } from "./stream.js";

const NODE = {
  drain: ["Drain", "The job moves off it at the end of a step; no step is lost."],
  preempt: ["Announce preemption", "As a cloud's notice would: it will be gone in 30 s."],
  withdraw: ["Withdraw notice", "The node stays."],
  cordon: ["Cordon", "New plans leave it out; what runs there goes on."],
  uncordon: ["Uncordon", "New plans may use it again."],
};
const JOB = {
  pause: ["Pause", "It stops at the end of a step, after its state is saved; the next job gets the cluster."],
  budget: ["Raise the budget of", "The job does not go on by itself: resume it then."],
  resume: ["Resume", "It goes on from its last state."],
  replan: ["Plan again", "sailord looks for a better plan now."],
  checkpoint: ["Checkpoint", "The newest snapshot is made durable now."],
};
const NOTICE_S = 30;

export function renderOrders(doc, role, node) {
  const may = role === "operator" || role === "admin";
  const job = doc.job;
  const ofJobs = [];
  if (may && job) {
    ofJobs.push(...kindsOf(job).map((kind) => [kind, job.id]));
  } else if (may) {
    ofJobs.push(...stoppedJobs(doc).slice(0, 3).map((id) => ["resume", id]));
  }
  fill(byId("job-orders"), ofJobs.map(([kind, id]) => [kind, JOB, `/v1/jobs/${encodeURIComponent(id)}/${kind}`, id]));
  const here = node && doc.nodes?.[node];
  const ofNode = [];
  if (may && here && here.state !== "lost") {
    ofNode.push(...(here.state === "draining" ? ["withdraw"] : ["drain", "preempt"]), here.cordoned ? "uncordon" : "cordon");
  }
  fill(byId("node-orders"), ofNode.map((kind) => [kind, NODE, `/v1/nodes/${encodeURIComponent(node)}/${kind}`, here.name]));
}

function kindsOf({ state, phase, uri, spent }) {
  if (["held", "paused", "failed"].includes(state)) return [spent?.unpaid ? "budget" : "resume"];
  if (phase) return ["pause", "replan", ...(uri ? ["checkpoint"] : [])];
  return state === "queued" ? ["pause"] : [];
}

function fill(box, orders) {
  const key = JSON.stringify(orders.map(([kind, , path]) => [kind, path]));
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren(...orders.map(([kind, table, path, target]) => {
    const button = make("button", { type: "button", "data-order": kind }, orders.length > 1 || table === NODE ? table[kind][0] : `${table[kind][0]} ${target}`);
    button.addEventListener("click", () => confirm(kind, table, path, target));
    return button;
  }));
}

function confirm(kind, table, path, target) {
  const dialog = byId("confirm");
  const [name, text] = table[kind];
  setText(byId("confirm-title"), `${name}: ${target}?`);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), name);
  byId("reason").value = byId("usd").value = "";
  const isBudget = kind === "budget";
  byId("usd-box").hidden = !isBudget;
  byId("usd").required = isBudget;
  byId("confirm-problem").hidden = true;
  const id = `page-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
  byId("confirm-no").onclick = () => dialog.close();
  byId("confirm-form").onsubmit = async (event) => {
    event.preventDefault();
    const body = { id, reason: byId("reason").value };
    if (kind === "preempt") body.notice_s = NOTICE_S;
    if (isBudget) body.max_usd_total = byId("usd").valueAsNumber;
    try {
      await ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
      dialog.close();
    } catch (error) {
      setText(byId("confirm-problem"), error.message);
      byId("confirm-problem").hidden = false;
    }
  };
  dialog.showModal();
}
