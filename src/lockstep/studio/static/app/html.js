// Binds htm to Preact once; every other module imports from here.

import { h, render } from "../vendor/preact.js";
import { batch, computed, effect, signal } from "../vendor/signals.js";
import htm from "../vendor/htm.js";

export { render };
export { useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal };

export const html = htm.bind(h);

/** Parse JSON; `fallback` for other text, which an older page may have stored. */
export function parsed(text, fallback) {
  try {
    return JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** A signal whose value is kept in `storage`. */
export function stored(storage, key, fallback) {
  const kept = signal(parsed(storage.getItem(key), null) ?? fallback);
  effect(() => storage.setItem(key, JSON.stringify(kept.value)));
  return kept;
}
