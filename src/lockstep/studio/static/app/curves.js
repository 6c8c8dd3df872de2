// The charts of a run, from the columns of its files.

import { html, useEffect, useRef, useState } from "./html.js";
import { Chart, ChartTools, drawing } from "./charts.js";
import { axisOf, lastIndexAtMost } from "./columns.js";
import { gigabytes, heading, number, percent, words } from "./format.js";
import { follow, range, subscribe } from "./live.js";
import { Button, Fold, Problem } from "./ui.js";

/** The data of runs, followed while the component is shown. */
export function useRuns(ids) {
  const [all, setAll] = useState([]);
  useEffect(() => {
    const followed = ids.map(follow);
    setAll(followed.map(([data]) => data));
    // Runs that are still shown keep their data.
    return () => void setTimeout(() => followed.forEach(([, leave]) => leave()));
  }, [ids.join()]);
  return all.filter(({ id }) => ids.includes(id));
}

/** Columns of metrics.json as lines over the steps at which epochs ended. */
function epochLines(rows) {
  const x = rows.map((row) => row.step);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !["epoch", "step", "attempt", "samples_seen"].includes(name));
  return new Map(
    names.map((name) => [name, { x, y: rows.map((row) => (typeof row[name] === "number" ? row[name] : NaN)) }]).filter(([, { y }]) => y.some((value) => !Number.isNaN(value))),
  );
}

/** The metrics of epochs and of the evaluations `between` them (a stream), as lines over steps. */
export function linesOverSteps(rows, between) {
  const lines = epochLines(rows);
  for (const name of between?.names().filter((name) => !["epoch", "attempt", "samples_seen"].includes(name)) ?? []) {
    const line = between.line(name);
    if (line) lines.set(name, lines.has(name) ? merged(lines.get(name), line) : line);
  }
  return lines;
}

function merged(...lines) {
  const points = lines.flatMap(({ x, y }) => Array.from(x, (at, index) => [at, y[index]])).sort(([a], [b]) => a - b);
  return { x: points.map(([at]) => at), y: points.map(([, value]) => value) };
}

/** Whether a column of metrics.json is a metric: no rate, time or share of the training. */
export const isMetric = (name) => !/^(lr|data_wait|.*_s|.*_share|samples_seen|skipped_steps|epoch|step|attempt|complete)$/.test(name);

/** Most classes of a metric in one chart. */
const MOST_CLASSES = 20;

/** Metrics of metrics.json grouped for charts: training, validation and classes (`recall/cat`) of one quantity share one. */
function epochCharts(lines) {
  const shown = [...lines].filter(([name]) => isMetric(name));
  const series = shown.map(([name, line]) => ({ label: words(name), name, ...line }));
  const quantityOf = ({ name }) => name.replace(/^(train|val|test)_/, "");
  const groups = [...Map.groupBy(series, (one) => quantityOf(one).split("/")[0])];
  return groups.flatMap((group) => (group[1].length > MOST_CLASSES ? [...Map.groupBy(group[1], quantityOf)] : [group]));
}

/** The chosen x axis, for a run. */
export const axisFor = (data, streams) => axisOf(drawing.value.x, streams, data.epochs.value, data.perEpoch.value);

/** A chart of one stream. When the history is thinned out, a zoom fetches the part at full resolution. */
function StreamChart({ data, name, stream, columns, ...rest }) {
  const [part, setPart] = useState(null);
  const asked = useRef(0);
  const seriesOf = (source, { place }) => {
    const x = source.column(source.x).map(place);
    return columns.map(([column, label, index]) => ({ label, index, ...source.line(column, rest.everyRow), x })).filter(({ y }) => y?.length);
  };
  const source = (stream.downsampled && part) || stream;
  const axis = name === "steps" ? axisFor(data, [source]) : axisOf("step");
  const series = seriesOf(source, axis);
  if (!series.length && !part) return null;
  const fetched = (more) => range(data.id, name, columns.map(([column]) => column), more);
  // Drop an answer that arrives after the next zoom or reset.
  const zoomed = async (from, to) => {
    const turn = ++asked.current;
    const steps = stream.column(stream.x);
    const x = steps.map(axisFor(data, [stream]).place);
    const stepAt = (at) => steps[Math.min(Math.max(at, 0), steps.length - 1)];
    const ends = name !== "steps" ? { from, to } : { from: stepAt(lastIndexAtMost(x, from)), to: stepAt(lastIndexAtMost(x, to) + 1) };
    const found = from === null || !stream.downsampled ? null : await fetched(ends);
    if (turn === asked.current) setPart(found);
  };
  const whole = async () => {
    const all = (stream.downsampled && (await fetched({ full: true }))) || stream;
    return seriesOf(all, name === "steps" ? axisFor(data, [all]) : axis);
  };
  return html`<${Chart} against=${axis.against} ...${rest} series=${series} onZoom=${zoomed} whole=${whole} />`;
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

/**
 * Seconds since the first sample, shared by the lines of one stream. A pause (no sample for a minute and for ten usual
 * intervals) gets a point without a value, which ends the line.
 */
function since({ x, y }, start, scale) {
  if (!shifted.has(x)) {
    const apart = Array.from(x, (time, at) => (at ? time - x[at - 1] : 0));
    const least = Math.max(60, 10 * (apart.toSorted((a, b) => a - b)[apart.length >> 1] ?? 0));
    const from = apart.flatMap((seconds, at) => (seconds > least ? [-1, at] : [at]));
    shifted.set(x, { from, x: from.map((at, place) => (at < 0 ? x[from[place + 1]] - 1e-3 : x[at]) - start) });
  }
  const { from, x: moved } = shifted.get(x);
  return { x: moved, y: from.map((at) => (at < 0 ? NaN : y[at] * scale)), gaps: true };
}

/** Sort the host after the devices. */
const byDevice = ([a], [b]) => (a === "host") - (b === "host") || a.localeCompare(b, "en", { numeric: true });

function DeviceCharts({ data }) {
  const streams = data.named("system").sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (!streams.length) return null;
  const start = Math.min(...streams.map(([, stream]) => stream.column(stream.x)?.[0] ?? Infinity));
  const lines = streams.flatMap(([name, stream]) =>
    stream
      .names()
      .map((column) => [...column.split(/\.(?=[^.]*$)/), column]) // `gpu:2.power_w` → `gpu:2`, `power_w`
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

export const milliseconds = (seconds) => `${number(seconds * 1e3, 3)} ms`;
milliseconds.axis = [1e3, " ms"];

const RANK_CHARTS = [
  ["Step time per rank", "step_s", { format: milliseconds }],
  ["Own work per step", "own_s", { format: milliseconds }],
  ["Wait per rank", "wait_s", { format: milliseconds }],
  ["Memory per rank", "memory_gb", { unit: " GB" }],
  ["Peak memory per rank", "peak_gb", { unit: " GB" }],
];

/** Columns `ranks.<r>.<what>` of one quantity, as [rank, column]. */
export function perRank(stream, quantity) {
  const names = stream.names();
  let found = ranksOf.get(stream);
  if (found?.count !== names.length) {
    const parts = names.map((column) => [/(?:^|\.)(\d+)\.([a-z_]+)$/.exec(column), column]).filter(([match]) => match);
    found = { count: names.length, of: Map.groupBy(parts.map(([match, column]) => [Number(match[1]), column, match[2]]), ([, , what]) => what) };
    for (const list of found.of.values()) list.sort(([a], [b]) => a - b);
    ranksOf.set(stream, found);
  }
  return found.of.get(quantity) ?? [];
}
const ranksOf = new WeakMap();

/** Most lines of a chart, and most charts of a task's own values. */
const MOST_RANKS = 32;
const MOST_SCALARS = 24;

function RankCharts({ data }) {
  const stream = data.stream("ranks");
  if (!stream) return null;
  const slow = stream.column("slow_rank")?.at(-1); // as the newest row reports
  const all = perRank(stream, "step_s").map(([rank]) => rank);
  const drawn = new Set(all.toSorted((a, b) => (b === slow) - (a === slow)).slice(0, MOST_RANKS));
  const charts = RANK_CHARTS.map(([title, quantity, options]) => {
    const ranks = perRank(stream, quantity).filter(([rank]) => drawn.has(rank));
    const columns = ranks.map(([rank, column]) => [column, `rank ${rank}${rank === slow ? " – straggler" : ""}`, rank]);
    return columns.some(([column]) => stream.line(column))
      ? html`<${StreamChart} key=${title} data=${data} name="ranks" stream=${stream} columns=${columns} title=${title} canLog=${false} ...${options} />`
      : null;
  });
  if (!charts.some(Boolean)) return null;
  return html`<h2>Ranks</h2>
    ${all.length > drawn.size && html`<p class="muted">${drawn.size} of ${number(all.length)} ranks: stragglers and the first ones.</p>`}
    <div class="charts">${charts}</div>`;
}

/** Numbers of the task, grouped by the part of their names before the first `/` or `.`. */
function Scalars({ data, text }) {
  const steps = data.stream("steps");
  const names = (steps?.names() ?? []).filter((name) => name.startsWith("scalars.") && name.toLowerCase().includes(text));
  const groups = Map.groupBy(names, (name) => /^scalars\.([^/.]+)[/.]/.exec(name)?.[1] ?? "");
  return [...groups].map(([group, columns], at) => html`<${ScalarGroup} key=${group} unfolded=${at === 0 || Boolean(text)} data=${data} steps=${steps} title=${group ? heading(group) : "Numbers of the task"} columns=${columns} />`);
}

function ScalarGroup({ data, steps, title, columns, unfolded }) {
  const [most, setMost] = useState(MOST_SCALARS);
  const chart = (column) => html`<${StreamChart} key=${column} data=${data} name="steps" stream=${steps} columns=${[[column, column.slice(8)]]} title=${column.slice(8)} />`;
  return html`<${Fold} kind="chart-group" open=${unfolded} title=${html`<h2>${title}</h2> <span class="muted">${columns.length}</span>`}>
    ${(open) => open && html`<div class="charts">${columns.slice(0, most).map(chart)}</div>
      ${columns.length > most && html`<p><${Button} onClick=${() => setMost(most + 4 * MOST_SCALARS)}>Show ${Math.min(4 * MOST_SCALARS, columns.length - most)} more of ${number(columns.length)}<//></p>`}`}
  <//>`;
}

function StepCharts({ data, text, few }) {
  const steps = data.stream("steps");
  return STEP_CHARTS.filter(([title, column]) => steps && title.toLowerCase().includes(text) && (!few || column !== "grad_norm")).map(
    ([title, column, options]) => html`<${StreamChart} key=${title} data=${data} name="steps" stream=${steps} columns=${[[column, words(column)]]} title=${title} ...${options} />`,
  );
}

/** Charts of the metrics of epochs or evaluations. */
function MetricCharts({ data, text, few }) {
  const between = data.stream("evaluations");
  const { against, place } = axisFor(data, drawing.value.x === "step" ? [] : [data.stream("steps"), between]);
  return epochCharts(linesOverSteps(data.epochs.value, between))
    .map(([quantity, series]) => [`${heading(quantity)} per ${between?.rows ? "evaluation" : "epoch"}`, quantity, series])
    .filter(([title]) => title.toLowerCase().includes(text))
    .slice(0, few ? 4 : undefined)
    .map(([title, quantity, series]) => html`<${Chart} key=${quantity} title=${title} series=${series.map((one) => ({ ...one, x: one.x.map(place) }))} against=${against} />`);
}

function Tools({ data, few }) {
  const steps = data.stream("steps");
  const notes = [
    steps?.preview && "a first sample; the whole file is being read",
    steps?.downsampled && !steps.preview && `down-sampled: ${number(steps.rows)} of ${number(steps.total)} points; zoom shows all`,
    ...data.named("").map(([name, { cut }]) => cut && `${name} has more columns than the page can show; the first ones are shown`),
  ].filter(Boolean);
  return html`<${ChartTools} notes=${notes} search=${!few} />`;
}

/** The live charts of one run; `few`: only the main ones. Each part is drawn again with its own rows. */
export function Curves({ id, few = false }) {
  const [data] = useRuns([id]);
  if (!data) return null;
  const text = few ? "" : drawing.value.text.toLowerCase();
  const problem = data.error.value && html`<${Problem} error=${data.error.value} /><div class="row"><${Button} onClick=${() => subscribe(id)}>Try again<//></div>`;
  const measured = data.epochs.value.length > 0 || data.names.value.some((name) => !few || name === "steps" || name === "evaluations");
  if (!measured) return problem ?? html`<p class="muted" role="status">No measurements yet.</p>`;
  return html`
    ${problem}
    <${Tools} data=${data} few=${few} />
    <div class="charts" role="group" aria-label="Charts"><${StepCharts} data=${data} text=${text} few=${few} /><${MetricCharts} data=${data} text=${text} few=${few} /></div>
    ${!few && html`<${Scalars} data=${data} text=${text} />`}
    ${!few && !text && html`<${RankCharts} data=${data} /><${DeviceCharts} data=${data} />`}
  `;
}
