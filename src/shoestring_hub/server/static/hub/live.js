"use strict";
// While the page is seen: what the runs have logged since it was read, added to its curves.

const PERIOD = 5000; // milliseconds between two questions
const live = document.getElementById("live");
let state = live.dataset.state;

// Where a step of the news stands among the steps of the page, which gain it if it is later than all of them
function placeOf(run, news, at) {
  const step = news.step[at], last = run.step.at(-1) ?? -Infinity;
  if (step > last) {
    run.step.push(step);
    run.seconds.push(news.seconds[at]);
    run.tokens.push(news.tokens[at]);
    return run.step.length - 1;
  }
  return run.step.lastIndexOf(step);
}

// False if there is a curve that the page does not have
function merge(news) {
  const parts = [...news.large, ...news.small];
  for (const chart of parts) {
    const mine = [...data.large, ...data.small].find((one) => one.key === chart.key);
    for (const line of chart.lines) {
      if (!mine?.lines.some((one) => sameLine(one, line))) return false;
    }
  }
  // Steps first, in their order: each chart has only some of them
  news.runs.forEach((run, index) => run.step.forEach((_, at) => placeOf(data.runs[index], run, at)));
  for (const chart of parts) {
    const mine = [...data.large, ...data.small].find((one) => one.key === chart.key);
    for (const line of chart.lines) extend(mine.lines.find((one) => sameLine(one, line)), line, data.runs[line.run], news.runs[line.run]);
  }
  return true;
}

const sameLine = (a, b) => a.run === b.run && a.kind === b.kind && a.label === b.label;

function extend(mine, line, run, news) {
  const last = run.step[mine.at.at(-1)] ?? -Infinity;
  for (const part of mine.means ? ["means", null] : [null]) {
    const target = part ? mine.means : mine;
    line.at.forEach((at, index) => {
      const place = news.step[at] > last ? placeOf(run, news, at) : -1;
      if (place < 0) return;
      target.at.push(place);
      target.value.push(line.value[index]);
      if (!part) mine.logged += 1;
    });
  }
}

async function ask() {
  if (document.hidden || !live.dataset.source) return;
  let answer;
  try {
    answer = await fetch(`${live.dataset.source}&have=${encodeURIComponent(state)}`, { redirect: "error" });
  } catch {
    live.textContent = "The hub does not answer; the curves are those of the last answer.";
    return;
  }
  if (answer.status === 204) { live.textContent = ""; return; }
  if (answer.status !== 200) { live.textContent = "The runs have changed: reload the page to see them as they are."; return; }
  const news = await answer.json();
  if (!merge(news.data)) { live.textContent = "There are new metrics: reload the page to see them."; return; }
  state = news.state;
  live.textContent = "";
  live.dataset.state = state;
  redraw();
}

setInterval(ask, PERIOD);
document.addEventListener("visibilitychange", ask);
