// General components.

import { html, signal, useErrorBoundary, useEffect, useId, useLayoutEffect, useRef, useState } from "./html.js";
import { forPage } from "./catalogue.js";

export const Badge = ({ status }) => html`<span class="badge ${status}">${status}</span>`;

/**
 * A button that shows why it is disabled. Unlike `disabled` it keeps the focus, so that keyboard and screen reader
 * find the reason.
 */
export function Button({ kind = "", why = "", onClick, busy = false, children, ...rest }) {
  const id = useId();
  const off = Boolean(why) || busy;
  return html`<button
      type="button"
      class="button ${kind}"
      aria-disabled=${off ? "true" : undefined}
      aria-describedby=${why ? id : undefined}
      title=${why || rest.title}
      ...${rest}
      onClick=${(event) => !off && onClick(event)}
    >
      ${children}
    </button>
    ${why && html`<span id=${id} class="unseen">${why}</span>`}`;
}

/** Shows an error of what it contains instead of it: the rest of the page works. */
export function Boundary({ children }) {
  const [error, again] = useErrorBoundary((error) => console.warn(error));
  if (!error) return children;
  return html`<div class="stack"><${Problem} error=${{ message: "This part of the page cannot be shown.", why: String(error.message ?? error) }} /><div><${Button} onClick=${again}>Try again<//></div></div>`;
}

/** An error of the server's shape {message, why, fix}, or a plain sentence. */
export function Problem({ error }) {
  if (!error || error.status === 401) return null; // the banner of a locked page says it
  return html`<div class="note bad" role="alert">
    <div>${forPage(error.message ?? String(error))}</div>
    ${error.why && html`<div class="muted">${forPage(error.why)}</div>`}
    ${error.fix && html`<div class="fix">Fix: ${forPage(error.fix)}</div>`}
  </div>`;
}

const toasts = signal([]);
let nextToast = 1;

/** Shows a message for some seconds; errors stay until they are closed. */
export function tell(text, { bad = false } = {}) {
  const id = nextToast++;
  toasts.value = [...toasts.value.slice(-3), { id, text, bad }];
  if (!bad) setTimeout(() => dismiss(id), 5000);
}

export const tellError = ({ message, why, fix }) => tell([message, why, fix && `Fix: ${fix}`].filter(Boolean).map(forPage).join(" – "), { bad: true });

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

const copies = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    tell("Copied");
  } catch {
    tell("The browser does not allow access to the clipboard; select the text instead", { bad: true });
  }
};

export const Copy = ({ text, label }) =>
  html`<${Button} kind="quiet small" onClick=${() => copies(text)} aria-label=${label}>Copy<//>`;

/** A choice; `options`: values, or [value, text, attributes]. `bare`: without its label, which then is for screen readers, if given. */
export function Select({ label, bare = false, kind = "row", value, options, onChange, ...rest }) {
  const choice = html`<select class="input" aria-label=${bare ? label : undefined} value=${value} onChange=${(event) => onChange(event.currentTarget.value)} ...${rest}>
    ${options.map((one) => (Array.isArray(one) ? one : [one, one])).map(([id, text, more]) => html`<option key=${id} value=${id} selected=${id === value} ...${more}>${text}</option>`)}
  </select>`;
  return bare ? choice : html`<label class=${kind}>${label} ${choice}</label>`;
}

/**
 * A table. `heads`: texts; one in a list is of a column of numbers. `rows`: cells, the first of which names its row.
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

/** A labelled box to tick. */
export const Tick = ({ on, onTick, children }) => html`<label class="row"><input type="checkbox" checked=${on} onChange=${(event) => onTick(event.currentTarget.checked)} />${children}</label>`;

/** A field that searches: its label is its placeholder, too. */
export const Search = ({ label, text, onSearch, grow = "" }) => html`<input class=${`input ${grow}`} type="search" aria-label=${label} placeholder=${label} value=${text} onInput=${(event) => onSearch(event.currentTarget.value)} />`;

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
    try {
      await onSubmit();
      onClose();
    } catch (error) {
      setError(error);
    } finally {
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} aria-labelledby=${heading} onClose=${onClose}>
    <form onSubmit=${send}>
      <h1 id=${heading}>${title}</h1>
      ${children}
      <${Problem} error=${error} />
      <div class="row" style=${{ justifyContent: "flex-end" }}>
        <button type="button" class="button" onClick=${onClose}>${onSubmit ? "Cancel" : "Close"}</button>
        ${onSubmit &&
        html`<button type="submit" class="button ${danger ? "danger" : "primary"}" disabled=${busy || Boolean(why)} title=${why}>
          ${submit}
        </button>`}
      </div>
    </form>
  </dialog>`;
}

/** Tabs after the ARIA pattern: arrows move, the panel is the caller's. `tabs`: [[id, label], …] */
export function Tabs({ label, tabs, chosen, onChoose, panel }) {
  const list = useRef(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = tabs.findIndex(([id]) => id === chosen);
    const next = Number.isFinite(step) ? (at + step + tabs.length) % tabs.length : step < 0 ? 0 : tabs.length - 1;
    onChoose(tabs[next][0]);
    list.current.children[next].focus();
  };
  return html`<div role="tablist" aria-label=${label} class="tabs" ref=${list} onKeyDown=${move}>
    ${tabs.map(
      ([id, text]) => html`<button
        key=${id}
        type="button"
        role="tab"
        id=${`${panel}-tab-${id}`}
        class="tab"
        aria-selected=${id === chosen ? "true" : "false"}
        aria-controls=${panel}
        tabindex=${id === chosen ? 0 : -1}
        onClick=${() => onChoose(id)}
      >
        ${text}
      </button>`,
    )}
  </div>`;
}

/** A button that opens a menu after the ARIA pattern. `items`: [[label, action, {danger, why}], …] */
export function Menu({ label, items, tabindex }) {
  const [open, setOpen] = useState(false);
  const box = useRef(null);
  const trigger = useRef(null);
  const id = useId();
  const entries = () => [...box.current.querySelectorAll('[role="menuitem"]')];
  // Before the next key arrives.
  useLayoutEffect(() => {
    if (!open) return undefined;
    entries().at(-1).scrollIntoView({ block: "nearest" });
    entries()[0].focus({ preventScroll: true });
    const away = (event) => !box.current.contains(event.target) && setOpen(false);
    addEventListener("pointerdown", away);
    return () => removeEventListener("pointerdown", away);
  }, [open]);
  const close = () => {
    setOpen(false);
    trigger.current.focus();
  };
  const keys = (event) => {
    if (!open) return;
    const all = entries();
    const at = all.indexOf(document.activeElement);
    if (event.key === "Escape") close();
    else if (event.key === "Tab") setOpen(false);
    else if (event.key === "ArrowDown") all[(at + 1) % all.length].focus();
    else if (event.key === "ArrowUp") all[(at - 1 + all.length) % all.length].focus();
    else if (event.key === "Home") all[0].focus();
    else if (event.key === "End") all.at(-1).focus();
    else return;
    if (event.key !== "Tab") event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class="menu" ref=${box} onKeyDown=${keys}>
    <button
      type="button"
      ref=${trigger}
      class="button quiet small"
      tabindex=${tabindex}
      aria-haspopup="menu"
      aria-expanded=${open ? "true" : "false"}
      aria-controls=${open ? id : undefined}
      aria-label=${label}
      title=${label}
      onClick=${() => setOpen(!open)}
    >
      ⋯
    </button>
    ${open &&
    html`<div role="menu" id=${id} aria-label=${label} class="menu-list">
      ${items.map(
        ([text, action, { danger = false, why = "" } = {}]) => html`<button
          key=${text}
          type="button"
          role="menuitem"
          tabindex="-1"
          class="menu-item ${danger ? "danger" : ""}"
          aria-disabled=${why ? "true" : undefined}
          title=${why}
          onClick=${() => {
            if (why) return;
            close();
            action();
          }}
        >
          ${text}
        </button>`,
      )}
    </div>`}
  </div>`;
}
