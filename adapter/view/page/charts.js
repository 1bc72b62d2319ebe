// Curves: small charts in groups, which share smoothing, horizontal axis, zoom and the choice of runs.

const DARK = matchMedia("(prefers-color-scheme: dark)"), PAPER = matchMedia("print");
// Colors that people who confuse red and green can tell apart (after Okabe and Ito), with enough contrast on the paper.
const ON_LIGHT = ["#0064a8", "#c24e00", "#00805c", "#a3408f", "#6b5d00", "#5a6370"];
const ON_DARK = ["#62b8ff", "#ff9d4d", "#2fc98f", "#eb93d3", "#e6d34a", "#b9c2cd"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const color = (i) => (DARK.matches && !PAPER.matches ? ON_DARK : ON_LIGHT)[i % ON_LIGHT.length];
const dash = (i) => DASHES[Math.floor(i / ON_LIGHT.length) % DASHES.length];

function swatch(i) {
  const line = vector("line", { x1: 1, y1: 5, x2: 25, y2: 5, "stroke-dasharray": dash(i).join(" "), class: "style-" + (i % ON_LIGHT.length) });
  return vector("svg", { class: "swatch", width: 26, height: 10, "aria-hidden": "true" }, line);
}

const key_of = (run) => run.address ?? run.path;
const view = { smooth: 0, x: "step", log: false, zoom: null, hidden: new Set(), metric: "" };
const redraws = new Set();
const redraw = () => redraws.forEach((each) => each());
for (const changed of [DARK, PAPER]) changed.addEventListener("change", redraw);

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

const tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
function show_tip(plot, lines) {
  const at = plot.cursor.idx;
  tip.hidden = at == null || !plot.root.matches(":hover");
  if (tip.hidden) return;
  const x = plot.data[0][at], where = { step: "step " + shown(x), elapsed: span(x), clock: date(x * 1000) }[view.x];
  const values = lines.map(({ run, i }, k) => ({ run, i, value: plot.data[k + 1][plot.cursor.idxs[k + 1]] })).filter((each) => each.value != null);
  values.sort((a, b) => b.value - a.value);
  const rows = values.slice(0, 12).map(({ run, i, value }) => make("li", {}, lines.length > 1 ? [swatch(i), named(run.run_id)] : null, make("b", {}, shown(value))));
  tip.replaceChildren(make("div", {}, where), make("ul", {}, rows));
  const over = plot.over.getBoundingClientRect(), left = over.left + plot.cursor.left;
  tip.style.top = Math.min(over.top + 8, innerHeight - tip.offsetHeight - 8) + "px";
  tip.style.left = (left + tip.offsetWidth + 24 > innerWidth ? left - tip.offsetWidth - 16 : left + 16) + "px";
}

function nearest_value(plot, series, at) {
  const values = plot.data[series];
  for (let i = 0; i < 200 && values[at] == null && (at - i >= 0 || at + i < values.length); i++) {
    if (values[at - i] != null) return at - i;
    if (values[at + i] != null) return at + i;
  }
  return at;
}

const SECONDS = [1, 2, 5, 10, 30].concat([1, 2, 5, 10, 30].map((n) => n * 60), [1, 2, 4, 8, 12].map((n) => n * 3600), [1, 2, 5, 10, 20, 50].map((n) => n * 86400));

// A chart of one metric. Its attempts are dashed lines; a large chart also has dotted lines for its checkpoints.
function chart(metric, is_large) {
  const element = make("div", { class: is_large ? "plot large" : "plot", role: "img" });
  let plot = null, drawn_for = "", lines = [], is_dragged = false;

  function mark(u) {
    const { left, top, width, height } = u.bbox, c = u.ctx;
    const line = (run, step, s, gaps) => {
      const x = { step, elapsed: s - began_s(run), clock: s }[view.x], at = Math.round(u.valToPos(x, "x", true));
      c.setLineDash(gaps);
      c.beginPath();
      c.moveTo(at, top);
      c.lineTo(at, top + height);
      c.stroke();
    };
    c.save();
    c.beginPath();
    c.rect(left, top, width, height);
    c.clip();
    c.globalAlpha = 0.5;
    for (const { run, i } of is_large || lines.length === 1 ? lines : []) {
      c.strokeStyle = color(i);
      run.spans.slice(1).forEach((each) => line(run, each.resumed_from, each.began_s, [8, 5]));
      const saved = is_large ? run.checkpoints.filter((each) => each.step != null) : [];
      saved.forEach((each) => line(run, each.step, each.saved_ms / 1000, [2, 6]));
    }
    c.restore();
  }
  function create(data, is_sparse) {
    plot?.destroy();
    const style = getComputedStyle(document.documentElement), grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.getPropertyValue("--dim"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const texts = { step: (_, all) => all.map(compact), elapsed: (_, all) => all.map(span) }[view.x];
    const series = lines.map(({ i }) => ({ stroke: color(i), dash: dash(i), width: 1.75, spanGaps: true, points: { show: is_sparse, size: 4 } }));
    const raw = view.smooth ? lines.map(({ i }) => ({ stroke: color(i), alpha: 0.25, width: 1, spanGaps: true, points: { show: false } })) : [];
    plot = new uPlot({
      width: element.clientWidth, height: is_large ? Math.max(Math.min(innerHeight - 320, 560), 240) : 170, legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false }, dataIdx: nearest_value, focus: { prox: lines.length > 1 ? 20 : -1 }, points: { size: 5 },
        sync: { key: view.x, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      },
      focus: { alpha: 0.25 },
      scales: { x: { time: view.x === "clock", range: (_, low, high) => view.zoom || [low, high] }, y: view.log ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 28, space: 70, ...(texts ? { values: texts } : {}), ...(view.x === "elapsed" ? { incrs: SECONDS } : {}) },
        { ...axis, size: 58, space: 30, values: (_, all) => all.map((each) => (each == null ? "" : compact(each))) }],
      series: [{}, ...series, ...raw],
      hooks: { draw: [mark], setCursor: [(u) => show_tip(u, lines)], setSelect: [(u) => {
        const { left, width } = u.select;
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (width > 2) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
      }] },
    }, data, element);
    plot.over.addEventListener("dblclick", () => zoom(null));
    plot.over.addEventListener("mousedown", () => { is_dragged = true; });
    if (is_large) window.chart = plot;
  }
  addEventListener("mouseup", () => { is_dragged = false; });
  return {
    element,
    range: () => plot && [plot.scales.x.min, plot.scales.x.max],
    draw(runs) {
      lines = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.curves[metric] && !view.hidden.has(key_of(run)));
      if (is_dragged || !element.clientWidth || !lines.length) return;
      const weights = view.smooth ? [view.smooth, 0] : [0];
      const data = uPlot.join(weights.flatMap((weight) => lines.map(({ run }) => points(run, metric, weight))));
      const is_sparse = data[0].length < 40, { x, log, zoom: range, smooth } = view;
      const key = JSON.stringify([x, log, range, smooth > 0, lines.map(({ i }) => i), element.clientWidth, color(0), is_sparse]);
      if (key !== drawn_for) create(data, is_sparse);
      else plot.setData(data);
      drawn_for = key;
    },
    close() {
      plot?.destroy();
      plot = null;
    },
  };
}

function zoom(range) {
  view.zoom = range;
  redraw();
}

function extremes(run, metric) {
  const values = run.curves[metric].values.filter((each) => each != null);
  const [low, high] = values.reduce(([a, b], each) => [Math.min(a, each), Math.max(b, each)], [Infinity, -Infinity]);
  return values.length ? [values[0], values.at(-1), low, high] : ["", "", "", ""];
}

// The dialog that shows one metric large, with its figures as a table.
function open_large(metric, runs_of) {
  const big = chart(metric, true), figures = make("div");
  const within = (low, high) => { const [from, to] = big.range(); zoom([from + (to - from) * low, from + (to - from) * high]); };
  const button = (id, text, act) => make("button", { id, onclick: act }, text);
  const controls = make("div", { class: "controls" },
    button("zoom-in", "zoom in", () => within(0.25, 0.75)), button("zoom-out", "zoom out", () => within(-0.5, 1.5)),
    button("earlier", "earlier", () => within(-0.25, 0.75)), button("later", "later", () => within(0.25, 1.25)), button("zoom-reset", "show all", () => zoom(null)));
  const help = "Drag to zoom; double-click to show everything. Dashed lines: attempts. Dotted lines: checkpoints. " +
    "Long curves have fewer points, but keep their highest and lowest values.";
  const dialog = make("dialog", { "aria-label": metric, class: "large" },
    make("header", {}, make("h2", {}, named(metric)), button("close", "Close", () => dialog.close())),
    big.element, controls, make("p", { class: "dim" }, help), figures);
  const show = () => {
    const runs = runs_of().filter((run) => run.curves[metric]);
    big.draw(runs_of());
    figures.replaceChildren(table("values of " + metric, ["run", "first", "last", "lowest", "highest"], runs.map((run) => [run.run_id, ...extremes(run, metric)])));
  };
  dialog.append(tip);
  dialog.addEventListener("close", () => {
    redraws.delete(show);
    big.close();
    document.body.append(tip);
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
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

  function new_card(metric) {
    const small = chart(metric, false), value = make("output"), short = metric.slice(group_of(metric).length).replace(/^\//, "") || metric;
    const title = make("button", { class: "title", "aria-haspopup": "dialog", "aria-label": "enlarge " + metric, onclick: () => open_large(metric, () => runs) }, named(short));
    const element = make("article", { class: "card", "data-metric": metric }, make("header", {}, title, value), small.element);
    element.dataset.metric = metric;
    cards.set(metric, { element, small, value, is_seen: false });
    seen.observe(element);
  }
  function new_group(name) {
    const count = make("span", { class: "dim" }), grid = make("div", { class: "grid" });
    const element = make("details", { class: "group", open: !FOLDED.has(name) }, make("summary", {}, make("h3", {}, name || "metrics"), " ", count), grid);
    groups.set(name, { element, grid, count });
  }
  function show() {
    const shown_runs = runs.filter((run) => !view.hidden.has(key_of(run)));
    for (const { element } of groups.values()) element.dataset.count = 0;
    for (const [metric, { element, small, value, is_seen }] of cards) {
      const with_metric = shown_runs.filter((run) => run.curves[metric]), group = groups.get(group_of(metric)).element;
      element.hidden = !with_metric.length || !metric.toLowerCase().includes(view.metric);
      if (element.hidden) continue;
      group.dataset.count++;
      value.textContent = with_metric.length === 1 ? shown(extremes(with_metric[0], metric)[1]) : "";
      const figures = with_metric.slice(0, 20).map((run) => { const [, last, low, high] = extremes(run, metric); return `${run.run_id}: last ${shown(last)}, lowest ${shown(low)}, highest ${shown(high)}`; });
      small.element.setAttribute("aria-label", visible(metric + ". " + figures.join("; ")));
      if (is_seen) small.draw(runs);
    }
    for (const { element, count } of groups.values()) {
      element.hidden = element.dataset.count === "0";
      count.textContent = element.dataset.count;
    }
    reset.hidden = !view.zoom;
  }
  redraws.add(show);
  addEventListener("resize", show);
  addEventListener("beforeprint", () => cards.forEach(({ small }) => small.draw(runs)));
  const filter = make("input", { id: "metric", type: "search", placeholder: "name of a metric", oninput: () => { view.metric = filter.value.toLowerCase(); show(); } });
  const smooth = make("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => { view.smooth = +smooth.value; redraw(); } });
  const axis = make("select", { id: "axis", onchange: () => { view.x = axis.value; zoom(null); } },
    [["step", "steps"], ["elapsed", "time since the start"], ["clock", "date and time"]].map(([value, text]) => make("option", { value }, text)));
  const log = make("input", { id: "log", type: "checkbox", onchange: () => { view.log = log.checked; redraw(); } });
  const reset = make("button", { id: "show-all", hidden: true, onclick: () => zoom(null) }, "show all");
  const controls = make("div", { class: "controls sticky" }, make("label", {}, "metrics ", filter), make("label", {}, "smoothing ", smooth),
    make("label", {}, "over ", axis), make("label", {}, log, " log scale"), reset);
  const none = make("p", {}, "No metric was logged.");
  const element = make("section", { "aria-label": "Curves", class: "curves" }, make("h2", { class: "unseen" }, "Curves"), none, controls, place);
  document.body.append(tip);
  return { element, update(newest) {
    runs = newest;
    const is_loss = (name) => name.endsWith("loss"), names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
    names.sort((a, b) => is_loss(b) - is_loss(a) || (a < b ? -1 : 1));
    none.hidden = names.length > 0;
    controls.hidden = !names.length;
    for (const metric of names) {
      if (cards.has(metric)) continue;
      if (!groups.has(group_of(metric))) new_group(group_of(metric));
      new_card(metric);
      groups.get(group_of(metric)).grid.append(cards.get(metric).element);
    }
    const ordered = [...groups].sort((a, b) => rank_of(a[0]) - rank_of(b[0]) || (a[0] < b[0] ? -1 : 1)).map(([, each]) => each.element);
    if (ordered.some((each, i) => place.children[i] !== each)) place.replaceChildren(...ordered);
    redraw();
  } };
}

// The runs that are compared: their styles, and a choice of those to show.
function legend() {
  const filter = make("input", { id: "runs", type: "search", placeholder: "name of a run", oninput: () => show() });
  const list = make("ul"), rows = new Map();
  const all = (on) => () => { for (const { box, row } of rows.values()) if (!row.hidden) choose(box, on); redraw(); };
  const element = make("section", { class: "legend", "aria-label": "Compared runs" }, make("h2", {}, "Runs"),
    make("div", { class: "controls" }, make("label", {}, make("span", { class: "unseen" }, "runs "), filter), make("button", { onclick: all(true) }, "show"), make("button", { onclick: all(false) }, "hide")), list);
  function choose(box, on) {
    box.checked = on;
    view.hidden[on ? "delete" : "add"](box.value);
  }
  function show() {
    for (const { row, text } of rows.values()) row.hidden = !text.includes(filter.value.toLowerCase());
  }
  return { element, update(runs) {
    runs.forEach((run, i) => {
      if (!rows.has(key_of(run))) {
        const box = make("input", { type: "checkbox", value: key_of(run), "aria-label": "show " + run.run_id, onchange: () => { choose(box, box.checked); redraw(); } });
        const name = run.address == null ? named(run.run_id) : make("a", { href: "run?run=" + encodeURIComponent(run.address) }, named(run.run_id));
        const facts = make("div", { class: "dim" }), row = make("li", {}, make("label", {}, box, swatch(i)), make("div", {}, name, facts));
        box.checked = true;
        box.value = key_of(run);
        rows.set(key_of(run), { box, row, facts, text: JSON.stringify([run.run_id, run.address, run.state]).toLowerCase() });
        list.append(row);
      }
      const facts = [state_of(run), run.loss == null ? null : "loss " + shown(run.loss), score_of(run), left_of(run)].filter(Boolean);
      rows.get(key_of(run)).facts.replaceChildren(...facts.flatMap((each, k) => (k ? [" · ", each] : [each])));
    });
    show();
  } };
}
