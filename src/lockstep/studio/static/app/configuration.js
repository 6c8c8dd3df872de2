// The form of a new run, with its configuration as YAML and as a command.

import { html, signal, useRef, useState } from "./html.js";
import { get, post, put, remove, useAnswer } from "./api.js";
import { devices, schema, tasks } from "./catalogue.js";
import { body, chooseTask, draft, filled, getAt, isChanged, isOf, planned, problem, replaceDraft, task, valueOf, whyNot } from "./draft.js";
import { Field } from "./fields.js";
import { number, titleOf } from "./format.js";
import { Hardware } from "./hardware.js";
import { merge } from "./live.js";
import { drawer, go } from "./route.js";
import { Button, Code, Decisions, Dialog, Fold, Labelled, openDialog, Problem, Search, Select, showError, showMessage, TextDialog } from "./ui.js";

/** Settings of a task that define its model, not its data. */
const NETWORK = new Set(
  "model size form downsample hidden width layers heads memory theta dropout batchnorm code channels kernel patch".split(" "),
);
const REPRODUCIBILITY = ["seed", "reproducibility", "lanes", "threads"];
/** Titles of the sections that few runs change. */
const FURTHER = Object.entries({
  data: "Data", distributed: "Communication between ranks", fsdp: "Sharding (strategy fsdp)", pipeline: "Pipeline (strategy pipeline)", validation: "Validation",
  averaging: "Averaging of weights", checkpoint: "Checkpoints", storage: "Mirror", telemetry: "Logging", launch: "Launching", debug: "Debugging",
});

/** The settings that most runs change, in the order of the form. */
const FIRST = ["training.epochs", "training.max_steps", "training.batch_size", "training.accumulate", "optimizer.lr", "training.early_stopping_patience"];
const isFirst = ([path]) => FIRST.includes(path.join("."));
/** Text of the search; only fields with it in their name or description are shown. */
const search = signal("");

function found([path, { description = "" }]) {
  const text = `${path.join(".")} ${titleOf(path.at(-1))} ${description}`.toLowerCase();
  return search.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** A property's JSON schema without references and without the null of an optional one. */
function resolve(property, root) {
  const target = property.$ref ? { ...getAt(root, property.$ref.slice(2).split("/")), ...property } : property;
  const one = target.allOf?.length === 1 ? { ...resolve(target.allOf[0], root), ...target } : target;
  const kinds = one.anyOf?.filter((kind) => kind.type !== "null");
  if (!kinds) return { ...one, optional: false };
  const chosen = resolve(kinds[0], root);
  return { ...chosen, ...one, type: chosen.type, optional: kinds.length < one.anyOf.length };
}

/** The fields of a section as [path, schema], without those that the page may not set. */
function fieldsOf(section, only = () => true) {
  const { schema: root, refused } = schema.value;
  const { properties } = resolve(root.properties[section], root);
  return Object.entries(properties)
    .filter(([name]) => only(name) && !refused.includes(`${section}.${name}`))
    .map(([name, property]) => [[section, name], resolve(property, root)]);
}

/** The settings of the selected optimizer or schedule. */
function relevant(section) {
  const fields = fieldsOf(section);
  const chosen = valueOf([section, "name"]);
  return fields.filter(([, { applies_to }]) => applies_to?.includes(chosen) ?? true);
}

function taskFields(wanted) {
  const root = task.value?.schema;
  return Object.entries(root?.properties ?? {})
    .filter(([name]) => NETWORK.has(name) === wanted)
    .map(([name, property]) => [["task", name], resolve(property, root)]);
}

function Group({ title, fields = [], open = false, children }) {
  const changed = fields.filter(([path]) => isChanged(path)).length;
  const searched = Boolean(search.value);
  // Fields are hidden, not removed: a removed field drops its invalid input.
  const isShown = (field) => !searched || found(field);
  const head = html`${title}${changed > 0 && html`<span class="changed">${changed} changed</span>`}`;
  return html`<${Fold} kind="group" title=${head} open=${open || changed > 0} forced=${searched} hidden=${searched && !fields.some(found)}>
    ${() => html`<div class="body">
      ${!searched && children} ${fields.map(([path, property]) => html`<div key=${path.join(".")} hidden=${!isShown([path, property])}><${Field} path=${path} schema=${property} label=${path[1] === "name" ? title : undefined} /></div>`)}
    </div>`}
  <//>`;
}

/** The offered tasks, and the tasks of Python files in the studio's working folder. */
function TaskChoice() {
  const { found } = useAnswer("/tasks/files", [tasks.value]);
  const files = (found?.files ?? []).map((path) => [`file ${path}`, `${path} (in this folder)`, { title: path }]);
  const take = async (name) => {
    if (!name.startsWith("file ")) return chooseTask(name);
    const answer = await post("/tasks", { path: name.slice(5) });
    tasks.value = answer.tasks;
    return chooseTask(answer.added);
  };
  return html`<${Labelled} label="Task" help=${task.value?.waiting ? "its settings are being loaded…" : task.value?.title} always>
    ${(given) => html`<${Select} bare autofocus ...${given} value=${draft.value.task} options=${[...tasks.value.map(({ name }) => [name, name.split("/").at(-1), { title: name }]), ...files]} onChange=${(name) => take(name).catch(showError)} />`}
  <//>`;
}

const Name = () => html`<${Labelled} label="Name">
  ${(given) => html`<input ...${given} class="input" maxlength="200" autocomplete="off" placeholder="optional" value=${draft.value.name} onInput=${(event) => (draft.value = { ...draft.value, name: event.currentTarget.value })} />`}
<//>`;

function Form() {
  const training = fieldsOf("training");
  const first = [...training, ...relevant("optimizer")].filter(isFirst).sort(([a], [b]) => FIRST.indexOf(a.join(".")) - FIRST.indexOf(b.join(".")));
  const reproducible = training.filter(([path]) => REPRODUCIBILITY.includes(path[1]));
  const { answer, plan, waiting } = planned.value;
  const age = waiting ? "being made again" : answer?.plan ? "" : "of earlier input";
  const parameters = answer?.plan?.task?.parameters;
  return html`
    <${Group} title="Task" open><${TaskChoice} /><${Problem} error=${task.value?.error} /><${Name} /><//>
    <${Group} title="Hardware" open><${Hardware} /><//>
    <${Group} title="Training" open fields=${first} />
    ${plan && !search.value && html`<details class="group"><summary>Plan${age && html`<span class="changed">${age}</span>`}</summary><div class=${`body ${age ? "old" : ""}`}><${Decisions} decisions=${plan.decisions} /></div></details>`}
    <${Group} title="More training settings" fields=${training.filter((field) => !isFirst(field) && !REPRODUCIBILITY.includes(field[0][1]))} />
    <${Group} title="Task settings" fields=${taskFields(false)} />
    <${Group} title="Model" fields=${[...taskFields(true), ...fieldsOf("distributed", (name) => name === "sync_batchnorm")]}>
      ${parameters && html`<div class="field"><span class="label">Parameters</span><span class="number">${number(parameters)}</span></div>`}
    <//>
    <${Group} title="Optimizer" fields=${relevant("optimizer").filter((field) => !isFirst(field))} />
    <${Group} title="Schedule" fields=${relevant("scheduler")} />
    <${Group} title="Reproducibility" fields=${reproducible} />
    ${FURTHER.map(([section, title]) => {
      // The strategy follows from the devices; it can be changed with the other distributed settings.
      const also = section === "distributed" ? fieldsOf("hardware", (name) => name === "strategy") : [];
      const fields = [...also, ...fieldsOf(section, (name) => name !== "sync_batchnorm")];
      return html`<${Group} key=${section} title=${title} fields=${fields} />`;
    })}
  `;
}

function Preview() {
  const preview = planned.value.answer?.preview;
  if (!preview) return null;
  return html`<details class="group">
    <summary>Command and YAML</summary>
    <div class="body stack">
      <${Code} title="Command" text=${preview.command} wrap />
      <${Code} title="YAML" text=${preview.yaml} empty="# nothing differs from the defaults" />
    </div>
  </details>`;
}

function SaveDialog({ onClose }) {
  const save = (name) => put(`/configs/${encodeURIComponent(name)}`, body.value).then(() => showMessage(`Saved as ${name}`));
  return html`<${TextDialog} title="Save configuration" name="Name" before=${draft.value.name} most=${64} required onClose=${onClose} onSubmit=${save}>
    <p class="muted">An existing configuration with this name is replaced.</p>
  <//>`;
}

function LoadDialog({ onClose }) {
  const [deleted, setDeleted] = useState(0);
  const { found, error } = useAnswer("/configs", [deleted]);
  const take = (name) => get(`/configs/${encodeURIComponent(name)}`).then((config) => (replaceDraft(config), onClose()), showError);
  const drop = (name) => remove(`/configs/${encodeURIComponent(name)}`).then(() => setDeleted(deleted + 1), showError);
  return html`<${Dialog} title="Load configuration" onClose=${onClose}>
    <${Problem} error=${error} />
    ${found?.configs.length === 0 && html`<p class="muted">No saved configurations.</p>`}
    <ul class="stack">
      ${found?.configs.map(
        ({ name, task: of }) => html`<li key=${name} class="row">
          <button type="button" class="button grow" onClick=${() => take(name)}>${name} <span class="muted">${of}</span></button>
          <button type="button" class="button quiet danger" aria-label=${`Delete the saved configuration ${name}`} onClick=${() => drop(name)}>Delete</button>
        </li>`,
      )}
    </ul>
  <//>`;
}

const newId = () => `run-${[...crypto.getRandomValues(new Uint8Array(4))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

/** Every field of the form. */
const allFields = () => [
  ...["training", "optimizer", "scheduler", ...FURTHER.map(([section]) => section)].flatMap(relevant),
  ...[true, false].flatMap(taskFields),
  ...fieldsOf("hardware", (name) => ["selected_devices", "precision", "strategy"].includes(name)),
];

/** Leads to the first field with an error, also in a folded section. */
function showFirstError() {
  search.value = "";
  setTimeout(() => {
    const field = document.querySelector(".drawer [aria-invalid]");
    if (field) field.closest("details").open = true;
    field?.focus();
  });
}

function RunButton() {
  const [busy, setBusy] = useState(false);
  const id = useRef(newId());
  const why = whyNot.value;
  const keys = Object.keys(problem.value?.settings ?? {});
  const hasField = (key) => allFields().some(([path]) => isOf(key, path));
  const isBesideFields = keys.length > 0 && keys.every(hasField);
  const start = async () => {
    setBusy(true);
    try {
      // The page chooses the id: a second click cannot start a second run.
      const run = await post("/runs", { ...body.value, id: id.current });
      id.current = newId();
      merge([run], []);
      drawer.value = false;
      go("run", [run.id]);
    } catch (error) {
      if (error.code !== "OFFLINE") id.current = newId();
      showError(error);
    } finally {
      setBusy(false);
    }
  };
  return html`<div class="stack">
    ${!isBesideFields && html`<${Problem} error=${problem.value} />`}
    <${Button} kind="primary" why=${why} busy=${busy} onClick=${start} onRefused=${isBesideFields ? showFirstError : undefined}>${busy ? "Starting…" : "Run"}<//>
    ${isBesideFields ? html`<p class="muted">To correct: ${keys.map((key) => titleOf(key.split(".")[1])).join(", ")}</p>` : why && !problem.value && html`<p class="muted">${why}</p>`}
  </div>`;
}

export function Configuration({ onClose }) {
  const ready = schema.value && devices.value && tasks.value;
  const reset = () => replaceDraft({ task: draft.value.task, config: {} });
  return html`
    <div class="head">
      <h1>New run</h1>
      <${Button} kind="small" onClick=${() => openDialog(LoadDialog)}>Load<//>
      <${Button} kind="small" onClick=${() => openDialog(SaveDialog)}>Save<//>
      <${Button} kind="small" title="Reset to defaults" onClick=${reset}>Reset<//>
      <${Button} kind="quiet small" aria-label="Close the form" onClick=${onClose}>✕<//>
    </div>
    <div class="scroll">
      ${ready && html`<div class="search"><${Search} label="Search settings" text=${search.value} onSearch=${(text) => (search.value = text)} /></div>`}
      ${ready ? html`<${Form} key=${filled.value} /><${Preview} />` : html`<p class="empty" role="status">Loading devices and tasks…</p>`}
    </div>
    <div class="foot">${ready && html`<${RunButton} />`}</div>
  `;
}
