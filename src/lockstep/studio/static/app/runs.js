// The table of runs: columns to choose, sort, filter, groups with mean and spread, and actions on several runs.

import { computed, effect, html, signal, stored, useEffect, useMemo, useState } from "./html.js";
import { get, patch, post, remove, runPath } from "./api.js";
import { MOST_COMPARED } from "./compare.js";
import { replaceDraft } from "./draft.js";
import { parseFilter } from "./filter.js";
import { ago, clock, deviceWords, duration, heading, many, number, percent, plain } from "./format.js";
import { isGoing, label, merge, monitored, problems, runs, took } from "./live.js";
import { Overlay } from "./overlay.js";
import { address, drawer, go, keep, route } from "./route.js";
import { Badge, Button, Dialog, Menu, openDialog, Search, Select, showError, showMessage, Tag, TextDialog } from "./ui.js";

const PAGE = 100;
/** Number of rows to show, and the open groups. */
const limit = signal(PAGE);
const unfolded = signal(new Set());
const STATUSES = ["pending", "running", "completed", "failed", "stopped", "lost"];
/** Maximum number of runs in the charts beside the table. */
const MOST_BESIDE = 10;
/** Selected runs, in order of selection. */
export const compared = signal([]);

// Deleted runs are removed from the selection.
effect(() => {
  const here = new Set(runs.value?.map(({ id }) => id));
  const left = compared.peek().filter((id) => here.has(id));
  if (runs.value && left.length < compared.peek().length) compared.value = left;
});

/** The text that words of a filter are compared with. */
const textOf = (run) => [run.id, run.location, run.name, run.task, run.status, ...run.tags, ...(run.devices ?? [])].join(" ").toLowerCase();

/** The settings that differ between runs, by run; requested when a column or a filter needs one. */
const settings = signal(null);
const metricsOf = (run) => ({ __proto__: null, ...run.last_epoch, ...run.final_metrics, ...run.best_metric });
const COLUMNS = {
  __proto__: null,
  status: ["Status", (run) => run.status, (run) => html`<${Badge} status=${run.status} />${run.status === "running" && run.progress !== null ? html` <span class="number muted">${percent(run.progress)}</span>` : ""}`],
  monitored: ["Monitored", (run) => monitored(run)?.[1], (run) => (monitored(run) ? html`<span title=${heading(monitored(run)[0])}><span class="muted">${heading(monitored(run)[0])}</span> ${number(monitored(run)[1])}</span>` : "–")],
  created: ["Created", (run) => run.created_at, (run) => html`<span title=${clock(run.created_at)}>${ago(run.created_at)}</span>`],
  took: ["Duration", took, (run) => duration(took(run))],
  task: ["Task", (run) => run.task, (run) => html`<span title=${run.task}>${run.task.split("/").at(-1)}</span>`],
  devices: ["Devices", (run) => deviceWords(run.devices ?? [])],
  strategy: ["Strategy", (run) => run.strategy],
  epoch: ["Epoch", (run) => run.epoch],
  step: ["Step", (run) => run.step],
  samples_per_s: ["Samples/s, median", (run) => run.samples_per_s],
  tags: ["Tags", (run) => run.tags, (run) => run.tags.map((tag) => html`<${Tag} key=${tag} tag=${tag} /> `)],
};
const SHOWN = ["status", "monitored", "created", "took", "task", "devices", "tags"];

/** The value of a column, metric or setting of a run; undefined if it has none. */
function valueOf(run, name) {
  if (!name) return textOf(run);
  if (name === "name") return label(run);
  if (name === "tag") return run.tags;
  if (name === "device") return run.devices ?? [];
  const own = COLUMNS[name]?.[1](run) ?? metricsOf(run)[name];
  if (own !== undefined) return own;
  const given = { __proto__: null, ...settings.value?.same, ...settings.value?.runs[run.id] };
  return given[name] ?? given[Object.keys(given).find((key) => key.endsWith(`.${name}`))];
}

const cellOf = (run, name) => (COLUMNS[name]?.[2] ? COLUMNS[name][2](run) : plain(valueOf(run, name)));
const columnTitle = (name) => COLUMNS[name]?.[0] ?? (name.includes(".") ? name : heading(name));

function compareValues(a, b) {
  if (a === b) return 0;
  if (a === undefined || a === null || Number.isNaN(a)) return 1;
  if (b === undefined || b === null || Number.isNaN(b)) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

/** The options of the table, from the link. */
const table = computed(() => {
  const { query } = route.value;
  const [order = "-created"] = [query.get("sort") ?? undefined];
  return { text: query.get("filter") ?? "", status: query.get("status") ?? "", order, group: query.get("group") ?? "", charts: query.has("beside"), columns: query.get("columns")?.split(",").filter(Boolean) ?? SHOWN };
});

/** The links of named views of the table, by name. */
const views = stored(localStorage, "lockstep-views", {});

function Views() {
  const link = `#/runs?${route.value.query}`;
  const shown = Object.keys(views.value).find((title) => views.value[title] === link);
  const { [shown]: _, ...others } = views.value;
  const items = [
    ...Object.entries(views.value).map(([title, to]) => [title, () => (location.hash = to)]),
    ["Name this view…", () => openDialog(ViewDialog, { link })],
    ...(shown ? [[`Forget ${shown}`, () => (views.value = others), { danger: true }]] : []),
  ];
  return html`<${Menu} label="Views" text="Views" items=${items} />`;
}

const ViewDialog = ({ link, onClose }) => html`<${TextDialog} title="Name this view" name="Name" most=${40} required onClose=${onClose} onSubmit=${(title) => (views.value = { ...views.value, [title]: link })} />`;

const fetchSettings = () => get("/settings").then((found) => (settings.value = found), showError);

function useSettings(wanted) {
  useEffect(() => void (wanted && fetchSettings()), [wanted, runs.value?.length]);
}

/** Names of metrics and settings that some run has. */
function offered(all) {
  const metrics = new Set(all.flatMap((run) => Object.keys(metricsOf(run))));
  const keys = new Set(Object.values(settings.value?.runs ?? {}).flatMap((one) => Object.keys(one)));
  return { metrics: [...metrics].filter((name) => !["attempt", "complete"].includes(name) && !(name in COLUMNS)).sort(), settings: [...keys].sort() };
}

function ColumnsDialog({ onClose }) {
  useSettings(true);
  const [text, setText] = useState("");
  const { columns } = table.value;
  const names = offered(runs.value ?? []);
  const toggle = (name, on) => keep("columns", (on ? [...columns, name] : columns.filter((one) => one !== name)).join(",") || "status");
  return html`<${Dialog} title="Columns" onClose=${onClose}>
    <${Search} label="Search columns" text=${text} onSearch=${setText} />
    ${[["Run", Object.keys(COLUMNS)], ["Metrics", names.metrics], ["Settings that differ", names.settings]].map(
      ([title, list]) => html`<fieldset key=${title} class="stack">
        <legend class="eyebrow">${title}</legend>
        <div class="options">
          ${list.filter((name) => `${name} ${columnTitle(name)}`.toLowerCase().includes(text.toLowerCase())).map(
            (name) => html`<label key=${name} class="row"><input type="checkbox" checked=${columns.includes(name)} onChange=${(event) => toggle(name, event.currentTarget.checked)} /><span class="clip" title=${name}>${columnTitle(name)}</span></label>`,
          )}
        </div>
      </fieldset>`,
    )}
  <//>`;
}

function Filters({ shown, all }) {
  const { text, status, group, charts } = table.value;
  const groups = [...new Set(["task", "status", "devices", "strategy", "tags", ...offered(all).settings, ...(group ? [group] : [])])];
  return html`<div class="filters" role="search" aria-label="Runs">
    <${Search} label="Search runs" hint="Filter: words, val_accuracy > 0.9, tag:baseline, device:gpu, lr = 0.001" grow="grow" text=${text} onSearch=${(one) => keep("filter", one)} />
    <${Select} label="Status" bare value=${status} options=${[["", "Any status"], ...STATUSES]} onChange=${(one) => keep("status", one)} />
    <${Select} label="Group by" bare value=${group} options=${[["", "No groups"], ...groups.map((one) => [one, `Group by ${columnTitle(one)}`])]} onFocus=${fetchSettings} onChange=${(one) => keep("group", one)} />
    <${Button} onClick=${() => openDialog(ColumnsDialog)}>Columns<//>
    <${Views} />
    <${Button} aria-pressed=${charts ? "true" : "false"} onClick=${() => keep("beside", charts ? null : "1")}>Charts<//>
    <span class="muted number" role="status">${runs.value === null ? "" : shown === all.length ? many(shown, "run") : `${number(shown)} of ${many(all.length, "run")}`}</span>
  </div>`;
}

/** Fill the form with the configuration of a run. */
async function duplicate(run) {
  try {
    const copy = await post(runPath(run.id, "/duplicate"));
    replaceDraft(copy);
    drawer.value = true;
    showMessage("The form has the configuration of this run");
    if (copy.left_out.length) showMessage(`Left out, because the page may not set it: ${copy.left_out.join(", ")}`, { bad: true });
  } catch (error) {
    showError(error);
  }
}

/** The actions on one run, as items of a menu. */
export const actionsFor = (run) => [
  ["Rename", () => openDialog(RenameDialog, { run })],
  ["Edit tags", () => openDialog(TagsDialog, { run })],
  ["Duplicate", () => duplicate(run)],
  ["Delete", () => openDialog(DeleteDialog, { run }), { danger: true, why: isGoing(run) ? "stop it first" : "" }],
];

function Row({ run, columns, numeric }) {
  const ticked = compared.value.includes(run.id);
  const take = ({ currentTarget: { checked } }) => (compared.value = [...compared.value.filter((id) => id !== run.id), ...(checked ? [run.id] : [])]);
  return html`<tr class=${ticked ? "chosen" : ""}>
    <td class="tick"><label class="hit"><input type="checkbox" aria-label=${`Select ${label(run)}`} checked=${ticked} onChange=${take} /></label></td>
    <th scope="row" class="name"><a class="clip" href=${address("run", [run.id])} title=${`${label(run)} (${run.id})`}>${label(run)}</a></th>
    ${columns.map((name) => html`<td key=${name} data-title=${columnTitle(name)} class=${numeric.has(name) ? "number" : ""}>${cellOf(run, name)}</td>`)}
    <td class="more"><${Menu} label=${`Actions for ${label(run)}`} items=${actionsFor(run)} /></td>
  </tr>`;
}

/** Mean and sample standard deviation of a column's numbers. */
function spread(rows, name) {
  const values = rows.map((run) => valueOf(run, name)).filter((value) => typeof value === "number" && Number.isFinite(value));
  if (!values.length) return "";
  if (name === "monitored" && new Set(rows.map((run) => monitored(run)?.[0])).size > 1) return ""; // of several metrics
  const text = name === "took" ? duration : number;
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  if (values.length === 1) return text(mean, 3);
  return `${text(mean, 3)} ± ${text(Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)), 2)}`;
}

const FIXED = new Set(["status", "created", "task", "devices", "tags"]);

function Group({ name, value, rows, columns, ...rest }) {
  const isOpen = unfolded.value.has(value);
  const toggle = () => (unfolded.value = isOpen ? unfolded.value.difference(new Set([value])) : new Set([...unfolded.value, value]));
  return html`<tr class="group-row">
      <td></td>
      <th scope="row" class="name"><button type="button" class="button quiet small" aria-expanded=${isOpen ? "true" : "false"} onClick=${toggle}>${isOpen ? "▾" : "▸"} ${columnTitle(name)} ${plain(value)}</button> <span class="muted">${many(rows.length, "run")}</span></th>
      ${columns.map((column) => html`<td key=${column} class="number">${FIXED.has(column) ? "" : spread(rows, column)}</td>`)}
      <td></td>
    </tr>
    ${isOpen && rows.map((run) => html`<${Row} key=${run.id} run=${run} columns=${columns} ...${rest} />`)}`;
}

/** Actions on the selected runs. */
function Selected({ all }) {
  const chosen = all.filter(({ id }) => compared.value.includes(id));
  if (!chosen.length) return null;
  const going = chosen.filter(isGoing);
  const stop = () => Promise.allSettled(going.map((run) => post(runPath(run.id, "/stop")))).then((done) => showMessage(`${done.filter(({ status }) => status === "fulfilled").length} of ${going.length} runs are stopping`));
  const why = chosen.length < 2 ? "select two runs or more" : chosen.length > MOST_COMPARED ? `${MOST_COMPARED} runs at most` : "";
  return html`<div class="selected row" role="group" aria-label="Selected runs">
    <strong>${chosen.length} selected</strong>
    ${why ? html`<${Button} kind="small" why=${why} onClick=${() => {}}>Compare<//>` : html`<a class="button small primary" href=${address("compare", compared.value)}>Compare ${chosen.length}</a>`}
    <${Button} kind="small" onClick=${() => openDialog(BulkTagsDialog, { run: chosen })}>Add tag…<//>
    <${Button} kind="small" why=${going.length ? "" : "none of them is running"} onClick=${stop}>Stop<//>
    <${Button} kind="small danger" why=${going.length ? "stop them first" : ""} onClick=${() => openDialog(DeleteDialog, { run: chosen })}>Delete…<//>
    <${Button} kind="small quiet" onClick=${() => (compared.value = [])}>Clear<//>
  </div>`;
}

/** A dialog with a text; `change(text, run)`: the new labels of each of its runs. */
const labelDialog = (options, change) => ({ run, onClose }) => {
  const save = async (text) => merge(await Promise.all([run].flat().map((one) => patch(runPath(one.id), change(text, one)))), []);
  return html`<${TextDialog} onClose=${onClose} onSubmit=${save} ...${options(run)} />`;
};

const tagsOf = (text) => [...new Set(text.split(",").map((tag) => tag.trim()).filter(Boolean))];
const BulkTagsDialog = labelDialog((some) => ({ title: `Add a tag to ${many(some.length, "run")}`, name: "Tag", submit: "Add", most: 40, required: true }), (text, run) => ({ tags: [...run.tags, text] }));
const RenameDialog = labelDialog(({ name }) => ({ title: "Rename run", name: "Name", submit: "Rename", most: 200, before: name ?? "" }), (text) => ({ name: text || null }));
const TagsDialog = labelDialog(({ tags }) => ({ title: "Edit tags", name: "Tags, with commas between them", before: tags.join(", ") }), (text) => ({ tags: tagsOf(text) }));

function DeleteDialog({ run, onClose }) {
  const chosen = [run].flat();
  const drop = async () => {
    for (const { id } of chosen) {
      await remove(runPath(id));
      merge([], [id]);
      if (route.value.run === id) go("runs");
    }
  };
  return html`<${Dialog} title=${chosen.length === 1 ? "Delete run" : `Delete ${many(chosen.length, "run")}`} submit="Delete" danger onClose=${onClose} onSubmit=${drop}>
    <p>Deletes the ${chosen.length === 1 ? "folder of this run" : "folders of these runs"}, with checkpoints, logs and metrics. This cannot be undone.</p>
    <pre class="wrap">${chosen.map((one) => `${label(one)}\n${one.path}`).join("\n\n")}</pre>
  <//>`;
}

/** Runs whose folder is damaged. */
const Problems = () => problems.value.length > 0 && html`<div class="note warn" role="status" aria-label="Runs that cannot be shown">${problems.value.map((one) => html`<p key=${one}>${one}</p>`)}</div>`;

function Heads({ columns, numeric, order }) {
  const [descending, by] = order.startsWith("-") ? [true, order.slice(1)] : [false, order];
  const head = (name, title) => html`<th key=${name} scope="col" class=${numeric.has(name) ? "number" : ""} aria-sort=${name === by ? (descending ? "descending" : "ascending") : undefined}>
    <button type="button" class="sort" onClick=${() => keep("sort", name === by && !descending ? `-${name}` : name)}>${title}${name === by ? (descending ? " ↓" : " ↑") : ""}</button>
  </th>`;
  return html`<tr><th class="tick"><span class="unseen">Select</span></th>${head("name", "Name")}${columns.map((name) => head(name, columnTitle(name)))}<th><span class="unseen">Actions</span></th></tr>`;
}

/** Loss and monitored metrics of the selected runs, else of the first ones of the table. */
function Beside({ found, group }) {
  const shown = compared.value.length ? found.filter(({ id }) => compared.value.includes(id)) : found;
  const some = shown.slice(0, MOST_BESIDE);
  const names = [...new Set(some.map((run) => run.monitor ?? monitored(run)?.[0]).filter(Boolean))];
  const groups = group ? new Map(some.map((run) => [run.id, `${columnTitle(group)} ${plain(valueOf(run, group))}`])) : null;
  return html`<div class="stack" aria-label="Curves" role="region">
    <${Overlay} ids=${some.map(({ id }) => id)} groups=${groups} only=${["loss", "val_loss", ...names]} />
    ${shown.length > some.length && html`<p class="muted">The first ${some.length} of ${many(shown.length, "run")}; select others in the table.</p>`}
  </div>`;
}

export function Runs() {
  const all = runs.value ?? [];
  const { text, status, order, group, columns, charts } = table.value;
  const known = new Set([...Object.keys(COLUMNS), "name"]);
  useSettings(/[=<>:]/.test(text) || [...columns, order.replace(/^-/, ""), group].some((name) => name && !known.has(name)));
  const found = useMemo(() => {
    const test = parseFilter(text);
    const [sign, by] = order.startsWith("-") ? [-1, order.slice(1)] : [1, order];
    return all
      .filter((run) => (!status || run.status === status) && test(run, valueOf))
      .sort((a, b) => sign * compareValues(valueOf(a, by), valueOf(b, by)));
  }, [all, text, status, order, settings.value]);
  const groups = group && [...Map.groupBy(found, (run) => String(plain(valueOf(run, group))))];
  // A column of numbers ends below the end of its heading, also where a run has none.
  const numeric = new Set(columns.filter((name) => found.slice(0, limit.value).some((run) => typeof valueOf(run, name) === "number")));
  return html`<section class="view wide" aria-label="Runs">
    <${Filters} shown=${found.length} all=${all} />
    <${Selected} all=${all} />
    <${Problems} />
    ${runs.value === null && html`<p class="empty" role="status">Loading runs…</p>`}
    ${runs.value !== null && !all.length && html`<div class="empty stack"><p>No runs yet.</p><p><${Button} kind="primary" onClick=${() => (drawer.value = true)}>Start the first run<//></p></div>`}
    ${all.length > 0 && !found.length && html`<p class="empty">No run matches.</p>`}
    ${found.length > 0 &&
    html`<div class=${charts ? "beside" : ""}><div class="scroll-x card flush">
      <table class="runs" aria-label="Runs">
        <thead><${Heads} columns=${columns} numeric=${numeric} order=${order} /></thead>
        <tbody>
          ${groups
            ? groups.map(([value, rows]) => html`<${Group} key=${value} name=${group} value=${value} rows=${rows} columns=${columns} numeric=${numeric} />`)
            : found.slice(0, limit.value).map((run) => html`<${Row} key=${run.id} run=${run} columns=${columns} numeric=${numeric} />`)}
        </tbody>
      </table>
    </div>${charts && html`<${Beside} found=${found} group=${group} />`}</div>`}
    ${!groups && found.length > limit.value &&
    html`<p class="empty"><${Button} onClick=${() => (limit.value += PAGE)}>Show ${Math.min(PAGE, found.length - limit.value)} more<//></p>`}
  </section>`;
}
