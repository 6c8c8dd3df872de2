// The decisions of a plan, with their reasons.

import { html } from "./html.js";
import { forPage } from "./catalogue.js";
import { Table } from "./ui.js";

export function Decisions({ decisions = {}, notes = [] }) {
  return html`<div class="card scroll-x" tabindex="0">
    <h2>The plan</h2>
    <${Table} label="Decisions" heads=${["Decision", "Value", "Why"]} rows=${Object.values(decisions).map(({ title, shown, reason }) => [title[0].toUpperCase() + title.slice(1), shown, reason])} classOf=${(_, at) => (at ? "muted" : "")} />
    ${notes.map(({ text }) => html`<p key=${text} class="note">${forPage(text)}</p>`)}
  </div>`;
}
