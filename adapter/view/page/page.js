"use strict";
// Everything that comes from a run is put into the page as text, never as markup.
const make = (tag, attributes = {}, ...inside) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((each) => each != null).map((each) => (each instanceof Node ? each : visible(each))));
  return element;
};
const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const shown = (value) => value == null ? "" : typeof value === "number" ? String(Number.isInteger(value) ? value : +value.toPrecision(5)) : typeof value === "object" ? JSON.stringify(value) : String(value);
const date = (ms) => ms ? new Date(ms).toLocaleString() : "";
const span = (s) => s < 60 ? s.toFixed(1) + " s" : s < 3600 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h";
const size = (bytes) => { let n = bytes, i = 0; while (n >= 1000 && i < 4) { n /= 1000; i++; } return (i ? n.toFixed(1) : n) + " " + ["B", "kB", "MB", "GB", "TB"][i]; };
const table = (caption, head, rows) => make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
  make("table", {}, make("thead", {}, make("tr", {}, ...head.map((each) => make("th", { scope: "col" }, each)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((each, i) => i ? make("td", {}, each instanceof Node ? each : shown(each)) : make("th", { scope: "row" }, each instanceof Node ? each : shown(each))))))));
const section = (title, ...inside) => make("section", { "aria-label": title }, make("h2", {}, title), ...inside);
const DARK = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = () => DARK.matches ? ["#79b8ff", "#ffab70", "#7ee787", "#d2a8ff", "#ff9492", "#e3b341"] : ["#0550ae", "#b35900", "#116329", "#6639ba", "#a40e26", "#7a4d00"];
const PARTS = { steps: "#2f6f3e", data_wait: "#b35900", checkpoint: "#0550ae", samples: "#6639ba", evaluation: "#8a63d2", rollout: "#217a8a", start_up: "#6b7280", ending: "#9aa3ad", upload_wait: "#c9a227", lost: "#a40e26", idle: "#d8dde3" };

const chosen = { metric: null, smooth: 0, log: false, time: false, zoom: null };
let chart = null;

function smoothed(values, weight) {
  let mean = null, total = 0;
  return weight ? values.map((v) => { if (v == null) return null; mean = (mean ?? 0) * weight + v * (1 - weight); total = total * weight + 1 - weight; return mean / total; }) : values;
}
function marks(runs) {
  return { hooks: { draw: [(u) => {
    const c = u.ctx, { left, top, width, height } = u.bbox;
    c.save(); c.beginPath(); c.rect(left, top, width, height); c.clip();
    runs.forEach((run, i) => {
      const line = (x, dash) => { const at = Math.round(u.valToPos(x, "x", true)); c.strokeStyle = COLOURS()[i % 6]; c.setLineDash(dash); c.globalAlpha = .6; c.beginPath(); c.moveTo(at, top); c.lineTo(at, top + height); c.stroke(); };
      run.attempts.slice(1).forEach((each) => line(chosen.time ? each.began_s : each.resumed_from, [8, 5]));
      run.checkpoints.forEach((each) => { if (each.step != null) line(chosen.time ? each.saved_ms / 1000 : each.step, [2, 6]); });
    });
    c.restore();
  }] } };
}
function draw(place, runs) {
  if (chart) chart.destroy();
  place.replaceChildren();
  const with_metric = runs.filter((run) => run.curves[chosen.metric]);
  if (!with_metric.length) { place.append("no value was logged"); return; }
  const colours = COLOURS(), ink = getComputedStyle(document.body).color, grid = getComputedStyle(document.documentElement).getPropertyValue("--line");
  const data = uPlot.join(with_metric.map((run) => {
    const curve = run.curves[chosen.metric], x = chosen.time ? curve.times.map((t) => t / 1000) : curve.steps, seen = new Map();
    smoothed(curve.values, chosen.smooth).forEach((v, i) => seen.set(x[i], chosen.log && !(v > 0) ? null : v));
    const sorted = [...seen].sort((a, b) => a[0] - b[0]);
    return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
  }));
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
  chart = new uPlot({
    width: place.clientWidth, height: 340, plugins: [marks(with_metric)], cursor: { drag: { x: true, y: false } },
    scales: { x: { time: chosen.time, ...(chosen.zoom ? { range: () => chosen.zoom } : {}) }, y: chosen.log ? { distr: 3 } : {} },
    axes: [axis, { ...axis, size: 80 }],
    series: [{ label: chosen.time ? "time" : "step" }, ...with_metric.map((run) => ({ label: visible(run.run_id), stroke: colours[runs.indexOf(run) % 6], width: 2, spanGaps: true, points: { show: data[0].length < 60 } }))],
    hooks: { setSelect: [(u) => { if (u.select.width > 2) { chosen.zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]; draw(place, runs); } }] },
  }, data, place);
  window.chart = chart;
  chart.over.addEventListener("dblclick", () => { chosen.zoom = null; draw(place, runs); });
  place.append(table("values of " + visible(chosen.metric), ["run", "first", "last", "lowest", "highest"], with_metric.map((run) => {
    const values = run.curves[chosen.metric].values.filter((v) => v != null);
    return [run.run_id, values[0], values[values.length - 1], values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  })));
}
function curves(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  if (!names.length) return section("Curves", make("p", {}, "No metric was logged."));
  if (!names.includes(chosen.metric)) chosen.metric = names.find((name) => name === "train/loss") || names.find((name) => name.endsWith("loss")) || names[0];
  const place = make("div", { class: "chart" }), again = () => draw(place, runs);
  const zoom = (factor) => { const { min, max } = chart.scales.x, middle = (min + max) / 2, half = (max - min) / 2 * factor; chosen.zoom = [middle - half, middle + half]; again(); };
  const move = (share) => { const { min, max } = chart.scales.x, by = (max - min) * share; chosen.zoom = [min + by, max + by]; again(); };
  const select = make("select", { id: "metric", onchange: (event) => { chosen.metric = event.target.value; again(); } }, ...names.map((name) => { const option = make("option", { selected: name === chosen.metric }, name); option.value = name; return option; }));
  queueMicrotask(again);
  addEventListener("resize", again); DARK.onchange = again;
  return section("Curves", make("div", { class: "controls" },
    make("label", {}, "metric ", select),
    make("label", {}, "smoothing ", make("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: chosen.smooth, oninput: (event) => { chosen.smooth = +event.target.value; again(); } })),
    make("label", {}, make("input", { id: "log", type: "checkbox", checked: chosen.log, onchange: (event) => { chosen.log = event.target.checked; again(); } }), " log axis"),
    make("label", {}, make("input", { id: "time", type: "checkbox", checked: chosen.time, onchange: (event) => { chosen.time = event.target.checked; chosen.zoom = null; again(); } }), " time instead of steps"),
    make("button", { id: "zoom-in", onclick: () => zoom(.5) }, "zoom in"), make("button", { onclick: () => zoom(2) }, "zoom out"),
    make("button", { onclick: () => move(-.25) }, "earlier"), make("button", { onclick: () => move(.25) }, "later"),
    make("button", { id: "zoom-reset", onclick: () => { chosen.zoom = null; again(); } }, "whole")),
    place, make("p", { class: "dim" }, "Drag to zoom, double click for the whole. Dashed lines: attempts. Dotted lines: checkpoints. Long curves are thinned; highest and lowest values stay."));
}
function timeline(run) {
  if (!run.attempts.length) return null;
  const bars = run.attempts.map((each, i) => {
    const total = Object.values(each.seconds).reduce((a, b) => a + b, 0) || 1, text = Object.entries(each.seconds).map(([part, s]) => part.replace("_", " ") + " " + span(s)).join(", ");
    const bar = make("div", { class: "bar", role: "img", "aria-label": text, title: text });
    for (const [part, s] of Object.entries(each.seconds)) { const piece = make("span"); piece.style.width = 100 * s / total + "%"; piece.style.background = PARTS[part] || "#888"; bar.append(piece); }
    return [i + 1, date(each.began_s * 1000), span(each.ended_s - each.began_s), each.resumed_from + " to " + each.last_step, each.ended ? "ended" : "no end", bar];
  });
  const parts = Object.entries(run.parts).map(([part, s]) => { const key = make("span", { class: "key" }); key.style.background = PARTS[part] || "#888"; return make("li", {}, key, part.replace("_", " ") + ": " + span(s)); });
  const known = run.goodput == null ? "" : (100 * run.goodput).toFixed(1) + "% of the time were steps whose work was kept.";
  return section("Attempts of " + visible(run.run_id), make("p", {}, known), table("attempts", ["attempt", "began", "took", "steps", "end", "where the time went"], bars), make("ul", {}, ...parts));
}
function samples(run) {
  const steps = [...new Set(run.samples.map((each) => each.step))];
  if (!steps.length) return null;
  const place = make("div", { class: "samples" }), label = make("output", {}, "");
  const show = (i) => {
    label.textContent = "step " + steps[i];
    place.replaceChildren(...run.samples.filter((each) => each.step === steps[i]).flatMap((each) => (each.files.length ? each.files : [{ name: each.name, note: "no file" }]).map((file) =>
      make("figure", {}, file.source ? make("img", { src: file.source, alt: visible(each.name + ": " + (each.prompt || file.name)), loading: "lazy" }) : make("p", { class: "dim" }, visible(file.name) + ": " + visible(file.note)), make("figcaption", {}, each.name + (each.prompt ? ": " + each.prompt : ""))))));
  };
  const slider = make("input", { type: "range", class: "steps", min: 0, max: steps.length - 1, value: steps.length - 1, oninput: (event) => show(+event.target.value) });
  show(steps.length - 1);
  return section("Samples of " + visible(run.run_id), make("div", { class: "controls" }, make("label", {}, "step ", slider), label), place);
}
function events(run) {
  const place = make("div"), kinds = [...new Set(run.events.map((each) => each.event))];
  let kind = "", text = "";
  const show = () => {
    const rows = run.events.filter((each) => (!kind || each.event === kind) && (!text || JSON.stringify(each).toLowerCase().includes(text.toLowerCase())));
    place.replaceChildren(table("events", ["time", "event", "step", "what"], rows.slice(-300).map((each) => [date(each.timestamp_ms), each.event, each.step, each.error || each.path || each.final_checkpoint || (each.attempt ? "attempt " + each.attempt : "")])), make("p", { class: "dim" }, rows.length + " of " + (run.events.length + run.left_out.events) + " events; the newest 300 at most are shown"));
  };
  show();
  return section("Events of " + visible(run.run_id), make("div", { class: "controls" },
    make("label", {}, "kind ", make("select", { class: "kind", onchange: (event) => { kind = event.target.value; show(); } }, make("option", { value: "" }, "all"), ...kinds.map((each) => make("option", { value: each }, each)))),
    make("label", {}, "text ", make("input", { class: "filter", type: "search", oninput: (event) => { text = event.target.value; show(); } }))), place);
}
function about(run) {
  const facts = [["state", make("span", { class: "state " + run.state }, run.state)], ["steps", run.step + (run.max_steps ? " of " + run.max_steps : "")], ["attempts", run.attempts.length], ["last sign of life", date(run.alive_at_ms)], ["speed", run.steps_per_s ? shown(run.steps_per_s) + " steps/s" : ""], ["left", run.left_s == null ? "" : span(run.left_s)], ["last loss", run.loss], ["best score", run.score ? run.score.name + " " + shown(run.score.value) : ""], ["size", size(run.size_bytes)], ["folder", run.path]];
  const findings = run.findings.length ? make("ul", {}, ...run.findings.map((each) => make("li", { class: each.level }, (each.step == null ? "" : "step " + each.step + ": ") + each.text + (each.remedy ? ". " + each.remedy : "")))) : make("p", {}, "Nothing was found.");
  return [section("Run " + visible(run.run_id), ...run.words.map((each) => make("p", {}, each)), table("facts", ["fact", "value"], facts.filter((each) => each[1] !== "" && each[1] != null))), section("Findings of " + visible(run.run_id), findings)];
}
function rest(run) {
  const rows = run.checkpoints.map((each) => [each.name, each.step, size(each.size), date(each.saved_ms), each.state, Object.entries(each.scores).map(([n, v]) => n + " " + shown(v)).join(", "), make("span", {}, make("code", {}, each.show), each.export ? make("br") : "", each.export ? make("code", {}, each.export) : "")]);
  const { job, ...others } = run.metadata, settings = [...Object.entries(job || {}), ...Object.entries(others)];
  return [rows.length ? section("Checkpoints of " + visible(run.run_id), table("checkpoints", ["name", "step", "size", "saved", "state", "scores", "commands"], rows)) : null,
    samples(run), timeline(run), events(run),
    section("Configuration of " + visible(run.run_id), table("configuration", ["name", "value"], settings), make("details", {}, make("summary", {}, "Versions of " + Object.keys(run.packages).length + " packages"), table("packages", ["package", "version"], Object.entries(run.packages))))].filter(Boolean);
}
function build(data) {
  const main = document.querySelector("main"), differ = data.differences;
  const at = scrollY;
  main.replaceChildren(make("h1", {}, data.runs.map((run) => run.run_id).join(", ")), make("p", { class: "dim" }, "as of " + date(data.made_at_ms) + ", by genlight " + data.version),
    ...(data.runs.length > 1 ? [section("What differs", differ.length ? table("differences", ["what", ...data.runs.map((run) => visible(run.run_id))], differ) : make("p", {}, "Nothing that is known."))] : []),
    ...data.runs.flatMap(about), curves(data.runs), ...data.runs.flatMap(rest));
  scrollTo(0, at);
}
build(JSON.parse(document.getElementById("data").textContent));
