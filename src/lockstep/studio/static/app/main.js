// The page: the top bar, one view, and the form of a new run as a drawer.

import { html, render, effect, stored, useEffect, useLayoutEffect, useRef } from "./html.js";
import { locked, reconnects } from "./api.js";
import { loadCatalogue, refreshDevices, studio, trouble } from "./catalogue.js";
import { Compare } from "./compare.js";
import { Configuration } from "./configuration.js";
import { keepPlanning } from "./draft.js";
import { connect, connection, runs, silence } from "./live.js";
import { repaint } from "./plot.js";
import { address, drawer, route } from "./route.js";
import { compared, Runs } from "./runs.js";
import { Run } from "./run.js";
import { Boundary, Button, Opened, Problem, Toasts } from "./ui.js";

const VIEWS = { __proto__: null, runs: ["Runs", Runs], compare: ["Compare", Compare], run: ["Run", Run], group: ["Group", Compare] };

const theme = stored(localStorage, "lockstep-theme", "system");
effect(() => {
  document.documentElement.dataset.theme = theme.value;
  repaint();
});
const THEMES = { system: "light", light: "dark", dark: "system" };

function Bar() {
  const { view } = route.value;
  const words = silence.value ? `no answer for ${silence.value} s` : { open: "live", connecting: "connecting…", lost: "connection lost, trying again" }[connection.value];
  return html`<header class="bar">
    <a class="brand" href=${address("runs")} title=${studio.value ? `Lockstep ${studio.value.version} on ${studio.value.host}` : "Lockstep"}>
      <svg viewBox="0 0 18 18" aria-hidden="true"><use href="#logo" /></svg>
      <span>Lockstep</span>
    </a>
    <nav aria-label="Views">
      ${["runs", "compare"].map(
        (id) => html`<a key=${id} href=${address(id, id === "compare" ? compared.value.slice(0, 20) : [])} aria-current=${id === view || (id === "runs" && view === "run") ? "page" : undefined}>${VIEWS[id][0]}</a>`,
      )}
    </nav>
    <span class="link ${connection.value === "lost" || silence.value ? "lost" : ""}" role="status" title=${words}><i aria-hidden="true"></i><span>${words}</span></span>
    <button type="button" class="button quiet small theme" title="Theme" aria-label=${`Theme: ${theme.value}`} onClick=${() => (theme.value = THEMES[theme.value] ?? "system")}>${{ light: "☀", dark: "☾" }[theme.value] ?? "◐"}</button>
    <button type="button" class="button primary" aria-expanded=${drawer.value ? "true" : "false"} onClick=${() => (drawer.value = !drawer.value)}>New run</button>
  </header>`;
}

/** The form of a new run: a modal dialog beside the view. Escape, or a click beside it, closes it. */
function Drawer() {
  const dialog = useRef(null);
  const close = () => dialog.current.close(); // which returns the focus
  useLayoutEffect(() => dialog.current?.showModal(), [drawer.value]); // before the next key press
  if (!drawer.value) return null;
  return html`<dialog ref=${dialog} class="drawer column" aria-label="Configuration" onClose=${() => (drawer.value = false)} onClick=${(event) => event.target === dialog.current && close()}>
    <${Boundary}><${Configuration} onClose=${close} /><//>
    <${Toasts} />
  </dialog>`;
}

/** Scroll position by address, restored on the way back. */
const places = new Map();
/** Maximum time to wait until the content is long enough for its scroll position. */
const SETTLE_MS = 3000;
const placeOf = () => location.hash.split("?")[0];
const BOX = "main > .view, main .run-page > .scroll";

function Page() {
  const { view } = route.value;
  const [title, View] = VIEWS[view] ?? VIEWS.runs;
  useEffect(() => {
    if (view !== "run") document.title = `${title} – Lockstep studio`; // a run sets its title itself
  }, [title]);
  useEffect(() => {
    const wanted = places.get(placeOf()) ?? 0;
    let tries = SETTLE_MS / 50;
    const timer = setInterval(() => {
      const box = document.querySelector(BOX);
      const isLong = box && box.scrollHeight - box.clientHeight >= wanted;
      if (!isLong && --tries) return; // its content is still loading
      clearInterval(timer);
      if (box && wanted) box.scrollTop = wanted;
    }, 50);
    return () => clearInterval(timer);
  }, [placeOf(), runs.value === null]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => (event.preventDefault(), document.getElementById("content").focus())}>Skip to the content</a>
    <${Bar} />
    <div>
      ${locked.value && html`<p class="banner" role="alert">The studio's token has changed, or this session has expired. <${Button} kind="small" onClick=${() => location.reload()}>Enter the token<//></p>`}
      ${connection.value === "lost" && !locked.value && html`<p class="banner" role="status">The studio does not answer. Runs continue without it. This page reconnects automatically.</p>`}
      ${trouble.value && !locked.value && html`<div class="row" style=${{ padding: "8px 16px" }}><span class="grow"><${Problem} error=${trouble.value} /></span><${Button} onClick=${loadCatalogue}>Try again<//></div>`}
    </div>
    <div class="stage ${connection.value === "lost" || silence.value ? "stale" : ""}">
      <main id="content" tabindex="-1" onScrollCapture=${({ target }) => target.matches(BOX) && places.set(placeOf(), target.scrollTop)}><${Boundary} key=${view}><${View} /><//></main>
    </div>
    <${Drawer} />
    <${Opened} />
    ${!drawer.value && html`<${Toasts} />`}
  `;
}

// Another start of the server may have other devices, tasks and settings.
reconnects.subscribe((count) => count && loadCatalogue());
addEventListener("focus", () => connection.value === "open" && studio.value && refreshDevices().catch(() => {}));

// The first visit shows the form: tasks and devices.
const listed = runs.subscribe((all) => all && setTimeout(() => (listed(), (drawer.value ||= !all.length))));
keepPlanning();
loadCatalogue();
connect();
render(html`<${Page} />`, document.getElementById("page"));
