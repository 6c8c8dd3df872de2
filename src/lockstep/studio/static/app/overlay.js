// The curves of several runs in the same charts: one line a run, or the mean of each group with a band around it.

import { html, useState } from "./html.js";
import { Chart, ChartTools, Legend } from "./charts.js";
import { AXES, lastIndexAtMost } from "./columns.js";
import { axisFor, isMetric, linesOverSteps, STEP_CHARTS, useRuns } from "./curves.js";
import { words } from "./format.js";
import { findRun, labelsOf } from "./live.js";

/** The value of a line at `place`, interpolated between its points. */
function valueAt({ x, y }, place) {
  const at = Math.min(lastIndexAtMost(x, place), x.length - 2);
  return at < 0 ? y[0] : y[at] + ((y[at + 1] - y[at]) * (place - x[at])) / (x[at + 1] - x[at]);
}

/** {x, y, band}: the mean of lines over their common part, and one sample standard deviation below and above it. */
export function meanOf(lines) {
  const finite = lines.map(({ x, y }) => {
    const places = Array.from(x.keys()).filter((at) => Number.isFinite(y[at]));
    return { x: places.map((at) => x[at]), y: places.map((at) => y[at]) };
  });
  const from = Math.max(...finite.map(({ x }) => x[0]));
  const to = Math.min(...finite.map(({ x }) => x.at(-1)));
  const x = [...new Set(finite.flatMap((line) => line.x))].filter((place) => place >= from && place <= to).sort((a, b) => a - b);
  const rows = x.map((place) => finite.map((line) => valueAt(line, place)));
  const y = rows.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length);
  const spread = rows.map((values, at) => (values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - y[at]) ** 2, 0) / (values.length - 1)) : 0));
  return { x, y, band: [y.map((mean, at) => mean - spread[at]), y.map((mean, at) => mean + spread[at])] };
}

/** The lines of a run over steps, by name: of its steps, and of its evaluations. */
function linesOf(data) {
  const [steps, between] = [data.stream("steps"), data.stream("evaluations")];
  const logged = STEP_CHARTS.map(([, name]) => [name, steps?.line(name)]).filter(([, line]) => line);
  return { step: new Map(logged), metric: linesOverSteps(data.epochs.value, between), isEvaluated: Boolean(between?.rows) };
}

/**
 * `groups`: a Map from a run's id to the name of its group, or nothing. `only`: names of the metrics to draw; default: all.
 * `beside`: more tools.
 */
export function Overlay({ ids, groups, only, beside }) {
  const shared = useState([]);
  const all = useRuns(ids);
  const axes = all.map((data) => axisFor(data, [data.stream("steps"), data.stream("evaluations")]));
  // Curves on different axes cannot share a chart.
  const against = new Set(axes.map((axis) => axis.against)).size === 1 ? axes[0].against : AXES.step;
  const lines = new Map(all.map((data, at) => [data.id, { ...linesOf(data), place: against === AXES.step ? (step) => step : axes[at].place }]));
  const labels = labelsOf(ids.map((id) => findRun(id) ?? { id }));
  const names = groups ? [...new Set(ids.map((id) => groups.get(id)))] : labels;
  const seriesOf = (kind, name) => {
    const drawn = ids.flatMap((id, index) => {
      const line = lines.get(id)?.[kind].get(name);
      return line ? [{ label: labels[index], group: groups?.get(id), index, x: Array.from(line.x, lines.get(id).place), y: line.y }] : [];
    });
    if (!groups) return drawn;
    const usable = drawn.filter(({ y }) => y.some(Number.isFinite));
    return [...Map.groupBy(usable, ({ group }) => group)].map(([label, some]) => ({ label, index: names.indexOf(label), ...meanOf(some) })).filter(({ x }) => x.length);
  };
  const kind = [...lines.values()].some(({ isEvaluated }) => isEvaluated) ? "evaluation" : "epoch";
  const metrics = [...new Set([...lines.values()].flatMap(({ metric }) => [...metric.keys()]))].filter((name) => (only ? only.includes(name) : isMetric(name)));
  const charts = [
    ...STEP_CHARTS.filter(([, column]) => !only || only.includes(column)).map(([title, column, options]) => ({ title, series: seriesOf("step", column), ...options })),
    ...metrics.map((name) => ({ title: `${words(name)} per ${kind}`, series: seriesOf("metric", name) })),
  ].filter((chart) => chart.series.length);
  if (!charts.length) return html`<p class="empty">These runs have no measurements yet.</p>`;
  return html`<div class="card shared"><${Legend} series=${names.map((label, index) => ({ label, index }))} hidden=${shared[0]} onHide=${shared[1]} /><${ChartTools}>${beside}<//></div>
    <div class="charts" role="group" aria-label="Charts">${charts.map((chart) => html`<${Chart} key=${`${against} ${chart.title}`} shared=${shared} against=${against} ...${chart} />`)}</div>`;
}
