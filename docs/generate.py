"""Writes docs/cli.md and docs/configuration.md from the code: ``python docs/generate.py``.

A test compares the files with what this script would write, so run it after changing a flag or a setting.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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
standard output. RUN is a run's folder, its id, the beginning of its id, or `last`."""


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


PAGES = {"cli.md": cli_page, "configuration.md": configuration_page}


if __name__ == "__main__":
    for page, render in PAGES.items():
        (HERE / page).write_text(render(), encoding="utf-8")
        print(f"written: {HERE / page}")
