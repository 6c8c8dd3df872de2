// The server's REST interface: one envelope, one error shape.

import { signal, useEffect, useState } from "./html.js";

export const API = "api";

/** Whether the server no longer knows this page: its token has changed, or the session has expired. */
export const locked = signal(false);

/** Number of reconnections; requests that failed in between are repeated. */
export const reconnects = signal(0);

const OFFLINE = { status: 0, code: "OFFLINE", message: "The studio does not answer.", why: "Runs continue without it.", fix: "start it again with `lockstep studio`" };

/** Throws an error of the server: `code`, `message`, `why` and `fix`, as on the command line. */
async function call(method, path, body) {
  const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let [status, envelope] = [0, OFFLINE];
  try {
    const answer = await fetch(`${API}${path}`, { method, ...sent });
    status = answer.status;
    envelope = { code: "INTERNAL", message: `The studio answered ${status} without a reason.` };
    envelope = await answer.json();
  } catch {
    // the status or the default error describes it
  }
  if (status === 401) locked.value = true;
  if (envelope.status === "ok") return envelope.data;
  throw Object.assign(new Error(envelope.message), { why: "", fix: "", ...envelope, status });
}

export const get = (path) => call("GET", path);
export const post = (path, body = {}) => call("POST", path, body);
export const put = (path, body) => call("PUT", path, body);
export const patch = (path, body) => call("PATCH", path, body);
export const remove = (path) => call("DELETE", path);

/**
 * Request `path` and return {found, error}; repeat when a value in `when` changes, and every `every` milliseconds.
 * Empty without a path, and until a new path has answered.
 */
export function useAnswer(path, when, { every } = {}) {
  const [answer, setAnswer] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    let isOver = false;
    const take = (one) => isOver || setAnswer({ path, ...one });
    const ask = () => get(path).then((found) => take({ found }), (error) => take({ error }));
    ask();
    const timer = every && setInterval(ask, every);
    return () => {
      clearInterval(timer);
      isOver = true;
    };
  }, [path, every, reconnects.value, ...when]);
  return path && answer.path === path ? answer : {};
}

export const runPath = (id, rest = "") => `/runs/${encodeURIComponent(id)}${rest}`;
/** Address of a file in the folder of a run. */
export const filePath = (id, path) => `${API}${runPath(id, `/file?path=${encodeURIComponent(path)}`)}`;
