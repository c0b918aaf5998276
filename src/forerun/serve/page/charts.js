// Small charts in SVG. Series differ by colour, by dash and by the shape of their dots. For those who do not look, charts
// over time are summed up in their labels, and the others have their numbers as a table.

import { h, svg } from "./dom.js";
import { linear, log2, path, powers, short, ticks } from "./scales.js";

const EDGE = { left: 52, right: 14, top: 12, bottom: 36 };
const TONES = 5; // s0 .. s4 of the style sheet
export const PLAIN = 5; // s5: plain decoding is grey in every picture
const SHAPES = ["circle", "square", "triangle", "diamond"];

/** Lines over the last minutes. `series`: [{label, points: [[seconds, value or null]], fill}]; `empty`: said where no
 * line has a value. */
export function timeChart(root, { series, now, span, max = 0, format = short, label, empty = "" }) {
  const size = { width: root.clientWidth, height: 120 };
  if (size.width < 60) return; // not shown
  const edge = { left: 40, right: 6, top: 8, bottom: 18 };
  const values = series.flatMap((one) => one.points.map(([, value]) => value ?? 0));
  const marks = ticks(0, Math.max(max, ...values) || 1, 3);
  const x = linear([now - span, now], [edge.left, size.width - edge.right]);
  const y = linear([0, marks.at(-1)], [size.height - edge.bottom, edge.top]);
  const box = `0 0 ${size.width} ${size.height}`;
  const drawing = svg("svg", { viewBox: box, class: "chart", role: "img", "aria-label": label });
  for (const mark of marks) {
    drawing.append(
      svg("line", { x1: edge.left, x2: size.width - edge.right, y1: y(mark), y2: y(mark), class: "grid" }),
    );
    drawing.append(text(format(mark), edge.left - 6, y(mark) + 3.5, "end"));
  }
  for (const minutes of [5, 3, 2, 1, 0].filter((one) => 60 * one <= span && (one !== 2 || span <= 120))) {
    const anchor = minutes === 0 ? "end" : 60 * minutes === span ? "start" : "middle";
    drawing.append(text(minutes ? `−${minutes} min` : "now", x(now - 60 * minutes), size.height - 3, anchor));
  }
  series.forEach((one, i) => {
    const places = one.points.map(([at, value]) => (value === null ? null : [x(at), y(value)]));
    if (one.fill) drawing.append(svg("path", { d: area(places, y(0)), class: `area s${i}` }));
    drawing.append(svg("path", { d: path(places), class: `line s${i}` }));
    const last = places.at(-1);
    if (last) drawing.append(dot(last, i));
  });
  if (series.every((one) => one.points.every(([, value]) => value === null)))
    drawing.append(text(empty, size.width / 2, y(marks.at(-1) / 2) - 4, "middle"));
  root.replaceChildren(drawing);
}

function area(places, floor) {
  let found = "";
  let run = [];
  for (const place of [...places, null]) {
    if (place) {
      run.push(place);
      continue;
    }
    if (run.length > 1) found += `${path(run)}L${run.at(-1)[0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z`;
    run = [];
  }
  return found;
}

/** One bar each. `bars`: [{label, value 0..1, title}]. */
export function barChart(root, { bars, format, least = 6 }) {
  const size = { width: root.clientWidth, height: 120 };
  if (size.width < 60) return;
  const edge = { left: 40, right: 6, top: 8, bottom: 18 };
  const y = linear([0, 1], [size.height - edge.bottom, edge.top]);
  const step = (size.width - edge.left - edge.right) / Math.max(least, bars.length);
  const drawing = svg("svg", { viewBox: `0 0 ${size.width} ${size.height}`, class: "chart", "aria-hidden": "true" });
  for (const mark of [0, 0.5, 1]) {
    drawing.append(
      svg("line", { x1: edge.left, x2: size.width - edge.right, y1: y(mark), y2: y(mark), class: "grid" }),
    );
    drawing.append(text(format(mark), edge.left - 6, y(mark) + 3.5, "end"));
  }
  bars.forEach((bar, i) => {
    const left = edge.left + i * step;
    const box = { x: left + step * 0.15, width: step * 0.7, y: y(bar.value), height: y(0) - y(bar.value), rx: 2 };
    drawing.append(svg("rect", { ...box, class: "bar" }, svg("title", {}, bar.title)));
    drawing.append(text(bar.label, left + step / 2, size.height - 3, "middle"));
  });
  root.replaceChildren(drawing);
}

/**
 * Points and lines over two axes.
 *
 * `series`: [{label, points: [[x, y, title, size]], tags, mark, dots, line}], tags being words beside the points; `x`,
 * `y`: {label, log, low, high, format}; `diagonal`: the line on which both are equal; `edge`: {x, label} of a border.
 */
export function xyChart(root, { series, x, y, diagonal = false, edge = null, label }) {
  const size = { width: Math.max(280, root.clientWidth), height: 300 };
  if (!root.clientWidth) return;
  const across = axis(
    x,
    series.flatMap((one) => one.points.map((point) => point[0])),
    [EDGE.left, size.width - EDGE.right],
  );
  const up = axis(
    y,
    series.flatMap((one) => one.points.map((point) => point[1])),
    [size.height - EDGE.bottom, EDGE.top],
  );
  const box = `0 0 ${size.width} ${size.height}`;
  const drawing = svg("svg", { viewBox: box, class: "chart", role: "img", "aria-label": label });
  frame(drawing, size, across, up, x, y);
  if (diagonal) {
    const ends = { x1: across.place(0), y1: up.place(0), x2: across.place(1), y2: up.place(1) };
    drawing.append(svg("line", { ...ends, class: "diagonal" }));
  }
  if (edge) {
    const at = across.place(edge.x);
    const bottom = size.height - EDGE.bottom;
    drawing.append(svg("line", { x1: at, x2: at, y1: EDGE.top, y2: bottom, class: "diagonal" }));
    const right = at < size.width / 2;
    drawing.append(text(edge.label, at + (right ? 5 : -5), bottom - 6, right ? "start" : "end"));
  }
  series.forEach((one, i) => draw(drawing, one, one.mark ?? i % TONES, across.place, up.place));
  root.replaceChildren(drawing, legend(series));
}

function axis(given, values, range) {
  const low = given.low ?? Math.min(...values);
  const high = given.high ?? Math.max(...values);
  const marks = given.log ? powers(low, high) : ticks(low, high, 5);
  const domain = [marks[0], marks.at(-1)];
  return { marks, place: given.log ? log2(domain, range) : linear(domain, range) };
}

function frame(drawing, size, across, up, x, y) {
  const sparse = across.marks.length > size.width / 55 ? 2 : 1;
  across.marks.forEach((mark, i) => {
    const at = across.place(mark);
    drawing.append(svg("line", { x1: at, x2: at, y1: EDGE.top, y2: size.height - EDGE.bottom, class: "grid" }));
    if (i % sparse === 0) drawing.append(text((x.format ?? short)(mark), at, size.height - EDGE.bottom + 14, "middle"));
  });
  for (const mark of up.marks) {
    const at = up.place(mark);
    drawing.append(svg("line", { x1: EDGE.left, x2: size.width - EDGE.right, y1: at, y2: at, class: "grid" }));
    drawing.append(text((y.format ?? short)(mark), EDGE.left - 7, at + 3.5, "end"));
  }
  const middle = (EDGE.left + size.width - EDGE.right) / 2;
  drawing.append(text(x.label, middle, size.height - 4, "middle", "axis"));
  const height = (EDGE.top + size.height - EDGE.bottom) / 2;
  const turned = text(y.label, 12, height, "middle", "axis");
  turned.setAttribute("transform", `rotate(-90 12 ${height})`);
  drawing.append(turned);
}

function draw(drawing, one, mark, x, y) {
  const places = one.points.map((point) => [x(point[0]), y(point[1])]);
  if (one.line !== false) drawing.append(svg("path", { d: path(places), class: `line s${mark}` }));
  if (one.dots === false) return;
  places.forEach((place, i) => {
    const found = dot(place, mark, one.points[i][3]);
    found.append(svg("title", {}, one.points[i][2] ?? ""));
    drawing.append(found);
    if (one.tags) drawing.append(text(one.tags[i], place[0] + 6, place[1] - 6, "start"));
  });
}

function dot([x, y], mark, size = 4) {
  const shape = SHAPES[mark % SHAPES.length];
  const s = Math.max(2.5, size);
  const kind = { class: `dot s${mark}` };
  if (shape === "circle") return svg("circle", { cx: x, cy: y, r: s, ...kind });
  if (shape === "square") return svg("rect", { x: x - s, y: y - s, width: 2 * s, height: 2 * s, ...kind });
  const corners =
    shape === "triangle"
      ? [
          [x, y - 1.2 * s],
          [x + 1.2 * s, y + s],
          [x - 1.2 * s, y + s],
        ]
      : [
          [x, y - 1.3 * s],
          [x + 1.3 * s, y],
          [x, y + 1.3 * s],
          [x - 1.3 * s, y],
        ];
  return svg("polygon", { points: corners.map((corner) => corner.join(",")).join(" "), ...kind });
}

export function legend(series) {
  const items = series.map((one, i) => {
    const mark = one.mark ?? i % TONES;
    const sample = svg("svg", { viewBox: "0 0 34 12", class: "sample", "aria-hidden": "true" });
    if (one.line !== false) sample.append(svg("line", { x1: 1, x2: 33, y1: 6, y2: 6, class: `line s${mark}` }));
    if (one.dots !== false) sample.append(dot([17, 6], mark));
    return h("li", {}, sample, one.label);
  });
  return h("ul", { class: "legend" }, ...items);
}

/** The numbers of a chart, for those who read rather than look; as open as the table before was. */
export function renewTable(root, heads, rows) {
  const open = Boolean(root.querySelector("details")?.open);
  if (open && root.contains(document.activeElement)) return; // somebody is in it
  const head = h("tr", {}, ...heads.map((name) => h("th", { scope: "col" }, name)));
  const body = rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, String(cell)))));
  const grid = h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
  const scroll = h("div", { class: "scroll" }, grid);
  root.replaceChildren(h("details", { class: "numbers", open }, h("summary", {}, "As a table"), scroll));
}

/** Calls a function when an element has another width: charts are as wide as there is room. */
export function whenResized(root, draw) {
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    requestAnimationFrame(draw);
  }).observe(root);
}

function text(content, x, y, anchor, kind = "") {
  return svg("text", { x, y, "text-anchor": anchor, class: kind }, content);
}
