// Several runs: their curves in one chart, their results, and differences of configuration and plan.

import { html, useState } from "./html.js";
import { useAnswer } from "./api.js";
import { Legend, looks, Swatch } from "./charts.js";
import { useRuns } from "./curves.js";
import { heading, many, number, plain } from "./format.js";
import { findRun, labelsOf, runs } from "./live.js";
import { Overlay } from "./overlay.js";
import { Spark, standing } from "./overview.js";
import { address, keep, route } from "./route.js";
import { Problem, Select, Table } from "./ui.js";

/** Most runs in a comparison: the server's limit. */
export const MOST_COMPARED = 20;
/** Most settings beside the results; all of them are in a table below. */
const MOST_SETTINGS = 5;

/** A row for each run: monitored metric, trend, test results, and the settings that differ. */
function Answers({ answer, ids }) {
  const rows = new Map(useRuns(ids).map((data) => [data.id, data.epochs.value]));
  const states = answer.runs.map((run) => standing(run, rows.get(run.id) ?? []));
  const metrics = new Set(states.filter(Boolean).map(({ name }) => name));
  const best = metrics.size === 1 ? (answer.runs[0].monitor_mode === "min" ? Math.min : Math.max)(...states.filter(Boolean).map((state) => state.best)) : undefined;
  const [metric] = metrics;
  const test = metric?.replace(/^val_/, "test_");
  const settings = answer.config.filter(({ key }) => key !== "name").slice(0, MOST_SETTINGS);
  const heads = ["Run", [metrics.size === 1 ? heading(metric) : "Best"], ["Epoch"], ["Last"], "Epochs", "Trend", [heading(test ?? "test")], ...settings.map(({ key }) => html`<span class="clip" title=${key}>${key.split(".").at(-1)}</span>`)];
  const cells = (run, at) => {
    const state = states[at];
    if (!state) return ["–", "–", "–", "", run.status, "–"];
    const top = state.best === best;
    return [html`<span class=${top ? "best" : ""}>${number(state.best)}${top ? " ★" : ""}<span class="unseen">${top ? " best" : ""}</span></span>`, number(state.bestEpoch), number(state.last), html`<${Spark} values=${state.values} />`, state.trend, number(run.final_metrics?.[test])];
  };
  const names = labelsOf(answer.runs);
  return html`<section class="card scroll-x metric-table answers" aria-label="Answer" tabindex="0">
    <${Table} label="Answer" heads=${heads} rows=${answer.runs.map((run, at) => [html`<${Swatch} ...${looks({ index: at })} /> <a class="clip" href=${address("run", [run.id])} title=${names[at]}>${names[at]}</a>`, ...cells(run, at), ...settings.map(({ values }) => plain(values[at]))])} />
  </section>`;
}

/** The rows whose numbers differ between the runs. */
const varied = (rows) => rows.filter(({ values }) => new Set(values.filter(Number.isFinite)).size > 1);

/** Most axes of the parallel coordinates: settings first, then results. */
const MOST_AXES = 10;

/** A line for each run through its numbers; each axis runs from the smallest to the largest value. */
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
      ? html`<${Table} heads=${["Name", ...labelsOf(heads)]} rows=${rows.map(({ key, values }) => [key, ...values.map(plain)])} />`
      : html`<p class="muted">${none}</p>`}
  </section>`;
}

/** The selected runs, or all runs with a tag, such as those of a sweep. */
export function Compare() {
  const { view, ids: refs, query } = route.value;
  const tag = view === "group" ? refs[0] : null;
  const tagged = (runs.value ?? []).filter((run) => run.tags.includes(tag)).map(({ id }) => id);
  const found = (tag ? tagged.slice(0, MOST_COMPARED) : refs).map((ref) => [ref, runs.value ? findRun(ref)?.id : ref]);
  const ids = [...new Set(found.map(([, id]) => id).filter(Boolean))];
  const gone = found.filter(([, id]) => !id).map(([ref]) => ref);
  const wanted = ids.map((id) => `run=${encodeURIComponent(id)}`).join("&");
  const states = (runs.value ?? []).filter((run) => ids.includes(run.id)).map((run) => run.status).join();
  const { found: answer, error } = useAnswer(ids.length > 1 ? `/compare?${wanted}` : null, [states]);
  // The mean over the seeds of a sweep, unless the link names another grouping.
  const repeated = ({ key, values }) => tag && !key.endsWith("seed") && new Set(values).size < values.length && key !== "name";
  const grouped = answer?.config.find(({ key }) => key === query.get("group")) ?? (query.has("group") ? null : answer?.config.find(repeated));
  const groups = grouped && new Map(answer.runs.map(({ id }, at) => [id, `${grouped.key.split(".").at(-1)} ${plain(grouped.values[at])}`]));
  return html`<div class="view">
    <div class="row between"><h1 class="clip">${tag ?? "Compare"}</h1><a class="button" href=${tag ? `#/runs?${new URLSearchParams({ filter: `tag:"${tag}"` })}` : address("runs")}>${tag ? `All ${many(tagged.length, "run")}` : "Choose runs…"}</a></div>
    ${gone.length > 0 && html`<p class="note">No longer in this folder: ${gone.join(", ")}</p>`}
    ${ids.length < 2 && html`<p class="empty">${tag ? "Fewer than two runs have this tag." : "Choose two runs or more in the table of runs."}</p>`}
    ${ids.length > 1 &&
    html`
      <${Problem} error=${error} />
      ${answer && html`<${Answers} answer=${answer} ids=${ids} />`}
      <${Overlay} ids=${ids} groups=${groups} beside=${answer && html`<${Select} label="Group by" kind="" value=${grouped?.key ?? ""} options=${[["", "No groups"], ...answer.config.map(({ key }) => key)]} onChange=${(key) => keep("group", key || (tag ? "none" : null))} />`} />
      ${answer &&
      html`
        <${Parallel} answer=${answer} />
        <${Differences} title="Results" rows=${answer.metrics} heads=${answer.runs} none="No results yet." />
        <${Differences} title="Differences in configuration" rows=${answer.config} heads=${answer.runs} none="The configurations are the same." />
        <${Differences} title="Differences in the plan" rows=${answer.plan} heads=${answer.runs} none="The plans are the same." />
      `}
    `}
  </div>`;
}
