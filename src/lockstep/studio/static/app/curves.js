// The charts of a run, from the columns of its files.

import { html, useEffect, useRef, useState } from "./html.js";
import { Chart, ChartTools } from "./charts.js";
import { gigabytes, number, percent, words } from "./format.js";
import { followAgain, look, range } from "./live.js";
import { Button, Problem } from "./ui.js";

/** Follows a run while the component is shown. */
export function useRun(id) {
  const [data, setData] = useState(null);
  useEffect(() => {
    const [found, leave] = look(id);
    setData(found);
    return leave;
  }, [id]);
  return data?.id === id ? data : null;
}

/** Columns of metrics.json as lines over epochs, or over the `step` at which they ended. */
export function epochLines(rows, against = "epoch") {
  const x = rows.map((row) => row[against]);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !["epoch", "step", "attempt"].includes(name));
  return new Map(
    names.map((name) => [name, { x, y: rows.map((row) => (typeof row[name] === "number" ? row[name] : NaN)) }]).filter(([, { y }]) => y.some((value) => !Number.isNaN(value))),
  );
}

/** What was measured at the ends of epochs and by the evaluations `between` them (a stream), as lines over steps. */
export function linesOverSteps(rows, between) {
  const lines = epochLines(rows, "step");
  for (const name of between?.names().filter((name) => !["epoch", "attempt"].includes(name)) ?? []) {
    const line = between.line(name);
    if (line) lines.set(name, lines.has(name) ? merged(lines.get(name), line) : line);
  }
  return lines;
}

function merged(...lines) {
  const points = lines.flatMap(({ x, y }) => Array.from(x, (at, index) => [at, y[index]])).sort(([a], [b]) => a - b);
  return { x: points.map(([at]) => at), y: points.map(([, value]) => value) };
}

/** Metrics of metrics.json grouped for charts: training and validation of one quantity share one. */
export function epochCharts(lines) {
  const groups = new Map();
  const skipped = /^(lr|samples_per_s|duration_s|data_wait|.*_s|.*_share|samples_seen|skipped_steps)$/;
  for (const [name, line] of lines) {
    if (skipped.test(name)) continue;
    const quantity = name.replace(/^(train|val|test)_/, "");
    if (!groups.has(quantity)) groups.set(quantity, []);
    groups.get(quantity).push({ label: words(name), name, ...line });
  }
  return [...groups];
}

/** A chart of one stream. When the history is thinned out, a zoom fetches the part at full resolution. */
function StreamChart({ run, name, stream, columns, ...rest }) {
  const [part, setPart] = useState(null);
  const asked = useRef(0);
  const source = (stream.downsampled && part) || stream;
  const line = (column) => (rest.everyRow ? source.wholeLine(column) : source.line(column));
  const series = columns.map(([column, label, index]) => ({ label, index, ...line(column) })).filter(({ y }) => y?.length);
  if (!series.length && !part) return null;
  // An answer that arrives after the next zoom or reset is dropped.
  const zoomed = async (from, to) => {
    const turn = ++asked.current;
    const found = from === null || !stream.downsampled ? null : await range(run, name, from, to);
    if (turn === asked.current) setPart(found);
  };
  return html`<${Chart} ...${rest} series=${series} onZoom=${zoomed} />`;
}

export const STEP_CHARTS = [
  ["Loss", "loss", { everyRow: true }],
  ["Learning rate", "lr", { canLog: false }],
  ["Throughput", "samples_per_s", { unit: " samples/s", canLog: false }],
  ["Data wait", "data_wait_share", { format: percent, canLog: false }],
  ["Gradient norm", "grad_norm", {}],
];

const DEVICE_CHARTS = [
  ["Utilisation", ["utilisation", "cpu"], { format: percent }],
  ["Memory", ["memory_used", "memory_gb"], { format: gigabytes }],
  ["Power", ["power_w"], { unit: " W" }],
  ["Temperature", ["temperature_c"], { unit: " °C" }],
];

const asBytes = (name) => (name.endsWith("memory_gb") ? 1e9 : 1);

const shifted = new WeakMap();

/** Seconds since the first sample; lines of one stream share them. */
function since(line, start, scale) {
  if (!shifted.has(line.x)) shifted.set(line.x, line.x.map((time) => time - start));
  return { x: shifted.get(line.x), y: scale === 1 ? line.y : line.y.map((value) => value * scale) };
}

/** `gpu:2.power_w` → [`gpu:2`, `power_w`]; the host's own numbers come after the devices. */
function splitColumn(column) {
  const at = column.lastIndexOf(".");
  return [column.slice(0, at), column.slice(at + 1)];
}

const byDevice = ([a], [b]) => (a === "host") - (b === "host") || a.localeCompare(b, "en", { numeric: true });

function DeviceCharts({ data }) {
  const streams = data.named("system").sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (!streams.length) return null;
  const start = Math.min(...streams.map(([, stream]) => stream.column(stream.x)?.[0] ?? Infinity));
  const lines = streams.flatMap(([name, stream]) =>
    stream
      .names()
      .map((column) => [...splitColumn(column), column])
      .sort(byDevice)
      .map(([device, quantity, column]) => ({ label: streams.length > 1 ? `${name.replace("system-", "")} ${device}` : device, quantity, stream, column })),
  );
  // A device has one colour in all charts.
  const devices = [...new Set(lines.map(({ label }) => label))];
  const charts = DEVICE_CHARTS.map(([title, quantities, options]) => {
    const series = lines
      .filter(({ quantity }) => quantities.includes(quantity))
      .map(({ label, stream, column }) => [label, stream.line(column), asBytes(column)])
      .filter(([, line]) => line)
      .map(([label, line, scale]) => ({ label, index: devices.indexOf(label), ...since(line, start, scale) }));
    return series.length ? html`<${Chart} key=${title} title=${title} series=${series} against="second" canLog=${false} ...${options} />` : null;
  }).filter(Boolean);
  return charts.length ? html`<h2>Devices</h2><div class="charts">${charts}</div>` : null;
}

const milliseconds = (seconds) => `${number(seconds * 1e3, 3)} ms`;

const RANK_CHARTS = [
  ["Step time per rank", "step_s", { format: milliseconds }],
  ["Own work per step", "own_s", { format: milliseconds }],
  ["Wait per rank", "wait_s", { format: milliseconds }],
  ["Memory per rank", "memory_gb", { unit: " GB" }],
  ["Peak memory per rank", "peak_gb", { unit: " GB" }],
];

/** Columns `ranks.<r>.<what>` of one quantity, as [rank, column]. */
const perRank = (stream, quantity) =>
  stream
    .names()
    .map((column) => [/(?:^|\.)(\d+)\.([a-z_]+)$/.exec(column), column])
    .filter(([found]) => found?.[2] === quantity)
    .map(([found, column]) => [Number(found[1]), column])
    .sort(([a], [b]) => a - b);

/** The ranks that the run reported as stragglers. */
const stragglers = (stream) => new Set([...(stream.column("slow_rank") ?? [])].filter((rank) => !Number.isNaN(rank)));

/** Most lines of a chart, and most charts of a task's own values. */
const MOST_RANKS = 32;
const MOST_SCALARS = 48;

function RankCharts({ data }) {
  const stream = data.stream("ranks");
  if (!stream) return null;
  const slow = stragglers(stream);
  const all = perRank(stream, "step_s").map(([rank]) => rank);
  const drawn = new Set([...all.filter((rank) => slow.has(rank)), ...all.filter((rank) => !slow.has(rank))].slice(0, MOST_RANKS));
  const charts = RANK_CHARTS.map(([title, quantity, options]) => {
    const ranks = perRank(stream, quantity).filter(([rank]) => drawn.has(rank));
    const columns = ranks.map(([rank, column]) => [column, `rank ${rank}${slow.has(rank) ? " – straggler" : ""}`, rank]);
    return columns.some(([column]) => stream.line(column))
      ? html`<${StreamChart} key=${title} run=${data.id} name="ranks" stream=${stream} columns=${columns} title=${title} against=${stream.x} canLog=${false} ...${options} />`
      : null;
  });
  if (!charts.some(Boolean)) return null;
  return html`<h2>Ranks</h2>
    ${all.length > drawn.size && html`<p class="muted">${drawn.size} of ${number(all.length)} ranks: stragglers and the first ones.</p>`}
    <div class="charts">${charts}</div>`;
}

/** All charts of one run, live. */
export function Curves({ id }) {
  const data = useRun(id);
  // Reading the version draws this again when rows have arrived.
  if (!data || data.version.value < 0) return null;
  const steps = data.stream("steps");
  const between = data.stream("evaluations");
  const against = between?.rows ? "step" : "epoch";
  const metrics = epochCharts(between?.rows ? linesOverSteps(data.epochs.value, between) : epochLines(data.epochs.value));
  const scalars = steps?.names().filter((name) => name.startsWith("scalars.")) ?? [];
  const notes = [
    steps?.preview && "a first sample; the whole file is being read",
    steps?.downsampled && !steps.preview && `down-sampled: ${number(steps.rows)} of ${number(steps.total)} points; zoom shows all`,
    ...data.named("").map(([name, { cut }]) => cut && `${name} has more columns than the page can show; the first ones are shown`),
    scalars.length > MOST_SCALARS && `${MOST_SCALARS} of ${number(scalars.length)} numbers of the task are drawn`,
  ].filter(Boolean);
  const trouble = data.error.value;
  const problem = trouble && html`<${Problem} error=${trouble} /><div class="row"><${Button} onClick=${() => followAgain(id)}>Try again<//></div>`;
  if (!metrics.length && !data.named("").some(([, { rows }]) => rows)) return problem ?? html`<p class="muted" role="status">No measurements yet.</p>`;
  return html`
    ${problem}
    <${ChartTools} notes=${notes} />
    <div class="charts" role="group" aria-label="Charts">
      ${steps &&
      STEP_CHARTS.map(
        ([title, column, options]) => html`<${StreamChart} key=${title} run=${id} name="steps" stream=${steps} columns=${[[column, words(column)]]} title=${title} ...${options} />`,
      )}
      ${metrics.map(
        ([quantity, series]) =>
          html`<${Chart} key=${`${against} ${quantity}`} title=${`${words(quantity)} per ${between?.rows ? "evaluation" : "epoch"}`} series=${series} against=${against} />`,
      )}
      ${scalars.slice(0, MOST_SCALARS).map(
        (column) => html`<${StreamChart} key=${column} run=${id} name="steps" stream=${steps} columns=${[[column, column.slice(8)]]} title=${column.slice(8)} />`,
      )}
    </div>
    <${RankCharts} data=${data} />
    <${DeviceCharts} data=${data} />
  `;
}
