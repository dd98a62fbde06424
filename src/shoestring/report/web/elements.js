"use strict";
// What the scripts of all pages share: numbers as text, elements, colours of the style, and the switch of the theme.

function count(value) {
  const suffixes = ["", "k", "M", "B", "T"];
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < suffixes.length - 1) { value /= 1000; power += 1; }
  return Number(value.toPrecision(3)) + suffixes[power];
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
