// The page: the top bar and one of four views.

import { html, render, signal, useEffect } from "./html.js";
import { locked } from "./api.js";
import { loadCatalogue, refreshDevices, studio, trouble } from "./catalogue.js";
import { Compare } from "./compare.js";
import { Configuration } from "./configuration.js";
import { Doctor } from "./doctor.js";
import { keepPlanning } from "./draft.js";
import { connect, connection, instance } from "./live.js";
import { address, route } from "./route.js";
import { compared, Runs } from "./runs.js";
import { Scaling } from "./scaling.js";
import { State } from "./state.js";
import { Button, Problem, Tabs, Toasts } from "./ui.js";

const NARROW = matchMedia("(max-width: 899px)");
const narrow = signal(NARROW.matches);
NARROW.addEventListener("change", ({ matches }) => (narrow.value = matches));

const COLUMNS = [
  ["runs", "Runs", Runs],
  ["configuration", "Configuration", Configuration],
  ["state", "State", State],
];
const tab = signal(route.value.run ? "state" : "configuration");

function Training() {
  const { run } = route.value;
  // On a narrow screen, selecting a run shows it, and New run shows the form.
  useEffect(() => void (tab.value = run ? "state" : "configuration"), [run]);
  if (!narrow.value) {
    return html`<div class="columns">
      ${COLUMNS.map(([id, title, Column]) => html`<section key=${id} class="column" aria-label=${title}><${Column} /></section>`)}
    </div>`;
  }
  const [id, , Column] = COLUMNS.find(([name]) => name === tab.value);
  return html`<div class="narrow">
    <${Tabs} label="Training" tabs=${COLUMNS.map(([name, title]) => [name, title])} chosen=${id} onChoose=${(name) => (tab.value = name)} panel="training" />
    <section id="training" class="column" role="tabpanel" aria-labelledby=${`training-tab-${id}`}><${Column} key=${id} /></section>
  </div>`;
}

const VIEWS = { train: ["Training", Training], compare: ["Compare", Compare], scaling: ["Scaling", Scaling], doctor: ["Doctor", Doctor] };

function Bar() {
  const { view } = route.value;
  const words = { open: "live", connecting: "connecting…", lost: "connection lost, trying again" }[connection.value];
  return html`<header class="bar">
    <span class="brand" title=${studio.value ? `Lockstep ${studio.value.version} on ${studio.value.host}` : "Lockstep"}>
      <svg viewBox="0 0 18 18" aria-hidden="true">
        <g fill="none" stroke="currentColor" stroke-width="2.2" stroke-linecap="round" stroke-linejoin="round">
          <path d="M2 10.5 6.5 6 10.5 8 16 1.5" />
          <path d="M2 16.5 6.5 12 10.5 14 16 7.5" opacity=".5" />
        </g>
      </svg>
      <span>Lockstep</span>
    </span>
    <nav aria-label="Views">
      ${Object.entries(VIEWS).map(
        ([id, [title]]) => html`<a key=${id} href=${address(id, id === "compare" ? compared.value : [])} aria-current=${id === view ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <span class="link ${connection.value === "lost" ? "lost" : ""}" role="status" title=${words}><i aria-hidden="true"></i><span>${words}</span></span>
  </header>`;
}

function Page() {
  const [title, View] = VIEWS[route.value.view] ?? VIEWS.train;
  useEffect(() => void (document.title = `${title} – Lockstep studio`), [title]);
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <${Bar} />
    <div>
      ${locked.value && html`<p class="banner" role="alert">The studio's token has changed, or this session has expired. <${Button} kind="small" onClick=${() => location.reload()}>Enter the token<//></p>`}
      ${connection.value === "lost" && !locked.value && html`<p class="banner" role="status">The studio does not answer. Runs continue without it. This page reconnects automatically.</p>`}
      ${trouble.value && !locked.value && html`<div class="row" style=${{ padding: "8px 16px" }}><span class="grow"><${Problem} error=${trouble.value} /></span><${Button} onClick=${loadCatalogue}>Try again<//></div>`}
    </div>
    <main id="content" tabindex="-1"><${View} /></main>
    <${Toasts} />
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("content").focus();
}

// Another start of the server may have other devices, tasks and settings.
let known = null;
instance.subscribe((id) => {
  if (id !== null && known !== null && id !== known) loadCatalogue();
  known = id ?? known;
});
addEventListener("focus", () => connection.value === "open" && studio.value && refreshDevices().catch(() => {}));

keepPlanning();
loadCatalogue();
connect();
render(html`<${Page} />`, document.getElementById("page"));
