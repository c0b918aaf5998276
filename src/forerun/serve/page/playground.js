// The playground: one request at a time, its answer token by token.

import { $, chosen, copy, fillSelect, h, number, plural, say, show } from "./dom.js";
import { explained, hasKey } from "./api.js";
import { fillNumbers, numbersOf, RoundStrip, sourceLegend, TokenView } from "./answer.js";
import { asCurl, bodyOf, numberIn, run } from "./request.js";

const KEPT = 20; // answers on the page; older ones go
const SPOKEN_EVERY = 3; // seconds between two pieces of a stream that are read aloud
const REDRAWN_EVERY = 120; // milliseconds between two looks at the numbers of an answer that streams

let running = null;
let count = 0;
let conversation = [];
let known = false;

const ROUNDS = "A column is a round: full boxes were accepted, the outlined one refused, grey ones lie behind it.";
const CHAT_PROMPT = "Write a Python function that tells whether a number is prime, and explain it.";

export function setUp() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", forgetConversation);
  $("copy-curl").addEventListener("click", () => copy(asCurl(chosen("kind"), request(), hasKey()), $("copy-curl")));
  for (const radio of document.querySelectorAll('input[name="kind"]')) radio.addEventListener("change", arrange);
  $("speculative").addEventListener("change", arrange);
  arrange();
}

/** What the server can do, as soon as that is known, and again whenever another one answers. */
export function know(info) {
  const chat = document.querySelector('input[name="kind"][value="chat"]');
  chat.disabled = !info.chat_template;
  show($("no-chat"), !info.chat_template);
  if (!known && info.chat_template) {
    chat.checked = true;
    if ($("prompt").value === $("prompt").defaultValue) $("prompt").value = CHAT_PROMPT;
  } else if (!info.chat_template && chat.checked) {
    document.querySelector('input[name="kind"][value="completion"]').checked = true; // another server than before
  }
  known = true;
  const drafters = info.speculative_config.map((one) => one.name).filter((name) => name !== "vanilla");
  if ($("speculative").disabled !== !drafters.length) {
    $("speculative").disabled = !drafters.length; // at the first look, or another server than before
    $("speculative").checked = drafters.length > 0;
  }
  show($("no-drafter"), !drafters.length);
  fillSelect($("drafter"), [["", "all of them"], ...drafters.map((name) => [name, name])]);
  $("draft-length").placeholder = info.num_speculative_tokens ?? "–";
  $("draft-length").max = info.num_speculative_tokens || ""; // 0: any length
  $("verify-mode").options[0].textContent = `default (${info.verify_mode})`;
  for (const [id, name, otherwise] of [
    ["temperature", "temperature", 1],
    ["top-p", "top_p", 1],
    ["top-k", "top_k", "off"],
    ["min-p", "min_p", "off"],
  ]) {
    $(id).placeholder = info.sampling_defaults[name] ?? otherwise;
  }
  arrange();
}

function arrange() {
  const chat = chosen("kind") === "chat";
  show($("system-field"), chat);
  show($("new-chat"), chat && conversation.length > 0);
  $("prompt-label").textContent = chat ? "Message" : "Prompt";
  const drafting = $("speculative").checked && !$("speculative").disabled;
  for (const id of ["drafter", "draft-length", "threshold"]) $(id).disabled = !drafting;
}

function forgetConversation() {
  conversation = [];
  arrange();
  say("The next message begins a new chat.");
  $("prompt").focus();
}

function request() {
  const kind = chosen("kind");
  const system = $("system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...conversation,
    { role: "user", content: $("prompt").value },
  ];
  const stops = $("stops")
    .value.split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replaceAll("\\n", "\n"));
  return bodyOf(kind, $("prompt").value, messages, {
    max_tokens: numberIn("max-tokens"),
    temperature: numberIn("temperature"),
    top_p: numberIn("top-p"),
    top_k: numberIn("top-k"),
    min_p: numberIn("min-p"),
    seed: numberIn("seed"),
    stop: stops.length ? stops : undefined,
    verify_mode: $("verify-mode").value || undefined,
    speculative: speculative(),
  });
}

/** false, or only what differs from the server's own choice. */
function speculative() {
  if ($("speculative").disabled) return undefined;
  if (!$("speculative").checked) return false;
  const given = {
    method: $("drafter").value || undefined,
    max_draft: numberIn("draft-length"),
    confidence_threshold: numberIn("threshold"),
  };
  return Object.values(given).some((value) => value !== undefined) ? given : undefined;
}

export function stop() {
  running?.abort();
}

export async function generate() {
  if (running || !$("ask").reportValidity()) return;
  const kind = chosen("kind");
  const body = request();
  const asked = { body, prompt: $("prompt").value, conversation };
  const card = new Card((count += 1), kind, body, asked.prompt);
  $("answers").prepend(card.root);
  card.root.scrollIntoView({ block: "nearest" }); // on a narrow screen it is below the form
  while ($("answers").children.length > KEPT) $("answers").lastElementChild.remove();
  running = new AbortController();
  busy(true);
  say("Generating.");
  try {
    const result = await run(kind, body, running.signal, (tokens, seconds, tally) => card.add(tokens, seconds, tally));
    card.end(result.tally.finish);
    if (kind === "chat") remember(asked, result.said);
  } catch (error) {
    if (error.name === "AbortError") {
      card.end("stopped");
      if (kind === "chat" && card.view.text) remember(asked, card.view.text);
    } else {
      card.fail(explained(error));
    }
  } finally {
    running = null;
    busy(false);
  }
}

/** The chat goes on with this answer, unless another has been begun since; what has been typed since stays. */
function remember(asked, said) {
  if (conversation !== asked.conversation) return;
  conversation = [
    ...asked.body.messages.filter((message) => message.role !== "system"),
    { role: "assistant", content: said },
  ];
  if ($("prompt").value === asked.prompt) $("prompt").value = "";
  arrange();
}

function busy(is) {
  if (!is && document.activeElement === $("stop")) $("generate").focus(); // what is disabled loses the focus
  $("generate").setAttribute("aria-disabled", String(is));
  $("stop").disabled = !is;
}

/** One answer on the page. */
class Card {
  constructor(index, kind, body, prompt) {
    this.output = h("div", {
      class: "output",
      role: "group",
      "aria-label": "Answer; the arrow keys go from token to token",
    });
    this.view = new TokenView(this.output);
    this.state = h("span", { class: "badge working" }, "working");
    this.numbers = h("dl", { class: "figures" });
    this.strip = h("div", { class: "strip", role: "group", tabindex: 0, "aria-label": "Rounds" });
    this.rounds = new RoundStrip(this.strip);
    this.grid = h("div", { hidden: true }, this.strip, h("p", { class: "hint" }, ROUNDS));
    this.sources = h("div");
    const copied = h(
      "button",
      { type: "button", class: "quiet", onclick: () => copy(this.view.text, copied) },
      "Copy text",
    );
    const head = h(
      "header",
      {},
      h("h2", {}, `#${index}`),
      this.state,
      ...badges(kind, body),
      h("span", { class: "spacer" }),
      copied,
    );
    this.root = h("article", { class: "card answer", "aria-label": `Answer ${index}` });
    this.root.append(head, h("p", { class: "asked" }, prompt), this.output, this.sources, this.grid, this.numbers);
    this.first = null;
    this.unread = "";
    this.spokenAt = 0;
  }

  add(tokens, seconds, tally) {
    if (tokens.length && this.first === null) this.first = seconds;
    this.view.add(tokens);
    this.speak(tokens, seconds);
    this.tally = tally;
    this.timer ??= setTimeout(() => this.draw(), REDRAWN_EVERY);
  }

  /** For those who listen: pieces of the text, not every token by itself. */
  speak(tokens, seconds) {
    this.unread += tokens.map((token) => token.text).join("");
    if (seconds - this.spokenAt < SPOKEN_EVERY || !this.unread.trim()) return;
    say(this.unread);
    this.unread = "";
    this.spokenAt = seconds;
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    this.view.flush();
    if (!this.tally) return;
    fillNumbers(this.numbers, numbersOf(this.tally, this.first));
    this.sources.replaceChildren(sourceLegend(this.tally.sources));
    show(this.grid, this.tally.rounds.length > 0);
    this.rounds.draw(this.tally.rounds);
  }

  end(finish) {
    this.draw();
    this.state.textContent =
      { length: "ended: length", stop: "ended", stopped: "stopped" }[finish] ?? finish ?? "ended";
    this.state.className = `badge ${finish === "stopped" ? "warn" : "done"}`;
    const speed = number(this.tally?.perSecond);
    say(`${this.unread} Done: ${plural(this.view.tokens.length, "token")}, ${speed} tokens per second.`);
  }

  fail(message) {
    this.draw();
    this.state.textContent = "failed";
    this.state.className = "badge bad";
    this.root.append(h("p", { class: "error", role: "alert" }, message));
  }
}

function badges(kind, body) {
  const drafting = body.speculative === false || $("speculative").disabled ? "plain" : "speculative";
  const k = body.speculative?.max_draft;
  const words = [
    kind,
    k === undefined ? drafting : `${drafting}, K ≤ ${k}`,
    body.speculative?.method,
    body.verify_mode,
  ];
  if (body.temperature !== undefined) words.push(`T ${body.temperature}`);
  if (body.seed !== undefined) words.push(`seed ${body.seed}`);
  return words.filter(Boolean).map((word) => h("span", { class: "badge" }, word));
}
