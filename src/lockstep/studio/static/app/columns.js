// The rows of a run's streams as growing columns of numbers, and their places on other axes than steps.

/** The rows of one stream (`steps`, `ranks`, `system-…`); NaN for a missing number. */
export class Stream {
  /** `message`: a history or a range. `cut`: the file has more columns than the server keeps; `rows` may be fewer than `total`. */
  constructor({ columns, ...header }) {
    Object.assign(this, header, { rows: 0, columns: new Map() });
    this.add(columns);
  }

  /** Append a delta; return false if it belongs to another history, which will follow. */
  append({ columns, generation, total, cut }) {
    if (generation !== this.generation) return false;
    this.add(columns);
    Object.assign(this, { total, cut });
    return true;
  }

  add(added) {
    const rows = this.rows + (added[this.x]?.length ?? 0);
    for (const name of new Set([...this.columns.keys(), ...Object.keys(added)])) {
      const values = new Float64Array(rows).fill(NaN);
      values.set(this.columns.get(name) ?? []);
      values.set(added[name]?.map((value) => value ?? NaN) ?? [], this.rows);
      this.columns.set(name, values);
    }
    this.rows = rows;
  }

  names() {
    return [...this.columns.keys()].filter((name) => name !== this.x && name !== "training_s");
  }

  /** The values of a column; the same object until the next row arrives. */
  column(name) {
    return this.columns.get(name) ?? null;
  }

  /** {x, y} of a column, or null without any number; `whole`: every row has a value, and a missing number was not finite. */
  line(name, whole = false) {
    const y = this.column(name) ?? new Float64Array(this.rows).fill(NaN);
    return whole || y.some((value) => !Number.isNaN(value)) ? { x: this.column(this.x), y } : null;
  }
}

export const AXES = { __proto__: null, step: "step", samples: "samples", epoch: "epoch", time: "training time (s)" };

/**
 * Return {against, place}: the name of an axis, and a function from a step to its place, interpolated between the points of
 * the run folder. Falls back to the axis of steps for rows without samples or throughput, or epochs of unknown length.
 * `streams`: those with steps; `epochs`: the rows of metrics.json; `perEpoch`: the steps of an epoch, if known.
 */
export function axisOf(kind, streams, epochs, perEpoch) {
  const points = kind === "epoch" ? endsOf(epochs, perEpoch) : kind === "step" ? [] : measuredOf(kind, streams, epochs);
  if (!points.length) return { against: AXES.step, place: (step) => step };
  const table = [...new Map([[0, 0], ...points])].sort(([a], [b]) => a - b);
  const [from, to] = [0, 1].map((at) => Float64Array.from(table, (point) => point[at]));
  const most = kind === "epoch" ? to.at(-1) : Infinity; // the epoch that follows the last one has not ended
  const place = (step) => {
    const at = Math.min(Math.max(lastIndexAtMost(from, step), 0), from.length - 2);
    return Math.min(most, to[at] + ((step - from[at]) * (to[at + 1] - to[at])) / (from[at + 1] - from[at]));
  };
  return { against: AXES[kind], place };
}

/** The ends of epochs as [step, epoch], and the expected end of the next one. An interrupted epoch has no end yet. */
function endsOf(epochs, perEpoch) {
  const ends = epochs.filter((row) => row.step > 0 && row.epoch > 0 && row.complete !== false).map((row) => [row.step, row.epoch]);
  const [[before], [last, epoch]] = [[0, 0], [0, 0], ...ends].slice(-2);
  const length = perEpoch || last - before;
  return length > 0 ? [...ends, [last + length, epoch + 1]] : [];
}

/** Samples or seconds of training, as [step, value], of the steps with such a value. */
function measuredOf(kind, streams, epochs) {
  const column = kind === "samples" ? "samples_seen" : "training_s";
  const logged = streams.filter((stream) => stream?.column(column)).flatMap((stream) => Array.from(stream.column(stream.x), (step, at) => [step, stream.column(column)[at]]));
  return [...logged, ...epochs.map((row) => [row.step, row[column]])].filter(([step, value]) => step > 0 && Number.isFinite(value));
}

/** The last index whose x is at most `limit`; x ascends. */
export function lastIndexAtMost(x, limit) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    [low, high] = x[middle] <= limit ? [middle + 1, high] : [low, middle];
  }
  return low - 1;
}
