// The jobs, each a link that chooses it: #job=NAME can be shared, and survives a reload.

import { byId, count, digits, make, plural, setText, words } from "./format.js";

/** The job that the address names; null: the first one that runs. */
export const chosenJob = () => new URLSearchParams(location.hash.slice(1)).get("job") || null;

/** The job whose work a node does, if that is not the one that is shown. */
export function otherJob(doc, node) {
  const owner = node.job ?? doc.first;
  return owner && owner !== doc.job?.id && (node.taking ?? "idle") !== "idle" ? owner : "";
}

/** Those that an operator can resume, and that do not have the cluster. */
export const stoppedJobs = (doc) => (doc.order ?? []).filter((id) => ["paused", "held"].includes(doc.jobs?.[id]?.state));

export function renderJobs(doc, chosen) {
  const ids = (doc.order ?? []).filter((id) => doc.jobs?.[id]);
  const shown = chosen ?? doc.job?.id;
  byId("jobs").hidden = ids.length < 2 && !chosen;
  const list = byId("jobs").querySelector("ul");
  const key = JSON.stringify([ids, shown, chosen]);
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    const focused = list.contains(document.activeElement) ? document.activeElement.hash : null;
    list.replaceChildren(
      ...ids.map((id) => make("li", {}, link(id, id, id === shown), make("span"))),
      ...(chosen ? [make("li", {}, link("", "the first job that runs", false))] : []),
    );
    const links = [...list.querySelectorAll("a")];
    if (focused !== null) (links.find((each) => each.hash === focused) ?? links[0])?.focus();
  }
  ids.forEach((id, index) => setText(list.children[index].lastChild, `: ${textOf(doc.jobs[id])}`));
}

const link = (id, text, isShown) => make("a", { href: `#job=${encodeURIComponent(id)}`, "aria-current": isShown && "true" }, text);

function textOf({ state, step, steps, nodes, step_s: seconds }) {
  const parts = [words(state)];
  if (step !== undefined) parts.push(`step ${count(step)}${steps ? ` of ${count(steps)}` : ""}`);
  if (seconds) parts.push(`${digits(seconds, 2)} s each`);
  if (nodes) parts.push(plural(nodes, "node"));
  return parts.join(", ");
}
