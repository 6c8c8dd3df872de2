// The only module that uses uPlot: a canvas with lines, zoom by dragging, at most one setData per frame.

import uPlot from "../vendor/uplot.js";

/** Steps between ticks of x, which counts steps, epochs, seconds or ranks. */
const WHOLE = Array.from({ length: 30 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

const dark = matchMedia("(prefers-color-scheme: dark)");
const colours = new Map();
const themed = new Set();
function repaint() {
  colours.clear();
  for (const plot of themed) plot.repaint();
}
dark.addEventListener("change", repaint);
addEventListener("lockstep-theme", repaint);

/** A colour of the style sheet, as the theme has it; asked for once, since the browser styles the page again for it. */
function css(name) {
  if (!colours.has(name)) {
    document.body.style.setProperty("caret-color", `var(${name})`);
    colours.set(name, getComputedStyle(document.body).caretColor);
  }
  return colours.get(name);
}

/** Values that a line leaves out: not finite, or too large for an axis. */
export const isGap = (value) => !Number.isFinite(value);

/**
 * Exponential smoothing that is corrected for its start and keeps gaps.
 * `weight` 0 changes nothing; 0.99 is very smooth.
 */
export function smooth(values, weight) {
  if (!weight) return values;
  const result = new Float64Array(values.length);
  let sum = 0;
  let mass = 0;
  for (let i = 0; i < values.length; i += 1) {
    const value = values[i];
    if (isGap(value)) {
      result[i] = NaN;
      continue;
    }
    sum = sum * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    result[i] = sum / mass;
  }
  return result;
}

/** Several series of their own x as the aligned table that uPlot draws. What is not finite becomes a gap. */
export function align(series, { log = false } = {}) {
  const tables = series.map(({ x, y, weight = 0 }) => {
    const smoothed = smooth(y, weight);
    const column = new Array(smoothed.length);
    // A logarithmic axis leaves out values of zero and below.
    for (let i = 0; i < smoothed.length; i += 1) {
      column[i] = isGap(smoothed[i]) || (log && smoothed[i] <= 0) ? null : smoothed[i];
    }
    return [x, column];
  });
  if (!tables.length) return [[]];
  const shared = series.every(({ x }) => x === series[0].x);
  return shared ? [tables[0][0], ...tables.map((table) => table[1])] : uPlot.join(tables);
}

/** A chart in `host`. `draw` may be called at any rate; the canvas changes once a frame. */
export class Plot {
  constructor(host, { height = 150, onCursor = () => {}, onZoom = () => {} } = {}) {
    this.host = host;
    this.height = height;
    this.onCursor = onCursor;
    this.onZoom = onZoom;
    this.pending = null;
    this.frame = 0;
    this.shape = "";
    this.chart = null;
    this.zoomed = false;
    this.resizer = new ResizeObserver(() => this.resize());
    this.resizer.observe(host);
    themed.add(this);
  }

  repaint() {
    this.shape = "";
    if (this.last) this.draw(this.last);
  }

  /**
   * `spec`: {series: [{label, x, y, colour, dash?, points?, everyRow?, gaps?}], log, smoothing, tick?}; a colour is a name from
   * the style sheet, so that dark and light follow the system. `everyRow`, `gaps`: what is not finite breaks the line.
   */
  draw(spec) {
    this.last = spec;
    // The raw line stays visible, faint, behind a smoothed one.
    const smoothed = spec.series.map((one) => ({ ...one, weight: spec.smoothing }));
    this.pending = { ...spec, series: spec.smoothing ? [...spec.series.map((one) => ({ ...one, raw: true })), ...smoothed] : spec.series };
    if (!this.frame) this.frame = requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.frame = 0;
    const spec = this.pending;
    this.pending = null;
    if (!spec || !this.host.clientWidth) return;
    const shape = JSON.stringify([spec.log, spec.against, this.height, spec.series.map((one) => [one.label, one.dash, one.points, one.colour, one.raw])]);
    const data = align(spec.series, spec);
    if (shape !== this.shape) this.build(spec, data, shape);
    else this.chart.setData(data, !this.zoomed);
    this.host.dataset.points = String(data[0].length);
  }

  build(spec, data, shape) {
    const shown = this.zoomed ? { ...this.chart.scales.x } : null;
    this.chart?.destroy();
    this.shape = shape;
    const grid = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: { show: false }, font: '11px "Inter", sans-serif' };
    const options = {
      width: this.host.clientWidth,
      height: this.height,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      // One cursor for all charts with this x axis.
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, sync: { key: spec.against, scales: ["x", null] } },
      scales: { x: { time: false }, y: spec.log ? { distr: 3, range: logRange } : { range: withRoom } },
      axes: [
        { ...axis, size: 24, incrs: spec.fraction ? undefined : WHOLE, label: spec.against, labelSize: 16, labelGap: -2, labelFont: axis.font, values: (_, ticks) => ticks.map(shortTick) },
        { ...axis, size: wide, ...(spec.log ? { filter: (_, ticks) => (ticks.length < 14 ? ticks : ticks.map((tick) => (Number.isInteger(Math.log10(tick)) ? tick : null))) } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : (spec.tick ?? shortTick)(tick))) },
      ],
      series: [
        {},
        ...spec.series.map((one) => ({
          label: one.label,
          stroke: css(one.colour).replace(/^rgb\((.*)\)$/, one.raw ? "rgb($1 / 0.35)" : "$&"),
          width: one.raw ? 1 : 1.5,
          dash: one.dash ? [4, 4] : undefined,
          spanGaps: !one.everyRow && !one.gaps,
          points: { show: (chart) => !one.raw && (Boolean(one.points) || chart.data[0].length < 40), size: 5 },
        })),
      ],
      hooks: {
        setScale: [(chart, key) => key === "x" && this.reportShown(chart.scales.x)],
        setCursor: [(chart) => this.onCursor(chart.cursor.idx, chart.data)],
        setSelect: [(chart) => chart.select.width > 0 && this.dragged(chart)],
      },
    };
    this.chart = new uPlot(options, data, this.host);
    this.chart.over.addEventListener("dblclick", () => this.resetZoom());
    // Another scale or colour keeps the zoom.
    if (shown) this.chart.setScale("x", { min: shown.min, max: shown.max });
  }

  /** The visible range of x, for tests and assistive scripts. */
  reportShown({ min, max }) {
    this.host.dataset.shown = `${min} ${max}`;
  }

  dragged(chart) {
    const { left, width } = chart.select;
    this.zoomed = true;
    this.onZoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  }

  /** Shows the part of the x axis between two shares of what there is; for keyboards. */
  zoom(factor, shift = 0) {
    if (!this.chart || this.chart.data[0].length < 2) return;
    const { min, max } = this.chart.scales.x;
    const middle = (min + max) / 2 + shift * (max - min);
    const half = ((max - min) / 2) * factor;
    this.zoomed = true;
    this.chart.setScale("x", { min: middle - half, max: middle + half });
    this.onZoom(middle - half, middle + half);
  }

  resetZoom() {
    this.zoomed = false;
    this.onZoom(null, null);
    if (this.chart) this.chart.setData(this.chart.data, true);
  }

  resize() {
    if (this.chart && this.host.clientWidth) this.chart.setSize({ width: this.host.clientWidth, height: this.height });
    else if (this.last) this.draw(this.last);
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    this.resizer.disconnect();
    themed.delete(this);
    this.chart?.destroy();
  }
}

/** A logarithmic axis that ends close to the values, not at the next power of ten. */
const logRange = (_, low, high) => (low === null || high === null ? [0.1, 1] : [low / 1.15, high * 1.15]);

/** Five per cent of space above and below, and a range around a constant value. */
function withRoom(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.05 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** The width of the y axis: that of its longest label. */
const wide = (_, labels) => Math.max(36, 7 * Math.max(0, ...(labels ?? []).map((text) => text?.length ?? 0)) + 12);

function shortTick(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size !== 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}
