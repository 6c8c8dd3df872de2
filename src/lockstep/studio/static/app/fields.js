// One setting as a form field, made from its JSON schema.

import { html, useEffect, useId, useState } from "./html.js";
import { change, isChanged, mistakes, valueOf } from "./draft.js";
import { titleOf } from "./format.js";
import { parse, show } from "./settings.js";
import { Select } from "./ui.js";

export function note(path, message) {
  const { [path]: before, ...others } = mistakes.peek();
  if (message !== (before ?? null)) mistakes.value = message ? { ...others, [path]: message } : others;
}

/** `path` as a list of keys; `schema` resolved. */
export function Field({ path, schema, label = titleOf(path.at(-1)) }) {
  const id = useId();
  const dotted = path.join(".");
  const wrong = mistakes.value[dotted];
  const described = [schema.description && `${id}-help`, wrong && `${id}-wrong`].filter(Boolean).join(" ") || undefined;
  const common = { id, class: "input", name: dotted, "aria-describedby": described, "aria-invalid": wrong ? "true" : undefined };
  return html`<div class="field ${isChanged(path) ? "changed" : ""}">
    <label for=${id}>${label}</label>
    <${control(schema)} path=${path} schema=${schema} common=${common} />
    ${schema.description && html`<p class="help" id="${id}-help">${schema.description}</p>`}
    ${wrong && html`<p class="wrong" id="${id}-wrong">${wrong}</p>`}
  </div>`;
}

function control(schema) {
  if (schema.enum) return Choice;
  if (schema.type === "boolean") return schema.optional ? Choice : Check;
  return Text;
}

function Check({ path, common }) {
  const { class: _, ...rest } = common;
  return html`<input type="checkbox" ...${rest} checked=${valueOf(path)} onChange=${(event) => change(path, event.currentTarget.checked)} />`;
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
  const numeric = schema.type === "integer" || schema.type === "number";
  const take = (text) => {
    setTyped(text);
    const dotted = path.join(".");
    if (!text.trim() && schema.type !== "array") {
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
  return html`<input
    type="text"
    ...${common}
    class="input ${numeric ? "number" : ""}"
    inputmode=${schema.type === "integer" ? "numeric" : numeric ? "decimal" : undefined}
    autocomplete="off"
    spellcheck="false"
    placeholder=${schema.optional ? "unset" : ""}
    value=${typed ?? show(valueOf(path))}
    onInput=${(event) => take(event.currentTarget.value)}
    onBlur=${leave}
  />`;
}
