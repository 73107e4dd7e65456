// The page: keeps one document up to date from the live stream, and draws it.

import { renderCheckpoints } from "./checkpoints.js";
import { drawChart } from "./charts.js";
import { byId, count, digits, duration, fillPairs, iso, knownUsd, make, moment, percent, plural, setText, short, usd, words } from "./format.js";
import { chosenJob, renderJobs, stoppedJobs } from "./jobs.js";
import { renderDetails, renderMap, selectedNode, unselect } from "./map.js";
import { renderOrders } from "./orders.js";
import { apply, ask, follow, followAnew, setToken, token } from "./stream.js";
import { renderTimeline } from "./timeline.js";

const EVENTS_MAX = 200;
const MEASURED_MS = 15_000;
const LOST_SHOWN_S = 600;
const LOST_MAX = 8;
const STALLED_S = 10;
const STALLED_STEPS = 3;
const YEAR_S = 365 * 86_400;
const ENDED = ["done", "failed", "cancelled"];
const RESTING = ["queued", "paused", ...ENDED];
const MOODS = { running: "good", held: "bad", waiting: "wait", planning: "wait", opening: "wait", starting: "wait", stopping: "wait", closing: "wait" };
const CAUSES = { training: "good", idle_in_plan: "calm", step_under_way: "calm", unused: "calm", no_job: "calm", paused: "calm", held: "bad", lost: "bad", slow_node: "bad", unobserved: "bad" };

const view = { doc: {}, hello: {}, samples: [], events: [], moves: [], movesOf: "", timeline: null, skew: 0, asked: "", isDue: false, isMapDue: true, isNew: true, chosen: null, eventsOf: null };
/** Seconds as the events have them. */
const tenths = (seconds) => `${seconds.toFixed(1)} s`;
const cents = (dollars) => (dollars < 0.005 ? `$${digits(dollars, 1)}` : usd(dollars));
const now = () => Date.now() / 1000 + view.skew;

// ---- the stream ---------------------------------------------------------------------------

function draw() {
  if (view.isDue) return;
  view.isDue = true;
  requestAnimationFrame(() => {
    view.isDue = false;
    render();
  });
}

const kinds = {
  hello(value) {
    view.hello = value;
    view.skew = value.now - Date.now() / 1000;
  },
  patch(value) {
    view.isMapDue ||= view.isNew || changesMap(value);
    if (view.isNew && view.eventsOf !== view.chosen) Object.assign(view, { events: [], eventsOf: view.chosen });
    view.doc = apply(view.isNew ? {} : view.doc, value);
    view.isNew = false;
    if (view.doc.job && view.doc.job.id !== view.movesOf) Object.assign(view, { moves: [], movesOf: view.doc.job.id, timeline: null });
    fetchOnce();
  },
  samples(value) {
    view.samples = value.all ? value.rows : [...view.samples, ...value.rows];
  },
  events(value) {
    const known = new Set(view.events.map((each) => each.id));
    const fresh = value.filter((each) => !known.has(each.id));
    view.events = lasting([...fresh.reverse(), ...view.events]).slice(0, EVENTS_MAX);
    const last = view.moves.at(-1)?.generation ?? 0;
    if (fresh.some((each) => each.job === view.movesOf && each.generation > last)) askAgainSoon();
  },
};

/** Events, newest first, without those that the next one of their job replaces, as sailord leaves them out at first. */
function lasting(events) {
  const next = new Map();
  return events.filter((each) => {
    const after = next.get(each.job);
    if (after && (each.is_detail || each.kind === "checkpoint_committed" || (each.job && said(after) === said(each)))) return false;
    next.set(each.job, each);
    return true;
  });
}
const said = (event) => event.text.replace(/^held: /, "");

/** Most patches only tell of steps; looking at thousands of nodes for those takes too long. */
function changesMap(patch) {
  const isJobs = patch.job === null || ["id", "phase"].some((key) => key in (patch.job ?? {})) || "first" in patch;
  return isJobs || ["nodes", "kinds", "plan", "counts", "capacity"].some((key) => key in patch);
}

/** The timing of a move is stored a moment after its event; and the planner may be busy. */
function askAgainSoon(pause = 1500) {
  clearTimeout(view.again);
  view.again = setTimeout(() => { view.asked = ""; fetchOnce(); }, pause);
}

/** What is needed once for each plan: its schedule, and the moves so far. */
async function fetchOnce() {
  const { job, plan } = view.doc;
  const key = `${job?.id} ${job?.generation?.number} ${plan?.sha}`;
  if (!job || key === view.asked) return;
  view.asked = key;
  const isOutdated = () => view.asked !== key;
  const path = `/v1/jobs/${encodeURIComponent(job.id)}`;
  try {
    const { moves } = await ask(`${path}/moves`);
    if (isOutdated()) return;
    Object.assign(view, { moves, movesOf: job.id });
    draw();
    if (plan && (view.timeline?.sha256 !== plan.sha || !view.timeline.timeline)) {
      const timeline = await ask(`${path}/timeline`);
      if (isOutdated()) return;
      view.timeline = { ...timeline, readAt: Date.now() };
      draw();
      if (!timeline.timeline) askAgainSoon(10_000);
    }
  } catch {
    // The stream says whether sailord answers.
    if (!isOutdated()) askAgainSoon(5_000);
  }
}

/** Another measured step beside the predicted one, which stays. */
async function fetchMeasured() {
  const { job, plan } = view.doc;
  const known = view.timeline;
  if (!job || !known?.timeline || known.sha256 !== plan?.sha || document.hidden) return;
  try {
    const { sha256, measured } = await ask(`/v1/jobs/${encodeURIComponent(job.id)}/timeline?predicted=false`);
    if (view.timeline !== known || sha256 !== known.sha256) return;
    view.timeline = { ...known, measured, readAt: Date.now() };
    draw();
  } catch {
    // The stream says whether sailord answers.
  }
}
setInterval(fetchMeasured, MEASURED_MS);

function setConnection(state, detail = "") {
  const box = byId("connection");
  if (box.dataset.state !== state) {
    box.dataset.state = state;
    view.lostAt = Date.now();
    setText(box, { live: "live", lost: "connection lost", connecting: "connecting", denied: "not signed in" }[state]);
    draw();
  }
  document.body.dataset.connection = state;
  const banner = byId("banner");
  banner.hidden = state !== "lost";
  if (state === "lost") setText(banner, `Connection lost at ${moment(view.lostAt / 1000)}: ${detail}. What is shown is of then; trying again.`);
}

function signIn(why) {
  return new Promise((resolve) => {
    const dialog = byId("sign-in");
    if (sessionStorage.getItem("sailor-token")) setText(byId("sign-in-why"), `Not signed in: ${why}.`);
    byId("sign-in-form").onsubmit = () => {
      setToken(byId("token").value.trim());
      byId("token").value = "";
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
  });
}

token(); // Before the address is read: it takes the token out of that.
view.chosen = chosenJob();
addEventListener("hashchange", () => {
  token();
  if (view.chosen === chosenJob()) return;
  view.chosen = chosenJob();
  followAnew();
  draw();
});
// The fragment stays the job's.
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});

follow({
  path: () => (view.chosen ? `/v1/live?job=${encodeURIComponent(view.chosen)}` : "/v1/live"),
  begin() {
    view.isNew = true; // Until the first patch the last document stays in sight.
    view.asked = "";
    view.timeline = null; // Another leader measures the ranks of a schedule that it was asked for.
  },
  event(kind, value) {
    kinds[kind]?.(value);
    draw();
  },
  async state(state, detail) {
    setConnection(state, detail);
    if (state === "denied") await signIn(detail);
  },
});

// ---- drawing ------------------------------------------------------------------------------

function render() {
  const { doc, hello } = view;
  setText(byId("cluster"), hello.cluster ?? "");
  setText(byId("person"), hello.role ? [hello.name, hello.role].filter((each, i, all) => each && all.indexOf(each) === i).join(", ") : "");
  renderJobs(doc, view.chosen);
  renderNow(doc);
  if (view.isMapDue) {
    view.isMapDue = false;
    renderMap(doc, showDetails);
  } else if (selectedNode()) {
    renderDetails(doc);
  }
  renderOrders(doc, hello.role, selectedNode());
  renderCharts(doc);
  renderTimeline(doc, view.timeline);
  renderGoodput(doc.goodput);
  renderMoney(doc);
  renderMoves();
  renderReasons(doc.plan?.why ?? []);
  renderCheckpoints(doc, now());
  renderEvents(doc);
  renderLost(doc);
}

function showDetails() {
  renderDetails(view.doc);
  renderOrders(view.doc, view.hello.role, selectedNode());
  byId("details-close").focus();
}

function stepSeconds(job) {
  return job?.measured?.iteration_s ?? job?.predicted?.iteration_s ?? null;
}

/** Until the last step, at the present speed; undefined where there is none, as while the job is held. */
function secondsLeft(job) {
  const seconds = job?.measured?.iteration_s;
  return job?.steps && seconds ? Math.max(job.steps - job.step, 0) * seconds : undefined;
}

/** What the job cost until now, and for how long its budget pays; undefined unless it ends before the job is done. */
function spentNow(job) {
  const spent = job?.spent;
  const rate = spent?.usd_per_hour;
  const since = spent ? Math.max(now() - (spent.until ?? now()), 0) : 0;
  const soFar = (spent?.usd ?? 0) + ((rate ?? 0) * since) / 3600;
  const paid = spent?.usd_max && rate ? (Math.max(spent.usd_max - soFar, 0) * 3600) / rate : undefined;
  const left = secondsLeft(job);
  const isFirst = left === undefined ? !job?.steps : paid < left;
  return { soFar, since, paid: isFirst ? paid : undefined };
}

function renderNow(doc) {
  const { job } = doc;
  const queue = doc.queued ? ` ${plural(doc.queued, "job")} queued.` : "";
  setText(byId("job"), job?.id ?? view.chosen ?? "No job");
  const phase = job?.phase?.name ?? job?.state ?? (view.chosen ? "unknown" : stoppedJobs(doc).length ? "paused" : "idle");
  setText(byId("phase"), job?.question && phase === "running" ? "running, planning" : phase);
  byId("phase").dataset.mood = MOODS[phase] ?? "calm";
  document.title = job ? `${job.id} ${phase}${job.steps && job.step !== undefined ? ` ${Math.floor((100 * job.step) / job.steps)} %` : ""} · Sailor` : "Sailor";
  setText(byId("why"), whyText(job, doc) + queue);
  setText(byId("next"), nextText(job));
  const isKnown = job?.step !== undefined;
  byId("progress-box").hidden = !job?.steps || !isKnown;
  if (job?.steps && isKnown) byId("progress").value = Math.min(job.step / job.steps, 1);
  const left = secondsLeft(job) ?? NaN;
  const { paid } = spentNow(job);
  const rate = rateNow(doc);
  const predicted = job?.predicted?.tokens_per_s;
  fillPairs(byId("figures"), (job && !job.phase ? restingFigures(job) : job ? [
    ["step", count(job.step), (job.steps ? `of ${count(job.steps)}` : "no end is set") + stalledNote(job)],
    ["loss", job.measured?.loss === undefined ? "–" : digits(job.measured.loss, 4), "last step"],
    ["throughput", rate ? short(rate) : "–", `${job.unit}/s${predicted ? `, predicted ${short(predicted)}` : ""}`],
    paid !== undefined ? ["budget ends in", duration(paid), paid < YEAR_S ? `at ${moment(now() + paid)}${Number.isFinite(left) ? `, at about step ${count(job.step + Math.floor(paid / job.measured.iteration_s))}` : ""}` : "at this price"] :
    ["done in", Number.isFinite(left) ? duration(left) : "–", left < YEAR_S ? `at ${moment(now() + left)}` : Number.isFinite(left) ? "at this speed" : "not known yet"],
    ["now", job.spent?.usd_per_hour === undefined ? "–" : usd(job.spent.usd_per_hour), job.spent?.usd_per_hour === undefined ? "a price is unknown" : "an hour"],
    ["durable", job.durable_step === undefined ? "–" : `step ${count(job.durable_step)}`, durableNote(job)],
    ["at risk", plural(stepsSince(job, job.safe_step ?? job.durable_step), "step"), `if one node is lost; ${plural(stepsSince(job, job.durable_step), "step")} if all are`],
    ["goodput", goodputNow(doc.goodput), "of paid GPU time"],
  ] : []).concat(doc.problems ? [["problems", ...problemsFigure(doc.problems.length)]] : []));
  setText(byId("leader"), doc.leads && doc.leader ? `Leader: ${doc.leader}${doc.led_since ? `, since ${moment(doc.led_since)}` : ""}.` : "");
  const troubles = [...(doc.problems ?? []).map((text, index) => `${text}${sinceNote(doc, index)}`), ...(job?.troubles ?? []), ...(job?.drift ?? [])];
  const box = byId("troubles");
  box.hidden = troubles.length === 0;
  if (box.dataset.key !== troubles.join("\n")) {
    box.dataset.key = troubles.join("\n");
    box.replaceChildren(...troubles.slice(0, 8).map((text) => make("li", {}, text)));
  }
}

function problemsFigure(known) {
  if (document.body.dataset.connection === "lost") return [known ? count(known) : "–", `as of ${moment(view.lostAt / 1000)}; the present ones are not known`];
  return known ? [count(known), "see below"] : ["none", "nothing needs a person"];
}

/** Since when a problem stands; one that a new leader found may be older. */
function sinceNote(doc, index) {
  const since = doc.problems_since?.[index];
  return since === undefined ? "" : ` · since ${moment(since)}${since === doc.led_since ? " or earlier" : ""}`;
}

/** Of a job that waits in the queue or for an operator, or has ended. */
const restingFigures = (job) => [
  ["step", job.step === undefined ? "–" : count(job.step), job.steps ? `of ${count(job.steps)}` : "no end is set"],
  ["durable", job.durable_step === undefined ? "–" : `step ${count(job.durable_step)}`, job.uri ? "" : "the job names no storage"],
];

/** Said when no step ended for much longer than a step takes: the number alone does not tell. */
function stalledNote(job) {
  const since = now() - job.step_at;
  return job.step_at && since > Math.max(STALLED_S, STALLED_STEPS * (stepSeconds(job) ?? 0)) ? `; none for ${duration(since)}` : "";
}

function whyText(job, doc) {
  if (doc.leads === undefined) return "";
  if (!doc.leads) return "No leader is elected; this is what the last one knew. Training goes on.";
  const stopped = stoppedJobs(doc);
  if (!job && view.chosen) return "No job of this name is known.";
  if (!job) return stopped.length ? `${stopped.join(", ")} ${stopped.length === 1 ? "is" : "are"} paused.` : "Nothing to train: submit a job with sailorctl submit.";
  if (job.state === "held") return `Held until an operator resumes it: ${job.reason}`;
  if (!job.phase) return `${words(job.state)}${job.place ? `, number ${job.place} of the queue` : ""}${job.reason ? `: ${job.reason}` : ""}.${job.place ? waitText(doc, job) : ""}`;
  const last = job.generation ? `Generation ${job.generation.number} on ${plural(job.generation.members, "node")}; it began for this reason: ${job.generation.reason}.` : "";
  if (job.question) return `${last} Planning: ${job.question}.`;
  return job.phase?.reason && job.phase.name !== "running" ? `${last} ${words(job.phase.name)}: ${job.phase.reason}.` : last;
}

const stepsSince = (job, step) => Math.max(job.step - (step ?? 0), 0);

function durableNote(job) {
  if (!job.uri) return "the job names no storage";
  const risk = stepsSince(job, job.durable_step);
  const age = job.durable_at ? `, ${duration(Math.max(now() - job.durable_at, 0))} ago` : "";
  return `${plural(risk, "step")} since${age}`;
}

/** What comes next, and which nodes the job cannot do without, in the words of `status`. */
function nextText(job) {
  const coming = (job?.next ?? []).map(([before, at, after]) => `${before}${at ? duration(Math.max(at - now(), 0)) : ""}${after}`);
  const told = coming.length ? `Next: ${coming.join("; ")}.` : "";
  return job?.needed ? `${told} W${job.needed.slice(1)}.` : told;
}

/** Whom a queued job waits for, and when the cluster may be free. */
function waitText(doc, job) {
  const rows = Object.entries(doc.jobs ?? {}).filter(([id, row]) => id !== job.id && !RESTING.includes(row.state));
  const before = (doc.order ?? []).filter((id) => doc.jobs[id]?.state === "queued").slice(0, job.place - 1);
  const told = rows.map(([id, row]) => {
    const left = row.steps && row.step_s ? Math.max(row.steps - row.step, 0) * row.step_s : NaN;
    return `${id} (${row.state}${left >= 0 ? `, done in ${duration(left)} at its speed` : ""})`;
  });
  const all = [...told, ...before];
  return all.length ? ` It waits for ${all.join(", ")}.` : "";
}

function rateNow(doc) {
  const { job, plan } = doc;
  if (job?.measured?.tokens_per_s) return job.measured.tokens_per_s;
  const seconds = job?.measured?.iteration_s;
  return seconds && plan?.per_iteration ? plan.per_iteration / seconds : null;
}

const goodputNow = (goodput) => (goodput?.goodput === undefined ? "–" : percent(goodput.goodput));

function renderCharts(doc) {
  const marks = view.moves.map((move) => [move.at + move.total_s, `generation ${move.generation}: ${move.reason}`]);
  const losses = view.samples.filter((row) => row[2] !== null).map((row) => [row[0], row[2]]);
  // Ten seconds at a time, so that a chart at rest is not drawn anew at each moment.
  const at = !doc.job || rateNow(doc) || ENDED.includes(doc.job.state) ? null : Math.floor(now() / 10) * 10;
  drawChart(byId("loss"), { points: losses, marks, unit: "", empty: "No loss was reported yet.", rests: at && { at } });
  const per = doc.plan?.per_iteration;
  const rates = [];
  view.samples.forEach((row, index) => {
    const before = view.samples[index - 1];
    if (row[3] !== null) rates.push([row[0], row[3]]);
    else if (before && per && row[4] === before[4] && row[0] > before[0]) rates.push([row[0], (per * (row[1] - before[1])) / (row[0] - before[0])]);
  });
  drawChart(byId("speed"), { points: rates, marks, unit: ` ${doc.job?.unit ?? "tokens"}/s`, floor: 0, empty: "No speed was measured yet.", rests: at && { at, text: "–" } });
}

function renderGoodput(goodput) {
  const causes = Object.entries(goodput?.causes ?? {}).sort((a, b) => b[1][0] - a[1][0]);
  const all = causes.reduce((sum, [, [seconds]]) => sum + seconds, 0);
  if (!all) return;
  const shares = causes.map(([name, [seconds, cost, text, label]]) => ({ name, share: seconds / all, seconds, hours: seconds / 3600, cost, text, label }));
  setText(byId("goodput-note"), `since ${moment(goodput.since)}: what each paid second of ${plural(goodput.gpus, "GPU")} was spent on${unpricedNote(goodput)}`);
  const bar = byId("goodput-bar");
  bar.setAttribute("aria-label", shares.slice(0, 5).map((each) => `${each.label} ${percent(each.share)}`).join(", "));
  const key = shares.map((each) => each.name + each.share.toFixed(3)).join();
  if (bar.dataset.key !== key) {
    bar.dataset.key = key;
    bar.replaceChildren(...shares.filter((each) => each.share > 0.002).map((each) => {
      const part = make("span", { "data-mood": CAUSES[each.name] ?? "wait", title: `${each.label} ${percent(each.share)}: ${each.text}` });
      part.style.flexGrow = each.share;
      return part;
    }));
  }
  const body = byId("goodput").tBodies[0];
  const names = shares.map((each) => each.name).join();
  if (body.dataset.names !== names) {
    body.dataset.names = names;
    body.replaceChildren(...shares.map((each) => make("tr", {},
      make("th", { scope: "row" }, make("span", { class: "dot", "data-mood": CAUSES[each.name] ?? "wait", "aria-hidden": "true" }), each.label,
        make("small", {}, each.text)),
      make("td", { class: "number" }), make("td", { class: "number" }), make("td", { class: "number" }))));
  }
  shares.forEach((each, index) => {
    const cells = body.rows[index].cells;
    setText(cells[1], percent(each.share));
    setText(cells[2], each.hours.toFixed(2));
    cells[2].title = `${each.seconds} GPU s`;
    setText(cells[3], knownUsd(each.cost, goodput.unpriced_gpu_s > 0));
  });
  renderShares(goodput);
}

/** The ledger by day, then by job; null is what is older than both. */
function renderShares(goodput) {
  const rows = [...(goodput.days ?? []), ...(goodput.jobs ?? [])];
  const body = byId("shares").tBodies[0];
  const key = JSON.stringify(rows);
  if (body.dataset.key === key) return;
  body.dataset.key = key;
  body.replaceChildren(...rows.map(([name, share, seconds, cost]) => make("tr", {},
    make("th", { scope: "row" }, name === null ? "earlier" : name || "no job"),
    make("td", { class: "number" }, share === null ? "–" : percent(share)),
    make("td", { class: "number", title: `${seconds} GPU s` }, (seconds / 3600).toFixed(2)),
    make("td", { class: "number" }, knownUsd(cost, goodput.unpriced_gpu_s > 0)))));
}

/** GPU time that is in no dollars. */
const unpricedNote = (goodput) => (goodput?.unpriced_gpu_s ? `; ${digits(goodput.unpriced_gpu_s / 3600, 2)} GPU h at unknown prices are not in the dollars` : "");

function renderMoney(doc) {
  const { job, capacity, goodput } = doc;
  const spent = job?.spent;
  const rate = spent?.usd_per_hour;
  const { soFar, since, paid } = spentNow(job);
  const unpriced = (spent?.unpriced_s ?? 0) + (rate === undefined ? since : 0);
  const seconds = secondsLeft(job);
  const left = seconds !== undefined && rate !== undefined ? (seconds * rate) / 3600 : undefined;
  const isUnpriced = goodput?.unpriced_gpu_s > 0;
  fillPairs(byId("money"), [
    ["this job so far", job ? knownUsd(soFar, unpriced > 0 || rate === undefined) : "",
      (spent?.usd_max ? `of ${usd(spent.usd_max)}` : "no budget is set") + (unpriced >= 1 ? `; without ${duration(unpriced)} at unknown prices` : "")],
    ["to come", job ? knownUsd(left) : "", left !== undefined ? `${usd(soFar + left)} in all, at its last step, at this speed${paid === undefined ? "" : `; its budget ends before, in ${duration(paid)}`}` : rate === undefined ? "a price is unknown" : "not known yet"],
    ["its plan", job ? knownUsd(rate) : "", rate === undefined ? "a price is unknown" : "an hour"],
    ["all nodes", goodput ? knownUsd(goodput.usd, isUnpriced) : "", `since ${goodput?.since ? moment(goodput.since) : "the start"}${unpricedNote(goodput)}`],
    ["all nodes now", goodput ? knownUsd(goodput.usd_per_hour, isUnpriced) : "", isUnpriced ? "an hour, where the price is known" : "an hour"],
    ["rented so far", capacity ? usd(capacity.spent_usd) : "", capacity?.stop ? `budget: ${capacity.stop}` : "by the provider's prices"],
  ]);
}

/** What the planner said of its plan: its bottleneck, and what it was chosen from. */
function renderReasons(reasons) {
  const box = byId("reasons");
  box.hidden = reasons.length === 0;
  const key = reasons.join("\n");
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.lastElementChild.replaceChildren(...reasons.map((each) => make("li", {}, each)));
}

function renderMoves() {
  const key = [view.movesOf, ...view.moves.map((move) => move.generation)].join();
  const list = byId("moves");
  setText(byId("moves-note"), view.moves.length ? "Newest first. Downtime: between the last step before and the first one after, less the time of a step. The bar: all phases, of which some run while it still trains." : "None yet.");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...view.moves.slice(-20).reverse().map((move) => {
    const cost = move.kind === "start" ? `started in ${tenths(move.total_s)}`
      : `${plural(move.steps_lost, "step")} lost, ${tenths(move.downtime_s)} downtime, predicted ${tenths(move.predicted_s)}${move.usd ? `, ${cents(move.usd)}` : ""}`;
    const whole = move.phases.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const bar = make("span", { class: "stack thin", role: "img", "aria-label": move.phases.map(([name, seconds]) => `${words(name)} ${duration(seconds)}`).join(", ") },
      ...move.phases.map(([name, seconds], index) => {
        const part = make("span", { "data-shade": index % 4, title: `${words(name)} ${duration(seconds)}` });
        part.style.flexGrow = seconds / whole;
        return part;
      }));
    return make("li", {}, "began ", make("time", { datetime: iso(move.at) }, moment(move.at)), make("b", {}, ` generation ${move.generation} `), cost,
      make("span", { class: "note" }, move.reason), bar);
  }));
}

/** Nodes that were lost lately and did not come back: sailord forgets them once the job has moved. */
function renderLost(doc) {
  const here = new Set(Object.values(doc.nodes ?? {}).map((node) => node.name));
  const lost = new Map();
  for (const each of view.events) {
    const isRecent = each.kind === "node_lost" && each.at > now() - LOST_SHOWN_S;
    if (isRecent && !here.has(each.node) && !lost.has(each.node)) lost.set(each.node, each);
  }
  const list = byId("lost");
  const key = [...lost.values()].map((each) => each.id).join();
  list.hidden = lost.size === 0;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...[...lost.values()].slice(0, LOST_MAX).map((each) => make("li", {},
    make("span", { class: "glyph", "data-mood": "bad", "aria-hidden": "true" }, "✕"),
    make("time", { datetime: iso(each.at) }, moment(each.at)), ` ${each.text}`)));
}

function renderEvents(doc) {
  const list = byId("events");
  const order = view.events.find((each) => each.kind === "order");
  setText(byId("last-order"), order ? `Last order, at ${moment(order.at)}: ${order.text}.` : "");
  const shown = doc.job?.id;
  const key = `${view.eventsOf} ${shown} ${view.events.length} ${view.events[0]?.id}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...view.events.map((each) => make("li", { "data-kind": each.kind },
    make("time", { datetime: iso(each.at) }, moment(each.at)), make("span", {}, `${each.job && each.job !== shown ? `${each.job}: ` : ""}${each.text}`),
    make("small", {}, each.step === null ? "" : `step ${count(each.step)}`))));
}

byId("checkpoints-box").addEventListener("toggle", draw);
byId("details-close").addEventListener("click", unselect);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("details").hidden && !document.querySelector("dialog[open]")) unselect();
});
setInterval(draw, 5000);
