// The left column: every run of the folder; search, select, rename, duplicate, delete.

import { effect, html, signal, useId, useState } from "./html.js";
import { patch, post, remove, runPath } from "./api.js";
import { replaceDraft } from "./draft.js";
import { ago, deviceWords, number, percent, words } from "./format.js";
import { isGoing, merge, problems, runs } from "./live.js";
import { address, go, route } from "./route.js";
import { Badge, Dialog, Menu, tell, tellError } from "./ui.js";

const PAGE = 100;
const STATUSES = ["pending", "running", "completed", "failed", "stopped", "lost"];
const ORDERS = {
  newest: ["Newest first", (a, b) => (a.created_at < b.created_at ? 1 : -1)],
  oldest: ["Oldest first", (a, b) => (a.created_at > b.created_at ? 1 : -1)],
  name: ["Name", (a, b) => label(a).localeCompare(label(b))],
  status: ["Status", (a, b) => STATUSES.indexOf(a.status) - STATUSES.indexOf(b.status)],
  task: ["Task", (a, b) => a.task.localeCompare(b.task)],
};

const filters = signal({ text: "", status: "", order: "newest" });
/** Most runs in a comparison: the server's limit. */
export const MOST_COMPARED = 20;
/** Runs selected for comparison, in order of selection. */
export const compared = signal([]);

// Deleted runs are removed from the comparison.
effect(() => {
  const here = new Set(runs.value?.map(({ id }) => id));
  const left = compared.peek().filter((id) => here.has(id));
  if (runs.value && left.length < compared.peek().length) compared.value = left;
});

export const label = (run) => run.name || run.id;

/** Every word must occur in the name, id, folder, task, tags or devices. */
export function matches(run, text) {
  const place = [run.id, run.location, run.name, run.task, ...run.tags, ...(run.devices ?? [])].join(" ").toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => place.includes(word));
}

export function setCompared(id, on) {
  const others = compared.value.filter((one) => one !== id);
  compared.value = on ? [...others, id].slice(-MOST_COMPARED) : others;
}

function Filters({ shown, all }) {
  const ids = [useId(), useId(), useId()];
  const { text, status, order } = filters.value;
  const set = (part) => (filters.value = { ...filters.value, ...part });
  return html`<div class="filters" role="search" aria-label="Runs">
    <label class="unseen" for=${ids[0]}>Search runs</label>
    <input
      id=${ids[0]}
      class="input"
      type="search"
      placeholder="Search name, task, tag…"
      value=${text}
      onInput=${(event) => set({ text: event.currentTarget.value })}
    />
    <div class="pair">
      <label class="unseen" for=${ids[1]}>Status</label>
      <select id=${ids[1]} class="input" value=${status} onChange=${(event) => set({ status: event.currentTarget.value })}>
        <option value="">Any status</option>
        ${STATUSES.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
      <label class="unseen" for=${ids[2]}>Sort</label>
      <select id=${ids[2]} class="input" value=${order} onChange=${(event) => set({ order: event.currentTarget.value })}>
        ${Object.entries(ORDERS).map(([key, [text]]) => html`<option key=${key} value=${key}>${text}</option>`)}
      </select>
    </div>
    <div class="row between muted">
      <span role="status">${runs.value === null ? "" : shown === all ? `${all} ${all === 1 ? "run" : "runs"}` : `${shown} of ${all} runs`}</span>
      ${compared.value.length > 1 && html`<a href=${address("compare", compared.value)}>Compare ${compared.value.length}</a>`}
      ${compared.value.length >= MOST_COMPARED && html`<span>the most</span>`}
    </div>
  </div>`;
}

const best = (run) => Object.entries(run.best_metric ?? {})[0];

function Row({ run, onDialog }) {
  const going = isGoing(run);
  const duplicate = async () => {
    try {
      const copy = await post(runPath(run.id, "/duplicate"));
      replaceDraft(copy);
      go("train");
      tell("The form has the configuration of this run");
      if (copy.left_out.length) tell(`Left out, because the page may not set it: ${copy.left_out.join(", ")}`, { bad: true });
    } catch (error) {
      tellError(error);
    }
  };
  const items = [
    ["Rename", () => onDialog({ kind: "rename", run })],
    ["Edit tags", () => onDialog({ kind: "tags", run })],
    ["Duplicate", duplicate],
    ["Delete", () => onDialog({ kind: "delete", run }), { danger: true, why: going ? "stop it first" : "" }],
  ];
  const metric = best(run);
  const ticked = compared.value.includes(run.id);
  const full = !ticked && compared.value.length >= MOST_COMPARED;
  return html`<li class="run ${route.value.run === run.id ? "chosen" : ""}">
    <a href=${address("train", [run.id])} aria-current=${route.value.run === run.id ? "true" : undefined}>
      <span class="name clip">${label(run)}</span>
      <span class="facts">
        <${Badge} status=${run.status} />
        ${run.status === "running" && run.progress !== null && html`<span class="number">${percent(run.progress)}</span>`}
        ${metric && !going && html`<span class="number">${words(metric[0])} ${number(metric[1])}</span>`}
      </span>
      <span class="facts">
        <span title=${run.task}>${run.task.split("/").at(-1)}</span>${run.devices?.length > 0 && html`<span>${deviceWords(run.devices)}</span>`}<span>${ago(run.created_at)}</span>
        ${run.tags.map((tag) => html`<span key=${tag} class="badge tag" title=${tag}><span class="clip">${tag}</span></span>`)}
      </span>
    </a>
    <span class="side">
      <${Menu} label=${`Actions for ${label(run)}`} items=${items} />
      <input
        type="checkbox"
        aria-label=${`Compare ${label(run)}`}
        title=${full ? `${MOST_COMPARED} runs at most` : "Compare"}
        checked=${ticked}
        disabled=${full}
        onChange=${(event) => setCompared(run.id, event.currentTarget.checked)}
      />
    </span>
  </li>`;
}

function RenameDialog({ run, onClose }) {
  const [name, setName] = useState(run.name ?? "");
  const save = async () => merge([await patch(runPath(run.id), { name: name.trim() || null })], []);
  return html`<${Dialog} title="Rename run" submit="Rename" onClose=${onClose} onSubmit=${save}>
    <label class="stack">
      Name
      <input class="input" maxlength="200" autocomplete="off" value=${name} onInput=${(event) => setName(event.currentTarget.value)} />
    </label>
  <//>`;
}

function TagsDialog({ run, onClose }) {
  const [text, setText] = useState(run.tags.join(", "));
  const tags = [...new Set(text.split(",").map((tag) => tag.trim()).filter(Boolean))];
  const save = async () => merge([await patch(runPath(run.id), { tags })], []);
  return html`<${Dialog} title="Edit tags" submit="Save" onClose=${onClose} onSubmit=${save}>
    <label class="stack">
      Tags, with commas between them
      <input class="input" autocomplete="off" value=${text} onInput=${(event) => setText(event.currentTarget.value)} />
    </label>
  <//>`;
}

function DeleteDialog({ run, onClose }) {
  const drop = async () => {
    await remove(runPath(run.id));
    merge([], [run.id]);
    setCompared(run.id, false);
    if (route.value.run === run.id) go("train");
  };
  return html`<${Dialog} title="Delete run" submit="Delete" danger onClose=${onClose} onSubmit=${drop}>
    <p>
      <strong>${label(run)}</strong> and its folder will be deleted, with checkpoints, logs and metrics. This cannot be undone.
    </p>
    <pre class="wrap">${run.path}</pre>
  <//>`;
}

/** Runs whose folder is damaged. */
function Problems() {
  const [first, ...rest] = problems.value;
  if (!first) return null;
  return html`<div class="note warn" role="status" aria-label="Runs that cannot be shown">
    <p>${first}</p>
    ${rest.length > 0 && html`<details><summary>and ${rest.length} more</summary>${rest.map((one) => html`<p key=${one}>${one}</p>`)}</details>`}
  </div>`;
}

const DIALOGS = { rename: RenameDialog, tags: TagsDialog, delete: DeleteDialog };

export function Runs() {
  const [dialog, setDialog] = useState(null);
  const [limit, setLimit] = useState(PAGE);
  const all = runs.value ?? [];
  const { text, status, order } = filters.value;
  const found = all.filter((run) => (!status || run.status === status) && matches(run, text)).sort(ORDERS[order][1]);
  const Chosen = dialog && DIALOGS[dialog.kind];
  return html`
    <div class="head">
      <h1>Runs</h1>
      <a class="button small" href=${address("train")}>New run</a>
    </div>
    <${Filters} shown=${found.length} all=${all.length} />
    <div class="scroll">
      <${Problems} />
      ${runs.value === null && html`<p class="empty" role="status">Loading runs…</p>`}
      ${runs.value !== null && !found.length && html`<p class="empty">${all.length ? "No run matches." : "No runs yet. Select devices and press Run."}</p>`}
      <ul aria-label="Runs">
        ${found.slice(0, limit).map((run) => html`<${Row} key=${run.id} run=${run} onDialog=${setDialog} />`)}
      </ul>
      ${found.length > limit &&
      html`<p class="empty">
        <button type="button" class="button" onClick=${() => setLimit(limit + PAGE)}>Show ${Math.min(PAGE, found.length - limit)} more</button>
      </p>`}
    </div>
    ${Chosen && html`<${Chosen} run=${dialog.run} onClose=${() => setDialog(null)} />`}
  `;
}
