"""Stopping runs."""

from __future__ import annotations

import os
import signal
import socket
import time

from lockstep.errors import RunFolderError
from lockstep.launch.engines import jobs
from lockstep.launch.engines.record import handle_of
from lockstep.rundir.folder import LIVE, RunDir
from lockstep.rundir.heartbeat import works_on


def stop(run: RunDir, timeout: float = 60.0) -> str:
    """Stop a run after saving a checkpoint; its status afterwards. One that is starting is stopped once it has begun.

    A submitted job is stopped by its engine. Else the process is the one of the latest heartbeat, if it has the run
    folder open: the file may name any process.

    Raises:
        RunFolderError: the run is not running on this host, or still starts or runs after ``timeout`` seconds.
    """
    handle = handle_of(run)
    if handle is not None:
        return jobs.stop(handle, timeout)
    deadline = time.monotonic() + timeout
    name = run.read().id
    while (status := run.status()) in LIVE:
        beat = run.progress()
        if beat is not None and not beat.handing_over:
            break
        if time.monotonic() >= deadline:
            raise RunFolderError(
                f"run {name} is still starting after {timeout:g} s",
                why="no process of it handles a stop yet",
                fix="wait longer (--timeout)",
            )
        time.sleep(0.1)
    else:
        raise RunFolderError(f"run {name} is {status}, not running", fix="`lockstep runs` lists the runs")
    if beat.host != socket.gethostname():
        raise RunFolderError(
            f"run {name} runs on {beat.host}",
            why="a signal reaches only this host",
            fix="run `lockstep stop` there",
        )
    try:
        if not works_on(beat.pid, run.path):
            os.kill(beat.pid, 0)  # it may have ended, or be another user's
            raise RunFolderError(
                f"process {beat.pid}, which heartbeat.json of run {name} names, does not train it",
                why="it does not have the run folder open; the file may be from another machine",
                fix=f"look at it: ps -fp {beat.pid}; if it does train the run, end it: kill {beat.pid}",
            )
        os.kill(beat.pid, signal.SIGTERM)
    except (ProcessLookupError, OverflowError):
        pass  # it has just ended
    except PermissionError as error:
        raise RunFolderError(
            f"you may not stop run {name}",
            why=f"process {beat.pid}: {error.strerror}",
            fix="ask the user who started it, or become that user",
        ) from None
    while time.monotonic() < deadline:
        status = run.status()
        if status not in LIVE:
            return status
        time.sleep(0.1)
    raise RunFolderError(
        f"run {name} is still {status} after {timeout:g} s",
        why="it ends after the step it is in, with a checkpoint",
        fix=f"wait longer (--timeout), or kill process {beat.pid}: no checkpoint is lost",
    )
