// Binary frames of the live connection, and the columns that grow from them.

/** Header and columns of a frame; the columns are views into `buffer`. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const start = 4 + length;
  const columns = new Map(
    header.columns.map(({ name, type, offset, length: rows }) => {
      const kind = type === "f64" ? Float64Array : Float32Array;
      return [name, new kind(buffer, start + offset, rows)];
    }),
  );
  return { header, columns };
}

/** The rows of one stream (`steps`, `ranks`, `system-…`) as columns of numbers; NaN where there is none. */
export class Stream {
  constructor(header, columns) {
    this.x = header.x;
    this.generation = header.generation;
    this.downsampled = header.downsampled;
    this.preview = header.preview;
    this.total = header.total;
    /** Whether the file has more columns than the server keeps. */
    this.cut = header.cut;
    // A downsampled history has fewer rows than `rows` in the header.
    this.rows = columns.get(header.x)?.length ?? 0;
    this.store = new Map(columns);
    this.views = new Map();
  }

  /** Appends a delta; false if it belongs to another history, which will follow. */
  append(header, columns) {
    if (header.generation !== this.generation) return false;
    const rows = this.rows + (columns.get(this.x)?.length ?? 0);
    for (const [name, news] of columns) if (!this.store.has(name)) this.store.set(name, new news.constructor(0));
    for (const [name, held] of this.store) {
      const grown = roomFor(held, rows, this.filled(name));
      const news = columns.get(name);
      if (news) grown.set(news, this.rows);
      else grown.fill(NaN, this.rows, rows);
      this.store.set(name, grown);
    }
    this.rows = rows;
    this.total = header.total;
    this.cut = header.cut;
    this.views.clear();
    return true;
  }

  filled(name) {
    return Math.min(this.store.get(name).length, this.rows);
  }

  names() {
    return [...this.store.keys()].filter((name) => name !== this.x);
  }

  /** The values of a column; the same object until the next row arrives. */
  column(name) {
    if (!this.views.has(name)) this.views.set(name, this.store.get(name)?.subarray(0, this.rows) ?? null);
    return this.views.get(name);
  }

  /** {x, y} of a column, or null when there is no number in it. */
  line(name) {
    const y = this.column(name);
    return y && y.some((value) => !Number.isNaN(value)) ? { x: this.column(this.x), y } : null;
  }

  /** The same for a column that every row has: a missing number was not finite. */
  wholeLine(name) {
    return { x: this.column(this.x), y: this.column(name) ?? new Float32Array(this.rows).fill(NaN) };
  }
}

/** `held` with space for `rows`, doubling; the rest is NaN. */
function roomFor(held, rows, filled) {
  if (held.length >= rows) return held;
  const grown = new held.constructor(Math.max(rows, held.length * 2, 256)).fill(NaN);
  grown.set(held.subarray(0, filled));
  return grown;
}
