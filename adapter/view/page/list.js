// The list of all runs below a folder.
const MOST_COMPARED = 20;
const STATES = ["running", "completed", "stopped", "failed", "lost"];

function sparkline(values) {
  if (values.length < 2) return null;
  const low = Math.min(...values), height = Math.max(...values) - low || 1;
  const points = values.map((value, i) => [1 + (78 * i) / (values.length - 1), 21 - (18 * (value - low)) / height]);
  const line = vector("polyline", { points: points.map(([x, y]) => x.toFixed(1) + "," + y.toFixed(1)).join(" ") });
  return vector("svg", { class: "spark", width: 80, height: 24, "aria-hidden": "true" }, line);
}

const line = (text) => (text ? make("span", {}, text) : null);
const dim = (text) => (text ? make("span", { class: "dim" }, text) : null);
const name_of = (run) => (run.address === "." ? run.run_id : run.address);
// Each column with the value to sort by, and the content of a cell.
const COLUMNS = [
  ["run", name_of, (run) => [link("run", { run: run.address }, named(name_of(run)))]],
  ["state", (run) => STATES.indexOf(run.state), (run) => [state_of(run)]],
  ["progress", (run) => run.step / (run.max_steps || Infinity) || 0, (run) => [bar_of(run), line(step_of(run)), dim(left_of(run))]],
  ["loss", (run) => run.loss, (run) => [sparkline(run.losses), line(shown(run.loss))]],
  ["speed", (run) => run.steps_per_s, (run) => [speed_of(run)]],
  ["best", (run) => run.score?.value, (run) => (run.score ? [line(shown(run.score.value)), dim(named(run.score.name))] : [])],
  ["age", (run) => -run.alive_at_ms, (run, now_ms) => [ago(run.alive_at_ms, now_ms)]],
  ["cost", (run) => run.cost ?? run.device_hours, (run) => [run.cost == null ? null : line(money(run.cost)), dim(hours_of(run))]],
  ["notes", (run) => run.ending, (run) => [run.waiting_uploads ? run.waiting_uploads + " uploads wait. " : null, run.ending]],
].map(([name, value, cell]) => ({ name, value, cell }));

function compare_values(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  if (typeof a === "string" && typeof b === "string") return a.localeCompare(b, "en", { numeric: true });
  return a < b ? -1 : a > b ? 1 : 0;
}

// The group of each name: its beginning up to the last separator, if others have the same.
function groups_of(names) {
  const begin = (name) => name.match(/^.*[-_/]/)?.[0] ?? "", counts = new Map();
  for (const name of names) counts.set(begin(name), (counts.get(begin(name)) || 0) + 1);
  return (name) => (counts.size > 1 && counts.get(begin(name)) > 1 ? begin(name) : "");
}

function list() {
  const rows = new Map(), closed = new Set(), filter = search({ id: "find", placeholder: "name, state, error, …" }, () => show());
  const states = choice({ id: "state" }, ["", ...STATES].map((each) => [each, each || "all"]), () => show());
  const grouping = checkbox(() => show(), { checked: true });
  const compare = button("", () => { location.href = query("run", chosen().map((each) => ["run", each])); }, { id: "compare" });
  const count = make("span", { role: "status" }), costs = make("span"), table = make("table", { class: "runs" });
  const sort_buttons = COLUMNS.map(({ name }) => make("th", { scope: "col", class: "of-" + name }, button(name, () => sort_by(name))));
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "chosen")), sort_buttons));
  const controls = make("div", { class: "controls sticky" },
    field("find", filter), field("state", states), field(grouping, "groups"), compare);
  const place = make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "runs" }, table);
  const element = section("Runs", controls, make("p", { class: "dim" }, count, costs), place);
  let runs = [], now_ms = 0, sorted = { name: "", descending: false };
  const chosen = () => runs.map((run) => run.address).filter((each) => rows.get(each).box.checked);

  function sort_by(name) {
    sorted = { name, descending: sorted.name === name && !sorted.descending };
    show();
  }
  function add_row(run) {
    const box = checkbox(show_chosen, { "aria-label": "choose " + run.address });
    const cells = COLUMNS.map(({ name }) => make(name === "run" ? "th" : "td", { class: "of-" + name, scope: name === "run" && "row" }));
    rows.set(run.address, { box, cells, row: make("tr", {}, make("td", { class: "box" }, box), cells), before: "" });
  }
  function row_of(run) {
    if (!rows.has(run.address)) add_row(run);
    const known = rows.get(run.address), text = JSON.stringify([run, ago(run.alive_at_ms, now_ms).textContent]);
    if (known.before === text) return known.row;
    known.before = text;
    known.cells.forEach((each) => each.replaceChildren());
    COLUMNS.forEach(({ cell }, k) => fill(known.cells[k], {}, cell(run, now_ms)));
    return known.row;
  }
  function group_row(name, members) {
    const counts = STATES.map((state) => [members.filter((run) => run.state === state).length, state]).filter(([n]) => n);
    const fold = () => { closed[closed.has(name) ? "delete" : "add"](name); show(); };
    const choose = () => { for (const { address } of members) rows.get(address).box.checked = true; show_chosen(); };
    const title = button(named(name + "…"), fold, { "aria-expanded": String(!closed.has(name)) });
    const facts = plural(members.length, "run") + ": " + counts.map((each) => each.join(" ")).join(", ");
    const span = { scope: "rowgroup", colspan: COLUMNS.length + 1 };
    return make("tr", { class: "group" }, make("th", span, title, dim(facts), button("choose all", choose)));
  }
  function show_chosen() {
    const { length } = chosen();
    compare.disabled = length < 1 || length > MOST_COMPARED;
    compare.textContent = length > MOST_COMPARED ? `Choose at most ${MOST_COMPARED} runs` : `Compare ${length || "the chosen"} runs`;
  }
  function show() {
    const text = filter.value.toLowerCase(), { value } = COLUMNS.find(({ name }) => name === sorted.name) || {};
    const is_found = (run) => (!states.value || run.state === states.value) && JSON.stringify(run).toLowerCase().includes(text);
    const left = runs.filter(is_found), sign = sorted.descending ? -1 : 1;
    if (value) left.sort((a, b) => sign * compare_values(value(a), value(b)));
    const group_of_name = grouping.checked ? groups_of(runs.map(name_of)) : () => "";
    const groups = new Map(left.map((run) => [group_of_name(name_of(run)), []]));
    for (const run of left) groups.get(group_of_name(name_of(run))).push(run);
    const focused = document.activeElement;
    table.replaceChildren(head, ...[...groups].map(([name, members]) =>
      make("tbody", {}, name ? group_row(name, members) : null, closed.has(name) ? null : members.map(row_of))));
    if (table.contains(focused)) focused.focus();
    const order = sorted.descending ? "descending" : "ascending";
    sort_buttons.forEach((each, k) => each.setAttribute("aria-sort", COLUMNS[k].name === sorted.name ? order : "none"));
    const sum = (name) => left.reduce((total, run) => (run[name] == null ? total : (total || 0) + run[name]), null);
    costs.textContent = " · " + cost_of({ device_hours: sum("device_hours"), cost: sum("cost") });
    costs.hidden = !sum("device_hours");
    const counts = `${shown(left.length)} of ${plural(runs.length, "run")}`;
    if (count.textContent !== counts) count.textContent = counts; // a screen reader speaks each change
    show_chosen();
  }
  return { element, update(data) {
    ({ list: runs, made_at_ms: now_ms } = data);
    table.className = "runs " + COLUMNS.filter(({ value }) => runs.every((run) => (value(run) ?? "") === "")).map(({ name }) => "no-" + name).join(" ");
    runs.forEach(row_of);
    show();
  } };
}
