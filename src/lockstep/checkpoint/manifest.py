"""``manifest.json``: the content of a checkpoint, with hashes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, NewerFormatError, RunFolderError, UnreadableError
from lockstep.rundir.files import open_regular, parse_json, plain

#: 1: two files; 2: the same in shards; 3: with frozen weights in separate files. The lowest possible one is written.
FORMAT_VERSION = 3
MODEL = "model.safetensors"
#: Weights that training does not change. Checkpoints have links to one such file, as long as its hash is the same.
FROZEN = "frozen.safetensors"
TRAINER = "trainer.pt"
MANIFEST = "manifest.json"

_OWN_KEYS = {"format_version", "step", "files", "aliases", "checksum"}
_MAX_BYTES = 64 << 20
_FIX = "name another with --checkpoint STEP (see `lockstep show RUN`); `lockstep resume` takes the newest valid one"
#: Of a name that leads to no file: none is there, a folder, a loop of links, a socket; or no regular one (``None``).
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, None}


@dataclass(frozen=True, slots=True)
class Digest:
    """Size in bytes and hash of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``extra``: keys of the run, beside those of the format."""

    step: int
    files: Mapping[str, Digest]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]

    @property
    def shards(self) -> int:
        """The number of parts of model and trainer; 0 for a whole checkpoint."""
        return 0 if MODEL in self.files else (sum(not is_frozen(name) for name in self.files) - 1) // 2

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file. ``checksum`` is the hash of all the rest."""
        taken = _OWN_KEYS & self.extra.keys()
        assert not taken, f"reserved keys of the manifest: {taken}"
        content = {
            "format_version": 3 if any(map(is_frozen, self.files)) else 2 if self.shards else 1,
            "step": self.step,
            "files": {name: asdict(digest) for name, digest in self.files.items()},
            "aliases": dict(self.aliases),
            **plain(self.extra),
        }
        return {**content, "checksum": _checksum(content)}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``folder``. Raises :class:`CheckpointError` or a subclass."""
    path = folder / MANIFEST
    with _opened(path) as file:
        text = file.read(_MAX_BYTES)  # a longer one is cut, and so no JSON
    try:
        content = parse_json(text, path)
    except RunFolderError as error:
        raise CheckpointError(error.what, why=error.why, fix=_FIX) from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} was written by a newer version of Lockstep",
            why=f"its format is {version}; this version reads up to {FORMAT_VERSION}",
            fix="upgrade: pip install --upgrade lockstep-train",
        )
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path} is damaged", why="its content does not match its checksum", fix=_FIX)
    try:
        manifest = Manifest(
            step=int(content["step"]),
            files={name: Digest(int(it["size"]), str(it["sha256"])) for name, it in content["files"].items()},
            aliases={str(name): str(other) for name, other in content["aliases"].items()},
            extra={key: value for key, value in content.items() if key not in _OWN_KEYS},
        )
        if {name for name in manifest.files if not is_frozen(name)} != file_names(manifest.shards):
            raise ValueError(f"a checkpoint does not consist of {', '.join(manifest.files)}")
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged", why=f"{type(error).__name__}: {error}", fix=_FIX) from None


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files in ``folder`` with their hashes in ``manifest``.

    Raises:
        CheckpointError: names the first file that is missing or differs, and how.
        UnreadableError: the system cannot read one now.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            damage = ""
            if size != expected.size:
                damage = f"it has {size:,} bytes; {expected.size:,} were written"
            elif (digest := hashlib.file_digest(file, "sha256").hexdigest()) != expected.sha256:
                damage = f"its sha256 is {digest[:12]}…; {expected.sha256[:12]}… was written"
        if damage:
            raise CheckpointError(f"{path} is damaged", why=damage, fix=_FIX)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of a checkpoint for reading."""
    try:
        with open_regular(path, buffer_bytes=-1, links=True) as file:
            yield file
    except OSError as error:
        raise refused(path, error) from None


def refused(path: Path, error: OSError) -> CheckpointError:
    """Distinguish a checkpoint without ``path`` from a disk, for example, that cannot be read now."""
    reason = error.strerror or str(error)
    if error.errno in _NO_FILE:
        return CheckpointError(f"cannot read {path}", why=reason, fix=_FIX)
    fix = "check disk, network share and permissions and try again; or move the checkpoint's folder away"
    return UnreadableError(f"cannot read {path}", why=f"{reason}; the checkpoint may be whole", fix=fix)


def shard(kind: str, number: int, shards: int) -> str:
    """Name the file of part ``number`` (from 0) of ``model``, ``frozen`` weights or ``trainer`` tensors."""
    return f"{kind}-{number + 1:05d}-of-{shards:05d}.safetensors"


def is_frozen(name: str) -> bool:
    """Return whether a file of a checkpoint has frozen weights."""
    return re.fullmatch(r"frozen(-\d{5}-of-\d{5})?\.safetensors", name) is not None


def file_names(shards: int) -> set[str]:
    """Return the files of a checkpoint in N shards (0: whole), without manifest and frozen weights."""
    if not shards:
        return {MODEL, TRAINER}
    return {TRAINER, *(shard(kind, number, shards) for kind in ("model", "trainer") for number in range(shards))}


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Parse the step of a checkpoint's folder name; ``None`` for any other name."""
    match = re.fullmatch(r"step-([0-9]{8,15})", name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()
