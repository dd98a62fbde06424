// What the timeline holds at the moment under the pointer; the arrow keys move it.
theme();
const timelines = JSON.parse(document.getElementById("data").textContent);

function bytes(value) {
  const suffixes = [" B", " kB", " MB", " GB", " TB"];
  let power = 0;
  while (value >= 999.5 && power < suffixes.length - 1) { value /= 1000; power += 1; }
  return Number(value.toPrecision(3)) + suffixes[power];
}

function follow(figure, timeline) {
  const chart = figure.querySelector(".stack"), said = figure.querySelector(".moment");
  let at = 0;
  function show(place) {
    at = Math.min(Math.max(place, 0), timeline.seconds.length - 1);
    const held = Object.entries(timeline.kinds).map(([kind, values]) => [kind, values[at]]).filter(([, value]) => value);
    const total = held.reduce((sum, [, value]) => sum + value, 0);
    const parts = held.sort((a, b) => b[1] - a[1]).map(([kind, value]) => `${kind} ${bytes(value)}`);
    said.textContent = `${timeline.seconds[at].toFixed(4)} s: ${bytes(total)} (${parts.join(", ")})`;
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), seconds = timeline.seconds;
    const wanted = ((event.clientX - box.left) / box.width) * seconds[seconds.length - 1];
    const found = seconds.findIndex((each) => each >= wanted);
    show(found < 0 ? seconds.length - 1 : found);
  });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { show(at + step); event.preventDefault(); }
  });
}

document.querySelectorAll(".memory").forEach((figure, index) => follow(figure, timelines[index]));
