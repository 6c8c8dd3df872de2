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
    // `cut`: the file has more columns than the server keeps. A downsampled history has fewer rows than the header says.
    Object.assign(this, header, { rows: columns.get(header.x)?.length ?? 0, store: columns, views: new Map() });
  }

  /** Appends a delta; false if it belongs to another history, which will follow. */
  append(header, columns) {
    if (header.generation !== this.generation) return false;
    const rows = this.rows + (columns.get(this.x)?.length ?? 0);
    for (const name of new Set([...this.store.keys(), ...columns.keys()])) {
      const news = columns.get(name);
      const held = roomFor(this.store.get(name) ?? new news.constructor(0), rows, this.rows);
      if (news) held.set(news, this.rows);
      else held.fill(NaN, this.rows, rows);
      this.store.set(name, held);
    }
    Object.assign(this, { rows, total: header.total, cut: header.cut });
    this.views.clear();
    return true;
  }

  names() {
    return [...this.store.keys()].filter((name) => name !== this.x);
  }

  /** The values of a column; the same object until the next row arrives. */
  column(name) {
    if (!this.views.has(name)) this.views.set(name, this.store.get(name)?.subarray(0, this.rows) ?? null);
    return this.views.get(name);
  }

  /** {x, y} of a column, or null without a number in it; `whole`: every row has it, and a missing number was not finite. */
  line(name, whole = false) {
    const y = this.column(name) ?? new Float32Array(this.rows).fill(NaN);
    return whole || y.some((value) => !Number.isNaN(value)) ? { x: this.column(this.x), y } : null;
  }
}

/** `held`, of which `filled` values count, with space for `rows`, doubling; the rest is NaN. */
function roomFor(held, rows, filled) {
  if (held.length >= rows) return held;
  const grown = new held.constructor(Math.max(rows, held.length * 2, 256)).fill(NaN);
  grown.set(held.subarray(0, filled));
  return grown;
}
