"""Starting ranks for a session: each runs a script, or calls a function, that makes a ``lockstep.Session``."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config import resolve
from lockstep.config.load import devices_in, merge
from lockstep.errors import ConfigError, RunFolderError, TaskError, UsageError
from lockstep.hardware import World, detect_devices, resolve_placement
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.process.signals import Stopped
from lockstep.launch.run_claim import claimed, create_folder, existing_run, warn
from lockstep.launch.session.started import Started, close_open_session, started
from lockstep.launch.start import rank_limits, run_of_ranks
from lockstep.rundir.folder import RunDir
from lockstep.rundir.origin import Script, require_script_named, script_of


def run_script(
    path: Path,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    needs_session: bool = False,
) -> tuple[RunDir, int]:
    """Run a script on every device that ``settings`` names, a process for each; the run and the exit code.

    ``needs_session``: refuse a script without one at its first step, and print its output to standard error.
    Raises :class:`LockstepError`: there is no such script, a setting is wrong, the folder cannot be used, or a rank
    failed.
    """
    if not path.is_file():
        raise UsageError(f"there is no script {path}", fix="write `lockstep run path/to/script.py`")
    script = Script(str(path.resolve()), tuple(arguments), str(Path.cwd()), settings)
    settings = merge({"task": {"name": path.name}}, settings)
    run, code, _ = _start(_run_script, script[:3], settings, script=script, resume=resume, needs_session=needs_session)
    return run, code


def several_devices(settings: Mapping[str, Any], consequence: str) -> list[str]:
    """Return the devices of ``settings``. Raises :class:`ConfigError`: fewer than two, with ``consequence``."""
    names = list(devices_in(settings))
    if len(names) < 2:
        reason = f"the devices are {', '.join(names) or 'not given'}"
        raise ConfigError(consequence, why=reason, fix="name several: --devices cpu,cpu")
    return names


def resume_session(run: RunDir, overrides: Mapping[str, Any], devices: str | None) -> int | None:
    """Resume ``run`` with changed settings, if it is a script's with a session; the exit code, else ``None``."""
    script = script_of(run)
    if script is None:
        return None
    require_script_named(run, script, overrides)
    changes = merge(overrides, {} if devices is None else {"hardware": {"selected_devices": devices}})
    settings = merge(merge(script.given, changes), {"save_dir": str(run.path)})
    with contextlib.chdir(script.folder):
        return run_script(Path(script.path), script.arguments, settings, resume=True)[1]


def call_on_ranks(
    function: Callable[..., Any], arguments: Sequence[Any], settings: Mapping[str, Any], resume: bool
) -> Any:
    """See :meth:`lockstep.Session.launch`."""
    settings = merge({"task": {"name": getattr(function, "__name__", "function")}}, settings)
    _, code, results = _start(function, arguments, settings, resume=resume)
    if code:
        raise RanksStopped(code)
    return results[0]


def _start(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    script: Script | None = None,
    resume: bool,
    needs_session: bool = False,
) -> tuple[RunDir, int, list[Any]]:
    """Call ``function(*arguments)`` on new ranks, in a run; its folder, the exit code, and their results."""
    config = resolve(settings)
    for key in ("max_restarts", "nodes", "rdzv"):
        if getattr(config.launch, key) != type(config.launch).model_fields[key].default:
            raise ConfigError(
                f"launch.{key} has no effect on a script with a session",
                why="its ranks are started once, on this machine",
                fix="leave it out; for restarts or several nodes, start the script with torchrun",
            )
    placement = resolve_placement(config.hardware, config.distributed, World(), detect_devices())
    with contextlib.ExitStack() as claim:
        run = existing_run(config, resume)
        if run is not None:
            if script is not None and script_of(run) is None:
                raise RunFolderError(
                    f"{run.path} is a run of {run.read().task}, not of a script",
                    fix=f"choose another --save-dir, or `lockstep resume {run.path}`",
                )
            claim.enter_context(claimed(run))
        is_resume = run is not None
        run = run or create_folder(config)
        if script is not None:
            script.keep(run)
        threads = config.training.threads or max(1, len(os.sched_getaffinity(0)) // placement.world_size)
        start = partial(
            run_on_ranks,
            _as_rank,
            function,
            tuple(arguments),
            dict(settings),
            is_resume,
            needs_session,
            folder=run,
            ranks=placement.world_size,
            limits=rank_limits(config, threads),
            redirect=needs_session,
        )
        code, results = run_of_ranks(run, start)
        if code == 0 and run.read().status == "pending":  # a script without a session
            run.update(status="completed")
    return run, code, results


#: Variables of the script, until the end of the process as those of ``python path``: DDP's reducer, destroyed before,
#: may wait for ever for a thread of its process group, which waits for the interpreter.
_variables: list[dict[str, Any]] = []

_NO_SESSION = (
    "make one: session = lockstep.Session(global_batch_size=64), see docs/own-loop.md; `lockstep audit SCRIPT` checks "
    "a script of DistributedDataParallel, Accelerate, Lightning or Transformers as it is"
)

# --- in a rank -----------------------------------------------------------------------------------


def _as_rank(
    rank: Rank,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
    is_resume: bool,
    needs_session: bool,
) -> Any:
    """Call ``function(*arguments)`` with its sessions on ``rank``.

    Without ``needs_session``, a script that makes a process group itself, as for DDP, needs no session.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    has_group = False

    def at_first_step(*_: Any) -> None:
        nonlocal has_group
        watch.remove()
        has_group = dist.is_initialized()
        if needs_session:
            raise TaskError(
                "an optimizer takes its first step, and the script has made no lockstep.Session",
                why="only the session shows its steps and weights, which are to be compared or measured",
                fix=_NO_SESSION,
            )
        if rank.world.is_main and not has_group:
            warn(
                "an optimizer takes a step, and the script has made no lockstep.Session: each rank trains on all "
                "samples, alone. See docs/own-loop.md"
            )

    watch = register_optimizer_step_pre_hook(at_first_step)  # removed by a session: it would slow down every step
    started[:] = [Started(rank, settings, is_resume, on_session=watch.remove)]
    try:
        result = function(*arguments)
    except Stopped:
        raise
    except BaseException as error:
        close_open_session(error)
        raise
    close_open_session(None)
    if not started[0].has_session and (needs_session or not (has_group or dist.is_initialized())):
        raise TaskError(
            "no lockstep.Session was made",
            why="each rank has run all of the script, and neither a session nor a process group joins the ranks",
            fix=_NO_SESSION,
        )
    return result


def _run_script(path: str, arguments: tuple[str, ...], folder: str) -> None:
    """Run as ``python path arguments`` in ``folder``, which a server that forks ranks may not be in."""
    os.chdir(folder)
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        _variables.append(runpy.run_path(path, run_name="__main__"))
    except SystemExit as end:
        if isinstance(end, Stopped) or end.code not in (None, 0):
            raise
