// Devices, tasks and the schema of the settings.

import { batch, signal } from "./html.js";
import { get } from "./api.js";

export const devices = signal(null);
export const tasks = signal(null);
export const schema = signal(null);
export const studio = signal(null);
/** The error that prevents the page from working, or null. */
export const trouble = signal(null);

export async function loadCatalogue() {
  try {
    const [about, machine, settings] = await Promise.all([get("/studio"), get("/devices"), get("/schema")]);
    batch(() => {
      studio.value = about;
      devices.value = machine;
      schema.value = settings;
      trouble.value = null;
    });
    tasks.value = (await get("/tasks")).tasks;
  } catch (error) {
    trouble.value = error;
  }
}

/** Memory and users of the devices change while the page is open. */
export async function refreshDevices() {
  devices.value = await get("/devices?refresh=1");
}
