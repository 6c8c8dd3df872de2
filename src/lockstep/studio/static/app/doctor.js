// The results of `lockstep doctor`: is this machine ready for training on several devices?

import { html, useEffect, useState } from "./html.js";
import { get, post } from "./api.js";
import { DeviceChoice } from "./afterwards.js";
import { clock } from "./format.js";
import { jobs } from "./live.js";
import { Badge, Button, Problem, tellError } from "./ui.js";

const WORST_FIRST = ["fail", "warn", "ok", "skip"];

function Finding({ finding }) {
  return html`<li class="card stack">
    <div class="row">
      <${Badge} status=${finding.status} />
      <h2 class="grow">${finding.name}</h2>
      <span class="muted">${finding.node}</span>
    </div>
    <p>${finding.what}</p>
    <p class="muted">${finding.why}</p>
    ${finding.fix && html`<p><strong>Fix:</strong> ${finding.fix}</p>`}
  </li>`;
}

export function Doctor() {
  const [first, setFirst] = useState(null);
  const [devices, setDevices] = useState([]);
  const [quick, setQuick] = useState(true);
  useEffect(() => void get("/doctor").then((job) => setFirst(job), tellError), []);
  const job = first && (jobs.value[first.id] ?? first);
  const start = async () => {
    try {
      setFirst(await post("/doctor", { devices: devices.length ? devices : null, quick }));
    } catch (error) {
      tellError(error);
    }
  };
  const findings = [...(job?.result?.findings ?? [])].sort((a, b) => WORST_FIRST.indexOf(a.status) - WORST_FIRST.indexOf(b.status));
  return html`<div class="view">
    <h1>Doctor</h1>
    <section class="card stack measure" aria-label="Check">
      <p class="muted">Check whether this machine is ready for training on several devices. If none is selected, every GPU is checked, or two ranks on the CPU.</p>
      <${DeviceChoice} chosen=${devices} onChoose=${setDevices} />
      <label class="row">
        <input type="checkbox" checked=${quick} onChange=${(event) => setQuick(event.currentTarget.checked)} />
        Quick: start no ranks
      </label>
      <div class="row">
        <${Button} kind="primary" busy=${job?.status === "running"} onClick=${start}>${job?.status === "running" ? "Checking…" : "Check this machine"}<//>
        ${job && html`<span class="muted">${clock(job.started_at)} · <code>${job.command_text}</code></span>`}
      </div>
    </section>
    <${Problem} error=${job?.error} />
    ${job?.result && html`<p role="status" class="note ${job.result.fit ? "info" : "bad"}"><strong>${job.result.verdict}</strong></p>`}
    <ul class="stack" aria-label="Findings">${findings.map((finding) => html`<${Finding} key=${`${finding.node} ${finding.name} ${finding.what}`} finding=${finding} />`)}</ul>
  </div>`;
}
