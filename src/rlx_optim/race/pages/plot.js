"use strict";
// What both pages share: colours, the legend, number formats and a line plot. No library, no network.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const shown = new Set(data.names);
const redrawn = []; // functions to call when something is toggled or the window changes
const redraw = () => redrawn.forEach((draw) => draw());

// seven hues, each round of them dashed in its own way: every optimizer keeps its look in every report
const DASHES = ["none", "6 4.5", "1 4.5", "9 4 1 4"];
const look = (name) => ({ color: `var(--c${data.place[name] % 7})`, dash: DASHES[Math.floor(data.place[name] / 7) % DASHES.length] });
const swatch = (name) =>
  `<svg class="swatch" viewBox="0 0 20 8" aria-hidden="true"><path d="M1 4H19" fill="none" stroke-width="3" stroke-linecap="round" style="stroke:${look(name).color};stroke-dasharray:${look(name).dash}"/></svg>`;

const fmt = (x) => {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const a = Math.abs(x);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return x.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return a >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)));
};
const percent = (x) => (100 * x).toFixed(1) + " %";
const bytes = (n) => (n < 1000 ? `${n} B` : n < 1e6 ? `${fmt(n / 1e3)} kB` : n < 1e9 ? `${fmt(n / 1e6)} MB` : `${fmt(n / 1e9)} GB`);
const time = (s) => (s < 1e-3 ? `${fmt(1e6 * s)} µs` : s < 1 ? `${fmt(1e3 * s)} ms` : `${fmt(s)} s`);

function element(tag, attributes, parent, text) {
  const svg = ["svg", "path", "line", "text", "g", "circle", "clipPath", "rect"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

let active = null; // who is pointed at in the legend
function activate(name) {
  active = name;
  document.body.toggleAttribute("data-active", Boolean(name && shown.has(name)));
  document.querySelectorAll("[data-name]").forEach((e) => e.classList.toggle("on", e.dataset.name === name));
}

function legend(host, names, first = names) {
  const set = (chosen) => {
    shown.clear();
    chosen.forEach((name) => shown.add(name));
    host.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", shown.has(b.dataset.of)));
    activate(null);
    redraw();
  };
  for (const name of names) {
    const button = element("button", { type: "button", "aria-pressed": "true", "data-of": name, title: "Click to show or hide; double-click to show it alone" }, host);
    button.innerHTML = swatch(name) + name;
    button.onclick = () => set(data.names.filter((n) => (n === name) !== shown.has(n)));
    button.ondblclick = () => set([name]);
    button.onpointerenter = () => activate(name);
    button.onpointerleave = () => activate(null);
  }
  byId("all").onclick = () => set(data.names);
  byId("none").onclick = () => set([]);
  set(first);
}

function ticks(lo, hi, log, room) {
  if (log) {
    const decades = Math.log10(hi / lo), found = [];
    const steps = decades > 2.2 ? [1] : decades > 0.9 ? [1, 3] : [1, 2, 3, 5, 7];
    const skip = Math.max(1, Math.ceil(decades / room));
    for (let e = Math.floor(Math.log10(lo)); e <= Math.log10(hi); e += 1)
      for (const s of steps) if ((e % skip === 0 || skip === 1) && s * 10 ** e >= lo * 0.999 && s * 10 ** e <= hi * 1.001) found.push(s * 10 ** e);
    return found.length > 1 ? found : [lo, hi];
  }
  const rough = (hi - lo) / room, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power, found = [];
  for (let v = Math.ceil(lo / step) * step; v <= hi + step / 1e6; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

// make() gives {series: [{name, x, y, low, high, cut, dots}], xlog, ylog, top, xlabel, ylabel, xformat, yformat}
function linePlot(host, make, label) {
  const svg = element("svg", { role: "img", "aria-label": label }, host);
  const tip = element("div", { class: "tip", hidden: "" }, host);
  const clip = `clip-${host.id}`;
  let now = null;
  function draw() {
    const plot = make(), W = host.clientWidth, H = Math.round(Math.max(270, Math.min(400, W * 0.74)));
    const left = 66, right = 10, top = 10, bottom = 40;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.style.height = `${H}px`;
    const series = plot.series.filter((s) => shown.has(s.name));
    const good = (v, log) => isFinite(v) && (!log || v > 0);
    const xs = series.flatMap((s) => s.x.filter((v) => good(v, plot.xlog)));
    const ys = series.flatMap((s) => s.y.filter((v) => v !== null && good(v, plot.ylog)));
    now = null;
    if (!xs.length || !ys.length) {
      element("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, svg, "nothing to show: choose an optimizer above");
      return;
    }
    let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.min(Math.max(...ys), plot.top ?? Infinity)];
    if (plot.xlog && plot.xfrom) x0 = Math.max(x0, plot.xfrom);
    if (x0 === x1) x1 = plot.xlog ? x0 * 2 : x0 + 1;
    if (y1 <= y0) y1 = plot.ylog ? y0 * 2 : y0 + 1;
    [y0, y1] = plot.ylog ? [y0 / 1.15, y1 * 1.15] : [Math.max(0, y0 - 0.04 * (y1 - y0)), y1 + 0.04 * (y1 - y0)];
    const scale = (lo, hi, log, from, to) => (v) => from + ((log ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo)) * (to - from));
    const X = scale(x0, x1, plot.xlog, left, W - right), Y = scale(y0, y1, plot.ylog, H - bottom, top);
    for (const v of ticks(y0, y1, plot.ylog, 6)) {
      element("line", { class: "rule", x1: left, x2: W - right, y1: Y(v), y2: Y(v) }, svg);
      element("text", { x: left - 9, y: Y(v) + 4, "text-anchor": "end" }, svg, (plot.yformat ?? fmt)(v));
    }
    for (const v of ticks(x0, x1, plot.xlog, W < 420 ? 4 : 6)) {
      element("line", { class: "axis", x1: X(v), x2: X(v), y1: H - bottom, y2: H - bottom + 4 }, svg);
      element("text", { x: X(v), y: H - bottom + 18, "text-anchor": "middle" }, svg, (plot.xformat ?? fmt)(v));
    }
    element("line", { class: "axis", x1: left, x2: W - right, y1: H - bottom, y2: H - bottom }, svg);
    element("text", { x: (left + W - right) / 2, y: H - 4, "text-anchor": "middle" }, svg, plot.xlabel);
    element("text", { class: "ylabel", "text-anchor": "middle", transform: `translate(12 ${(top + H - bottom) / 2}) rotate(-90)` }, svg, plot.ylabel);
    const box = element("clipPath", { id: clip }, svg);
    element("rect", { x: left - 2, y: top - 4, width: W - left - right + 4, height: H - top - bottom + 6 }, box);
    const area = element("g", { "clip-path": `url(#${clip})` }, svg);
    const line = (s, values) => {
      let d = "", up = true;
      s.x.forEach((v, i) => {
        const drawn = values[i] !== null && good(values[i], plot.ylog) && good(v, plot.xlog);
        if (drawn) d += `${up ? "M" : "L"}${X(v).toFixed(1)} ${Y(values[i]).toFixed(1)}`;
        up = !drawn;
      });
      return d;
    };
    for (const s of series) {
      const { color, dash } = look(s.name);
      if (s.low) {
        const back = [...s.x.keys()].reverse().filter((i) => good(s.x[i], plot.xlog) && good(s.low[i], plot.ylog));
        const shape = line(s, s.high) + back.map((i) => `L${X(s.x[i]).toFixed(1)} ${Y(s.low[i]).toFixed(1)}`).join("") + "Z";
        element("path", { class: "band", d: shape, "data-name": s.name, style: `fill:${color}` }, area);
      }
      element("path", { class: "series", d: line(s, s.y), "data-name": s.name, style: `stroke:${color};stroke-dasharray:${dash}` }, area);
      const cross = (x, y) => element("path", { class: "mark", "data-name": s.name, d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, style: `stroke:${color}` }, svg);
      s.dots?.forEach((picked, i) => {
        if (s.y[i] === null) cross(X(s.x[i]), top + 6);
        else element("circle", { class: "mark", "data-name": s.name, cx: X(s.x[i]), cy: Math.max(top, Y(s.y[i])), r: picked ? 5.5 : 2.5, style: `stroke:${color};fill:${picked ? "var(--card)" : color}` }, svg);
      });
      if (s.cut) cross(X(Math.max(s.x.at(-1), x0)), Math.max(top + 6, Math.min(H - bottom, Y(s.y.at(-1)) || top)));
    }
    now = { plot, series, X, Y, x0, x1, W, H, left, right, top, bottom, cursor: element("line", { class: "cursor", y1: top, y2: H - bottom, visibility: "hidden" }, svg) };
    activate(active);
  }
  host.onpointermove = (event) => {
    if (!now) return;
    const { plot, series, x0, x1, W, left, right, cursor } = now, at = event.clientX - host.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (at - left) / (W - left - right)));
    const x = plot.xlog ? x0 * (x1 / x0) ** share : x0 + share * (x1 - x0);
    const near = series.map((s) => {
      let i = 0;
      for (let k = 1; k < s.x.length; k += 1) if (Math.abs(s.x[k] - x) < Math.abs(s.x[i] - x)) i = k;
      return { name: s.name, y: x > s.x.at(-1) && !s.dots ? s.y.at(-1) : s.y[i], x: s.x[i] };
    });
    near.sort((a, b) => (a.y ?? Infinity) - (b.y ?? Infinity));
    tip.innerHTML = `<b>${plot.xname} ${(plot.xformat ?? fmt)(x)}</b>` + near.map((n) => `<div>${swatch(n.name)}${n.name}<span>${n.y === null ? "diverged" : (plot.yformat ?? fmt)(n.y)}</span></div>`).join("");
    tip.hidden = false;
    const { top, bottom } = svg.getBoundingClientRect(); // beside the plot, not over it: below, or above where there is no room
    tip.style.top = `${bottom + tip.offsetHeight > innerHeight && top > tip.offsetHeight ? -tip.offsetHeight : now.H}px`;
    const px = now.X(x);
    for (const [key, value] of Object.entries({ x1: px, x2: px, visibility: "visible" })) cursor.setAttribute(key, value);
  };
  host.onpointerleave = () => {
    tip.hidden = true;
    now?.cursor.setAttribute("visibility", "hidden");
  };
  new ResizeObserver(draw).observe(host);
  redrawn.push(draw);
  draw();
}
