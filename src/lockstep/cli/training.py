"""Starting, resuming and stopping runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, RunRef, RunsDir, find, flag, verb
from lockstep.cli.settings import FILES, NO_SETTINGS, Flags, TaskName, fork_ranks_from_here, to_mapping
from lockstep.config.load import devices_in, from_keywords, load, merge
from lockstep.errors import UsageError
from lockstep.launch.engines.spec import engines, find_engine
from lockstep.launch.process.signals import held_back
from lockstep.rundir.remote import is_url
from lockstep.telemetry.console import say

_CLUSTER = Group("On a cluster", sort_key=6)
_flag = partial(flag, group=_CLUSTER)
_last = partial(flag, allow_repeating=True)  # of several, the last one


def _submit_flags() -> type[Any]:
    """Make the class of the flags that submit a job: of every engine, and of each; absent ones are ``None``."""
    summaries = "; ".join(f"{name}: {spec.summary}" for name, spec in engines().items())
    names = Literal[tuple(engines())]  # type: ignore[valid-type]
    gpus = "GPUs on each node, a rank each: 4, or a100:4. Default: none."
    flags: dict[str, Any] = {
        "on": Annotated[names | None, _flag(f"{summaries}. --nodes says on how many nodes.")],
        "gpus_per_node": Annotated[str | None, _flag(gpus, metavar="[TYPE:]N")],
        "print": Annotated[bool | None, _flag("Print the script or the manifest, and submit nothing.")],
    }
    for spec in engines().values():
        for option in spec.options:
            kind: Any = list[str] if option.is_list else str
            flags[option.name] = Annotated[kind | None, _flag(option.help, metavar=option.metavar)]
    fields = [(name, kind, None) for name, kind in flags.items()]
    return make_dataclass("SubmitFlags", fields, frozen=True, kw_only=True, namespace={"__module__": __name__})


if TYPE_CHECKING:
    SubmitFlags = Any
else:
    SubmitFlags = _submit_flags()
NO_SUBMIT = SubmitFlags()


def submit(task: str, mapping: Mapping[str, Any], flags: SubmitFlags, *, resume: bool) -> int:
    """Submit, and follow the job to its end; the exit code of the run."""
    from lockstep.launch.engines import jobs

    spec = find_engine(flags.on)
    options = {option.name: getattr(flags, option.name) for option in spec.options}
    job, config = jobs.job_of_settings(task, mapping, gpus_per_node=flags.gpus_per_node, options=options)
    if flags.print:
        sys.stdout.write(spec.make().manifest(job))
        return 0
    return jobs.submit(spec.name, job, config, sys.stdout, resume=resume)


def _refuse_flags_of_others(flags: SubmitFlags) -> None:
    """Raise :class:`UsageError` for a flag that the chosen engine does not read."""
    engine = None if flags.on is None else find_engine(flags.on)
    readers = {option.name: spec.name for spec in engines().values() for option in spec.options}
    for name, value in dataclasses.asdict(flags).items():
        reader = readers.get(name)
        if not value or name == "on" or (engine is not None and reader in (None, engine.name)):
            continue
        text = f"--{name.replace('_', '-')}"
        if engine is None:
            raise UsageError(
                f"{text} is for a cluster", fix=f"add --on {reader or 'ENGINE'}, or leave it out to train here"
            )
        raise UsageError(f"{text} is for --on {reader}", why=f"--on {engine.name} does not read it", fix="leave it out")


TRAIN = """\
Examples:
  lockstep train har                                   # gpu:0 if there is one, else the CPU
  lockstep train har --devices all --epochs 10         # every GPU
  lockstep train har --devices cpu,cpu                 # two CPU ranks, as two GPUs would
  lockstep train har --config configs/har/two_gpu.yaml --lr 2e-3
  lockstep train my_task.py:MyTask --save-dir runs/mine --resume
  torchrun --nproc_per_node=2 -m lockstep train har    # each process is a rank
  lockstep train har --nodes 2 --rdzv node1:29400      # the same command on two machines

Ctrl-C once ends the run with a checkpoint; `lockstep resume last` resumes it."""

Sets = Annotated[
    list[str] | None,
    flag("Set any key of docs/configuration.md, e.g. optimizer.name=sgd. May be repeated.", "KEY=VALUE", name="--set"),
]
_ACCEPT_DATA = "Resume even if the training data are not those of the checkpoint, if equally many."


@verb("[TASK] [OPTIONS]", TRAIN)
def train(
    task: TaskName = None,
    /,
    *,
    settings: Flags = NO_SETTINGS,
    resume: Annotated[bool, flag("Resume the unfinished run in --save-dir, if there is one.", group=FILES)] = False,
    accept_data: Annotated[bool, flag(_ACCEPT_DATA, group=FILES)] = False,
    cluster: Annotated[SubmitFlags, Parameter(name="*")] = NO_SUBMIT,
) -> int:
    _refuse_flags_of_others(cluster)
    name, mapping = to_mapping(settings, task)
    if cluster.on is not None and (cluster.print or not find_engine(cluster.on).is_attached):
        return submit(name, mapping, cluster, resume=resume)
    if cluster.on is not None and mapping.get("launch", {}).get("nodes") is None:
        raise UsageError(f"--on {cluster.on} needs --nodes", fix="add --nodes N, or leave --on out to train here")
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.launch.api import train as start

    fork_ranks_from_here(devices_in(mapping))
    return start(name, mapping, resume=resume, accept_data=accept_data).exit_code


RESUME = """\
The run resumes from its latest valid checkpoint, also in the middle of an epoch, with exactly the remaining
samples. On other devices the global batch does not change.

Examples:
  lockstep resume last
  lockstep resume run-1a2b3c4d --devices gpu:0
  lockstep resume last --epochs 40
  lockstep resume s3://bucket/run              # a run's mirror: the run folder is fetched to --runs-dir"""


@verb("RUN [OPTIONS]", RESUME)
def resume(
    run: RunRef,
    /,
    *,
    devices: Annotated[
        str | None, flag("Devices by name, comma-separated. Default: those of the run so far.", "DEVICE,...")
    ] = None,
    epochs: Annotated[
        int | None, flag("Epochs in all, to train a completed run for longer. Default: the run's.")
    ] = None,
    max_steps: Annotated[int | None, flag("Optimizer steps in all. Default: the run's.")] = None,
    rescale_batch: Annotated[
        bool, flag("Keep the batch per device instead of the global batch: another run from here on.")
    ] = False,
    accept_data: Annotated[bool, flag(_ACCEPT_DATA)] = False,
    set: Sets = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> int:
    lengths = {"epochs": epochs, "max_steps": max_steps}
    sets = [f"training.{name}={value}" for name, value in lengths.items() if value is not None]
    overrides = load(sets=[*(set or ()), *sets])
    if is_url(run):
        overrides = merge({"storage": {"mirror": run}}, overrides)
    else:
        run_dir = find(run, runs_dir)
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.launch import api as launcher
        from lockstep.launch.run_claim import run_at
        from lockstep.launch.session.script import resume_session
        from lockstep.rundir.origin import script_of

    if is_url(run):
        run_dir = run_at(run, runs_dir)
    previous = (run_dir.read().placement or {}).get("devices")
    previous_devices = previous if isinstance(previous, list) else None
    fork_ranks_from_here(devices or previous_devices, script=script_of(run_dir) is not None)
    code = resume_session(run_dir, overrides, devices)
    if code is not None:
        return code
    result = launcher.resume(
        run_dir, overrides=overrides, devices=devices, rescale_batch=rescale_batch, accept_data=accept_data
    )
    return result.exit_code


@verb("RUN [OPTIONS]", "The run ends after the current step; `lockstep resume RUN` resumes it.")
def stop(
    run: RunRef,
    /,
    *,
    timeout: Annotated[float, flag("How long to wait for its end, in seconds. Default: 60.")] = 60.0,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    run_dir = find(run, runs_dir)
    from lockstep.launch.stop import stop as stop_run

    say(f"{run_dir.read().id}: {stop_run(run_dir, timeout)}", sys.stdout)


RUN = """\
The script makes a lockstep.Session; every rank runs all of it. The options below may stand before the script or after
it. Other words are passed to the script, in order; words after -- always are. A single device needs no
`lockstep run`: python script.py.

Examples:
  lockstep run script.py --devices gpu:0,gpu:1
  lockstep run script.py --lr 0.1 --devices cpu,cpu --save-dir runs/mine   # --lr is the script's
  lockstep run script.py --save-dir runs/mine --resume --devices cpu       # on another number of ranks
  torchrun --nproc_per_node=2 script.py                                    # the same, each process is a rank

Ctrl-C once ends the run with a checkpoint; `lockstep resume last` resumes it."""


@verb("SCRIPT [ARGUMENTS] [OPTIONS]", RUN)
def run(
    script: Annotated[str, flag("A Python file that makes a lockstep.Session.", allow_leading_hyphen=True)],
    /,
    *arguments: Annotated[str, flag("Of the script.", allow_leading_hyphen=True)],
    devices: Annotated[str | None, _last("As in `lockstep train`; cpu,cpu: two CPU ranks.", "DEVICE,...")] = None,
    strategy: Annotated[str | None, _last("As in `lockstep train`.")] = None,
    precision: Annotated[str | None, _last("As in `lockstep train`.")] = None,
    name: Annotated[str | None, _last("A label of the run.")] = None,
    save_dir: Annotated[str | None, _last("The run folder.", "DIR")] = None,
    runs_dir: Annotated[str | None, _last("Where a new run folder is made. Default: runs.", "DIR")] = None,
    mirror: Annotated[str | None, _last("As in `lockstep train`.", "URL")] = None,
    resume: Annotated[bool, flag("Resume the unfinished run in --save-dir, if there is one.")] = False,
    set: Sets = None,
) -> int:
    if script.startswith("-"):
        raise UsageError(f"unknown option {script}", fix="write options of the script after the script")
    flags = {"devices": devices, "strategy": strategy, "precision": precision, "name": name}
    flags |= {"save_dir": save_dir, "runs_dir": runs_dir, "mirror": mirror}
    overrides = from_keywords({name: value for name, value in flags.items() if value is not None})
    settings = load(sets=set or (), overrides=overrides)
    from lockstep.launch.session.script import run_script

    fork_ranks_from_here(None, script=True)
    return run_script(Path(script).expanduser(), list(arguments), settings, resume=resume)[1]
