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
    const written = document.getElementById("first")?.content.textContent;
    document.getElementById("first")?.remove(); // valid only while the page is loading
    const page = written ? JSON.parse(written) : await get("/page");
    batch(() => {
      studio.value = page.studio;
      devices.value = page.devices;
      schema.value = page.schema;
      // The settings of tasks follow when the server has imported them.
      tasks.value ??= page.tasks.map((name) => ({ name, title: "", schema: {}, defaults: {}, error: null, waiting: true }));
      trouble.value = null;
    });
    tasks.value = (await get("/tasks")).tasks;
  } catch (error) {
    trouble.value = error;
  }
}

/** The ids of the devices that can be selected, in their order. */
export const usable = () => (devices.value?.devices ?? []).filter(({ supported }) => supported).map(({ id }) => id);

/** The usable GPUs, else the CPU. */
export const bestDevices = () => (usable().some((id) => id !== "cpu") ? usable().filter((id) => id !== "cpu") : usable());

/** Memory and users of the devices change while the page is open. */
export const refreshDevices = async () => (devices.value = await get("/devices?refresh=1"));
