// Curves: small charts in groups, which share smoothing, horizontal axis, zoom and the choice of runs.

// Six colors that people who confuse red and green can tell apart (after Okabe and Ito), times four dashes.
const COLORS = 6;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const color = (i) => css("--color-" + (i % COLORS));
const dash = (i) => DASHES[Math.floor(i / COLORS) % DASHES.length];

function swatch(i) {
  const line = vector("line", { x1: 1, y1: 5, x2: 25, y2: 5, "stroke-dasharray": dash(i).join(" ") });
  line.style.stroke = `var(--color-${i % COLORS})`;
  return vector("svg", { class: "swatch", width: 26, height: 10, "aria-hidden": "true" }, line);
}
const styled_name = (run, i, ...more) => make("span", { class: "a-run" }, swatch(i), named(run.run_id), more);

const key_of = (run) => run.address ?? run.path;
const view = { smooth: 0, x: "step", log: false, zoom: null, hidden: new Set(), metric: "" };
const redraws = new Set();
const redraw = () => redraws.forEach((each) => each());
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
let is_dragged = false;
addEventListener("mouseup", () => { is_dragged = false; });

function zoom(range) {
  view.zoom = range;
  is_dragged = false;
  redraw();
}

function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return mean / total;
  });
}

function began_s(run) {
  const times = Object.values(run.curves).map((curve) => curve.times[0] / 1000);
  return Math.min(...run.spans.slice(0, 1).map((each) => each.began_s), ...times);
}

function points(run, metric, weight) {
  const curve = run.curves[metric], began = view.x === "elapsed" ? began_s(run) : 0, by_x = new Map();
  const x = view.x === "step" ? curve.steps : curve.times.map((ms) => ms / 1000 - began);
  smoothed(curve.values, weight).forEach((value, i) => by_x.set(x[i], view.log && !(value > 0) ? null : value));
  const sorted = [...by_x].sort((a, b) => a[0] - b[0]);
  return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
}

function nearest_value(plot, series, at) {
  const has = (i) => plot.data[series][i] != null;
  for (let i = 0; i < 200; i++) if (has(at - i) || has(at + i)) return has(at - i) ? at - i : at + i;
  return at;
}

const tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
function show_tip(plot, lines) {
  const at = plot.cursor.idx;
  tip.hidden = at == null || !plot.root.matches(":hover");
  if (tip.hidden) return;
  const x = plot.data[0][at], where = { step: "step " + shown(x), elapsed: span(x), clock: date(x * 1000) }[view.x];
  const values = lines.map((each, k) => ({ ...each, value: plot.data[k + 1][plot.cursor.idxs[k + 1]] }));
  const highest = values.filter(({ value }) => value != null).sort((a, b) => b.value - a.value).slice(0, 12);
  const rows = highest.map(({ run, i, value }) =>
    make("li", {}, lines.length > 1 ? styled_name(run, i) : null, make("b", {}, shown(value))));
  tip.replaceChildren(make("div", {}, where), make("ul", {}, rows));
  const over = plot.over.getBoundingClientRect(), left = over.left + plot.cursor.left;
  const has_room = left + tip.offsetWidth + 24 < innerWidth;
  tip.style.top = Math.min(over.top + 8, innerHeight - tip.offsetHeight - 8) + "px";
  tip.style.left = (has_room ? left + 16 : left - tip.offsetWidth - 16) + "px";
}

const ROUND = [1, 2, 5, 10, 30];
const ROUND_SECONDS = [1, 60, 3600, 86400].flatMap((unit) => ROUND.map((each) => each * unit)).filter((each) => each !== 30 * 3600);

// A chart of one metric. Its attempts are dashed lines; a large chart also has dotted lines for its checkpoints.
function new_chart(metric, is_large) {
  const element = make("div", { class: "plot", role: "img", "aria-label": metric });
  let plot = null, drawn_for = "", lines = [];

  function mark(u) {
    const { left, top, width, height } = u.bbox, c = u.ctx;
    const line = (run, step, s, gaps) => {
      const x = { step, elapsed: s - began_s(run), clock: s }[view.x], at = Math.round(u.valToPos(x, "x", true));
      if (at < left || at > left + width) return;
      c.setLineDash(gaps);
      c.beginPath();
      c.moveTo(at, top);
      c.lineTo(at, top + height);
      c.stroke();
    };
    c.save();
    c.globalAlpha = 0.5;
    for (const { run, i } of is_large || lines.length === 1 ? lines : []) {
      c.strokeStyle = color(i);
      run.spans.slice(1).forEach((each) => line(run, each.resumed_from, each.began_s, [8, 5]));
      const saved = is_large ? run.checkpoints.filter((each) => each.step != null) : [];
      saved.forEach((each) => line(run, each.step, each.saved_ms / 1000, [2, 6]));
    }
    c.restore();
  }
  function zoom_to_selection(u) {
    const { left, width } = u.select;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width > 2) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }
  function create(data, is_sparse) {
    plot?.destroy();
    const grid = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--dim"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const x_axis = { ...axis, size: 28, space: 70 }, y_axis = { ...axis, size: 54, space: 30 };
    y_axis.values = (_, all) => all.map((each) => (each == null ? "" : compact(each)));
    if (view.x !== "clock") x_axis.values = (_, all) => all.map(view.x === "step" ? compact : span);
    if (view.x === "elapsed") x_axis.incrs = ROUND_SECONDS;
    const style = { spanGaps: true, points: { show: is_sparse, size: 4 } };
    const series = lines.map(({ i }) => ({ ...style, stroke: color(i), dash: dash(i), width: 1.75 }));
    const raw = view.smooth ? lines.map(({ i }) => ({ ...style, stroke: color(i), alpha: 0.25, width: 1 })) : [];
    plot = new uPlot({
      width: element.clientWidth, height: is_large ? Math.max(Math.min(innerHeight - 320, 560), 240) : 160,
      padding: [8, 12, 0, 0], legend: { show: false }, focus: { alpha: 0.25 },
      cursor: {
        drag: { x: true, y: false, setScale: false }, points: { size: 5 }, dataIdx: nearest_value,
        focus: { prox: lines.length > 1 ? 20 : -1 },
        sync: { key: view.x, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      },
      scales: { x: { time: view.x === "clock", range: (_, low, high) => view.zoom || [low, high] }, y: view.log ? { distr: 3 } : {} },
      axes: [x_axis, y_axis], series: [{}, ...series, ...raw],
      hooks: { draw: [mark], setCursor: [(u) => show_tip(u, lines)], setSelect: [zoom_to_selection] },
    }, data, element);
    plot.over.addEventListener("dblclick", () => zoom(null));
    plot.over.addEventListener("mousedown", () => { is_dragged = true; });
    if (is_large) window.chart = plot;
  }
  return {
    element,
    range: () => [plot.scales.x.min ?? plot.data[0][0], plot.scales.x.max ?? plot.data[0].at(-1)],
    draw(runs) {
      lines = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.curves[metric] && !view.hidden.has(key_of(run)));
      if (is_dragged || !element.clientWidth || !lines.length) return;
      const weights = view.smooth ? [view.smooth, 0] : [0];
      const data = uPlot.join(weights.flatMap((weight) => lines.map(({ run }) => points(run, metric, weight))));
      const is_sparse = data[0].length < 40, { x, log, zoom: range } = view;
      const key = JSON.stringify([x, log, range, weights.length, lines.map(({ i }) => i), element.clientWidth, color(0), is_sparse]);
      if (key !== drawn_for) create(data, is_sparse);
      else plot.setData(data);
      drawn_for = key;
    },
    close: () => plot?.destroy(),
  };
}

function extremes(run, metric) {
  const values = run.curves[metric].values.filter((each) => each != null);
  const sorted = values.toSorted((a, b) => a - b);
  return values.length ? [values[0], values.at(-1), sorted[0], sorted.at(-1)] : ["", "", "", ""];
}

const HELP = "Drag to zoom; double-click to show everything. Dashed lines are attempts, dotted lines checkpoints. " +
  "Long curves have fewer points, but keep their highest and lowest values.";

// Show one metric large, with its figures as a table.
function open_large(metric, runs_of) {
  const big = new_chart(metric, true), figures = make("div");
  function within(low, high) {
    const [from, to] = big.range();
    zoom([from + (to - from) * low, from + (to - from) * high]);
  }
  const controls = make("div", { class: "controls" },
    button("zoom in", () => within(0.25, 0.75), { id: "zoom-in" }), button("zoom out", () => within(-0.5, 1.5)),
    button("earlier", () => within(-0.25, 0.75)), button("later", () => within(0.25, 1.25)),
    button("show all", () => zoom(null), { id: "zoom-reset" }));
  const dialog = dialog_of(metric, null, big.element, controls, make("p", { class: "dim" }, HELP), figures, tip);
  function show() {
    big.draw(runs_of());
    const rows = runs_of().filter((run) => run.curves[metric]).map((run) => [run.run_id, ...extremes(run, metric)]);
    figures.replaceChildren(table("values of " + metric, ["run", "first", "last", "lowest", "highest"], rows));
  }
  dialog.addEventListener("close", () => {
    redraws.delete(show);
    big.close();
    document.body.append(tip);
  });
  redraws.add(show);
  show();
}

const ORDER = ["train", "eval", "val", "validation", "test", "", "rollout", "?", "data", "system", "perf", "time", "diagnosis", "trainer"];
const FOLDED = new Set(["time", "diagnosis", "trainer"]);
const group_of = (metric) => (metric.includes("/") ? metric.slice(0, metric.indexOf("/")) : "");
const rank_of = (group) => ORDER.indexOf(ORDER.includes(group) ? group : "?");

function curves() {
  const cards = new Map(), groups = new Map(), place = make("div");
  let runs = [];
  const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    const card = cards.get(target.dataset.metric);
    card.is_seen = isIntersecting;
    if (isIntersecting) card.small.draw(runs);
  }), { rootMargin: "300px" });

  function add_card(metric) {
    const small = new_chart(metric, false), value = make("output"), group = group_of(metric);
    const open = { class: "title", "aria-haspopup": "dialog", "aria-label": "enlarge " + metric };
    const title = button(named(group ? metric.slice(group.length + 1) : metric), () => open_large(metric, () => runs), open);
    const element = make("article", { class: "card" }, make("header", {}, title, value), small.element);
    element.dataset.metric = metric;
    cards.set(metric, { element, small, value, is_seen: false });
    if (!groups.has(group)) add_group(group);
    groups.get(group).grid.append(element);
    seen.observe(element);
  }
  function add_group(name) {
    const count = make("span", { class: "dim" }), grid = make("div", { class: "grid" });
    const title = make("summary", {}, make("h3", {}, name || "metrics"), " ", count);
    groups.set(name, { element: make("details", { class: "group", open: !FOLDED.has(name) }, title, grid), grid, count });
    const ordered = [...groups].sort((a, b) => rank_of(a[0]) - rank_of(b[0]) || (a[0] < b[0] ? -1 : 1));
    place.replaceChildren(...ordered.map(([, each]) => each.element));
  }
  function show_card(metric, { element, small, value, is_seen }, shown_runs) {
    const with_metric = shown_runs.filter((run) => run.curves[metric]);
    element.hidden = !with_metric.length || !metric.toLowerCase().includes(view.metric);
    if (element.hidden) return;
    const figures = with_metric.map((run) => ({ run, last: extremes(run, metric).map(shown) }));
    value.textContent = figures.length === 1 ? figures[0].last[1] : "";
    const texts = figures.map(({ run, last: [, last, low, high] }) => `${run.run_id}: last ${last}, lowest ${low}, highest ${high}`);
    small.element.setAttribute("aria-label", visible(metric + ". " + texts.join("; ")));
    if (is_seen) small.draw(runs);
  }
  function show() {
    const shown_runs = runs.filter((run) => !view.hidden.has(key_of(run)));
    for (const [metric, card] of cards) show_card(metric, card, shown_runs);
    for (const { element, grid, count } of groups.values()) {
      count.textContent = [...grid.children].filter((each) => !each.hidden).length;
      element.hidden = count.textContent === "0";
    }
    reset.hidden = !view.zoom;
  }
  redraws.add(show);
  addEventListener("resize", show);
  addEventListener("beforeprint", () => cards.forEach(({ small }) => small.draw(runs)));
  const filter = search({ id: "metric", placeholder: "name of a metric" }, () => { view.metric = filter.value.toLowerCase(); show(); });
  const set_weight = () => { view.smooth = +smooth.value; redraw(); };
  const smooth = make("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: set_weight });
  const axes = [["step", "steps"], ["elapsed", "time since the start"], ["clock", "date and time"]];
  const axis = choice({ id: "axis" }, axes, () => { view.x = axis.value; zoom(null); });
  const log = checkbox(() => { view.log = log.checked; redraw(); }, { id: "log" });
  const reset = button("show all", () => zoom(null));
  const controls = make("div", { class: "controls sticky" },
    field("metrics", filter), field("smoothing", smooth), field("over", axis), field(log, "log scale"), reset);
  const none = make("p", {}, "No metric was logged."), title = make("h2", { class: "unseen" }, "Curves");
  document.body.append(tip);
  return { element: section("Curves", title, none, controls, place), update(newest) {
    runs = newest;
    const is_loss = (name) => name.endsWith("loss"), names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
    names.sort((a, b) => is_loss(b) - is_loss(a) || (a < b ? -1 : 1));
    names.filter((metric) => !cards.has(metric)).forEach(add_card);
    none.hidden = names.length > 0;
    controls.hidden = !names.length;
    redraw();
  } };
}

// The runs that are compared: their styles, and a choice of those to show.
function legend() {
  const list = make("ul"), rows = new Map(), filter = search({ id: "runs", placeholder: "show only …" }, () => choose());
  function choose() {
    view.hidden.clear();
    for (const [key, { box, row, text }] of rows) {
      row.hidden = !text.includes(filter.value.toLowerCase());
      if (row.hidden || !box.checked) view.hidden.add(key);
    }
    redraw();
  }
  function add_row(run, i) {
    const box = checkbox(choose, { "aria-label": "show " + run.run_id, checked: true }), facts = make("div", { class: "dim" });
    const name = run.address == null ? named(run.run_id) : link("run", { run: run.address }, named(run.run_id));
    const row = make("li", {}, field(box, swatch(i)), make("div", {}, name, facts));
    rows.set(key_of(run), { box, row, facts, text: JSON.stringify([run.run_id, run.address, run.state]).toLowerCase() });
    list.append(row);
  }
  const element = section("Compared runs", field("runs", filter), list);
  element.className = "legend";
  return { element, update(runs) {
    runs.forEach((run, i) => {
      if (!rows.has(key_of(run))) add_row(run, i);
      const texts = [state_of(run), run.loss == null ? "" : "loss " + shown(run.loss), score_of(run), left_of(run)].filter(Boolean);
      rows.get(key_of(run)).facts.replaceChildren(...texts.flatMap((each) => [each, " · "]).slice(0, -1));
    });
  } };
}
