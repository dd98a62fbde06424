"use strict";
// What the scripts of all pages share: numbers as text, elements, colours of the style, and the switch of the theme.

// Numbers as figures.py prints them, whose conventions they follow; one table tests both.

function scaled(value, base, suffixes) {
  let power = 0;
  while (Math.abs(value) >= base - 0.5 && power < suffixes.length - 1) { value /= base; power += 1; }
  const digits = Math.abs(value) < 999.5 ? Number(value.toPrecision(3)) : Math.round(value);
  return digits.toLocaleString("en") + suffixes[power];
}

const count = (value) => scaled(value, 1000, ["", "k", "M", "B", "T"]);
const memory = (bytes) => scaled(bytes, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]);
const size = (bytes) => scaled(bytes, 1000, [" B", " kB", " MB", " GB", " TB", " PB"]);
const percent = (share) => `${Number((100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0))}%`;

function seconds(value) {
  const [unit, scale] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, least]) => Math.abs(value) >= 0.9995 * least) ?? ["ns", 1e-9];
  return value === 0 ? "0 s" : scaled(value / scale, Infinity, [` ${unit}`]);
}

function duration(value) { // a clock
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function plain(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children); // strings become text nodes
  return element;
}

const probe = html("span", { hidden: "" });
document.body.append(probe);
function colour(name) {
  probe.className = name;
  return getComputedStyle(probe).color;
}
function button(text, label, action, attributes = {}) {
  const made = html("button", { type: "button", "aria-label": label, title: label, ...attributes }, text);
  made.addEventListener("click", action);
  return made;
}

function theme() {
  const choice = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { choice.textContent = dark() ? "Light" : "Dark"; choice.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`); };
  choice.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); redraw(); });
  choice.hidden = false;
  name();
}
