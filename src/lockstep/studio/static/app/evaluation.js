// What evaluations left in the run folder: confusion matrices, pictures with a slider, results of `lockstep evaluate`.

import { html, useState } from "./html.js";
import { filePath } from "./api.js";
import { Job } from "./afterwards.js";
import { heading, number, percent } from "./format.js";
import { Button } from "./ui.js";

const isMatrix = (value) => Array.isArray(value) && value.length > 1 && value.every((row) => Array.isArray(row) && row.length === value.length && row.every(Number.isFinite));

function Confusion({ title, matrix, names }) {
  const totals = matrix.map((row) => row.reduce((sum, value) => sum + value, 0));
  const predicted = matrix[0].map((_, at) => matrix.reduce((sum, row) => sum + row[at], 0));
  const scores = matrix.map((row, at) => {
    const [recall, precision] = [row[at] / totals[at], row[at] / predicted[at]];
    return { name: names[at], total: totals[at], recall, precision, f1: (2 * row[at]) / (totals[at] + predicted[at]) };
  });
  const small = matrix.length <= 25;
  return html`<section class="card stack" aria-label=${title}>
    <h2>${title}</h2>
    <div class="confusion-and-scores">
      <div class="scroll-x"><table class="confusion" style=${{ "--classes": matrix.length }}>
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
      <div class="scroll-x"><table aria-label="Scores per class">
        <thead><tr>${["Class", "Precision", "Recall", "F1", "Samples"].map((head) => html`<th key=${head} scope="col">${head}</th>`)}</tr></thead>
        <tbody>
          ${scores.map((one) => html`<tr key=${one.name}><th scope="row">${one.name}</th>${["precision", "recall", "f1"].map((key) => html`<td key=${key} class="number">${percent(one[key])}</td>`)}<td class="number">${number(one.total)}</td></tr>`)}
        </tbody>
      </table></div>
    </div>
  </section>`;
}

function Pictures({ run, names }) {
  const groups = Map.groupBy(names, (name) => name.replace(/-epoch-\d+\.png$/, ""));
  return html`${[...groups].map(([title, files]) => html`<${Strip} key=${title} run=${run} title=${heading(title)} files=${files} />`)}`;
}

function Strip({ run, title, files }) {
  const [at, setAt] = useState(files.length - 1);
  const file = files[Math.min(at, files.length - 1)];
  const epoch = /-epoch-(\d+)\.png$/.exec(file)?.[1];
  const text = epoch ? `epoch ${Number(epoch)}` : file;
  return html`<section class="card stack" aria-label=${title}>
    <${Slider} title=${title} count=${files.length} at=${at} text=${text} onChange=${setAt} />
    <img class="picture" src=${filePath(run.id, `pictures/${file}`)} alt=${`${title}, ${text}`} />
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
  const matrices = Object.entries(tables).filter(([, value]) => isMatrix(value));
  const others = Object.entries(tables).filter(([, value]) => !isMatrix(value));
  const ours = jobs.filter(({ kind }) => kind === "evaluate");
  const none = !detail.remarks.length && !matrices.length && !others.length && !detail.pictures.length && !ours.length;
  return html`
    ${ours.map((job) => html`<${Job} key=${job.id} job=${job} />`)}
    ${matrices.map(([name, matrix]) => {
      const names = Array.isArray(classes) && classes.length === matrix.length ? classes.map(String) : matrix.map((_, at) => `${at}`);
      return html`<${Confusion} key=${name} title=${heading(name)} matrix=${matrix} names=${names} />`;
    })}
    ${detail.remarks.length > 0 && html`<${Remarks} run=${run.id} rows=${detail.remarks} />`}
    ${detail.pictures.length > 0 && html`<${Pictures} run=${run} names=${detail.pictures} />`}
    ${others.map(([name, value]) => html`<section key=${name} class="card stack"><h2>${heading(name)}</h2><pre class="wrap log" tabindex="0">${JSON.stringify(value, null, 1)}</pre></section>`)}
    ${none && html`<div class="empty stack"><p>No confusion matrix, pictures, remarks or evaluations yet. Tasks that return them show them here.</p>
      ${detail.checkpoints.length > 0 && html`<p><${Button} onClick=${onEvaluate}>Evaluate a checkpoint…<//></p>`}</div>`}
  `;
}
