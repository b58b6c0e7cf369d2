// The race report. `data.optimizers[name]` is an entry of results.json.
const entries = data.optimizers, model = data.model, accuracy = model.metric === "accuracy";
const best = accuracy ? (a, b) => b - a : (a, b) => a - b;
const score = accuracy ? percent : fmt;
const metricName = { accuracy: "test accuracy", test_loss: "test loss" }[model.metric];
const ranked = (key, order) =>
  data.names.filter((n) => entries[n][key]).sort((a, b) => order(entries[a][key].mean, entries[b][key].mean));
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// ---- head -----------------------------------------------------------------------------------------------------------
byId("title").textContent = `${plural(data.names.length, "optimizer")} ${data.names.length === 1 ? "trains" : "train"} ${model.title}`;
byId("lead").textContent =
  `${plural(data.steps, "step")} of ${model.batch.toLocaleString("en")} ${model.unit ?? "examples"}, ${plural(data.seeds, "seed")} each, ${model.parameters.toLocaleString("en")} parameters. ` +
  "All start from the same weights and see the same batches; only the optimizer differs.";
const lost = data.names.filter((n) => entries[n].diverged);
const notices = [
  data.interrupted && `This race was interrupted: ${data.asked.filter((n) => !data.names.includes(n)).join(", ") || "some runs"} did not finish and is not shown.`,
  lost.length && `Diverged (the loss was no longer a number): ${lost.map((n) => `${n} in ${entries[n].diverged} of ${entries[n].runs}`).join(", ")}. Their curves end in a cross, and the means are of the other runs.`,
];
notices.filter(Boolean).forEach((text) => element("p", { class: "notice", role: "status" }, byId("notices"), text));
function tile(label, name, value) {
  if (name === undefined) return;
  const made = element("div", { class: "tile" }, byId("tiles"));
  made.innerHTML = `<small>${label}</small><b>${value}</b><span>${swatch(name)}${name}</span>`;
}
const [first] = ranked(model.metric, best), [deepest] = ranked("train_loss", (a, b) => a - b), [quick] = ranked("ms_per_step", (a, b) => a - b);
const lean = data.names.filter((n) => entries[n].state_bytes > 0).sort((a, b) => entries[a].state_bytes - entries[b].state_bytes)[0];
tile(`best ${metricName}`, first, first && score(entries[first][model.metric].mean));
tile("lowest training loss", deepest, deepest && fmt(entries[deepest].train_loss.mean));
tile("fastest step", quick, quick && time(entries[quick].ms_per_step.mean / 1e3));
tile("least state", lean, lean && bytes(entries[lean].state_bytes));
legend(byId("legend"), data.names);

// ---- curves -----------------------------------------------------------------------------------------------------------
function smooth(values, keep) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = keep * sum + (1 - keep) * v;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}
const start = Math.max(...data.names.map((n) => entries[n].curve.loss[0] ?? 0));
function curves(key, options) {
  return () => {
    const keep = Number(byId("smooth").value);
    const series = data.names.map((name) => {
      const c = entries[name].curve;
      return { name, x: c[key], y: smooth(c.loss, keep), low: smooth(c.low, keep), high: smooth(c.high, keep), cut: entries[name].diverged > 0 };
    });
    byId("smoothed").textContent = `${Math.round(100 * keep)} %`;
    return { series, ylog: byId("ylog").checked, top: 3 * start, ylabel: "training loss", ...options() };
  };
}
linePlot(byId("by-step"), curves("step", () => ({ xlabel: "step", xname: "step", xformat: (v) => Math.round(v).toLocaleString("en") })), "Training loss against step");
const early = Math.min(...data.names.map((n) => entries[n].curve.seconds[Math.min(4, entries[n].curve.seconds.length - 1)] || 1e-3));
linePlot(byId("by-time"), curves("seconds", () => ({ xlabel: "seconds of training", xname: "after", xformat: time, xlog: byId("xlog").checked, xfrom: early })), "Training loss against wall time");
["smooth", "ylog", "xlog"].forEach((id) => byId(id).addEventListener("input", redraw));

// ---- where they ended -----------------------------------------------------------------------------------------------
function rows(host, names, value, draw) {
  const draws = () => {
    host.replaceChildren();
    for (const name of names.filter((n) => shown.has(n))) {
      const row = element("div", { class: "row" }, host);
      element("span", {}, row, name);
      draw(element("div", { class: "track" }, row), name);
      element("span", {}, row, value(name));
    }
  };
  redrawn.push(draws);
  draws();
}
const bars = (number) => {
  const most = Math.max(...data.names.map((n) => number(n)), 1);
  return (track, name) => element("i", { style: `left:0;width:${(100 * number(name)) / most}%;background:${look(name).color}` }, track);
};
// a dot for the mean, a tick for each seed, and the range between them; a scale from the least to the most stands below
function dots(host, key, order, show, log) {
  const there = data.names.map((n) => entries[n][key]).filter(Boolean), f = log ? Math.log : (v) => v;
  const names = [...ranked(key, order), ...data.names.filter((n) => !entries[n][key])];
  const low = Math.min(...there.map((e) => e.low)), high = Math.max(...there.map((e) => e.high)), pad = 0.06 * (f(high) - f(low)) || 0.01;
  const at = (v) => (100 * (f(v) - f(low) + pad)) / (f(high) - f(low) + 2 * pad);
  rows(host, names, (n) => (entries[n][key] ? show(entries[n][key].mean) : "diverged"), (track, name) => {
    const e = entries[name][key], color = look(name).color;
    if (!e) return;
    element("i", { class: "range", style: `left:${at(e.low)}%;width:${at(e.high) - at(e.low)}%;background:${color}` }, track);
    if (e.values.length > 1) e.values.forEach((v) => element("i", { class: "seed", style: `left:${at(v)}%;background:${color}` }, track));
    element("i", { class: "mean", style: `left:${at(e.mean)}%;background:${color}` }, track);
  });
  if (!there.length) return;
  const scale = element("div", { class: "ends" }, host.parentNode);
  [low, high].forEach((v) => element("span", {}, scale, show(v)));
}
byId("metric-title").textContent = metricName[0].toUpperCase() + metricName.slice(1);
byId("metric-note").textContent = data.seeds > 1 ? `Mean over ${data.seeds} seeds, a tick for each of them.` : "One seed: run with --seeds 5 to see the spread.";
const up = (a, b) => a - b, ms = (n) => entries[n].ms_per_step?.mean ?? NaN;
dots(byId("metric"), model.metric, best, score, false);
dots(byId("speed"), "ms_per_step", up, (v) => time(v / 1e3), true);
rows(byId("state"), data.names.slice().sort((a, b) => entries[a].state_bytes - entries[b].state_bytes), (n) => bytes(entries[n].state_bytes), bars((n) => entries[n].state_bytes));

// ---- learning rates ---------------------------------------------------------------------------------------------------
if (data.names.some((n) => entries[n].grid.length)) {
  byId("sensitivity-note").textContent = "Training loss at the end of a run with each rate of the grid (one seed of its own). The ring is the rate that was raced with; a cross is a run that diverged.";
  linePlot(byId("sensitivity"), () => ({
    series: data.names.map((name) => ({ name, x: entries[name].grid.map((t) => t.lr), y: entries[name].grid.map((t) => t.train_loss), dots: entries[name].grid.map((t) => t.lr === entries[name].lr) })),
    xlog: true, ylog: true, top: 3 * start, xlabel: "learning rate", xname: "learning rate", ylabel: "training loss at the end",
  }), "Final training loss against learning rate");
} else {
  byId("sensitivity-note").innerHTML = "The learning rates were searched once for this model and are kept with the program. To try a grid around them and see how much each optimizer minds, add <code>--tune</code> to the command below.";
}

// ---- numbers and facts --------------------------------------------------------------------------------------------------
const with_spread = (e, show) => (e ? show(e.mean) + (e.sd === null ? "" : ` ± ${show(e.sd)}`) : "diverged");
byId("table-note").textContent = data.seeds > 1 ? "Means over seeds ± standard deviation." : "";
// title -> what it is sorted by, how it is shown, and whether more is better
const engine = (n) => entries[n].engine.split(":")[0];
const spread = (key, show, more = false) => [(n) => entries[n][key]?.mean, (n) => with_spread(entries[n][key], show), more];
const columns = {
  optimizer: [(n) => n, (n) => n],
  "learning rate": [(n) => entries[n].lr, (n) => fmt(entries[n].lr)],
  "test accuracy": spread("accuracy", percent, true),
  "test loss": spread("test_loss", fmt),
  "training loss": spread("train_loss", fmt),
  "time of a step": [ms, (n) => time(ms(n) / 1e3)],
  "whole run": [(n) => entries[n].seconds, (n) => time(entries[n].seconds)],
  state: [(n) => entries[n].state_bytes, (n) => bytes(entries[n].state_bytes)],
  ...(data.names.some((n) => entries[n].peak_bytes) && { "peak memory": [(n) => entries[n].peak_bytes, (n) => bytes(entries[n].peak_bytes)] }),
  engine: [(n) => engine(n), (n) => engine(n)], // that ran, not the one asked for
};
const head = element("tr", {}, element("thead", {}, byId("table")));
for (const title of Object.keys(columns)) {
  const button = element("button", { type: "button" }, element("th", { scope: "col", "aria-sort": "none" }, head), title);
  button.onclick = () => sort(title, button.parentNode.ariaSort === "none" ? columns[title][2] : button.parentNode.ariaSort === "ascending");
}
const body = element("tbody", {}, byId("table"));
for (const name of data.names) {
  const row = element("tr", { "data-row": name }, body);
  Object.values(columns).forEach(([, show]) => element("td", {}, row, show(name)));
  row.firstChild.insertAdjacentHTML("afterbegin", swatch(name));
}
// what has no value stands last either way
function sort(title, down) {
  const [key] = columns[title], value = (row) => key(row.dataset.row), none = (v) => v === undefined || Number.isNaN(v);
  const order = (a, b) => none(a) - none(b) || (down ? -1 : 1) * (a < b ? -1 : a > b ? 1 : 0);
  body.append(...[...body.children].sort((a, b) => order(value(a), value(b))));
  [...head.children].forEach((th) => th.setAttribute("aria-sort", th.textContent !== title ? "none" : down ? "descending" : "ascending"));
}
sort(metricName, accuracy);
byId("command").textContent = data.command;
const m = data.machine, facts = {
  data: model.data,
  schedule: model.schedule ?? "learning rate from the given peak down to 0 along half a cosine",
  "learning rates": data.plan ? "searched in short runs, on a seed of their own; the best taken" : data.tuned ? "the best of a grid of five around the usual ones, by training loss, on a seed of its own" : "searched once for this model, kept with the program",
  clock: "compilation is not counted: two steps are taken before it starts",
  engines: [...new Set(data.names.flatMap((n) => entries[n].engine.split("; ")))].join("; ") + (model.device ? `, ${model.device}` : ""),
  machine: `${m.cpu}, ${m.threads} of ${m.cores} cores, ${m.memory_gb} GB, ${m.platform}`,
  versions: Object.entries(m.versions).map(([name, version]) => `${name} ${version}`).join(", "),
  date: m.date,
};
for (const [term, text] of Object.entries(facts)) {
  element("dt", {}, byId("facts"), term);
  element("dd", {}, byId("facts"), text);
}
