// The list of all runs below a folder.

const MOST_COMPARED = 20;
const STATES = ["running", "completed", "stopped", "failed", "lost"];

function sparkline(values) {
  if (values.length < 2) return null;
  const low = Math.min(...values), height = Math.max(...values) - low || 1;
  const at = values.map((value, i) => `${((i / (values.length - 1)) * 78 + 1).toFixed(1)},${(21 - ((value - low) / height) * 18).toFixed(1)}`);
  return vector("svg", { class: "spark", width: 80, height: 24, "aria-hidden": "true" }, vector("polyline", { points: at.join(" ") }));
}

const name_of = (run) => (run.address === "." ? run.run_id : run.address);
const COLUMNS = [
  { name: "run", value: name_of, cell: (run) => make("a", { href: "run?run=" + encodeURIComponent(run.address) }, named(name_of(run))) },
  { name: "state", value: (run) => STATES.indexOf(run.state), cell: state_of },
  { name: "progress", value: (run) => run.step / (run.max_steps || Infinity) || 0,
    cell: (run) => [bar_of(run), make("span", {}, step_of(run)), run.left_s == null ? null : make("span", { class: "dim" }, left_of(run))] },
  { name: "loss", value: (run) => run.loss, cell: (run) => [sparkline(run.losses), make("span", {}, shown(run.loss))] },
  { name: "speed", value: (run) => run.steps_per_s, cell: speed_of },
  { name: "best", value: (run) => run.score?.value, cell: (run) => (run.score ? [make("span", {}, shown(run.score.value)), make("span", { class: "dim" }, named(run.score.name))] : "") },
  { name: "age", value: (run) => -run.alive_at_ms, cell: (run, now_ms) => ago(run.alive_at_ms, now_ms) },
  { name: "cost", value: (run) => run.cost ?? run.device_hours, cell: (run) => (run.device_hours == null ? "" : [run.cost == null ? null : make("span", {}, money(run.cost)), make("span", { class: "dim" }, hours_of(run))]) },
  { name: "notes", value: (run) => run.ending, cell: (run) => [run.waiting_uploads ? plural(run.waiting_uploads, "upload") + " waiting. " : "", run.ending] },
];

function compare_values(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  if (typeof a === "string" && typeof b === "string") return a.localeCompare(b, "en", { numeric: true });
  return a < b ? -1 : a > b ? 1 : 0;
}

function beginning_of(names) {
  const [first = "", ...others] = names;
  let length = first.length;
  for (const name of others) while (!name.startsWith(first.slice(0, length))) length--;
  return first.slice(0, length);
}

// The group of each name: its beginning up to the separator after what all names have in common.
function groups_of(names) {
  const shared = beginning_of(names), common = Math.max(...["/", "-", "_"].map((each) => shared.lastIndexOf(each) + 1));
  const begin = (name) => name.slice(0, common) + (name.slice(common).match(/^[^-_/]*[-_/]/)?.[0] ?? "");
  const counts = new Map();
  for (const name of names) counts.set(begin(name), (counts.get(begin(name)) || 0) + 1);
  return (name) => (counts.size > 1 && counts.get(begin(name)) > 1 ? begin(name) : "");
}

function list() {
  const filter = make("input", { id: "filter", type: "search", placeholder: "name, state, error, …", oninput: () => show() });
  const states = make("select", { id: "state", onchange: () => show() }, ["all", ...STATES].map((each) => make("option", { value: each === "all" ? "" : each }, each)));
  const sorting = make("select", { id: "sort", onchange: () => sort_by(sorting.value) }, make("option", { value: "" }, "newest first"), COLUMNS.map(({ name }) => make("option", { value: name }, name)));
  const grouped = make("input", { id: "grouped", type: "checkbox", checked: true, onchange: () => show() });
  const compare = make("button", { id: "compare", onclick: () => { location.href = "run?" + chosen().map((each) => "run=" + encodeURIComponent(each)).join("&"); } });
  const count = make("p", { class: "dim", role: "status" }), table = make("table", { class: "runs" }), rows = new Map(), closed = new Set();
  const sort_buttons = COLUMNS.map(({ name }) => make("th", { scope: "col" }, make("button", { onclick: () => sort_by(name) }, name)));
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "chosen")), sort_buttons));
  const element = make("section", { "aria-label": "Runs" },
    make("div", { class: "controls sticky" }, make("label", {}, "find ", filter), make("label", {}, "state ", states), make("label", {}, "sort by ", sorting), make("label", {}, grouped, " groups"), compare),
    count, make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "runs" }, table));
  let runs = [], now_ms = 0, sorted = { name: "", descending: false };
  const chosen = () => runs.map((run) => run.address).filter((each) => rows.get(each).box.checked);

  function sort_by(name) {
    sorted = { name, descending: sorted.name === name && !sorted.descending };
    sorting.value = name;
    show();
  }
  function row_of(run) {
    if (!rows.has(run.address)) {
      const box = make("input", { type: "checkbox", "aria-label": "choose " + run.address, onchange: show_chosen });
      rows.set(run.address, { box, cells: COLUMNS.map(({ name }) => make(name === "run" ? "th" : "td", { class: "of-" + name, scope: name === "run" ? "row" : null })), before: "" });
      rows.get(run.address).row = make("tr", {}, make("td", { class: "box" }, box), rows.get(run.address).cells);
    }
    const known = rows.get(run.address), text = JSON.stringify(run) + ago(run.alive_at_ms, now_ms).textContent;
    if (known.before !== text) COLUMNS.forEach(({ cell }, k) => known.cells[k].replaceChildren(...[cell(run, now_ms)].flat().filter((each) => each != null && each !== "").map((each) => (each instanceof Node ? each : visible(each)))));
    known.before = text;
    return known.row;
  }
  function group_row(name, members) {
    const states_of = STATES.map((state) => [state, members.filter((run) => run.state === state).length]).filter(([, n]) => n).map(([state, n]) => n + " " + state).join(", ");
    const toggle = make("button", { "aria-expanded": String(!closed.has(name)), onclick: () => { closed[closed.has(name) ? "delete" : "add"](name); show(); } }, named(beginning_of(members.map(name_of)) + "…"));
    const choose = make("button", { class: "choose", onclick: () => { for (const { address } of members) rows.get(address).box.checked = true; show_chosen(); } }, "choose all");
    return make("tr", { class: "group" }, make("th", { scope: "rowgroup", colspan: COLUMNS.length + 1 }, toggle, make("span", { class: "dim" }, `${plural(members.length, "run")}: ${states_of}`), choose));
  }
  function show_chosen() {
    const { length } = chosen();
    compare.disabled = length < 1 || length > MOST_COMPARED;
    compare.textContent = length > MOST_COMPARED ? `${length} chosen; compare at most ${MOST_COMPARED}` : length > 1 ? `Compare ${length} runs` : "Compare the chosen runs";
  }
  function show() {
    const text = filter.value.toLowerCase(), column = COLUMNS.find(({ name }) => name === sorted.name);
    const left = runs.filter((run) => (!states.value || run.state === states.value) && (!text || JSON.stringify(run).toLowerCase().includes(text)));
    if (column) left.sort((a, b) => compare_values(column.value(a), column.value(b)) * (sorted.descending ? -1 : 1));
    const group_of_name = grouped.checked ? groups_of(runs.map(name_of)) : () => "", groups = new Map();
    for (const run of left) {
      const name = group_of_name(name_of(run));
      groups.set(name, [...(groups.get(name) || []), run]);
    }
    const focused = document.activeElement;
    table.replaceChildren(head, ...[...groups].map(([name, members]) =>
      make("tbody", {}, name ? group_row(name, members) : null, name && closed.has(name) ? null : members.map(row_of))));
    if (table.contains(focused)) focused.focus();
    sort_buttons.forEach((each, k) => each.setAttribute("aria-sort", COLUMNS[k].name !== sorted.name ? "none" : sorted.descending ? "descending" : "ascending"));
    const hours = left.reduce((sum, run) => sum + (run.device_hours || 0), 0), costs = left.map((run) => run.cost).filter((each) => each != null);
    const total = hours ? " · " + cost_of({ device_hours: hours, cost: costs.length ? costs.reduce((a, b) => a + b) : null }) : "";
    count.textContent = `${shown(left.length)} of ${plural(runs.length, "run")}${total}`;
    show_chosen();
  }
  return { element, update(data) {
    runs = data.list;
    now_ms = data.made_at_ms;
    const addresses = new Set(runs.map((run) => run.address));
    for (const address of rows.keys()) if (!addresses.has(address)) rows.delete(address);
    runs.forEach(row_of);
    show();
  } };
}
