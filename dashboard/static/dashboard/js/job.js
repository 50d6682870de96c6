// The job page: draws the loss of each generation with its replays, incidents and checkpoints, and a second small chart.

import { Curves, aligned } from "./curves.js";

const lossBox = document.getElementById("loss-chart");
const secondBox = document.getElementById("second-chart");
const note = document.getElementById("chart-note");
const zoomOut = document.querySelector("[data-zoom-out]");
const address = new URL(location.href);

const SECOND = {
  learning_rate: { title: "Learning rate", value: (point) => point.learning_rate, write: (v) => v.toExponential(2) },
  throughput: {
    title: "Throughput, steps per second",
    value: (point) => (point.step_time_s > 0 ? 1 / point.step_time_s : null),
    write: (v) => v.toPrecision(3),
  },
  grad_norm: { title: "Gradient norm", value: (point) => point.grad_norm, write: (v) => v.toPrecision(4) },
};

const curves = new Curves(lossBox.dataset.metrics);
let canonical = address.searchParams.get("curve") === "canonical";
let second = address.searchParams.get("second") in SECOND ? address.searchParams.get("second") : "learning_rate";
let lossChart = null;
let secondChart = null;
let drawnAs = "";
let updating = false;
let updateAgain = false;

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

/** The colour behind a design token, as a canvas wants it. */
function colour(token) {
  probe.style.color = `var(${token})`;
  return getComputedStyle(probe).color;
}

function seriesColour(generation) {
  return colour(`--series-${((generation - 1) % 6) + 1}`);
}

function marks() {
  return JSON.parse(document.getElementById("marks").dataset.marks);
}

// Drawing

function shadeReplays(chart) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = colour("--chart-replay");
  for (const replay of canonical ? [] : curves.replays()) {
    const left = chart.valToPos(replay.from, "x", true);
    const right = chart.valToPos(replay.to, "x", true);
    ctx.fillRect(left, bbox.top, Math.max(2, right - left), bbox.height);
  }
  ctx.restore();
}

function drawMarks(chart) {
  const { ctx, bbox } = chart;
  const scale = devicePixelRatio;
  const { incidents, checkpoints } = marks();
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = colour("--good");
  for (const { step } of checkpoints) {
    const x = chart.valToPos(step, "x", true);
    const y = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x - 4 * scale, y);
    ctx.lineTo(x, y - 7 * scale);
    ctx.lineTo(x + 4 * scale, y);
    ctx.fill();
  }
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.font = `600 ${11 * scale}px "Inter Variable", sans-serif`;
  ctx.strokeStyle = ctx.fillStyle = colour("--bad");
  ctx.lineWidth = 1.5 * scale;
  ctx.setLineDash([4 * scale, 3 * scale]);
  for (const { step, drill } of incidents) {
    const x = chart.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const label = drill ? "drill" : "incident";
    const width = ctx.measureText(label).width;
    const fits = x + width + 6 * scale < bbox.left + bbox.width;
    ctx.fillText(label, fits ? x + 5 * scale : x - width - 5 * scale, bbox.top + 12 * scale);
  }
  ctx.restore();
}

function options(box, { height, write, series, hooks }) {
  const axis = {
    stroke: colour("--muted"),
    font: '12px "Inter Variable", sans-serif',
    grid: { stroke: colour("--chart-grid"), width: 1 },
    ticks: { stroke: colour("--chart-grid"), width: 1 },
  };
  return {
    width: box.clientWidth,
    height,
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
      { ...axis, size: 64, space: 26, values: (_, splits) => splits.map((value) => write(value)) },
    ],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    legend: { live: true },
    series: [{ label: "Step" }, ...series],
    hooks,
  };
}

function seriesOptions(shown, write) {
  const newest = shown.length - 1;
  return shown.map(({ number }, index) => ({
    label: `Generation ${number}`,
    stroke: seriesColour(number),
    // An older curve lies as a broad, faint band under the newer one: where they are equal, both can be seen.
    width: index === newest || canonical ? 1.75 : 5,
    alpha: index === newest || canonical ? 1 : 0.45,
    points: { show: false },
    value: (_, value) => (value === null || value === undefined ? "-" : write(value)),
  }));
}

function draw() {
  const shown = curves.curves(canonical);
  note.hidden = !curves.isEmpty;
  if (curves.isEmpty) {
    note.textContent = note.dataset.nothing;
    return;
  }
  const losses = aligned(shown, (point) => point.loss);
  const others = aligned(shown, SECOND[second].value);
  const drawAs = `${shown.map(({ number }) => number)} ${canonical} ${second}`;
  if (drawAs !== drawnAs) {
    lossChart?.destroy();
    secondChart?.destroy();
    const write = (value) => value.toPrecision(5);
    lossChart = new uPlot(
      options(lossBox, {
        height: 320,
        write: (value) => String(Number(value.toPrecision(4))),
        series: seriesOptions(shown, write),
        hooks: { drawClear: [shadeReplays], draw: [drawMarks], setScale: [showZoom] },
      }),
      losses,
      lossBox,
    );
    const { write: writeOther } = SECOND[second];
    secondChart = new uPlot(
      options(secondBox, {
        height: 160,
        write: writeOther,
        series: seriesOptions(shown, writeOther),
        hooks: { drawClear: [shadeReplays] },
      }),
      others,
      secondBox,
    );
    drawnAs = drawAs;
  } else {
    const zoomed = isZoomed();
    lossChart.setData(losses, !zoomed);
    secondChart.setData(others, !zoomed);
    if (zoomed) {
      lossChart.redraw();
      secondChart.redraw();
    }
  }
  describe(shown);
}

function describe(shown) {
  const told = shown
    .filter(({ points }) => points.length > 0)
    .map(({ number, points }) => {
      const last = points[points.length - 1];
      const loss = last.loss === null ? "" : `, last loss ${last.loss.toPrecision(5)}`;
      return `generation ${number}, steps ${points[0].step} to ${last.step}${loss}`;
    });
  const replays = canonical ? [] : curves.replays();
  const again = replays.map(({ from, to }) => `steps ${from + 1} to ${to} were made again`);
  lossBox.setAttribute("aria-label", `Training loss: ${[...told, ...again].join("; ")}`);
  lossBox.dataset.replays = replays.map(({ from, to }) => `${from}-${to}`).join(" ");
  lossBox.dataset.generations = shown.map(({ number }) => number).join(" ");
}

function isZoomed() {
  const [steps] = lossChart.data;
  const { min, max } = lossChart.scales.x;
  return steps.length > 1 && (min > steps[0] || max < steps[steps.length - 1]);
}

function showZoom(chart, scale) {
  if (scale === "x" && lossChart) zoomOut.hidden = !isZoomed();
}

function redrawFully() {
  drawnAs = "";
  draw();
}

// Keeping it current

async function update() {
  if (updating) {
    updateAgain = true;
    return;
  }
  updating = true;
  try {
    await curves.update(Number(document.getElementById("marks").dataset.generation));
    draw();
  } catch (error) {
    note.hidden = false;
    note.textContent = `${error.message} It is tried again with the next news.`;
  } finally {
    updating = false;
  }
  if (updateAgain) {
    updateAgain = false;
    update();
  }
}

function choose(name, value) {
  address.searchParams.set(name, value);
  history.replaceState(null, "", address);
}

function showChoices() {
  for (const button of document.querySelectorAll("[data-curve]")) {
    button.setAttribute("aria-pressed", String((button.dataset.curve === "canonical") === canonical));
  }
  for (const button of document.querySelectorAll("[data-second]")) {
    button.setAttribute("aria-pressed", String(button.dataset.second === second));
  }
  document.getElementById("second-title").textContent = SECOND[second].title;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.curve) {
    canonical = button.dataset.curve === "canonical";
    choose("curve", button.dataset.curve);
  } else if (button.dataset.second) {
    second = button.dataset.second;
    choose("second", second);
  } else if ("zoomOut" in button.dataset) {
    drawnAs = "";
    button.hidden = true;
  } else {
    return;
  }
  showChoices();
  draw();
});

document.addEventListener("htmx:afterSwap", (event) => {
  if (event.target.id === "job-head") update();
});
document.addEventListener("everstep:colours", redrawFully);
new ResizeObserver(() => {
  lossChart?.setSize({ width: lossBox.clientWidth, height: 320 });
  secondChart?.setSize({ width: secondBox.clientWidth, height: 160 });
}).observe(lossBox);

showChoices();
await document.fonts.ready;
update();
