"""Ways to spoil a file, all of them deterministic: ``mutate(path, random)`` changes it in place and says how.

Three families: bytes (any file), documents (JSON and YAML, changed where their values are), and the two files of
tensors. What a hash protects is also spoilt with the hash put right again (:func:`reseal`), as an attacker would.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

Mutator = Callable[[Path, random.Random, str], str]

#: Values that no field expects everywhere.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 2**31, 2**63, -(2**63), 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "x" * 70_000, "nan", "NaN", "\ud800", "\x00", "\x1b]0;title\x07\x1b[31m", "‮abc", "../../../etc/passwd"),
    *("/dev/zero", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "2026-02-30T00:00:00Z", "é" * 300),
    *([], {}, [[]], [None] * 50, {"": {}}, {"a": {"a": {"a": []}}}, [{"step": "x"}], {"__class__": "os.system"}),
)


def command(canary: str) -> str:
    """What hostile content tries to run."""
    return f"touch {canary}"


# --- bytes -----------------------------------------------------------------------------------------


def truncated(path: Path, rng: random.Random, canary: str) -> str:
    content = path.read_bytes()
    places = [0, 1, 8, len(content) // 2, len(content) - 1, content.find(b"\n"), rng.randrange(len(content) + 1)]
    place = max(0, rng.choice(places))
    path.write_bytes(content[:place])
    return f"cut after {place} bytes"


def flipped(path: Path, rng: random.Random, canary: str) -> str:
    content = bytearray(path.read_bytes() or b"\0")
    places = [rng.randrange(len(content) * 8) for _ in range(rng.choice((1, 1, 2, 16)))]
    for place in places:
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))
    return f"bits {places} flipped"


def overwritten(path: Path, rng: random.Random, canary: str) -> str:
    content = bytearray(path.read_bytes())
    length = rng.choice((1, 4, 64, 4096))
    place = rng.randrange(len(content) + 1)
    content[place : place + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    path.write_bytes(bytes(content))
    return f"{length} bytes overwritten at {place}"


def inserted(path: Path, rng: random.Random, canary: str) -> str:
    content = path.read_bytes()
    place = rng.randrange(len(content) + 1)
    extra = rng.choice((b"\xff\xfe", b"\xc3", b"\xef\xbb\xbf", b"\0", b"\x1b[2J", content[:500], b"]" * 9, b"\n" * 999))
    path.write_bytes(content[:place] + extra + content[place:])
    return f"{extra[:9]!r} inserted at {place}"


def replaced(path: Path, rng: random.Random, canary: str) -> str:
    content = rng.choice(
        (
            *(b"null\n", b"[]\n", b"{}\n", b"0", b'"text"\n', b"\n", b'{"a": 1, "a": 2}', b"1e999999", b"9" * 6000),
            *(b"[" * 50_000, b'{"a":' * 50_000, b"- " * 20_000, b"\0" * 100),
            *(rng.randbytes(1000), b"PK\x03\x04" + rng.randbytes(200)),
        )
    )
    path.write_bytes(content)
    return f"replaced by {content[:20]!r}…"


def oversized(path: Path, rng: random.Random, canary: str) -> str:
    size = rng.choice((300 << 20, 600 << 20, 1 << 40))
    os.truncate(path, size)
    return f"grown to {size} bytes"


def not_a_file(path: Path, rng: random.Random, canary: str) -> str:
    path.unlink()
    kind = rng.choice(("folder", "pipe", "socket", "loop", "dangling", "endless", "missing", "up"))
    if kind == "folder":
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _bind(path)
    elif kind != "missing":
        target = {"loop": path.name, "dangling": "nowhere", "endless": "/dev/zero", "up": ".."}[kind]
        path.symlink_to(target)
    return kind


def _bind(path: Path) -> None:
    """A socket's file; the path of one may have 107 bytes only, so it is made elsewhere and moved."""
    short = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short))
    shutil.move(short, path)


BYTES: tuple[Mutator, ...] = (truncated, flipped, overwritten, inserted, replaced, oversized, not_a_file)


# --- documents -------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, (*path, key))


def change_somewhere(document: Any, rng: random.Random, values: tuple[Any, ...] = HOSTILE) -> tuple[Any, str]:
    """``document`` with one value replaced, deleted or added."""
    *parents, last = rng.choice(list(_places(document))[1:] or [("key",)])
    inner = document
    for key in parents:
        inner = inner[key]
    kind = rng.choice(("replace", "replace", "replace", "delete", "add"))
    if kind == "delete" and isinstance(inner, dict | list):
        del inner[last]
        return document, f"{[*parents, last]} deleted"
    value = rng.choice(values)
    if kind == "add" and isinstance(inner, dict):
        inner[rng.choice(("format_version", "extra", "__proto__", "step", "files"))] = value
    elif isinstance(inner, dict | list):
        inner[last] = value
    return document, f"{[*parents, last]}: {kind} {str(value)[:30]!r}"


def json_value(path: Path, rng: random.Random, canary: str) -> str:
    document, how = change_somewhere(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(document))
    return how


def json_duplicate(path: Path, rng: random.Random, canary: str) -> str:
    document = json.loads(path.read_text())
    key = rng.choice(list(document))
    path.write_text(path.read_text().rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(HOSTILE))}}}")
    return f"{key} twice"


def json_lines(path: Path, rng: random.Random, canary: str) -> str:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    document, how = change_somewhere(json.loads(lines[at]), rng)
    lines[at] = rng.choice((json.dumps(document), "[" * 20_000, "{}", "\0", lines[at][:-3]))
    path.write_text("\n".join(lines) + "\n")
    return f"line {at}: {how}"


JSON: tuple[Mutator, ...] = (json_value, json_value, json_value, json_duplicate)
LINES: tuple[Mutator, ...] = (json_lines, json_lines)


def yaml_value(path: Path, rng: random.Random, canary: str) -> str:
    """The settings of the task itself are left alone: what they may be is the task's own business."""
    content = yaml.safe_load(path.read_text())
    own = {key: content["task"].pop(key) for key in list(content.get("task", ())) if key != "name"}
    document, how = change_somewhere(content, rng)
    if isinstance(document.get("task"), dict):
        document["task"].update(own)
    path.write_text(json.dumps(document))  # JSON's escapes carry what YAML's emitter would refuse; YAML reads them
    return how


def yaml_text(path: Path, rng: random.Random, canary: str) -> str:
    run = command(canary)
    content = rng.choice(
        (
            f"a: !!python/object/apply:os.system ['{run}']\n",
            f"training: !!python/object/new:os.system ['{run}']\n",
            f"name: !!python/name:os.system\ninit_from: !!python/object/apply:subprocess.run [[sh, -c, '{run}']]\n",
            f"? !!python/object/apply:os.system ['{run}']\n: 1\n",
            "a: !!python/module:os\n",
            "training: &t [*t]\n",
            "&a [&b {*a : *b}]\n",
            "training: {epochs: !!int ''}\n",
            "training: {epochs: !!float ''}\n",
            "training: {compile: !!bool maybe}\n",
            "name: !!timestamp soon\n",
            "name: !!binary '*'\n",
            "task: !!set {name, name}\n",
            "task: !!omap [a, b]\n",
            "task: !!pairs [[1]]\n",
            "training:\n\tepochs: 1\n",
            "--- {}\n--- {}\n",
            "%YAML 9.9\n---\n{}\n",
            "training: {epochs: " + "9" * 5000 + "}\n",
            "training: {epochs: " + "1:" * 3000 + "1}\n",
            "training: {epochs: 1, epochs: 2}\n",
            "optimizer: {lr: .nan}\nseed: .inf\n",
            "defaults: [.]\n",
            "defaults: ['/dev/zero']\n",
            'defaults: ["a\\0b"]\n',
            f"defaults: [{path.name}]\n",
            f"defaults: ['../../../../../../etc/hostname', '{'x' * 5000}']\n",
            f"task: {{name: '{path.parent / 'evil.py'}:Evil'}}\n",
            "task: {name: 'evil.py:Evil'}\n",
        )
    )
    path.write_text(content)
    return content[:60]


YAML: tuple[Mutator, ...] = (yaml_value, yaml_value, yaml_text, yaml_text)


# --- tensors ---------------------------------------------------------------------------------------


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def pickled_code(path: Path, rng: random.Random, canary: str) -> str:
    run = command(canary)
    payload = rng.choice(
        (Payload(os.system, run), Payload(eval, f"__import__('os').system({run!r})"), Payload(os.popen, run))
    )
    state: Any = rng.choice((payload, {"model": payload}, [payload], {"update": {"state": payload}}))
    if rng.random() < 0.5:
        torch.save(state, path)
        return "code in torch's archive"
    protocol = rng.choice((0, 2, 4))
    path.write_bytes(pickle.dumps(state, protocol))
    return f"code in a bare pickle of protocol {protocol}"


def trainer_value(path: Path, rng: random.Random, canary: str) -> str:
    values = (
        *HOSTILE,
        torch.zeros(0),
        torch.full((3, 3), float("nan")),
        torch.zeros(2, dtype=torch.int64),
        {"a": torch.ones(1)},
    )
    state, how = change_somewhere(torch.load(path, weights_only=True), rng, values)
    torch.save(state, path)
    return how


def model_header(path: Path, rng: random.Random, canary: str) -> str:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, how = change_somewhere(json.loads(content[8 : 8 + size]), rng)
    text = json.dumps(header).encode()
    claimed = rng.choice((len(text), len(text), len(text), 2**63, 0, len(content) * 2))
    path.write_bytes(claimed.to_bytes(8, "little") + text + content[8 + size :])
    return f"{how}, its header {claimed} bytes long"


def reseal(checkpoint: Path) -> None:
    """Let the manifest's sizes and hashes be those of the files, and its checksum its own."""
    manifest = checkpoint / "manifest.json"
    if not manifest.is_file() or manifest.stat().st_size > 1 << 20:
        return
    try:
        content = json.loads(manifest.read_text())
        for name, entry in content["files"].items():
            file = checkpoint / name
            if file.is_file() and file.stat().st_size < 1 << 20:
                data = file.read_bytes()
                entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        content.pop("checksum", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        manifest.write_text(json.dumps({**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        pass  # it is spoilt too far to be put right


TRAINER: tuple[Mutator, ...] = (pickled_code, pickled_code, trainer_value, trainer_value, trainer_value, trainer_value)
MODEL: tuple[Mutator, ...] = (model_header, model_header)
