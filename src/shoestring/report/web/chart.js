// A chart: what it draws, how it answers pointer and keys, and what it says to those who do not see it.

const NARROW = 14; // right margin of a chart whose baselines are named beneath it

class Chart {
  constructor(spec, figure, large) {
    Object.assign(this, { spec, figure, large, plot: null, at: null });
    this.box = figure.querySelector(".plot");
    this.note = figure.querySelector(".broken");
    this.below = html("p", { class: "of below", hidden: "" });
    this.note.before(this.below);
    this.tip = html("div", { class: "tip", hidden: "" });
    for (const [key, value] of Object.entries({ tabindex: 0, role: "slider", "aria-orientation": "horizontal", "aria-valuemin": 0 })) this.box.setAttribute(key, value);
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("blur", () => this.leave());
    figure.append(this.tip);
  }

  // What is drawn: of each line that is shown its values, and over those their smoothed course
  series() {
    const drawn = [];
    for (const line of this.spec.lines.filter(shows)) {
      const raw = points(line, line), steps = line.kind !== "held out" && this.spec.smooth ? windowOf(view.smooth) : 0;
      const over = steps > 0 && raw.length > 2;
      drawn.push({ line, points: raw, faint: over });
      if (over) drawn.push({ line, points: smoothed(line.means ? points(line, line.means) : raw, steps), smooth: true });
    }
    return drawn;
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (this.figure.hidden) return;
    this.log = view.log && this.large;
    this.drawn = this.series();
    const placed = (value) => (typeof value === "number" && !(this.log && value <= 0) ? value : null);
    const tables = this.drawn.map((one) => [one.points.map((point) => point[0]), one.points.map((point) => placed(point[1]))]);
    this.range = extent();
    this.told();
    if (tables.length && this.range[0] <= this.range[1]) this.plot = new uPlot(this.options(), uPlot.join(tables), this.box);
  }

  options() {
    const width = Math.max(this.box.clientWidth, 200), marks = this.marks();
    const gutter = marks.length && width >= 640 ? 26 + 6.4 * Math.max(...marks.map((mark) => mark.text.length)) : NARROW;
    const quiet = colour("quiet"), rule = colour("rule"), font = "12px system-ui, sans-serif";
    const axis = { stroke: quiet, font, grid: { stroke: rule, width: 1 }, ticks: { show: false }, gap: 6 };
    return {
      width,
      height: this.large ? Math.min(380, Math.max(260, width * 0.42)) : 150,
      padding: [10, gutter, 0, 0],
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "charts", scales: ["x", null] },
        points: { size: 7 },
        dataIdx: (plot, series, hovered) => this.beside(plot.data[series], hovered),
        bind: { dblclick: () => () => zoom(null) },
      },
      scales: {
        x: { time: false, range: () => this.shown() },
        y: { distr: this.log ? 3 : 1, range: (plot, low, high) => this.room(low, high) },
      },
      axes: [
        { ...axis, size: 26, space: this.large ? 75 : 55, incrs: INCREMENTS[view.x], values: (plot, ticks) => ticks.map((x) => (view.x === "step" && x >= 1e4 ? count(x) : X_FORMATS[view.x](x))) },
        {
          ...axis,
          size: (plot, texts) => 14 + 6.6 * Math.max(4, ...(texts ?? []).map((text) => text.length)),
          space: this.large ? 40 : 22,
          values: (plot, ticks) => ticks.map(FORMATS[this.spec.format]),
          ...(this.log ? { splits: (plot, k, low, high) => logTicks(low, high), filter: (plot, ticks) => ticks } : {}),
        },
      ],
      series: [{}, ...this.drawn.map((one) => this.style(one))],
      hooks: {
        draw: [(plot) => { this.drawMarks(plot, marks, gutter, quiet, font); this.drawBroken(plot); }],
        setCursor: [(plot) => this.tell(plot)],
        setSelect: [(plot) => plot.select.width > 8 && zoom([plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x")))],
      },
    };
  }

  style({ line, points: all, faint }) {
    const stroke = colour(toneOf(line)), heldOut = line.kind === "held out";
    const few = heldOut ? all.length <= 60 : all.filter((point) => typeof point[1] === "number").length < 3;
    return {
      stroke: faint ? faded(stroke, 0.28) : stroke,
      width: faint ? 1 : heldOut || !this.large ? 1.75 : 1.5,
      dash: heldOut ? [6, 4] : line.run >= 8 || (line.tone && data.runs.length > 1) ? [2, 2] : undefined,
      points: { show: few, size: 6, stroke, fill: colour("paper"), width: 1.5 },
    };
  }

  shown() {
    const [low, high] = view.zoom ?? this.range;
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  room(low, high) {
    if (low === null || high === null) return [0, 1];
    const constant = high - low <= 1e-9 * Math.abs(high); // but for what rounding leaves
    if (this.log) return [low / (high / low || 1) ** 0.05 * (constant ? 0.9 : 1), high * (high / low || 1) ** 0.05 * (constant ? 1.1 : 1)];
    const more = constant ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
    return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
  }

  // Index of the number nearest to a place in a column that has gaps
  beside(column, place) {
    for (let away = 0; away < column.length; away += 1) {
      if (column[place - away] != null) return place - away;
      if (column[place + away] != null) return place + away;
    }
    return null;
  }

  // ---- baselines, and values that are no numbers

  marks() {
    if (view.hidden.has("baselines")) return [];
    return this.spec.marks.map((mark) => ({ value: mark.value, text: `${mark.label} ${plain(mark.value)}` })).sort((a, b) => b.value - a.value);
  }

  // In a gutter wide enough for them, labels keep a line's height between them, and leaders tie them to their baselines
  drawMarks(plot, marks, gutter, quiet, font) {
    const { ctx, bbox } = plot, ratio = uPlot.pxRatio, gap = 15 * ratio, right = bbox.left + bbox.width, bottom = bbox.top + bbox.height;
    const seen = marks.map((mark) => ({ ...mark, y: plot.valToPos(mark.value, "y", true) })).filter(({ y }) => y >= bbox.top && y <= bottom);
    const places = [];
    for (const { y } of seen) places.push(Math.max(y, (places.at(-1) ?? -Infinity) + gap));
    for (let k = places.length - 1, most = bottom; k >= 0; k -= 1, most = places[k + 1] - gap) places[k] = Math.min(places[k], most);
    ctx.save();
    ctx.font = font.replace("12px", `${12 * ratio}px`);
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.lineWidth = ratio;
    ctx.strokeStyle = ctx.fillStyle = quiet;
    seen.forEach(({ y, text }, k) => {
      ctx.setLineDash([2 * ratio, 4 * ratio]);
      stroke(ctx, [bbox.left, y], [right, y]);
      if (gutter <= NARROW) return;
      ctx.setLineDash([]);
      stroke(ctx, [right, y], [right + 10 * ratio, places[k]]);
      ctx.fillText(text, right + 14 * ratio, places[k]);
    });
    ctx.restore();
    this.below.hidden = gutter > NARROW || !seen.length;
    this.below.textContent = `Baselines, from above: ${seen.map(({ text }) => text).join(", ")}`;
    this.box.dataset.labels = JSON.stringify(gutter > NARROW ? places.map((y) => Math.round(y / ratio)) : []);
  }

  broken() {
    return this.drawn.filter((one) => !one.smooth).flatMap((one) => one.points).filter((point) => typeof point[1] !== "number");
  }

  drawBroken(plot) {
    const { ctx, bbox } = plot, ratio = uPlot.pxRatio;
    ctx.save();
    ctx.fillStyle = colour("bad");
    ctx.font = `bold ${13 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    const places = new Set(this.broken().map((point) => Math.round(plot.valToPos(point[0], "x") / 8) * 8).filter((x) => x >= 0 && x * ratio <= bbox.width));
    for (const x of places) ctx.fillText("×", bbox.left + x * ratio, bbox.top + bbox.height - 3 * ratio);
    ctx.restore();
  }

  // ---- what is said of it: by the note beneath, the tip beside the crosshair, and to a screen reader

  told() {
    const first = this.broken().reduce((a, b) => (a && a[0] <= b[0] ? a : b), null);
    this.note.hidden = !first;
    if (first) this.note.textContent = `× not a finite number, first ${first[1]} at ${X_NAMES[view.x]} ${X_FORMATS[view.x](first[0])}`;
    const raw = this.drawn.filter((one) => !one.smooth);
    this.densest = raw.reduce((best, one) => (one.points.length > best.length ? one.points : best), []);
    const names = raw.map((one) => labelOf(one.line)).filter(Boolean).join("; ");
    const total = raw.reduce((sum, one) => sum + one.points.length, 0);
    this.box.setAttribute("aria-label", `${this.spec.title}${this.spec.unit ? `, ${this.spec.unit}` : ""}, by ${X_NAMES[view.x]}: ${total} points${names ? ` of ${names}` : ""}. Arrow keys move along the curve, plus and minus zoom.`);
    this.box.setAttribute("aria-valuemax", Math.max(this.densest.length - 1, 0));
    this.box.setAttribute("aria-valuenow", 0);
  }

  tell(plot) {
    const { idx, left } = plot.cursor, own = this.figure.matches(":hover") || document.activeElement === this.box;
    this.tip.hidden = idx == null || left < 0 || !own;
    if (this.tip.hidden) return;
    const x = plot.data[0][idx], raw = this.drawn.filter((one) => !one.smooth && one.points.length);
    const step = this.densest[nearest(this.densest, x)]?.[2];
    const head = `${X_NAMES[view.x]} ${X_FORMATS[view.x](x)}${view.x === "step" ? "" : `, step ${step?.toLocaleString("en")}`}`;
    const rows = raw.map((one) => {
      const [, value, at] = one.points[nearest(one.points, x)];
      const number = typeof value === "number" ? FORMATS[this.spec.format](value) : value;
      return [`${labelOf(one.line)} ${number}${at === step ? "" : ` (step ${at.toLocaleString("en")})`}`.trim(), toneOf(one.line)];
    });
    this.tip.replaceChildren(html("b", {}, head), ...rows.map(([text, tone]) => html("div", { class: tone }, text)));
    this.box.setAttribute("aria-valuetext", [head, ...rows.map(([text]) => text)].join("; "));
    const offset = plot.over.getBoundingClientRect(), frame = this.figure.getBoundingClientRect();
    const middle = offset.left - frame.left + left, wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(middle + 14 + wide > frame.width ? middle - 14 - wide : middle + 14, frame.width - wide))}px`;
    this.tip.style.top = `${offset.top - frame.top + 6}px`;
  }

  press(event) {
    if (!this.plot || !this.densest.length) return;
    const last = this.densest.length - 1, far = Math.max(1, Math.round(last / 20));
    const at = this.at ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const moved = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, PageUp: at + far, PageDown: at - far, Home: 0, End: last }[event.key];
    const asked = { "+": () => magnify(0.5, this.middle()), "=": () => magnify(0.5, this.middle()), "-": () => magnify(2, this.middle()), 0: () => zoom(null), Escape: () => this.leave() }[event.key];
    if (moved === undefined && !asked) return;
    event.preventDefault();
    if (asked) asked(); else this.at = Math.min(Math.max(moved, 0), last);
    if (this.at !== null) this.point();
  }

  // The crosshair on the point that the keys chose; what is zoomed in moves along
  point() {
    const x = this.middle(), [low, high] = this.shown();
    if (x < low || x > high) zoom([x - (high - low) / 2, x + (high - low) / 2]);
    this.box.setAttribute("aria-valuenow", this.at);
    queueMicrotask(() => this.plot?.setCursor({ left: this.plot.valToPos(x, "x"), top: 4 }, true, true)); // once it is drawn
  }

  middle() {
    return this.at === null ? null : this.densest[this.at][0];
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    this.plot?.setCursor({ left: -10, top: -10 }, true, true);
  }
}

function stroke(ctx, from, to) {
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
}
