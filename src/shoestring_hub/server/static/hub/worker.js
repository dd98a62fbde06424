// Opens pages of the hub from the texts of their templates and from what has changed in their data.
// The hub is asked each time a page is opened: what is stored here is shown only if the hub answers that this person
// may see it and that it is current. Without an answer nothing is shown.
// HUB, which stands before this script: the version, regular expressions of pages, scripts that pages will need, and
// whether to ask for differences.

const STORE = `pages ${HUB.version}`;
const PAGES = HUB.pages.map((pattern) => new RegExp(pattern));
const MOST_PAGES = 40;
const MOST_BYTES = 2e6; // of a page that is stored
const MOST_LINES = 900; // whose checksums fit into a header
const SHORTEST = 24; // characters of a line whose checksum is sent, as in parts.py
const HEADERS = 1500; // bytes that an answer has besides its body, at most
const NOTHING = { etag: "", lines: [] };
const onTheirWay = new Map(); // pages that are being fetched ahead, by their addresses
let texts, staying = new AbortController();

addEventListener("install", (event) => event.waitUntil(Promise.all([textsOf(), skipWaiting(), ...HUB.files.map((file) => fetch(file))])));
addEventListener("activate", (event) => event.waitUntil(forget((name) => name !== STORE)));

addEventListener("fetch", (event) => {
  const { request } = event, url = new URL(request.url);
  if (request.method === "POST" && url.pathname === "/sign-out") leave();
  // A browser that fetches ahead by itself must get a page that asks the hub before it shows itself
  if (request.mode !== "navigate" || request.method !== "GET" || request.destination !== "document" || request.headers.get("Sec-Purpose")) return;
  if (isPage(url)) event.respondWith(open(url.pathname + url.search, event));
});

addEventListener("message", (event) => {
  const url = new URL(event.data.address), tell = (bytes) => event.source?.postMessage({ ...event.data, bytes });
  const page = url.origin === origin && isPage(url) ? url.pathname + url.search : "";
  if (page) event.waitUntil(fetchAhead(page, event).then(tell));
  else tell(0);
});

const isPage = (url) => PAGES.some((page) => page.test(url.pathname.slice(1)));

async function textsOf() {
  texts ??= fetch(`/texts.json?${HUB.version}`).then((answer) => {
    if (!answer.ok) throw new Error(`texts: ${answer.status}`);
    return answer.json();
  });
  return texts.catch((error) => { texts = undefined; throw error; });
}

async function open(address, event) {
  // A page whose answer had not arrived when it was opened is as recent as one that is asked for now
  const early = await onTheirWay.get(address)?.catch(() => undefined);
  const answer = early?.lines ? early : await ask(address, event);
  return answer.lines ? whole(answer) : answer.response;
}

// The bytes that it took
async function fetchAhead(address, event) {
  const asked = ask(address, event, event.data.limit);
  onTheirWay.set(address, asked);
  try {
    return (await asked).bytes;
  } catch {
    return HEADERS; // the hub does not answer, which shows when the page is opened
  } finally {
    if (onTheirWay.get(address) === asked) onTheirWay.delete(address); // unless it was asked for again
  }
}

// What the hub answers: the lines of a page, or a response of another kind
async function ask(address, event, limit, before) {
  before ??= await stored(address);
  const have = HUB.differences ? before.lines.filter((line) => line.length >= SHORTEST).slice(0, MOST_LINES) : [];
  const headers = { "Hub-Parts": HUB.version }, { signal } = staying;
  if (before.etag) headers["If-None-Match"] = before.etag;
  if (have.length) headers["Hub-Have"] = have.map(checksum).join("");
  if (limit !== undefined) headers["Hub-Ahead"] = String(limit);
  const response = await fetch(address, { headers, redirect: "manual", cache: "no-store", signal });
  if (response.status === 304) return { response, lines: before.lines, bytes: HEADERS };
  if (response.headers.get("Content-Type") !== "application/x-hub-page") {
    await refused(address, response);
    return { response, bytes: HEADERS };
  }
  const body = await response.text(), lines = [];
  for (const line of body.split("\n")) {
    const [first, count] = line.startsWith("=") ? line.slice(1).split(",").map(Number) : [];
    if (count) lines.push(...have.slice(first, first + count));
    else lines.push(line);
  }
  const etag = response.headers.get("ETag");
  if (have.length && (await etagOf(lines)) !== etag) return ask(address, event, limit, NOTHING);
  if (HUB.differences || limit !== undefined) event.waitUntil(store(address, etag, lines, signal));
  return { response, lines, bytes: HEADERS + body.length };
}

async function whole({ response, lines }) {
  const known = await textsOf(), token = response.headers.get("Hub-Form-Token"), parts = [];
  for (const line of lines) {
    for (const item of JSON.parse(line)) parts.push(typeof item === "string" ? item : item < 0 ? token : known[item]);
  }
  const headers = new Headers(response.headers);
  for (const name of ["ETag", "Hub-Form-Token", "Content-Length"]) headers.delete(name);
  headers.set("Content-Type", "text/html; charset=utf-8");
  return new Response(parts.join(""), { headers });
}

// -- what is stored ---------------------------------------------------------------------------------------------------

async function stored(address) {
  const page = await (await caches.open(STORE)).match(address);
  return page ? { etag: page.headers.get("ETag"), lines: (await page.text()).split("\n") } : NOTHING;
}

async function store(address, etag, lines, signal) {
  const body = lines.join("\n"), pages = await caches.open(STORE);
  if (body.length > MOST_BYTES || signal.aborted) return;
  await pages.put(address, new Response(body, { headers: { ETag: etag } }));
  const all = await pages.keys();
  await Promise.all(all.slice(0, Math.max(0, all.length - MOST_PAGES)).map((page) => pages.delete(page)));
}

// A redirection means that the person is signed out, or that the page is gone; a refusal, that the person has lost a role
async function refused(address, response) {
  if (response.type === "opaqueredirect") await forget(() => true);
  if (response.status !== 403 && response.status !== 404) return;
  const pages = await caches.open(STORE), project = (path) => path.split("/")[1];
  for (const page of await pages.keys()) {
    if (project(new URL(page.url).pathname) === project(address)) await pages.delete(page);
  }
}

// What is on its way when a person signs out must not be stored after the browser has removed the rest
function leave() {
  staying.abort();
  staying = new AbortController();
}

async function forget(which) {
  await Promise.all((await caches.keys()).filter(which).map((name) => caches.delete(name)));
}

// -- digests ----------------------------------------------------------------------------------------------------------

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit += 1) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

function checksum(line) { // CRC-32 of a line, which is ASCII
  let sum = 0xffffffff;
  for (let at = 0; at < line.length; at += 1) sum = TABLE[(sum ^ line.charCodeAt(at)) & 255] ^ (sum >>> 8);
  return ((sum ^ 0xffffffff) >>> 0).toString(16).padStart(8, "0");
}

async function etagOf(lines) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(lines.join("\n"))));
  const text = btoa(String.fromCharCode(...digest)).replaceAll("+", "-").replaceAll("/", "_");
  return `"${text.slice(0, 22)}"`;
}
