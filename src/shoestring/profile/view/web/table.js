// The same view as a table whose rows open: for screen readers, for keyboards, and for exact numbers.

const MOST = 60; // rows that one row opens at once

class CallTable {
  constructor(region, { columns, choose }) {
    Object.assign(this, { region, columns, choose });
    this.body = html("tbody");
    const head = html("tr", {}, html("th", { scope: "col" }, "Call"), ...columns.map(({ title }) => html("th", { scope: "col", class: "figure" }, title)));
    const table = html("table", { role: "treegrid", "aria-label": "Calls; arrow keys right and left open and close a row" }, html("thead", {}, head), this.body);
    region.replaceChildren(table);
    this.body.addEventListener("keydown", (event) => this.press(event));
  }

  show(view) {
    this.body.replaceChildren();
    this.boxes = new WeakMap();
    let box = view.root;
    this.append(box, null);
    for (let depth = 0, row = this.body.firstElementChild; row && depth < 40; depth += 1) { // what nearly all time is in, is opened
      this.open(row);
      const first = box.boxes[0], next = row.nextElementSibling;
      if (!first || !(first.time > 0.5 * view.root.time)) break;
      box = first;
      row = next;
    }
    this.body.querySelector("tr")?.setAttribute("tabindex", "0");
  }

  append(box, after) {
    const has = box.boxes.length > 0, row = html("tr", { "aria-level": box.depth + 1, tabindex: "-1" });
    if (has) row.setAttribute("aria-expanded", "false");
    const toggle = html("span", { class: "toggle", "aria-hidden": "true" }, has ? "▸" : "");
    const name = html("th", { scope: "row", class: "call" }, toggle, html("span", { class: "dot " + (box.parent ? `box-${KINDS[frames.kind[box.frame]]}` : "box-all"), "aria-hidden": "true" }), box.label);
    name.style.setProperty("--level", box.depth);
    row.append(name, ...this.columns.map(({ text }) => html("td", { class: "figure" }, text(box))));
    row.addEventListener("click", () => { this.focus(row); this.toggle(row); });
    row.addEventListener("focus", () => this.choose(box));
    this.boxes.set(row, box);
    if (after) after.after(row); else this.body.append(row);
    return row;
  }

  open(row, from = 0) {
    const { boxes } = this.boxes.get(row);
    if (!boxes.length) return;
    row.setAttribute("aria-expanded", "true");
    row.querySelector(".toggle").textContent = "▾";
    let last = row;
    for (const box of boxes.slice(from, from + MOST)) last = this.append(box, last);
    const left = boxes.length - from - MOST;
    if (left > 0) {
      const more = html("tr", { "aria-level": this.boxes.get(row).depth + 2, tabindex: "-1" }, html("td", { colspan: this.columns.length + 1 }, button(`${left} more`, `Show more of ${left} calls`, () => { more.remove(); this.openMore(row, from + MOST, last); })));
      last.after(more);
    }
  }

  openMore(row, from, last) {
    for (const box of this.boxes.get(row).boxes.slice(from)) last = this.append(box, last);
  }

  close(row) {
    row.setAttribute("aria-expanded", "false");
    row.querySelector(".toggle").textContent = "▸";
    const level = Number(row.getAttribute("aria-level"));
    for (let next = row.nextElementSibling; next && Number(next.getAttribute("aria-level")) > level;) {
      const gone = next;
      next = next.nextElementSibling;
      gone.remove();
    }
  }

  toggle(row) {
    if (row.getAttribute("aria-expanded") === "true") this.close(row); else this.open(row);
  }

  focus(row) {
    this.body.querySelector('tr[tabindex="0"]')?.setAttribute("tabindex", "-1");
    row.setAttribute("tabindex", "0");
    row.focus();
  }

  press(event) {
    const row = event.target.closest("tr"), open = row.getAttribute("aria-expanded");
    if (event.target !== row) return; // a button within
    const level = Number(row.getAttribute("aria-level"));
    let above = row.previousElementSibling;
    while (above && Number(above.getAttribute("aria-level")) >= level) above = above.previousElementSibling;
    const to = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Home: this.body.firstElementChild, End: this.body.lastElementChild }[event.key];
    if (to) this.focus(to);
    else if (event.key === "ArrowRight" && open === "false") this.open(row);
    else if (event.key === "ArrowRight" && open === "true") this.focus(row.nextElementSibling);
    else if (event.key === "ArrowLeft" && open === "true") this.close(row);
    else if (event.key === "ArrowLeft" && above) this.focus(above);
    else if (event.key === "Enter" || event.key === " ") this.toggle(row);
    else return;
    event.preventDefault();
  }
}
