// A form field for one setting, made from its JSON schema. The server checks the input.

import { html, parsed, useEffect, useState } from "./html.js";
import { change, isChanged, problemOf, valueOf } from "./draft.js";
import { titleOf } from "./format.js";
import { Labelled, Select } from "./ui.js";

/** `path` as a list of keys; `schema` resolved. */
export function Field({ path, schema, label = titleOf(path.at(-1)) }) {
  const Control = schema.enum || (schema.type === "boolean" && schema.optional) ? Choice : schema.type === "boolean" ? Check : Text;
  return html`<${Labelled} label=${label} help=${schema.description} error=${problemOf(path)} kind=${isChanged(path) ? "changed" : ""}>
    ${(given) => html`<${Control} path=${path} schema=${schema} common=${{ ...given, name: path.join(".") }} />`}
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

/** Text, numbers and lists. */
function Text({ path, schema, common }) {
  const [typed, setTyped] = useState(null);
  // Drop invalid input with its field, for example when another optimizer has no such setting.
  useEffect(() => () => isInvalid(valueOf(path), schema) && change(path, undefined), []);
  const kind = { integer: "numeric", number: "decimal" }[schema.type];
  const take = (text) => (setTyped(text), change(path, parse(text.trim(), schema)));
  const looks = { class: `input ${kind ? "number" : ""}`, inputmode: kind, autocomplete: "off", spellcheck: "false", placeholder: schema.optional ? "unset" : "" };
  return html`<input type="text" ...${common} ...${looks} value=${typed ?? show(valueOf(path))} onInput=${(event) => take(event.currentTarget.value)} onBlur=${() => setTyped(null)} />`;
}

/** Parse input as a value of the schema. Numbers that a browser would round, and invalid input, stay text. */
function parse(text, schema) {
  if (schema.type === "object") return text ? parseOptions(text) : {};
  if (schema.type === "array") return text ? text.split(",").map((part) => parse(part.trim(), schema.items ?? item(schema))) : [];
  if (!text) return schema.optional ? null : undefined;
  const value = ["integer", "number"].includes(schema.type) ? Number(text) : NaN;
  return Number.isSafeInteger(value) || (Number.isFinite(value) && !Number.isInteger(value)) ? value : text;
}

/** Parse `momentum: 0.9, nesterov: true`, or a JSON object, as an object. */
function parseOptions(text) {
  if (text.startsWith("{")) return parsed(text, text);
  const pairs = text.split(/,(?![^[]*\])/).filter((part) => part.trim()).map((part) => /^\s*(\w+)\s*[:=]\s*(.+?)\s*$/.exec(part));
  return pairs.every(Boolean) ? Object.fromEntries(pairs.map(([, name, value]) => [name, parsed(value, value)])) : text;
}

/** Whether a value is text, but neither the schema's type nor a long number. */
const isInvalid = (value, schema) =>
  Array.isArray(value) ? value.some((one) => isInvalid(one, schema.items ?? item(schema))) : typeof value === "string" && schema.type !== "string" && !/^-?\d+$/.test(value);

/** The schema of a tuple's items, such as the two betas. */
const item = (schema) => schema.prefixItems?.[0] ?? { type: "string" };

const show = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : typeof value === "object" ? showOptions(value) : String(value));

const showOptions = (value) => (Object.values(value).some((one) => one !== null && typeof one === "object" && !Array.isArray(one)) ? JSON.stringify(value) : Object.entries(value).map(([name, one]) => `${name}: ${typeof one === "string" ? one : JSON.stringify(one)}`).join(", "));
