// The page: its parts, and their data, which a live page fetches again and again.

const main = document.querySelector("main"), when = make("p", { class: "dim" });
let parts = null;

const keep = (run, ...names) => Object.fromEntries(["run_id", "address", "path", ...names].map((name) => [name, run[name]]));

// The parts about the run at `i`, each with a function that takes its data from the data of the page.
function parts_of_run(i) {
  const of = (...names) => (data) => keep(data.runs[i], ...names);
  const count = (run) => plural(run.events.length + run.left_out.events, "event");
  return [
    [drawn("Timeline", timeline), of("spans", "parts")], [drawn("Checkpoints", checkpoints), of("checkpoints")],
    [drawn("Configuration", configuration, true), (data) => data.runs[i]],
    [drawn(count, events(), true), of("events", "left_out")]];
}

// The same parts of a run that is compared, folded.
function folded_run(_, i) {
  const inside = parts_of_run(i), updated = (data) => ([part, of]) => { part.update(of(data)); return part.element; };
  return [drawn(({ runs }) => runs[i].run_id, (data) => inside.map(updated(data)), true), (data) => data];
}

function parts_of({ list: listed, runs }) {
  if (listed) return [[list(), (data) => data]];
  const each = (...names) => (data) => data.runs.map((run) => keep(run, ...names));
  const plots = [curves(), (data) => data.runs], pictures = [samples(), each("samples")];
  const found = [drawn("Findings", findings), each("findings")];
  if (runs.length > 1) {
    const differing = [drawn("What differs", differences), (data) => ({ runs: each()(data), differences: data.differences })];
    return [[legend(), (data) => data.runs], plots, differing, pictures, found, ...runs.map(folded_run)];
  }
  const [times, saved, ...others] = parts_of_run(0);
  const first = [summary(), (data) => ({ run: data.runs[0], now_ms: data.made_at_ms })];
  return [first, plots, pictures, times, saved, found, ...others];
}

function build(data) {
  const { list: listed, runs, folder } = data, names = listed ? [] : runs.map((run) => run.run_id);
  const title = listed ? "Runs below " + folder : names.length > 1 ? names.length + " runs compared" : names[0];
  const back = listed || folder == null ? null : make("nav", {}, make("a", { href: "." }, "all runs below " + folder));
  parts = parts_of(data);
  document.title = visible(names.join(", ") || title);
  main.className = listed ? "listing" : names.length > 1 ? "comparison" : "single";
  const top = make("header", { class: "top" }, back, make("h1", {}, named(title)), when);
  main.replaceChildren(top, ...parts.map(([part]) => part.element));
}

function show(data) {
  if (!parts) build(data);
  when.textContent = "as of " + date(data.made_at_ms) + ", by genlight " + data.version;
  for (const [part, of] of parts) part.update(of(data));
}

async function follow(address, tag = "") {
  let wait_ms = 2000;
  try {
    const answer = document.hidden && parts ? null : await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer && answer.status === 200) {
      tag = answer.headers.get("ETag");
      show(await answer.json());
    } else if (answer && answer.status !== 304) throw new Error(await answer.text());
  } catch (error) {
    when.textContent = "not up to date: " + visible(error.message);
    if (!parts) main.replaceChildren(when);
    wait_ms = 6000;
  }
  setTimeout(follow, wait_ms, address, tag);
}

const data = JSON.parse(document.getElementById("data").textContent);
if (data.live) {
  when.textContent = "reading…";
  main.replaceChildren(when);
  follow(data.live + location.search);
} else show(data);
