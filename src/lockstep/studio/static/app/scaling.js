// Reports of `lockstep bench scaling`: the speed-up of more devices, compared with linear scaling.

import { html, useState } from "./html.js";
import { post, useAnswer } from "./api.js";
import { Job, newestJobs } from "./afterwards.js";
import { DeviceChoice } from "./hardware.js";
import { devices, tasks } from "./catalogue.js";
import { Chart } from "./charts.js";
import { clock, gigabytes, number, percent } from "./format.js";
import { jobs, takeJob } from "./live.js";
import { Button, Problem, Select, Table, showError } from "./ui.js";

const CHARTS = [
  ["Speed-up", "speed_up", (ranks) => ranks, {}],
  ["Efficiency", "efficiency", () => 1, { format: percent }],
  ["Peak memory per rank", "peak_memory", null, { format: gigabytes }],
  ["Time for an epoch, s", "epoch_s", null, {}],
  ["Utilisation, mean of the devices", "utilisation", null, { format: percent }],
];

/**
 * A line for each strategy and kind of scaling (strong: a fixed global batch, weak: a fixed batch per device), and the
 * ideal. All lines of a kind begin with one device, which has no strategy.
 */
function lines(points, column, ideal) {
  const several = points.filter(({ ranks }) => ranks > 1);
  const kinds = new Map(several.map(({ strategy, mode }) => [`${strategy} ${mode}`, { strategy, mode }]));
  const measured = [...kinds].map(([label, kind]) => {
    const rows = points.filter((row) => row.mode === kind.mode && (row.ranks === 1 || row.strategy === kind.strategy) && Number.isFinite(row[column]));
    return { label, x: rows.map(({ ranks }) => ranks), y: rows.map((row) => row[column]), points: true };
  });
  const x = [...new Set(points.map(({ ranks }) => ranks))].sort((a, b) => a - b);
  const all = ideal ? [...measured, { label: "ideal", x, y: x.map(ideal), dash: true }] : measured;
  return all.filter((one) => one.y.length);
}

const mean = (shares) => (Array.isArray(shares) ? shares.reduce((sum, share) => sum + share, 0) / shares.length : NaN);

function Report({ report }) {
  const rows = Array.isArray(report.report.rows) ? report.report.rows.filter((row) => row?.status === "ok") : [];
  const points = rows.map((row) => ({ ...row, peak_memory: row.memory_mb * 1e6, utilisation: mean(row.utilisation_per_device) })).sort((a, b) => a.ranks - b.ranks);
  return html`<section class="card stack" aria-label=${report.title}>
    <div class="row between"><h2>${report.title}</h2><span class="muted">${clock(report.created_at)}</span></div>
    ${report.report.verdict && html`<p>${report.report.verdict}</p>`}
    ${(report.report.notes ?? []).map((note) => html`<p key=${note} class="note">${note}</p>`)}
    ${points.length
      ? html`<div class="charts">
            ${CHARTS.map(([title, column, ideal, options]) => {
              const series = lines(points, column, ideal);
              const measured = series.some(({ dash }) => !dash);
              return measured && html`<${Chart} key=${title} title=${title} series=${series} against="rank" canLog=${false} ...${options} />`;
            })}
          </div>
          <div class="scroll-x" tabindex="0">
            <${Table}
              heads=${["Devices", "Strategy", "Kind", ...["Samples/s", "Speed-up", "Efficiency", "Peak memory", "Epoch, s", "Utilisation"].map((head) => [head])]}
              rows=${points.map((point) => [point.ranks, point.strategy, point.mode, number(point.samples_per_s, 3), number(point.speed_up, 3), percent(point.efficiency), gigabytes(point.peak_memory), number(point.epoch_s, 3), percent(point.utilisation)])}
            />
          </div>`
      : html`<pre class="log" tabindex="0" aria-label="Report">${JSON.stringify(report.report, null, 2)}</pre>`}
  </section>`;
}

function Start({ busy, onStart }) {
  const [task, setTask] = useState("har");
  const [chosen, setChosen] = useState(devices.value.default);
  const why = chosen.length < 2 ? "two devices or ranks are needed to compare" : "";
  const start = () => post("/scaling", { task, devices: chosen, config: {} }).then(onStart, showError);
  return html`<section class="card stack measure" aria-label="Measure">
    <${Select} label="Task" value=${task} options=${tasks.value.map(({ name }) => name)} onChange=${setTask} />
    <${DeviceChoice} chosen=${chosen} onChoose=${setChosen} />
    <div class="row">
      <${Button} kind="primary" why=${why} busy=${busy} onClick=${start}>Measure scaling<//>
      ${why && html`<span class="muted">${why}</span>`}
    </div>
  </section>`;
}

export function Scaling() {
  const over = Object.values(jobs.value).filter(({ kind, status }) => kind === "scaling" && status !== "running").length;
  const { found, error } = useAnswer("/scaling", [over]);
  const list = newestJobs(found?.jobs, ({ kind }) => kind === "scaling");
  return html`<div class="view">
    <h1>Scaling</h1>
    <${Problem} error=${error} />
    ${found && !(devices.value && tasks.value) && html`<p class="empty" role="status">Loading devices and tasks…</p>`}
    ${found && devices.value && tasks.value && html`<${Start} busy=${list.some(({ status }) => status === "running")} onStart=${takeJob} />`}
    ${list.filter(({ status }) => status !== "done").map((job) => html`<${Job} key=${job.id} job=${job} />`)}
    ${found?.reports.map((report) => html`<${Report} key=${report.id} report=${report} />`)}
    ${found?.reports.length === 0 && html`<p class="empty">No measurements yet.</p>`}
  </div>`;
}
