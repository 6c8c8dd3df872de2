// The devices as boxes, for the form and for dialogs; several ranks when only the CPU is selected.

import { html, useEffect, useId, useState } from "./html.js";
import { devices } from "./catalogue.js";
import { gigabytes, many } from "./format.js";
import { isGoing, runs } from "./live.js";

const MOST_RANKS = 64;

/** The ids of the devices that can be selected, in their order. */
export const usable = () => (devices.value?.devices ?? []).filter(({ supported }) => supported).map(({ id }) => id);

const facts = ({ kind, memory_gb: memory, free_gb: free, cores }) =>
  [
    kind === "cpu" && cores ? many(cores, "core") : null,
    memory === null ? null : gigabytes(memory * 1e9),
    free === null ? null : `${gigabytes(free * 1e9)} free`,
  ]
    .filter(Boolean)
    .join(" · ");

/** The runs of this folder that a device computes for. */
export const runsOn = (id) => (runs.value ?? []).filter((run) => isGoing(run) && run.devices?.includes(id));
/** A process that uses a device. */
export const processText = (user) => `${user.owner ? `${user.owner}: ` : ""}${user.name} (process ${user.pid}${user.memory_gb ? `, ${gigabytes(user.memory_gb * 1e9)}` : ""}${user.run ? `, run ${user.run}` : ""})`;

/** What is known of a device, and who uses it. */
function About({ device }) {
  const { id, users, note, memory_gb: memory, free_gb: free } = device;
  const going = runsOn(id).map((run) => run.name || run.id);
  const used = [...(going.length ? [`run ${going.join(", ")}`] : []), ...users.map(processText)];
  return html`${[facts(device), used.length > 0 && `used by ${used.join("; ")}`, note].filter(Boolean).map((line) => html`<span key=${line} class="facts" style=${{ display: "block" }}>${line}</span>`)}
    ${device.kind === "gpu" && memory && html`<span class="meter" style=${{ display: "block" }} aria-hidden="true"><span style=${{ width: `${100 * (1 - free / memory)}%` }}></span></span>`}`;
}

function Ranks({ chosen, onChoose, onWrong }) {
  const id = useId();
  const [typed, setTyped] = useState(null);
  const fits = (ranks) => Number.isInteger(ranks) && ranks >= 1 && ranks <= MOST_RANKS;
  const wrong = typed !== null && !fits(Number(typed)) ? `from 1 to ${MOST_RANKS}` : null;
  const take = ({ currentTarget: { value } }) => {
    setTyped(value);
    if (fits(Number(value))) onChoose(new Array(Number(value)).fill("cpu"));
  };
  useEffect(() => onWrong(wrong), [wrong]);
  useEffect(() => () => onWrong(null), []);
  return html`<div class="field">
    <label for=${id}>Number of ranks</label>
    <input id=${id} class="input number" type="number" min="1" max=${MOST_RANKS} aria-describedby="${id}-help" aria-invalid=${wrong ? "true" : undefined} value=${typed ?? chosen.length} onInput=${take} onBlur=${() => wrong || setTyped(null)} />
    ${wrong && html`<p class="wrong">${wrong}</p>`}
    <p class="help always" id="${id}-help">Number of processes on this CPU, to try a run on several devices.</p>
  </div>`;
}

/**
 * `detailed`: with memory and users of each device. `beside`: elements next to the heading.
 * `onWrong(message)`: why the number of ranks is invalid, or null.
 */
export function DeviceChoice({ chosen, onChoose, detailed = false, beside = null, onWrong = () => {}, children }) {
  const order = usable();
  const toggle = (id, on) => {
    const others = chosen.filter((one) => one !== id && order.includes(one));
    onChoose(on ? [...others, id].sort((a, b) => order.indexOf(a) - order.indexOf(b)) : others);
  };
  return html`<fieldset class="stack">
      <div class="row between"><legend class="eyebrow">Devices</legend>${beside}</div>
      <div class="devices">
        ${(devices.value?.devices ?? []).map(
          (device) => html`<label key=${device.id} class="device">
            <input type="checkbox" name="device" value=${device.id} checked=${chosen.includes(device.id)} disabled=${!device.supported} onChange=${(event) => toggle(device.id, event.currentTarget.checked)} />
            <span><span class="title">${device.id === "cpu" ? "CPU" : device.id.replace("gpu:", "GPU ")}</span> ${device.name} ${detailed && html`<${About} device=${device} />`}</span>
          </label>`,
        )}
      </div>
      ${children}
    </fieldset>
    ${chosen.length > 0 && chosen.every((id) => id === "cpu") && html`<${Ranks} chosen=${chosen} onChoose=${onChoose} onWrong=${onWrong} />`}`;
}
