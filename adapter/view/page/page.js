// The page: its parts, and their data, which a live page fetches again and again.

const main = document.querySelector("main"), when = make("p", { class: "dim when" });
let parts = null;

const keep = (run, ...names) => Object.fromEntries(["run_id", "address", "path", ...names].map((name) => [name, run[name]]));

// The parts about one run, each with a function that takes its data from the data of the page.
function parts_of_run(i) {
  const of = (...names) => (data) => keep(data.runs[i], ...names);
  return [
    [drawn("Timeline", timeline), of("spans", "parts", "goodput")], [drawn("Checkpoints", checkpoints), of("checkpoints")],
    [folded((run) => "Configuration", configuration), of("metadata", "packages", "job")],
    [folded((run) => plural(run.events.length + run.left_out.events, "event"), events()), of("events", "left_out")],
    [folded(() => "More facts", more_facts), (data) => data.runs[i]]];
}

function parts_of_comparison() {
  const each_run = (run, i) => {
    const inside = parts_of_run(i);
    const part = folded(({ runs }) => runs[i].run_id, (data) => {
      inside.forEach(([each, of]) => each.update(of(data)));
      return inside.map(([each]) => each.element);
    });
    return [part, (data) => data];
  };
  return each_run;
}

function build(data) {
  const { list: listed, runs } = data;
  const back = listed || data.folder == null ? null : make("nav", {}, make("a", { href: "." }, "all runs below " + data.folder));
  const title = listed ? "Runs below " + data.folder : runs.length === 1 ? runs[0].run_id : plural(runs.length, "run") + " compared";
  const found = [drawn("Findings", findings), (newest) => newest.runs.map((run) => keep(run, "findings"))];
  const shown_samples = [samples(), (newest) => newest.runs.map((run) => keep(run, "samples"))];
  const plots = [curves(), (newest) => newest.runs];
  if (listed) parts = [[list(), (newest) => newest]];
  else if (runs.length === 1) {
    const [times, saved, ...others] = parts_of_run(0);
    parts = [[head(), (newest) => ({ run: newest.runs[0], now_ms: newest.made_at_ms })], plots, shown_samples, times, saved, found, ...others];
  } else {
    const differing = [drawn("What differs", differences), (newest) => ({ runs: newest.runs.map((run) => keep(run)), differences: newest.differences })];
    parts = [[legend(), (newest) => newest.runs], plots, differing, shown_samples, found, ...runs.map(parts_of_comparison())];
  }
  document.title = visible(listed ? title : runs.map((run) => run.run_id).join(", "));
  main.className = listed ? "listing" : runs.length === 1 ? "single" : "comparison";
  const header = make("header", { class: "top" }, back, make("h1", {}, named(title)), when);
  main.replaceChildren(header, ...parts.map(([part]) => part.element));
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
