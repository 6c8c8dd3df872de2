// This machine: its devices and who uses them, and the results of `lockstep doctor`.

import { html, useEffect, useState } from "./html.js";
import { post, useAnswer } from "./api.js";
import { Job, newestJobs } from "./afterwards.js";
import { coresOf, DeviceChoice, deviceTitle, processText, runsOn } from "./hardware.js";
import { devices, freeDevices, refreshDevices, studio } from "./catalogue.js";
import { tick } from "./draft.js";
import { clock, deviceWords, gigabytes, number, percent } from "./format.js";
import { isGoing, label, runs, takeJob } from "./live.js";
import { address, drawer } from "./route.js";
import { Badge, Button, Problem, showError, Tick } from "./ui.js";

const WORST_FIRST = ["fail", "warn", "ok", "skip"];

function Finding({ finding }) {
  return html`<li class="card stack">
    <div class="row"><${Badge} status=${finding.status} /><h2 class="grow">${finding.name}</h2><span class="muted">${finding.node}</span></div>
    <p>${finding.what}</p>
    <p class="muted">${finding.why}</p>
    ${finding.fix && html`<p><strong>Fix:</strong> ${finding.fix}</p>`}
  </li>`;
}

function Doctor() {
  const [chosen, setChosen] = useState([]);
  const [quick, setQuick] = useState(true);
  const { found, error } = useAnswer("/jobs", []);
  const job = newestJobs(found?.jobs, () => true).find(({ kind }) => kind === "doctor");
  const start = () => post("/doctor", { devices: chosen.length ? chosen : null, quick }).then(takeJob, showError);
  const findings = [...(job?.result?.findings ?? [])].sort((a, b) => WORST_FIRST.indexOf(a.status) - WORST_FIRST.indexOf(b.status));
  return html`<h1>Doctor</h1>
    <section class="card stack measure" aria-label="Check">
      <p class="muted">Check whether this machine is ready for training on several devices. If none is selected, every GPU is checked, or two ranks on the CPU.</p>
      <${DeviceChoice} chosen=${chosen} onChoose=${setChosen} />
      <${Tick} on=${quick} onTick=${setQuick}>Quick: start no ranks<//>
      <div class="row">
        <${Button} kind="primary" busy=${job?.status === "running"} onClick=${start}>Check this machine<//>
        ${job && html`<span class="muted">${clock(job.started_at)}</span>`}
      </div>
    </section>
    <${Problem} error=${error} />
    ${job && job.status !== "done" && html`<${Job} job=${job} />`}
    ${job?.result && html`<p role="status" class="note ${job.result.fit ? "info" : "bad"}"><strong>${job.result.verdict}</strong></p>`}
    <ul class="stack" aria-label="Findings">${findings.map((finding) => html`<${Finding} key=${`${finding.node} ${finding.name} ${finding.what}`} finding=${finding} />`)}</ul>`;
}

const Meter = ({ name, share, text }) => html`<div class="meter" role="meter" aria-label=${name} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share * 100)}><span style=${{ width: `${share * 100}%` }}></span></div>
  <p class="number muted">${text}</p>`;

/** Load, memory, processes and runs of each device, every few seconds. */
function Devices() {
  useEffect(() => {
    const look = () => refreshDevices().catch(() => {});
    look().then(() => setTimeout(look, 1000)); // the first look has no load yet
    const timer = setInterval(look, 3000);
    return () => clearInterval(timer);
  }, []);
  return html`<div class="machine">
    ${(devices.value?.devices ?? []).map((device) => {
      const { id, name, users, note, memory_gb: memory, free_gb: free } = device;
      const share = memory && free !== null ? 1 - free / memory : null;
      const { host, devices: gpus = [] } = devices.value.load ?? {};
      const load = id === "cpu" ? (host && { utilisation: host.cpu }) : gpus.find((one) => one.id === id);
      const ours = runsOn(id);
      return html`<section key=${id} class="card stack" aria-label=${id}>
        <div class="row between"><h2>${deviceTitle(id)}</h2><span class="muted">${coresOf(device)}</span></div>
        <p class="muted clip" title=${name}>${name}</p>
        ${Number.isFinite(load?.utilisation) && html`<${Meter} name="Utilisation" share=${load.utilisation} text=${[`${percent(load.utilisation)} busy`, load.power_w && `${number(load.power_w, 3)} W`, load.temperature_c && `${load.temperature_c} °C`].filter(Boolean).join(" · ")} />`}
        ${share !== null && html`<${Meter} name="Memory in use" share=${share} text=${`${gigabytes((memory - free) * 1e9)} of ${gigabytes(memory * 1e9)} in use`} />`}
        ${ours.map((run) => html`<p key=${run.id}><a href=${address("run", [run.id])}>${label(run)}</a> <span class="muted">run</span></p>`)}
        ${users.map((user) => html`<p key=${user.pid} class="muted">${processText(user)}</p>`)}
        ${!users.length && !ours.length && html`<p class="muted">No run here uses it.</p>`}
        ${note && html`<p class="note">${note}</p>`}
      </section>`;
    })}
  </div>`;
}

export function Machine() {
  const free = freeDevices((runs.value ?? []).filter(isGoing));
  const offer = () => (tick(free), (drawer.value = true));
  return html`<div class="view">
    <div class="row between"><h1>Devices${studio.value ? ` of ${studio.value.host}` : ""}</h1>${free.length > 0 && html`<${Button} onClick=${offer}>Train on ${free.join() === "cpu" ? "the CPU" : deviceWords(free)}…<//>`}</div>
    <${Devices} /><${Doctor} /></div>`;
}
