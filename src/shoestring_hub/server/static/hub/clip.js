"use strict";
// While a clip is being converted: how far it is; the page is loaded again when that is over.
{
  const PERIOD = 2000; // milliseconds between two questions
  const place = document.getElementById("clip"), progress = document.getElementById("clip-progress");
  const ask = async () => {
    if (document.hidden) return;
    let answer;
    try {
      answer = await fetch(place.dataset.source, { redirect: "error" });
    } catch {
      return; // the hub does not answer now; the next question may be answered
    }
    if (answer.status !== 200) { location.reload(); return; }
    const { state, progress: done, tries } = await answer.json();
    if (state !== place.dataset.state && (state === "done" || state === "failed")) { location.reload(); return; }
    place.dataset.state = state;
    progress.value = done;
    const words = state === "held" ? `being converted: ${Math.round(100 * done)}%` : "waiting to be converted";
    document.getElementById("clip-state").textContent = tries > 1 ? `${words}, attempt ${tries}` : words;
  };
  if (progress) {
    setInterval(ask, PERIOD);
    document.addEventListener("visibilitychange", ask);
  }
}
