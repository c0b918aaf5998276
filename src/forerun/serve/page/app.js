// The frame of the page: connection, key, tabs, theme, shortcuts.

import { $, say, show } from "./dom.js";
import { explained, getJson, hasKey, isReady, onRefused, setKey } from "./api.js";
import { hideTip } from "./answer.js";
import * as live from "./live.js";
import * as playground from "./playground.js";
import * as profile from "./profile.js";
import * as race from "./race.js";

const TABS = ["playground", "race", "live", "profile"];
const LONGEST_WAIT = 8; // seconds between two attempts to connect
const THEMES = ["system", "light", "dark"];
const SINGLE_KEYS = "forerun-single-keys"; // kept: on or off
const SENDABLE = /^[\x20-\x7e]+$/; // what a header can carry and a key of the server can be

let attempts = 0;
let retry = null;

// ---------------------------------------------------------------------------------------------------- the connection

async function connect() {
  clearTimeout(retry);
  if (document.documentElement.dataset.key === "needed" && !hasKey()) return askForKey("");
  try {
    if (!(await isReady())) return wait("loading", "The model is still loading, or the server is stopping.");
    settle(await getJson("server_info"));
  } catch (error) {
    if (error.status === 401) return undefined; // the dialog is open
    return wait("lost", explained(error));
  }
  return undefined;
}

function settle(info) {
  if (attempts) say("Connected.");
  attempts = 0;
  show($("notice"), false);
  status("ready", "ready");
  const drafters = info.speculative_config.map((drafter) => drafter.label).join(" + ") || "no drafter";
  $("model").textContent = info.served_model_names[0] ?? info.model;
  $("about").textContent = [info.dtype, info.device, drafters, `${info.verify_mode} mode`].join(" · ");
  $("version").textContent = `forerun ${info.version}`;
  for (const part of [playground, race, profile]) part.know(info);
  live.start();
  if (selected() === "profile") profile.load();
}

function wait(state, message) {
  live.pause();
  attempts += 1;
  status(state, state === "loading" ? "loading" : "no answer");
  if (attempts > 1 || state === "lost") {
    if ($("notice-text").textContent !== message) $("notice-text").textContent = message;
    show($("notice"));
  }
  retry = setTimeout(connect, 1e3 * Math.min(LONGEST_WAIT, 2 ** (attempts - 1)));
}

function status(state, text) {
  $("status").dataset.state = state;
  $("status-text").textContent = text;
}

// --------------------------------------------------------------------------------------------------------------- key

function askForKey(message) {
  clearTimeout(retry);
  live.pause();
  status("locked", "needs a key");
  show($("key-open"));
  $("key-error").textContent = message;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").select();
}

function useKey(event) {
  event.preventDefault();
  const given = $("key").value.trim();
  if (!SENDABLE.test(given)) {
    $("key-error").textContent = "A key is plain ASCII text, and this is not. Was it copied whole?";
    return $("key").select();
  }
  setKey(given);
  $("key").value = "";
  $("key-dialog").close();
  return connect();
}

// -------------------------------------------------------------------------------------------------------------- tabs

const selected = () => TABS.find((name) => $(`tab-${name}`).getAttribute("aria-selected") === "true");

function select(name, focus = false) {
  hideTip();
  for (const one of TABS) {
    const is = one === name;
    $(`tab-${one}`).setAttribute("aria-selected", String(is));
    $(`tab-${one}`).tabIndex = is ? 0 : -1;
    show($(`panel-${one}`), is);
  }
  if (focus) $(`tab-${name}`).focus();
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  if (name === "live") live.draw();
  if (name === "profile" && profile.isKnown()) profile.load();
}

function moveTab(event) {
  const place = TABS.indexOf(selected());
  const last = TABS.length - 1;
  const to = { ArrowRight: place === last ? 0 : place + 1, ArrowLeft: place ? place - 1 : last, Home: 0, End: last }[
    event.key
  ];
  if (to === undefined) return;
  event.preventDefault();
  select(TABS[to], true);
}

// ------------------------------------------------------------------------------------------------- theme and shortcuts

function theme() {
  const chosen = document.documentElement.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  keep("forerun-theme", next);
  nameTheme();
  say(`Theme: ${next}.`);
}

function nameTheme() {
  $("theme").textContent = `Theme: ${document.documentElement.dataset.theme ?? "system"}`;
}

/** The choice of whether single keys act: some type by voice, and what they say would be taken for shortcuts. */
function useSingleKeys(on) {
  $("single-keys").checked = on;
  for (const [id, key] of [["theme", "t"], ["help", "?"]]) {
    if (on) $(id).setAttribute("aria-keyshortcuts", key);
    else $(id).removeAttribute("aria-keyshortcuts");
  }
  show($("help-key"), on);
}

function chooseSingleKeys() {
  useSingleKeys($("single-keys").checked);
  keep(SINGLE_KEYS, $("single-keys").checked ? "on" : "off");
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Storage can be forbidden; the choice then lasts until the page is loaded again.
  }
}

function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function pressed(event) {
  if (event.isComposing) return; // keys of an input method
  const inDialog = document.querySelector("dialog[open]");
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && !inDialog) {
    event.preventDefault();
    if (selected() === "race") race.race();
    else if (selected() === "playground") playground.generate();
  } else if (event.key === "Escape" && !inDialog) {
    hideTip();
    playground.stop();
    race.stop();
  } else if (!inDialog && !event.ctrlKey && !event.metaKey && !event.altKey && !isTyping(event.target)) {
    shortcut(event);
  }
}

function shortcut(event) {
  if (!$("single-keys").checked) return;
  const tab = TABS[Number(event.key) - 1];
  if (tab) select(tab, true);
  else if (event.key === "?") $("help-dialog").showModal();
  else if (event.key === "t") theme();
  else if (event.key === "/") (selected() === "race" ? $("race-prompt") : toPrompt()).focus();
  else return;
  event.preventDefault();
}

function toPrompt() {
  select("playground");
  return $("prompt");
}

function isTyping(node) {
  return node.matches?.("input:not([type=radio], [type=checkbox]), textarea, select") ?? false;
}

// -------------------------------------------------------------------------------------------------------------- start

function start() {
  onRefused(() => askForKey(hasKey() ? "The server did not accept this key." : ""));
  $("key-form").addEventListener("submit", useKey);
  $("key-open").addEventListener("click", () => askForKey(""));
  $("key-later").addEventListener("click", () => $("key-dialog").close());
  $("help").addEventListener("click", () => $("help-dialog").showModal());
  $("help-close").addEventListener("click", () => $("help-dialog").close());
  $("theme").addEventListener("click", theme);
  $("single-keys").addEventListener("change", chooseSingleKeys);
  useSingleKeys(kept(SINGLE_KEYS) !== "off");
  $("retry").addEventListener("click", connect);
  document.addEventListener("keydown", pressed);
  for (const name of TABS) {
    $(`tab-${name}`).addEventListener("click", () => select(name));
    $(`tab-${name}`).addEventListener("keydown", moveTab);
  }
  addEventListener("hashchange", () => TABS.includes(location.hash.slice(1)) && select(location.hash.slice(1)));
  nameTheme();
  playground.setUp();
  race.setUp();
  profile.setUp();
  live.setUp((error) => (error.status === 401 ? undefined : wait("lost", explained(error)))); // 401: the dialog is open
  select(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : TABS[0]);
  connect();
}

start();
