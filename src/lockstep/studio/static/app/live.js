// The WebSocket of this tab: the list of runs, and the data of those that are shown.

import { batch, signal } from "./html.js";
import { API, get, locked } from "./api.js";
import { decode, Stream } from "./columns.js";
import { setClock } from "./format.js";
import { showError } from "./ui.js";

const LONGEST_WAIT_MS = 5000;
/**
 * Rows arrive up to ten times a second. Charts are drawn again when these move a line of PIXELS pixels by one, at most
 * every DRAW_MS, and in any case after LATEST_MS.
 */
const [DRAW_MS, LATEST_MS, PIXELS] = [500, 2000, 400];

/** connecting | open | lost */
export const connection = signal("connecting");
/** Changes with every start of the server. */
export const instance = signal(null);
/** Every run, newest first; null until the first list has arrived. */
export const runs = signal(null);
/** Why folders that look like runs cannot be read. */
export const problems = signal([]);
export const isGoing = ({ status }) => status === "running" || status === "pending";

/** The run with this id, or with this folder. */
export const findRun = (ref) => runs.value?.find(({ id }) => id === ref) ?? runs.value?.find(({ location }) => location === ref);

/** The newest state of each job, by id. */
export const jobs = signal({});
export const takeJob = (job) => (jobs.value = { ...jobs.value, [job.id]: job });

/** The data of one run while it is shown. */
class RunData {
  watchers = 0;
  epochs = signal([]);
  /** Why the server does not send it, or null. */
  error = signal(null);
  streams = new Map();
  /** The names of the streams that have rows. */
  names = signal([]);
  drawings = new Map();

  constructor(id) {
    this.id = id;
  }

  /** When a stream was drawn, at how many rows; `version` counts up when it is to be drawn again. */
  drawing(name) {
    return this.drawings.get(name) ?? this.drawings.set(name, { version: signal(0), rows: 0, at: 0, timer: 0, frame: 0 }).get(name);
  }

  changed(name) {
    const [drawn, { rows }] = [this.drawing(name), this.streams.get(name)];
    if (rows && !this.names.peek().includes(name)) this.names.value = [...this.names.peek(), name];
    if (drawn.frame) return;
    const draw = () => {
      Object.assign(drawn, { rows: this.streams.get(name).rows, at: performance.now(), frame: 0 });
      drawn.version.value += 1;
    };
    const pause = Math.abs(rows - drawn.rows) * PIXELS < rows ? LATEST_MS : DRAW_MS;
    clearTimeout(drawn.timer);
    drawn.timer = setTimeout(() => (drawn.frame = requestAnimationFrame(draw)), drawn.at + pause - performance.now());
  }

  take(header, columns) {
    if (header.kind === "history") {
      this.streams.set(header.stream, new Stream(header, columns));
      this.error.value = null;
    } else if (!this.streams.get(header.stream)?.append(header, columns)) return;
    this.changed(header.stream);
  }

  /** The stream or null; what calls it is drawn again with new rows. */
  stream(name) {
    return this.drawing(name).version.value >= 0 ? (this.streams.get(name) ?? null) : null;
  }

  /** Streams of this kind: `system` means one for each node. */
  named(prefix) {
    return this.names.value.filter((name) => name.startsWith(prefix)).map((name) => [name, this.stream(name)]);
  }
}

const followed = new Map();
const ranges = new Map();
let socket = null;
let failures = 0;
let requests = 0;

const send = (message) => socket?.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

/** Asks for the data of a run, once more after an error. */
export const subscribe = (id) => send({ type: "subscribe", run: id });

/** Starts watching a run; the second value ends it. */
export function follow(id) {
  if (!followed.has(id)) followed.set(id, new RunData(id));
  const data = followed.get(id);
  if (data.watchers++ === 0) subscribe(id);
  const leave = () => --data.watchers === 0 && followed.delete(id) && send({ type: "unsubscribe", run: id });
  return [data, leave];
}

/** A part of a stream at the finest resolution that fits; null without a connection. */
export function range(run, stream, from, to) {
  const request = ++requests;
  if (socket?.readyState !== WebSocket.OPEN) return Promise.resolve(null);
  return new Promise((resolve) => {
    ranges.set(request, resolve);
    send({ type: "range", run, stream, from, to, request });
  });
}

export function connect() {
  const place = new URL(`${API}/live`, location.href.split("#")[0]);
  place.protocol = place.protocol.replace("http", "ws");
  socket = new WebSocket(place);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    failures = 0;
    connection.value = "open";
    send({ type: "watch", runs: true });
    for (const id of followed.keys()) subscribe(id);
  };
  socket.onmessage = ({ data }) => batch(() => (typeof data === "string" ? onText(JSON.parse(data)) : onFrame(decode(data))));
  socket.onclose = () => {
    connection.value = "lost";
    for (const resolve of ranges.values()) resolve(null);
    ranges.clear();
    failures += 1;
    const later = () => locked.value || setTimeout(connect, Math.min(LONGEST_WAIT_MS, 250 * 2 ** Math.min(failures, 6)));
    get("/studio").then(later, later); // says whether this page is locked out
  };
}

function onFrame({ header, columns }) {
  if (header.kind === "range") settle(header.request, new Stream(header, columns));
  else followed.get(header.run)?.take(header, columns);
}

function settle(request, part) {
  ranges.get(request)?.(part);
  ranges.delete(request);
}

const handlers = {
  hello: ({ instance: id, now }) => {
    instance.value = id;
    setClock(now);
  },
  runs: (message) => {
    runs.value = message.runs;
    problems.value = message.problems;
  },
  runs_changed: (message) => {
    merge(message.runs, message.removed);
    problems.value = message.problems;
  },
  epochs: ({ run, epochs }) => {
    const data = followed.get(run);
    if (data) data.epochs.value = epochs;
  },
  error: ({ request, run, ...error }) => {
    if (request !== undefined) settle(request, null);
    else if (followed.has(run)) followed.get(run).error.value = error;
    else if (!run) showError(error); // errors about a run that is no longer shown are dropped
  },
  job: ({ job }) => takeJob(job),
};

const onText = (message) => handlers[message.type]?.(message);

/** Takes summaries from the server into the list, whose order is by creation. */
export function merge(changed, removed) {
  const byId = new Map([...(runs.value ?? []), ...changed].map((run) => [run.id, run]));
  for (const id of removed) byId.delete(id);
  runs.value = [...byId.values()].sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
}
