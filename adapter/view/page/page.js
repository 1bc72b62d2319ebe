"use strict";
// All data of a run is put into the page as text, never as markup.

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => String(text).replace(CONTROLS, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : visible(value));
  }
  const there = inside.filter((each) => each != null);
  element.append(...there.map((each) => (each instanceof Node ? each : visible(each))));
  return element;
}

function shown(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(Number.isInteger(value) ? value : +value.toPrecision(5));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
const date = (ms) => (ms ? new Date(ms).toLocaleString() : "");
function span(s) {
  if (s < 60) return s.toFixed(1) + " s";
  if (s < 3600) return (s / 60).toFixed(1) + " min";
  return s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " d";
}
function size(bytes) {
  let n = bytes, unit = 0;
  for (; n >= 1000 && unit < 4; unit++) n /= 1000;
  return (unit ? n.toFixed(1) : n) + " " + ["B", "kB", "MB", "GB", "TB"][unit];
}
const steps = (run) => run.step + (run.max_steps ? " of " + run.max_steps : "");
const score = (run) => (run.score ? run.score.name + " " + shown(run.score.value) : "");

function table(caption, head, rows) {
  const cell = (each) => (each instanceof Node ? each : shown(each));
  const body = rows.map((row) =>
    make("tr", {}, make("th", { scope: "row" }, cell(row[0])), ...row.slice(1).map((each) => make("td", {}, cell(each)))));
  const names = make("tr", {}, ...head.map((each) => make("th", { scope: "col" }, each)));
  return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": caption },
    make("table", {}, make("thead", {}, names), make("tbody", {}, ...body)));
}
const section = (title, ...inside) => make("section", { "aria-label": title }, make("h2", {}, title), ...inside);

const pick = (run, names) => Object.fromEntries(["run_id", "address", ...names].map((name) => [name, run[name]]));

// A part of the page has an `update` that shows newer data and keeps what a person has set (a filter, a zoom).
// A drawn part has no such settings: it is drawn again whenever its data has changed.
function drawn(draw) {
  const element = make("div");
  let before = null;
  return { element, update(data) {
    const text = JSON.stringify(data);
    if (text === before) return;
    before = text;
    const focused = document.activeElement?.id;
    element.replaceChildren(...[draw(data)].flat().filter(Boolean));
    if (focused) document.getElementById(focused)?.focus();
  } };
}

// Curves

const DARK = matchMedia("(prefers-color-scheme: dark)"), PAPER = matchMedia("print");
const ON_LIGHT = ["#0550ae", "#b35900", "#116329", "#6639ba", "#a40e26", "#7a4d00"];
const ON_DARK = ["#79b8ff", "#ffab70", "#7ee787", "#d2a8ff", "#ff9492", "#e3b341"];
const color = (i) => (DARK.matches && !PAPER.matches ? ON_DARK : ON_LIGHT)[i % 6];

function smoothed(values, weight) {
  let mean = 0, total = 0;
  if (!weight) return values;
  return values.map((value) => {
    if (value == null) return null;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return mean / total;
  });
}

function curves() {
  const chosen = { metric: null, smooth: 0, log: false, time: false, zoom: null };
  const place = make("div", { class: "chart" }), none = make("p", {}, "No metric was logged.");
  const select = make("select", { id: "metric", onchange: () => { chosen.metric = select.value; draw(); } });
  let runs = [], chart = null, drawn_for = "", is_dragged = false;

  function marks(u) {
    const { left, top, width, height } = u.bbox, c = u.ctx;
    const line = (x, dash) => {
      const at = Math.round(u.valToPos(x, "x", true));
      c.setLineDash(dash);
      c.beginPath();
      c.moveTo(at, top);
      c.lineTo(at, top + height);
      c.stroke();
    };
    c.save();
    c.beginPath();
    c.rect(left, top, width, height);
    c.clip();
    c.globalAlpha = 0.6;
    runs.forEach((run, i) => {
      c.strokeStyle = color(i);
      run.spans.slice(1).forEach((each) => line(chosen.time ? each.began_s : each.resumed_from, [8, 5]));
      run.checkpoints.forEach((each) => each.step != null && line(chosen.time ? each.saved_ms / 1000 : each.step, [2, 6]));
    });
    c.restore();
  }
  function points(run) {
    const curve = run.curves[chosen.metric], seen = new Map();
    const x = chosen.time ? curve.times.map((t) => t / 1000) : curve.steps;
    smoothed(curve.values, chosen.smooth).forEach((v, i) => seen.set(x[i], chosen.log && !(v > 0) ? null : v));
    const sorted = [...seen].sort((a, b) => a[0] - b[0]);
    return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
  }
  function new_chart(data, runs_of_it) {
    chart?.destroy();
    const style = getComputedStyle(document.documentElement), grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.getPropertyValue("--ink"), grid, ticks: grid };
    const series = runs_of_it.map((run) => ({
      label: visible(run.run_id), stroke: color(runs.indexOf(run)), width: 2, spanGaps: true,
      points: { show: data[0].length < 60 },
    }));
    chart = new uPlot({
      width: place.clientWidth, height: 340, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: chosen.time, range: (u, low, high) => chosen.zoom || [low, high] }, y: chosen.log ? { distr: 3 } : {} },
      axes: [axis, { ...axis, size: 80 }],
      series: [{ label: chosen.time ? "time" : "step" }, ...series],
      hooks: { draw: [marks], setSelect: [(u) => {
        const { left, width } = u.select;
        if (width > 2) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
      }] },
    }, data, place);
    chart.over.addEventListener("dblclick", () => zoom(null));
    chart.over.addEventListener("mousedown", () => { is_dragged = true; });
    window.chart = chart;
  }
  function draw() {
    const with_metric = runs.filter((run) => run.curves[chosen.metric]);
    if (!with_metric.length) return;
    const data = uPlot.join(with_metric.map(points)), { metric, log, time } = chosen;
    const key = JSON.stringify([metric, log, time, with_metric.map((run) => run.path), place.clientWidth, color(0), data[0].length < 60]);
    if (key !== drawn_for) { place.replaceChildren(); new_chart(data, with_metric); }
    else { chart.setData(data); place.lastChild.remove(); }
    drawn_for = key;
    place.append(table("values of " + metric, ["run", "first", "last", "lowest", "highest"], with_metric.map((run) => {
      const values = run.curves[metric].values.filter((v) => v != null), least = (a, b) => Math.min(a, b), most = (a, b) => Math.max(a, b);
      return [run.run_id, values[0], values.at(-1), values.length ? values.reduce(least) : "", values.length ? values.reduce(most) : ""];
    })));
  }
  const zoom = (range) => { chosen.zoom = range; drawn_for = ""; draw(); };
  const within = (low, high) => { const { min, max } = chart.scales.x; zoom([min + (max - min) * low, min + (max - min) * high]); };
  const button = (text, act, id) => make("button", { id, onclick: () => chart && act() }, text);
  const box = (id, text, act) => make("label", {}, make("input", { id, type: "checkbox", onchange: (e) => { act(e.target.checked); draw(); } }), text);
  const smooth = make("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (e) => { chosen.smooth = +e.target.value; draw(); } });
  addEventListener("mouseup", () => { is_dragged = false; });
  for (const changed of [DARK, PAPER]) changed.addEventListener("change", draw);
  addEventListener("resize", draw);
  const controls = make("div", { class: "controls" }, make("label", {}, "metric ", select), make("label", {}, "smoothing ", smooth),
    box("log", " log axis", (on) => { chosen.log = on; }),
    box("time", " time instead of steps", (on) => { chosen.time = on; chosen.zoom = null; }),
    button("zoom in", () => within(0.25, 0.75), "zoom-in"), button("zoom out", () => within(-0.5, 1.5), "zoom-out"),
    button("earlier", () => within(-0.25, 0.75), "earlier"), button("later", () => within(0.25, 1.25), "later"),
    button("show all", () => zoom(null), "zoom-reset"));
  const help = "Drag to zoom; double-click to show everything. Dashed lines: attempts. Dotted lines: checkpoints. " +
    "Long curves have fewer points, but keep their highest and lowest values.";
  const element = section("Curves", none, controls, place, make("p", { class: "dim" }, help));
  return { element, update(newest) {
    if (is_dragged) return;
    runs = newest;
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
    none.hidden = names.length > 0;
    controls.hidden = !names.length;
    if (!names.includes(chosen.metric)) chosen.metric = names.find((name) => name === "train/loss") || names.find((name) => name.endsWith("loss")) || names[0];
    if (names.join("\n") !== [...select.options].map((each) => each.value).join("\n")) {
      select.replaceChildren(...names.map((name) => { const option = make("option", {}, name); option.value = name; return option; }));
    }
    select.value = chosen.metric;
    draw();
  } };
}

// Parts of one run

const PARTS = { steps: "#2f6f3e", data_wait: "#b35900", checkpoint: "#0550ae", samples: "#6639ba", evaluation: "#8a63d2", rollout: "#217a8a", start_up: "#6b7280", ending: "#9aa3ad", upload_wait: "#c9a227", lost: "#a40e26", idle: "#d8dde3" };
function painted(element, part) {
  element.style.background = PARTS[part] || "#888";
  return element;
}

function stop_button() {
  const said = make("span", { role: "status" }), button = make("button", { class: "stop", onclick: () => stop() }, "Stop this run");
  let run = null;
  async function stop() {
    if (!confirm("Stop " + visible(run.run_id) + " after a checkpoint of its current step?")) return;
    const answer = await fetch("stop?run=" + encodeURIComponent(run.address), { method: "POST", headers: { "X-Genlight": "stop" } });
    said.textContent = visible(await answer.text());
  }
  return { element: make("p", {}, button, " ", said), update(newest) {
    run = newest;
    button.hidden = run.address == null || run.state !== "running";
    if (button.hidden) said.textContent = "";
  } };
}

function about() {
  const stop = stop_button(), words = drawn((run) => run.words.map((each) => make("p", {}, each))), facts = drawn(facts_of);
  const title = make("h2"), element = make("section", {}, title, words.element, stop.element, facts.element);
  return { element, update(run) {
    title.textContent = "Run " + visible(run.run_id);
    element.setAttribute("aria-label", title.textContent);
    words.update(pick(run, ["words"]));
    facts.update(pick(run, FACTS));
    stop.update(run);
  } };
}
const FACTS = ["state", "step", "max_steps", "attempts", "alive_at_ms", "steps_per_s", "left_s", "loss", "score", "size_bytes", "waiting_uploads", "host", "path"];
function facts_of(run) {
  const facts = [
    ["state", make("span", { class: "state " + run.state }, run.state)], ["steps", steps(run)], ["attempts", run.attempts],
    ["last activity", date(run.alive_at_ms)], ["speed", run.steps_per_s ? shown(run.steps_per_s) + " steps/s" : ""],
    ["left", run.left_s == null ? "" : span(run.left_s)], ["last loss", run.loss], ["best score", score(run)],
    ["size", size(run.size_bytes)], ["waiting uploads", run.waiting_uploads], ["host", run.host], ["folder", run.path]];
  return table("facts of " + run.run_id, ["fact", "value"], facts.filter((each) => each[1] !== "" && each[1] != null));
}

function findings(run) {
  const line = (each) => make("li", { class: each.level }, (each.step == null ? "" : "step " + each.step + ": ") + each.text + (each.remedy ? ". " + each.remedy : ""));
  return section("Findings of " + run.run_id, run.findings.length ? make("ul", {}, ...run.findings.map(line)) : make("p", {}, "No findings."));
}

function checkpoints(run) {
  const commands = (each) => make("span", {}, make("code", {}, each.show), each.export ? make("br") : null, each.export ? make("code", {}, each.export) : null);
  const name = (each) => (run.address != null && each.step != null ? make("a", { href: "checkpoint?run=" + encodeURIComponent(run.address) + "&name=" + encodeURIComponent(each.name) }, each.name + ".tar") : each.name);
  const scores = (each) => Object.entries(each.scores).map(([n, v]) => n + " " + shown(v)).join(", ");
  const rows = run.checkpoints.map((each) => [name(each), each.step, size(each.size), date(each.saved_ms), each.state, scores(each), commands(each)]);
  return rows.length ? section("Checkpoints of " + run.run_id, table("checkpoints of " + run.run_id, ["name", "step", "size", "saved", "state", "scores", "commands"], rows)) : null;
}

function samples() {
  const place = make("div", { class: "samples" }), label = make("output"), title = make("h2");
  const slider = make("input", { type: "range", class: "steps", min: 0, oninput: () => show() });
  const element = make("section", { hidden: true }, title, make("div", { class: "controls" }, make("label", {}, "step ", slider), label), place);
  let run = null, all = [], before = "";
  function picture(each, file) {
    const alt = each.name + ": " + (each.prompt || file.name);
    if (!file.source) return make("p", { class: "dim" }, file.name + ": " + file.note);
    const image = make("img", { src: file.source, alt, loading: "lazy" });
    return file.source.startsWith("data:") ? image : make("a", { href: file.source, download: "" }, image);
  }
  function show() {
    const step = all[+slider.value], at = run.samples.filter((each) => each.step === step);
    label.textContent = "step " + step;
    place.replaceChildren(...at.flatMap((each) => (each.files.length ? each.files : [{ name: each.name, note: "no file" }]).map((file) =>
      make("figure", {}, picture(each, file), make("figcaption", {}, each.name + (each.prompt ? ": " + each.prompt : ""))))));
  }
  return { element, update(newest) {
    const text = JSON.stringify(newest.samples), was_newest = !all.length || +slider.value === all.length - 1;
    if (text === before) return;
    before = text;
    run = newest;
    all = [...new Set(run.samples.map((each) => each.step))];
    element.hidden = !all.length;
    title.textContent = "Samples of " + visible(run.run_id);
    element.setAttribute("aria-label", title.textContent);
    slider.max = Math.max(all.length - 1, 0);
    if (was_newest) slider.value = slider.max;
    if (all.length) show();
  } };
}

function timeline(run) {
  if (!run.spans.length) return null;
  const rows = run.spans.map((each, i) => {
    const spent = Object.entries(each.seconds), total = spent.reduce((sum, [, s]) => sum + s, 0) || 1;
    const text = spent.map(([part, s]) => part.replace("_", " ") + " " + span(s)).join(", ");
    const bar = make("div", { class: "bar", role: "img", "aria-label": text, title: text });
    for (const [part, s] of spent) {
      const piece = painted(make("span"), part);
      piece.style.width = (100 * s) / total + "%";
      bar.append(piece);
    }
    return [i + 1, date(each.began_s * 1000), span(each.ended_s - each.began_s), each.resumed_from + " to " + each.last_step, each.ended ? "ended" : "no end", bar];
  });
  const parts = Object.entries(run.parts).map(([part, s]) => make("li", {}, painted(make("span", { class: "key" }), part), part.replace("_", " ") + ": " + span(s)));
  const known = run.goodput == null ? "" : (100 * run.goodput).toFixed(1) + "% of the time was spent on steps whose work was kept.";
  return section("Attempts of " + run.run_id, make("p", {}, known), table("attempts of " + run.run_id, ["attempt", "began", "took", "steps", "end", "where the time went"], rows), make("ul", {}, ...parts));
}

function events() {
  const place = make("div"), title = make("h2");
  const kinds = make("select", { class: "kind", onchange: () => show() }, make("option", { value: "" }, "all"));
  const filter = make("input", { class: "filter", type: "search", oninput: () => show() });
  const element = make("section", {}, title, make("div", { class: "controls" }, make("label", {}, "kind ", kinds), make("label", {}, "text ", filter)), place);
  let run = null, before = "";
  const what = (each) => each.error || each.path || each.final_checkpoint || (each.attempt ? "attempt " + each.attempt : "");
  function show() {
    const text = filter.value.toLowerCase();
    const rows = run.events.filter((each) => (!kinds.value || each.event === kinds.value) && (!text || JSON.stringify(each).toLowerCase().includes(text)));
    const count = rows.length + " of " + (run.events.length + run.left_out.events) + " events; at most the newest 300 are shown";
    place.replaceChildren(table("events of " + run.run_id, ["time", "event", "step", "what"], rows.slice(-300).map((each) => [date(each.timestamp_ms), each.event, each.step, what(each)])), make("p", { class: "dim" }, count));
  }
  return { element, update(newest) {
    const text = JSON.stringify([newest.events, newest.left_out]);
    if (text === before) return;
    before = text;
    run = newest;
    title.textContent = "Events of " + visible(run.run_id);
    element.setAttribute("aria-label", title.textContent);
    const known = [...kinds.options].map((each) => each.value);
    for (const kind of new Set(run.events.map((each) => each.event))) if (!known.includes(kind)) kinds.append(make("option", { value: kind }, kind));
    show();
  } };
}

function configuration(run) {
  const { job, ...others } = run.metadata, packages = Object.entries(run.packages);
  return section("Configuration of " + run.run_id, table("configuration of " + run.run_id, ["name", "value"], [...Object.entries(run.job || job || {}), ...Object.entries(others)]),
    make("details", {}, make("summary", {}, "Versions of " + packages.length + " packages"), table("packages of " + run.run_id, ["package", "version"], packages)));
}

function differences(data) {
  if (data.runs.length < 2) return null;
  const head = ["what", ...data.runs.map((run) => run.run_id)];
  return section("What differs", data.differences.length ? table("differences", head, data.differences) : make("p", {}, "No known difference."));
}

// All runs below a folder

function list() {
  const filter = make("input", { id: "filter", type: "search", oninput: () => show() });
  const states = make("select", { id: "state", onchange: () => show() }, ...["all", "running", "completed", "stopped", "failed", "lost"].map((each) => make("option", { value: each === "all" ? "" : each }, each)));
  const compare = make("button", { id: "compare", onclick: () => { location.href = "run?" + chosen().map((each) => "run=" + encodeURIComponent(each)).join("&"); } }, "Compare the chosen runs");
  const count = make("p", { class: "dim" }), body = make("tbody"), rows = new Map();
  const head = ["chosen", "run", "state", "step", "age", "speed", "left", "loss", "best", "size", "uploads", "how it ended"].map((each) => make("th", { scope: "col" }, each));
  const element = section("Runs", make("div", { class: "controls" }, make("label", {}, "text ", filter), make("label", {}, "state ", states), compare), count,
    make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "runs" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), body)));
  let runs = [];
  const chosen = () => runs.map((run) => run.address).filter((each) => rows.get(each).box.checked);
  function row_of(run) {
    const box = make("input", { type: "checkbox", "aria-label": "choose " + run.address }), cells = head.slice(2).map(() => make("td"));
    const link = make("a", { href: "run?run=" + encodeURIComponent(run.address) }, run.address === "." ? run.run_id : run.address);
    return { box, cells, row: make("tr", {}, make("td", {}, box), make("th", { scope: "row" }, link), ...cells) };
  }
  function show() {
    const text = filter.value.toLowerCase();
    let left = 0;
    for (const run of runs) {
      const { row } = rows.get(run.address);
      row.hidden = (states.value && run.state !== states.value) || (text && !JSON.stringify(run).toLowerCase().includes(text));
      left += !row.hidden;
    }
    count.textContent = left + " of " + runs.length + " runs";
  }
  return { element, update(data) {
    runs = data.list;
    const addresses = new Set(runs.map((run) => run.address));
    for (const [address, { row }] of rows) if (!addresses.has(address)) { row.remove(); rows.delete(address); }
    runs.forEach((run, i) => {
      if (!rows.has(run.address)) rows.set(run.address, row_of(run));
      const { row, cells } = rows.get(run.address);
      const texts = [run.state, steps(run), span(Math.max(data.made_at_ms - run.alive_at_ms, 0) / 1000), run.steps_per_s ? shown(run.steps_per_s) + "/s" : "", run.left_s == null ? "" : span(run.left_s),
        shown(run.loss), score(run), run.size_bytes ? size(run.size_bytes) : "", run.waiting_uploads ? run.waiting_uploads + " wait" : "", run.ending];
      texts.forEach((each, k) => { if (cells[k].textContent !== visible(each)) cells[k].textContent = visible(each); });
      cells[0].className = "state " + run.state;
      if (body.children[i] !== row) body.insertBefore(row, body.children[i] || null);
    });
    show();
  } };
}

// The page

const main = document.querySelector("main"), when = make("p", { class: "dim" });
let parts = null;

function build(data) {
  const of_each = (part, ...names) => data.runs.map((_, i) => [part(), (newest) => (names.length ? pick(newest.runs[i], names) : newest.runs[i])]);
  const whole = (newest) => newest;
  const title = data.list ? "Runs below " + data.folder : data.runs.map((run) => run.run_id).join(", ");
  const back = data.list || data.folder == null ? null : make("nav", {}, make("a", { href: "." }, "all runs below " + data.folder));
  parts = data.list ? [[list(), whole]] : [
    [drawn(differences), (newest) => ({ runs: newest.runs.map((run) => pick(run, [])), differences: newest.differences })],
    ...of_each(about), ...of_each(() => drawn(findings), "findings"), [curves(), (newest) => newest.runs],
    ...of_each(() => drawn(checkpoints), "checkpoints"), ...of_each(samples), ...of_each(() => drawn(timeline), "spans", "parts", "goodput"),
    ...of_each(events), ...of_each(() => drawn(configuration), "metadata", "packages", "job")];
  document.title = visible(title);
  main.replaceChildren(...[back, make("h1", {}, title), when].filter(Boolean), ...parts.map(([part]) => part.element));
}
function show(data) {
  if (!parts) build(data);
  when.textContent = "as of " + date(data.made_at_ms) + ", by genlight " + data.version;
  for (const [part, of] of parts) part.update(of(data));
}

const EVERY_MS = 2000;
async function follow(address, tag = "") {
  let wait = EVERY_MS;
  try {
    const answer = document.hidden && parts ? null : await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer && answer.status === 200) {
      tag = answer.headers.get("ETag");
      show(await answer.json());
    } else if (answer && answer.status !== 304) throw new Error(await answer.text());
  } catch (error) {
    when.textContent = "not up to date: " + visible(error.message);
    if (!parts) main.replaceChildren(when);
    wait = 3 * EVERY_MS;
  }
  setTimeout(follow, wait, address, tag);
}

const data = JSON.parse(document.getElementById("data").textContent);
if (data.live) {
  when.textContent = "reading…";
  main.replaceChildren(when);
  follow(data.live + location.search);
} else show(data);
