// The controls above the charts, and the start.

let asked = 0;
function redraw() { // at most once a frame: a slider sends many events
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(drawAll);
}

function drawAll() {
  for (const chart of charts) {
    if (chart.large) chart.figure.hidden = chart.spec.key !== view.large;
    chart.draw();
  }
  document.getElementById("whole").disabled = view.zoom === null;
}

function zoom(range) {
  const [low, high] = extent();
  view.zoom = range && [Math.max(low, Math.min(...range)), Math.min(high, Math.max(...range))];
  if (view.zoom && !(view.zoom[0] < view.zoom[1])) view.zoom = null;
  if (view.zoom && view.zoom[0] <= low && view.zoom[1] >= high) view.zoom = null;
  drawAll();
}

// Show more or less of the x axis, around a place or around the middle of what is shown
function magnify(factor, around) {
  const [low, high] = view.zoom ?? extent(), middle = around ?? (low + high) / 2;
  zoom([middle - (middle - low) * factor, middle + (high - middle) * factor]);
}

function choice(title, key, options) {
  const labels = Object.entries(options).map(([value, text]) => {
    const input = html("input", { type: "radio", name: key, value });
    input.checked = view[key] === value;
    input.addEventListener("change", () => {
      view[key] = value;
      if (key === "x") view.zoom = null;
      redraw();
    });
    return html("label", {}, input, text);
  });
  return html("fieldset", {}, html("legend", {}, title), ...labels);
}

function slider() {
  const input = html("input", { type: "range", id: "smooth", min: 0, max: 100, step: 1 }), said = html("output", { for: "smooth" });
  const tell = () => {
    const steps = windowOf(view.smooth);
    said.textContent = steps ? `over ${steps.toLocaleString("en")} steps` : "off";
    input.setAttribute("aria-valuetext", said.textContent);
  };
  input.value = view.smooth;
  input.addEventListener("input", () => { view.smooth = Number(input.value); tell(); redraw(); });
  tell();
  return html("label", {}, html("span", { class: "of" }, "Smoothing"), input, said);
}

// A switch for each run and for each kind of line: hides it in all charts
function switches() {
  const several = data.runs.length > 1, kinds = LINES.filter((kind) => data.large.some((spec) => (kind === "baselines" ? spec.marks.length : spec.lines.some((line) => line.kind === kind))));
  const one = (key, text, swatch) => {
    const made = html("button", { type: "button", class: "switch", "aria-pressed": "true" }, html("span", { class: `swatch ${swatch}`, "aria-hidden": "true" }), text);
    made.addEventListener("click", () => {
      if (!view.hidden.delete(key)) view.hidden.add(key);
      made.setAttribute("aria-pressed", String(!view.hidden.has(key)));
      redraw();
    });
    return made;
  };
  const runs = several ? data.runs.map((run, k) => one(`run ${k}`, run.name, `tone${k % 8}`)) : [];
  const shape = { training: `full ${several ? "quiet" : "tone0"}`, "held out": `dashed ${several ? "quiet" : "tone1"}`, baselines: "dotted quiet" };
  return html("div", { class: "switches", role: "group", "aria-label": "Curves that are shown" }, ...runs, ...kinds.map((kind) => one(kind, kind, shape[kind])));
}

function controls(form) {
  const axes = Object.fromEntries(Object.entries(X_NAMES).filter(([key]) => key !== "tokens" || data.tokens));
  if (data.large.length > 1) form.append(choice("Show", "large", Object.fromEntries(data.large.map((spec) => [spec.key, spec.title.toLowerCase()]))));
  form.append(choice("Along", "x", axes));
  const log = html("input", { type: "checkbox", id: "log" });
  log.addEventListener("change", () => { view.log = log.checked; redraw(); });
  form.append(html("label", {}, log, "logarithmic y"), slider());
  const buttons = [
    button("+", "Zoom in", () => magnify(0.5), { class: "square" }),
    button("−", "Zoom out", () => magnify(2), { class: "square" }),
    button("Whole run", "Show the whole run", () => zoom(null), { id: "whole", disabled: "" }),
  ];
  const hint = html("span", { class: "of hint" }, "or drag across a chart; a double click shows the whole run");
  form.append(html("div", { class: "zoom", role: "group", "aria-label": "Zoom" }, html("span", { class: "of" }, "Zoom"), ...buttons, hint));
  form.append(switches());
  form.addEventListener("submit", (event) => event.preventDefault());
}

function start() {
  theme();
  const form = document.getElementById("controls");
  if (form) {
    if (LAST >= 50) view.smooth = 36; // a window of 4% of the run
    controls(form);
    [...data.large, ...data.small].forEach((spec, k) => charts.push(new Chart(spec, document.getElementById(`chart-${k}`), k < data.large.length)));
    drawAll();
    let width = form.clientWidth;
    new ResizeObserver(() => { // of the width: the height changes with the words beside the slider
      if (form.clientWidth !== width) redraw();
      width = form.clientWidth;
    }).observe(form);
    const root = document.documentElement, before = root.dataset.theme;
    addEventListener("beforeprint", () => { root.dataset.theme = "light"; drawAll(); });
    addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; drawAll(); });
  }
  document.documentElement.dataset.ready = "true";
}

start();
