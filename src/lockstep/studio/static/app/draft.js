// The configuration in the form, and the server's plan for it.

import { computed, effect, signal, stored } from "./html.js";
import { post } from "./api.js";
import { bestDevices, devices, schema, studio, tasks } from "./catalogue.js";
import { connection, isGoing, runs } from "./live.js";

const WAIT_MS = 150;

export const getAt = (tree, path) => path.reduce((node, key) => (node === null || node === undefined ? undefined : node[key]), tree);

/** A copy of `tree` with `value` at `path`; `undefined` removes it and sections that become empty. */
function setAt(tree, [key, ...rest], value) {
  const copy = { ...tree };
  if (rest.length) {
    const inner = setAt(copy[key] ?? {}, rest, value);
    if (Object.keys(inner).length) copy[key] = inner;
    else delete copy[key];
  } else if (value === undefined) delete copy[key];
  else copy[key] = value;
  return copy;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** {task, name, config}: as the server gets it. */
export const draft = stored(sessionStorage, "lockstep-draft", { task: "har", name: "", config: {} });

export const task = computed(() => tasks.value?.find(({ name }) => name === draft.value.task) ?? null);

/**
 * The selected devices: the draft's, else the default (GPU 0, else the CPU). `all` means every GPU, or the CPU
 * where there is none.
 */
export const ticked = computed(() => {
  const chosen = draft.value.config.hardware?.selected_devices ?? devices.value?.default ?? [];
  return chosen.join() === "all" ? bestDevices() : chosen;
});

/** Messages about invalid input, by the path of the setting. */
export const mistakes = signal({});

/** The value that a setting has without the form: the default of a task, else the general one. */
export function defaultOf(path, of = task.value) {
  if (path[0] === "task") return of?.schema.properties?.[path[1]]?.default ?? null;
  return getAt(of?.defaults, path) ?? getAt(schema.value?.defaults, path) ?? null;
}

export function valueOf(path) {
  const chosen = getAt(draft.value.config, path);
  return chosen === undefined ? defaultOf(path) : chosen;
}

export const isChanged = (path) => getAt(draft.value.config, path) !== undefined;

export function change(path, value) {
  const keep = value === undefined || same(value, defaultOf(path)) ? undefined : value;
  draft.value = { ...draft.value, config: setAt(draft.value.config, path, keep) };
}

const withDevices = (selected) => setAt(draft.value.config, ["hardware", "selected_devices"], selected);
export const tick = (selected) => (draft.value = { ...draft.value, config: withDevices(selected) });

/** Counts up when the whole form is filled again, so that unfinished input is dropped. */
export const filled = signal(0);

export function replaceDraft({ task: of, config, name = "" }) {
  mistakes.value = {};
  filled.value += 1;
  draft.value = { task: of, config, name };
}

/** Another task has other settings; the rest is kept. */
export function chooseTask(name) {
  const { task: _, ...rest } = draft.value.config;
  replaceDraft({ ...draft.value, task: name, config: rest });
}

/** The body of a plan, preview or start; devices are always included. */
export const body = computed(() => ({
  task: draft.value.task,
  name: draft.value.name.trim() || null,
  config: withDevices(ticked.value),
}));

/** The newest answer of POST /api/plan, its error, and whether a newer one is on its way. */
export const planned = signal({ answer: null, error: null, waiting: true });

/** Whether the plan is that of other input. */
export const isOld = computed(() => planned.value.waiting || Object.keys(mistakes.value).length > 0);

let timer = 0;
let asked = new AbortController();

async function ask(request) {
  asked.abort();
  asked = new AbortController();
  const { signal: abort } = asked;
  try {
    const answer = await post("/plan", request, abort);
    if (!abort.aborted) planned.value = { answer, error: null, waiting: false };
  } catch (error) {
    if (error.name !== "AbortError" && !abort.aborted) planned.value = { answer: null, error, waiting: false };
  }
}

/** The running runs: the plan warns if they share devices with the draft. Null until the list has arrived. */
const going = computed(() => runs.value && runs.value.filter(isGoing).map(({ id }) => id).join());

/** Requests the plan when the draft or the running runs change, and again after an error when the studio is back. */
export function keepPlanning() {
  let made = {};
  effect(() => {
    const now = { request: JSON.stringify(body.value), server: studio.value?.instance, going: going.value, connected: connection.value === "open" };
    if (!devices.value) return;
    const moved = made.going !== null && made.going !== now.going;
    const again = now.connected && !made.connected && planned.peek().error;
    const old = made.request !== now.request || made.server !== now.server || moved || again;
    const first = !made.request;
    made = now;
    if (!old) return;
    clearTimeout(timer);
    planned.value = { ...planned.peek(), waiting: true };
    timer = setTimeout(() => ask(body.peek()), first ? 0 : WAIT_MS);
  });
}

/** Why Run is disabled; empty if it is not. The server decides; this adds invalid input. */
export const whyNot = computed(() => {
  const wrong = Object.entries(mistakes.value)[0];
  if (wrong) return `${wrong[0]}: ${wrong[1]}`;
  const { answer, error, waiting } = planned.value;
  if (error && !waiting) return error.message;
  if (!answer) return "the plan is being made";
  if (answer.run.enabled) return waiting ? "the plan is being made" : "";
  return answer.run.reason ?? answer.problem?.message ?? "this configuration cannot run";
});
