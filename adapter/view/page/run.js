// Parts of the page of one run, and of a comparison.

const PARTS = {
  steps: "#2f6f3e", data_wait: "#b35900", checkpoint: "#0550ae", samples: "#6639ba", evaluation: "#8a63d2", rollout: "#217a8a",
  start_up: "#6b7280", ending: "#9aa3ad", upload_wait: "#c9a227", lost: "#a40e26", idle: "#d8dde3",
};
function painted(element, part) {
  element.style.background = PARTS[part] || "#888";
  return element;
}

function summary() {
  const said = make("span", { role: "status" }), stop = button("Stop this run", () => ask_to_stop());
  const tiles = make("dl", { class: "tiles" }), words = make("div", { class: "words" });
  let run = null;
  async function ask_to_stop() {
    if (!confirm("Stop " + visible(run.run_id) + " after a checkpoint of its current step?")) return;
    const answer = await fetch(query("stop", { run: run.address }), { method: "POST", headers: { "X-Genlight": "stop" } });
    said.textContent = visible(await answer.text());
  }
  return { element: section("Summary", tiles, words, make("p", {}, stop, " ", said)), update({ run: newest, now_ms }) {
    run = newest;
    const took_s = run.spans.reduce((sum, each) => sum + each.ended_s - each.began_s, 0);
    const bad = run.findings.filter((each) => each.level !== "ok").length;
    const facts = [
      ["state", state_of(run)], ["step", [step_of(run), bar_of(run)]], ["speed", speed_of(run)], ["loss", shown(run.loss)],
      ["best " + run.score?.name, shown(run.score?.value)], ["took", took_s && run.left_s == null ? span(took_s) : ""],
      ["time left", run.left_s == null ? "" : span(run.left_s)], ["goodput", run.goodput == null ? "" : percent(run.goodput)],
      ["cost", cost_of(run)], ["active", ago(run.alive_at_ms, now_ms)], ["findings", bad ? make("a", { href: "#findings" }, bad) : ""]];
    const known = facts.filter(([, value]) => value !== "");
    tiles.replaceChildren(...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    words.replaceChildren(...run.words.map((each) => make("p", {}, each)));
    stop.hidden = run.address == null || run.state !== "running";
    if (stop.hidden) said.textContent = "";
  } };
}

function timeline(run) {
  if (!run.spans.length) return null;
  const began_s = Math.min(...run.spans.map((each) => each.began_s));
  const share = (seconds) => (100 * seconds) / (Math.max(...run.spans.map((each) => each.ended_s)) - began_s || 1) + "%";
  const rows = run.spans.map((each, i) => {
    const spent = Object.entries(each.seconds), total = spent.reduce((sum, [, s]) => sum + s, 0) || 1;
    const text = spent.map(([part, s]) => part.replace("_", " ") + " " + span(s)).join(", ");
    const bar = make("div", { class: "bar", role: "img", "aria-label": text, title: text }), took_s = each.ended_s - each.began_s;
    bar.style.marginLeft = share(each.began_s - began_s);
    bar.style.width = share(took_s);
    for (const [part, s] of spent) {
      const piece = painted(make("span"), part);
      piece.style.width = (100 * s) / total + "%";
      bar.append(piece);
    }
    const steps = shown(each.resumed_from) + " to " + shown(each.last_step);
    return [i + 1, date(each.began_s * 1000), span(took_s), steps, each.ended ? "ended" : "no end", bar];
  });
  const key = (part) => painted(make("span", { class: "key" }), part);
  const keys = Object.entries(run.parts).map(([part, s]) => make("li", {}, key(part), part.replace("_", " ") + " " + span(s)));
  const head = ["attempt", "began", "took", "steps", "end", "when, and where the time went"];
  return [table("attempts", head, rows), make("ul", { class: "keys" }, keys)];
}

function checkpoints(run) {
  if (!run.checkpoints.length) return null;
  const newest = run.checkpoints.toReversed(), code = (text) => (text ? make("code", {}, text) : "");
  const archive = ({ name, step }) => (run.address == null || step == null ? name : link("checkpoint", { run: run.address, name }, name + ".tar"));
  const scores = (each) => Object.entries(each.scores).map(([n, v]) => n + " " + shown(v)).join(", ");
  const rows = newest.map((each) => [archive(each), each.step, scores(each), size(each.size), date(each.saved_ms), each.state]);
  const commands = newest.map((each) => [each.name, code(each.show), code(each.export)]);
  const details = make("details", {}, make("summary", {}, "Commands"), table("commands", ["name", "show", "export"], commands));
  return [table("checkpoints", ["name", "step", "scores", "size", "saved", "state"], rows), details];
}

function findings(runs) {
  const is_one = runs.length === 1;
  const rows = runs.flatMap((run, i) => run.findings.map((each) => {
    const text = each.text + (each.remedy ? ". " + each.remedy : "");
    return [make("span", { class: "level " + each.level }, each.level), ...(is_one ? [] : [styled_name(run, i)]), each.step, text];
  }));
  return rows.length ? table("findings", ["level", ...(is_one ? [] : ["run"]), "step", "finding"], rows) : null;
}

// A row for each setting that differs: the value that most runs have, and the runs that have another.
function differences({ runs, differences: rows }) {
  if (!rows.length) return make("p", {}, "No known difference.");
  const text = (json) => (json === "null" ? "none" : shown(JSON.parse(json)));
  const lines = rows.map(([setting, ...values]) => {
    const by_value = new Map(values.map((value) => [JSON.stringify(value), []]));
    values.forEach((value, i) => by_value.get(JSON.stringify(value)).push(i));
    const groups = [...by_value].sort((a, b) => b[1].length - a[1].length), [usual, most] = groups[0];
    const has_usual = runs.length > 2 && most.length > runs.length / 2;
    const others = groups.slice(has_usual ? 1 : 0).map(([json, indices]) =>
      make("div", { class: "other" }, make("b", {}, text(json)), make("span", {}, indices.map((i) => styled_name(runs[i], i)))));
    return [setting, has_usual ? `${text(usual)} (${most.length} runs)` : "", make("div", {}, others)];
  });
  return table("differences", ["setting", "in most runs", "different in"], lines);
}

function events() {
  const place = make("div"), kinds = choice({ class: "kind" }, [["", "all"]], () => show());
  const filter = search({ class: "filter" }, () => show());
  const element = make("div", {}, make("div", { class: "controls" }, field("kind", kinds), field("text", filter)), place);
  let run = null;
  const attempt = (each) => (each.attempt ? "attempt " + each.attempt : "");
  const what = (each) => each.error || each.path || each.text || each.final_checkpoint || attempt(each);
  function show() {
    const text = filter.value.toLowerCase(), is_chosen = (each) => !kinds.value || each.event === kinds.value;
    const found = run.events.filter((each) => is_chosen(each) && JSON.stringify(each).toLowerCase().includes(text));
    const count = `${shown(found.length)} of ${shown(run.events.length + run.left_out.events)}; at most the newest 300 are shown`;
    const rows = found.slice(-300).reverse().map((each) => [date(each.timestamp_ms), each.event, each.step, what(each)]);
    place.replaceChildren(table("events", ["time", "event", "step", "what"], rows), make("p", { class: "dim" }, count));
  }
  return (newest) => {
    run = newest;
    const known = [...kinds.options].map((each) => each.value), names = new Set(run.events.map((each) => each.event));
    kinds.append(...[...names].filter((each) => !known.includes(each)).map((value) => make("option", { value }, value)));
    show();
    return element;
  };
}

function configuration(run) {
  const { job, ...others } = run.metadata, packages = Object.entries(run.packages), settings = Object.entries(run.job || job || {});
  const facts = [
    ["folder", run.path], ["host", run.host], ["processes", run.ranks], ["attempts", run.attempts],
    ["last activity", date(run.alive_at_ms)], ["size", size(run.size_bytes)], ["waiting uploads", run.waiting_uploads]];
  const known = [...settings, ...facts, ...Object.entries(others)].filter(([, value]) => value !== "" && value != null);
  const versions = make("summary", {}, "Versions of " + plural(packages.length, "package"));
  const details = make("details", {}, versions, table("packages", ["package", "version"], packages));
  return [table("configuration", ["name", "value"], known), details];
}
