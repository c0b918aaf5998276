// Prometheus' text format, and how the numbers of this server changed over the last minutes.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = "forerun:";

/** Series of a page of /metrics: name -> [{labels, value}]. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: labelsOf(labels ?? ""), value: numberOf(value) });
  }
  return found;
}

function labelsOf(text) {
  const found = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    found[name] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
  }
  return found;
}

function numberOf(text) {
  if (text === "+Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  return Number(text);
}

/** What the charts are made of, at one moment. Missing series are null. */
export function snapshot(series) {
  const get = (name) => total(series.get(PREFIX + name));
  const phase = (what, ...phases) =>
    total(series.get(`${PREFIX}step_seconds_${what}`)?.filter((one) => phases.includes(one.labels.phase)));
  return {
    generated: get("generation_tokens_total"),
    drafted: get("spec_decode_drafted_tokens_total"),
    verified: get("spec_decode_verified_tokens_total"),
    accepted: get("spec_decode_accepted_tokens_total"),
    rounds: get("spec_decode_drafting_rounds_total"),
    steps: get("spec_decode_target_steps_total"),
    running: get("num_requests_running"),
    waiting: get("num_requests_waiting"),
    kv: get("kv_cache_usage_perc"),
    cacheQueries: get("prefix_cache_queries_total"),
    cacheHits: get("prefix_cache_hits_total"),
    gain: get("spec_decode_predicted_gain"),
    passes: phase("count", "verify"),
    draftSeconds: phase("sum", "draft"),
    verifySeconds: phase("sum", "verify"),
    otherSeconds: phase("sum", "schedule", "sample", "commit"),
    reachedAt: byPosition(series.get(`${PREFIX}spec_decode_reached_per_pos_total`)),
    acceptedAt: byPosition(series.get(`${PREFIX}spec_decode_accepted_per_pos_total`)),
    alarms: alarmed(series.get(`${PREFIX}spec_decode_drift_alarm`)),
  };
}

function alarmed(entries = []) {
  return entries.filter((one) => one.value === 1).map((one) => one.labels.drafter);
}

function total(entries) {
  return entries?.length ? entries.reduce((sum, one) => sum + one.value, 0) : null;
}

function byPosition(entries = []) {
  const found = [];
  for (const { labels, value } of entries) found[Number(labels.position)] = value;
  return Array.from(found, (value) => value ?? 0);
}

/** Snapshots of the last minutes, and rates between them. */
export class History {
  /**
   * @param {number} keep seconds that are kept
   * @param {number} window seconds a rate is taken over: a step may take longer than the time between two readings
   */
  constructor(keep = 300, window = 4) {
    this.keep = keep;
    this.window = window;
    this.points = [];
  }

  /** `at`: seconds of a monotonic clock. Counters that fall mean another server: what was before is forgotten. */
  add(at, values) {
    const last = this.points.at(-1);
    if (last && (values.generated < last.values.generated || values.steps < last.values.steps)) this.points = [];
    this.points.push({ at, values });
    while (this.points[0].at < at - this.keep) this.points.shift();
  }

  /** [[at, value or null]] of a function of one snapshot; null too where nothing was read for a while. */
  levels(of) {
    return this.points.flatMap(({ at, values }, i) => {
      const point = [at, of(values) ?? null];
      return i > 0 && this.before(i) === null ? [[at, null], point] : [point];
    });
  }

  /** [[at, value or null]] of a function of (increase, seconds): what was added within the window before each point. */
  rates(of) {
    return this.points.map(({ at, values }, i) => {
      const before = this.before(i);
      return [at, before ? (of(difference(values, before.values), at - before.at) ?? null) : null];
    });
  }

  /** Everything that was added over the time that is kept. */
  increase() {
    return this.points.length > 1 ? difference(this.points.at(-1).values, this.points[0].values) : null;
  }

  before(i) {
    const at = this.points[i].at;
    let found = null;
    for (let j = i - 1; j >= 0 && at - this.points[j].at <= 2 * this.window; j--) {
      found = this.points[j];
      if (at - found.at >= this.window) break;
    }
    return found;
  }
}

function difference(now, before) {
  const found = {};
  for (const [name, value] of Object.entries(now)) {
    if (name === "alarms") continue;
    if (Array.isArray(value)) found[name] = value.map((one, i) => one - (before[name][i] ?? 0));
    else found[name] = value === null || before[name] === null ? null : value - before[name];
  }
  return found;
}

/** a / b, or null where nothing was counted: a rate over nothing is no number. */
export function ratio(a, b) {
  return a === null || b === null || !(b > 0) ? null : a / b;
}
