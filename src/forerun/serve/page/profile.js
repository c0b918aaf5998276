// The loaded profile: what steps cost here, how far confidences can be believed, and what that gives under load.

import { $, copy, fillSelect, h, number, percent, plural, show } from "./dom.js";
import { explained, getJson } from "./api.js";
import { PLAIN, renewTable, whenResized, xyChart } from "./charts.js";
import { short } from "./scales.js";

const EXPECTED =
  "Expected from the costs above and from what has been accepted so far, as planning reckons: at short contexts, without prefills.";

const FREE = 1.1; // times the cost of one row: up to there rows are called free

let server = null;
let found = null;

export function setUp() {
  whenResized($("profile-charts"), draw);
  $("profile-refresh").addEventListener("click", load);
  for (const id of ["reliability-source", "frontier-source"]) $(id).addEventListener("change", draw);
}

export function know(info) {
  server = info;
}

export async function load() {
  show($("profile-error"), false);
  try {
    found = await getJson("forerun/profile");
  } catch (error) {
    $("profile-error").textContent = explained(error);
    show($("profile-error"));
    return;
  }
  sources();
  draw();
}

export function draw() {
  if (!found || !$("profile-charts").clientWidth) return;
  describe();
  staircase();
  reliability();
  frontier();
}

function describe() {
  const { scheduling, profile } = found;
  const parts = [`policy ${scheduling.policy}`];
  if (scheduling.adapts) parts.push(`drafts where that gains at least ${percent(scheduling.min_predicted_gain, 1)}`);
  else parts.push("every request drafts as configured: no costs are known");
  if (profile)
    parts.push(
      `${profile.key.dtype} on ${profile.key.device}${profile.key.threads ? `, ${plural(profile.key.threads, "thread")}` : ""}`,
    );
  $("profile-about").textContent = parts.join(" · ");
}

/** Shows a chart, or what to run so that there is one. */
function either(name, ready, command, why) {
  const empty = $(`empty-${name}`);
  show($(`chart-${name}`), ready);
  show($(`table-${name}`), ready);
  show(empty, !ready);
  const button = h("button", { type: "button", class: "quiet", onclick: () => copy(command, button) }, "Copy");
  empty.replaceChildren(h("p", {}, why), h("p", { class: "command" }, h("code", {}, command), button));
}

/** Of a drafter, the same in every picture. */
const toneOf = (drafter) => 1 + (Math.max(0, found.drafters.indexOf(drafter)) % 4);

// ------------------------------------------------------------------------------------------------------ the staircase

function staircase() {
  const { profile } = found;
  const why =
    "What a step costs by its rows has not been measured here, or not with these drafters. Run this with the flags of the server, then start the server again:";
  $("about-staircase").textContent = "";
  either("staircase", profile !== null, `forerun profile ${found.flags}`, why);
  if (!profile) return;
  const { planned, measured } = profile.target;
  const steps = planned.rows.map((rows, i) => [rows, 1e3 * planned.seconds[i]]);
  const dots = measured.rows.map((rows, i) => [
    rows,
    1e3 * measured.seconds[i],
    `${plural(rows, "row")}: ${short(1e3 * measured.seconds[i])} ms`,
  ]);
  const drafters = profile.drafters.map((one) => {
    const longest = one.lengths.at(-1);
    const points = longest.requests.map((n, j) => [
      n,
      1e3 * longest.seconds[j],
      `${one.drafter}, K = ${longest.k}, ${plural(n, "request")}: ${short(1e3 * longest.seconds[j])} ms`,
    ]);
    return { label: `${one.drafter}, K = ${longest.k}, by requests`, points, mark: toneOf(one.drafter) };
  });
  const series = [
    { label: "target, as planning reads it", points: steps, dots: false, mark: 0 },
    { label: "target, measured", points: dots, line: false, mark: 0 },
    ...drafters,
  ];
  const label = "Milliseconds of a step by its rows; the same numbers are in the table below.";
  const free = freeRows(planned);
  $("about-staircase").textContent =
    free > 1
      ? `Up to ${free} rows cost at most ${percent(FREE - 1)} more than one.`
      : `No row is free here: a second one costs more than ${percent(FREE - 1)} of the first.`;
  xyChart($("chart-staircase"), {
    series,
    label,
    edge: free > 1 ? { x: free, label: "free up to here" } : null,
    x: { label: "rows in a step (drafters: requests)", log: true, low: 1 },
    y: { label: "ms", low: 0 },
  });
  const rows = measured.rows.map((n, i) => [
    n,
    short(1e3 * measured.seconds[i]),
    number(measured.seconds[i] / measured.seconds[0], 2),
  ]);
  renewTable($("table-staircase"), ["rows", "ms", "times one row"], rows);
}

function freeRows({ rows, seconds }) {
  const beyond = seconds.findIndex((one) => one > FREE * seconds[0]);
  return rows[beyond < 0 ? rows.length - 1 : beyond - 1];
}

// ------------------------------------------------------------------------------------------------------- reliability

function sources() {
  const tables = found.calibrations.flatMap((one) =>
    one.tables
      .filter((each) => each.bars_after.length)
      .map((each, i) => [
        `${one.drafter}/${i}`,
        `${one.drafter}: held-out prompts, temperature ${each.key.temperature}, ${each.key.verify_mode}`,
      ]),
  );
  const served = found.reliability.length ? [["served", "what this server has decoded"]] : [];
  options($("reliability-source"), [...served, ...tables]);
  const kinds = [
    ["measured", found.load?.points ?? []],
    ["expected", found.expected],
  ];
  const names = kinds.flatMap(([kind, points]) => [...new Set(points.map((one) => `${kind}: ${one.drafter}`))]);
  options(
    $("frontier-source"),
    names.map((name) => [name, name]),
  );
}

function options(select, items) {
  fillSelect(select, items);
  show(select.closest("label"), items.length > 0);
}

function reliability() {
  const source = $("reliability-source").value;
  const why =
    "No confidences have met a verdict yet: let the server answer something, or record and fit them on prompts of yours, with the flags of the server:";
  either("reliability", source !== "", `forerun calibrate ${found.flags}`, why);
  if (!source) return;
  const series = source === "served" ? servedSeries() : fittedSeries(source);
  const label =
    "Observed against predicted acceptance; on the diagonal confidences mean what they say. The numbers are in the table below.";
  const unit = { low: 0, high: 1, format: (v) => percent(v) };
  xyChart($("chart-reliability"), {
    series,
    label,
    diagonal: true,
    x: { label: source === "served" ? "confidence given" : "predicted survival", ...unit },
    y: { label: "accepted", ...unit },
  });
  const rows = series.flatMap((one) =>
    one.points.map(([x, y, , , count]) => [one.label, percent(x, 1), percent(y, 1), count]),
  );
  renewTable($("table-reliability"), ["", "predicted", "observed", "drafts"], rows);
}

function servedSeries() {
  return found.reliability.map((one) => ({
    label: one.drafter,
    mark: toneOf(one.drafter),
    points: one.bars.map((bar) => point(bar.predicted, bar.observed, bar.drafts, one.bars)),
  }));
}

function fittedSeries(source) {
  const [drafter, index] = [
    source.slice(0, source.lastIndexOf("/")),
    Number(source.slice(source.lastIndexOf("/") + 1)),
  ];
  const chosen = found.calibrations
    .find((one) => one.drafter === drafter)
    .tables.filter((one) => one.bars_after.length)[index];
  const shown = [...new Set([0, chosen.bars_after.length - 1])];
  return shown.flatMap((k) => [
    fitted(`k = ${k + 1}, as given`, chosen.bars_before[k], chosen.ece_before[k]),
    fitted(`k = ${k + 1}, calibrated`, chosen.bars_after[k], chosen.ece_after[k]),
  ]);
}

function fitted(name, bars = [], error = null) {
  const all = bars.map((bar) => ({ drafts: bar[2] }));
  return {
    label: error === null ? name : `${name}: mean error ${percent(error, 1)}`,
    points: bars.map(([, , rounds, predicted, observed]) => point(predicted, observed, rounds, all)),
  };
}

/** A dot whose area says how many drafts it stands for. */
function point(x, y, count, all) {
  const most = Math.max(...all.map((bar) => bar.drafts));
  return [
    x,
    y,
    `${percent(x, 1)} predicted, ${percent(y, 1)} observed, ${plural(count, "draft")}`,
    2.5 + 4 * Math.sqrt(count / most),
    count,
  ];
}

// ---------------------------------------------------------------------------------------------------------- frontier

function frontier() {
  const [kind, drafter] = $("frontier-source").value.split(": ");
  const all = (kind === "measured" ? found.load?.points : found.expected) ?? [];
  const points = all.filter((one) => one.per_user !== null && one.drafter === drafter);
  const why = found.profile
    ? "Nothing has been measured under load with this profile yet. It takes some minutes on an idle machine, with the flags of the server:"
    : "Speeds under load are kept beside a profile. Measure that first, then, with the flags of the server:";
  either("frontier", points.length > 0, `forerun bench load --target ${found.flags}`, why);
  show($("empty-frontier"), !found.load);
  $("about-frontier").textContent = kind === "expected" ? EXPECTED : "";
  if (!points.length) return;
  const ways = [...new Set(points.map((one) => one.policy))];
  const series = ways.map((way) => ({
    label: way,
    mark: way === "plain" ? PLAIN : undefined,
    tags: points.filter((one) => one.policy === way).map((one) => one.load),
    points: points
      .filter((one) => one.policy === way)
      .map((one) => [
        one.per_user,
        one.total,
        `${way}, load ${one.load}: ${number(one.per_user)} per user, ${number(one.total)} in all`,
      ]),
  }));
  const label =
    "Tokens a second in all against tokens a second for each user; further up and right is better. The numbers are in the table below.";
  xyChart($("chart-frontier"), {
    series,
    label,
    x: { label: "tokens / s for each user", low: 0 },
    y: { label: "tokens / s in all", low: 0 },
  });
  const rows = points.map((one) => [one.policy, one.load, number(one.per_user), number(one.total)]);
  renewTable($("table-frontier"), ["way", "load", "per user", "in all"], rows);
}

export const isKnown = () => server !== null;
