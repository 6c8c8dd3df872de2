// A chart with its legend, and the tools that all charts of a view share.

import { computed, html, signal, useEffect, useRef, useState } from "./html.js";
import { AXES, lastIndexAtMost } from "./columns.js";
import { number } from "./format.js";
import { isGap, Plot, themes } from "./plot.js";
import { keep, route } from "./route.js";
import { Button, Search, Select, Tick } from "./ui.js";

/** Options of all charts, kept in the link. */
export const drawing = computed(() => {
  const { query } = route.value;
  return { log: query.has("log"), smoothing: Number(query.get("smooth") ?? 0), x: query.get("x") in AXES ? query.get("x") : "step", text: query.get("charts") ?? "", zoom: query.get("zoom") ?? "" };
});

/** Incremented to end the zoom of every chart. */
const resets = signal(0);

export function ChartTools({ notes = [], search = false, children }) {
  const { log, smoothing, x, text } = drawing.value;
  return html`<div class="chart-tools" role="group" aria-label="Chart tools">
    ${search && html`<${Search} label="Search charts" text=${text} onSearch=${(one) => keep("charts", one)} />`}
    <${Select} label="X axis" kind="" value=${x} options=${Object.entries(AXES)} onChange=${(one) => (keep("zoom", null), keep("x", one === "step" ? null : one))} />
    ${children}
    <${Tick} on=${log} onTick=${(on) => keep("log", on ? "1" : null)}>Log scale<//>
    <label>
      Smoothing
      <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} aria-valuetext=${smoothing || "off"} onInput=${(event) => keep("smooth", Number(event.currentTarget.value) || null)} />
      <span class="number">${smoothing ? smoothing.toFixed(2) : "off"}</span>
    </label>
    <button type="button" class="button quiet small" onClick=${() => (resets.value += 1)}>Reset zoom</button>
    ${notes.map((note) => html`<span key=${note} class="badge warn wide">${note}</span>`)}
  </div>`;
}

/** Eight colours; further lines repeat them, dashed. */
export function looks({ index }, at) {
  const number = index ?? at;
  return { colour: `--series-${(number % 8) + 1}`, dash: number >= 8 };
}

export const Swatch = ({ colour, dash }) => html`<i class=${`swatch ${dash ? "dash" : ""}`} style=${{ color: `var(${colour})` }}></i>`;

/** The last finite value of a series, with its place. */
function last({ x, y }, at = y.length - 1) {
  const place = y.findLastIndex((value, index) => index <= at && !isGap(value));
  return place < 0 ? null : [x[place], y[place]];
}

/**
 * `series`: [{label, x, y, index?}] with x ascending; `against` names the x axis.
 * `everyRow`: a row without a number was not finite: a gap in the line, and "not finite" as the newest value.
 * `shared`: [labels of hidden lines, their setter] of a legend for several charts.
 * `onZoom(from, to)` is called on zoom, with nulls on reset. `whole()`: promises the series with all of their points.
 * Drag zooms, a double click resets; with the keyboard + and − zoom, arrows move, 0 resets.
 */
export function Chart({ title, series, against = "step", unit = "", canLog = true, format = number, everyRow = false, onZoom, shared, whole = () => series }) {
  const host = useRef(null);
  const plot = useRef(null);
  const now = Object.assign(useRef(), { current: { onZoom, against } });
  const own = useState([]);
  const [hidden, setHidden] = shared ?? own;
  const [cursor, setCursor] = useState(null);
  const [seen, setSeen] = useState(false);
  const log = canLog && drawing.value.log;
  const smoothing = drawing.value.smoothing;
  // A series keeps its colour while others are hidden.
  const shown = series
    .map((one, index) => ({ ...one, ...looks(one, index), everyRow }))
    .filter((one) => !hidden.includes(one.label));

  // A page may have hundreds of charts: draw each when it is near the screen.
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => setSeen(entry.isIntersecting), { rootMargin: "300px" });
    watch.observe(host.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const point = (index, data, left) => setCursor(data[0][index] === undefined ? null : { x: data[0][index], left });
    const linked = () => /^(\S+) (\S+) (.*)$/.exec(drawing.peek().zoom) ?? [];
    // The link keeps the last zoom of an axis; all charts with this axis show it.
    const zoom = (from, to) => {
      const text = from === null ? null : `${Number(from.toPrecision(4))} ${Number(to.toPrecision(4))} ${now.current.against}`;
      if ((text ?? "") !== drawing.peek().zoom && (text || linked()[3] === now.current.against)) keep("zoom", text);
      now.current.onZoom?.(from, to);
    };
    const [min, max] = linked().slice(1, 3).map(Number);
    plot.current = new Plot(host.current, point, zoom, linked()[3] === against && min < max ? { min, max } : null);
    return () => plot.current.destroy();
  }, []);
  const theme = themes.value;
  useEffect(() => {
    if (seen) plot.current.draw({ series: shown, log, smoothing, against, theme, unit: format.axis });
  });
  useEffect(() => plot.current.resetZoom(), [resets.value]);

  const keys = (event) => {
    const zoom = { "+": [0.5], "=": [0.5], "-": [2], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2], 0: [] }[event.key];
    if (!zoom) return;
    event.preventDefault();
    plot.current.zoom(...zoom);
  };
  const pointOf = (one, at = one.y.length - 1) => (everyRow && at >= 0 ? [one.x[at], one.y[at]] : last(one, at));
  const text = (point) => (point === null ? "–" : isGap(point[1]) ? "not finite" : `${format(point[1])}${unit}`);
  const newest = series.map((one) => [one.label, pointOf(one)]).filter(([, point]) => point);
  const summary = newest.map(([label, point]) => `${label} ${text(point)} at ${against} ${number(point[0])}`).join("; ") || "no points yet";
  const valueOf = (one) => text(pointOf(one, cursor === null ? undefined : lastIndexAtMost(one.x, cursor.x)));
  const download = async () => save(title, csv(await whole(), against));
  return html`<figure class="chart" aria-label=${title}>
    <figcaption>
      <strong class="clip" title=${title}>${title}</strong>
      <span class="muted">${[unit.trim(), log && "log scale"].filter(Boolean).join(", ")}</span>
      <span class="value">${series.length === 1 ? valueOf(series[0]) : cursor !== null ? `${against} ${number(cursor.x)}` : ""}</span>
      <${Button} kind="quiet small" title="Download CSV" aria-label=${`Download CSV of ${title}`} onClick=${download}>CSV<//>
    </figcaption>
    <div class="plot" ref=${host} role="img" tabindex="0" onDblClick=${() => (resets.value += 1)} aria-label=${`${title} against ${against}: ${summary}. Plus and minus zoom, arrows move, 0 shows all.`} onKeyDown=${keys}></div>
    ${shared && cursor !== null && html`<${Tip} left=${cursor.left} series=${shown} textOf=${valueOf} />`}
    ${series.length > 1 && !shared && html`<${Legend} series=${series} hidden=${hidden} onHide=${setHidden} textOf=${valueOf} />`}
  </figure>`;
}

/** The lines by name with their values, beside the cursor at `left` px. */
const Tip = ({ left, series, textOf }) => html`<dl class="tip" style=${{ left: `${left}px` }} aria-hidden="true">${series.map((one) => html`<dt key=${one.label}><${Swatch} ...${one} /> <span class="clip">${one.label}</span></dt><dd class="number">${textOf(one)}</dd>`)}</dl>`;

/** A button for each line, which hides or shows it; `textOf(one)`: the text beside its name. */
export function Legend({ series, hidden, onHide, textOf = () => "" }) {
  const toggle = (label) => onHide(hidden.includes(label) ? hidden.filter((one) => one !== label) : [...hidden, label]);
  return html`<div class="legend">
    ${series.map(
      (one, index) => html`<button key=${one.label} type="button" class="key" title=${one.label} aria-label=${`${one.label} ${textOf(one)}`.trim()} aria-pressed=${hidden.includes(one.label) ? "false" : "true"} onClick=${() => toggle(one.label)}>
        <${Swatch} ...${looks(one, index)} />
        <span class="clip">${one.label}</span> <span class="number">${textOf(one)}</span>
      </button>`,
    )}
  </div>`;
}

/** All series as one table: a row for each x. */
function csv(series, against) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = new Map();
  series.forEach(({ x, y }, at) => x.forEach((place, row) => rows.set(place, Object.assign(rows.get(place) ?? [], { [at]: y[row] }))));
  const cells = [...rows].sort(([a], [b]) => a - b).map(([place, values]) => [place, ...series.map((_, at) => (Number.isFinite(values[at]) ? values[at] : ""))]);
  return [[against, ...series.map(({ label }) => quote(label))], ...cells].map((row) => `${row.join(",")}\n`).join("");
}

function save(title, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: `${title.replace(/[^\w.-]+/g, "-").toLowerCase()}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
