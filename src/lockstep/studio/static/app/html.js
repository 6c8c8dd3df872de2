// One place that binds htm to Preact, so that every other module imports from here.

import { h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { render };
export { useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal } from "../vendor/signals.js";

export const html = htm.bind(h);
