// Resuming a run that has ended, on the same or other devices.

import { html, useState } from "./html.js";
import { post, runPath } from "./api.js";
import { devices, usable } from "./catalogue.js";
import { DeviceChoice } from "./hardware.js";
import { number } from "./format.js";
import { merge } from "./live.js";
import { Dialog, Tick } from "./ui.js";

/** The step of the checkpoint for a resume, or null without one. */
export const newestStep = (detail) => detail?.checkpoints.at(-1)?.step ?? null;

export function ResumeDialog({ run, detail, onClose }) {
  const still = (run.devices ?? []).filter((id) => usable().includes(id));
  const [chosen, setChosen] = useState(still.length ? still : (devices.value?.default ?? []));
  const [rescale, setRescale] = useState(false);
  const longer = run.status === "completed";
  const [epochs, setEpochs] = useState(longer ? String((run.epochs ?? 0) + 10) : "");
  const request = { devices: chosen, rescale_batch: rescale, epochs: longer ? Number(epochs) : null };
  const why = !chosen.length ? "no device is selected" : longer && !(Number(epochs) > run.epochs) ? `more than ${run.epochs} epochs` : "";
  const resume = async () => merge([await post(runPath(run.id, "/resume"), request)], []);
  const step = newestStep(detail);
  return html`<${Dialog} title=${step === null ? "Start run again" : "Resume run"} submit=${step === null ? "Start again" : "Resume"} onClose=${onClose} onSubmit=${resume} why=${why}>
    <p class="muted">${step === null ? "This run has no checkpoint: it starts again at step 0, and the curves so far are left out." : `Resumes from the checkpoint of step ${number(step)}, on any devices, with the samples that the run has not seen yet.`}</p>
    ${longer && html`<label class="row">Epochs in all<input class="input number" inputmode="numeric" value=${epochs} onInput=${(event) => setEpochs(event.currentTarget.value)} /></label>`}
    <${DeviceChoice} chosen=${chosen} onChoose=${setChosen} />
    <${Tick} on=${rescale} onTick=${setRescale}>Let the global batch follow the devices (otherwise it stays as it was)<//>
  <//>`;
}
