// Several runs: their curves in one chart, their results, and differences of configuration and plan.

import { html, useState } from "./html.js";
import { useAnswer } from "./api.js";
import { Chart, ChartTools, Legend } from "./charts.js";
import { epochLines, linesOverSteps, STEP_CHARTS, useRuns } from "./curves.js";
import { number, plain, words } from "./format.js";
import { findRun, runs } from "./live.js";
import { route } from "./route.js";
import { label } from "./runs.js";
import { Problem, Select, Table } from "./ui.js";

/** The lines of a run by kind and name; `evaluation` if it was evaluated between epochs. */
function linesOf(data) {
  const [steps, between, epochs] = [data.stream("steps"), data.stream("evaluations"), data.epochs.value];
  const step = STEP_CHARTS.map(([, name]) => [name, steps?.line(name)]).filter(([, line]) => line);
  return { step: new Map(step), epoch: epochLines(epochs), evaluation: linesOverSteps(epochs, between), evaluated: Boolean(between?.rows) };
}

/** The name of each run, with its id where several have the same. */
const labelsOf = (some) => some.map((run) => (some.filter((other) => label(other) === label(run)).length > 1 ? `${label(run)} (${run.id})` : label(run)));

function Overlay({ ids }) {
  const shared = useState([]);
  const lines = new Map(useRuns(ids).map((data) => [data.id, linesOf(data)]));
  const labels = labelsOf(ids.map((id) => findRun(id) ?? { id }));
  const series = (kind, name) => ids.map((id, index) => ({ label: labels[index], index, ...lines.get(id)?.[kind].get(name) })).filter(({ y }) => y);
  // If a run was evaluated between epochs, all evaluations are drawn over steps.
  const [kind, against] = ids.some((id) => lines.get(id)?.evaluated) ? ["evaluation", "step"] : ["epoch", "epoch"];
  const names = new Set(ids.flatMap((id) => [...(lines.get(id)?.[kind].keys() ?? [])]));
  const metrics = [...names].filter((name) => !/^(lr|.*_s|.*_share|samples_seen)$/.test(name));
  const charts = [
    ...STEP_CHARTS.map(([title, column, options]) => ({ title, against: "step", series: series("step", column), ...options })),
    ...metrics.map((name) => ({ title: `${words(name)} per ${kind}`, against, series: series(kind, name) })),
  ].filter((chart) => chart.series.length);
  if (!charts.length) return html`<p class="empty">These runs have no measurements yet.</p>`;
  return html`<div class="card shared"><${Legend} series=${labels.map((one, index) => ({ label: one, index }))} hidden=${shared[0]} onHide=${shared[1]} /><${ChartTools} /></div>
    <div class="charts" role="group" aria-label="Charts">${charts.map((chart) => html`<${Chart} key=${`${chart.against} ${chart.title}`} shared=${shared} ...${chart} />`)}</div>`;
}

/** The best value of a metric, if its name says which way is better and the values differ. */
function bestOf(key, values) {
  const known = values.filter(Number.isFinite);
  const name = key.split(".").at(-1);
  if (known.length < 2 || new Set(known).size < 2) return undefined;
  if (/loss|error|mse|mae|wer|cer|perplexity|seconds|duration/.test(name)) return Math.min(...known);
  return /acc|f1|precision|recall|score|auc|iou|bleu|samples_per_s/.test(name) ? Math.max(...known) : undefined;
}

/** The rows whose numbers differ between the runs. */
const varied = (rows) => rows.filter(({ values }) => new Set(values.filter(Number.isFinite)).size > 1);

/** Any two numbers of the runs against each other: settings, results. */
function Scatter({ answer }) {
  const rows = varied([...answer.config, ...answer.metrics]);
  const [chosen, setChosen] = useState([null, null]);
  if (rows.length < 2) return null;
  const names = rows.map(({ key }) => key);
  const pick = (at, fallback) => (names.includes(chosen[at]) ? chosen[at] : fallback);
  const x = pick(0, names[0]);
  const y = pick(1, [...varied(answer.metrics), ...rows].find(({ key }) => key !== x).key);
  const valuesOf = (key) => rows.find((row) => row.key === key).values;
  const points = answer.runs.map((run, at) => ({ label: labelsOf(answer.runs)[at], index: at, points: true, x: [valuesOf(x)[at]], y: [valuesOf(y)[at]] })).filter((one) => Number.isFinite(one.x[0]) && Number.isFinite(one.y[0]));
  const choice = (at, text, value) => html`<${Select} label=${text} value=${value} options=${names} onChange=${(name) => setChosen(chosen.map((one, place) => (place === at ? name : one)))} />`;
  return html`<section class="card stack" aria-label="Scatter">
    <div class="row wrap"><h2>Scatter</h2>${choice(0, "x", x)}${choice(1, "y", y)}</div>
    ${points.length ? html`<${Chart} key=${`${x} ${y}`} title=${`${y} against ${x}`} against=${x} fraction series=${points} height=${260} />` : html`<p class="muted">No run has both numbers.</p>`}
  </section>`;
}

/** Most axes of the parallel coordinates: settings first, then results. */
const MOST_AXES = 10;

/** A line for each run through its numbers, each on an axis from the least to the largest of the runs. */
function Parallel({ answer }) {
  const results = varied(answer.metrics);
  const axes = [...varied(answer.config).slice(0, Math.max(MOST_AXES - results.length, MOST_AXES / 2)), ...results].slice(0, MOST_AXES);
  const [hidden, setHidden] = useState([]);
  const names = labelsOf(answer.runs);
  if (axes.length < 2) return null;
  const scales = axes.map(({ values }) => [Math.min, Math.max].map((end) => end(...values.filter(Number.isFinite))));
  const place = (at) => 60 + at * 120;
  const level = (value, [least, most]) => 190 - (150 * (value - least)) / (most - least);
  const points = (run) => axes.flatMap(({ values }, at) => (Number.isFinite(values[run]) ? [`${place(at)},${level(values[run], scales[at])}`] : []));
  return html`<section class="card stack parallel" aria-label="Parallel coordinates">
    <h2>Parallel coordinates</h2>
    <div class="scroll-x" tabindex="0">
      <svg role="img" aria-label=${`${axes.map(({ key }) => key).join(", ")} of ${names.join(", ")}`} width=${place(axes.length - 1) + 60} height="220">
        ${axes.map(
          ({ key }, at) => html`<g key=${key}>
            <title>${key}</title>
            <line x1=${place(at)} x2=${place(at)} y1="40" y2="190" />
            <text x=${place(at)} y="14">${key.split(".").at(-1).replace(/^final /, "").slice(0, 18)}</text>
            <text x=${place(at)} y="32">${number(scales[at][1], 3)}</text>
            <text x=${place(at)} y="208">${number(scales[at][0], 3)}</text>
          </g>`,
        )}
        ${answer.runs.map((run, at) => html`<polyline key=${run.id} points=${points(at).join(" ")} class=${hidden.includes(names[at]) ? "faint" : ""} style=${{ stroke: `var(--series-${(at % 8) + 1})` }}><title>${names[at]}</title></polyline>`)}
      </svg>
    </div>
    <${Legend} series=${names.map((name, index) => ({ label: name, index }))} hidden=${hidden} onHide=${setHidden} />
  </section>`;
}

function Differences({ title, rows, heads, none }) {
  return html`<section class="card scroll-x differences" aria-label=${title} tabindex="0">
    <h2>${title}</h2>
    ${rows.length
      ? html`<${Table} heads=${["Name", ...labelsOf(heads)]} rows=${rows.map(({ key, values }) => [key, ...values.map((value) => [plain(value), value === bestOf(key, values) && html`<span class="unseen"> best</span>`])])} classOf=${(row, at) => (rows[row].values[at] === bestOf(rows[row].key, rows[row].values) ? "best" : "")} />`
      : html`<p class="muted">${none}</p>`}
  </section>`;
}

export function Compare() {
  const found = route.value.ids.map((ref) => [ref, runs.value ? findRun(ref)?.id : ref]);
  const ids = [...new Set(found.map(([, id]) => id).filter(Boolean))];
  const gone = found.filter(([, id]) => !id).map(([ref]) => ref);
  const wanted = ids.map((id) => `run=${encodeURIComponent(id)}`).join("&");
  const states = (runs.value ?? []).filter((run) => ids.includes(run.id)).map((run) => run.status).join();
  const { found: answer, error } = useAnswer(ids.length > 1 ? `/compare?${wanted}` : null, [states]);
  return html`<div class="view">
    <div class="row between"><h1>Compare</h1><a class="button" href="#/runs">Choose runs…</a></div>
    ${gone.length > 0 && html`<p class="note">No longer in this folder: ${gone.join(", ")}</p>`}
    ${ids.length < 2 && html`<p class="empty">Choose two runs or more in the table of runs.</p>`}
    ${ids.length > 1 &&
    html`
      <${Problem} error=${error} />
      <${Overlay} ids=${ids} />
      ${answer &&
      html`
        <${Scatter} answer=${answer} />
        <${Parallel} answer=${answer} />
        <${Differences} title="Results" rows=${answer.metrics} heads=${answer.runs} none="No results yet." />
        <${Differences} title="Differences in configuration" rows=${answer.config} heads=${answer.runs} none="The configurations are the same." />
        <${Differences} title="Differences in the plan" rows=${answer.plan} heads=${answer.runs} none="The plans are the same." />
      `}
    `}
  </div>`;
}
