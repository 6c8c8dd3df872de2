// Checkboxes for the devices, for the form and for dialogs, with a number of ranks for the CPU alone; and the Hardware section
// of the form: devices, precision, and the plan for them. All texts come from the server.

import { html, useId } from "./html.js";
import { devices, refreshDevices, usable } from "./catalogue.js";
import { change, draft, planned, problemOf, tick, ticked, valueOf } from "./draft.js";
import { gigabytes, many } from "./format.js";
import { isGoing, label, runs } from "./live.js";
import { Button, Labelled, Problem, Select, showError } from "./ui.js";

const deviceTitle = (id) => (id === "cpu" ? "CPU" : id.replace("gpu:", "GPU "));
/** A process that uses a device. */
const processText = (user) => `${user.owner ? `${user.owner}: ` : ""}${user.name} (process ${user.pid}${user.memory_gb ? `, ${gigabytes(user.memory_gb * 1e9)}` : ""}${user.run ? `, run ${user.run}` : ""})`;

/** Cores, memory and users of a device. */
function About({ device }) {
  const { id, cores, users, note, memory_gb: memory, free_gb: free } = device;
  const going = (runs.value ?? []).filter((run) => isGoing(run) && run.devices?.includes(id)).map(label);
  const used = [...(going.length ? [`run ${going.join(", ")}`] : []), ...users.map(processText)];
  const facts = [cores && many(cores, "core"), memory !== null && gigabytes(memory * 1e9), free !== null && `${gigabytes(free * 1e9)} free`];
  return html`${[facts.filter(Boolean).join(" · "), used.length > 0 && `used by ${used.join("; ")}`, note].filter(Boolean).map((line) => html`<span key=${line} class="facts" style=${{ display: "block" }}>${line}</span>`)}
    ${device.kind === "gpu" && memory && html`<progress aria-hidden="true" max=${memory} value=${memory - free}></progress>`}`;
}

/** The number of CPU ranks; the server checks its limit. */
function Ranks({ chosen, error, onChoose }) {
  const take = ({ currentTarget: { value } }) => value >= 1 && onChoose(new Array(Math.min(1000, Math.floor(value))).fill("cpu"));
  return html`<${Labelled} label="Number of ranks" help="Number of processes on this CPU, to try a run on several devices." error=${error} always>
    ${(given) => html`<input ...${given} class="input number" type="number" min="1" value=${chosen.length} onInput=${take} />`}
  <//>`;
}

/** `detailed`: with memory and users of each device. A click drops devices that this machine does not have. */
export function DeviceChoice({ chosen, onChoose, detailed = false, error = null, children }) {
  const order = usable();
  const id = useId();
  const isDryRun = chosen.length > 0 && chosen.every((one) => one === "cpu");
  const wrong = error && !isDryRun ? { "aria-invalid": "true", "aria-describedby": id } : {};
  const toggle = (id, on) => {
    const others = chosen.filter((one) => one !== id && order.includes(one));
    onChoose(on ? [...others, id].sort((a, b) => order.indexOf(a) - order.indexOf(b)) : others);
  };
  return html`<fieldset class="stack">
      <legend class="eyebrow">Devices</legend>
      <div class="devices">
        ${(devices.value?.devices ?? []).map(
          (device) => html`<label key=${device.id} class="device">
            <input type="checkbox" name="device" value=${device.id} checked=${chosen.includes(device.id)} disabled=${!device.supported} ...${wrong} onChange=${(event) => toggle(device.id, event.currentTarget.checked)} />
            <span><span class="title">${deviceTitle(device.id)}</span> ${device.name} ${detailed && html`<${About} device=${device} />`}</span>
          </label>`,
        )}
      </div>
      ${error && !isDryRun && html`<div id=${id}><${Problem} error=${error} /></div>`}
      ${children}
    </fieldset>
    ${isDryRun && html`<${Ranks} chosen=${chosen} error=${error} onChoose=${onChoose} />`}`;
}

function Precision() {
  const chosen = valueOf(["hardware", "precision"]);
  const options = planned.value.answer?.precisions ?? [{ value: chosen, supported: true, reason: null }];
  const onGpu = ticked.value.some((id) => id !== "cpu"); // on a CPU, only the error of the chosen one matters
  const refused = options.filter(({ value, supported }) => !supported && onGpu && value !== chosen);
  const texts = options.map(({ value, supported, reason }) => [value, `${value}${supported ? "" : " – not supported here"}`, { disabled: !supported, title: reason ?? "" }]);
  return html`<${Labelled} label="Precision" help=${refused.length > 0 && refused.map(({ value, reason }) => html`<p key=${value}>${reason}</p>`)} error=${problemOf(["hardware", "precision"])} always>
    ${(given) => html`<${Select} bare ...${given} value=${chosen} onChange=${(value) => change(["hardware", "precision"], value)} options=${texts} />`}
  <//>`;
}

/** The plan's labels for the selected devices. */
function Notes() {
  const { answer } = planned.value;
  const labels = answer?.labels ?? {};
  const lines = [labels.multi_gpu, labels.cpu_ignored, labels.learning_rate, labels.workers].filter(Boolean);
  return html`<div class=${`stack ${planned.value.waiting ? "old" : ""}`} aria-live="polite" role="status" aria-label="Hardware notes">
    ${labels.effective_batch_shown && labels.effective_batch && html`<output class="note info"><strong>${labels.effective_batch}</strong></output>`}
    ${lines.map((line) => html`<p key=${line} class="muted sentence">${line}</p>`)}
    ${answer?.warnings.map((line) => html`<p key=${line} class="note warn">${line}</p>`)}
  </div>`;
}

export function Hardware() {
  if (!devices.value) return null;
  const refresh = html`<div><${Button} kind="quiet small" onClick=${() => refreshDevices().catch(showError)} aria-label="Refresh the devices">Refresh<//></div>`;
  return html`<div class="stack">
    <${DeviceChoice} key=${draft.value.task} chosen=${ticked.value} onChoose=${tick} error=${problemOf(["hardware", "selected_devices"])} detailed>${refresh}<//>
    <${Precision} />
    <${Notes} />
  </div>`;
}
