// The only module that uses uPlot: a canvas with lines, zoom by dragging, at most one setData per frame.

import uPlot from "../vendor/uplot.js";
import { AXES } from "./columns.js";
import { grouped, percent } from "./format.js";
import { signal } from "./html.js";

/** Whether a line oscillates so much that, without a GPU, drawing it wider than 1 px takes five times as long. */
function isRough({ y, weight }) {
  const [least, most] = [y.reduce((a, b) => (b < a ? b : a), Infinity), y.reduce((a, b) => (b > a ? b : a), -Infinity)];
  return !weight && y.length > 100 && y.reduce((sum, value, at) => sum + (Math.abs(value - y[at - 1]) || 0), 0) > 10 * (most - least);
}

/** Height of every chart, in px. */
const HEIGHT = 180;

/** Distances between ticks of an x axis with whole numbers; epochs and seconds of training have fractions. */
const WHOLE = Array.from({ length: 30 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

const colours = new Map();
/** Incremented when the theme changes: charts then get other colours. */
export const themes = signal(0);
export function repaint() {
  colours.clear();
  themes.value = themes.peek() + 1;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** A colour of the style sheet in the current theme; kept, since reading it makes the browser compute styles again. */
function css(name) {
  if (!colours.has(name)) {
    document.body.style.setProperty("caret-color", `var(${name})`);
    colours.set(name, getComputedStyle(document.body).caretColor);
  }
  return colours.get(name);
}

/** Whether a line leaves this value out. */
export const isGap = (value) => !Number.isFinite(value);

/**
 * Exponential smoothing with a correction for its start; gaps stay.
 * `weight` 0 changes nothing; 0.99 is very smooth.
 */
function smooth(values, weight) {
  if (!weight) return values;
  const result = new Float64Array(values.length);
  let sum = 0;
  let mass = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (!isGap(values[i])) [sum, mass] = [sum * weight + values[i] * (1 - weight), mass * weight + (1 - weight)];
    result[i] = isGap(values[i]) ? NaN : sum / mass;
  }
  return result;
}

/** Align series with different x as uPlot's table. Values that are not finite, or not positive on a logarithmic axis, become gaps. */
function align(series, log) {
  const isDrawn = (value) => !isGap(value) && !(log && value <= 0);
  return series.length ? uPlot.join(series.map(({ x, y, weight = 0 }) => [x, Array.from(smooth(y, weight), (value) => (isDrawn(value) ? value : null))])) : [[]];
}

/** A chart in `host`. `draw` may be called at any rate; the canvas changes once a frame. */
export class Plot {
  /** `range`: the initial range of x, {min, max}; null: all. */
  constructor(host, onCursor, onZoom, range) {
    Object.assign(this, { host, onCursor, onZoom, range, last: null, frame: 0, shape: "", chart: null });
    this.resizer = new ResizeObserver(() => this.resize());
    this.resizer.observe(host);
  }

  /**
   * `spec`: {series: [{label, x, y, band?, colour, dash?, everyRow?, gaps?}], log, smoothing, theme, unit?}; a colour is
   * a name of the style sheet, which follows the theme. `everyRow`, `gaps`: a value that is not finite breaks the line.
   */
  draw(spec) {
    this.last = spec;
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.frame = 0;
    if (!this.host.clientWidth) return;
    const { series: given, smoothing: weight, log, against, theme } = this.last;
    // The raw line stays visible, faint, behind a smoothed one.
    const edges = given.flatMap((one) => (one.band ?? []).map((y) => ({ ...one, y, weight, isEdge: true })));
    const lines = [...edges, ...(weight ? [...given.filter(({ band }) => !band).map((one) => ({ ...one, raw: true })), ...given.map((one) => ({ ...one, weight }))] : given)];
    const series = lines.map((one) => ({ ...one, thin: one.raw || isRough(one) }));
    const shape = JSON.stringify([log, against, theme, series.map((one) => [one.label, one.dash, one.colour, one.raw, one.thin, one.isEdge])]);
    const data = align(series, log);
    if (shape !== this.shape) this.build({ ...this.last, series }, data, shape);
    else this.chart.setData(data, !this.range);
    this.host.dataset.points = String(data[0].length);
  }

  build(spec, data, shape) {
    const isNew = !this.chart;
    const range = isNew || this.against === spec.against ? this.range : null; // another axis ends the zoom
    this.chart?.destroy();
    Object.assign(this, { shape, against: spec.against });
    const grid = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: { show: false }, font: '11px "Inter", sans-serif' };
    const options = {
      width: this.host.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      // One cursor for all charts with this x axis.
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, sync: { key: spec.against, scales: ["x", null] } },
      scales: { x: { time: false }, y: spec.log ? { distr: 3, range: logRange } : { range: spec.unit === percent.axis ? ofWhole : withRoom } },
      axes: [
        { ...axis, size: 24, incrs: [AXES.epoch, AXES.time].includes(spec.against) ? undefined : WHOLE, label: spec.against, labelSize: 16, labelGap: -2, labelFont: axis.font, values: (_, ticks) => tickTexts(ticks) },
        { ...axis, size: wide, ...(spec.log ? { filter: apart } : {}), values: (_, ticks) => tickTexts(ticks, spec) },
      ],
      series: [
        {},
        ...spec.series.map((one) => ({
          label: one.label,
          stroke: css(one.colour).replace(/^rgb\((.*)\)$/, one.raw ? "rgba($1, 0.35)" : "$&"),
          width: one.isEdge ? 0 : one.thin ? 1 : 1.5,
          dash: one.dash ? [4, 4] : undefined,
          spanGaps: !one.everyRow && !one.gaps,
          points: { show: (chart) => !one.raw && !one.isEdge && chart.data[0].length < 40, size: 5 },
        })),
      ],
      // The two edges of a band come one after the other.
      bands: spec.series.flatMap((one, at) => (one.isEdge && at % 2 ? [{ series: [at, at + 1], fill: css(one.colour).replace(/^rgb\((.*)\)$/, "rgba($1, 0.18)"), dir: 1 }] : [])),
      hooks: {
        // The visible range of x, for tests and assistive scripts.
        setScale: [({ scales: { x } }, key) => key === "x" && (this.host.dataset.shown = `${x.min} ${x.max}`)],
        setCursor: [(chart) => this.onCursor(chart.cursor.idx, chart.data, chart.cursor.left)],
        setSelect: [(chart) => chart.select.width > 0 && this.dragged(chart)],
      },
    };
    this.chart = new uPlot(options, data, this.host);
    if (range && !isNew) this.chart.setScale("x", range);
    else if (range || this.range) this.show(range);
  }

  /** Shows this part of the x axis, {min, max}, or all. */
  show(range) {
    this.range = range;
    this.onZoom(range?.min ?? null, range?.max ?? null);
    if (range) this.chart.setScale("x", range);
    else this.chart?.setData(this.chart.data, true);
  }

  dragged(chart) {
    const { left, width } = chart.select;
    this.show({ min: chart.posToVal(left, "x"), max: chart.posToVal(left + width, "x") });
  }

  /** Show `factor` times the current part of the x axis, moved by the share `shift`; all without a factor. For keyboards. */
  zoom(factor, shift = 0) {
    if (!factor) return this.resetZoom();
    if (!this.chart || this.chart.data[0].length < 2) return undefined;
    const { min, max } = this.chart.scales.x;
    const middle = (min + max) / 2 + shift * (max - min);
    const half = ((max - min) / 2) * factor;
    return this.show({ min: middle - half, max: middle + half });
  }

  resetZoom() {
    if (this.chart && this.range) this.show(null);
  }

  resize() {
    if (this.chart && this.host.clientWidth) this.chart.setSize({ width: this.host.clientWidth, height: HEIGHT });
    else if (this.last) this.draw(this.last);
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    this.resizer.disconnect();
    this.chart?.destroy();
  }
}

/** A logarithmic axis that ends close to the values, not at the next power of ten. */
const logRange = (_, low, high) => (low === null || high === null ? [0.1, 1] : [low / 1.15, high * 1.15]);

/** Choose the labelled ticks of a logarithmic axis: powers of ten, then others of one digit, at least one text height apart. */
function apart(chart, ticks) {
  const digits = (tick) => (Number.isInteger(Math.log10(tick)) ? 0 : tick.toExponential().split("e")[0].length);
  const written = [];
  for (const tick of ticks.toSorted((a, b) => digits(a) - digits(b))) {
    const far = written.every((other) => Math.abs(chart.valToPos(other, "y") - chart.valToPos(tick, "y")) > 14);
    if (far && (digits(tick) < 2 || written.length < 2)) written.push(tick);
  }
  return ticks.map((tick) => (written.includes(tick) ? tick : null));
}

/** Five per cent of space above and below, and a range around a constant value. */
function withRoom(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.05 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** A range from 0 that ends at 100 % unless a value is larger. */
const ofWhole = (_, low, high) => (low === null || high === null ? [0, 1] : [Math.min(0, low), high > 1 ? high * 1.05 : Math.min(1, high * 1.05 || 1)]);

/** The width of the y axis, for its longest label. */
const wide = (_, labels) => Math.max(36, 7 * Math.max(0, ...(labels ?? []).map((text) => text?.length ?? 0)) + 12);

/** Suffixes of an axis: [smallest value, suffix, factor]. */
const SUFFIXES = [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]];

/** The smallest number of decimals for exact multiples of `step`; 7 for more than six. */
function decimalsOf(step) {
  const exact = (digits) => Math.abs(Math.round(step * 10 ** digits) / (step * 10 ** digits) - 1) < 1e-4;
  return [0, 1, 2, 3, 4, 5, 6].find(exact) ?? 7;
}

/**
 * Uniform texts for the ticks of an axis: with the decimals that their distance needs and one suffix, or all with exponents.
 * `unit`: [factor, text to append].
 */
export function tickTexts(ticks, { log = false, unit: [scale, unit] = [1, ""] } = {}) {
  const values = ticks.map((tick) => (tick === null ? null : tick * scale));
  const write = (text) => values.map((value) => (value === null ? "" : value === 0 ? `0${unit}` : `${text(value).replace("e+", "e").replace(/e0$/, "")}${unit}`));
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known.map(Math.abs));
  const step = Math.min(...(log ? known : known.slice(1).map((value, at) => value - known[at])), most);
  const suffixOf = (value) => SUFFIXES.find(([least]) => !unit && value >= least) ?? [0, "", 1];
  if (log) {
    if (step < 1e-3 || most >= 1e15) return write((value) => Number(value.toPrecision(3)).toExponential());
    return write((value) => `${Number((value / suffixOf(value)[2]).toPrecision(3))}${suffixOf(value)[1]}`);
  }
  const power = Math.floor(Math.log10(most));
  const isShort = decimalsOf(step / suffixOf(most)[2]) < 3;
  const [, suffix, by] = decimalsOf(step) > 5 || most >= 1e15 ? [0, `e${power}`, 10 ** power] : suffixOf(isShort ? most : 0);
  return write((value) => `${grouped(value / by, decimalsOf(step / by))}${suffix}`);
}
