// The flame graph: boxes on a canvas, one row for each level of calls, as wide as the time they took.

const ROW = 21, THINNEST = 0.5, FONT = "12px system-ui, sans-serif";

class Flame {
  constructor(figure, { tell, choose }) {
    Object.assign(this, { figure, tell, choose, focus: null, chosen: null, found: null, rows: [] });
    this.canvas = figure.querySelector("canvas");
    this.tip = html("div", { class: "tip", hidden: "" });
    figure.append(this.tip);
    this.context = this.canvas.getContext("2d");
    this.widths = new Map();
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const box = this.under(event);
      if (!box) return;
      if (box === this.chosen) this.zoom(box === this.focus ? box.parent ?? box : box); else this.pick(box);
    });
    this.canvas.addEventListener("dblclick", (event) => { const box = this.under(event); if (box) this.zoom(box); });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("focus", () => this.pick(this.chosen ?? this.focus));
  }

  show(view) {
    this.view = view;
    const before = { focus: this.focus, chosen: this.chosen };
    const same = before.focus?.view.shape === view.shape;
    this.focus = same ? before.focus.in(view) : view.root;
    this.chosen = same && before.chosen ? before.chosen.in(view) : null;
    this.draw();
  }

  // Places of the boxes that are wide enough to see, row by row; what is around the focus is as wide as all of it
  place(width) {
    this.rows = [];
    const around = [];
    for (let box = this.focus.parent; box; box = box.parent) around.unshift(box);
    around.forEach((box, row) => this.rows.push([{ box, x: 0, width, row, around: true }]));
    const sizeOf = (box) => (this.byOther ? box.other : box.time), whole = sizeOf(this.focus);
    const open = [{ box: this.focus, x: 0, width, row: around.length }];
    while (open.length) {
      const one = open.pop();
      (this.rows[one.row] ??= []).push(one);
      if (!(whole > 0)) continue;
      let x = one.x;
      for (const box of one.box.boxes) {
        const wide = (sizeOf(box) / whole) * width;
        if (wide >= THINNEST) open.push({ box, x, width: wide, row: one.row + 1 });
        x += wide;
      }
    }
    for (const row of this.rows) row.sort((a, b) => a.x - b.x);
  }

  draw() {
    if (!this.view || this.figure.hidden) return;
    const width = Math.max(this.figure.clientWidth, 200), ratio = devicePixelRatio || 1;
    this.place(width);
    const height = this.rows.length * ROW + 2;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const { context } = this, ink = colour("ink"), paper = colour("paper"), quiet = colour("quiet");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    this.palette = Object.fromEntries(["box-python", "box-package", "box-operator", "box-backward", "box-span", "box-kernel", "box-native", "box-lost", "box-all", "box-more", "box-less", "box-found"].map((tone) => [tone, colour(tone)]));
    for (const one of this.rows.flat()) this.drawBox(one, ink, paper, quiet);
    const chosen = this.rows.flat().find((one) => one.box === this.chosen);
    if (chosen) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(chosen.x + 1, chosen.row * ROW + 1, Math.max(chosen.width - 2, 1), ROW - 2);
    }
  }

  drawBox(one, ink, paper, quiet) {
    const { context } = this, { box, x, width, row } = one, y = row * ROW;
    const found = this.found?.[box.frame];
    context.globalAlpha = one.around || (this.found && !found) ? 0.42 : 1;
    context.fillStyle = found ? this.palette["box-found"] : this.toneOf(box);
    const wide = Math.max(width - (width > 3 ? 1 : 0), 0.4);
    context.fillRect(x, y, wide, ROW - 1);
    if (width < 26) { context.globalAlpha = 1; return; }
    context.globalAlpha = one.around || (this.found && !found) ? 0.75 : 1;
    context.fillStyle = found ? paper : ink;
    const code = width > 160 && box.parent ? codeOf(placeOf(box.frame)) : "";
    context.fillText(this.fitting(code ? `${box.label}:  ${code}` : box.label, width - 10), x + 5, y + ROW / 2 - 0.5);
    context.globalAlpha = 1;
  }

  toneOf(box) {
    if (!box.parent) return this.palette["box-all"];
    if (this.view.other) return this.changed(box);
    const kind = frames.kind[box.frame];
    return this.palette[kind === PYTHON && !frames.own[box.frame] ? "box-package" : `box-${KINDS[kind] || "all"}`];
  }

  // Red where time was added and blue where it went; full where the change is half of the box or more
  changed(box) {
    const change = (box.time - box.other) / Math.max(box.time, box.other, 1), share = Math.min(Math.abs(change) * 2, 1);
    return mixed(this.palette["box-all"], this.palette[change > 0 ? "box-more" : "box-less"], share < 0.04 ? 0 : share);
  }

  fitting(text, width) {
    let wide = this.widths.get(text);
    if (wide === undefined) this.widths.set(text, (wide = this.context.measureText(text).width));
    if (wide <= width) return text;
    const letters = Math.floor((text.length * width) / wide) - 1;
    return letters > 1 ? `${text.slice(0, letters)}…` : "";
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return this.rows[Math.floor(y / ROW)]?.find((one) => x >= one.x && x <= one.x + Math.max(one.width, 1))?.box;
  }

  hover(event) {
    const box = this.under(event);
    this.canvas.style.cursor = box ? "pointer" : "default";
    this.tip.hidden = !box;
    if (!box) return;
    this.tip.replaceChildren(html("b", {}, box.label), ...this.tell(box).map((line) => html("div", {}, line)));
    const frame = this.figure.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, frame.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  pick(box) {
    this.chosen = box;
    this.draw();
    this.choose(box);
  }

  zoom(box) {
    this.focus = box;
    this.tip.hidden = true;
    this.pick(box);
  }

  press(event) {
    const at = this.chosen ?? this.focus, beside = at.parent ? at.parent.boxes : [at], place = beside.indexOf(at);
    const next = { ArrowDown: at.boxes[0], ArrowUp: at.parent, ArrowRight: beside[place + 1], ArrowLeft: beside[place - 1], Home: this.focus, End: beside.at(-1) };
    if (event.key in next) {
      event.preventDefault();
      const box = next[event.key];
      if (!box) return;
      const inside = box === this.focus || within(box, this.focus) || within(this.focus, box);
      if (!inside) this.focus = box.parent ?? box;
      this.pick(box);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.zoom(at);
    } else if (event.key === "Escape") this.zoom(this.view.root);
  }
}

const within = (box, around) => { let up = box.parent; while (up && up !== around) up = up.parent; return Boolean(up); };

function mixed(one, other, share) {
  const [a, b] = [one, other].map((text) => text.match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map((part) => Math.round(a[part] + (b[part] - a[part]) * share)).join(" ")})`;
}
