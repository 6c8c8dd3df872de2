// Numbers and times as people read them.

import { signal } from "./html.js";

const DASH = "–";

const formats = new Map();

/** A number with commas and `digits` decimals. Formats are kept, since making one is slow. */
export function grouped(value, digits = 0) {
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return formats.get(digits).format(value);
}

/** A metric: four significant digits, exponents only where they help. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || value === "") return DASH;
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "not finite";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return grouped(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1e3) return grouped(value);
  return String(Number(value.toPrecision(digits)));
}

/** `1 run`, `1,000 runs`. */
export const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Any value of a table. */
export const plain = (value) => (value === null || value === undefined ? DASH : typeof value === "number" ? number(value) : typeof value !== "object" ? String(value) : Array.isArray(value) && value.every((one) => typeof one !== "object") ? value.join(", ") : JSON.stringify(value));

export const percent = (share, digits = share < 0.1 || (share > 0.99 && share < 1) ? 1 : 0) => (Number.isFinite(share) ? `${(share * 100).toFixed(digits)} %` : DASH);
/** Format of the ticks of an axis: [factor, unit]. */
percent.axis = [100, " %"];

/** Seconds as `1 h 04 min`, `3 min 20 s`, `12 s`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return DASH;
  if (seconds < 1) return "under 1 s";
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  if (minutes) return whole % 60 ? `${minutes} min ${String(whole % 60).padStart(2, "0")} s` : `${minutes} min`;
  return `${whole} s`;
}

/** The server's time in milliseconds, updated every 20 s; the browser's clock may differ. */
export const clockNow = signal(Date.now());
let ahead = 0;
export const setClock = (seconds) => {
  ahead = seconds * 1000 - Date.now();
  clockNow.value = Date.now() + ahead;
};
setInterval(() => (clockNow.value = Date.now() + ahead), 20_000);

/** The time since a moment; `now` in milliseconds. */
export function ago(iso, now = clockNow.value) {
  const then = Date.parse(iso);
  if (Number.isNaN(then)) return DASH;
  const seconds = Math.max(0, (now - then) / 1000);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(then).toLocaleDateString(undefined, { year: "numeric", month: "short", day: "numeric" });
}

/** A moment (ISO text, or seconds since the epoch) as date and time. */
export function clock(moment) {
  const then = typeof moment === "number" ? moment * 1000 : Date.parse(moment);
  return Number.isNaN(then) ? DASH : new Date(then).toLocaleString();
}

export const gigabytes = (bytes) => (Number.isFinite(bytes) ? `${(bytes / 1e9).toFixed(bytes < 1e9 ? 3 : 1)} GB` : DASH);
gigabytes.axis = [1e-9, " GB"];

/** `val_accuracy` → `val accuracy`, `lr` → `learning rate`. A metric may be called `constructor`. */
export function words(name) {
  const known = { __proto__: null, lr: "learning rate", samples_per_s: "samples/s", f1: "F1", grad_norm: "gradient norm", duration_s: "duration (s)" };
  return known[name] ?? name.replaceAll("_", " ").replace(/\bf1\b/, "F1");
}

const WRITTEN_OUT = {
  __proto__: null, lr: "learning rate", num: "number of", max: "maximum", min: "minimum", grad: "gradient", eps: "epsilon", dir: "folder", eval: "evaluation", oom: "out of memory", sync: "synchronised", mb: "(MB)", selected: "", batchnorm: "BatchNorm", cpu: "CPU", csv: "CSV", cuda: "CUDA", cudnn: "cuDNN", mlflow: "MLflow", rdzv: "rendezvous", tensorboard: "TensorBoard", uri: "URI", wandb: "W&B",
};

/** The label of a setting in the form: `max_grad_norm` → `Maximum gradient norm`. */
export const titleOf = (name) => {
  const parts = name.replace(/_s$/, "_(s)").split("_");
  const text = parts.map((part) => WRITTEN_OUT[part] ?? part).join(" ").trim();
  return /^cu[A-Z]/.test(text) ? text : text[0].toUpperCase() + text.slice(1);
};

/** As the heading of a column or chart. */
export const heading = (name) => words(name).replace(/^./, (letter) => letter.toUpperCase());

export function bytes(count) {
  const at = count < 1 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** at).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][at]}`;
}

/** `gpu:0, gpu:1, gpu:2` → `gpu:0–2`, `cpu, cpu` → `cpu × 2`. */
export function deviceWords(ids) {
  const groups = [];
  for (const id of ids) {
    const [kind, index] = id.split(":");
    const before = groups.at(-1);
    if (before?.last === id) before.times += 1;
    else if (index && before?.times === 1 && before.last === `${kind}:${index - 1}`) before.last = id;
    else groups.push({ first: id, last: id, times: 1 });
  }
  return groups
    .map(({ first, last, times }) => (times > 1 ? `${first} × ${times}` : first === last ? first : `${first}–${last.split(":")[1]}`))
    .join(", ");
}
