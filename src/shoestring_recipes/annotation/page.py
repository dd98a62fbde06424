"""The page on which people label by keyboard: its HTML, style and script. Texts are shown as text, never as HTML."""

HTML = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Labels</title>
<link rel="stylesheet" href="/page.css">
<header>
  <h1 id="question">Labels</h1>
  <p id="progress" role="status"></p>
</header>
<main>
  <article id="item" hidden>
    <h2 id="title"></h2>
    <p id="url"></p>
    <div id="text" tabindex="0" aria-label="Text"></div>
  </article>
  <p id="message" role="alert"></p>
</main>
<footer>
  <div id="choices"></div>
  <p class="keys"><button id="skip" type="button"><kbd>S</kbd> skip</button>
  <button id="undo" type="button"><kbd>Backspace</kbd> undo</button></p>
</footer>
<script src="/page.js"></script>
</html>
"""

CSS = """:root { color-scheme: light dark; --line: #8886; --accent: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --accent: #a8c7fa; } }
* { box-sizing: border-box; }
html, body { height: 100%; margin: 0; }
body { display: flex; flex-direction: column; font: 17px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
header, main, footer { width: 100%; max-width: 50rem; margin: 0 auto; padding: 0.6rem 1rem; }
header { border-bottom: 1px solid var(--line); }
h1 { font-size: 1.15rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 0; }
#progress, #url, .keys { font-size: 0.85rem; margin: 0.2rem 0; }
main { flex: 1; min-height: 6rem; overflow: auto; }
#text { white-space: pre-line; margin-top: 0.5rem; }
#message:empty { display: none; }
footer { border-top: 1px solid var(--line); }
#choices { display: flex; flex-wrap: wrap; gap: 0.5rem; max-height: 40vh; overflow: auto; }
button { font: inherit; padding: 0.4rem 0.8rem; border: 1px solid var(--line); border-radius: 0.4rem; cursor: pointer; }
#choices button { min-height: 2.75rem; text-align: start; }
button:focus-visible, #text:focus-visible { outline: 3px solid var(--accent); outline-offset: 1px; }
kbd { font: 0.85em ui-monospace, monospace; border: 1px solid var(--line); border-radius: 0.25rem; padding: 0 0.3rem; }
"""

JS = """"use strict";
const KEYS = "1234567890qwertyuioadfghjklzxcvbnm";  // s skips, Backspace undoes
const part = (name) => document.getElementById(name);
const token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
if (token) sessionStorage.setItem("token", token);
history.replaceState(null, "", "/");  // the token does not stay in the address
let task = null, shown = 0, busy = false;

async function ask(path, body) {
  const headers = { Authorization: `Bearer ${token}` };
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

async function act(path, body) {
  if (busy) return;
  busy = true;
  try {
    if (path) await ask(path, body);
    show(await ask("/next"));
    part("message").textContent = task ? "" : "Nothing is left to label. Thank you.";
  } catch (error) {
    part("message").textContent = error.message;
  }
  busy = false;
  document.documentElement.dataset.ready = "yes";
}

function show(state) {
  task = state.task;
  shown = performance.now();
  part("question").textContent = state.question;
  part("progress").textContent = `${state.rater}: ${state.done} of ${state.all}`;
  part("item").hidden = !task;
  for (const name of ["title", "url", "text"]) part(name).textContent = task ? state[name] : "";
  document.querySelector("main").scrollTop = 0;
  part("choices").replaceChildren(...state.choices.map((choice, number) => {
    const button = document.createElement("button"), key = document.createElement("kbd");
    key.textContent = (KEYS[number] || "").toUpperCase();
    button.type = "button";
    button.disabled = !task;
    button.append(...(KEYS[number] ? [key, " "] : []), choice);
    button.addEventListener("click", () => answer(number));
    return button;
  }));
}

function answer(choice) {
  if (task) act("/label", { task, choice, seconds: (performance.now() - shown) / 1000 });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  const key = event.key.toLowerCase(), number = KEYS.indexOf(key);
  if (key === "s") answer(null);
  else if (key === "backspace") act("/undo", {});
  else if (key.length === 1 && number >= 0 && number < part("choices").children.length) answer(number);
  else return;
  event.preventDefault();
});
part("skip").addEventListener("click", () => answer(null));
part("undo").addEventListener("click", () => act("/undo", {}));
act();
"""
