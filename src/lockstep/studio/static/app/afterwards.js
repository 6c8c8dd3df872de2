// Actions on a run that has ended: resume on other devices, evaluate, export.

import { html, useState } from "./html.js";
import { API, post, runPath, useAnswer } from "./api.js";
import { devices, usable } from "./catalogue.js";
import { DeviceChoice } from "./hardware.js";
import { duration, heading, number, plain, words } from "./format.js";
import { jobs, merge, takeJob } from "./live.js";
import { Badge, Button, Dialog, Problem, Select, showError, Tick } from "./ui.js";

/** The step of the checkpoint that a resume reads, or null without one. */
export const newestStep = (detail) => detail?.checkpoints.at(-1)?.step ?? null;

export function ResumeDialog({ run, detail, onClose }) {
  const still = (run.devices ?? []).filter((id) => usable().includes(id));
  const [chosen, setChosen] = useState(still.length ? still : (devices.value?.default ?? []));
  const [rescale, setRescale] = useState(false);
  const longer = run.status === "completed";
  const [epochs, setEpochs] = useState(longer ? String((run.epochs ?? 0) + 10) : "");
  const request = { devices: chosen, rescale_batch: rescale, epochs: longer ? Number(epochs) : null };
  const why = !chosen.length ? "no device is selected" : longer && !(Number(epochs) > run.epochs) ? `more than ${run.epochs} epochs` : "";
  const { found, error } = useAnswer(why ? null : runPath(run.id, "/resume/preview"), [chosen, rescale, epochs], { body: request });
  const resume = async () => merge([await post(runPath(run.id, "/resume"), request)], []);
  const step = newestStep(detail);
  return html`<${Dialog} title=${step === null ? "Start run again" : "Resume run"} submit=${step === null ? "Start again" : "Resume"} onClose=${onClose} onSubmit=${resume} why=${why}>
    <p class="muted">${step === null ? "This run has no checkpoint: it starts again at step 0, and the curves so far are left out." : `Resumes from the checkpoint of step ${number(step)}, on any devices, with the samples that the run has not seen yet.`}</p>
    ${longer && html`<label class="row">Epochs in all<input class="input number" inputmode="numeric" value=${epochs} onInput=${(event) => setEpochs(event.currentTarget.value)} /></label>`}
    <${DeviceChoice} chosen=${chosen} onChoose=${setChosen} />
    <${Tick} on=${rescale} onTick=${setRescale}>Let the global batch follow the devices (otherwise it stays as it was)<//>
    ${found && html`<pre class="wrap" aria-label="Command">${found.command}</pre>`}
    <${Problem} error=${error} />
  <//>`;
}

/** A dialog that starts a job on one of the run's checkpoints, with what else is `asked`. */
function JobDialog({ run, detail, onClose, kind, asked, children }) {
  const [checkpoint, setCheckpoint] = useState("best");
  const steps = detail.checkpoints.map(({ step, last, best }) => [String(step), `step ${number(step)}${last ? " (last)" : ""}${best ? " (best)" : ""}`]);
  const start = async () => takeJob(await post(runPath(run.id, `/${kind}`), { ...asked, checkpoint }));
  return html`<${Dialog} title=${`${heading(kind)} run`} submit=${heading(kind)} onClose=${onClose} onSubmit=${start}>
    <${Select} label="Checkpoint" kind="stack" value=${checkpoint} options=${["best", "last", ...steps]} onChange=${setCheckpoint} />
    ${children}
  <//>`;
}

export function EvaluateDialog(given) {
  const [split, setSplit] = useState("test");
  return html`<${JobDialog} ...${given} kind="evaluate" asked=${{ split }}><${Select} label="Data" kind="stack" value=${split} options=${["test", ["val", "validation"]]} onChange=${setSplit} /><//>`;
}

export function ExportDialog(given) {
  const [program, setProgram] = useState(true);
  return html`<${JobDialog} ...${given} kind="export" asked=${{ program }}>
    <${Tick} on=${program} onTick=${setProgram}>The model as a program that needs no Python source, besides its weights<//>
    <p class="muted">The files go to <code>export/</code> in the run's folder.</p>
  <//>`;
}

/** Those of `found` and of the live connection that are `wanted`, each as it is now, newest first. */
export const newestJobs = (found, wanted) => {
  const all = [...(found ?? []), ...Object.values(jobs.value).filter(wanted)];
  return [...new Map(all.map((job) => [job.id, jobs.value[job.id] ?? job])).values()].sort((a, b) => (a.started_at < b.started_at ? 1 : -1));
};

/** A command started from the page: progress and Stop while it runs, then its result or error. */
export function Job({ job }) {
  const running = job.status === "running";
  const took = job.ended_at ? (Date.parse(job.ended_at) - Date.parse(job.started_at)) / 1000 : null;
  const rows = job.result && typeof job.result === "object" ? Object.entries(job.result.metrics ?? job.result) : [];
  const doing = job.output.split("\n").at(-1);
  const [, done, all] = /([\d,]+) of ([\d,]+)/.exec(doing)?.map((text) => Number(text.replaceAll(",", ""))) ?? [];
  const stop = () => post(`/jobs/${job.id}/stop`).then(takeJob, showError);
  return html`<section class="card stack" aria-label=${`${job.kind} ${job.status}`}>
    <div class="row">
      <h2 class="grow">${heading(job.kind)}</h2>
      ${took !== null && html`<span class="muted">${duration(took)}</span>`}
      <${Badge} status=${job.status === "done" ? "completed" : job.status} />
      ${running && html`<${Button} kind="small danger" busy=${job.stopping} onClick=${stop}>${job.stopping ? "Stopping…" : "Stop"}<//>`}
    </div>
    <code class="muted">${job.command}</code>
    ${running && html`<progress aria-label=${`Progress of ${job.kind}`} max=${all} value=${done}></progress><p class="muted" role="status">${doing || "starting…"}</p>`}
    ${job.kind === "report" && job.status === "done" && html`<p><a class="button" href=${`${API}/jobs/${job.id}/report`} target="_blank" rel="noopener">Open the report</a></p>`}
    ${job.kind !== "report" && rows.length > 0 &&
    html`<dl class="facts-list">${rows.map(([name, value]) => html`<dt key=${name}>${words(name)}</dt><dd>${plain(value)}</dd>`)}</dl>`}
    <${Problem} error=${job.error} />
  </section>`;
}
