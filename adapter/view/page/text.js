"use strict";
// All data of a run is put into the page as text, never as markup.

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => String(text).replace(CONTROLS, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

function fill(element, attributes, inside) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : visible(value));
  }
  const there = inside.flat().filter((each) => each != null && each !== false);
  element.append(...there.map((each) => (each instanceof Node ? each : visible(each))));
  return element;
}
const make = (tag, attributes = {}, ...inside) => fill(document.createElement(tag), attributes, inside);
const vector = (tag, attributes = {}, ...inside) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, inside);

// Numbers, sizes and times

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });
const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 8 });

function shown(value) {
  if (value == null) return "";
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value !== "number") return String(value);
  const magnitude = Math.abs(value);
  if (value && (magnitude < 1e-4 || magnitude >= 1e15)) return String(+value.toPrecision(4));
  if (Number.isInteger(value)) return GROUPED.format(value);
  return GROUPED.format(magnitude >= 1000 ? Math.round(value) : +value.toPrecision(4));
}
const compact = (value) => (Math.abs(value) >= 1e4 ? COMPACT.format(value) : shown(value));
const plural = (count, noun) => shown(count) + " " + noun + (count === 1 ? "" : "s");
const percent = (share) => (100 * share).toFixed(share < 0.995 && share > 0 ? 1 : 0) + " %";

function size(bytes) {
  let rest = bytes, unit = 0;
  for (; rest >= 1000 && unit < 4; unit++) rest /= 1000;
  return (unit ? rest.toFixed(1) : rest) + " " + ["B", "kB", "MB", "GB", "TB"][unit];
}

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
function span(seconds) {
  if (Math.abs(seconds) < 10) return +seconds.toFixed(1) + " s";
  let rest = Math.round(Math.abs(seconds));
  const at = UNITS.findIndex(([, length]) => rest >= length);
  const parts = UNITS.slice(at, at + 2).map(([unit, length]) => {
    const count = Math.floor(rest / length);
    rest -= count * length;
    return count ? count + " " + unit : "";
  });
  return (seconds < 0 ? "-" : "") + parts.filter(Boolean).join(" ");
}

const date = (ms) => (ms ? new Date(ms).toLocaleString() : "");
function ago(ms, now_ms) {
  if (!ms) return "";
  const seconds = Math.max(now_ms - ms, 0) / 1000;
  const [unit, length] = UNITS.find((each) => seconds >= each[1]) || UNITS.at(-1);
  const words = seconds < 5 ? "now" : Math.floor(seconds / length) + " " + unit + " ago";
  return make("time", { datetime: new Date(ms).toISOString(), title: date(ms) }, words);
}

// Figures of a run, the same in the list and on its page

const step_of = (run) => shown(run.step) + (run.max_steps ? " / " + shown(run.max_steps) : "");
const score_of = (run) => (run.score ? run.score.name + " " + shown(run.score.value) : "");
const speed_of = (run) => (run.steps_per_s ? shown(+run.steps_per_s.toPrecision(3)) + " steps/s" : "");
const left_of = (run) => (run.left_s == null ? "" : span(run.left_s) + " left");
const state_of = (run) => make("span", { class: "state " + run.state }, run.state);

const money = (value) => value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const hours_of = (run) => (run.device_hours < 0.01 ? "< 0.01" : shown(+run.device_hours.toPrecision(3))) + " device h";
function cost_of(run) {
  if (run.device_hours == null) return "";
  return (run.cost == null ? "" : money(run.cost) + " for ") + hours_of(run);
}

function bar_of(run) {
  if (!run.max_steps) return null;
  const bar = make("span", { class: "progress " + run.state, "aria-hidden": "true" }, make("span"));
  bar.firstChild.style.width = 100 * Math.min(run.step / run.max_steps, 1) + "%";
  return bar;
}

// A name that is shortened in the middle if there is no room for it.
function named(text) {
  const letters = [...visible(text)], tail = letters.length > 20 ? letters.slice(-10) : [];
  const head = letters.slice(0, letters.length - tail.length).join("");
  const parts = [head, tail.join("")].filter(Boolean).map((each) => make("span", {}, each));
  return make("span", { class: "name", title: letters.join("") }, parts);
}

// Parts of a page

const section = (title, ...inside) => make("section", { "aria-label": title, id: title.toLowerCase().replaceAll(" ", "-") }, inside);
const button = (text, act, attributes = {}) => make("button", { ...attributes, onclick: act }, text);
const field = (text, control) => make("label", {}, text, " ", control);
const search = (attributes, act) => make("input", { ...attributes, type: "search", oninput: act });
const checkbox = (act, attributes = {}) => make("input", { ...attributes, type: "checkbox", onchange: act });
const choice = (attributes, options, act) =>
  make("select", { ...attributes, onchange: act }, options.map(([value, text]) => make("option", { value }, text)));
const query = (page, names) => page + "?" + new URLSearchParams(names);
const link = (page, names, text) => make("a", { href: query(page, names) }, text);

function dialog_of(title, header, ...inside) {
  const dialog = make("dialog", { "aria-label": title, onclose: () => dialog.remove() },
    make("header", {}, make("h2", {}, named(title)), header, button("Close", () => dialog.close())), inside);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

function table(caption, head, rows) {
  const cell = (each) => (each instanceof Node ? each : shown(each));
  const body = rows.map((row) =>
    make("tr", {}, make("th", { scope: "row" }, cell(row[0])), row.slice(1).map((each) => make("td", {}, cell(each)))));
  const names = make("tr", {}, head.map((each) => make("th", { scope: "col" }, each)));
  return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": caption },
    make("table", {}, make("thead", {}, names), make("tbody", {}, body)));
}

// A part has an `update` that shows newer data and keeps what a person has set (a filter, a zoom).
// A drawn part has no such settings: it is drawn again whenever its data has changed; if `draw` returns null, it is hidden.
// A folded one is drawn only while it is open. `title` may be a function of the data.
function drawn(title, draw, is_folded = false) {
  const place = make("div"), heading = make("h2"), title_of = typeof title === "string" ? () => title : title;
  const fold = () => make("details", { class: "part", ontoggle: () => show() }, make("summary", {}, heading), place);
  const element = is_folded ? fold() : section(title, heading, place);
  let data = null, before = null;
  function show() {
    const text = JSON.stringify(data);
    if (text === before || (is_folded && !element.open)) return;
    before = text;
    const inside = draw(data);
    element.hidden = inside == null;
    place.replaceChildren(...[inside].flat().filter(Boolean));
  }
  return { element, update(newest) {
    data = newest;
    heading.textContent = visible(title_of(data));
    show();
  } };
}
