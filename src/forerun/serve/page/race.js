// The race: the same request plainly and with drafts. Is it the same answer, and how much sooner is it there?

import { $, h, number, percent, plural, say, show, still } from "./dom.js";
import { explained, postJson } from "./api.js";
import { TokenView } from "./answer.js";
import { bodyOf, numberIn, PATHS, run } from "./request.js";
import { hold, release } from "./live.js";

const WARM_UP = 4; // tokens
const LONGEST_REPLAY = 12; // seconds; a longer race is shown faster, and says so
const WAYS = ["plain", "speculative"];
const NEAR = 0.25; // of a logit: two steps of bfloat16 at a logit of 16 (assumed, not measured here)
const EXACT = ["float32", "float64"];

let server = null;
let running = null;
let known = false;
let latest = null; // results of the race that was run last
let replaying = 0; // its number; a replay whose number is no longer this one ends
const lanes = {};

export function setUp() {
  for (const way of WAYS) lanes[way] = new Lane($(`lane-${way}`), way);
  $("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  $("race-stop").addEventListener("click", stop);
  $("race-again").addEventListener("click", () => replay(latest));
}

export function know(info) {
  server = info;
  const drafts = info.speculative_config.some((one) => one.name !== "vanilla");
  $("race-start").disabled = !drafts;
  show($("race-no-drafter"), !drafts);
  show($("race-chat-field"), info.chat_template);
  if (!known) $("race-chat").checked = info.chat_template;
  known = true;
  $("race-verify-mode").options[0].textContent = `default (${info.verify_mode})`;
}

export function stop() {
  running?.abort();
  replaying += 1;
}

export async function race() {
  if (running || $("race-start").disabled || !$("race-form").reportValidity()) return;
  replaying += 1;
  const bodies = requests();
  begin();
  hold(); // the charts' own requests would take part of the machine from whoever runs
  try {
    const results = $("race-together").checked ? await together(bodies) : await inTurn(bodies);
    latest = results;
    await judge(results, bodies.speculative);
    show($("race-again"));
    if (!$("race-together").checked && !still()) replay(results);
  } catch (error) {
    running.abort(); // where both run and one has failed
    for (const lane of Object.values(lanes)) lane.cease();
    progress(error.name === "AbortError" ? "Stopped." : "");
    if (error.name !== "AbortError") failed(explained(error));
  } finally {
    release();
    running = null;
    busy(false);
  }
}

function begin() {
  running = new AbortController();
  busy(true);
  show($("race-again"), false);
  show($("verdict"), false);
  for (const lane of Object.values(lanes)) lane.clear();
}

function busy(is) {
  if (!is && document.activeElement === $("race-stop")) $("race-start").focus(); // what is disabled loses the focus
  $("race-start").setAttribute("aria-disabled", String(is));
  $("race-stop").disabled = !is;
}

function requests() {
  const chat = $("race-chat").checked && server?.chat_template;
  const prompt = $("race-prompt").value;
  // One seed for both: in coupled mode it decides every token.
  const seed = numberIn("race-seed") ?? Math.floor(Math.random() * 2 ** 31);
  const common = {
    max_tokens: numberIn("race-max-tokens"),
    temperature: numberIn("race-temperature"),
    seed,
    ignore_eos: $("race-ignore-eos").checked || undefined,
    verify_mode: $("race-verify-mode").value || undefined,
    return_token_ids: true,
  };
  const k = numberIn("race-draft-length");
  const kind = chat ? "chat" : "completion";
  const make = (speculative) => bodyOf(kind, prompt, [{ role: "user", content: prompt }], { ...common, speculative });
  return { kind, plain: make(false), speculative: make(k === undefined ? undefined : { max_draft: k }) };
}

/** Alone, one after the other. Which goes first is drawn by lot. */
async function inTurn(bodies) {
  const order = Math.random() < 0.5 ? WAYS : [...WAYS].reverse();
  for (const way of order) {
    progress("Warming up…");
    await run(bodies.kind, own({ ...bodies[way], max_tokens: WARM_UP }), running.signal);
  }
  const results = {};
  for (const [i, way] of order.entries()) {
    progress(`Run ${i + 1} of 2: ${way}…`);
    results[way] = await measured(bodies, way);
  }
  progress(`Measured one after the other, ${order[0]} first.`);
  return results;
}

async function together(bodies) {
  progress("Both at once…");
  const [plain, speculative] = await Promise.all(WAYS.map((way) => measured(bodies, way)));
  progress("Measured at once: they shared the machine, so both were slower than alone.");
  return { plain, speculative };
}

async function measured(bodies, way) {
  const lane = lanes[way];
  lane.start();
  const show = (tokens, seconds, tally) => lane.add(tokens, seconds, tally);
  const result = await run(bodies.kind, own(bodies[way]), running.signal, show);
  lane.finish(result);
  return result;
}

/** With a salt of its own, so that nobody finds the other's prompt in the prefix cache. */
function own(body) {
  return { ...body, cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-") };
}

function progress(text) {
  $("race-progress").textContent = text;
  if (text) say(text);
}

function failed(message) {
  verdict("bad", "The race could not be run", message);
}

// -------------------------------------------------------------------------------------------------------- the verdict

/** Index of the first token that differs; -1: the answers are the same. */
export function firstDifference(one, other) {
  const until = Math.max(one.length, other.length);
  for (let i = 0; i < until; i++) if (one[i] !== other[i]) return i;
  return -1;
}

async function judge(results, body) {
  const [plain, drafted] = WAYS.map((way) => results[way].tally);
  const at = firstDifference(plain.ids, drafted.ids);
  const mode = body.verify_mode ?? server.verify_mode;
  const greedy = (body.temperature ?? server.sampling_defaults.temperature ?? 1) < 1e-5;
  if (at < 0) {
    verdict("good", "Identical", `All ${plural(plain.ids.length, "token")} are the same, id by id.`);
  } else if (greedy || mode === "coupled") {
    await explainDifference(plain, drafted, at, greedy);
  } else {
    verdict("fair", "Differs, as separate draws may", OTHER_DRAWS);
  }
  lanes.plain.markFrom(at);
  lanes.speculative.markFrom(at);
  compare(results);
}

const OTHER_DRAWS =
  "With this temperature in rejection mode what is promised is that both texts are drawn from the same law, not that " +
  "they are the same; this race cannot tell. Choose temperature 0 or coupled mode to compare token by token, or run `forerun verify` " +
  "to test the law itself.";
const A_BUG = "They should be identical. Please report this as a bug, with the prompt, the seed and the models.";

/** What must not be in float32 may be in half precision, if the target itself was nearly undecided. */
async function explainDifference(plain, drafted, at, greedy) {
  const title = `Differs from token ${at + 1} on`;
  if (EXACT.includes(server.dtype)) return verdict("bad", title, A_BUG);
  const rounding = `In ${server.dtype} a step with several rows may round otherwise than one with a single row.`;
  const gap = greedy ? await apart(plain.prompt, plain.ids.slice(0, at), plain.ids[at], drafted.ids[at]) : null;
  if (gap === null)
    return verdict(
      "fair",
      title,
      `${rounding} \`forerun verify\` tells whether that explains it; in float32 the answers are identical.`,
    );
  const said = `The target itself has the two tokens ${number(gap, 3)} apart (log-probability)`;
  if (gap < NEAR)
    return verdict(
      "fair",
      `Differs at a near tie, from token ${at + 1} on`,
      `${rounding} ${said}: such a tie is decided by rounding. In float32 the answers are identical.`,
    );
  return verdict("bad", title, `${said}, more than rounding explains. ${A_BUG}`);
}

/** How far apart the target has two tokens behind the same text, in log-probability; null where it cannot be asked. */
async function apart(prompt, common, ...tokens) {
  if (!prompt || tokens.includes(undefined)) return null; // one of them has ended there
  try {
    const scores = await Promise.all(tokens.map((token) => scored([...prompt, ...common, token])));
    return Math.abs(scores[0] - scores[1]);
  } catch {
    return null; // such as a text that fills the whole context: the verdict does without
  }
}

async function scored(ids) {
  const asked = { prompt: ids, max_tokens: 0, echo: true, logprobs: 0 };
  return (await postJson(PATHS.completion, asked)).choices[0].logprobs.token_logprobs.at(-1);
}

function verdict(kind, title, text) {
  const box = $("verdict");
  box.className = `card verdict ${kind}`;
  box.replaceChildren(h("h2", {}, title), h("p", {}, text), h("div", { id: "race-bars" }));
  show(box);
  say(`${title}. ${text}`);
}

function compare(results) {
  const seconds = WAYS.map((way) => results[way].seconds);
  const each = WAYS.map((way) => results[way].tally.perSecond);
  const longest = Math.max(...seconds);
  const bars = WAYS.map((way, i) => {
    const bar = h("span", { class: `bar ${way}` });
    bar.style.width = `${(100 * seconds[i]) / longest}%`;
    return h(
      "li",
      {},
      h("span", { class: "name" }, way),
      h("span", { class: "track" }, bar),
      h("span", { class: "value" }, `${number(seconds[i], 2)} s`),
    );
  });
  const gain = each[0] && each[1] ? each[1] / each[0] : null;
  const faster =
    gain === null ? "" : `${number(gain, 2)}× the tokens per second (${number(each[1])} against ${number(each[0])})`;
  const words = gain !== null && gain < 1 ? `${faster}: drafting did not pay here.` : faster;
  $("race-bars").replaceChildren(h("ul", { class: "bars" }, ...bars), h("p", { class: "gain" }, words));
}

// --------------------------------------------------------------------------------------------------------- the replay

/** Shows both recordings from one start, on one clock. */
function replay(results) {
  const mine = (replaying += 1);
  const longest = Math.max(...WAYS.map((way) => results[way].seconds));
  const pace = Math.max(1, longest / LONGEST_REPLAY);
  const started = performance.now();
  for (const way of WAYS) lanes[way].rewind(results[way]);
  const said = $("race-progress").textContent.split(" Replay")[0];
  $("race-progress").textContent =
    `${said} Replay from one start${pace > 1 ? `, at ${number(pace)} × the speed` : ""}.`;
  const tick = () => {
    if (mine !== replaying) return WAYS.forEach((way) => lanes[way].forward(Infinity));
    const now = (pace * (performance.now() - started)) / 1e3;
    for (const way of WAYS) lanes[way].forward(now);
    return now < longest ? requestAnimationFrame(tick) : undefined;
  };
  requestAnimationFrame(tick);
}

class Lane {
  constructor(root, way) {
    this.root = root;
    this.clock = h("span", { class: "clock" }, "–");
    this.output = h("div", {
      class: "output",
      role: "group",
      "aria-label": `Answer, ${way}; the arrow keys go from token to token`,
    });
    this.view = new TokenView(this.output);
    this.facts = h("p", { class: "hint" });
    root.append(
      h(
        "header",
        {},
        h("h2", {}, way === "plain" ? "Plain" : "Speculative"),
        h("span", { class: "spacer" }),
        this.clock,
      ),
      this.output,
      this.facts,
    );
  }

  clear() {
    this.result = null;
    this.marked = -1;
    this.view.clear();
    this.clock.textContent = "–";
    this.facts.textContent = "";
    this.root.classList.remove("done", "running");
  }

  start() {
    this.root.classList.add("running");
  }

  /** It runs no more, though it has not come to its end. */
  cease() {
    this.root.classList.remove("running");
  }

  add(tokens, seconds, tally) {
    this.view.add(tokens);
    this.clock.textContent = `${number(seconds, 2)} s`;
    this.facts.textContent = `${plural(tally.ids.length, "token")}, ${number(tally.perSecond)} tokens / s`;
  }

  finish({ tally, seconds }) {
    this.view.flush();
    this.root.classList.remove("running");
    this.root.classList.add("done");
    this.clock.textContent = `${number(seconds, 2)} s`;
    const length = tally.acceptedLength === null ? "" : `, accepted length ${number(tally.acceptedLength, 2)}`;
    const kept = tally.verified ? `, ${percent(tally.accepted / tally.verified)} of the drafts kept` : "";
    this.facts.textContent = `${plural(tally.ids.length, "token")} in ${plural(tally.steps, "step")}, ${number(tally.perSecond)} tokens / s${length}${kept}`;
  }

  rewind(result) {
    this.left = [...result.recording];
    this.result = result;
    this.view.clear();
    this.root.classList.remove("done");
    this.root.classList.add("running");
  }

  forward(now) {
    if (!this.result) return; // another race has begun
    while (this.left.length && this.left[0].seconds <= now) this.view.add(this.left.shift().tokens);
    if (now < this.result.seconds) {
      this.clock.textContent = `${number(now, 2)} s`;
    } else if (this.root.classList.contains("running")) {
      this.finish(this.result);
      this.markFrom(this.marked);
    }
  }

  /** Frames the first token that differs; -1: none does. */
  markFrom(place) {
    this.marked = place;
    this.view.nodes[place]?.classList.add("differs");
  }
}
