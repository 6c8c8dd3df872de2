// One setting as a form field, made from its JSON schema.

import { html, parsed, useEffect, useState } from "./html.js";
import { change, isChanged, mistakes, valueOf } from "./draft.js";
import { titleOf } from "./format.js";
import { Labelled, Select } from "./ui.js";

export function note(path, message) {
  const { [path]: before, ...others } = mistakes.peek();
  if (message !== (before ?? null)) mistakes.value = message ? { ...others, [path]: message } : others;
}

/** `path` as a list of keys; `schema` resolved. */
export function Field({ path, schema, label = titleOf(path.at(-1)) }) {
  const name = path.join(".");
  const Control = schema.enum || (schema.type === "boolean" && schema.optional) ? Choice : schema.type === "boolean" ? Check : Text;
  return html`<${Labelled} label=${label} help=${schema.description} wrong=${mistakes.value[name]} kind=${isChanged(path) ? "changed" : ""}>
    ${(given) => html`<${Control} path=${path} schema=${schema} common=${{ ...given, name }} />`}
  <//>`;
}

function Check({ path, common }) {
  return html`<input type="checkbox" ...${common} checked=${valueOf(path)} onChange=${(event) => change(path, event.currentTarget.checked)} />`;
}

function Choice({ path, schema, common }) {
  const values = schema.enum ?? [true, false];
  const options = schema.optional ? [null, ...values] : values;
  const text = (value) => (value === null ? "unset" : value === true ? "yes" : value === false ? "no" : String(value));
  const at = options.findIndex((value) => value === valueOf(path));
  return html`<${Select} bare ...${common} value=${String(at)} options=${options.map((value, index) => [String(index), text(value)])} onChange=${(index) => change(path, options[Number(index)])} />`;
}

/** Text, numbers and lists: input is used as soon as it is valid. */
function Text({ path, schema, common }) {
  const [typed, setTyped] = useState(null);
  // Invalid input is dropped with the field, for example when another optimizer has no such setting.
  useEffect(() => () => note(path.join("."), null), []);
  const kind = { integer: "numeric", number: "decimal" }[schema.type];
  const take = (text) => {
    setTyped(text);
    const dotted = path.join(".");
    if (!text.trim() && !["array", "object"].includes(schema.type)) {
      note(dotted, null);
      change(path, schema.optional ? null : undefined);
      return;
    }
    try {
      change(path, parse(text, schema));
      note(dotted, null);
    } catch (error) {
      note(dotted, error.message);
    }
  };
  const leave = () => !mistakes.value[path.join(".")] && setTyped(null);
  const looks = { class: `input ${kind ? "number" : ""}`, inputmode: kind, autocomplete: "off", spellcheck: "false", placeholder: schema.optional ? "unset" : "" };
  return html`<input type="text" ...${common} ...${looks} value=${typed ?? show(valueOf(path))} onInput=${(event) => take(event.currentTarget.value)} onBlur=${leave} />`;
}

/** Input as a value of the schema. Throws a message for invalid input. */
function parse(text, schema) {
  const trimmed = text.trim();
  if (schema.type === "object") return parseOptions(trimmed);
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

/** `momentum: 0.9, nesterov: true` as an object; a JSON object, too. */
function parseOptions(text) {
  if (text.startsWith("{")) return parsed(text, null) ?? fail("the object is not valid JSON");
  const pairs = text.split(/,(?![^[]*\])/).filter((part) => part.trim()).map((part) => /^\s*(\w+)\s*[:=]\s*(.+?)\s*$/.exec(part) ?? fail("write name: value, with commas between them"));
  return Object.fromEntries(pairs.map(([, name, value]) => [name, parsed(value, value)]));
}

function fail(message) {
  throw new Error(message);
}

/** The type of a tuple's parts, e.g. of the two betas. */
const item = (schema) => schema.prefixItems?.[0] ?? { type: "string" };

const show = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : typeof value === "object" ? showOptions(value) : String(value));

const showOptions = (value) => (Object.values(value).some((one) => one !== null && typeof one === "object" && !Array.isArray(one)) ? JSON.stringify(value) : Object.entries(value).map(([name, one]) => `${name}: ${typeof one === "string" ? one : JSON.stringify(one)}`).join(", "));
