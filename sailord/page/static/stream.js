// The live stream: server-sent events over fetch, which can carry a token; reconnects forever.

export const SILENT_S = 12;
const PAUSES_S = [0.25, 0.5, 1, 2, 4, 5];
const KEY = "sailor-token";

/** The token: from the address's fragment, which is never sent to a server, or of this tab. */
export function token() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("token")) {
    sessionStorage.setItem(KEY, given.get("token"));
    given.delete("token");
    history.replaceState(null, "", `${location.pathname}#${given}`.replace(/#$/, ""));
  }
  return sessionStorage.getItem(KEY);
}
export const setToken = (value) => sessionStorage.setItem(KEY, value);

export function headers() {
  const shown = token();
  return shown ? { Authorization: `Bearer ${shown}` } : {};
}

export async function ask(path, options = {}) {
  const reply = await fetch(path, { cache: "no-store", ...options, headers: { ...headers(), ...options.headers } });
  const value = await reply.json();
  if (!reply.ok) {
    const problem = value.problems?.[0];
    throw new Error(problem ? `${problem.place}: ${problem.what}; ${problem.cure}` : `status ${reply.status}`);
  }
  return value;
}

/** Apply a merge patch (RFC 7396) in place. */
export function apply(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete target[key];
    else if (isObject(value)) target[key] = apply(isObject(target[key]) ? target[key] : {}, value);
    else target[key] = value;
  }
  return target;
}
let leave = () => {};
/** Follow another path from now on, or once the stream is opened again. */
export const followAnew = () => leave();

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/**
 * Follow the stream. `on` has `path()`, `event(kind, value)`, `state(name, detail)` with one of
 * live, lost and denied, and `begin()` when a new stream begins from nothing.
 */
export async function follow(on) {
  let failures = 0;
  for (;;) {
    let why = "sailord closed the stream";
    const stop = new AbortController();
    let isElsewhere = false;
    leave = () => {
      isElsewhere = true;
      stop.abort();
    };
    try {
      let heard = Date.now();
      const watch = setInterval(() => {
        if (Date.now() - heard > SILENT_S * 1000) stop.abort();
      }, 1000);
      try {
        const reply = await fetch(on.path(), { headers: headers(), cache: "no-store", signal: stop.signal });
        if (reply.status === 401 || reply.status === 403) {
          const said = (await reply.json()).problems?.[0];
          await on.state("denied", said ? said.what : "the token is refused");
          continue;
        }
        if (!reply.ok) {
          const said = (await reply.json()).problems?.[0];
          throw Object.assign(new Error(), { refusal: said ? `${said.place}: ${said.what}` : `status ${reply.status}` });
        }
        on.begin();
        const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          heard = Date.now();
          failures = 0;
          on.state("live");
          const parts = (text + value).split("\n\n");
          text = parts.pop();
          for (const part of parts) dispatch(part, on);
        }
      } finally {
        clearInterval(watch);
        stop.abort();
      }
    } catch (error) {
      if (isElsewhere) continue;
      why = error.refusal ? `sailord refuses: ${error.refusal}` : error.name === "AbortError" ? `nothing was heard for ${SILENT_S} s` : "sailord does not answer";
    }
    on.state("lost", why);
    const pause = PAUSES_S[Math.min(failures, PAUSES_S.length - 1)];
    failures += 1;
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
  }
}

function dispatch(part, on) {
  let kind = "message";
  let data = "";
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (data) on.event(kind, JSON.parse(data));
}
