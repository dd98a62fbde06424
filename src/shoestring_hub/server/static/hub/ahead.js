"use strict";
// Pages open fast: starts the worker, and tells it what the pointer is about to open. After signing out, empties what
// the browser has stored. A page that comes out of a store of the browser stays hidden until the hub has allowed it.
{
  const REST = 50; // milliseconds after which a pointer that rests on a link is about to open it
  const root = document.documentElement, options = document.currentScript.dataset;
  let left = Number(options.bytes), resting;

  // -- shown only if the hub allows it --
  const check = async () => {
    if (document.prerendering) { // the answer must not be older than the click
      document.addEventListener("prerenderingchange", check, { once: true });
      return;
    }
    let status = 0;
    try {
      status = (await fetch(location.href, { method: "HEAD", redirect: "manual", cache: "no-store" })).status;
    } catch {
      // Reloading shows what is wrong
    }
    if (status !== 200) { location.reload(); return; }
    const title = document.querySelector("title");
    document.title = title.dataset.shown ?? document.title;
    delete root.dataset.unchecked;
  };
  const [opened] = performance.getEntriesByType("navigation");
  if (opened?.deliveryType === "navigational-prefetch") root.dataset.unchecked = "";
  if (root.dataset.unchecked !== undefined) check();
  if (options.person !== undefined) {
    addEventListener("pagehide", () => { root.dataset.unchecked = ""; });
    addEventListener("pageshow", (event) => { if (event.persisted) check(); });
  }

  // -- after signing out --
  const forget = async () => {
    sessionStorage.clear();
    for (const worker of (await navigator.serviceWorker?.getRegistrations()) ?? []) await worker.unregister();
    for (const name of (await globalThis.caches?.keys()) ?? []) await caches.delete(name);
  };
  if (options.person === undefined || !options.worker) forget();
  else navigator.serviceWorker?.register(options.worker);

  // -- fetched ahead --
  const tell = (link, pressed) => {
    const address = link.href.replace(/#.*/, ""), here = location.href.replace(/#.*/, "");
    const limit = Math.min(left, Number(options.link));
    // What a pointer at rest has asked for may arrive before the click, and is then too old to be shown
    if (limit <= 0 || address === here || (awaited.has(address) && !pressed) || navigator.connection?.saveData) return;
    left -= limit; // until the worker says how many bytes it took
    navigator.serviceWorker.controller.postMessage({ address, limit });
    awaited.add(address);
  };
  const awaited = new Set();
  const linkOf = (event) => {
    const link = event.target.closest?.("a[href]");
    return link?.origin === location.origin && !link.target && !link.hasAttribute("download") ? link : null;
  };
  const rest = (event) => {
    clearTimeout(resting);
    const link = linkOf(event);
    if (link) resting = setTimeout(tell, REST, link, false);
  };
  if (options.ahead !== undefined && navigator.serviceWorker?.controller) {
    navigator.serviceWorker.addEventListener("message", ({ data: { address, limit, bytes } }) => {
      left += limit - bytes;
      awaited.delete(address);
    });
    addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") rest(event); });
    addEventListener("focusin", rest);
    addEventListener("pointerdown", (event) => {
      clearTimeout(resting);
      const link = linkOf(event);
      if (link && event.button === 0) tell(link, true);
    });
  }
}
