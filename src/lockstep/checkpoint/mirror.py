"""Fetching a run from its mirror: its records, and its latest valid checkpoint and best one by their hashes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from lockstep.checkpoint.manifest import MANIFEST, folder_name, read_manifest, step_in, verify_files
from lockstep.errors import CheckpointError, NewerFormatError, RunFolderError, StorageError
from lockstep.rundir.copies import no_run
from lockstep.rundir.files import absolute, make_folder, remove, write_json, write_text
from lockstep.rundir.folder import LIVE, RunDir, RunRecord, refuse_occupied
from lockstep.rundir.remote import CHECKPOINTS, Remote, is_of_checkpoint, is_weights, reaching

#: Seconds without a new heartbeat at the mirror, after which a run on another machine has ended.
SILENCE_S = 60.0
#: How often a file is asked for, with pauses of 1, 2, 4, … seconds, so that an outage of a minute passes.
TRIES = 7
#: Between two looks at the heartbeat.
_LOOK_S = 2.0


def mirrored_record(url: str) -> RunRecord:
    """Return the record of the run at ``url``. Raises :class:`RunFolderError`: there is none, or it cannot be read."""
    with reaching(url):
        record = Remote(url).record()
    if record is None:
        raise no_run(url)
    return record


def fetch_run(url: str, folder: Path, report: Callable[[str], None]) -> RunDir | None:
    """Make ``folder``, a missing or an empty one, from the mirror at ``url``; ``None``: it has no run.

    The folder is there whole or not at all. Checkpoints without a manifest are half uploaded, and left out; one that
    differs from its hashes is reported, and the one before it is taken.

    Raises:
        RunFolderError: the mirror cannot be read, its run is still running, or the folder has other files.
    """
    remote = Remote(url)
    folder = absolute(folder)
    with reaching(url):
        names = remote.names()
    if "run.json" not in names:
        return None
    refuse_occupied(folder)

    def fill(building: Path) -> None:
        with reaching(url):
            for name in names:
                if not is_of_checkpoint(name):
                    _get(remote, name, building / name)
            _await_end(remote, RunDir(building))
            for inner in ("attempts", "logs", CHECKPOINTS):
                (building / inner).mkdir(exist_ok=True)
            _fetch_checkpoints(remote, names, building / CHECKPOINTS, report)

    try:
        make_folder(folder, fill)
    except StorageError:
        if not (folder / "run.json").exists():  # else another node has fetched it
            raise
    return RunDir.open(folder)


def _await_end(remote: Remote, run: RunDir) -> None:
    """Wait until it is sure that no process trains the run any more. Raises :class:`RunFolderError`: one does."""
    record = run.read()
    beat = run.progress()
    is_here = beat is not None and beat.host == socket.gethostname()
    before = remote.read_if_there(run.heartbeat_file.name)
    deadline = time.monotonic() + SILENCE_S
    while run.judge(record) in LIVE and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        is_running = is_here and run.judge(record) in LIVE and not run.is_between_processes(record)
        if is_running or remote.read_if_there(run.heartbeat_file.name) != before:
            raise RunFolderError(
                f"run {record.id} is still {record.status}",
                why=f"process {record.pid} on {record.host} writes its mirror {remote.url}",
                fix="wait for it, or stop it there",
            )
    if beat is not None and run.judge(record) in LIVE:
        write_json(run.heartbeat_file, {**beat.model_dump(), "ended": True})


def _fetch_checkpoints(remote: Remote, names: Collection[str], folder: Path, report: Callable[[str], None]) -> None:
    """Fetch the latest valid checkpoint and the best one, and let ``last`` and ``best`` mean them."""
    manifests = [name.split("/") for name in names if name.endswith(f"/{MANIFEST}")]
    steps = sorted(step for parts in manifests if (step := step_in(parts[1])) is not None)
    pointed = remote.read_if_there(f"{CHECKPOINTS}/best") or b""
    best = step_in(pointed.decode("ascii", "replace").strip())
    chosen: dict[str, int] = {}
    for pointer, candidates in (("last", reversed(steps)), ("best", [best] if best in steps else [])):
        for step in candidates:
            if step is None or pointer in chosen:
                continue
            try:
                fetch_checkpoint(remote, folder, step)
                chosen[pointer] = step
            except NewerFormatError:
                raise
            except CheckpointError as error:
                remove(folder / folder_name(step))
                report(f"the checkpoint of step {step} in {remote.url} is broken and passed over: {error}")
    for pointer, step in chosen.items():
        write_text(folder / pointer, folder_name(step) + "\n")


def fetch_checkpoint(remote: Remote, folder: Path, step: int) -> None:
    """Complete the checkpoint of ``step`` below ``folder``: files that are there with the right hash are left alone.

    Raises :class:`CheckpointError`: a file at the mirror is missing, or differs from its hash.
    """
    remote_folder = f"{CHECKPOINTS}/{folder_name(step)}"
    target = folder / folder_name(step)
    with reaching(remote.url):
        _get(remote, f"{remote_folder}/{MANIFEST}", target / MANIFEST)
        manifest = read_manifest(target)
        for name, digest in manifest.files.items():
            if "/" in name or not is_weights(f"{remote_folder}/{name}"):
                raise CheckpointError(f"{target / MANIFEST} is damaged", why=f"it names a file {name!r}")
            try:
                verify_files(target, replace(manifest, files={name: digest}))
            except CheckpointError:
                with contextlib.suppress(FileNotFoundError):  # the next comparison names the file
                    _get(remote, f"{remote_folder}/{name}", target / name)
        verify_files(target, manifest)


def _get(remote: Remote, name: str, target: Path) -> None:
    for number in range(TRIES):
        try:
            return remote.get(name, target)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:  # whatever the storage's library raises
            if number == TRIES - 1:
                raise
            time.sleep(2.0**number)
