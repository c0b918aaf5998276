// The server's own API, as any client uses it. Paths are relative, so that the page also works behind a prefix.

const STORED = "forerun-key";
let key = read();
let refused = () => {};

/** What an answer that is an error says; `status` is 0 where nobody answered. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch {
    // Storage can be forbidden; the key then lasts until the page is loaded again.
  }
}

export const hasKey = () => key !== "";

/** `listener` is called whenever the server wants another key. */
export function onRefused(listener) {
  refused = listener;
}

export async function getJson(path) {
  return (await call(path)).json();
}

export async function getText(path) {
  return (await call(path)).text();
}

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Whether the server answers at all, and has loaded its model. */
export async function isReady() {
  try {
    return (await fetch("health", { cache: "no-store" })).ok;
  } catch {
    throw new ApiError(0, "The server does not answer");
  }
}

/** The events of a stream, as objects. Ends when `signal` is aborted, by throwing an AbortError. */
export async function* stream(path, body, signal) {
  const answer = await post(path, body, signal);
  try {
    for await (const data of eventsOf(answer.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(500, event.error.message);
      yield event;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch's word for a broken connection
  }
  throw new ApiError(0, "The connection broke before the answer was complete");
}

/** The data of each server-sent event of a body. Comments (pings) are left out. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // where the reader has failed there is nothing left to cancel
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer");
  }
  if (answer.ok) return answer;
  const failure = await failureOf(answer);
  if (failure.status === 401) refused();
  throw failure;
}

async function failureOf(answer) {
  let message = answer.statusText || `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not one of ours: a proxy's page, perhaps. Its status has to do.
  }
  const after = Number(answer.headers.get("retry-after"));
  return new ApiError(answer.status, message, after > 0 ? after : null);
}

/** What to tell a person about an error, and what to do. */
export function explained(error) {
  if (!(error instanceof ApiError)) return String(error.message ?? error);
  if (error.status === 401) return "The server needs a valid API key.";
  if (error.status === 429) {
    const when = error.retryAfter ? `in ${error.retryAfter} s` : "in a moment";
    return `The server is busy: its queue is full. Try again ${when}.`;
  }
  if (error.status === 0) return `${error.message}. The page tries to reconnect by itself.`;
  if (error.status === 503) return `Not available: ${error.message}.`;
  return error.message;
}

function read() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return "";
  }
}
