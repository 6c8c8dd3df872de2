// The WebSocket of this tab: the list of runs, and the data of the runs that are shown.

import { batch, signal } from "./html.js";
import { API, get, locked, reconnects, runPath } from "./api.js";
import { Stream } from "./columns.js";
import { clockNow, setClock } from "./format.js";
import { showError } from "./ui.js";

const LONGEST_WAIT_MS = 5000;
/** The server sends a message every second; after a longer silence, the values on the page may be old. */
const SILENT_MS = 5000;

/** connecting | open | lost */
export const connection = signal("connecting");
/** Seconds since the last message of an open connection, once they exceed the limit; else 0. */
export const silence = signal(0);
let heardAt = 0;
setInterval(() => {
  const silent = performance.now() - heardAt;
  silence.value = connection.value === "open" && silent > SILENT_MS ? Math.round(silent / 1000) : 0;
}, 1000);
/** Every run, newest first; null until the first list has arrived. */
export const runs = signal(null);
/** Why folders that look like runs cannot be read. */
export const problems = signal([]);
export const isGoing = ({ status }) => status === "running" || status === "pending";

/** The run with this id, or with this folder. */
export const findRun = (ref) => runs.value?.find(({ id }) => id === ref) ?? runs.value?.find(({ location }) => location === ref);

export const label = (run) => run.name || run.id;

/** The name of each run, with its id where several have the same. */
export const labelsOf = (some) => some.map((run) => (some.filter((other) => label(other) === label(run)).length > 1 ? `${label(run)} (${run.id})` : label(run)));

/** Seconds from the first start to the end, or to now. */
export const took = (run) => ((run.status === "running" ? clockNow.value : Date.parse(run.completed_at)) - Date.parse(run.started_at)) / 1000;

/** The metric that decides which checkpoint is best, else the first of the best ones. */
export function monitored(run) {
  const best = run.best_metric ?? {};
  const name = run.monitor in best ? run.monitor : Object.keys(best)[0];
  return name ? [name, best[name]] : null;
}

/** The data of one run while it is shown. */
class RunData {
  watchers = 0;
  epochs = signal([]);
  /** Why the server does not send it, or null. */
  error = signal(null);
  /** The steps of an epoch, or null if unknown. */
  perEpoch = signal(null);
  /** By stream, a list with its rows or null; a new list after each change. */
  streams = new Map();
  /** The names of the streams that have rows. */
  names = signal([]);

  constructor(id) {
    this.id = id;
  }

  slot(name) {
    return this.streams.get(name) ?? this.streams.set(name, signal([null])).get(name);
  }

  take(message) {
    const { kind, stream: name } = message;
    const slot = this.slot(name);
    const stream = kind === "history" ? new Stream(message) : slot.peek()[0];
    if (kind === "history") this.error.value = null;
    else if (!stream?.append(message)) return;
    slot.value = [stream];
    if (stream.rows && !this.names.peek().includes(name)) this.names.value = [...this.names.peek(), name];
  }

  /** The stream or null; a component that calls this is drawn again with new rows. */
  stream(name) {
    return this.slot(name).value[0];
  }

  /** Streams of this kind: `system` means one for each node. */
  named(prefix) {
    return this.names.value.filter((name) => name.startsWith(prefix)).map((name) => [name, this.stream(name)]);
  }
}

const followed = new Map();
let socket = null;
let failures = 0;

const send = (message) => socket?.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

/** Request the data of a run; also to try again after an error. */
export const subscribe = (id) => send({ type: "subscribe", run: id });

/** Follow a run; return its data and a function that ends this. */
export function follow(id) {
  if (!followed.has(id)) followed.set(id, new RunData(id));
  const data = followed.get(id);
  if (data.watchers++ === 0) subscribe(id);
  const leave = () => --data.watchers === 0 && followed.delete(id) && send({ type: "unsubscribe", run: id });
  return [data, leave];
}

/** Request columns of a part of a stream, at the finest resolution that fits, or `full`; null without an answer. */
export function range(run, stream, columns, part) {
  const query = new URLSearchParams([["stream", stream], ...columns.map((column) => ["column", column]), ...Object.entries(part)]);
  return get(runPath(run, `/rows?${query}`)).then((rows) => new Stream(rows), () => null);
}

export function connect() {
  const place = new URL(`${API}/live`, location.href.split("#")[0]);
  place.protocol = place.protocol.replace("http", "ws");
  socket = new WebSocket(place);
  socket.onopen = () => {
    failures = 0;
    heardAt = performance.now();
    if (connection.value === "lost") reconnects.value += 1;
    connection.value = "open";
    for (const data of followed.values()) data.error.value = null;
    send({ type: "watch", runs: true });
    for (const id of followed.keys()) subscribe(id);
  };
  socket.onmessage = ({ data }) => {
    heardAt = performance.now();
    batch(() => {
      silence.value = 0;
      onMessage(JSON.parse(data));
    });
  };
  socket.onclose = () => {
    connection.value = "lost";
    failures += 1;
    const later = () => locked.value || setTimeout(connect, Math.min(LONGEST_WAIT_MS, 250 * 2 ** Math.min(failures, 6)));
    get("/studio").then(later, later); // whose status 401 locks this page
  };
}

const handlers = {
  hello: ({ now }) => setClock(now),
  runs: (message) => {
    runs.value = message.runs;
    problems.value = message.problems;
  },
  runs_changed: (message) => {
    merge(message.runs, message.removed);
    problems.value = message.problems;
  },
  epochs: ({ run, epochs, steps_per_epoch: perEpoch }) => {
    const data = followed.get(run);
    if (!data) return;
    data.epochs.value = epochs;
    data.perEpoch.value = perEpoch;
  },
  rows: (message) => followed.get(message.run)?.take(message),
  error: ({ run, ...error }) => {
    if (followed.has(run)) followed.get(run).error.value = error;
    else if (!run) showError(error); // errors about a run that is no longer shown are dropped
  },
};

const onMessage = (message) => handlers[message.type]?.(message);

/** Merge summaries from the server into the list, newest first. */
export function merge(changed, removed) {
  const byId = new Map([...(runs.value ?? []), ...changed].map((run) => [run.id, run]));
  for (const id of removed) byId.delete(id);
  runs.value = [...byId.values()].sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
}
