// Where the page is, in the address: #/runs, #/run/<id>/<tab>, #/compare/<run>,<run>, #/scaling, #/machine; after a `?`
// what a view keeps in its link (filters, columns, the x axis).

import { computed, effect, signal } from "./html.js";

// The address that the studio printed, opened in a browser that has a session: the token leaves it.
if (location.hash.startsWith("#token=")) history.replaceState(null, "", location.pathname);

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

/** Whether the form of a new run is open. */
export const drawer = signal(false);

/** A part of an address, which someone may have cut: `decodeURIComponent` would throw. */
const decoded = (text) => new URLSearchParams(`id=${text.replaceAll("+", "%2B")}`).get("id");

export const route = computed(() => {
  const [path, query = ""] = hash.value.replace(/^#\/?/, "").split("?");
  const [first = "", argument = "", tab = ""] = path.split("/");
  const ids = argument.split(",").filter(Boolean).map(decoded);
  const view = first === "run" && !ids.length ? "runs" : first || "runs";
  return { view, run: view === "run" ? ids[0] : null, ids, tab, query: new URLSearchParams(query) };
});

/** Of views without ids, what their link kept last: the way back to the table of runs shows it as it was left. */
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

/** Keeps `value` in the link of this view; null or nothing removes it. */
export function keep(name, value) {
  const { query } = route.value;
  if (value === null || value === "") query.delete(name);
  else query.set(name, value);
  history.replaceState(null, "", `${location.hash.split("?")[0] || "#/runs"}${query.size ? `?${query}` : ""}`);
  hash.value = location.hash;
}
