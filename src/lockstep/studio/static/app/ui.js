// General components.

import { html, signal, useErrorBoundary, useEffect, useId, useRef, useState } from "./html.js";
import { address } from "./route.js";

export const Badge = ({ status }) => html`<span class="badge ${status}">${status}</span>`;

/** A tag, which leads to the runs that have it. */
export const Tag = ({ tag }) => html`<a class="badge tag" title=${tag} href=${address("group", [tag])}><span class="clip">${tag}</span></a>`;

/**
 * A button whose title says why it is disabled. Unlike `disabled` it keeps the focus, so that keyboard and screen reader
 * find the reason; a click on it then calls `onRefused`.
 */
export const Button = ({ kind = "", why = "", onClick, onRefused, busy = false, title, ...rest }) =>
  html`<button type="button" class="button ${kind}" aria-disabled=${why || busy ? "true" : undefined} title=${why || title} ...${rest} onClick=${(event) => (why ? onRefused?.() : busy || onClick(event))}></button>`;

/** Show an error in place of children that throw, so that the rest of the page works. */
export function Boundary({ children }) {
  const [error, again] = useErrorBoundary((error) => console.warn(error));
  if (!error) return children;
  return html`<div class="stack"><${Problem} error=${{ message: "This part of the page cannot be shown.", why: String(error.message ?? error) }} /><div><${Button} onClick=${again}>Try again<//></div></div>`;
}

/** An error of the server's shape {message, why, fix}, or a plain sentence. */
export function Problem({ error }) {
  if (!error || error.status === 401) return null; // a locked page has a banner
  return html`<div class="note bad" role="alert">
    <div>${error.message ?? String(error)}</div>
    ${error.why && html`<div class="muted">${error.why}</div>`}
    ${error.fix && html`<div class="fix">Fix: ${error.fix}</div>`}
  </div>`;
}

const toasts = signal([]);
let nextToast = 1;

/** Shows a message for some seconds; errors stay until they are closed. */
export function showMessage(text, { bad = false } = {}) {
  const id = nextToast++;
  toasts.value = [...toasts.value.slice(-3), { id, text, bad }];
  if (!bad) setTimeout(() => dismiss(id), 5000);
}

export const showError = ({ message, why, fix }) => showMessage([message, why, fix && `Fix: ${fix}`].filter(Boolean).join(" – "), { bad: true });

const dismiss = (id) => (toasts.value = toasts.value.filter((toast) => toast.id !== id));

export function Toasts() {
  return html`<div class="toasts" role="status" aria-live="polite">
    ${toasts.value.map(
      ({ id, text, bad }) => html`<div key=${id} class="toast ${bad ? "bad" : ""}">
        <span class="grow">${text}</span>
        <button type="button" class="button quiet small" aria-label="Close message" onClick=${() => dismiss(id)}>✕</button>
      </div>`,
    )}
  </div>`;
}

const refused = () => showMessage("The browser does not allow access to the clipboard; select the text instead", { bad: true });
const copies = (text) => (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => showMessage("Copied"), refused);

/** Text with a button that copies it. `of`: added to the title for screen readers; `empty`: shown for no text. */
export const Code = ({ title, text, of = "", wrap = false, empty = "" }) =>
  html`<div class="row between"><h2>${title}</h2><${Button} kind="quiet small" onClick=${() => copies(text)} aria-label=${`Copy ${title}`}>Copy<//></div>
    <pre class=${wrap ? "wrap" : ""} tabindex="0" aria-label=${`${title}${of}`}>${text || empty}</pre>`;

/** A choice; `options`: values, or [value, text, attributes]. `bare`: the label, if any, is for screen readers only. */
export function Select({ label, bare = false, kind = "row", value, options, onChange, ...rest }) {
  const choice = html`<select class="input" aria-label=${bare ? label : undefined} value=${value} onChange=${(event) => onChange(event.currentTarget.value)} ...${rest}>
    ${options.map((one) => (Array.isArray(one) ? one : [one, one])).map(([id, text, more]) => html`<option key=${id} value=${id} selected=${id === value} ...${more}>${text}</option>`)}
  </select>`;
  return bare ? choice : html`<label class=${kind}>${label} ${choice}</label>`;
}

/**
 * A table. `heads`: texts; a text in a list heads a column of numbers. `rows`: lists of cells; the first cell names the row.
 * `classOf(row, column)`: the class of a cell after the name.
 */
export const Table = ({ label, heads, rows, classOf = () => "" }) => {
  const kind = (column) => (Array.isArray(heads[column]) ? "number" : "");
  return html`<table aria-label=${label}>
    <thead><tr>${heads.map((head, at) => html`<th key=${at} scope="col" class=${kind(at)}>${head}</th>`)}</tr></thead>
    <tbody>
      ${rows.map(([name, ...cells], row) => html`<tr key=${row}><th scope="row">${name}</th>${cells.map((cell, at) => html`<td key=${at} class=${`${kind(at + 1)} ${classOf(row, at)}`}>${cell}</td>`)}</tr>`)}
    </tbody>
  </table>`;
};

/** A labelled checkbox. */
export const Tick = ({ on, onTick, children }) => html`<label class="row"><input type="checkbox" checked=${on} onChange=${(event) => onTick(event.currentTarget.checked)} />${children}</label>`;

/** A search field; its placeholder is the `hint`, by default the label. */
export const Search = ({ label, hint = label, text, onSearch, grow = "" }) => html`<input class=${`input ${grow}`} type="search" aria-label=${label} placeholder=${hint} value=${text} onInput=${(event) => onSearch(event.currentTarget.value)} />`;

const opened = signal(null);
/** Open a dialog with these `properties` and `onClose`. */
export const openDialog = (Kind, properties = {}) => (opened.value = [Kind, properties]);

/** The dialog that is open. */
export function Opened() {
  const [Kind, properties] = opened.value ?? [];
  return Kind ? html`<${Kind} ...${properties} onClose=${() => (opened.value = null)} />` : null;
}

/** A modal `<dialog>`: focus stays inside, Escape closes it, and focus returns. */
export function Dialog({ title, onClose, onSubmit, submit = "OK", danger = false, why = "", children }) {
  const dialog = useRef(null);
  const heading = useId();
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const send = async (event) => {
    event.preventDefault();
    if (busy || why) return;
    setBusy(true);
    setError(null);
    await (async () => onSubmit())().then(() => onClose(), setError);
    setBusy(false);
  };
  return html`<dialog ref=${dialog} aria-labelledby=${heading} onClose=${onClose}>
    <form onSubmit=${send}>
      <h1 id=${heading}>${title}</h1>
      ${children}
      <${Problem} error=${error} />
      <div class="row" style=${{ justifyContent: "flex-end" }}>
        <button type="button" class="button" onClick=${onClose}>${onSubmit ? "Cancel" : "Close"}</button>
        ${onSubmit &&
        html`<button type="submit" class="button ${danger ? "danger" : "primary"}" disabled=${busy || Boolean(why)} title=${why}>${submit}</button>`}
      </div>
    </form>
  </dialog>`;
}

/**
 * Move the focus among `items` with the keys of `steps` ({ArrowDown: 1, …}), Home and End. Return the index of the focused
 * item, or undefined for another key.
 */
function moveFocus(event, items, steps) {
  const at = items.indexOf(document.activeElement) + (steps[event.key] ?? NaN);
  const to = { Home: 0, End: items.length - 1 }[event.key] ?? (at + items.length) % items.length;
  if (Number.isNaN(to)) return undefined;
  event.preventDefault();
  items[to].focus();
  return to;
}

/** A dialog with one field, `name`, of at most `most` characters; `onSubmit(text)` gets its text. */
export function TextDialog({ name, before = "", most, required = false, onSubmit, children, ...rest }) {
  const [text, setText] = useState(before);
  return html`<${Dialog} submit="Save" ...${rest} onSubmit=${() => onSubmit(text.trim())} why=${required && !text.trim() ? `enter a ${name.toLowerCase()}` : ""}>
    <label class="stack">${name}<input class="input" autocomplete="off" maxlength=${most} value=${text} onInput=${(event) => setText(event.currentTarget.value)} /></label>
    ${children}
  <//>`;
}

/** Tabs after the ARIA pattern: arrows move, the panel is the caller's. `tabs`: [[id, label], …] */
export function Tabs({ label, tabs, chosen, onChoose, panel }) {
  const move = (event) => {
    const to = moveFocus(event, [...event.currentTarget.children], { ArrowRight: 1, ArrowLeft: -1 });
    if (to !== undefined) onChoose(tabs[to][0]);
  };
  const tab = ([id, text]) => {
    const state = { "aria-selected": String(id === chosen), tabindex: id === chosen ? 0 : -1 };
    return html`<button key=${id} type="button" role="tab" id=${`${panel}-tab-${id}`} class="tab" aria-controls=${panel} ...${state} onClick=${() => onChoose(id)}>${text}</button>`;
  };
  return html`<div role="tablist" aria-label=${label} class="tabs" onKeyDown=${move}>${tabs.map(tab)}</div>`;
}

/** A button that opens a menu after the ARIA pattern. `items`: [[label, action, {danger, why}], …] */
export function Menu({ label, text = "", items }) {
  const list = useRef(null);
  const id = useId();
  const close = () => list.current.hidePopover(); // the focus returns to the button
  const keys = (event) => {
    if (event.key === "Tab") close();
    else moveFocus(event, [...list.current.children], { ArrowDown: 1, ArrowUp: -1 });
    event.stopPropagation();
  };
  const act = (action) => {
    close();
    action();
  };
  // The first item has the focus when the menu is shown, before the next key press.
  const item = ([text, action, { danger = false, why = "" } = {}], at) =>
    html`<button key=${text} type="button" role="menuitem" tabindex="-1" autofocus=${at === 0} class="menu-item ${danger ? "danger" : ""}" aria-disabled=${why ? "true" : undefined} title=${why} onClick=${() => why || act(action)}>${text}</button>`;
  const state = { "aria-label": label, title: label, popovertarget: id };
  return html`<div class="menu">
    <button type="button" class="button ${text ? "" : "quiet small"}" aria-haspopup="menu" ...${state}>${text || "⋯"}</button>
    <div popover="auto" role="menu" id=${id} aria-label=${label} class="menu-list" ref=${list} onKeyDown=${keys}>${items.map(item)}</div>
  </div>`;
}

/** `children` gets the attributes that connect a control with its label, error and help. `kind`: a class of the field, `always`: of its help. */
export function Labelled({ label, help, error = null, kind = "", always = false, children }) {
  const id = useId();
  const described = [error && `${id}-error`, help && `${id}-help`].filter(Boolean).join(" ");
  return html`<div class="field ${kind}">
    <label for=${id}>${label}</label>
    ${children({ id, "aria-describedby": described || undefined, "aria-invalid": error ? "true" : undefined })}
    ${error && html`<div class="error" id="${id}-error"><${Problem} error=${error} /></div>`}
    ${help && html`<div class="help ${always ? "always" : ""}" id="${id}-help">${help}</div>`}
  </div>`;
}

/** A group that is open or closed by `open` until a person changes it; `forced`: always open. */
export function Fold({ title, open, forced = false, hidden = false, kind, children }) {
  const [chosen, setChosen] = useState(null);
  const isOpen = forced || (chosen ?? open);
  return html`<details class=${kind} hidden=${hidden} open=${isOpen} onToggle=${({ currentTarget }) => !forced && currentTarget.open !== isOpen && setChosen(currentTarget.open)}>
    <summary>${title}</summary>
    ${children(isOpen)}
  </details>`;
}

/** The decisions of a plan, with their reasons. */
export function Decisions({ decisions = {}, notes = [] }) {
  return html`<div class="card scroll-x" tabindex="0">
    <h2>The plan</h2>
    <${Table} label="Decisions" heads=${["Decision", "Value", "Why"]} rows=${Object.values(decisions).map(({ title, shown, reason }) => [title[0].toUpperCase() + title.slice(1), shown, reason])} classOf=${(_, at) => (at ? "muted" : "")} />
    ${notes.map(({ text }) => html`<p key=${text} class="note">${text}</p>`)}
  </div>`;
}
