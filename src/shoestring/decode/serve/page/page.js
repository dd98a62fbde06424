"use strict";
/* A page to try the model: chat where it has a chat template, and continuing a text where it has none. */

const $ = (id) => document.getElementById(id);
const talk = []; // the messages of a chat
let model = null, running = null, written = null; // the text that "Continue" continues
let key = sessionStorage.getItem("key") || "";

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function connect() {
  let answer;
  try {
    answer = await fetch("/v1/models", { headers: headers() });
  } catch (error) {
    $("name").textContent = "The server does not answer";
    return;
  }
  if (answer.status === 401) {
    $("name").textContent = "shoestring";
    $("denied").textContent = key ? "This key is not valid." : "";
    $("access").hidden = false;
    $("key").focus();
    return;
  }
  model = (await answer.json()).data[0];
  sessionStorage.setItem("key", key);
  $("access").hidden = true;
  document.title = `${model.id} – shoestring`;
  $("name").textContent = model.id;
  const kind = model.chat ? "Chat" : "No chat template: it continues your text";
  $("about").textContent = `${kind} · context of ${model.context} tokens${model.drafts ? " · drafts ahead" : ""}`;
  $("asks").textContent = model.chat ? "Message" : "Text to continue";
  $("prompt").placeholder = model.chat ? "Message" : "Text to continue";
  $("send").textContent = model.chat ? "Send" : "Generate";
  $("max_tokens").max = model.max_tokens;
  $("max_tokens").value = Math.min(256, model.max_tokens);
  $("system-row").hidden = !model.chat;
  $("drafts-row").hidden = !model.drafts;
  document.querySelector("footer").hidden = false;
  $("prompt").focus();
}

/* An article of the log, and the element that holds its text. */
function article(kind, title) {
  const whole = document.createElement("article"), text = document.createElement("div");
  whole.className = kind;
  if (title) whole.append(Object.assign(document.createElement("h2"), { textContent: title }));
  text.className = "text";
  whole.append(text);
  $("log").append(whole);
  follow(true);
  return text;
}

/* Keep the end in view, unless the reader has scrolled up. */
function follow(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function put(target, name, kind, text) {
  const last = target.lastChild;
  if (last && last.nodeName === name.toUpperCase() && last.className === kind) last.append(text);
  else target.append(Object.assign(document.createElement(name), { className: kind, textContent: text }));
}

/* The text of one pass: what was drafted and accepted, then the model's own token, then what it rejected. */
function show(target, text, draft) {
  if (!draft || !$("drafts").checked) return put(target, "span", "", text);
  $("legend").hidden = false;
  const characters = [...text]; // as the server counts them
  const accepted = characters.slice(0, draft.characters).join(""), own = characters.slice(draft.characters).join("");
  const rejected = draft.tokens.slice(draft.accepted).join("");
  if (accepted) put(target, "span", "accepted", accepted);
  if (rejected) put(target, "del", "", rejected);
  if (own) put(target, "span", "", own);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reader.read()).done; ) {
    const blocks = (held + part.value).split("\n\n");
    held = blocks.pop();
    for (const block of blocks) if (block !== "data: [DONE]") yield JSON.parse(block.slice(6));
  }
}

const numbers = { temperature: Number, top_p: Number, max_tokens: Number, seed: Number };

function settings() {
  const chosen = { stream: true, stream_options: { include_usage: true }, draft_tokens: model.drafts };
  for (const [id, read] of Object.entries(numbers)) if ($(id).value !== "") chosen[id] = read($(id).value);
  return chosen;
}

/* Ask for text and show it in `target` as it comes; returns the text. */
async function generate(path, asked, target) {
  const began = performance.now();
  let first = 0, text = "", tokens = 0, reason = "", passes = 0, drafted = 0, accepted = 0;
  running = new AbortController();
  busy(true);
  $("numbers").textContent = "";
  const state = () => {
    const seconds = (performance.now() - first) / 1000, parts = [`${tokens} tokens`];
    if (tokens > 1 && passes > 1) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
    if (drafted) parts.push(`${accepted} of ${drafted} drafted tokens accepted`);
    return [...parts, ...(reason ? [reason] : [])].join(" · ");
  };
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify({ ...asked, ...settings() }),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      first = first || performance.now();
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        const piece = choice.delta ? choice.delta.content || "" : choice.text;
        passes += 1;
        tokens += 1 + (choice.draft ? choice.draft.accepted : 0);
        drafted += choice.draft ? choice.draft.tokens.length : 0;
        accepted += choice.draft ? choice.draft.accepted : 0;
        text += piece;
        show(target, piece, choice.draft);
        if (choice.finish_reason === "length") reason = "cut off at the number of tokens";
      }
      if (!event.usage) $("numbers").textContent = state();
      follow();
    }
    $("numbers").textContent = state();
  } catch (error) {
    if (error.name === "AbortError") $("numbers").textContent = "Stopped.";
    else article("failed", "").textContent = error.message;
  } finally {
    running = null;
    busy(false);
  }
  return text;
}

function busy(now) {
  $("stop").hidden = !now;
  $("send").hidden = now;
  $("more").hidden = now || model.chat || !written;
  $("clear").hidden = now || !$("log").childElementCount;
  $("log").setAttribute("aria-busy", now);
  if (!now) $("prompt").focus();
}

async function chat(content) {
  talk.push({ role: "user", content });
  article("user", "You").textContent = content;
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...talk];
  const target = article("assistant", model.id), text = await generate("/v1/chat/completions", { messages }, target);
  if (text) talk.push({ role: "assistant", content: text });
  else {
    talk.pop(); // nothing was answered: the message can be sent again
    if (!target.textContent) target.parentElement.remove();
    $("prompt").value = $("prompt").value || content;
  }
}

async function complete(prompt) {
  written = { text: prompt, target: article("completion", "") };
  put(written.target, "span", "prompt", prompt);
  await more();
}

async function more() {
  const current = written;
  current.text += await generate("/v1/completions", { prompt: current.text }, current.target);
}

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  connect();
});
$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  (model.chat ? chat : complete)(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("compose").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running && running.abort());
$("more").addEventListener("click", more);
$("clear").addEventListener("click", () => {
  talk.length = 0;
  written = null;
  for (const id of ["log", "numbers"]) $(id).replaceChildren();
  $("legend").hidden = true;
  busy(false);
});
connect();
