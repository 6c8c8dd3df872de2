// The decisions of a plan, with their reasons.

import { html } from "./html.js";
import { forPage } from "./catalogue.js";

export function Decisions({ decisions = {}, notes = [] }) {
  return html`<div class="card scroll-x">
    <h2>The plan</h2>
    <table>
      <thead>
        <tr><th scope="col">Decision</th><th scope="col">Value</th><th scope="col">Why</th></tr>
      </thead>
      <tbody>
        ${Object.values(decisions).map(
          ({ key, title, shown, reason }) => html`<tr key=${key}><th scope="row">${title[0].toUpperCase() + title.slice(1)}</th><td>${shown}</td><td class="muted">${reason}</td></tr>`,
        )}
      </tbody>
    </table>
    ${notes.map(({ text }) => html`<p key=${text} class="note">${forPage(text)}</p>`)}
  </div>`;
}
