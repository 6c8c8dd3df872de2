// The filter of the runs table: words, and comparisons such as `val_accuracy > 0.9 tag:baseline status=failed`.

const equal = (a, b) => (typeof a === "number" ? a === Number(b) : String(a ?? "").toLowerCase() === b.toLowerCase());
const OPERATORS = {
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  "!=": (a, b) => !equal(a, b),
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  "=": equal,
  ":": (a, b) => String(a ?? "").toLowerCase().includes(b.toLowerCase()),
};
const TERM = /([\w.]+)\s*(>=|<=|!=|>|<|==?|:)\s*("[^"]*"|\S+)|("[^"]*"|\S+)/g;

/**
 * `text` as a function (run, valueOf) → whether the run matches; `valueOf(run, name)` gives a value or undefined.
 * All terms must hold; `and` may stand between them.
 */
export function parseFilter(text) {
  const terms = [...text.matchAll(TERM)].map(([, name, operator, value, word]) => {
    const bare = (part) => part.replace(/^"(.*)"$/, "$1");
    if (!operator) return word.toLowerCase() === "and" ? () => true : (run, valueOf) => valueOf(run, "").includes(bare(word).toLowerCase());
    const test = OPERATORS[operator === "==" ? "=" : operator];
    const wanted = bare(value);
    const numeric = "<>".includes(operator[0]);
    return (run, valueOf) => {
      const found = valueOf(run, name);
      if (Array.isArray(found)) return found.some((one) => test(one, wanted));
      if (numeric) return typeof found === "number" && !Number.isNaN(Number(wanted)) && test(found, Number(wanted));
      return (found !== undefined || operator === "!=") && test(found, wanted);
    };
  });
  return (run, valueOf) => terms.every((term) => term(run, valueOf));
}
