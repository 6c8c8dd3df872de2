"""From a name and settings to a task, a placement and a plan, before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config import RunConfig, nested, resolve
from lockstep.config.named import code_in, named, whole_name
from lockstep.engine.blueprint import on_meta, trial_of
from lockstep.engine.runner import runner_of
from lockstep.engine.strategies.stages import stages_of
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import data_settings, open_data, open_datasets
from lockstep.errors import ConfigError
from lockstep.hardware import Device, Placement, World, detect_devices, read_world, resolve_placement
from lockstep.hardware.detect import usable_cores
from lockstep.hardware.resolve import divide_if_needed
from lockstep.launch.process.environment import NAMED_THREADS
from lockstep.planning import Plan, ResumePoint, TaskFacts, make_plan
from lockstep.planning.resolve import moments_of
from lockstep.tasks.registry import RESERVED, class_of, given_task, make_task, refuse_unrecorded, section_of


@dataclass(frozen=True)
class RunInputs:
    """A task with its data opened, and the plan to train it."""

    task: Task
    config: RunConfig
    datasets: Datasets
    facts: TaskFacts
    placement: Placement
    plan: Plan


def settle(task: Task | type[Task] | str, overrides: Mapping[str, Any]) -> tuple[Task, RunConfig]:
    """Make the task and the complete configuration: general defaults < the task's < ``overrides``, nested settings."""
    task_section = overrides.get("task") or {}
    if not isinstance(task_section, Mapping):
        raise ConfigError("`task` must be a section", why=f"it is {task_section!r}", fix="write `task: {name: har}`")
    settings = {key: value for key, value in task_section.items() if key not in RESERVED}
    if isinstance(task, Task) and settings:
        raise ConfigError(
            f"task settings {', '.join(settings)} are given beside a task object",
            why="the object has its settings already",
            fix="pass the task's class or name, or set them where the object is made",
        )
    if isinstance(task, Task):
        kind = type(task)
        built = given_task(task)
    else:
        refuse_unrecorded(task_section)
        kind = class_of(task)
        built = make_task(kind, settings)
    name = task if isinstance(task, str) else f"{kind.__module__}:{kind.__qualname__}"
    section = {"name": whole_name(name), **section_of(built)}
    whole = resolve(nested(kind.defaults), {**overrides, "task": section})
    if whole.data.data_dir is not None:
        whole = whole.with_values(data={"data_dir": whole.data.data_dir.absolute()})
    named.add(code_in({"task": section, "optimizer": {"name": whole.optimizer.name}}))
    whole = runner_of(built).complete(overrides, whole)
    built._lockstep_data = data_settings(whole)
    return built, whole


def native_settings(task: Task | type[Task] | str, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adapt ``overrides`` to train a ``LightningModule`` with Lockstep's loop; unchanged for another task.

    The batch size per device is that of the module's training loader.
    """
    built, whole = settle(task, overrides)
    return runner_of(built).native_settings(overrides, whole)


def prepare(
    task: Task | type[Task] | str, overrides: Mapping[str, Any], *, resume: ResumePoint | None = None
) -> RunInputs:
    """Settle, place, open the data and plan, for a plan alone: nothing is started or written."""
    built, whole = settle(task, overrides)
    return plan_for(built, whole, placement_of(whole, read_world(os.environ)), open_data(built, whole), resume)


def placement_of(config: RunConfig, world: World) -> Placement:
    """Return the placement of a run on this machine."""
    return resolve_placement(config.hardware, config.distributed, world, detect_devices())


def with_precision(config: RunConfig, placement: Placement) -> RunConfig:
    """Replace the precision in ``config`` by the one of ``placement``, for resumes on other devices too."""
    if config.hardware.precision == placement.precision:
        return config
    products = {"matmul_precision": "high"} if config.hardware.precision == "tf32" else {}
    return config.with_values(hardware={"precision": placement.precision, **products})


def plan_for(
    task: Task,
    config: RunConfig,
    placement: Placement,
    datasets: Datasets,
    resume: ResumePoint | None,
    *,
    devices: Sequence[Device] | None = None,
) -> RunInputs:
    """Make the plan for open data. ``devices``: those of the machine; ``None``: detect them."""
    config = with_precision(config, placement)
    runner = runner_of(task)
    facts = runner.inspect(datasets, config)
    if facts.opens_files:  # a worker must open them itself: through ours, all would share one position
        datasets = open_datasets(task, config)
    if runner.can_divide and _may_divide(config, placement):
        # Of each parameter: itself, its gradient and the optimizer's moments, all in one format.
        each = placement.number_format.weight_bytes * (2 + moments_of(config.optimizer))
        placement = divide_if_needed(placement, facts.parameters * each, devices or detect_devices())
    cores = usable_cores()
    preset = _preset_threads(placement, cores)
    global_batch_size = resume.global_batch if resume and resume.hold else config.training.global_batch_size
    sized = runner.sized(config, global_batch_size=global_batch_size, devices=placement.world_size)
    plan = make_plan(sized, placement, facts, cores=cores, preset=preset, resume=resume)
    plan = runner.revised(plan, config)
    if plan.pipelined:
        tried = trial_of(task)
        stages_of(tried, on_meta(tried), max(placement.world_size, len(placement.devices)))
    return RunInputs(task, config, datasets, facts, placement, plan)


def _preset_threads(placement: Placement, cores: int) -> tuple[int, str] | None:
    """Return intra-op threads that the user has set: for all programs, or in this process, if it trains.

    torchrun sets ``OMP_NUM_THREADS`` to 1 where the user has not, so it is ignored there.
    """
    variables = {"none": "OMP_NUM_THREADS", "lockstep": NAMED_THREADS}
    threads = os.environ.get(variables.get(read_world(os.environ).launcher, ""), "")
    if threads.isdecimal() and int(threads):
        return int(threads), "OMP_NUM_THREADS"
    preset = torch.get_num_threads()
    if placement.world_size == 1 and preset < cores:
        return preset, "torch.get_num_threads() of this process"
    return None


def _may_divide(config: RunConfig, placement: Placement) -> bool:
    """Return whether ``strategy: auto`` may take fsdp: on several GPUs, and not where fsdp would be refused."""
    training = config.training
    several = placement.world_size > 1 and placement.accelerator == "gpu" and config.hardware.strategy == "auto"
    return several and training.reproducibility == "fast" and not training.compile
