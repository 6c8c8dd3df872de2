// Results of evaluations in the run folder: confusion matrices, other tables, pictures and remarks by epoch.

import { html, useState } from "./html.js";
import { filePath, runPath, useAnswer } from "./api.js";
import { heading, many, number, percent } from "./format.js";
import { Select, Table } from "./ui.js";

/** A list of numbers is a table with one column. */
const asRows = ([name, value]) => [name, Array.isArray(value) && value.every(Number.isFinite) ? value.map((one) => [one]) : value];

/** The kind of a task's table: a square `…confusion`, other rows of numbers, or text. */
function kindOf([name, value]) {
  const isRows = Array.isArray(value) && value.length > 0 && value.every((row) => Array.isArray(row) && row.length === value[0].length && row.every((one) => one === null || Number.isFinite(one)));
  if (!isRows) return "text";
  return /confusion(_?matrix)?$/i.test(name) && value.length > 1 && value.length === value[0].length ? "confusion" : "rows";
}

/** Precision, recall, F1 and number of samples of each class. */
const Scores = ({ names, rows }) => html`<${Table} label="Scores per class" heads=${["Class", ["Precision"], ["Recall"], ["F1"], ["Samples"]]} rows=${rows.map(([precision, recall, f1, total], at) => [names[at], ...[precision, recall, f1].map((share) => percent(share, 1)), number(total)])} />`;

/** The first of the `count` samples of class `target` that were predicted as `prediction`. */
function CellSamples({ run, names, cell: [target, prediction], count, onChoose }) {
  const { found } = useAnswer(runPath(run, "/confused"), []);
  if (!found || !Object.keys(found.cells).length) return null;
  const samples = found.cells[`${target},${prediction}`] ?? [];
  const classes = names.map((name, at) => [String(at), name]);
  const hasFiles = samples.some(([, file]) => file !== null);
  return html`<section class="stack" aria-label="Samples of a cell">
    <div class="row">
      <${Select} label="True" value=${String(target)} options=${classes} onChange=${(at) => onChoose([Number(at), prediction])} />
      <${Select} label="Predicted" value=${String(prediction)} options=${classes} onChange=${(at) => onChoose([target, Number(at)])} />
      <span class="muted number">${samples.length < count ? `the first ${samples.length} of ` : ""}${many(count, "sample")}</span>
    </div>
    ${samples.length > 0 && html`<div class="scroll-x samples" tabindex="0"><${Table} label="Samples" heads=${["Row", ...(hasFiles ? ["File"] : []), "True", "Predicted"]} rows=${samples.map(([index, file]) => [number(index), ...(hasFiles ? [file] : []), names[target], names[prediction]])} /></div>`}
  </section>`;
}

/** The cell of the most frequent mistake. */
function worstCell(matrix) {
  const mistakes = matrix.flatMap((row, target) => row.map((count, prediction) => [target === prediction ? -1 : count, target, prediction]));
  return mistakes.reduce((worst, one) => (one[0] > worst[0] ? one : worst)).slice(1);
}

function Confusion({ run, title, matrix, names }) {
  const [cell, setCell] = useState(worstCell(matrix));
  const totals = matrix.map((row) => row.reduce((sum, value) => sum + value, 0));
  const predicted = matrix[0].map((_, at) => matrix.reduce((sum, row) => sum + row[at], 0));
  const scores = matrix.map((row, at) => {
    const [recall, precision] = [row[at] / totals[at], row[at] / predicted[at]];
    return [precision, recall, (2 * row[at]) / (totals[at] + predicted[at]), totals[at]];
  });
  const small = matrix.length <= 25;
  return html`<section class="card stack" aria-label=${title}>
    <h2>${title}</h2>
    <div class="confusion-and-scores">
      <div class="scroll-x" tabindex="0"><table class="confusion" style=${{ "--classes": matrix.length }}>
        <thead><tr><th class="muted corner">true ↓<br />predicted →</th>${names.map((name) => html`<th key=${name} scope="col" title=${name}><span>${name}</span></th>`)}</tr></thead>
        <tbody>
          ${matrix.map(
            (row, at) => html`<tr key=${at}><th scope="row">${names[at]}</th>${row.map((value, other) => {
              const share = totals[at] ? value / totals[at] : 0;
              return html`<td key=${other} class=${`${at === other ? "right" : ""} ${at === cell[0] && other === cell[1] ? "chosen" : ""}`} onClick=${() => setCell([at, other])} style=${{ "--share": share }} title=${`${names[at]} as ${names[other]}: ${number(value)} (${percent(share)})`}>${small && value ? number(value) : ""}</td>`;
            })}</tr>`,
          )}
        </tbody>
      </table></div>
      <div class="scroll-x" tabindex="0"><${Scores} names=${names} rows=${scores} /></div>
    </div>
    <${CellSamples} run=${run} names=${names} cell=${cell} count=${matrix[cell[0]][cell[1]]} onChoose=${setCell} />
  </section>`;
}

/** The entry of the newest evaluation up to `epoch`; entries ascend. */
const upTo = (entries, epoch) => entries.findLast((entry) => entry.epoch <= epoch) ?? entries[0];

/** The entries of the chosen epoch and of the newest one, in two columns; `children` draws one. */
function SideBySide({ title, entries, epoch, children }) {
  const pair = [...new Set([upTo(entries, epoch), entries.at(-1)])];
  return html`<section class="card stack" aria-label=${title}>
    <h2>${title}</h2>
    <div class="epochs">${pair.map((entry) => html`<div key=${entry.epoch} class="stack"><span class="muted">epoch ${number(entry.epoch)}</span>${children(entry)}</div>`)}</div>
  </section>`;
}

/** Pictures and remarks (samples of text, recordings) of the validations, under one slider over the epochs. */
function Epochs({ run, remarks, pictures }) {
  const [at, setAt] = useState(Infinity);
  const files = Map.groupBy(pictures.map((file) => ({ file, epoch: Number(/-epoch-(\d+)\.png$/.exec(file)?.[1] ?? 0) })), ({ file }) => file.replace(/-epoch-\d+\.png$/, ""));
  const epochs = [...new Set([...remarks, ...[...files.values()].flat()].map(({ epoch }) => epoch))].sort((a, b) => a - b);
  if (!epochs.length) return null;
  const epoch = epochs[Math.min(at, epochs.length - 1)];
  const text = `epoch ${number(epoch)}`;
  return html`
    ${epochs.length > 1 && html`<label class="card row">Epoch <input class="grow" type="range" min="0" max=${epochs.length - 1} value=${epochs.indexOf(epoch)} aria-valuetext=${text} onInput=${(event) => setAt(Number(event.currentTarget.value))} /> <span class="number">${number(epoch)}</span></label>`}
    ${remarks.length > 0 && html`<${SideBySide} title="Remarks" entries=${remarks} epoch=${epoch}>${(row) => html`<ul class="stack">
      ${row.remarks.map(({ text: remark, audio }, place) => html`<li key=${place}>
        <p class="sample">${remark}</p>
        ${audio && html`<audio controls preload="none" aria-label=${remark} src=${filePath(run, `audio/${audio}`)}></audio>`}
      </li>`)}
    </ul>`}<//>`}
    ${[...files].map(([name, entries]) => html`<${SideBySide} key=${name} title=${heading(name)} entries=${entries} epoch=${epoch}>
      ${({ file, epoch: of }) => html`<img class="picture" src=${filePath(run, `pictures/${file}`)} alt=${`${heading(name)}, epoch ${of}`} />`}
    <//>`)}
  `;
}

export function Evaluation({ run, detail }) {
  if (!detail) return html`<p class="empty" role="status">Loading…</p>`;
  const { class_names: classes, ...tables } = detail.tables ?? {};
  const of = Map.groupBy(Object.entries(tables).map(asRows), kindOf);
  const namesOf = (rows) => (Array.isArray(classes) && classes.length === rows.length ? classes.map(String) : rows.map((_, at) => `${at}`));
  const none = !detail.remarks.length && !Object.keys(tables).length && !detail.pictures.length;
  return html`
    ${of.get("confusion")?.map(([name, matrix]) => html`<${Confusion} key=${name} run=${run.id} title=${heading(name)} matrix=${matrix} names=${namesOf(matrix)} />`)}
    <${Epochs} run=${run.id} remarks=${detail.remarks} pictures=${detail.pictures} />
    ${of.get("rows")?.map(([name, rows]) => html`<section key=${name} class="card stack scroll-x" tabindex="0"><h2>${heading(name)}</h2><${Table} label=${heading(name)} heads=${["", ...rows[0].map((_, at) => [at])]} rows=${rows.map((row, at) => [namesOf(rows)[at], ...row.map((value) => number(value))])} /></section>`)}
    ${of.get("text")?.map(([name, value]) => html`<section key=${name} class="card stack"><h2>${heading(name)}</h2><pre class="wrap log" tabindex="0">${JSON.stringify(value, null, 1)}</pre></section>`)}
    ${none && html`<p class="empty">No confusion matrix, pictures or remarks yet. Tasks that return them show them here.</p>`}
  `;
}
