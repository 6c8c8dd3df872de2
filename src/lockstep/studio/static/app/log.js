// The log of a run: the end of one file, followed, with the terminal's colours and a search; a link shows all lines.

import { html, useEffect, useRef, useState } from "./html.js";
import { filePath, runPath, useAnswer } from "./api.js";
import { many } from "./format.js";
import { isGoing } from "./live.js";
import { Search, Select, Tick } from "./ui.js";

/** Colours of the style sheet, by the last digit of an ANSI code. */
const COLOURS = ["", "bad", "good", "warn", "info", "series-4", "series-3", ""];
const COLOUR = /\u001b\[([\d;]*)m/;
const OTHERS = /\u001b\[[\d;?]*[A-Za-ln-z]/g;

/** A line's parts as [text, style], by its ANSI colour codes. */
function parts(line) {
  let style = {};
  return line.replace(OTHERS, "").split(COLOUR).map((part, at) => {
    if (at % 2 === 0) return [part, style];
    for (const code of part.split(";").map(Number)) {
      if (code === 0) style = {};
      else if (code === 1) style = { ...style, fontWeight: 650 };
      else if (code === 39) style = { ...style, color: "" };
      else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) style = { ...style, color: `var(--${COLOURS[code % 10]})` };
    }
    return ["", style];
  }).filter(([text]) => text);
}

/** Text of a terminal with its colours, without its other codes. */
export const Coloured = ({ text }) =>
  text.split("\n").map((line, at) => html`<span key=${at}>${parts(line).map(([part, style]) => html`<span style=${style}>${part}</span>`)}${"\n"}</span>`);

/** Maximum number of lines that are shown of the end of a file. */
const LINES = 2000;

export function Log({ run, names }) {
  const [name, setName] = useState(null);
  const [text, setText] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef(null);
  const chosen = names.includes(name) ? name : names[0];
  const path = chosen && runPath(run.id, `/log?name=${encodeURIComponent(chosen)}&tail=${LINES}`);
  const { found: log } = useAnswer(path, [run.status], { every: isGoing(run) && 1500 });
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [log, follow, text]);
  if (!chosen) return html`<p class="empty">This run has no log yet.</p>`;
  const wanted = text.toLowerCase();
  const lines = (log?.lines ?? []).filter((line) => line.toLowerCase().includes(wanted));
  // Scrolling up ends following; scrolling to the end starts it again.
  const scrolled = ({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => setFollow(scrollHeight - scrollTop - clientHeight < 8);
  return html`<div class="card stack">
    <div class="row wrap">
      <${Select} label="File" value=${chosen} options=${names} onChange=${setName} />
      <${Search} label="Search the log" grow="grow" text=${text} onSearch=${setText} />
      <${Tick} on=${follow} onTick=${setFollow}>Follow<//>
      <span class="muted number">${many(lines.length, "line")}${log?.truncated && html` at the end of the file; <a href=${filePath(run.id, `logs/${chosen}`)} target="_blank" rel="noopener">all lines</a>`}</span>
    </div>
    <pre class="wrap log" tabindex="0" aria-label="Log" ref=${box} onScroll=${scrolled}>${lines.length ? html`<${Coloured} text=${lines.join("\n")} />` : log ? "the log is empty" : "loading…"}</pre>
  </div>`;
}
