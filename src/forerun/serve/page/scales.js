// From values to places on a chart. Pure.

export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** Powers of two are equally far apart. `low` > 0. */
export function log2([low, high], range) {
  const inner = linear([Math.log2(low), Math.log2(high)], range);
  return (value) => inner(Math.log2(value));
}

/** About `count` round values from 0 or `low` up to the first round one at or above `high`. */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low, low + 1];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  const first = Math.floor(low / step);
  for (let i = first; ; i++) {
    found.push(Number((i * step).toPrecision(12)));
    if (i * step >= high * (1 - 1e-9)) return found;
  }
}

/** Powers of two from below `low` to above `high`. */
export function powers(low, high) {
  const found = [];
  const last = Math.ceil(Math.log2(high));
  for (let i = Math.floor(Math.log2(low)); i <= last; i++) found.push(2 ** i);
  return found.length > 1 ? found : [found[0], 2 * found[0]];
}

/** SVG path through places, broken where there is none (null). */
export function path(places) {
  let pen = "M";
  let text = "";
  for (const place of places) {
    if (place === null) {
      pen = "M";
      continue;
    }
    text += `${pen}${place[0].toFixed(1)} ${place[1].toFixed(1)}`;
    if (pen === "M") text += "h0"; // so that a place without neighbours is a dot and not nothing
    pen = "L";
  }
  return text;
}

/** A label for a value: as many digits as are needed, no more. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size >= 100 || size === 0) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}
