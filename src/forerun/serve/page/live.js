// What the server does at the moment, from /metrics: the charts, and whether it is there at all.

import { $, h, number, percent, plural, show } from "./dom.js";
import { getText } from "./api.js";
import { barChart, renewTable, timeChart, whenResized } from "./charts.js";
import { History, parse, ratio, snapshot } from "./prometheus.js";
import { short } from "./scales.js";

const EVERY = 2000; // milliseconds between two readings
const SPAN = 300; // seconds that are kept
const SPANS = [60, 120, SPAN]; // what is shown: no more than there is, so that a page just opened is not empty
const history = new History(SPAN);

let held = 0;
let turn = 0; // number of the reading in progress; one whose number is no longer this one ends
let timer = null;
let lost = () => {};

/** `whenLost(error)` is told when a reading fails; nothing is read from then on. */
export function setUp(whenLost) {
  lost = whenLost;
  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : start()));
  whenResized($("live-charts"), draw);
}

/** From here on it reads; called again after a reconnection. */
export function start() {
  pause();
  if (!held && !document.hidden) read(turn);
}

export function pause() {
  turn += 1;
  clearTimeout(timer);
}

/** While a race is measured nothing else is asked of the server. */
export function hold() {
  held += 1;
  pause();
}

export function release() {
  held -= 1;
  start();
}

async function read(mine) {
  let text;
  try {
    text = await getText("metrics");
  } catch (error) {
    if (mine === turn) lost(error); // who is told connects anew and calls `start`
    return;
  }
  if (mine !== turn) return;
  history.add(performance.now() / 1e3, snapshot(parse(text)));
  draw();
  timer = setTimeout(() => read(mine), EVERY);
}

const RATES = {
  speed: (more, seconds) => ratio(more.generated, seconds),
  length: (more) => (more.rounds > 0 ? 1 + more.accepted / more.rounds : null),
  verified: (more) => ratio(more.verified, more.steps),
  drafted: (more) => ratio(more.drafted, more.steps),
  draftTime: (more) => milliseconds(more.draftSeconds, more.passes),
  verifyTime: (more) => milliseconds(more.verifySeconds, more.passes),
  otherTime: (more) => milliseconds(more.otherSeconds, more.passes),
  hits: (more) => ratio(more.cacheHits, more.cacheQueries),
};

function milliseconds(seconds, count) {
  const each = ratio(seconds, count);
  return each === null ? null : 1e3 * each;
}

/** Redraws everything, if it can be seen. */
export function draw() {
  if (!history.points.length || !$("live-charts").clientWidth) return;
  const now = history.points.at(-1).at;
  const rate = (name) => history.rates(RATES[name]);
  const level = (name) => history.levels((values) => values[name]);
  put("speed", now, [{ label: "tokens / s", points: rate("speed"), fill: true }], (v) => `${number(v)} tokens / s`);
  put("length", now, [{ label: "accepted length", points: rate("length") }], (v) => number(v, 2));
  const budget = [
    { label: "verified", points: rate("verified") },
    { label: "drafted", points: rate("drafted") },
  ];
  put("budget", now, budget, (v) => `${number(v, 2)} verified`);
  const queue = [
    { label: "running", points: level("running") },
    { label: "waiting", points: level("waiting") },
  ];
  put("queue", now, queue, () => `${number(latest(queue[0]), 0)} running, ${number(latest(queue[1]), 0)} waiting`);
  const whole = { max: 1, format: (v) => percent(v) };
  put("kv", now, [{ label: "KV blocks in use", points: level("kv"), fill: true }], (v) => percent(v, 1), whole);
  const times = ["verify", "draft", "other"].map((name) => ({ label: name, points: rate(`${name}Time`) }));
  put("times", now, times, () => `${number(times.reduce((sum, one) => sum + (latest(one) ?? 0), 0))} ms`);
  put("cache", now, [{ label: "found", points: rate("hits"), fill: true }], (v) => percent(v), whole);
  const gain = history.points.at(-1).values.gain;
  $("now-gain").textContent = gain === null ? "" : `Predicted: ${number(gain, 2)} × plain decoding.`;
  positions();
  alarms();
}

function put(name, now, series, said, options = {}) {
  const empty = history.points.length > 1 ? "nothing in this time" : "reading…";
  const label = series.map(summary).join("; ");
  timeChart($(`chart-${name}`), { series, now, span: shown(now), label, empty, ...options });
  const value = latest(series[0]);
  $(`now-${name}`).textContent = value === null ? "–" : said(value);
}

function shown(now) {
  const age = now - history.points[0].at;
  return SPANS.find((span) => age <= span) ?? SPAN;
}

/** A line over time, in words. */
function summary({ label, points }) {
  const values = points.map(([, value]) => value).filter((value) => value !== null);
  if (!values.length) return `${label}: nothing in the last five minutes`;
  return `${label}: between ${short(Math.min(...values))} and ${short(Math.max(...values))} in the last five minutes`;
}

function latest(series) {
  return series.points.at(-1)[1];
}

/** Of rounds in which a position was verified behind accepted ones: how many accepted it. The last five minutes. */
function positions() {
  const more = history.increase();
  const found = (more?.reachedAt ?? [])
    .map((reached, i) => ({ k: i + 1, reached, accepted: more.acceptedAt[i] ?? 0 }))
    .filter((one) => one.reached > 0);
  show($("no-positions"), found.length === 0);
  show($("chart-positions"), found.length > 0);
  const bars = found.map(({ k, reached, accepted }) => {
    const title = `position ${k}: ${accepted} of ${plural(reached, "round")} accepted`;
    return { label: String(k), value: accepted / reached, title };
  });
  barChart($("chart-positions"), { bars, format: (v) => percent(v) });
  $("now-positions").textContent = found.length ? `k = 1: ${percent(bars[0].value)}` : "–";
  const rows = found.map((one) => [one.k, one.reached, one.accepted, percent(one.accepted / one.reached, 1)]);
  renewTable($("table-positions"), ["position", "rounds", "accepted", "share"], rows);
}

function alarms() {
  const names = history.points.at(-1).values.alarms;
  const text = `${names.join(", ")}: less than half is accepted of what the card promises; the data or the template no longer fit.`;
  if ($("drift").textContent !== text) $("drift").replaceChildren(h("p", {}, text)); // said aloud each time it is put in
  show($("drift"), names.length > 0);
}
