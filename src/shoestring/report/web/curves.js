// Draws the curves from the data embedded in the page, with uPlot. Whatever came from outside is set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const view = { x: "step", log: false, large: data.large[0]?.key, smooth: 0, zoom: null, hidden: new Set() };
const X_NAMES = { step: "step", seconds: "time", tokens: "tokens" };
const LINES = ["training", "held out", "baselines"]; // kinds of lines that a large chart can have
const charts = [];

// ---- numbers -------------------------------------------------------------------------------------------------

const FORMATS = { plain, count, percent: (value) => `${Number((100 * value).toPrecision(3))}%` }; // the ticks of an axis may lie close
const X_FORMATS = { step: (value) => Math.round(value).toLocaleString("en"), seconds: duration, tokens: count };
const DECIMAL = [1, 2, 5].map((digit) => Array.from({ length: 16 }, (_, power) => digit * 10 ** power)).flat().sort((a, b) => a - b);
const CLOCK = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const INCREMENTS = { step: DECIMAL, seconds: CLOCK, tokens: DECIMAL };

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const digit of [1, 1.5, 2, 3, 4, 5, 6, 8]) ticks.push(Number(`${digit}e${power}`));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  const decades = inside.filter((tick) => /^1e/.test(tick.toExponential()));
  return decades.length > 3 ? decades : inside;
}

// ---- curves --------------------------------------------------------------------------------------------------

// The points [x, value, step] of a part of a line that have a place on the x axis, x ascending, one for each x
function points(line, part) {
  const run = data.runs[line.run], found = new Map();
  part.at.forEach((at, index) => {
    if (run[view.x][at] !== null) found.set(run[view.x][at], [run[view.x][at], part.value[index], run.step[at]]);
  });
  return [...found.values()].sort((a, b) => a[0] - b[0]);
}

// The mean of the values around each point, weighted by a Gaussian whose window has the given number of steps
function smoothed(all, steps) {
  const sigma = steps / 4, reach = steps / 2, finite = all.filter((point) => typeof point[1] === "number");
  let first = 0;
  return finite.map(([x, , step]) => {
    while (finite[first][2] < step - reach) first += 1;
    let sum = 0, weights = 0;
    for (let k = first; k < finite.length && finite[k][2] <= step + reach; k += 1) {
      const weight = Math.exp(-0.5 * ((finite[k][2] - step) / sigma) ** 2);
      sum += weight * finite[k][1];
      weights += weight;
    }
    return [x, sum / weights, step];
  });
}

function nearest(all, x) {
  let low = 0, high = all.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - all[low - 1][0] <= all[low][0] - x ? low - 1 : low;
}

const LAST = Math.max(1, ...data.runs.map((run) => run.step.at(-1) ?? 1));
const windowOf = (slider) => (slider ? Math.max(2, Math.round(LAST * 0.3 * (slider / 100) ** 2)) : 0);
const extent = () => data.runs.flatMap((run) => run[view.x].filter((x) => x !== null)).reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
const shows = (line) => !view.hidden.has(`run ${line.run}`) && !view.hidden.has(line.kind);

// ---- lines -------------------------------------------------------------------------------------------------

const toneOf = (line) => `tone${(data.runs.length > 1 ? line.run : line.tone) % 8}`;
const faded = (rgb, share) => rgb.replace(/^rgb\(/, "rgba(").replace(/\)$/, `, ${share})`);
const labelOf = (line) => [data.runs.length > 1 ? data.runs[line.run].name : "", line.label].filter(Boolean).join(", ");
