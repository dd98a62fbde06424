// The controls, what is said of a call, the source of the program, and the start.

const view = { shape: "top-down", as: "graph", packages: false, column: "all", wide: "after", by: "time", text: "" };
const SHAPES = { "top-down": "top-down", "bottom-up": "bottom-up", joined: "backward on its forward line" };
const element = (id) => document.getElementById(id);
let flame = null, table = null, shown = null;

const spent = (nanoseconds) => seconds(nanoseconds / 1e9);
const share = (part, whole) => percent(whole ? part / whole : 0);
const signed = (nanoseconds) => (nanoseconds > 0 ? "+" : "") + spent(nanoseconds);

// ---- columns of times ------------------------------------------------------------------------------------------

function summed(columns) {
  const sum = new Float64Array(data.nodes);
  for (const column of columns) for (let node = 0; node < data.nodes; node += 1) sum[node] += column[node];
  return sum;
}

function remake() {
  const [column, other] = data.diff ? [calls.own[1], before()] : [view.column === "all" ? whole() : calls.own[Number(view.column)], null];
  shown = new View({ shape: view.shape, packages: view.packages, column, other });
  refresh();
}

// The former times; as shares, as if all had taken as long as it does now
function before() {
  if (view.by === "time") return calls.own[0];
  const [then, now] = calls.own.map((own) => own.reduce((a, b) => a + b, 0));
  return calls.own[0].map((time) => (then ? (time * now) / then : 0));
}

let all = null;
function whole() {
  all ??= calls.own.length > 1 ? summed(calls.own) : calls.own[0];
  return all;
}

function refresh() {
  element("graph").hidden = view.as !== "graph";
  element("rows").hidden = view.as === "graph";
  element("keys").hidden = view.as !== "graph";
  flame.byOther = data.diff && view.wide === "before";
  if (view.as === "graph") flame.show(shown); else table.show(shown);
  seek();
}

let asked = 0;
function redraw() {
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(() => flame?.draw());
}

// ---- what is said of a call ------------------------------------------------------------------------------------

function tell(box) {
  const time = shown.other ? `${spent(box.other)} before, ${spent(box.time)} after: ${signed(box.time - box.other)}` : `${spent(box.time)}, ${share(box.time, shown.root.time)} of all`;
  const count = box.parent && !shown.up ? box.sum(calls.count) : 0, place = box.parent && placeOf(box.frame);
  return [time, count ? `${count.toLocaleString("en")} calls` : "", place ? codeOf(place) : ""].filter(Boolean);
}

function choose(box) {
  const place = box.parent ? placeOf(box.frame) : null, code = codeOf(place);
  const rows = [["Time", `${spent(box.time)} (${share(box.time, shown.root.time)})`], ["Own time", spent(box.own)]];
  if (shown.other) rows.splice(0, 2, ["Before", spent(box.other)], ["After", spent(box.time)], ["Change", `${signed(box.time - box.other)} (${share(box.time - box.other, box.other)})`]);
  const count = box.parent && !shown.up ? box.sum(calls.count) : 0;
  if (count) {
    rows.push(["Calls", count.toLocaleString("en")]);
    if (!shown.other) rows.push(["A call", `${spent(box.sum(calls.inclusive) / count)} (${spent(least(box))} to ${spent(Math.max(...box.at.map((node) => calls.most[node])))})`]);
  }
  if (!shown.other && !shown.up && box.parent) {
    const bytes = box.sum(calls.bytes), flops = box.sum(calls.flops), device = box.sum(calls.device);
    if (bytes) rows.push(["Bytes of its tensors", `${countOf(bytes)}B`]);
    if (flops) rows.push(["FLOP", `${countOf(flops)} (${countOf(flops / (box.sum(calls.inclusive) / 1e9))}FLOP/s)`]);
    if (device) rows.push(["On the accelerator", spent(device)]);
    const inputs = [...new Set(box.at.map((node) => calls.inputs[node]))].filter(Boolean).map((index) => data.names[index]);
    if (inputs.length) rows.push(["Arguments", inputs.slice(0, 3).join("; or ") + (inputs.length > 3 ? "; …" : "")]);
    if (calls.own.length > 1) rows.push(["By rank", data.labels.map((name, k) => `${name} ${spent(timeWithin(box, calls.own[k]))}`).slice(0, 16).join(", ")]);
  }
  if (place) rows.push(["Where", `${place.file}:${place.line}`]);
  element("call").replaceChildren(html("b", {}, box.label), ...(code ? [html("code", {}, code)] : []), html("dl", { class: "facts" }, ...rows.map(([name, text]) => html("div", {}, html("dt", {}, name), html("dd", {}, text)))));
  if (place && data.sources[place.file] !== undefined) element("call").append(button("Show the source", `Show ${where(place)} in the source`, () => showSource(place.file, place.line, true)));
  element("said").textContent = `${box.label}: ${tell(box).join("; ")}; level ${box.depth}${box.boxes.length ? `, ${box.boxes.length} within` : ""}`;
  element("reset").disabled = flame.focus === shown.root;
}

const least = (box) => Math.min(...box.at.filter((node) => calls.count[node]).map((node) => calls.least[node]));
const countOf = (value) => count(value).replace(/([kMBT]?)$/, (suffix) => ` ${suffix === "B" ? "G" : suffix}`);

function timeWithin(box, own) {
  shown.ranks ??= new Map();
  if (!shown.ranks.has(own)) shown.ranks.set(own, totals(own, shown.parent));
  return box.sum(shown.ranks.get(own));
}

function seek() {
  const found = matching(view.text);
  flame.found = found;
  flame.draw();
  if (!found) { element("found").textContent = ""; return; }
  const names = found.reduce((sum, one) => sum + one, 0), time = timeOf(found, shown);
  element("found").textContent = names ? `${share(time, shown.column.reduce((a, b) => a + b, 0))} of the time is within ${names === 1 ? "the name that matches" : `the ${names} names that match`}` : "nothing matches";
}

// The next box that matches, from the widest on
function next() {
  const boxes = flame.rows.flat().filter((one) => flame.found?.[one.box.frame] && !one.around).sort((a, b) => b.width - a.width);
  if (!boxes.length) return;
  const at = boxes.findIndex((one) => one.box === flame.chosen);
  flame.pick(boxes[(at + 1) % boxes.length].box);
}

// ---- the source ------------------------------------------------------------------------------------------------

function showSource(file, line, move) {
  const lines = data.sources[file].split("\n"), times = data.lines[file] ?? {}, scale = Math.max(1, ...Object.values(times).map((one) => one[0] + (data.diff ? 0 : one[1] + one[2])));
  element("file").value = file;
  const body = lines.map((text, index) => {
    const time = times[index + 1], row = html("tr", { class: index + 1 === line ? "at" : "" });
    const cells = data.diff ? time && [spent(time[0]), spent(time[1]), signed(time[1] - time[0])] : time && time.map((value) => (value ? spent(value) : ""));
    for (const cell of cells ?? ["", "", ""]) row.append(html("td", { class: "figure" }, cell));
    row.append(html("th", { scope: "row", class: "figure number-of" }, String(index + 1)), html("td", { class: "code" }, text));
    if (time) row.style.setProperty("--heat", data.diff ? "0" : String(Math.min((time[0] + time[1] + time[2]) / scale, 1)));
    if (time && data.diff) row.classList.add(time[1] > time[0] ? "slower" : "faster");
    return row;
  });
  element("source").querySelector("tbody").replaceChildren(...body);
  const box = element("source"), row = body[Math.max(line - 1, 0)];
  box.scrollTop = row ? row.offsetTop - box.clientHeight / 3 : 0;
  if (move) { element("source").focus({ preventScroll: true }); element("source-section").scrollIntoView({ block: "start" }); }
}

function hottest(file) {
  const times = Object.entries(data.lines[file] ?? {});
  const size = ([, one]) => (data.diff ? Math.abs(one[1] - one[0]) : one[0] + one[1] + one[2]);
  return times.length ? Number(times.reduce((a, b) => (size(b) > size(a) ? b : a))[0]) : 1;
}

function sources() {
  const files = Object.keys(data.sources), pick = element("file");
  if (!pick) return;
  pick.append(...files.map((file) => html("option", { value: file }, file)));
  pick.addEventListener("change", () => showSource(pick.value, hottest(pick.value), false));
  for (const link of document.querySelectorAll("button[data-file]")) {
    if (data.sources[link.dataset.file] === undefined) link.disabled = true;
    else link.addEventListener("click", () => showSource(link.dataset.file, Number(link.dataset.line), true));
  }
  showSource(files[0], hottest(files[0]), false);
}

// ---- controls --------------------------------------------------------------------------------------------------

function choice(title, key, options, change) {
  const labels = Object.entries(options).map(([value, text]) => {
    const input = html("input", { type: "radio", name: key, value });
    input.checked = view[key] === value;
    input.addEventListener("change", () => { view[key] = value; change(); });
    return html("label", {}, input, text);
  });
  return html("fieldset", {}, html("legend", {}, title), ...labels);
}

function controls(form) {
  const packages = html("input", { type: "checkbox", id: "packages" });
  packages.addEventListener("change", () => { view.packages = packages.checked; remake(); });
  const search = html("input", { type: "search", id: "search", placeholder: "name, file or /expression/", "aria-describedby": "found" });
  search.addEventListener("input", () => { view.text = search.value; seek(); });
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); next(); } });
  form.append(choice("Calls", "shape", SHAPES, remake), choice("Show as", "as", { graph: "graph", table: "table" }, refresh));
  if (data.diff) form.append(choice("Compare", "by", { time: "times", share: "shares of all" }, remake), choice("Width", "wide", { after: "after", before: "before" }, refresh));
  else if (data.labels.length > 1) {
    const ranks = html("select", { id: "rank" }, html("option", { value: "all" }, "all together"), ...data.labels.map((name, k) => html("option", { value: k }, name)));
    ranks.addEventListener("change", () => { view.column = ranks.value; remake(); });
    form.append(html("label", {}, html("span", { class: "of" }, "Time of"), ranks));
  }
  form.append(html("label", {}, packages, "functions of packages"));
  form.append(html("label", {}, html("span", { class: "of" }, "Search"), search), html("output", { id: "found", for: "search" }));
  form.append(button("All", "Show all calls again", () => flame.zoom(shown.root), { id: "reset", disabled: "" }));
  form.addEventListener("submit", (event) => event.preventDefault());
}

function tableColumns() {
  const calls_ = { title: "Calls", text: (box) => (box.parent && !shown.up ? box.sum(calls.count).toLocaleString("en") : "") };
  if (data.diff) return [{ title: "Before", text: (box) => spent(box.other) }, { title: "After", text: (box) => spent(box.time) }, { title: "Change", text: (box) => signed(box.time - box.other) }, calls_];
  return [{ title: "Share", text: (box) => share(box.time, shown.root.time) }, { title: "Time", text: (box) => spent(box.time) }, { title: "Own time", text: (box) => spent(box.own) }, calls_];
}

// What a finding points to, sought by its frames: boxes of any view show it
function findings() {
  for (const mark of document.querySelectorAll("button[data-nodes]")) {
    mark.addEventListener("click", () => {
      const found = new Uint8Array(frames.count);
      for (const node of JSON.parse(mark.dataset.nodes)) found[frames.of[node]] = 1;
      flame.found = found;
      flame.draw();
      element("graph").scrollIntoView({ block: "center" });
    });
  }
}

async function start() {
  theme();
  await unpack();
  flame = new Flame(element("graph"), { tell, choose });
  table = new CallTable(element("rows"), { columns: tableColumns(), choose });
  controls(element("controls"));
  sources();
  findings();
  remake();
  choose(shown.root);
  element("said").textContent = "";
  let width = element("controls").clientWidth;
  new ResizeObserver(() => {
    if (element("controls").clientWidth !== width) redraw();
    width = element("controls").clientWidth;
  }).observe(element("controls"));
  const root = document.documentElement, before = root.dataset.theme;
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; flame.draw(); });
  addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; flame.draw(); });
  root.dataset.ready = String(Math.round(performance.now()));
}

start();
