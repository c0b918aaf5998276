// From the fields of a form to a request, and its answer event by event.

import { $ } from "./dom.js";
import { stream } from "./api.js";
import { Tally } from "./answer.js";

export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

/** What every request of this page asks for: tokens as they come, where each came from, and the numbers at the end. */
const STREAMED = {
  stream: true,
  stream_options: { include_usage: true, include_provenance: true },
  timings_per_token: true,
};

/** The number in a field; undefined where it is empty, so that the server's own default holds. */
export function numberIn(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : Number(text);
}

export function bodyOf(kind, prompt, messages, options) {
  const what = kind === "chat" ? { messages } : { prompt };
  const given = Object.entries({ ...what, ...options }).filter(([, value]) => value !== undefined);
  return { ...Object.fromEntries(given), ...STREAMED };
}

/**
 * Runs a request to its end.
 *
 * `listener(tokens, seconds, tally)` is told of each event. The recording says when each token came, in seconds since
 * the request was sent.
 */
export async function run(kind, body, signal, listener = () => {}) {
  const started = performance.now();
  const tally = new Tally();
  const recording = [];
  let said = "";
  for await (const event of stream(PATHS[kind], body, signal)) {
    const seconds = (performance.now() - started) / 1e3;
    const tokens = tally.add(event);
    const choice = event.choices[0];
    said += choice?.delta?.content ?? choice?.text ?? "";
    if (tokens.length) recording.push({ seconds, tokens });
    listener(tokens, seconds, tally);
  }
  return { tally, recording, said, seconds: (performance.now() - started) / 1e3 };
}

/** The same request for a terminal. The key is left to a variable: it belongs into no history. */
export function asCurl(kind, body, withKey) {
  const { stream_options: _, timings_per_token: __, ...plain } = body;
  const url = new URL(PATHS[kind], document.baseURI);
  const quoted = JSON.stringify(plain, null, 2).replaceAll("'", "'\\''");
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $FORERUN_API_KEY"' : "";
  return `curl -N ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}
