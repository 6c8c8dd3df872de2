// What evaluations left in the run folder: confusion matrices, pictures with a slider, results of `lockstep evaluate`.

import { html, useState } from "./html.js";
import { filePath } from "./api.js";
import { Job } from "./afterwards.js";
import { heading, number, percent } from "./format.js";
import { Button, Table } from "./ui.js";

/** What a table of the task shows: a square `…confusion`, the scores of `…per_class`, other rows of numbers, or neither. */
function kindOf([name, value]) {
  const isRows = Array.isArray(value) && value.length > 0 && value.every((row) => Array.isArray(row) && row.length === value[0].length && row.every((one) => one === null || Number.isFinite(one)));
  if (!isRows) return "text";
  if (name.endsWith("confusion") && value.length > 1 && value.length === value[0].length) return "confusion";
  return name.endsWith("per_class") && value[0].length === 4 ? "scores" : "rows";
}

/** Precision, recall, F1 and number of samples of each class. */
const Scores = ({ names, rows }) => html`<${Table} label="Scores per class" heads=${["Class", ["Precision"], ["Recall"], ["F1"], ["Samples"]]} rows=${rows.map(([precision, recall, f1, total], at) => [names[at], ...[precision, recall, f1].map((share) => percent(share, 1)), number(total)])} />`;

function Confusion({ title, matrix, names }) {
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
              return html`<td key=${other} class=${at === other ? "right" : ""} style=${{ "--share": share }} title=${`${names[at]} as ${names[other]}: ${number(value)} (${percent(share)})`}>${small && value ? number(value) : ""}</td>`;
            })}</tr>`,
          )}
        </tbody>
      </table></div>
      <div class="scroll-x" tabindex="0"><${Scores} names=${names} rows=${scores} /></div>
    </div>
  </section>`;
}

function Strip({ run, title, files }) {
  const [at, setAt] = useState(files.length - 1);
  const file = files[Math.min(at, files.length - 1)];
  const epoch = /-epoch-(\d+)\.png$/.exec(file)?.[1];
  const text = epoch ? `epoch ${Number(epoch)}` : file;
  return html`<section class="card stack" aria-label=${title}>
    <${Slider} title=${title} count=${files.length} at=${at} text=${text} onChange=${setAt} />
    <img class="picture" onLoad=${({ currentTarget: it }) => it.classList.toggle("small", it.naturalHeight < 96)} src=${filePath(run.id, `pictures/${file}`)} alt=${`${title}, ${text}`} />
  </section>`;
}

/** What the task said of each evaluation: samples of text, recordings with what was heard. */
function Remarks({ run, rows }) {
  const [at, setAt] = useState(null);
  const row = rows[Math.min(at ?? Infinity, rows.length - 1)];
  return html`<section class="card stack" aria-label="Remarks">
    <${Slider} title="Remarks" count=${rows.length} at=${rows.indexOf(row)} onChange=${(place) => setAt(place === rows.length - 1 ? null : place)} text=${`epoch ${number(row.epoch)}, step ${number(row.step)}`} />
    <ul class="stack">
      ${row.remarks.map(({ text, audio }, place) => html`<li key=${place}>
        <p class="sample">${text}</p>
        ${audio && html`<audio controls preload="none" aria-label=${text} src=${filePath(run, `audio/${audio}`)}></audio>`}
      </li>`)}
    </ul>
  </section>`;
}

/** A heading, and where there are several evaluations a slider over them. */
const Slider = ({ title, count, at, text, onChange }) => html`<div class="row between"><h2>${title}</h2><span class="muted number">${text}</span></div>
  ${count > 1 && html`<input type="range" min="0" max=${count - 1} value=${at} aria-label=${`Epoch of ${title}`} aria-valuetext=${text} onInput=${(event) => onChange(Number(event.currentTarget.value))} />`}`;

export function Evaluation({ run, detail, jobs, onEvaluate }) {
  if (!detail) return html`<p class="empty" role="status">Loading…</p>`;
  const { class_names: classes, ...tables } = detail.tables ?? {};
  const of = Map.groupBy(Object.entries(tables), kindOf);
  const namesOf = (rows) => (Array.isArray(classes) && classes.length === rows.length ? classes.map(String) : rows.map((_, at) => `${at}`));
  // A confusion matrix has these scores beside it.
  const scores = (of.get("scores") ?? []).filter(([name]) => !(name.replace("per_class", "confusion") in tables));
  const pictures = Map.groupBy(detail.pictures, (name) => name.replace(/-epoch-\d+\.png$/, ""));
  const ours = jobs.filter(({ kind }) => kind === "evaluate");
  const none = !detail.remarks.length && !Object.keys(tables).length && !detail.pictures.length && !ours.length;
  return html`
    ${ours.map((job) => html`<${Job} key=${job.id} job=${job} />`)}
    ${of.get("confusion")?.map(([name, matrix]) => html`<${Confusion} key=${name} title=${heading(name)} matrix=${matrix} names=${namesOf(matrix)} />`)}
    ${scores.map(([name, rows]) => html`<section key=${name} class="card stack scroll-x" tabindex="0"><h2>${heading(name)}</h2><${Scores} names=${namesOf(rows)} rows=${rows} /></section>`)}
    ${detail.remarks.length > 0 && html`<${Remarks} run=${run.id} rows=${detail.remarks} />`}
    ${[...pictures].map(([title, files]) => html`<${Strip} key=${title} run=${run} title=${heading(title)} files=${files} />`)}
    ${of.get("rows")?.map(([name, rows]) => html`<section key=${name} class="card stack scroll-x" tabindex="0"><h2>${heading(name)}</h2><${Table} label=${heading(name)} heads=${["", ...rows[0].map((_, at) => [at])]} rows=${rows.map((row, at) => [namesOf(rows)[at], ...row.map((value) => number(value))])} /></section>`)}
    ${of.get("text")?.map(([name, value]) => html`<section key=${name} class="card stack"><h2>${heading(name)}</h2><pre class="wrap log" tabindex="0">${JSON.stringify(value, null, 1)}</pre></section>`)}
    ${none && html`<div class="empty stack"><p>No confusion matrix, pictures, remarks or evaluations yet. Tasks that return them show them here.</p>
      ${detail.checkpoints.length > 0 && html`<p><${Button} onClick=${onEvaluate}>Evaluate a checkpoint…<//></p>`}</div>`}
  `;
}
