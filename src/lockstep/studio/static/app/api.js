// The server's REST interface: one envelope, one error shape.

import { signal, useEffect, useState } from "./html.js";

/** Relative: behind a proxy the page may be below any path. */
export const API = "api";

/** Whether the server no longer knows this page: its token has changed, or the session has expired. */
export const locked = signal(false);

/** An error of the server: `code`, `message`, `why` and `fix`, as on the command line. */
export class ApiError extends Error {
  constructor({ code, message, why = "", fix = "" }, status) {
    super(message);
    this.code = code;
    this.why = why;
    this.fix = fix;
    this.status = status;
  }
}

async function call(method, path, body, signal) {
  let answer;
  try {
    answer = await fetch(`${API}${path}`, {
      method,
      signal,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ code: "OFFLINE", message: "The studio does not answer.", fix: "Runs continue without it. Start it again with `lockstep studio`." }, 0);
  }
  if (answer.status === 401) locked.value = true;
  let envelope;
  try {
    envelope = await answer.json();
  } catch {
    throw new ApiError({ code: "INTERNAL", message: `The studio answered ${answer.status} without a reason.` }, answer.status);
  }
  if (envelope.status !== "ok") throw new ApiError(envelope, answer.status);
  return envelope.data;
}

export const get = (path, signal) => call("GET", path, undefined, signal);
export const post = (path, body = {}, signal) => call("POST", path, body, signal);
export const put = (path, body) => call("PUT", path, body);
export const patch = (path, body) => call("PATCH", path, body);
export const remove = (path) => call("DELETE", path);

/** {found, error}: what `path` answers, fetched again when one of `when` changes; nothing without a path. */
export function useAnswer(path, when) {
  const [answer, setAnswer] = useState({ found: null, error: null });
  useEffect(() => {
    if (!path) return undefined;
    const abort = new AbortController();
    get(path, abort.signal).then(
      (found) => setAnswer({ found, error: null }),
      (error) => error.name !== "AbortError" && setAnswer({ found: null, error }),
    );
    return () => abort.abort();
  }, [path, ...when]);
  return answer;
}

export const runPath = (id, rest = "") => `/runs/${encodeURIComponent(id)}${rest}`;
/** The address of a file in the folder of a run. */
export const filePath = (id, path) => `${API}${runPath(id, `/file?path=${encodeURIComponent(path)}`)}`;
