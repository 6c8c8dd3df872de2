"""Writes the reference from the code: ``python docs/generate.py``.

The command line, the settings, the codes of errors, and the files of a run folder with their JSON schemas. A test
compares the files with what this script would write. :func:`error_messages` is added when the site is built.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

HERE = Path(__file__).parent
GENERATED = "<!-- Written by docs/generate.py: change the code, then run it. -->"

CONFIGURATION_INTRODUCTION = """\
# Configuration

A run's settings come from four places; each later one wins:

1. the general defaults below,
2. the task's own defaults,
3. files given with `--config`, in their order, each with the files named under its `defaults:` beneath it,
4. `--set KEY=VALUE`, then the flags of the command line ([cli.md](cli.md)).

```yaml
# two_gpu.yaml
defaults: [base_config]        # base_config.yaml beside this file
hardware:
  selected_devices: [gpu:0, gpu:1]
training:
  batch_size: 64
optimizer:
  lr: 2.0e-3
```

```
lockstep train har --config two_gpu.yaml --set scheduler.name=poly --epochs 10
```

Numbers are those of YAML 1.2: `1e-5` is one, in a file, in a list and after `--set`; in quotes it is text.

An unknown key is refused with the nearest right one, a key that is twice in a section with both its lines. The complete
configuration of a run is its `config.yaml`, of at most 1 MiB and 100,000 values; `lockstep train --config` of that file
is the same run. From Python, the same keys make a `lockstep.RunConfig` or a nested mapping for `lockstep.train`."""

CLI_INTRODUCTION = """\
# Command line

`lockstep VERB --help` shows the same as this page. `python -m lockstep` is the same command, so that
`torchrun --nproc_per_node=2 -m lockstep train har` works.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the run failed |
| 2 | wrong usage or configuration; nothing was started |
| 130, 143 | stopped by Ctrl-C or SIGTERM, after a checkpoint |

Errors go to standard error and say what is wrong, why, and how to fix it. `--json` prints one JSON document on
standard output. RUN is a run's folder, its id, the beginning of its id, or `last`: the run in `runs` (or
`--runs-dir`) that was started last. To resume an older run does not make it the last."""


def cli_page() -> str:
    """Every verb with its usage, arguments, flags and examples."""
    from lockstep.cli.main import VERBS, app
    from lockstep.cli.settings import all_flags, flag_table

    keys = flag_table()
    parts = [GENERATED, CLI_INTRODUCTION, _table(("verb", "what it does"), _verb_rows(VERBS))]
    for name, _, _ in VERBS:
        verb = app[name]
        usage = str(verb.usage).removeprefix("Usage: ")
        parts += [f"## lockstep {name}", verb.help, f"```\n{usage}\n```"]
        if name == "plan":
            parts.append("Takes the flags of [train](#lockstep-train), `--resume` excepted, and these:")
        if verb.default_command is not None:
            parts += _flag_tables(verb, keys if name == "train" else {}, left_out=all_flags() if name == "plan" else ())
        if verb.help_epilogue:
            parts.append(f"```\n{verb.help_epilogue}\n```")
        if name == "bench":
            parts += _subcommands(name, verb)
    return "\n\n".join(parts) + "\n"


def _subcommands(name: str, verb: App) -> Iterator[str]:
    """A section for each, with the flags that `train` does not have."""
    from lockstep.cli.settings import all_flags

    for subcommand in (found for found in verb if not found.startswith("-")):
        yield from (f"## lockstep {name} {subcommand}", verb[subcommand].help)
        yield "Takes the flags of [train](#lockstep-train) that say what is trained and where, and these:"
        yield from _flag_tables(verb[subcommand], {}, left_out=all_flags())


def _verb_rows(verbs: Iterable[tuple[str, Any, str]]) -> Iterator[tuple[str, str]]:
    for name, _, help in verbs:
        yield f"[{name}](#lockstep-{name})", help


def _flag_tables(verb: App, keys: Mapping[str, str], left_out: Container[str] = ()) -> list[str]:
    """A table per group of flags, in the order of the help page."""
    groups: dict[Group, list[Argument]] = {}
    for argument in verb.assemble_argument_collection(parse_docstring=False):
        if argument.show and argument.parse and argument.names[0] not in left_out:
            groups.setdefault(_group(argument), []).append(argument)
    tables = []
    for group in sorted(groups, key=lambda group: group.sort_key if isinstance(group.sort_key, int) else -1):
        rows = [(_flag(argument), *_key(argument, keys), str(argument.parameter.help)) for argument in groups[group]]
        heading = "argument" if group.name == "Arguments" else "flag"
        columns = (heading, "setting", "meaning") if keys else (heading, "meaning")
        introduction = [f"### {group.name}"] * (len(groups) > 2) + [group.help] * bool(group.help)
        tables += [*introduction, _table(columns, rows)]
    return tables


def _group(argument: Argument) -> Group:
    groups = argument.parameter.group
    assert isinstance(groups, tuple)
    assert isinstance(groups[0], Group)
    return groups[0]


def _flag(argument: Argument) -> str:
    name = argument.names[0] if argument.names[0].startswith("-") else argument.names[0].upper()
    choices = argument.get_choices()
    if choices:
        return f"`{name} {'|'.join(choices)}`" if name.startswith("-") else f"`{'|'.join(choices)}`"
    if not name.startswith("-") or bool in _types(argument.hint):
        return ", ".join(f"`{spelling}`" for spelling in (name, *argument.names[1:]))
    return f"`{name} {argument.parameter.metavar or _placeholder(argument.hint)}`"


def _types(hint: Any) -> tuple[Any, ...]:
    from typing import get_args

    return get_args(hint) or (hint,)


def _placeholder(hint: Any) -> str:
    names = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return next((names[kind] for kind in _types(hint) if kind in names), "TEXT")


def _key(argument: Argument, keys: Mapping[str, str]) -> tuple[str, ...]:
    if not keys:
        return ()
    key = keys.get(argument.names[0])
    return (f"`{key}`" if key else "",)


def configuration_page() -> str:
    """Every key of RunConfig, a table per section."""
    from lockstep.cli.settings import flag_table
    from lockstep.config import RunConfig

    schema = RunConfig.model_json_schema()
    flags = {key: flag for flag, key in flag_table().items()}
    sections = {name: field["$ref"] for name, field in schema["properties"].items() if "$ref" in field}
    own = {name: field for name, field in schema["properties"].items() if name not in sections}
    parts = [GENERATED, CONFIGURATION_INTRODUCTION, "## The run itself", _settings_table(own, "", flags)]
    for name, reference in sections.items():
        section = schema["$defs"][reference.rpartition("/")[2]]
        parts += [f"## {name}", _settings_table(section["properties"], f"{name}.", flags)]
        if section.get("additionalProperties"):
            parts.append("Every other key of this section is a setting of the task itself: the fields of its `Config`.")
            parts += _task_settings(flags)
    return "\n\n".join(parts) + "\n"


def _task_settings(flags: Mapping[str, str]) -> Iterator[str]:
    """The settings of every built-in task."""
    from lockstep.tasks.registry import BUILT_IN, find_task

    for name in BUILT_IN:
        yield f"### task: {name}"
        yield _settings_table(find_task(name).Config.model_json_schema()["properties"], "task.", flags)


def _settings_table(fields: Mapping[str, Any], prefix: str, flags: Mapping[str, str]) -> str:
    rows = []
    for name, field in fields.items():
        key = prefix + name
        flag = f"`{flags[key]}`" if key in flags else ""
        default = f"`{json.dumps(field.get('default'))}`"
        rows.append((f"`{key}`", values_text(field), default, flag, field.get("description", "")))
    return _table(("key", "values", "default", "flag", "meaning"), rows)


def values_text(field: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words: ``integer ≥ 1 or null``."""
    if "anyOf" in field:
        return " or ".join(values_text(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        items = field.get("prefixItems") or [field.get("items", {})]
        return "list of " + ", ".join(dict.fromkeys(values_text(item) for item in items))
    text = {"string": "text", "boolean": "true, false"}.get(field["type"], field["type"])
    text = "path" if field.get("format") == "path" else text
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[name]:g}" for name, sign in bounds.items() if name in field and abs(field[name]) < 2**53]
    return " ".join([text, ", ".join(limits)]).strip()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")


ERRORS_INTRODUCTION = """\
# Errors

Every error that Lockstep raises on purpose has a code, a message, the reason and a fix. The command line prints them
without a traceback; `--json` and the studio's API return `{"code": …, "message": …, "why": …, "fix": …}`. In Python
they are exceptions:

```python
import lockstep

try:
    lockstep.plan("har", devices="gpu:99")
except lockstep.LockstepError as error:
    print(error.code, error.exit_code)  # GPU_NOT_AVAILABLE 2
    print(error.fix)
```

Codes are stable, messages are not. Exit code 2 means wrong usage, 1 a run that failed."""

FINDINGS_INTRODUCTION = """\
## Findings of an audit

[`lockstep audit`](audit.md) reports these; they are no errors of Lockstep, and their codes are stable, too."""

CAUSES_INTRODUCTION = """\
## Causes of a failed rank

When a rank fails, its failure report names one of these causes. Each links to how to check and how to fix it."""

MESSAGES = "<!-- messages -->"


def errors_page() -> str:
    """Codes, classes and exit codes; causes of a failure. The messages follow on the site."""
    from lockstep import errors
    from lockstep.audit.findings import CODES
    from lockstep.launch.failure.causes import KEYS

    meanings = dict(re.findall(r"── (\w+) +(.+)$", errors.__doc__ or "", re.M))
    rows = []
    for name, kind in _error_classes().items():
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        meaning = meanings.get(name, "").partition(": exit code")[0]
        rows.append((f"`{kind.code}`", f"`{name}`", bases, str(kind.exit_code), meaning))
    columns = ("code", "class", "subclass of", "exit code", "meaning")
    causes = [f"[{key}](troubleshooting.md#{key})" for key in KEYS]
    findings = [(f"`{code}`", kind["severity"], kind["meaning"], kind["fix"]) for code, kind in CODES.items()]
    parts = [GENERATED, ERRORS_INTRODUCTION, _table(columns, rows), CAUSES_INTRODUCTION, " · ".join(causes)]
    parts += [FINDINGS_INTRODUCTION, _table(("code", "severity", "meaning", "fix"), findings), MESSAGES]
    return "\n\n".join(parts) + "\n"


def error_messages() -> str:
    """Every message in the source, by code; ``…`` replaces what is known only when it is raised."""
    found: dict[str, dict[str, str]] = {name: {} for name in _error_classes()}
    for path in sorted((HERE.parent / "src" / "lockstep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in found and node.args and (what := _template(node.args[0])):
                fix = next((_template(word.value) for word in node.keywords if word.arg == "fix"), "")
                found[name].setdefault(what, fix)
    parts = ["## Messages\n\nThe messages of this version, to search for. `…` replaces a name, a value or a reason."]
    for name, kind in _error_classes().items():
        if found[name]:
            rows = [(f"`{what}`", fix) for what, fix in sorted(found[name].items())]
            parts += [f"### {kind.code}", _table(("message", "fix"), rows)]
    return "\n\n".join(parts)


def _error_classes() -> dict[str, Any]:
    from lockstep import errors

    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, errors.LockstepError)}


def _template(node: ast.expr) -> str:
    """The text of a string in the source; empty if it is not a literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if not isinstance(node, ast.JoinedStr):
        return ""
    text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return " ".join(text.replace("`", "").split()) if text.strip("… ") else ""


FOLDER_INTRODUCTION = """\
# Files of a run folder

[The run folder](concepts/run-folder.md) explains who writes these files and when. The JSON schemas are generated from
the models that Lockstep reads and writes with. A reader has to ignore keys that it does not know. A number that was
not finite is `null`."""

_ROWS = {
    "metrics": "One row per epoch. Names that start with `train_` or `val_` are losses and the task's metrics. "
    "`complete` is false where the run ended within the epoch.",
    "evaluations": "A line for each evaluation within an epoch (`validation.every_steps`), with the metrics by name.",
    "system": "A line per second and node. Memory in 1e9 bytes, shares from 0 to 1; `null`: not reported.",
    "samples": "With `telemetry.record_samples`: what each rank trained on, a line before each step.",
}


def folder_schemas() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each kind of file: which ones, and their JSON schema."""
    from pydantic import TypeAdapter

    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config import RunConfig
    from lockstep.events import RanksLogged, StepLogged
    from lockstep.planning.plan import Plan
    from lockstep.rundir.folder import RunRecord
    from lockstep.rundir.heartbeat import Beat

    integer, number, text = {"type": "integer"}, {"type": "number"}, {"type": "string"}
    place = {"attempt": integer, "step": integer, "epoch": {"type": "integer", "minimum": 1}}
    manifest = TypeAdapter(Manifest).json_schema()
    del manifest["properties"]["extra"]
    manifest["required"] = [*manifest["required"][:-1], "format_version", "checksum"]
    manifest["properties"] |= {"format_version": integer, "checksum": text}
    manifest["description"] = (
        "Of a checkpoint: size and SHA-256 of each file, and where the run is; `checksum` covers the rest."
    )
    numbers = {"type": "array", "items": integer}
    device = {"type": "object", "properties": {"id": text, "name": text}, "required": ["id"]}
    epoch = _object(place | {"epoch": place["epoch"]}, number)
    epoch["properties"] |= {"samples_seen": integer, "complete": {"type": "boolean"}}
    evaluation = _object(place | {"improved": {"type": "boolean"}}, number)
    evaluation["properties"]["samples_seen"] = integer
    return {
        "run": ("`run.json`", RunRecord.model_json_schema()),
        "heartbeat": ("`heartbeat.json`", Beat.model_json_schema()),
        "config": ("`config.yaml`, `attempts/<n>/config.yaml`", RunConfig.model_json_schema()),
        "plan": ("`plan.json`, `attempts/<n>/plan.json`", Plan.model_json_schema()),
        "metrics": ("`metrics.json`", _object(epochs={"type": "array", "items": epoch})),
        "steps": ("each line of `steps.jsonl`", TypeAdapter(StepLogged).json_schema()),
        "evaluations": ("each line of `evaluations.jsonl`", evaluation),
        "ranks": ("each line of `ranks.jsonl`", TypeAdapter(RanksLogged).json_schema()),
        "system": (
            "each line of `system-<node>.jsonl`",
            _object(time=number, host={"type": "object"}, devices={"type": "array", "items": device}),
        ),
        "samples": ("each line of `samples-rank<r>.jsonl`", _object(place | {"indices": numbers})),
        "manifest": ("`checkpoints/step-<n>/manifest.json`", manifest),
    }


def _object(properties: Mapping[str, Any] | None = None, others: Any = True, **more: Any) -> dict[str, Any]:
    properties = {**(properties or {}), **more}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": others}


def schema_file(name: str) -> str:
    """The JSON schema of a kind of file, as text."""
    _, schema = folder_schemas()[name]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
    schema = {**schema, "description": _ROWS.get(name) or schema.get("description", "")}
    return json.dumps({**head, **_finished(schema)}, indent=1, ensure_ascii=False) + "\n"


def _finished(node: Any) -> Any:
    """Without generated titles and Sphinx roles; a number may be null, as one that is not finite is written."""
    if isinstance(node, list):
        return [_finished(item) for item in node]
    if isinstance(node, str):
        return re.sub(r":\w+:`[.~]?([^`]+)`", r"`\1`", node).replace("``", "`")
    if not isinstance(node, dict):
        return node
    made = {key: _finished(item) for key, item in node.items() if key != "title" or isinstance(item, dict)}
    return made | {"type": ["number", "null"]} if made.get("type") == "number" else made


def folder_page() -> str:
    """The files that have a schema, and the fields of each."""
    parts = [GENERATED, FOLDER_INTRODUCTION]
    schemas = {name: json.loads(schema_file(name)) for name in folder_schemas()}
    rows = [
        (files, f"[{name}.schema.json](schemas/{name}.schema.json)") for name, (files, _) in folder_schemas().items()
    ]
    parts.append(_table(("file", "schema"), rows))
    for name, (files, _) in folder_schemas().items():
        schema = schemas[name]
        if name == "config":
            continue  # configuration.md
        parts += [
            f"## {files}",
            re.sub(r" *\n *", " ", schema["description"].replace("\n\n", "\0")).replace("\0", "\n\n"),
        ]
        fields = schema["properties"]["epochs"]["items"] if name == "metrics" else schema
        needed = fields.get("required", [])
        table = [
            (f"`{key}`", _kind(field), "yes" if key in needed else "", "")[:3]
            for key, field in fields["properties"].items()
        ]
        parts.append(_table(("key", "type", "required"), table))
    return "\n\n".join(parts) + "\n"


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        kinds = " or ".join(_kind(option) for option in field["anyOf"]).split(" or ")
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return f"object: {field['$ref'].rpartition('/')[2]}"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}" if field.get("items") else "list"
    kinds = field.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else kinds
    return {"string": "text", "boolean": "true, false"}.get(text, text) + (
        ", a time in UTC" if field.get("format") == "date-time" else ""
    )


SCHEMAS = (
    "run",
    "heartbeat",
    "config",
    "plan",
    "metrics",
    "steps",
    "evaluations",
    "ranks",
    "system",
    "samples",
    "manifest",
)
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "errors.md": errors_page,
    "run-folder.md": folder_page,
    **{f"schemas/{name}.schema.json": partial(schema_file, name) for name in SCHEMAS},
}


if __name__ == "__main__":
    for page, render in PAGES.items():
        (HERE / page).write_text(render(), encoding="utf-8")
        print(f"written: {HERE / page}")
