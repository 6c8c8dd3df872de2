// A configuration in the page: nested and sparse, only what differs from the defaults.

export const getAt = (tree, path) => path.reduce((node, key) => (node === null || node === undefined ? undefined : node[key]), tree);

/** A copy of `tree` with `value` at `path`; `undefined` removes it and sections that become empty. */
export function setAt(tree, [key, ...rest], value) {
  const copy = { ...tree };
  if (rest.length) {
    const inner = setAt(copy[key] ?? {}, rest, value);
    if (Object.keys(inner).length) copy[key] = inner;
    else delete copy[key];
  } else if (value === undefined) delete copy[key];
  else copy[key] = value;
  return copy;
}

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** A property's JSON schema without references and without the null of an optional one. */
export function resolve(property, root) {
  const target = property.$ref ? { ...getAt(root, property.$ref.slice(2).split("/")), ...property } : property;
  const one = target.allOf?.length === 1 ? { ...resolve(target.allOf[0], root), ...target } : target;
  const kinds = one.anyOf?.filter((kind) => kind.type !== "null");
  if (!kinds) return { ...one, optional: false };
  const chosen = resolve(kinds[0], root);
  return { ...chosen, ...one, type: chosen.type, optional: kinds.length < one.anyOf.length };
}

/** Input as a value of the schema. Throws a message for invalid input. */
export function parse(text, schema) {
  const trimmed = text.trim();
  if (schema.type === "array") return trimmed ? trimmed.split(",").map((part) => parse(part, schema.items ?? item(schema))) : [];
  if (schema.type === "integer" || schema.type === "number") {
    const value = Number(trimmed);
    if (!trimmed || !Number.isFinite(value)) throw new Error("a number is needed");
    if (schema.type === "integer" && !Number.isInteger(value)) throw new Error("a whole number is needed");
    if (schema.type === "integer" && !Number.isSafeInteger(value)) {
      throw new Error(`a browser would round this: here at most ${Number.MAX_SAFE_INTEGER}`);
    }
    const limits = [
      [value < schema.minimum, `at least ${schema.minimum}`],
      [value <= schema.exclusiveMinimum, `more than ${schema.exclusiveMinimum}`],
      [value > schema.maximum, `at most ${schema.maximum}`],
      [value >= schema.exclusiveMaximum, `less than ${schema.exclusiveMaximum}`],
    ];
    const broken = limits.find(([wrong]) => wrong);
    if (broken) throw new Error(broken[1]);
    return value;
  }
  return trimmed;
}

/** The type of a tuple's parts, e.g. of the two betas. */
const item = (schema) => schema.prefixItems?.[0] ?? { type: "string" };

export const show = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : String(value));
