"use strict";
// Sends a clip in chunks that are named by their digests. The hub says which it lacks, so what was cut off continues:
// by itself while the page is open, and otherwise when the same file is chosen again.
{
  const NAPS = [300, 1000, 3000, 10000]; // milliseconds between attempts; the last one is repeated
  const form = document.getElementById("upload");
  const told = document.getElementById("clip-told"), bar = document.getElementById("clip-sent");

  const hex = (buffer) => Array.from(new Uint8Array(buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const nap = (time) => new Promise((done) => { setTimeout(done, time); });

  // The hub's answer, after as many attempts as it takes; an error if the hub refuses
  async function ask(method, address, body) {
    const headers = { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
    for (let attempt = 0; ; attempt += 1) {
      let answer;
      try {
        answer = await fetch(address, { method, body, headers, redirect: "manual" });
      } catch {
        answer = undefined; // the hub cannot be reached
      }
      if (answer?.type === "opaqueredirect") throw new Error("You are signed out. Sign in, and choose the same file again: what was sent is kept.");
      if (answer && answer.status < 500) return answer;
      if (answer?.status === 507) throw new Error("The hub's disk is full. Choose the same file again later: what was sent is kept.");
      told.textContent = "The hub does not answer; trying again.";
      await nap(NAPS[Math.min(attempt, NAPS.length - 1)]);
    }
  }

  async function refused(answer) {
    try {
      return new Error(`The hub refuses: ${(await answer.json()).error}`);
    } catch {
      return new Error(`The hub refuses: ${answer.status}`);
    }
  }

  async function send(file, name, run) {
    const { address, chunks, chunk, most } = form.dataset, step = Number(chunk), digests = [];
    if (!file.size || file.size > Number(most)) throw new Error(file.size ? "The file is too large." : "The file is empty.");
    const part = (index) => file.slice(index * step, (index + 1) * step).arrayBuffer();
    const count = Math.ceil(file.size / step);
    for (let index = 0; index < count; index += 1) {
      told.textContent = "Reading the file";
      digests.push(hex(await crypto.subtle.digest("SHA-256", await part(index))));
      bar.value = (index + 1) / count / 10; // reading is quick beside sending
    }
    const clip = JSON.stringify({ name, size: file.size, chunks: digests, run });
    for (;;) {
      const answer = await ask("POST", address, clip);
      const facts = answer.ok || answer.status === 409 ? await answer.json() : {};
      if (answer.ok) return facts.page;
      if (!facts.missing) throw await refused(answer);
      const missing = new Set(facts.missing);
      for (const [index, digest] of digests.entries()) {
        if (missing.delete(digest)) {
          const taken = await ask("PUT", chunks + digest, await part(index));
          if (!taken.ok) throw await refused(taken);
        }
        bar.value = 0.1 + 0.9 * (index + 1) / count;
        told.textContent = `Sent ${Math.round(100 * (index + 1) / count)}%`;
      }
    }
  }

  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [file] = document.getElementById("clip-file").files, button = form.querySelector("button");
    button.disabled = true;
    bar.hidden = false;
    bar.value = 0;
    told.className = "quiet";
    try {
      const page = await send(file, document.getElementById("clip-name").value.trim() || file.name, Number(form.dataset.run));
      location.assign(page);
    } catch (error) {
      told.className = "bad";
      told.textContent = error.message;
      button.disabled = false;
      bar.hidden = true;
    }
  });
}
