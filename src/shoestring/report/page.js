
"use strict";
// Draws the curves from the data embedded in the page. Whatever came from outside is set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const view = { x: "step", log: false, large: data.large[0]?.key };
const X_NAMES = { step: "step", seconds: "time", tokens: "tokens" };
const charts = [];

// ---- numbers -------------------------------------------------------------------------------------------------

function count(value) {
  const suffixes = ["", "k", "M", "B", "T"];
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < suffixes.length - 1) { value /= 1000; power += 1; }
  return Number(value.toPrecision(3)) + suffixes[power];
}

function plain(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function clock(seconds) {
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const FORMATS = { plain, count, percent: (value) => `${Number((100 * value).toPrecision(3))}%` };
const X_FORMATS = { step: (value) => value.toLocaleString("en"), seconds: clock, tokens: count };
const X_TICKS = { ...X_FORMATS, step: (value) => (value < 10000 ? value.toLocaleString("en") : count(value)) };

function show(value, format) {
  return typeof value === "number" ? FORMATS[format](value) : value;
}
// ---- elements ------------------------------------------------------------------------------------------------

function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children); // strings become text nodes
  return element;
}
// ---- scales --------------------------------------------------------------------------------------------------

function linearTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(wanted, 1), unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= raw) * unit;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}

function clockTicks(low, high, wanted) {
  const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = nice.find((size) => (high - low) / size <= wanted);
  if (!step || high - low < 4) return linearTicks(low, high, wanted);
  return Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, k) => Math.ceil(low / step + k) * step).filter((tick) => tick <= high);
}

function logTicks(low, high, wanted) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const digit of [1, 2, 5]) ticks.push(Number(`${digit}e${power}`));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  if (inside.length < 3) return linearTicks(low, high, 2 * wanted).filter((tick) => tick > 0);
  const decades = inside.filter((tick) => /^1e/.test(tick.toExponential()));
  return inside.length > 2 * wanted && decades.length > 1 ? decades : inside;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

function widened([low, high], share) {
  if (low > high) return [0, 1];
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * share;
  return [low - room, high + room];
}
// ---- a chart -------------------------------------------------------------------------------------------------

class Chart {
  constructor(spec, large) {
    this.spec = spec;
    this.large = large;
    this.at = null; // index into the densest line of the point under the crosshair
    this.unit = spec.unit ? `, ${spec.unit}` : "";
    this.svg = svg("svg", { tabindex: 0, role: "slider", "aria-orientation": "horizontal" });
    this.tip = html("div", { class: "tip", hidden: "" });
    const title = html("span", {}, html("b", {}, spec.title), this.unit);
    const several = new Set(spec.lines.map((line) => line.tone)).size > 1;
    const named = spec.lines.filter((line) => large || (several && line.style !== "faint"));
    this.figure = html("figure", { class: "chart" }, html("figcaption", {}, title, ...named.map((line) => this.key(line))), this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.mark(null));
    this.svg.addEventListener("blur", () => this.mark(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }

  static classes(line) {
    return `line t${line.tone} ${line.style}${line.style === "dots" ? "" : line.tone ? " dashed" : ""}`;
  }

  key(line) {
    const stroke = svg("path", { class: Chart.classes(line), d: "M0 6H26" });
    const dot = line.style === "dots" ? [svg("circle", { class: `t${line.tone}`, cx: 13, cy: 6, r: 3 })] : [];
    const swatch = svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, stroke, ...dot);
    const drawn = line.value.length;
    const note = drawn < line.logged ? ` (${count(drawn)} of ${count(line.logged)} points: the extremes)` : "";
    return html("span", { class: "key" }, swatch, html("span", {}, line.label + note));
  }

  // The points of each line that have a place on both axes, by x; those whose value is no number go to `broken`
  measure() {
    this.broken = [];
    this.log = view.log && this.large;
    this.series = this.spec.lines.map((line) => {
      const points = [];
      line[view.x].forEach((x, index) => {
        if (x === null) return;
        const value = line.value[index], y = typeof value === "number" && !(this.log && value <= 0) ? value : null;
        points.push({ x, y, value, step: line.step[index] });
        if (typeof value !== "number") this.broken.push({ x, value });
      });
      return points.sort((a, b) => a.x - b.x);
    });
    this.densest = this.series.reduce((best, points) => (points.length > best.length ? points : best), []);
  }

  scale() {
    const width = Math.max(this.figure.clientWidth, 200), height = this.large ? Math.min(340, Math.max(230, width * 0.45)) : 130;
    const frame = { left: 50, right: width - 12, top: 12, bottom: height - 22, width, height };
    const [x0, x1] = widened(extent(this.series.flat().map((point) => point.x)), 0);
    const ys = this.series.flat().filter((point) => point.y !== null).map((point) => point.y);
    const bend = this.log ? Math.log10 : (value) => value;
    let [y0, y1] = widened(extent(ys.map(bend)), 0.06);
    if (!this.log && this.spec.format === "percent" && y0 < 0) y0 = Math.min(0, ...ys);
    this.x = (value) => frame.left + ((value - x0) / (x1 - x0)) * (frame.right - frame.left);
    this.y = (value) => frame.bottom - ((bend(value) - y0) / (y1 - y0)) * (frame.bottom - frame.top);
    const [low, high] = this.log ? [10 ** y0, 10 ** y1] : [y0, y1];
    const wanted = this.large ? 6 : 3;
    this.yTicks = (this.log ? logTicks : linearTicks)(low, high, wanted);
    const across = Math.floor(width / (this.large ? 110 : 95));
    this.xTicks = (view.x === "seconds" ? clockTicks : linearTicks)(x0, x1, across).filter((tick) => view.x !== "step" || Number.isInteger(tick));
    this.visible = (value) => value >= low && value <= high;
    return frame;
  }

  draw() {
    if (this.figure.hidden) return;
    this.measure();
    const frame = this.frame = this.scale();
    this.svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    this.cross = svg("g");
    const curves = this.series.map((points, k) => this.curve(points, this.spec.lines[k]));
    this.svg.replaceChildren(this.axes(frame), ...curves, this.marks(frame), this.failures(frame), this.cross);
    const points = this.series.reduce((sum, each) => sum + each.length, 0);
    this.svg.setAttribute("aria-label", `${this.spec.title}${this.unit}, by ${X_NAMES[view.x]}: ${points} points of ${this.spec.lines.map((line) => line.label).join(", ")}. Arrow keys move along the curve.`);
    this.svg.setAttribute("aria-valuemin", 0);
    this.svg.setAttribute("aria-valuemax", Math.max(this.densest.length - 1, 0));
    this.mark(null);
  }

  axes(frame) {
    const group = svg("g", { "aria-hidden": "true" });
    for (const tick of this.yTicks) {
      const y = this.y(tick);
      group.append(svg("path", { class: "grid", d: `M${frame.left} ${y}H${frame.right}` }));
      group.append(svg("text", { x: frame.left - 6, y: y + 4, "text-anchor": "end" }, FORMATS[this.spec.format](tick)));
    }
    for (const tick of this.xTicks) {
      const x = this.x(tick), anchor = x > frame.right - 18 ? "end" : x < frame.left + 18 ? "start" : "middle";
      group.append(svg("text", { x, y: frame.height - 6, "text-anchor": anchor }, X_TICKS[view.x](tick)));
    }
    return group;
  }

  marks(frame) {
    const group = svg("g");
    const seen = this.spec.marks.filter((mark) => this.visible(mark.value)).sort((a, b) => b.value - a.value);
    let last = -Infinity; // labels keep a line's distance from the one above
    for (const mark of seen) {
      const y = this.y(mark.value);
      last = Math.max(y - 4, last + 13);
      group.prepend(svg("path", { class: "mark", d: `M${frame.left} ${y}H${frame.right}` }));
      group.append(svg("text", { class: "halo", x: frame.right, y: last, "text-anchor": "end" }, `${mark.label} ${plain(mark.value)}`));
    }
    return group;
  }

  curve(points, line) {
    const group = svg("g");
    let path = "", pen = false;
    points.forEach((point, index) => {
      if (point.y === null) { pen = false; return; }
      const place = `${this.x(point.x).toFixed(1)} ${this.y(point.y).toFixed(1)}`;
      const alone = !pen && (points[index + 1]?.y ?? null) === null;
      if (line.style === "dots" ? points.length <= 60 : alone) {
        group.append(svg("circle", { class: `t${line.tone}`, cx: place.split(" ")[0], cy: place.split(" ")[1], r: 3 }));
      }
      path += `${pen ? "L" : "M"}${place}`;
      pen = true;
    });
    if (path) group.prepend(svg("path", { class: Chart.classes(line), d: path }));
    return group;
  }

  failures(frame) {
    const group = svg("g");
    if (!this.broken.length) return group;
    const first = this.broken.reduce((a, b) => (b.x < a.x ? b : a));
    const places = new Set(this.broken.map((point) => Math.round(this.x(point.x) / 8) * 8));
    for (const x of places) group.append(svg("text", { class: "broken", x, y: frame.bottom - 2, "text-anchor": "middle" }, "×"));
    const text = `× not a finite number, first ${first.value} at ${X_NAMES[view.x]} ${X_FORMATS[view.x](first.x)}`;
    group.append(svg("text", { class: "broken halo", x: frame.left + 4, y: frame.top + 10 }, text));
    return group;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.frame.width;
    this.mark(this.nearest(this.densest, (point) => this.x(point.x) - x));
  }

  // Index of the point whose signed distance is least; distances ascend along the line
  nearest(points, distance) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (distance(points[middle]) < 0) low = middle + 1; else high = middle;
    }
    return low > 0 && Math.abs(distance(points[low - 1])) <= Math.abs(distance(points[low])) ? low - 1 : low;
  }

  press(event) {
    const last = this.densest.length - 1, large = Math.max(1, Math.round(last / 20));
    const at = this.at ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const moved = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, PageUp: at + large, PageDown: at - large, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.mark(null);
    if (moved === undefined) return;
    event.preventDefault();
    this.mark(Math.min(Math.max(moved, 0), last));
  }

  // Crosshair on one point of the densest line; of every other line the nearest point, with its own step
  mark(at) {
    this.at = at;
    this.cross.replaceChildren();
    this.tip.hidden = at === null || !this.densest.length;
    if (this.tip.hidden) return;
    const here = this.densest[at], x = this.x(here.x);
    const head = `${X_NAMES[view.x]} ${X_FORMATS[view.x](here.x)}${view.x === "step" ? "" : `, step ${here.step.toLocaleString("en")}`}`;
    this.cross.append(svg("path", { class: "cross", d: `M${x} ${this.frame.top}V${this.frame.bottom}` }));
    const rows = this.series.map((points, k) => this.beside(points, this.spec.lines[k], here)).filter(Boolean);
    this.tip.replaceChildren(html("b", {}, head), ...rows.map(([text, tone]) => html("div", { class: `tone${tone}` }, text)));
    this.svg.setAttribute("aria-valuenow", at);
    this.svg.setAttribute("aria-valuetext", [head, ...rows.map(([text]) => text)].join("; "));
    this.place(x);
  }

  beside(points, line, here) {
    if (!points.length) return null;
    const point = points[this.nearest(points, (each) => each.x - here.x)];
    if (point.y !== null) this.cross.append(svg("circle", { class: `solid t${line.tone}`, cx: this.x(point.x), cy: this.y(point.y), r: 3.5 }));
    const where = point.step === here.step ? "" : ` (step ${point.step.toLocaleString("en")})`;
    return [`${line.label} ${show(point.value, this.spec.format)}${where}`, line.tone];
  }

  place(x) {
    const share = this.figure.clientWidth / this.frame.width, room = this.figure.clientWidth - this.tip.offsetWidth;
    const left = x * share + 12, beside = left > room ? x * share - 12 - this.tip.offsetWidth : left;
    this.tip.style.left = `${Math.max(0, Math.min(beside, room))}px`;
    this.tip.style.top = `${this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + 8}px`;
  }
}
// ---- controls ------------------------------------------------------------------------------------------------

function choice(title, key, options) {
  const labels = Object.entries(options).map(([value, text]) => {
    const input = html("input", { type: "radio", name: key, value });
    input.checked = view[key] === value;
    input.addEventListener("change", () => { view[key] = value; redraw(); });
    return html("label", {}, input, text);
  });
  return html("fieldset", {}, html("legend", {}, title), ...labels);
}

function controls(form) {
  const axes = Object.fromEntries(Object.entries(X_NAMES).filter(([key]) => key !== "tokens" || data.tokens));
  if (data.large.length > 1) form.append(choice("Show", "large", Object.fromEntries(data.large.map((spec) => [spec.key, spec.title.toLowerCase()]))));
  form.append(choice("Along", "x", axes));
  const log = html("input", { type: "checkbox", id: "log" });
  log.addEventListener("change", () => { view.log = log.checked; redraw(); });
  form.append(html("label", {}, log, "logarithmic y"));
  form.addEventListener("submit", (event) => event.preventDefault());
}

function redraw() {
  for (const chart of charts) {
    if (chart.large) chart.figure.hidden = chart.spec.key !== view.large;
    chart.draw();
  }
}

function theme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`); };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  button.hidden = false;
  name();
}

function start() {
  theme();
  const form = document.getElementById("controls");
  if (form) {
    controls(form);
    for (const [specs, id] of [[data.large, "large"], [data.small, "small"]]) {
      for (const spec of specs) {
        const chart = new Chart(spec, id === "large");
        charts.push(chart);
        document.getElementById(id).append(chart.figure);
      }
    }
    redraw();
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  }
  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
  document.documentElement.dataset.ready = "true";
}

start();
