// The decisions of a plan, with their reasons.

import { html } from "./html.js";

/** Decisions of a plan with their reasons. */
export function Decisions({ decisions }) {
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
  </div>`;
}
