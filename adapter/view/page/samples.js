// Samples as a grid: a row for each prompt; a column for each step of one run, or for each compared run.
const FIRST_COLUMNS = 8;

function shown_file(file, caption) {
  const note = file.note ? make("p", { class: "dim" }, file.name + ": " + file.note) : null;
  if (file.text != null) return [make("pre", { tabindex: "0" }, file.text), note];
  if (file.table) return [table(caption + ", " + file.name, file.table[0] || [], file.table.slice(1)), note];
  if (!file.source) return [note];
  const sound = { src: file.source, controls: true, preload: "none", "aria-label": caption };
  if (file.kind.startsWith("audio/")) return [make("audio", sound)];
  const image = make("img", { src: file.source, alt: caption, loading: "lazy" }), link = { href: file.source, download: "" };
  const enlarge = () => dialog_of(caption, make("a", link, "download"), make("img", { src: file.source, alt: caption }));
  return [button(image, enlarge, { class: "picture" })];
}

function cell_of(sample, where) {
  if (!sample) return make("td");
  const caption = where + ", " + (sample.prompt || sample.name);
  const files = sample.files.flatMap((file) => shown_file(file, caption));
  const returned = Object.entries(sample.returned).map(([name, value]) =>
    (value.length > 40 ? make("pre", { tabindex: "0" }, value) : make("p", {}, make("span", { class: "dim" }, name + " "), shown(value))));
  return make("td", {}, files, returned, files.length || returned.length ? null : make("p", { class: "dim" }, "no file"));
}

const steps_of = (run) => [...new Set(run.samples.map((each) => each.step))].sort((a, b) => b - a);

function columns_of(runs) {
  const column = (run, step, where, title) => ({ where, title, samples: run.samples.filter((each) => each.step === step) });
  const name = (step) => "step " + shown(step);
  if (runs.length === 1) return steps_of(runs[0]).map((step) => column(runs[0], step, name(step), () => name(step)));
  const newest = runs.map((run, i) => ({ run, i, step: steps_of(run)[0] })).filter(({ step }) => step != null);
  return newest.map(({ run, i, step }) => column(run, step, run.run_id, () => styled_name(run, i, name(step))));
}

function samples() {
  const place = make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "samples" });
  const more = button("", () => { is_all = true; show(); }), element = section("Samples", make("h2", {}, "Samples"), place, more);
  let columns = [], is_all = false, before = "";
  function show() {
    const few = is_all ? columns : columns.slice(0, FIRST_COLUMNS);
    const prompts = new Map(few.flatMap(({ samples }) => samples.map((each) => [each.name, each.prompt || each.name])));
    const bodies = [...prompts].map(([name, prompt]) => make("tbody", {},
      make("tr", {}, make("th", { scope: "rowgroup", colspan: few.length }, make("span", { class: "prompt" }, prompt))),
      make("tr", {}, few.map(({ samples, where }) => cell_of(samples.find((each) => each.name === name), where)))));
    const titles = make("tr", {}, few.map(({ title }) => make("th", { scope: "col" }, title())));
    place.replaceChildren(make("table", { class: "samples" }, make("thead", {}, titles), bodies));
    more.hidden = few.length === columns.length;
    more.textContent = "show all " + columns.length;
  }
  return { element, update(runs) {
    const text = JSON.stringify(runs);
    if (text === before) return;
    before = text;
    columns = columns_of(runs);
    element.hidden = !columns.length;
    show();
  } };
}
