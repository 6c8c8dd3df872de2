// The Hardware section: devices, precision, and the plan for them. All texts come from the server.

import { html, useEffect, useId, useState } from "./html.js";
import { devices, forPage, freeDevices, refreshDevices } from "./catalogue.js";
import { change, draft, mistakes, planned, tick, ticked, valueOf } from "./draft.js";
import { note } from "./fields.js";
import { deviceWords, gigabytes } from "./format.js";
import { isGoing, runs } from "./live.js";
import { label } from "./runs.js";
import { Button, tellError } from "./ui.js";

const MOST_RANKS = 64;

const facts = ({ kind, memory_gb: memory, free_gb: free, cores }) =>
  [
    kind === "cpu" && cores ? `${cores} ${cores === 1 ? "core" : "cores"}` : null,
    memory === null ? null : gigabytes(memory * 1e9),
    free === null ? null : `${gigabytes(free * 1e9)} free`,
  ]
    .filter(Boolean)
    .join(" · ");

/** The devices that can be selected, in their order. */
const usable = () => devices.value.devices.filter(({ supported }) => supported).map(({ id }) => id);

function Device({ device, runs }) {
  const help = useId();
  const chosen = ticked.value;
  const { id, name, users, supported, note, memory_gb: memory, free_gb: free } = device;
  const users_text = users.map((user) => `${user.name} (process ${user.pid}${user.memory_gb ? `, ${gigabytes(user.memory_gb * 1e9)}` : ""})`);
  const used = runs.length ? [`run ${runs.join(", ")}`, ...users_text] : users_text;
  const toggle = (event) => {
    const order = usable();
    const others = chosen.filter((one) => one !== id && order.includes(one));
    tick(event.currentTarget.checked ? [...others, id].sort((a, b) => order.indexOf(a) - order.indexOf(b)) : others);
  };
  return html`<label class="device">
    <input
      type="checkbox"
      name="device"
      value=${id}
      aria-describedby=${help}
      checked=${chosen.includes(id)}
      disabled=${!supported}
      onChange=${toggle}
    />
    <span>
      <span class="title">${id === "cpu" ? "CPU" : id.replace("gpu:", "GPU ")}</span> ${name}
      <span id=${help}>
        <span class="facts" style=${{ display: "block" }}>${facts(device)}</span>
        ${used.length > 0 && html`<span class="facts" style=${{ display: "block" }}>used by ${used.join("; ")}</span>`}
        ${note && html`<span class="facts" style=${{ display: "block" }}>${note}</span>`}
      </span>
      ${device.kind === "gpu" && memory && html`<span class="meter" style=${{ display: "block" }} aria-hidden="true"><span style=${{ width: `${100 * (1 - free / memory)}%` }}></span></span>`}
    </span>
  </label>`;
}

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

/** Several ranks on the CPU: to try a multi-device run without the devices. */
function CpuRanks() {
  const id = useId();
  const ranks = ticked.value.length;
  const [typed, setTyped] = useState(null);
  const take = (text) => {
    setTyped(text);
    const wanted = Number(text);
    const fits = Number.isInteger(wanted) && wanted >= 1 && wanted <= MOST_RANKS;
    note("ranks", fits ? null : `from 1 to ${MOST_RANKS}`);
    if (fits) tick(new Array(wanted).fill("cpu"));
  };
  useEffect(() => () => note("ranks", null), []);
  return html`<div class="field">
    <label for=${id}>Number of ranks</label>
    <input
      id=${id}
      class="input number"
      type="number"
      min="1"
      max=${MOST_RANKS}
      aria-describedby="${id}-help"
      value=${typed ?? ranks}
      onInput=${(event) => take(event.currentTarget.value)}
      aria-invalid=${mistakes.value.ranks ? "true" : undefined}
      onBlur=${() => mistakes.value.ranks || setTyped(null)}
    />
    ${mistakes.value.ranks && html`<p class="wrong">${mistakes.value.ranks}</p>`}
    <p class="help always" id="${id}-help">Number of processes on this CPU, to try a run on several devices.</p>
  </div>`;
}

function Precision() {
  const id = useId();
  const chosen = valueOf(["hardware", "precision"]);
  const options = planned.value.answer?.precisions ?? [{ value: chosen, supported: true, reason: null }];
  const refused = options.filter(({ supported }) => !supported);
  return html`<div class="field">
    <label for=${id}>Precision</label>
    <select
      id=${id}
      class="input"
      aria-describedby=${refused.length ? `${id}-why` : undefined}
      value=${chosen}
      onChange=${(event) => change(["hardware", "precision"], event.currentTarget.value)}
    >
      ${options.map(
        ({ value, supported, reason }) => html`<option key=${value} value=${value} disabled=${!supported} selected=${value === chosen} title=${reason ?? ""}>
          ${value}${supported ? "" : " – not supported here"}
        </option>`,
      )}
    </select>
    ${refused.length > 0 && html`<div class="help always" id="${id}-why">${refused.map(({ value, reason }) => html`<p key=${value}>${reason}</p>`)}</div>`}
  </div>`;
}

/** The plan's labels for the selected devices. */
function Notes() {
  const { answer } = planned.value;
  const labels = answer?.labels ?? {};
  const lines = [
    labels.multi_gpu,
    labels.cpu_ignored,
    labels.learning_rate,
    labels.workers,
  ].filter(Boolean);
  const old = planned.value.waiting || Object.keys(mistakes.value).length > 0;
  return html`<div class=${`stack ${old ? "old" : ""}`} aria-live="polite" role="status" aria-label="Hardware notes">
    ${labels.effective_batch_shown && labels.effective_batch && html`<output class="note info"><strong>${labels.effective_batch}</strong></output>`}
    ${lines.map((line) => html`<p key=${line} class="muted sentence">${forPage(line)}</p>`)}
    ${answer?.warnings.map((line) => html`<p key=${line} class="note warn">${line}</p>`)}
  </div>`;
}

export function Hardware() {
  if (!devices.value) return null;
  const all = devices.value.devices;
  const using = (id) => (runs.value ?? []).filter((run) => isGoing(run) && run.devices?.includes(id)).map(label);
  const chosen = ticked.value;
  const rehearsal = chosen.length > 0 && chosen.every((id) => id === "cpu");
  return html`<div class="stack">
    <fieldset>
      <div class="row between">
        <legend class="eyebrow">Devices</legend>
        <${Button} kind="quiet small" onClick=${() => refreshDevices().catch(tellError)} aria-label="Refresh the devices">Refresh<//>
      </div>
      <div class="devices">
        ${all.map((device) => html`<${Device} key=${device.id} device=${device} runs=${using(device.id)} />`)}
      </div>
      <${Absent} />
      <${Free} />
    </fieldset>
    ${rehearsal && html`<${CpuRanks} key=${draft.value.task} />`}
    <${Precision} />
    <${Notes} />
  </div>`;
}
