// One answer as it streams: tokens coloured by where they came from, the rounds they came in, and its numbers.

import { $, h, number, percent, plural, svg } from "./dom.js";

export const SOURCES = {
  drafted: { word: "drafted", means: "proposed by the drafter, and kept by the target" },
  corrected: { word: "corrected", means: "the target's own token in place of a draft token that it refused" },
  bonus: { word: "bonus", means: "the target's own token behind a draft that was kept whole" },
  plain: { word: "plain", means: "the target's own token of a step that verified no draft" },
};

/** What can be counted about an answer while it comes. */
export class Tally {
  constructor() {
    this.ids = [];
    this.prompt = null; // its ids, where they were asked for
    this.rounds = []; // [verified, accepted] of each step that verified something
    this.steps = 0;
    this.sources = { drafted: 0, corrected: 0, bonus: 0, plain: 0 };
    this.usage = null;
    this.timings = null;
    this.finish = null;
  }

  /** One event; its tokens. */
  add(event) {
    this.usage = event.usage ?? this.usage;
    this.timings = event.timings ?? this.timings;
    const choice = event.choices[0];
    this.prompt ??= event.prompt_token_ids ?? choice?.prompt_token_ids ?? null;
    if (!choice) return [];
    this.finish = choice.finish_reason ?? this.finish;
    const { verified, accepted, tokens } = choice.provenance ?? { verified: 0, accepted: 0, tokens: [] };
    if (tokens.length) this.steps += 1;
    if (verified) this.rounds.push([verified, accepted]);
    for (const token of tokens) {
      this.ids.push(token.id);
      this.sources[token.source] += 1;
    }
    return tokens;
  }

  get verified() {
    return this.rounds.reduce((sum, [verified]) => sum + verified, 0);
  }

  get accepted() {
    return this.rounds.reduce((sum, [, accepted]) => sum + accepted, 0);
  }

  /** 1 + accepted / rounds that verified a draft: bonus included. */
  get acceptedLength() {
    return this.rounds.length ? 1 + this.accepted / this.rounds.length : null;
  }

  get perSecond() {
    return this.timings?.predicted_per_second ?? null;
  }

  get cached() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? null;
  }
}

const BLOCK = 64; // tokens

/**
 * Tokens in a box. It is one tab stop; the arrow keys go from token to token.
 *
 * Text is laid out as a whole with each token that joins it, which takes longer the longer it is. So tokens are put in
 * once a frame, and into blocks: each ends with the first line that is complete behind some number of tokens.
 */
export class TokenView {
  constructor(root) {
    this.root = root;
    this.tokens = [];
    this.nodes = []; // their elements; those of this frame are not there yet
    this.frame = null;
    root.addEventListener("keydown", (event) => this.move(event));
    root.addEventListener("mouseover", (event) => this.point(event.target));
    root.addEventListener("mouseleave", () => hideTip());
    root.addEventListener("focusin", (event) => this.point(event.target));
    root.addEventListener("focusout", () => hideTip());
  }

  clear() {
    this.tokens = [];
    this.nodes = [];
    this.root.replaceChildren();
  }

  get text() {
    return this.tokens
      .filter((token) => !token.special)
      .map((token) => token.text)
      .join("");
  }

  add(tokens) {
    this.tokens.push(...tokens);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Shows everything now, as whoever looks for a token's element wants it. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const left = this.tokens.slice(this.nodes.length);
    if (!left.length) return;
    const atEnd = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 40;
    for (const token of left) {
      const node = this.element(token, this.nodes.length);
      this.block().append(node);
      this.nodes.push(node);
    }
    if (atEnd) this.root.scrollTop = this.root.scrollHeight;
  }

  /** Where the next token goes. A new block begins a new line, so it begins where a line has ended. */
  block() {
    const last = this.root.lastElementChild;
    const full = last?.childElementCount >= BLOCK && last.lastElementChild.textContent.endsWith("\n");
    if (last && !full) return last;
    const made = h("div");
    this.root.append(made);
    return made;
  }

  element(token, place) {
    const kind = ["token", token.source, token.special ? "special" : ""].join(" ");
    const node = h("span", { class: kind, tabindex: place === 0 ? 0 : -1, "data-place": place }, ...marked(token.text));
    if (typeof token.confidence === "number") node.style.setProperty("--confidence", token.confidence.toFixed(3));
    return node;
  }

  move(event) {
    const place = Number(event.target.dataset?.place);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (Number.isNaN(place) || to === undefined) return;
    this.flush();
    if (!this.nodes[to]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    this.nodes[to].tabIndex = 0;
    this.nodes[to].focus();
  }

  point(node) {
    const token = this.tokens[Number(node.dataset?.place)];
    if (token) showTip(node, token);
  }
}

/** A text with a mark before each line break, which is no text itself: it is not copied. */
function marked(text) {
  return text.split(/(?=\n)/).flatMap((part) => (part[0] === "\n" ? [h("span", { class: "break" }), part] : [part]));
}

/** What is known about a token, as lines. */
export function described(token) {
  const source = SOURCES[token.source];
  const lines = [`${JSON.stringify(token.text)}, ${source.word}: ${source.means}`];
  const sure = typeof token.confidence === "number" ? percent(token.confidence) : null;
  if (token.source === "corrected" && token.instead_of !== undefined) {
    lines.push(`the draft said ${JSON.stringify(token.instead_of)}${sure ? `, confidence ${sure}` : ""}`);
  } else if (token.source === "drafted") {
    lines.push(sure ? `confidence of the drafter: ${sure}` : "this drafter gives no confidence");
  }
  lines.push(`token ${token.id}`);
  return lines;
}

let shown = null; // the token that the tip is about

function showTip(node, token) {
  $("tip").replaceChildren(...described(token).map((line) => h("span", {}, line)));
  $("tip").hidden = false;
  shown?.removeAttribute("aria-describedby");
  shown = node;
  node.setAttribute("aria-describedby", "tip");
  placeTip();
}

function placeTip() {
  if (!shown?.isConnected || $("tip").hidden) return;
  const tip = $("tip");
  const place = shown.getClientRects()[0] ?? shown.getBoundingClientRect(); // of a token over two lines the first
  const left = Math.min(Math.max(8, place.left), innerWidth - tip.offsetWidth - 8);
  const below = place.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? place.bottom + 8 : Math.max(8, place.top - tip.offsetHeight - 8)}px`;
}

addEventListener("scroll", placeTip, { capture: true, passive: true });

export function hideTip() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  $("tip").hidden = true;
}

const BOX = 7; // pixels, and 2 between two boxes

/** A column for each round: a box for each verified draft token, full where it was accepted. */
export class RoundStrip {
  constructor(root) {
    this.root = root;
    this.most = 0;
    this.shown = 0;
  }

  /** Draws the rounds that have come since; all of them only where one has more boxes than any before. */
  draw(rounds) {
    const most = Math.max(1, ...rounds.slice(this.shown).map(([verified]) => verified));
    if (most > this.most) this.begin(most);
    this.drawing.append(...rounds.slice(this.shown).map((round, i) => this.column(round, this.shown + i)));
    this.shown = rounds.length;
    this.drawing.setAttribute("width", Math.max(1, rounds.length) * (BOX + 2));
    this.drawing.setAttribute("aria-label", `${plural(rounds.length, "round")} that verified a draft`);
  }

  begin(most) {
    this.most = most;
    this.shown = 0;
    this.drawing = svg("svg", { height: most * (BOX + 2), role: "img" });
    this.root.replaceChildren(this.drawing);
  }

  column([verified, accepted], place) {
    const column = svg("g", {}, svg("title", {}, `round ${place + 1}: ${accepted} of ${verified} accepted`));
    for (let k = 0; k < verified; k++) {
      const kind = k < accepted ? "kept" : k === accepted ? "refused" : "behind";
      const y = (this.most - 1 - k) * (BOX + 2) + 1;
      const box = { x: place * (BOX + 2) + 1, y, width: BOX, height: BOX, rx: 1.5, class: kind };
      column.append(svg("rect", box));
    }
    return column;
  }
}

const CACHED = "prompt tokens that were in the prefix cache, and all of them";

/** The numbers of an answer as a list of terms. */
export function numbersOf(tally, seconds) {
  const share = tally.verified ? tally.accepted / tally.verified : null;
  const prompt = tally.usage?.prompt_tokens;
  return [
    ["tokens / s", number(tally.perSecond), "tokens / seconds from the first to the last of them"],
    ["accepted length", number(tally.acceptedLength, 2), "1 + accepted / rounds that verified a draft"],
    ["drafts accepted", percent(share), `${tally.accepted} of ${tally.verified} draft tokens that the target saw`],
    ["tokens", number(tally.ids.length, 0), `in ${tally.steps} steps of the target`],
    ["first token", seconds === null ? "–" : `${number(1e3 * seconds, 0)} ms`, "after the request was sent"],
    ["cached / prompt", prompt === undefined ? "–" : `${number(tally.cached, 0)} / ${number(prompt, 0)}`, CACHED],
  ];
}

export function fillNumbers(root, items) {
  const groups = items.map(([name, value, title]) => h("div", { title }, h("dt", {}, name), h("dd", {}, value)));
  root.replaceChildren(...groups);
}

export function sourceLegend(counts) {
  const items = Object.entries(SOURCES).map(([name, { word, means }]) => {
    const count = counts ? ` ${counts[name]}` : "";
    return h("li", { title: means }, h("span", { class: `token ${name}` }, word), count);
  });
  return h("ul", { class: "sources" }, ...items);
}
