// One place that binds htm to Preact, so that every other module imports from here.

import { h, render } from "../vendor/preact.js";
import { batch, computed, effect, signal } from "../vendor/signals.js";
import htm from "../vendor/htm.js";

export { render };
export { useEffect, useErrorBoundary, useId, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal };

export const html = htm.bind(h);

/** A signal whose value `storage` keeps as text. */
export function stored(storage, key, fallback) {
  const kept = signal(fallback);
  try {
    kept.value = JSON.parse(storage.getItem(key)) ?? fallback;
  } catch {} // written by an older page
  effect(() => storage.setItem(key, JSON.stringify(kept.value)));
  return kept;
}
