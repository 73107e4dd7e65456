// Numbers, moments and durations as text; and small helpers for the document.

export const byId = (id) => document.getElementById(id);

/** Set an element's text, only if it differs: screen readers and layout notice every change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make an element with attributes and children; no text is ever parsed as HTML. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function makeSvg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Fill a list of terms and values; what did not change stays. */
export function fillPairs(list, pairs) {
  const shown = pairs.filter((pair) => pair[1] !== "" && pair[1] !== null && pair[1] !== undefined);
  const names = shown.map((pair) => pair[0]).join("\n");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...shown.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  shown.forEach(([, value, note], index) => {
    const cell = list.children[index].lastChild;
    const text = String(value);
    if (note === undefined) {
      setText(cell, text);
    } else if (cell.dataset.text !== `${text}\n${note}`) {
      cell.dataset.text = `${text}\n${note}`;
      cell.replaceChildren(text, make("small", {}, note));
    }
  });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => whole.format(value);
export const short = (value) => (Math.abs(value) < 10000 ? digits(value) : compact.format(value));
export const digits = (value, most = 3) =>
  value === 0 ? "0" : new Intl.NumberFormat("en", { maximumSignificantDigits: most }).format(value);
export const usd = (value) =>
  `$${new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(value)}`;
/** Dollars; a zero that stands for time at unknown prices is no price. */
export const knownUsd = (value, isUnpriced) => (value === undefined || (isUnpriced && value === 0) ? "–" : usd(value));
export const bytes = (value) => {
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), 4);
  return `${digits(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
export const percent = (share) => `${(share * 100).toFixed(1)} %`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds < 0.0995) return `${digits(seconds * 1000, 2)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 2 * 86400) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** A moment in the reader's own time zone; the day only if it is another one. */
export function moment(at, now = Date.now() / 1000) {
  const date = new Date(at * 1000);
  const sameDay = date.toDateString() === new Date(now * 1000).toDateString();
  return sameDay ? clock.format(date) : `${day.format(date)} ${clock.format(date)}`;
}

export const iso = (at) => new Date(at * 1000).toISOString();
export const words = (name) => name.replaceAll("_", " ");

/** Layers first to end - 1, as people count them: from 0. */
export const layerText = ([first, end]) => (end - first === 1 ? `layer ${first}` : `layers ${first}–${end - 1}`);

/** Whole numbers with runs joined, as in "0–3, 6". */
export function rangesText(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const run = runs.at(-1);
    if (run && number === run[1] + 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}
