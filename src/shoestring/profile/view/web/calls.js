// The profile as it came: the columns of its call tree, and the boxes that views make of them.
// A frame is a label: nodes with one kind, name and line are one frame, wherever they are called.

const data = JSON.parse(document.getElementById("data").textContent);
const [ROOT, PYTHON, OPERATOR, BACKWARD, SPAN, LINK, OVERFLOWN, KERNEL, NATIVE] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const KINDS = ["", "python", "operator", "backward", "span", "backward", "lost", "kernel", "native"]; // classes of the style
const KIND_NAMES = ["all", "Python line", "operator", "function of the backward pass", "named span", "backward pass of an operator", "call paths without room", "accelerator kernel", "native function"];
const ENGINE = "autograd::engine::evaluate_function: "; // before the name of a backward function, where torch runs all of it
let calls = null; // columns by name; `own` has one column for each rank, or before and after
let frames = null; // of each frame: kind, name, line, and whether it is shown when packages are hidden

async function unpack() {
  const text = atob(data.packed), bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k += 1) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { u1: Uint8Array, i4: Int32Array, f8: Float64Array };
  calls = { own: [] };
  for (const { name, type, start } of data.columns) {
    const column = new types[type](buffer, start, data.nodes);
    if (name === "own") calls.own.push(column); else calls[name] = column;
  }
  for (let node = 1; node < data.nodes; node += 1) calls.parent[node] = node - calls.parent[node]; // kept as distances
  calls.parent[0] = -1;
  name();
}

function name() {
  const known = new Map();
  frames = { of: new Int32Array(data.nodes), kind: [], name: [], line: [], own: [], count: 0 };
  for (let node = 0; node < data.nodes; node += 1) {
    const kind = calls.kind[node], link = calls.link[node];
    const key = kind === LINK && link >= 0 ? `${frames.of[link]} ${LINK}` : (calls.name[node] * 2 ** 24 + calls.line[node]) * 8 + kind;
    let frame = known.get(key);
    if (frame === undefined) {
      frame = frames.count;
      frames.count += 1;
      known.set(key, frame);
      frames.kind.push(kind === OPERATOR && data.names[calls.name[node]].startsWith(ENGINE) ? BACKWARD : kind);
      frames.name.push(kind === LINK && link >= 0 ? calls.name[link] : calls.name[node]);
      frames.line.push(calls.line[node]);
      frames.own.push(kind !== PYTHON || data.own[calls.name[node]]);
    }
    frames.of[node] = frame;
  }
}

function placeOf(frame) {
  if (frames.kind[frame] !== PYTHON) return null;
  const [file] = data.names[frames.name[frame]].split("\t"), line = frames.line[frame];
  return { file, line: Math.abs(line), gone: line < 0 };
}

const shortFile = (file) => file.split("/").pop();
const where = (place) => `${shortFile(place.file)}:${place.line}${place.gone ? " (was)" : ""}`;
function label(frame) {
  const text = data.names[frames.name[frame]], kind = frames.kind[frame];
  if (kind === ROOT) return "all";
  if (kind === PYTHON) return `${text.split("\t")[1] ?? ""} ${where(placeOf(frame))}`;
  if (kind === NATIVE) return `${text.split("\t")[1]} (${shortFile(text.split("\t")[0])})`;
  if (kind === LINK) return text ? `backward of ${text.split("\t").pop()}` : "backward";
  return text.replace(ENGINE, "") || KIND_NAMES[kind];
}

const written = new Map(); // lines of files
function codeOf(place) {
  if (!place || place.gone || data.sources[place.file] === undefined) return "";
  if (!written.has(place.file)) written.set(place.file, data.sources[place.file].split("\n"));
  return (written.get(place.file)[place.line - 1] ?? "").trim();
}

// ---- views -----------------------------------------------------------------------------------------------------

// Whose children nodes are: with `joined`, the backward pass of an operator is where the operator is called
function parents(joined) {
  if (!joined) return calls.parent;
  return calls.parent.map((parent, node) => (calls.kind[node] === LINK && calls.link[node] >= 0 ? calls.parent[calls.link[node]] : parent));
}

function totals(own, parent) {
  const inclusive = Float64Array.from(own);
  for (let node = data.nodes - 1; node > 0; node -= 1) inclusive[parent[node]] += inclusive[node];
  return inclusive;
}

// A view of the calls: how boxes find the boxes within them, and how long each takes. `column` and `other` are
// columns of own times; the other one is compared with where there is one.
class View {
  constructor({ shape, packages, column, other = null }) {
    Object.assign(this, { shape, packages, column, other });
    this.parent = parents(shape === "joined");
    this.up = shape === "bottom-up";
    if (!this.up) {
      this.times = totals(column, this.parent);
      this.others = other && totals(other, this.parent);
      this.firstChild = new Int32Array(data.nodes).fill(-1);
      this.nextChild = new Int32Array(data.nodes).fill(-1);
      for (let node = data.nodes - 1; node > 0; node -= 1) {
        this.nextChild[node] = this.firstChild[this.parent[node]];
        this.firstChild[this.parent[node]] = node;
      }
    } else Object.assign(this, { times: column, others: other });
    const all = this.up ? Array.from({ length: data.nodes }, (_, node) => node).filter((node) => column[node] || other?.[node]) : [0];
    this.root = new Box(this, null, 0, all, this.up ? all : null);
  }

  hidden(node) {
    return node > 0 && !this.packages && !frames.own[frames.of[node]];
  }

  // The boxes within one. Top-down those are the calls; bottom-up the callers, and below the root whoever took time
  within(box) {
    const groups = new Map();
    const add = (node, leaf) => {
      const frame = frames.of[node];
      let group = groups.get(frame);
      if (!group) groups.set(frame, (group = { at: [], leaves: [] }));
      group.at.push(node);
      if (leaf >= 0) group.leaves.push(leaf);
    };
    if (this.up) {
      box.at.forEach((node, k) => {
        let caller = box.parent ? this.parent[node] : node;
        while (caller > 0 && this.hidden(caller)) caller = this.parent[caller];
        if (caller > 0 || !box.parent) add(Math.max(caller, 0), box.leaves[k]);
      });
    } else {
      const open = [...box.at];
      while (open.length) {
        for (let node = this.firstChild[open.pop()]; node >= 0; node = this.nextChild[node]) {
          if (this.hidden(node)) open.push(node); else add(node, -1);
        }
      }
    }
    const boxes = [...groups].map(([frame, { at, leaves }]) => new Box(this, box, frame, at, this.up ? leaves : null));
    return boxes.filter((one) => one.time > 0 || one.other > 0).sort((a, b) => b.time - a.time || b.other - a.other);
  }
}

class Box {
  constructor(view, parent, frame, at, leaves) {
    Object.assign(this, { view, parent, frame, at, leaves, depth: parent ? parent.depth + 1 : 0 });
    const sum = (column) => (leaves ?? at).reduce((total, node) => total + column[node], 0);
    this.time = sum(view.times);
    this.other = view.others ? sum(view.others) : 0;
  }

  get boxes() {
    this.inside ??= this.view.within(this);
    return this.inside;
  }

  get label() {
    return this.parent ? label(this.frame) : "all";
  }

  // Time that is in none of the boxes within: of a call its own, with that of hidden packages
  get own() {
    return this.view.up ? (this.depth === 1 ? this.time : 0) : this.time - this.boxes.reduce((sum, box) => sum + box.time, 0);
  }

  sum(column) {
    return this.at.reduce((total, node) => total + column[node], 0);
  }

  get path() {
    return this.parent ? [...this.parent.path, this.frame] : [];
  }

  // The box that is called like this one in another view of the same shape, or the nearest one around it
  in(view) {
    return this.path.reduce((box, frame) => box.boxes.find((one) => one.frame === frame) ?? box, view.root);
  }
}

// Of each frame whether its label or its file has the text, or fits /an expression/; null where there is nothing to seek
function matching(text) {
  if (!text) return null;
  const pattern = /^\/(.+)\/$/.exec(text);
  const small = text.toLowerCase();
  let fits = (name) => name.toLowerCase().includes(small);
  try {
    if (pattern) { const expression = new RegExp(pattern[1], "i"); fits = (name) => expression.test(name); }
  } catch { /* it is not complete yet, and is sought as it stands */ }
  frames.sought ??= frames.name.map((_, frame) => `${label(frame)} ${placeOf(frame)?.file ?? ""}`);
  return Uint8Array.from(frames.sought, fits);
}

// The time within frames that match, each call counted once however many calls around it match
function timeOf(found, view) {
  const inside = new Uint8Array(data.nodes);
  let time = 0;
  for (let node = 0; node < data.nodes; node += 1) {
    inside[node] = found[frames.of[node]] || (node > 0 && inside[view.parent[node]]);
    if (inside[node]) time += view.column[node];
  }
  return time;
}
