// The log of a run: one file at a time, its end followed, colours of the terminal, search.

import { html, useEffect, useRef, useState } from "./html.js";
import { runPath, useAnswer } from "./api.js";
import { many } from "./format.js";
import { isGoing } from "./live.js";
import { Search, Select, Tick } from "./ui.js";

/** Of the style sheet, by the last digit of a code. */
const COLOURS = ["", "bad", "good", "warn", "info", "series-4", "series-3", ""];
const ESCAPE = /\u001b\[([\d;]*)m|\u001b\[[\d;?]*[A-Za-z]/g;

/** A line's parts as [text, style], by its ANSI colour codes. */
function parts(line) {
  const found = [];
  let at = 0;
  let style = {};
  for (const match of line.matchAll(ESCAPE)) {
    found.push([line.slice(at, match.index), style]);
    at = match.index + match[0].length;
    for (const code of (match[1] ?? "").split(";").map(Number)) {
      if (code === 0) style = {};
      else if (code === 1) style = { ...style, fontWeight: 650 };
      else if (code === 39) style = { ...style, color: "" };
      else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) style = { ...style, color: `var(--${COLOURS[code % 10]})` };
    }
  }
  return [...found, [line.slice(at), style]].filter(([text]) => text);
}

/** Text of a terminal: its colours, without its other codes. */
export const Coloured = ({ text }) =>
  text.split("\n").map((line, at) => html`<span key=${at}>${parts(line).map(([part, style]) => html`<span style=${style}>${part}</span>`)}${"\n"}</span>`);

export function Log({ run, names }) {
  const [name, setName] = useState(null);
  const [tail, setTail] = useState(500);
  const [text, setText] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef(null);
  const chosen = names.includes(name) ? name : names[0];
  const path = chosen && runPath(run.id, `/log?name=${encodeURIComponent(chosen)}&tail=${tail}`);
  const { found: log } = useAnswer(path, [run.status], { every: isGoing(run) && 1500 });
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [log, follow, text]);
  if (!chosen) return html`<p class="empty">This run has no log yet.</p>`;
  const wanted = text.toLowerCase();
  const lines = (log?.lines ?? []).filter((line) => line.toLowerCase().includes(wanted));
  // Scrolling up stops following, and the end follows again.
  const scrolled = ({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => setFollow(scrollHeight - scrollTop - clientHeight < 8);
  return html`<div class="card stack">
    <div class="row wrap">
      <${Select} label="File" value=${chosen} options=${names} onChange=${setName} />
      <${Search} label="Search the log" grow="grow" text=${text} onSearch=${setText} />
      <${Tick} on=${follow} onTick=${setFollow}>Follow<//>
      <span class="muted number">${many(lines.length, "line")}</span>
      ${log?.truncated && tail < 5000 && html`<button type="button" class="button small" onClick=${() => setTail(5000)}>Load more</button>`}
    </div>
    <pre class="wrap log" tabindex="0" aria-label="Log" ref=${box} onScroll=${scrolled}>${lines.length ? html`<${Coloured} text=${lines.join("\n")} />` : log ? "the log is empty" : "loading…"}</pre>
  </div>`;
}
