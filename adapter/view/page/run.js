// Parts of the page of one run, and of a comparison.

const PARTS = {
  steps: "#2f6f3e", data_wait: "#b35900", checkpoint: "#0550ae", samples: "#6639ba", evaluation: "#8a63d2", rollout: "#217a8a",
  start_up: "#6b7280", ending: "#9aa3ad", upload_wait: "#c9a227", lost: "#a40e26", idle: "#d8dde3",
};
function painted(element, part) {
  element.style.background = PARTS[part] || "#888";
  return element;
}

function head() {
  const said = make("span", { role: "status" }), button = make("button", { class: "stop", onclick: () => stop() }, "Stop this run");
  const tiles = make("dl", { class: "tiles" }), words = make("div", { class: "words" });
  const element = make("section", { "aria-label": "Summary" }, tiles, words, make("p", { class: "stopping" }, button, " ", said));
  let run = null;
  async function stop() {
    if (!confirm("Stop " + visible(run.run_id) + " after a checkpoint of its current step?")) return;
    const answer = await fetch("stop?run=" + encodeURIComponent(run.address), { method: "POST", headers: { "X-Genlight": "stop" } });
    said.textContent = visible(await answer.text());
  }
  return { element, update({ run: newest, now_ms }) {
    run = newest;
    const took = run.spans.reduce((sum, each) => sum + each.ended_s - each.began_s, 0);
    const bad = run.findings.filter((each) => each.level !== "ok").length;
    const facts = [
      ["state", state_of(run)], ["step", [step_of(run), bar_of(run)]], ["speed", speed_of(run)], ["loss", shown(run.loss)],
      [run.score ? "best " + run.score.name : "", run.score ? shown(run.score.value) : ""],
      run.left_s == null ? ["took", took ? span(took) : ""] : ["time left", span(run.left_s)],
      ["goodput", run.goodput == null ? "" : percent(run.goodput)], ["cost", cost_of(run)], ["active", ago(run.alive_at_ms, now_ms)],
      ["findings", bad ? make("a", { href: "#findings" }, shown(bad)) : ""]];
    tiles.replaceChildren(...facts.filter(([name, value]) => name && value !== "").map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    words.replaceChildren(...run.words.map((each) => make("p", {}, each)));
    button.hidden = run.address == null || run.state !== "running";
    if (button.hidden) said.textContent = "";
  } };
}

function timeline(run) {
  if (!run.spans.length) return null;
  const began = Math.min(...run.spans.map((each) => each.began_s)), whole = Math.max(...run.spans.map((each) => each.ended_s)) - began || 1;
  const rows = run.spans.map((each, i) => {
    const spent = Object.entries(each.seconds), total = spent.reduce((sum, [, s]) => sum + s, 0) || 1;
    const text = spent.map(([part, s]) => part.replace("_", " ") + " " + span(s)).join(", ");
    const bar = make("div", { class: "bar", role: "img", "aria-label": text, title: text });
    bar.style.marginLeft = (100 * (each.began_s - began)) / whole + "%";
    bar.style.width = (100 * (each.ended_s - each.began_s)) / whole + "%";
    for (const [part, s] of spent) {
      const piece = painted(make("span"), part);
      piece.style.width = (100 * s) / total + "%";
      bar.append(piece);
    }
    return [i + 1, date(each.began_s * 1000), span(each.ended_s - each.began_s), shown(each.resumed_from) + " to " + shown(each.last_step), each.ended ? "ended" : "no end", bar];
  });
  const parts = Object.entries(run.parts).map(([part, s]) => make("li", {}, painted(make("span", { class: "key" }), part), part.replace("_", " ") + " " + span(s)));
  const known = run.goodput == null ? "" : percent(run.goodput) + " of the time was spent on steps whose work was kept.";
  return [make("p", {}, known), table("attempts", ["attempt", "began", "took", "steps", "end", "when, and where the time went"], rows), make("ul", { class: "keys" }, parts)];
}

function checkpoints(run) {
  if (!run.checkpoints.length) return null;
  const name = (each) => (run.address != null && each.step != null ? make("a", { href: "checkpoint?run=" + encodeURIComponent(run.address) + "&name=" + encodeURIComponent(each.name) }, each.name + ".tar") : each.name);
  const scores = (each) => Object.entries(each.scores).map(([n, v]) => n + " " + shown(v)).join(", ");
  const rows = run.checkpoints.toReversed().map((each) => [name(each), each.step, scores(each), size(each.size), date(each.saved_ms), each.state]);
  const commands = run.checkpoints.toReversed().map((each) => [each.name, make("code", {}, each.show), each.export ? make("code", {}, each.export) : ""]);
  return [table("checkpoints", ["name", "step", "scores", "size", "saved", "state"], rows),
    make("details", {}, make("summary", {}, "Commands to show and export them"), table("commands", ["name", "show", "export"], commands))];
}

function findings(runs) {
  const rows = runs.flatMap((run, i) => run.findings.map((each) => [
    make("span", { class: "level " + each.level }, each.level), ...(runs.length > 1 ? [make("span", { class: "a-run" }, swatch(i), named(run.run_id))] : []),
    each.step, each.text + (each.remedy ? ". " + each.remedy : "")]));
  if (!rows.length) return null;
  return table("findings", ["level", ...(runs.length > 1 ? ["run"] : []), "step", "finding"], rows);
}

// A row for each setting that differs: the value that most runs have, and the runs that have another.
function differences({ runs, differences: rows }) {
  if (!rows.length) return make("p", {}, "No known difference.");
  const names = (indices) => make("span", { class: "a-runs" }, indices.map((i) => make("span", { class: "a-run" }, swatch(i), named(runs[i].run_id))));
  const lines = rows.map(([setting, ...values]) => {
    const by_value = new Map();
    values.forEach((value, i) => by_value.set(JSON.stringify(value), [...(by_value.get(JSON.stringify(value)) || []), i]));
    const groups = [...by_value].sort((a, b) => b[1].length - a[1].length), is_usual = groups[0][1].length > runs.length / 2 && runs.length > 2;
    const text = (json) => (json === "null" ? "none" : shown(JSON.parse(json)));
    const others = groups.slice(is_usual ? 1 : 0).map(([json, indices]) => make("div", { class: "other" }, make("b", {}, text(json)), names(indices)));
    return [setting, is_usual ? `${text(groups[0][0])} (${groups[0][1].length} runs)` : "", make("div", {}, others)];
  });
  return table("differences", ["setting", "in most runs", "different in"], lines);
}

function events() {
  const place = make("div"), kinds = make("select", { class: "kind", onchange: () => show() }, make("option", { value: "" }, "all"));
  const filter = make("input", { class: "filter", type: "search", oninput: () => show() });
  const element = make("div", {}, make("div", { class: "controls" }, make("label", {}, "kind ", kinds), make("label", {}, "text ", filter)), place);
  let run = null;
  const what = (each) => each.error || each.path || each.text || each.final_checkpoint || (each.attempt ? "attempt " + each.attempt : "");
  function show() {
    const text = filter.value.toLowerCase();
    const rows = run.events.filter((each) => (!kinds.value || each.event === kinds.value) && (!text || JSON.stringify(each).toLowerCase().includes(text)));
    const count = `${shown(rows.length)} of ${plural(run.events.length + run.left_out.events, "event")}; at most the newest 300 are shown`;
    const newest = rows.slice(-300).reverse().map((each) => [date(each.timestamp_ms), each.event, each.step, what(each)]);
    place.replaceChildren(table("events", ["time", "event", "step", "what"], newest), make("p", { class: "dim" }, count));
  }
  return (newest) => {
    run = newest;
    const known = [...kinds.options].map((each) => each.value);
    for (const kind of new Set(run.events.map((each) => each.event))) if (!known.includes(kind)) kinds.append(make("option", { value: kind }, kind));
    show();
    return element;
  };
}

function configuration(run) {
  const { job, ...others } = run.metadata, packages = Object.entries(run.packages);
  return [table("configuration", ["name", "value"], [...Object.entries(run.job || job || {}), ...Object.entries(others)]),
    make("details", {}, make("summary", {}, "Versions of " + plural(packages.length, "package")), table("packages", ["package", "version"], packages))];
}

function more_facts(run) {
  const facts = [["folder", run.path], ["host", run.host], ["processes", run.ranks], ["attempts", run.attempts], ["last activity", date(run.alive_at_ms)],
    ["size", run.size_bytes ? size(run.size_bytes) : ""], ["waiting uploads", run.waiting_uploads], ["last step expected", run.last_step]];
  return table("facts", ["fact", "value"], facts.filter(([, value]) => value !== "" && value != null));
}
