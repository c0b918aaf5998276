// Building and finding elements. Text is only ever put in as text nodes: what a model writes is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function show(node, visible = true) {
  node.hidden = !visible;
}

/** The value of the radio button that is chosen among those of this name. */
export function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`)?.value;
}

export function number(value, digits = 1) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(value, digits = 0) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : `${number(100 * value, digits)} %`;
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Says something to screen readers; the last thing said within a moment wins, so that a stream does not stutter. */
export function say(text) {
  clearTimeout(say.timer);
  say.timer = setTimeout(() => {
    $("said").textContent = text;
  }, 150);
}

/** Fills a list with [value, text] of each choice; what was chosen before stays so, if it is still there. */
export function fillSelect(select, items) {
  const before = select.value;
  select.replaceChildren(...items.map(([value, text]) => h("option", { value }, text)));
  if (items.some(([value]) => value === before)) select.value = before;
}

export async function copy(text, button) {
  button.dataset.label ??= button.textContent; // not read again while it says what came of the last time
  button.textContent = (await isCopied(text, button)) ? "Copied" : "Copying is not allowed here";
  say(button.textContent);
  setTimeout(() => {
    button.textContent = button.dataset.label;
  }, 1500);
}

async function isCopied(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedAsSelection(text, button); // browsers keep the clipboard from pages of http:// but for localhost's
  }
}

function copiedAsSelection(text, button) {
  const field = h("textarea", { class: "aside", readonly: true, "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  button.focus();
  return done;
}
