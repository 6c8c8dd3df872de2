// The right column: the state and results of a run.

import { html, useEffect, useState } from "./html.js";
import { get, post, runPath } from "./api.js";
import { studio } from "./catalogue.js";
import { Curves } from "./curves.js";
import { planned } from "./draft.js";
import { clock, deviceWords, duration, number, percent, words } from "./format.js";
import { isGoing, jobs, runs } from "./live.js";
import { EvaluateDialog, ExportDialog, Job, ResumeDialog } from "./afterwards.js";
import { route } from "./route.js";
import { label } from "./runs.js";
import { Badge, Button, Copy, Problem, tell, tellError } from "./ui.js";

/** Decisions of a plan with their reasons. */
function Decisions({ decisions }) {
  return html`<div class="card scroll-x">
    <h2>The plan</h2>
    <table>
      <thead>
        <tr><th scope="col">Decision</th><th scope="col">Value</th><th scope="col">Why</th></tr>
      </thead>
      <tbody>
        ${Object.values(decisions).map(
          ({ key, title, shown, reason }) => html`<tr key=${key}><th scope="row">${title}</th><td>${shown}</td><td class="muted">${reason}</td></tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function NotStarted() {
  const { answer } = planned.value;
  return html`
    <div class="head"><h1>Not started</h1></div>
    <div class="scroll" tabindex="0" role="group" aria-label="State of the run">
      <div class="state">
        <p class="muted">Select devices and a task, then press Run. A run continues when this page or the studio is closed.</p>
        ${answer?.notes.map(({ text }) => html`<p key=${text} class="note">${text}</p>`)}
        ${answer?.plan && html`<${Decisions} decisions=${answer.plan.decisions} />`}
      </div>
    </div>
  `;
}

/** The details of a run: fetched when it is selected and when its status changes. */
function useDetail(run) {
  const [found, setFound] = useState({ detail: null, error: null });
  useEffect(() => {
    const abort = new AbortController();
    get(runPath(run.id), abort.signal).then(
      (detail) => setFound({ detail, error: null }),
      (error) => error.name !== "AbortError" && setFound({ detail: null, error }),
    );
    return () => abort.abort();
  }, [run.id, run.status, run.attempt, run.starting]);
  return found.detail?.id === run.id || found.error ? found : { detail: null, error: null };
}

function Metric({ name, value }) {
  return html`<div><dt>${name}</dt><dd title=${String(value)}>${value}</dd></div>`;
}

function Progress({ run }) {
  const share = run.progress ?? 0;
  return html`<section class="stack" aria-label="Progress">
    <div class="progress" role="progressbar" aria-label="Progress of the run" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share * 100)}>
      <span style=${{ width: `${share * 100}%` }}></span>
    </div>
    <dl class="metrics">
      <${Metric} name="Progress" value=${run.starting ? "starting" : percent(share)} />
      <${Metric} name="Step" value=${`${number(run.step)} / ${number(run.total_steps)}`} />
      <${Metric} name="Epoch" value=${`${number(run.epoch)} / ${number(run.epochs)}`} />
      <${Metric} name="ETA" value=${duration(run.eta_s ?? NaN)} />
      <${Metric} name="Samples/s" value=${number(run.samples_per_s, 3)} />
    </dl>
  </section>`;
}

function Finished({ run }) {
  const entries = Object.entries(run.final_metrics ?? {});
  const took = (Date.parse(run.completed_at) - Date.parse(run.started_at)) / 1000;
  return html`<section class="stack" aria-label="Final metrics">
    <dl class="metrics">
      ${entries.map(([name, value]) => html`<${Metric} key=${name} name=${words(name)} value=${number(value)} />`)}
      ${Object.entries(run.best_metric ?? {}).map(
        ([name, value]) => html`<${Metric} key=${`best-${name}`} name=${`best ${words(name)}`} value=${number(value)} />`,
      )}
      ${run.best_epoch !== null && html`<${Metric} name="Best epoch" value=${number(run.best_epoch)} />`}
      ${took >= 0 && html`<${Metric} name="Took" value=${duration(took)} />`}
    </dl>
  </section>`;
}

const ENDS = {
  failed: "The run failed.",
  lost: "The run's process ended without a final status: it was killed, or the machine went down. Checkpoints are kept.",
  stopped: "The run was stopped.",
};

/** What happened, at which step, and the last output of the run. */
function Ended({ run, detail }) {
  return html`<section class="stack" aria-label="How it ended">
    <p class="note ${run.status === "stopped" ? "warn" : "bad"}">
      ${ENDS[run.status]} ${run.step !== null && html`Step ${number(run.step)} of ${number(run.total_steps)}.`}
      ${detail?.checkpoints.length > 0 && html` Newest checkpoint: step ${number(Math.max(...detail.checkpoints.map(({ step }) => step)))}.`}
    </p>
    ${run.resume_error && html`<p class="note bad" role="alert">The last resume did not start an attempt. Its output:</p>
      <pre class="wrap log" tabindex="0" aria-label="Why it was not resumed">${run.resume_error}</pre>`}
    ${run.error && html`<pre class="wrap log" tabindex="0" aria-label="Failure">${run.error}</pre>`}
    ${detail?.start_output && !run.resume_error && detail.start_output !== run.error && html`<pre class="wrap log" tabindex="0" aria-label="Output of the command">${detail.start_output}</pre>`}
  </section>`;
}

function Log({ run, names }) {
  const [name, setName] = useState(null);
  const [log, setLog] = useState(null);
  const chosen = names.includes(name) ? name : names[0];
  useEffect(() => {
    if (!chosen) return undefined;
    let over = false;
    const read = () =>
      get(runPath(run.id, `/log?name=${encodeURIComponent(chosen)}&tail=200`)).then((found) => over || setLog(found), () => over || setLog(null));
    read();
    const timer = isGoing(run) ? setInterval(read, 3000) : 0;
    return () => {
      over = true;
      clearInterval(timer);
    };
  }, [run.id, run.status, chosen]);
  if (!chosen) return null;
  return html`<div class="stack">
    <label class="row">
      File
      <select class="input" value=${chosen} onChange=${(event) => setName(event.currentTarget.value)}>
        ${names.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
    </label>
    <pre class="wrap log" tabindex="0" aria-label="Log">${log?.lines.join("\n") || "the log is empty"}</pre>
  </div>`;
}

function Details({ run, detail }) {
  return html`
    <details class="card" open=${run.status === "failed" || run.status === "lost"}>
      <summary><h2 style=${{ display: "inline" }}>Log</h2></summary>
      <${Log} run=${run} names=${detail.logs} />
    </details>
    <details class="card">
      <summary><h2 style=${{ display: "inline" }}>Configuration and plan</h2></summary>
      <div class="stack">
        <div class="row between"><h2 class="eyebrow">Command</h2><${Copy} text=${detail.command_text} label="Copy the run's command" /></div>
        <pre class="wrap" tabindex="0" aria-label="Command of the run">${detail.command_text}</pre>
        <div class="row between"><h2 class="eyebrow">config.yaml</h2><${Copy} text=${detail.config_yaml} label="Copy the run's YAML" /></div>
        <pre class="log" tabindex="0" aria-label="YAML of the run">${detail.config_yaml}</pre>
        ${detail.plan && html`<${Decisions} decisions=${detail.plan.decisions} />`}
      </div>
    </details>
  `;
}

function Facts({ run }) {
  return html`<dl class="facts-list">
    <dt>Task</dt><dd>${run.task}</dd>
    <dt>Devices</dt><dd>${deviceWords(run.devices ?? []) || "–"}${run.strategy ? ` · ${run.strategy}` : ""}${run.precision ? ` · ${run.precision}` : ""}</dd>
    <dt>Started</dt><dd>${clock(run.started_at ?? run.created_at)}${run.attempt > 1 ? ` · attempt ${run.attempt}` : ""}</dd>
    <dt>Folder</dt><dd class="mono">${run.path}</dd>
  </dl>`;
}

function Stop({ run }) {
  const stop = async () => {
    try {
      const { kill_after_s: limit } = await post(runPath(run.id, "/stop"));
      tell(`Stopping after a checkpoint; the run is killed if that takes longer than ${duration(limit)}`);
    } catch (error) {
      tellError(error);
    }
  };
  const why = run.stopping ? `stopping: a checkpoint first, ended after ${duration(studio.value?.kill_after_s)} at the latest` : "";
  return html`<${Button} kind="danger" why=${why} onClick=${stop}>${run.stopping ? "Stopping…" : "Stop"}<//>`;
}

function Actions({ run, detail, onDialog }) {
  if (isGoing(run)) return html`<${Stop} run=${run} />`;
  const resume = run.status !== "completed" && detail?.resumable;
  const saved = detail?.checkpoints.length > 0;
  return html`
    ${resume && html`<${Button} kind="primary" onClick=${() => onDialog("resume")}>Resume…<//>`}
    ${detail && html`<a class="button" href=${`/api${runPath(run.id, "/report")}`} target="_blank" rel="noopener" title="Curves, settings and plan on one page, in a new tab">Report</a>`}
    ${saved && html`<${Button} onClick=${() => onDialog("evaluate")}>Evaluate…<//><${Button} onClick=${() => onDialog("export")}>Export…<//>`}
  `;
}

const DIALOGS = { resume: ResumeDialog, evaluate: EvaluateDialog, export: ExportDialog };

function Chosen({ run }) {
  const { detail, error } = useDetail(run);
  const [dialog, setDialog] = useState(null);
  const Open = DIALOGS[dialog];
  const ours = [...(detail?.jobs ?? []), ...Object.values(jobs.value).filter((job) => job.run === run.id)];
  const newest = [...new Map(ours.map((job) => [job.id, jobs.value[job.id] ?? job])).values()];
  return html`
    <div class="head">
      <h1 class="clip" title=${run.id}>${label(run)}</h1>
      <${Badge} status=${run.status} />
      <${Actions} run=${run} detail=${detail} onDialog=${setDialog} />
    </div>
    <div class="scroll" tabindex="0" role="group" aria-label="State of the run">
      <div class="state">
        <p class="unseen" role="status">${label(run)}: ${run.status}</p>
        ${isGoing(run) && html`<${Progress} run=${run} />`}
        ${run.status === "completed" && html`<${Finished} run=${run} />`}
        ${run.status in ENDS && html`<${Ended} run=${run} detail=${detail} />`}
        ${newest.map((job) => html`<${Job} key=${job.id} job=${job} />`)}
        <${Curves} key=${run.id} id=${run.id} />
        <${Facts} run=${run} />
        <${Problem} error=${error} />
        ${detail && html`<${Details} run=${run} detail=${detail} />`}
      </div>
    </div>
    ${Open && html`<${Open} run=${run} detail=${detail} onClose=${() => setDialog(null)} />`}
  `;
}

export function State() {
  const { run: id } = route.value;
  if (!id) return html`<${NotStarted} />`;
  if (runs.value === null) return html`<div class="head"><h1>State</h1></div><p class="empty" role="status">Loading the run…</p>`;
  const run = runs.value.find((one) => one.id === id) ?? runs.value.find((one) => one.location === id);
  if (!run) return html`<div class="head"><h1>State</h1></div><p class="empty">There is no run ${id} here; it may have been deleted.</p>`;
  return html`<${Chosen} key=${run.id} run=${run} />`;
}
