// Samples as a grid: a row for each prompt; a column for each step of one run, or for each compared run.

const FIRST_COLUMNS = 8;

function enlarge(source, caption) {
  const close = make("button", { onclick: () => dialog.close() }, "Close");
  const dialog = make("dialog", { "aria-label": caption, class: "large", onclose: () => dialog.remove() },
    make("header", {}, make("h2", {}, caption), make("a", { href: source, download: "" }, "download"), close), make("img", { src: source, alt: caption }));
  document.body.append(dialog);
  dialog.showModal();
}

function file_of(file, caption) {
  const note = file.note ? make("p", { class: "dim" }, file.name + ": " + file.note) : null;
  if (file.text != null) return [make("pre", { tabindex: "0" }, file.text), note];
  if (file.table) return [table(caption + ", " + file.name, file.table[0] || [], file.table.slice(1)), note];
  if (!file.source) return [note];
  if (file.kind.startsWith("audio/")) return [make("audio", { src: file.source, controls: true, preload: "none", "aria-label": caption })];
  const image = make("img", { src: file.source, alt: caption, loading: "lazy" });
  return [make("button", { class: "picture", onclick: () => enlarge(file.source, caption) }, image)];
}

function sample_cell(each, where) {
  const caption = where + ", " + (each.prompt || each.name);
  const returned = Object.entries(each.returned).map(([name, value]) =>
    (value.length > 40 ? make("pre", { tabindex: "0" }, value) : make("p", {}, make("span", { class: "dim" }, name + " "), shown(value))));
  const files = each.files.flatMap((file) => file_of(file, caption));
  return make("td", {}, files, returned, files.length || returned.length ? null : make("p", { class: "dim" }, "no file"));
}

function samples() {
  const place = make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "samples" });
  const more = make("button", { onclick: () => { is_all = true; show(); } });
  const element = make("section", { "aria-label": "Samples", id: "samples" }, make("h2", {}, "Samples"), place, more);
  let columns = [], is_all = false, before = "";
  function show() {
    const few = is_all ? columns : columns.slice(0, FIRST_COLUMNS);
    const prompts = new Map(few.flatMap(({ samples }) => samples.map((each) => [each.name, each.prompt || each.name])));
    const head = make("tr", {}, few.map(({ title }) => make("th", { scope: "col" }, title instanceof Node ? title.cloneNode(true) : title)));
    const rows = [...prompts].map(([name, prompt]) => make("tbody", {},
      make("tr", {}, make("th", { scope: "rowgroup", colspan: few.length }, make("span", { class: "prompt" }, prompt))),
      make("tr", {}, few.map(({ samples, where }) => {
        const each = samples.find((sample) => sample.name === name);
        return each ? sample_cell(each, where) : make("td");
      }))));
    place.replaceChildren(make("table", { class: "samples" }, make("thead", {}, head), ...rows));
    more.hidden = few.length === columns.length;
    more.textContent = `show all ${columns.length} steps`;
  }
  return { element, update(runs) {
    const text = JSON.stringify(runs);
    if (text === before) return;
    before = text;
    const steps_of = (run) => [...new Set(run.samples.map((each) => each.step))].sort((a, b) => b - a);
    const at = (run, step) => run.samples.filter((each) => each.step === step);
    columns = runs.length === 1
      ? steps_of(runs[0]).map((step) => ({ title: "step " + shown(step), where: "step " + shown(step), samples: at(runs[0], step) }))
      : runs.map((run, i) => ({ run, i, step: steps_of(run)[0] })).filter(({ step }) => step != null).map(({ run, i, step }) => ({
        title: make("span", { class: "a-run" }, swatch(i), named(run.run_id), make("span", { class: "dim" }, "step " + shown(step))), where: run.run_id, samples: at(run, step) }));
    element.hidden = !columns.length;
    show();
  } };
}
