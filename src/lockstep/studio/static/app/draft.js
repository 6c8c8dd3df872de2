// The configuration in the form, and the server's plan for it.

import { computed, effect, signal, stored } from "./html.js";
import { post, reconnects } from "./api.js";
import { bestDevices, devices, schema, tasks } from "./catalogue.js";
import { isGoing, runs } from "./live.js";

const WAIT_MS = 150;

export const getAt = (tree, path) => path.reduce((node, key) => (node === null || node === undefined ? undefined : node[key]), tree);

/** A copy of `tree` with `value` at `path`; `undefined` removes it, and sections left empty. */
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

/** {task, name, config}, as sent to the server. */
export const draft = stored(sessionStorage, "lockstep-draft", { task: "har", name: "", config: {} });

export const task = computed(() => tasks.value?.find(({ name }) => name === draft.value.task) ?? null);

/**
 * The selected devices: the draft's, else the default (GPU 0, else the CPU). `all`: every GPU, or the CPU on a machine
 * without one.
 */
export const ticked = computed(() => {
  const chosen = draft.value.config.hardware?.selected_devices ?? devices.value?.default ?? [];
  return chosen.join() === "all" ? bestDevices() : chosen;
});

/** The default of a setting: that of the task, else the general one. */
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

/** Incremented when the whole form is filled, which drops unfinished input. */
export const filled = signal(0);

export function replaceDraft({ task: of, config, name = "" }) {
  filled.value += 1;
  draft.value = { task: of, config, name };
}

/** Choose another task; settings outside `task` are kept. */
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

/** The newest answer of POST /api/plan, its error, whether a newer one is expected, and the last complete plan. */
export const planned = signal({ answer: null, error: null, waiting: true, plan: null });

let timer = 0;
let turns = 0;

/** Request a plan; drop the answer if a newer request was made. */
async function ask(request) {
  const turn = ++turns;
  const answer = await post("/plan", request).then((plan) => ({ answer: plan, error: null }), (error) => ({ answer: null, error }));
  if (turn === turns) planned.value = { ...answer, plan: answer.answer?.plan ?? planned.peek().plan, waiting: false };
}

/** The running runs: the plan warns if they share devices with the draft. */
const going = computed(() => (runs.value ?? []).filter(isGoing).map(({ id }) => id).join());

/** Request the plan when the draft or the running runs change, and after a reconnection. */
export function keepPlanning() {
  let before = "";
  effect(() => {
    const now = JSON.stringify([body.value, going.value, reconnects.value]);
    if (!devices.value || now === before) return;
    clearTimeout(timer);
    planned.value = { ...planned.peek(), waiting: true };
    timer = setTimeout(() => ask(body.peek()), before ? WAIT_MS : 0);
    before = now;
  });
}

/** Corrections in the words of the form, by the code of a problem of the plan. */
const FIXES = { __proto__: null, GPU_NOT_AVAILABLE: "select a device above", PRECISION_NOT_AVAILABLE: "choose another precision, or another device" };

/** The problem of the plan as an error to show, or null. `settings`: the problem of each wrong setting, by its key. */
export const problem = computed(() => {
  const found = planned.value.answer?.problem;
  return found ? { ...found, fix: FIXES[found.code] ?? found.fix } : null;
});

/** Whether `key` names the setting at `path`, or a part of it, such as an item of a list. */
export const isOf = (key, path) => `${key}.`.startsWith(`${path.join(".")}.`);

/** The error to show beside the setting at `path`, or null. */
export function problemOf(path) {
  const texts = Object.entries(problem.value?.settings ?? {}).filter(([key]) => isOf(key, path)).map(([, text]) => text);
  return texts.length ? { ...problem.value, message: texts.join("; ") } : null;
}

/** Why Run is disabled, as the server says; empty if it is not. */
export const whyNot = computed(() => {
  const { answer, error, waiting } = planned.value;
  if (error && !waiting) return error.message;
  if (!answer) return "the plan is being made";
  if (answer.run.enabled) return waiting ? "the plan is being made" : "";
  return answer.run.reason ?? answer.problem?.message ?? "this configuration cannot run";
});
