// What the timeline holds at the moment under the pointer; the arrow keys move it.
theme();
const timelines = JSON.parse(document.getElementById("data").textContent);

function follow(figure, timeline) {
  const chart = figure.querySelector(".stack"), said = figure.querySelector(".moment");
  let at = 0;
  function show(place) {
    at = Math.min(Math.max(place, 0), timeline.seconds.length - 1);
    const held = Object.entries(timeline.kinds).map(([kind, values]) => [kind, values[at]]).filter(([, value]) => value);
    const total = held.reduce((sum, [, value]) => sum + value, 0);
    const parts = held.sort((a, b) => b[1] - a[1]).map(([kind, value]) => `${kind} ${memory(value)}`);
    said.textContent = `${seconds(timeline.seconds[at])}: ${memory(total)} (${parts.join(", ")})`;
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), times = timeline.seconds;
    const wanted = ((event.clientX - box.left) / box.width) * times[times.length - 1];
    const found = times.findIndex((each) => each >= wanted);
    show(found < 0 ? times.length - 1 : found);
  });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { show(at + step); event.preventDefault(); }
  });
}

document.querySelectorAll(".memory").forEach((figure, index) => follow(figure, timelines[index]));
