// Where the page is, in the address: #/train/<run>, #/compare/<run>,<run>, #/scaling, #/doctor.

import { computed, signal } from "./html.js";

// The address that the studio printed, opened in a browser that has a session: the token leaves it.
if (location.hash.startsWith("#token=")) history.replaceState(null, "", location.pathname);

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

export const route = computed(() => {
  const [view = "train", argument = ""] = hash.value.replace(/^#\/?/, "").split("/");
  const ids = argument.split(",").filter(Boolean).map(decodeURIComponent);
  return { view: view || "train", run: view === "compare" ? null : (ids[0] ?? null), ids };
});

export const address = (view, ids = []) => `#/${view}${ids.length ? `/${ids.map(encodeURIComponent).join(",")}` : ""}`;

export function go(view, ids = []) {
  location.hash = address(view, ids);
  hash.value = location.hash;
}
