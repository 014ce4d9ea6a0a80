// Talks to the server: streams of events, and errors as sentences for a person.

import { serverState } from "./states.js";

/** An error with a title, a sentence, and whether trying again may help. */
export class Problem extends Error {
  constructor(title, detail, { status = 0, retryable = false, seconds = 0 } = {}) {
    super(detail);
    Object.assign(this, { title, detail, status, retryable, seconds });
  }
}

const KEY = "foredraft-key";

/** The API key that was typed into this tab, or "". */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Keeps a key for this tab's life. */
export function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Storage is forbidden: there is no key then.
  }
}

/** Fetches with the key; throws a Problem for anything but success. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  // A header holds ASCII alone, as the keys of a server do: one with anything else is sent as one that it does not know.
  if (apiKey()) headers.authorization = `Bearer ${apiKey().replace(/[^ -~]/g, "?")}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached", "It may be stopped, or the connection is gone.", { retryable: true });
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw problem(response.status, body.error ?? {}, Number(response.headers.get("retry-after")) || 0);
  }
  return response;
}

/** A GET's JSON. */
export async function get(path) {
  return (await call(path)).json();
}

function problem(status, error, seconds) {
  const detail = error.message ?? `The server answered with status ${status}.`;
  const about = { status, seconds, retryable: Boolean(error.retryable) };
  if (error.code === "context_length_exceeded") {
    return new Problem("The prompt is too long", `Shorten it, or ask for fewer tokens. The server says: ${detail}`, about);
  }
  const title = {
    400: error.param ? `The server refuses “${error.param}”` : "The server refuses the request",
    401: "The server asks for an API key",
    403: "The API key may not do that",
    404: "The model is not served here",
    413: "The prompt is too large",
    429: "The server is full right now",
    503: "No model is ready",
    504: "It took too long",
  }[status];
  if (status === 429 && seconds) {
    return new Problem(title, `Try again in ${seconds} s. The server says: ${detail}`, { ...about, retryable: true });
  }
  if (status === 503) {
    return new Problem(title, `It is starting, or was lost a moment ago; this page tells when it is back. (${detail})`, about);
  }
  return new Problem(title ?? "Something went wrong", detail, about);
}

/** POSTs a body and yields the objects of the event stream that answers; throws a Problem for an error among them. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The connection broke", "The text so far is kept.", { retryable: true });
    }
    if (read.done) throw new Problem("The stream ended early", "The text so far is kept.", { retryable: true });
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const item = JSON.parse(data);
      if (item.error) throw problem(statusOf(item.error), item.error, 0);
      yield item;
    }
  }
}

// An error inside a stream has no status of its own.
function statusOf(error) {
  const known = { overloaded: 429, queue_timeout: 503, unavailable: 503, deadline_exceeded: 504, context_length_exceeded: 400 };
  return known[error.code] ?? 500;
}

/** Calls back with {state, text} now and whenever the server's state is asked again. */
export function watchHealth(callback, seconds = 4) {
  let failures = 0;
  let wasReady = false;
  async function ask() {
    if (!document.hidden) {
      try {
        callback(await stateNow());
        [failures, wasReady] = [0, true];
      } catch (problem) {
        failures += 1;
        const text = wasReady ? "verifier lost" : "loading the model";
        callback({ state: "down", text: problem.status === 503 ? text : "not reachable" });
      }
    }
    setTimeout(ask, (failures ? 1 : seconds) * 1000);
  }
  ask();
}

async function stateNow() {
  try {
    return serverState(await get("/dashboard/figures"));
  } catch (problem) {
    if (problem.status !== 401) throw problem;
  }
  // Whoever has no key may know less.
  const health = await get("/health");
  const away = health.draft_available ? "a verifier lost" : "draft not there";
  return health.status === "ok" ? { state: "ok", text: "ready" } : { state: "degraded", text: `ready, ${away}` };
}
