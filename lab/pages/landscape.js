// The landscape page: contours on a canvas, paths above it, a slider through the steps.
const surfaces = Object.values(data.surfaces), LEVELS = 22;
byId("lead").textContent = `${data.names.length} optimizers, ${data.steps} steps each from the same point (the small dot) towards the lowest one (the ring). Bluer is higher. Choose in the legend whom to see, and press play or drag the slider to walk along.`;
legend(byId("legend"), data.names, data.first.length > 1 ? data.first : data.names);

function contours(canvas, surface) {
  const [columns, rows] = surface.grid, size = Math.min(900, Math.round(canvas.clientWidth * (window.devicePixelRatio || 1)));
  canvas.width = canvas.height = size;
  const probe = element("i", { style: "color:var(--c0);background:var(--card)" }, document.body);
  const rgb = (value) => value.match(/[\d.]+/g).slice(0, 3).map(Number);
  const style = getComputedStyle(probe), high = rgb(style.color), low = rgb(style.backgroundColor);
  probe.remove();
  const image = canvas.getContext("2d").createImageData(size, size), level = new Float32Array(size * size);
  for (let j = 0; j < size; j += 1)
    for (let i = 0; i < size; i += 1) {
      const u = (i / (size - 1)) * (columns - 1.001), v = (j / (size - 1)) * (rows - 1.001), a = Math.floor(u), b = Math.floor(v);
      const at = (p, q) => surface.picture[(b + q) * columns + a + p], fu = u - a, fv = v - b;
      level[j * size + i] = ((at(0, 0) * (1 - fu) + at(1, 0) * fu) * (1 - fv) + (at(0, 1) * (1 - fu) + at(1, 1) * fu) * fv) / 1000;
    }
  for (let k = 0; k < level.length; k += 1) {
    const band = Math.floor(level[k] * LEVELS), edge = band !== Math.floor((level[k + 1] ?? level[k]) * LEVELS) || band !== Math.floor((level[k + size] ?? level[k]) * LEVELS);
    const mix = 0.05 + 0.4 * (band / LEVELS) + (edge ? 0.1 : 0);
    for (let c = 0; c < 3; c += 1) image.data[4 * k + c] = low[c] + (high[c] - low[c]) * mix;
    image.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

surfaces.forEach((surface) => {
  const card = element("div", { class: "card" }, byId("maps"));
  element("h2", {}, card, surface.title);
  element("p", { class: "note" }, card, surface.about);
  const map = element("div", { class: "map" }, card), canvas = element("canvas", {}, map);
  const svg = element("svg", { viewBox: "0 0 400 400", role: "img", "aria-label": `Paths on the ${surface.title} function` }, map);
  const [left, right, bottom, top] = surface.box;
  const at = ([x, y]) => [(400 * (x - left)) / (right - left), (400 * (top - y)) / (top - bottom)];
  const draw = () => {
    svg.replaceChildren();
    const step = Number(byId("step").value), point = (p) => at(p).map((v) => Math.min(4000, Math.max(-4000, v)).toFixed(1)).join(" ");
    for (const name of data.names.filter((n) => shown.has(n))) {
      const { color, dash } = look(name), path = surface.paths[name].path.slice(0, step + 1).filter((p) => p[0] !== null && p[1] !== null);
      element("path", { class: "series", "data-name": name, d: "M" + path.map(point).join("L"), style: `stroke:${color};stroke-dasharray:${dash}` }, svg);
      const [cx, cy] = at(path.at(-1));
      element("circle", { class: "head", "data-name": name, cx, cy, r: 5, style: `fill:${color}` }, svg);
    }
    const [gx, gy] = at(surface.minimum), [sx, sy] = at(surface.start);
    element("circle", { class: "goal", cx: gx, cy: gy, r: 9 }, svg);
    element("circle", { class: "from", cx: sx, cy: sy, r: 4 }, svg);
  };
  redrawn.push(draw);
  const paint = () => contours(canvas, surface);
  new ResizeObserver(paint).observe(map);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
});

const slider = byId("step");
slider.max = slider.value = data.steps;
const go = (step) => {
  slider.value = step;
  byId("count").textContent = `${slider.value} / ${data.steps}`;
  redraw();
};
slider.oninput = () => go(slider.value);
let timer = null;
byId("play").onclick = () => {
  const stop = () => { clearInterval(timer); timer = null; byId("play").textContent = "play"; };
  if (timer) return stop();
  byId("play").textContent = "pause";
  if (Number(slider.value) >= data.steps) go(1);
  timer = setInterval(() => (Number(slider.value) >= data.steps ? stop() : go(Number(slider.value) + Math.max(1, Math.round(data.steps / 200)))), 33);
};
go(data.steps);

byId("rates").textContent = data.rates.map(fmt).join(", ");
const head = element("tr", {}, element("thead", {}, byId("table")));
["optimizer", ...surfaces.map((s) => s.title)].forEach((title) => element("th", { scope: "col" }, head, title));
const body = element("tbody", {}, byId("table"));
for (const name of data.names) {
  const row = element("tr", {}, body);
  element("td", {}, row, name).insertAdjacentHTML("afterbegin", swatch(name));
  for (const surface of surfaces) element("td", {}, row, surface.paths[name].value === null ? "left the picture" : `${fmt(surface.paths[name].value)} (lr ${fmt(surface.paths[name].lr)})`);
}
byId("command").textContent = data.command;
const m = data.machine, facts = {
  "the point": "one tensor of 1×2, so that rules for matrices walk too; Sophia is given the exact diagonal of the Hessian every ten steps",
  schedule: "learning rate from the given peak down to 0 along half a cosine",
  machine: `${m.cpu}, ${m.platform}`,
  versions: Object.entries(m.versions).map(([name, version]) => `${name} ${version}`).join(", "),
  date: m.date,
};
for (const [term, text] of Object.entries(facts)) {
  element("dt", {}, byId("facts"), term);
  element("dd", {}, byId("facts"), text);
}
