// The Hardware section: devices, precision, and the plan for them. All texts come from the server.

import { html, useId } from "./html.js";
import { devices, forPage, freeDevices, refreshDevices } from "./catalogue.js";
import { DeviceChoice, usable } from "./devices.js";
import { change, draft, isOld, planned, tick, ticked, valueOf } from "./draft.js";
import { note } from "./fields.js";
import { deviceWords } from "./format.js";
import { isGoing, runs } from "./live.js";
import { Button, Select, tellError } from "./ui.js";

/** Devices of the configuration that have no box to untick: it comes from another machine. */
function Absent() {
  const order = usable();
  const absent = [...new Set(ticked.value.filter((id) => !order.includes(id)))];
  if (!absent.length) return null;
  return html`<div class="note warn row">
    <span class="grow">Selected, but not available here: ${absent.join(", ")}</span>
    <${Button} kind="small" onClick=${() => tick(ticked.value.filter((id) => order.includes(id)))}>Remove<//>
  </div>`;
}

/** Where a chosen device is in use: those that are not. */
function Free() {
  const going = (runs.value ?? []).filter(isGoing);
  const free = freeDevices(going);
  const shares = ticked.value.some((id) => going.some((run) => run.devices?.includes(id)));
  if (!shares || !free.length) return null;
  return html`<${Button} kind="small" onClick=${() => tick(free)}>Use the free ones: ${deviceWords(free)}<//>`;
}

function Precision() {
  const id = useId();
  const chosen = valueOf(["hardware", "precision"]);
  const options = planned.value.answer?.precisions ?? [{ value: chosen, supported: true, reason: null }];
  const refused = options.filter(({ supported }) => !supported);
  return html`<div class="field">
    <label for=${id}>Precision</label>
    <${Select} bare id=${id} aria-describedby=${refused.length ? `${id}-why` : undefined} value=${chosen} onChange=${(value) => change(["hardware", "precision"], value)}
      options=${options.map(({ value, supported, reason }) => [value, `${value}${supported ? "" : " – not supported here"}`, { disabled: !supported, title: reason ?? "" }])} />
    ${refused.length > 0 && html`<div class="help always" id="${id}-why">${refused.map(({ value, reason }) => html`<p key=${value}>${reason}</p>`)}</div>`}
  </div>`;
}

/** The plan's labels for the selected devices. */
function Notes() {
  const { answer } = planned.value;
  const labels = answer?.labels ?? {};
  const lines = [labels.multi_gpu, labels.cpu_ignored, labels.learning_rate, labels.workers].filter(Boolean);
  return html`<div class=${`stack ${isOld.value ? "old" : ""}`} aria-live="polite" role="status" aria-label="Hardware notes">
    ${labels.effective_batch_shown && labels.effective_batch && html`<output class="note info"><strong>${labels.effective_batch}</strong></output>`}
    ${lines.map((line) => html`<p key=${line} class="muted sentence">${forPage(line)}</p>`)}
    ${answer?.warnings.map((line) => html`<p key=${line} class="note warn">${line}</p>`)}
  </div>`;
}

export function Hardware() {
  if (!devices.value) return null;
  const refresh = html`<${Button} kind="quiet small" onClick=${() => refreshDevices().catch(tellError)} aria-label="Refresh the devices">Refresh<//>`;
  return html`<div class="stack">
    <${DeviceChoice} key=${draft.value.task} chosen=${ticked.value} onChoose=${tick} detailed beside=${refresh} onWrong=${(message) => note("ranks", message)}><${Absent} /><${Free} /><//>
    <${Precision} />
    <${Notes} />
  </div>`;
}
