// The answer of a run: its monitored metric, every metric by split, its changed settings and the work of its ranks.

import { html, useState } from "./html.js";
import { schema, tasks } from "./catalogue.js";
import { isMetric, milliseconds, perRank } from "./curves.js";
import { defaultOf } from "./draft.js";
import { clock, deviceWords, duration, heading, many, number, percent, plain, words } from "./format.js";
import { isGoing, monitored, took } from "./live.js";
import { Search, Table } from "./ui.js";

/** More metrics than this have a search field. */
const FEW_METRICS = 12;
/** Maximum number of ranks that are drawn: the slowest and the first ones. */
const MOST_RANKS = 16;

/** A line through `values`, as wide as a cell. */
export function Spark({ values }) {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return null;
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const points = values.flatMap((value, at) => (Number.isFinite(value) ? [`${(100 * at) / (values.length - 1)},${22 - (20 * (value - low)) / (high - low || 1)}`] : []));
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}

/** {name, best, bestEpoch, last, epoch, values, trend} of the monitored metric, or null. `rows`: those of metrics.json. */
export function standing(run, rows) {
  const metric = monitored(run);
  if (!metric) return null;
  const [name, best] = metric;
  const row = rows.findLast((one) => Number.isFinite(one[name])) ?? {};
  const since = row.epoch - run.best_epoch;
  const trend = !Number.isFinite(since) ? "" : since > 0 ? `no better for ${many(since, "epoch")}` : rows.length > 1 ? "still improving" : "";
  return { name, best, bestEpoch: run.best_epoch, last: row[name], epoch: row.epoch, values: rows.map((one) => one[name]), trend };
}

const SPLITS = { __proto__: null, train: "Training", val: "Validation", test: "Test" };

/** `val_loss` as ["val", "loss"]; a name without a split has "". */
const splitOf = (name) => {
  const [, split = "", rest = name] = /^(train|val|test)_(.+)$/.exec(name) ?? [];
  return [split, rest];
};

/** {columns: headings, rows: [[metric, value of each column, values over epochs], …]} */
function bySplit(run, rows) {
  const last = run.last_epoch ?? {};
  const [best, final] = [run.best_metric ?? {}, run.final_metrics ?? {}];
  const epoch = last.epoch ?? "–";
  const bestRow = rows.find((row) => row.epoch === run.best_epoch) ?? {};
  const same = run.best_epoch === last.epoch;
  const all = [
    ["Training", `epoch ${epoch}`, "train", last],
    ["Validation", `best: epoch ${run.best_epoch ?? "–"}`, "val", { ...bestRow, ...best }],
    ...(same ? [] : [["Validation", `epoch ${epoch}`, "val", last]]),
    ["Test", "best weights", "test", final],
    ["Value", `epoch ${epoch}`, "", { ...last, ...final }],
  ];
  const names = [...new Set([last, best, final].flatMap((values) => Object.keys(values)))].filter((name) => isMetric(name));
  const columns = all.filter(([, , split, values]) => names.some((name) => splitOf(name)[0] === split && Number.isFinite(values[name])));
  const quantities = [...new Set(names.map((name) => splitOf(name)[1]))];
  const nameOf = (split, quantity) => (split ? `${split}_${quantity}` : quantity);
  const curve = (quantity) => ["val", "", "train"].map((split) => rows.map((row) => row[nameOf(split, quantity)])).find((values) => values.some(Number.isFinite)) ?? [];
  return { columns: columns.map(([title, at]) => html`${title}<br /><span>${at}</span>`), rows: quantities.map((quantity) => [quantity, columns.map(([, , split, values]) => values[nameOf(split, quantity)]), curve(quantity)]) };
}

function Metrics({ run, rows }) {
  const [text, setText] = useState("");
  const table = bySplit(run, rows);
  if (!table.rows.length) return null;
  const shown = table.rows.filter(([name]) => words(name).toLowerCase().includes(text.toLowerCase()));
  return html`<section class="card stack" aria-label="Metrics">
    <div class="row between"><h2>Metrics</h2>${table.rows.length > FEW_METRICS && html`<${Search} label="Search metrics" text=${text} onSearch=${setText} />`}</div>
    <div class="scroll-x metric-table" tabindex="0"><${Table} label="Metrics" heads=${["Metric", ...table.columns.map((title) => [title]), "Epochs"]} rows=${shown.map(([name, values, curve]) => [heading(name), ...values.map((value) => number(value)), html`<${Spark} values=${curve} />`])} /></div>
  </section>`;
}

function Answer({ run, rows }) {
  const state = standing(run, rows);
  if (!state) return null;
  const [split] = splitOf(state.name);
  return html`<section class="card stack answer" aria-label="Answer">
    <h2 class="clip" title=${state.name}>${heading(state.name)}</h2>
    <p><strong class="large number">${number(state.best)}</strong> best${state.bestEpoch !== null && ` · epoch ${number(state.bestEpoch)}`}${split in SPLITS && ` · ${SPLITS[split].toLowerCase()}`}</p>
    <${Spark} values=${state.values} />
    ${Number.isFinite(state.last) && html`<p>Last <span class="number">${number(state.last)}</span> · epoch ${number(state.epoch)}${run.epochs ? ` of ${number(run.epochs)}` : ""}</p>`}
    ${state.trend && html`<p class="muted">${state.trend}</p>`}
  </section>`;
}

const HIDDEN = new Set(["name", "save_dir", "runs_dir", "task.name", "hardware.selected_devices"]);

/** The settings of a configuration as [key, value, default] that differ from those of its task. */
function changedSettings(config) {
  const task = tasks.value?.find(({ name }) => name === config.task.name) ?? null;
  const isSection = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const paths = Object.entries(config).flatMap(([section, value]) => (isSection(value) ? Object.entries(value).map(([name, inner]) => [[section, name], inner]) : [[[section], value]]));
  return paths
    .map(([path, value]) => [path.join("."), value, defaultOf(path, task)])
    .filter(([key, value, usual]) => !HIDDEN.has(key) && JSON.stringify(value ?? null) !== JSON.stringify(usual ?? null));
}

function Changed({ run, detail }) {
  if (!detail?.config || !schema.value || tasks.value?.some(({ waiting }) => waiting)) return null;
  const rows = changedSettings(detail.config);
  return html`<section class="card stack" aria-label="Changed settings">
    <h2>Differs from the defaults</h2>
    ${rows.length ? html`<dl class="facts-list">${rows.map(([key, value, usual]) => html`<dt key=${key} class="clip" title=${key}>${key}</dt><dd title=${`default: ${plain(usual)}`}>${plain(value)}</dd>`)}</dl>` : html`<p class="muted">No setting does.</p>`}
    ${run.git && html`<p class="muted">Commit <code title=${run.git.commit}>${run.git.commit.slice(0, 10)}</code>${run.git.clean ? "" : ", with changes that are not committed"}</p>`}
  </section>`;
}

/** Work, wait and memory of each rank, as of its newest measurement. */
function Ranks({ run, data }) {
  const stream = data?.stream("ranks");
  if (!stream) return null;
  const newest = (quantity) => new Map(perRank(stream, quantity).map(([rank, column]) => [rank, stream.column(column).findLast((value) => !Number.isNaN(value))]));
  const [work, wait, memory] = ["own_s", "wait_s", "memory_gb"].map(newest);
  const slow = stream.column("slow_rank")?.at(-1);
  const ranks = [...memory.keys()].toSorted((a, b) => (b === slow) - (a === slow));
  return html`<section class="card stack" aria-label="Ranks">
    <div class="row between"><h2>Ranks</h2><span class="muted">work of each step; the rest is waiting</span></div>
    <ul class="ranks">
      ${ranks.slice(0, MOST_RANKS).map((rank) => {
        const [seconds, waiting, gigabytes] = [work, wait, memory].map((values) => values.get(rank));
        const share = seconds / (seconds + waiting);
        const text = [Number.isFinite(seconds) && `${milliseconds(seconds)} work`, Number.isFinite(waiting) && `${milliseconds(waiting)} wait`, Number.isFinite(gigabytes) && `${number(gigabytes, 3)} GB`].filter(Boolean).join(" · ");
        return html`<li key=${rank}><span>${run.devices?.[rank] ?? ""} <span class="muted">rank ${rank}${rank === slow ? ", slow" : ""}</span></span>
          <progress aria-hidden="true" max="1" value=${Number.isFinite(share) ? share : 0}></progress>
          <span class="muted">${text}</span></li>`;
      })}
    </ul>
    ${ranks.length > MOST_RANKS && html`<p class="muted">${MOST_RANKS} of ${many(ranks.length, "rank")}</p>`}
  </section>`;
}

/** Samples per second, as in the chart: the newest value, or the mean over the training time of an ended run. */
function speedOf(run, steps) {
  const column = (name) => steps?.column(name)?.findLast(Number.isFinite);
  if (isGoing(run)) return column("samples_per_s");
  return column("samples_seen") / column("training_s");
}

function Progress({ run, steps }) {
  const share = run.progress ?? 0;
  const place = (noun, at, total) => at !== null && `${noun} ${number(at)}${total ? ` of ${number(total)}` : ""}`;
  const speed = speedOf(run, steps);
  const parts = [
    isGoing(run) && (run.starting ? "starting" : percent(share)),
    place("step", run.step, run.total_steps),
    place("epoch", run.epoch, run.epochs),
    Number.isFinite(speed) && `${number(speed, 3)} samples/s${isGoing(run) ? "" : " on average"}`,
    isGoing(run) ? run.eta_s !== null && `${duration(run.eta_s)} left` : took(run) >= 0 && `took ${duration(took(run))}`,
  ];
  return html`<section class="stack" aria-label="Progress">
    ${isGoing(run) && html`<progress aria-label="Progress of the run" max="1" value=${share}></progress>`}
    <p>${parts.filter(Boolean).join(" · ")}</p>
    ${run.status === "completed" && run.step < run.total_steps && html`<p class="note info">Early stopping: it ended at step ${number(run.step)} of ${number(run.total_steps)}${run.epochs ? `, epoch ${number(run.epoch)} of ${number(run.epochs)}` : ""}.</p>`}
  </section>`;
}

export const Facts = ({ run }) => html`<dl class="facts-list">
  <dt>Task</dt><dd class="clip" title=${run.task}>${run.task}</dd>
  <dt>Devices</dt><dd>${deviceWords(run.devices ?? []) || "–"}${run.strategy ? ` · ${run.strategy}` : ""}${run.precision ? ` · ${run.precision}` : ""}</dd>
  <dt>Started</dt><dd>${clock(run.started_at ?? run.created_at)}${run.attempt > 1 ? ` · attempt ${run.attempt}` : ""}</dd>
  <dt>Id</dt><dd class="mono">${run.id}</dd>
  <dt>Folder</dt><dd class="mono clip" title=${run.path}>${run.path}</dd>
</dl>`;

/** The first screen of a run. `data`: the run's curves, once loaded. */
export function Summary({ run, detail, data }) {
  const rows = data?.epochs.value ?? [];
  return html`
    <${Progress} run=${run} steps=${data?.stream("steps")} />
    <div class="summary"><${Answer} run=${run} rows=${rows} /><${Metrics} run=${run} rows=${rows} /><div class="stack"><${Changed} run=${run} detail=${detail} /><${Ranks} run=${run} data=${data} /></div></div>
  `;
}
