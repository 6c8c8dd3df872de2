// The address of each view: #/runs, #/run/<id>/<tab>, #/compare/<run>,<run>, #/group/<tag>; after a `?` the options of a view
// (filters, columns, the x axis).

import { computed, effect, signal } from "./html.js";

// Remove the token of the printed address, if the browser already has a session.
if (location.hash.startsWith("#token=")) history.replaceState(null, "", location.pathname);

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

/** Whether the form of a new run is open. */
export const drawer = signal(false);

/** Decode a part of an address, which may be incomplete: `decodeURIComponent` would throw. */
const decoded = (text) => new URLSearchParams(`id=${text.replaceAll("+", "%2B")}`).get("id");

export const route = computed(() => {
  const [path, query = ""] = hash.value.replace(/^#\/?/, "").split("?");
  const [first = "", argument = "", tab = ""] = path.split("/");
  const ids = argument.split(",").filter(Boolean).map(decoded);
  const view = first === "run" && !ids.length ? "runs" : first || "runs";
  return { view, run: view === "run" ? ids[0] : null, ids, tab, query: new URLSearchParams(query) };
});

/** The last options of each view without ids: the way back to the table of runs restores them. */
const left = new Map();
effect(() => {
  const { view, ids, query } = route.value;
  if (!ids.length) left.set(view, query.size ? `?${query}` : "");
});

export const address = (view, ids = [], tab = "") =>
  `#/${view}${ids.length ? `/${ids.map(encodeURIComponent).join(",")}` : (left.get(view) ?? "")}${tab && `/${tab}`}`;

export function go(view, ids = [], tab = "") {
  location.hash = address(view, ids, tab);
  hash.value = location.hash;
}

/** Keep `value` in the link of this view; null or an empty text removes it. */
export function keep(name, value) {
  const { query } = route.value;
  if (value === null || value === "") query.delete(name);
  else query.set(name, value);
  history.replaceState(null, "", `${location.hash.split("?")[0] || "#/runs"}${query.size ? `?${query}` : ""}`);
  hash.value = location.hash;
}
