// Actions on a run that has ended: resume on other devices, evaluate, export.

import { html, useEffect, useState } from "./html.js";
import { API, post, runPath } from "./api.js";
import { devices } from "./catalogue.js";
import { DeviceChoice, usable } from "./devices.js";
import { duration, number, plain, words } from "./format.js";
import { jobs, merge, takeJob } from "./live.js";
import { Badge, Button, Dialog, Problem, Select, tellError, Tick } from "./ui.js";

/** The run's devices that this machine has too. */
function devicesFor(run) {
  const still = (run.devices ?? []).filter((id) => usable().includes(id));
  return still.length ? still : (devices.value?.default ?? []);
}

export function ResumeDialog({ run, onClose }) {
  const [chosen, setChosen] = useState(() => devicesFor(run));
  const [rescale, setRescale] = useState(false);
  const longer = run.status === "completed";
  const [epochs, setEpochs] = useState(longer ? String((run.epochs ?? 0) + 10) : "");
  const [preview, setPreview] = useState({ command: "", error: null });
  const request = { devices: chosen, rescale_batch: rescale, epochs: longer ? Number(epochs) : null, max_steps: null };
  useEffect(() => {
    let over = false;
    if (!chosen.length || (longer && !(Number(epochs) > run.epochs))) return setPreview({ command: "", error: null });
    post(runPath(run.id, "/resume/preview"), request).then(
      ({ command }) => over || setPreview({ command, error: null }),
      (error) => over || setPreview({ command: "", error }),
    );
    return () => (over = true);
  }, [chosen, rescale, epochs]);
  const resume = async () => merge([await post(runPath(run.id, "/resume"), request)], []);
  return html`<${Dialog} title="Resume run" submit="Resume" onClose=${onClose} onSubmit=${resume} why=${!chosen.length ? "no device is selected" : longer && !(Number(epochs) > run.epochs) ? `more than ${run.epochs} epochs` : ""}>
    <p class="muted">Resumes from the latest checkpoint, on any devices, with the samples that the run has not seen yet.</p>
    ${longer && html`<label class="row">Epochs in all<input class="input number" inputmode="numeric" value=${epochs} onInput=${(event) => setEpochs(event.currentTarget.value)} /></label>`}
    <${DeviceChoice} chosen=${chosen} onChoose=${setChosen} />
    <${Tick} on=${rescale} onTick=${setRescale}>Let the global batch follow the devices (otherwise it stays as it was)<//>
    ${preview.command && html`<pre class="wrap" aria-label="Command">${preview.command}</pre>`}
    <${Problem} error=${preview.error} />
  <//>`;
}

function CheckpointChoice({ detail, value, onChange }) {
  const steps = detail.checkpoints.map(({ step, last, best }) => [String(step), `step ${number(step)}${last ? " (last)" : ""}${best ? " (best)" : ""}`]);
  return html`<${Select} label="Checkpoint" kind="stack" value=${value} options=${["best", "last", ...steps]} onChange=${onChange} />`;
}

export function EvaluateDialog({ run, detail, onClose }) {
  const [split, setSplit] = useState("test");
  const [checkpoint, setCheckpoint] = useState("best");
  const start = async () => takeJob(await post(runPath(run.id, "/evaluate"), { split, checkpoint, device: null }));
  return html`<${Dialog} title="Evaluate run" submit="Evaluate" onClose=${onClose} onSubmit=${start}>
    <${Select} label="Data" kind="stack" value=${split} options=${["test", ["val", "validation"]]} onChange=${setSplit} />
    <${CheckpointChoice} detail=${detail} value=${checkpoint} onChange=${setCheckpoint} />
  <//>`;
}

export function ExportDialog({ run, detail, onClose }) {
  const [checkpoint, setCheckpoint] = useState("best");
  const [program, setProgram] = useState(true);
  const start = async () => takeJob(await post(runPath(run.id, "/export"), { checkpoint, program }));
  return html`<${Dialog} title="Export run" submit="Export" onClose=${onClose} onSubmit=${start}>
    <${CheckpointChoice} detail=${detail} value=${checkpoint} onChange=${setCheckpoint} />
    <${Tick} on=${program} onTick=${setProgram}>The model as a program that needs no Python source, besides its weights<//>
    <p class="muted">The files go to <code>export/</code> in the run's folder.</p>
  <//>`;
}

/** Those of `found` and of the live connection that are `wanted`, each as it is now. */
export const newestJobs = (found, wanted) => {
  const all = [...found, ...Object.values(jobs.value).filter(wanted)];
  return [...new Map(all.map((job) => [job.id, jobs.value[job.id] ?? job])).values()];
};

/** A command started from the page: progress and Stop while it runs, then its result or error. */
export function Job({ job }) {
  const running = job.status === "running";
  const took = job.ended_at ? (Date.parse(job.ended_at) - Date.parse(job.started_at)) / 1000 : null;
  const rows = job.result && typeof job.result === "object" ? Object.entries(job.result.metrics ?? job.result) : [];
  const doing = job.output.split("\n").at(-1);
  const [, done, all] = /([\d,]+) of ([\d,]+)/.exec(doing)?.map((text) => Number(text.replaceAll(",", ""))) ?? [];
  const stop = () => post(`/jobs/${job.id}/stop`).then(takeJob, tellError);
  return html`<section class="card stack" aria-label=${`${job.kind} ${job.status}`}>
    <div class="row">
      <h2 class="grow">${words(job.kind[0].toUpperCase() + job.kind.slice(1))}</h2>
      ${took !== null && html`<span class="muted">${duration(took)}</span>`}
      <${Badge} status=${job.status === "done" ? "completed" : job.status} />
      ${running && html`<${Button} kind="small danger" busy=${job.stopping} onClick=${stop}>${job.stopping ? "Stopping…" : "Stop"}<//>`}
    </div>
    <code class="muted">${job.command_text}</code>
    ${running && html`<progress aria-label=${`Progress of ${job.kind}`} max=${all} value=${done}></progress><p class="muted" role="status">${doing || "starting…"}</p>`}
    ${job.kind === "report" && job.status === "done" && html`<p><a class="button" href=${`${API}/jobs/${job.id}/report`} target="_blank" rel="noopener">Open the report</a></p>`}
    ${job.kind !== "report" && rows.length > 0 &&
    html`<dl class="facts-list">${rows.map(([name, value]) => html`<dt key=${name}>${words(name)}</dt><dd>${plain(value)}</dd>`)}</dl>`}
    <${Problem} error=${job.error} />
  </section>`;
}
