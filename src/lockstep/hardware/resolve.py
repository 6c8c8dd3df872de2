"""Resolve a selection of devices, such as ``gpu:0,gpu:1`` or ``all``, to a placement of ranks with its reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.errors import ConfigError, DeviceError, PrecisionError, many
from lockstep.events import Note
from lockstep.hardware.detect import Device, usable_gpus
from lockstep.hardware.world import World
from lockstep.precisions import PRECISIONS, PrecisionSpec
from lockstep.strategies import StrategySpec, auto_strategy, find_strategy

Accelerator = Literal["gpu", "cpu"]
Backend = Literal["nccl", "gloo"]
_FORM = re.compile(r"cpu|gpu:(0|[1-9][0-9]{0,3})")
#: More ranks than this on one machine are a typing error.
MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices, strategy and precision of a run, with the reason of each choice.

    Attributes:
        devices: devices of this node, one per rank (repeats included), or all devices of its only rank.
        strategy: name of a :class:`~lockstep.strategies.StrategySpec`.
        backend: collective backend of the ranks; ``None`` with one rank.
        world_size: ranks on all nodes.
        reasons: reasons for accelerator, devices, strategy, backend, world_size and precision.
        by_node: devices of each node by the node's name; empty with one node.
        gpu: the driver's name of the first GPU; empty on a CPU.
        tf32: all GPUs support TF32.
    """

    accelerator: Accelerator
    devices: tuple[str, ...]
    strategy: str
    backend: Backend | None
    world_size: int
    nodes: int
    precision: str
    reasons: dict[str, str]
    notes: tuple[Note, ...] = ()
    by_node: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpu: str = ""
    tf32: bool = False

    @property
    def spec(self) -> StrategySpec:
        return find_strategy(self.strategy)

    @property
    def number_format(self) -> PrecisionSpec:
        return PRECISIONS[self.precision]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, the content of ``placement.json``."""
        values = asdict(self)
        by_node = {name: list(devices) for name, devices in self.by_node.items()}
        return {**values, "devices": list(self.devices), "notes": list(values["notes"]), "by_node": by_node}


def resolve_placement(
    config: HardwareConfig,
    distributed: DistributedConfig,
    world: World,
    detected: Sequence[Device],
) -> Placement:
    """Decide devices, strategy, backend and precision of a run.

    Args:
        world: rank and world size of this process, if a launcher has started the ranks.
        detected: devices of this machine.

    Raises:
        DeviceError: a selection that does not match the machine or the ranks; a precision that a device lacks.
        ConfigError, UnsupportedError: settings that contradict each other.
    """
    configured_strategy = None if config.strategy == "auto" else find_strategy(config.strategy)
    # One process under a launcher may still use several GPUs; otherwise the launcher's world decides.
    scatters = configured_strategy is not None and configured_strategy.scatters
    launched = world if world.from_outside and (world.size > 1 or not scatters) else None
    if launched:
        selection = _for_ranks(config, launched, detected)
    elif config.selected_devices is None:
        selection = choose_default(detected)
    else:
        selection = select(parse(config.selected_devices), detected)
    devices = selection.devices
    accelerator: Accelerator = "cpu" if devices[0] == "cpu" else "gpu"
    notes = list(selection.notes)
    strategy, strategy_reason = _strategy(configured_strategy, devices, launched, notes)
    is_single_process = strategy.one_process
    backend, backend_reason = _backend(distributed.backend, is_single_process, devices, notes)
    unique_devices = [find(device, detected) for device in dict.fromkeys(devices)]
    precision, precision_reason = _precision(config.precision, unique_devices)
    gpus = unique_devices if accelerator == "gpu" else []
    if not launched:
        occupied = [gpu for gpu in gpus if gpu.users]
        notes += [Note("device_in_use", f"{gpu.id} is in use: {describe_users(gpu)}") for gpu in occupied]
    return Placement(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy.name,
        backend=backend,
        world_size=1 if is_single_process else launched.size if launched else len(devices),
        nodes=launched.nodes if launched else 1,
        precision=precision,
        reasons={
            "accelerator": _accelerator_reason(accelerator, selection, detected),
            "devices": selection.reason,
            "strategy": strategy_reason,
            "backend": backend_reason,
            "world_size": _world_reason(strategy, is_single_process, devices, launched),
            "precision": precision_reason,
        },
        notes=tuple(notes),
        gpu=gpus[0].name if gpus else "",
        # TF32 and bfloat16 both need compute capability 8.0.
        tf32=bool(gpus) and all("bf16-mixed" in gpu.precisions for gpu in gpus),
    )


def resolve_hardware(selected_devices: list[str], detected: Sequence[Device] | None = None) -> dict[str, Any]:
    """Convert a selection to arguments of a Lightning ``Trainer``.

    Args:
        selected_devices: ``"cpu"`` and ``"gpu:<index>"``; the CPU is ignored if there is a GPU.
        detected: devices of the machine; ``None`` detects them.

    Returns:
        ``accelerator`` (``"gpu"`` or ``"cpu"``), ``devices`` (the indices of the GPUs; 1 for the CPU, which is
        one process) and ``strategy`` (``"auto"`` for one device, ``"ddp"`` for several).

    Raises:
        DeviceError: an empty selection, a device that is malformed, absent or named twice.
    """
    from lockstep.hardware.detect import detect_devices

    detected = detect_devices() if detected is None else detected
    devices = select(parse(selected_devices), detected).devices
    repeated = [device for device, count in Counter(devices).items() if count > 1]
    if repeated:
        raise DeviceError(
            f"{repeated[0]} is named twice",
            why="a Lightning Trainer takes each device once",
            fix="name each device once, or train with Lockstep's engine, where a repeated device has two ranks",
        )
    if devices == ("cpu",):
        return {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    indices = [find(device, detected).index for device in devices]
    return {"accelerator": "gpu", "devices": indices, "strategy": "ddp" if len(indices) > 1 else "auto"}


def _for_ranks(config: HardwareConfig, world: World, detected: Sequence[Device]) -> Selection:
    """Select one device for each rank of this node that a launcher has started.

    Default: the first GPUs, else the CPU.
    """
    ranks = world.local_size
    processes = many(ranks, "process")
    if config.selected_devices is not None:
        selection = select(parse(config.selected_devices), detected)
        device_count = len(selection.devices)
        if device_count == ranks:
            reason = f"{selection.reason}: one for each of the node's {processes}, in order"
            return Selection(selection.devices, reason, selection.notes)
        if selection.devices == ("cpu",):
            reason = f"cpu is selected, for each of the node's {processes}"
            return Selection(("cpu",) * ranks, reason, selection.notes)
        raise DeviceError(
            f"{many(device_count, 'device')} selected, but {world.launcher} started {processes} on this node",
            why="each process is one rank, with one device",
            fix=f"start {many(device_count, 'process')} per node, name {many(ranks, 'device')}, or leave --devices out",
        )
    gpus = [gpu.id for gpu in usable_gpus(detected)]
    if len(gpus) >= ranks:
        return Selection(tuple(gpus[:ranks]), f"one GPU for each of the node's {processes}")
    if not gpus:
        reason = f"no GPU that Lockstep can use, so each of the node's {processes} computes on the CPU"
        return Selection(("cpu",) * ranks, reason)
    shared = ",".join(gpus[index % len(gpus)] for index in range(ranks))
    fix = f"start {many(len(gpus), 'process')} per node, share with `--devices {shared}`, or use `--devices cpu`"
    if world.launcher == "slurm":
        fix += "; where srun hides the other GPUs from a task, start it with --gpu-bind=none"
    raise DeviceError(
        f"{processes} on this node, but {many(len(gpus), 'GPU')}",
        why=f"{world.launcher} started more processes than there are GPUs, and sharing one is never a silent choice",
        fix=fix,
    )


def _strategy(
    configured: StrategySpec | None, devices: tuple[str, ...], world: World | None, notes: list[Note]
) -> tuple[StrategySpec, str]:
    """Decide the strategy and its reason.

    Args:
        configured: ``None`` for ``auto``.
        world: ``None`` unless a launcher has started the ranks.
        notes: extended with notes on the strategy.
    """
    ranks = world.size if world else len(devices)
    spec = configured or find_strategy(auto_strategy(ranks))
    if spec.one_process and world and ranks > 1:
        raise ConfigError(
            f"strategy {spec.name} is one process, but {world.launcher} started {ranks}",
            fix=f"use --strategy auto, or start without {world.launcher}",
        )
    if spec.devices == "one" and ranks > 1:
        raise ConfigError(
            f"strategy {spec.name} takes one device, but {ranks} devices are selected",
            fix="use --strategy auto, or select one device",
        )
    if spec.refuses is not None:
        spec.refuses(devices)
    if ranks == 1:
        single = find_strategy(auto_strategy(1))
        if spec.devices == "many":
            notes.append(Note("strategy_unused", f"{spec.name} runs as {single.name}: one device is selected"))
        return single if spec.devices == "many" else spec, "one device: this process alone"
    if spec.note:
        notes.append(Note("strategy_slow", spec.note))
    reason = f"{'as set' if configured else 'several devices'}: {spec.summary}"
    return spec, reason if not world else f"{reason}; {world.launcher} started {many(ranks, 'process')}"


def _backend(
    configured: str, is_single_process: bool, devices: tuple[str, ...], notes: list[Note]
) -> tuple[Backend | None, str]:
    """Decide the collective backend and its reason; ``notes`` is extended."""
    if is_single_process:
        if configured != "auto":
            notes.append(Note("backend_unused", f"distributed.backend={configured} is ignored: there is one rank"))
        return None, "single process: no communication needed"
    on_cpu = devices[0] == "cpu"
    has_repeats = len(set(devices)) < len(devices)
    if configured == "nccl" and (on_cpu or has_repeats):
        raise ConfigError(
            f"backend nccl cannot connect {'ranks on a CPU' if on_cpu else 'two ranks on one GPU'}",
            why="nccl connects distinct GPUs",
            fix="leave distributed.backend at auto, which uses gloo here",
        )
    if configured != "auto":
        if configured == "gloo" and not on_cpu and not has_repeats:
            text = "gloo stages GPU tensors through the host; nccl would be faster between distinct GPUs"
            notes.append(Note("backend_slow", text))
        return cast(Backend, configured), "as set"
    if on_cpu:
        return "gloo", "ranks on a CPU talk over gloo"
    if has_repeats:
        return "gloo", "nccl refuses two ranks on one GPU, so gloo, staged through the host"
    return "nccl", "distinct GPUs: nccl is the fastest between them"


def _precision(configured: str, devices: Sequence[Device]) -> tuple[str, str]:
    """Decide the precision and its reason. Raises :class:`PrecisionError` if a device does not support it."""
    first = devices[0]
    on_gpu = first.kind != "cpu"
    has_fast_bfloat16 = on_gpu and all("bf16-mixed" in device.precisions for device in devices)
    if configured == "auto" and has_fast_bfloat16:
        return "bf16-mixed", "auto: the GPU computes in bfloat16, which has the range of single precision"
    if configured == "auto":
        return "32", "auto: " + ("a GPU without bfloat16" if on_gpu else "no format is faster on every CPU")
    if configured == "tf32" and not has_fast_bfloat16:
        raise PrecisionError(
            f"precision tf32 is not supported on {first.id} ({first.name})",
            why="TF32 is a format of GPUs of compute capability 8.0 and newer",
            fix="use --precision 32, or select another device",
        )
    for device in devices:
        if configured != "tf32" and configured not in device.precisions:
            raise PrecisionError(
                f"precision {configured} is not supported on {device.id} ({device.name})",
                why=f"it supports {', '.join(device.precisions)}" + (f"; {device.note}" if device.note else ""),
                fix=f"use --precision {device.precisions[-1]}, or select another device",
            )
    if configured == "tf32":
        return "32", "as set: single precision, with products in TF32"
    remark = ""
    if configured == "32" and has_fast_bfloat16:
        remark = f"; bf16-mixed would be faster on {first.name}"
    elif configured == "16-mixed" and not on_gpu:
        remark = "; slow on a CPU, good for a dry run"
    return configured, PRECISIONS[configured].reason + remark


def describe_users(device: Device) -> str:
    """List users of a device: ``python (pid 123, 20.1 GB), …``."""
    return ", ".join(
        f"{user.name} (pid {user.pid}" + (f", {user.memory_gb} GB)" if user.memory_gb is not None else ")")
        for user in device.users
    )


def _accelerator_reason(accelerator: Accelerator, selection: Selection, detected: Sequence[Device]) -> str:
    if accelerator == "gpu":
        return "a GPU is selected" if selection.explicit else "there is a GPU"
    if selection.explicit:
        return "the CPU is selected"
    unusable = [device for device in detected if device.kind != "cpu" and not device.supported]
    return f"no GPU that Lockstep can use ({describe(unusable)})" if unusable else "there is no GPU"


def _world_reason(
    strategy: StrategySpec, is_single_process: bool, devices: tuple[str, ...], world: World | None
) -> str:
    if world:
        nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
        return f"{world.launcher} started {many(world.size, 'process')}{nodes}"
    if is_single_process and strategy.devices == "many":
        return f"{strategy.name} is one process" + ("" if strategy.one_process else ", as set")
    return "one device" if len(devices) == 1 else "one rank for each selected device, repeats included"


#: Bytes of a GPU for its context and the workspaces of libraries (an allowance).
CONTEXT = 0.8e9


def divide_if_needed(placement: Placement, state_bytes: float, detected: Sequence[Device]) -> Placement:
    """Choose a sharded strategy if the state of training does not fit in a GPU of this node.

    Activations do not count, since a smaller batch reduces them.

    Args:
        placement: resolved from ``strategy: auto``.
        state_bytes: size of parameters, gradients and optimizer state.
    """
    devices = placement.devices
    has_distinct_gpus = placement.world_size > 1 and placement.nodes == 1 and len(set(devices)) == len(devices)
    if placement.spec.divides or placement.accelerator != "gpu" or not has_distinct_gpus:
        return placement
    smallest = min((find(name, detected) for name in devices), key=lambda device: device.memory_gb)
    if smallest.memory_gb <= 0 or state_bytes <= smallest.memory_gb * 1e9 - CONTEXT:
        return placement
    sharded = auto_strategy(len(devices), fits=False)
    reason = (
        f"auto: parameters, gradients and optimizer take {state_bytes / 1e9:.1f} GB, and {smallest.id} has "
        f"{smallest.memory_gb} GB; {sharded} divides them, {state_bytes / 1e9 / len(devices):.1f} GB each"
    )
    return replace(placement, strategy=sharded, reasons={**placement.reasons, "strategy": reason})


@dataclass(frozen=True, slots=True)
class Selection:
    """Devices of one accelerator, in the order of the ranks; ``explicit``: the user has named them."""

    devices: tuple[str, ...]
    reason: str
    notes: tuple[Note, ...] = ()
    explicit: bool = False


def parse(names: Iterable[str]) -> tuple[str, ...]:
    """Check the form of each name: ``cpu``, ``gpu:<index>``, or ``all`` alone. Raises :class:`DeviceError`."""
    devices = tuple(names)
    if not devices:
        raise DeviceError("no device is selected", fix="name at least one, for example --devices cpu")
    if len(devices) > MAX_DEVICES:
        raise DeviceError(
            f"{len(devices)} devices are selected", why=f"the maximum is {MAX_DEVICES}", fix="select fewer"
        )
    if devices == ("all",):
        return devices
    if "all" in devices:
        raise DeviceError(
            "`all` cannot be combined with other devices",
            why="it means every GPU, or the CPU on a machine without one",
            fix="use --devices all",
        )
    for name in devices:
        if not isinstance(name, str) or not _FORM.fullmatch(name):
            fix = _nearest_form(str(name).strip().lower())
            raise DeviceError(f"{name!r} is not a device", why="a device is cpu or gpu:<index>", fix=fix)
    return devices


def _nearest_form(name: str) -> str:
    """Suggest a fix for common mistakes: ``cuda:1``, ``GPU0``, ``0``, ``gpu``."""
    number = re.fullmatch(r"(?:cuda|gpu|nvidia)[\s:_]*(\d{0,4})", name)
    if name.isdecimal():
        return f"name each device: --devices gpu:{int(name)} is one GPU, cpu,cpu two CPU ranks, all every GPU"
    if number:
        return f"write gpu:{int(number[1] or 0)}"
    if name.startswith("mps"):
        return "Apple's mps is not supported: write cpu"
    return "write cpu" if name == "cpu" else "`lockstep devices` lists the devices of this machine"


def choose_default(detected: Sequence[Device]) -> Selection:
    """Select the first GPU, else the CPU."""
    gpus = usable_gpus(detected)
    if gpus:
        return Selection((gpus[0].id,), "default: the first GPU")
    return Selection(("cpu",), "default: the CPU, as there is no GPU that Lockstep can use")


def select(names: tuple[str, ...], detected: Sequence[Device]) -> Selection:
    """Select detected devices by name; ``all`` means every GPU, and the CPU is ignored if there is a GPU.

    Raises :class:`DeviceError` for a device that this machine lacks or that Lockstep cannot use.
    """
    if names == ("all",):
        gpus = tuple(gpu.id for gpu in usable_gpus(detected))
        if gpus:
            return Selection(gpus, "all: every GPU", explicit=True)
        return Selection(("cpu",), "all: there is no GPU that Lockstep can use, so the CPU")
    for name in names:
        find(name, detected)
    gpus = tuple(name for name in names if name != "cpu")
    if gpus and len(gpus) < len(names):
        note = Note("cpu_ignored", "The CPU is ignored: a run uses GPUs or the CPU, not both.")
        return Selection(gpus, "as selected, without the CPU", (note,), explicit=True)
    return Selection(names, "as selected", explicit=True)


def find(name: str, detected: Sequence[Device]) -> Device:
    """Return the device ``name``. Raises :class:`DeviceError` if it is absent or Lockstep cannot use it."""
    device = next((device for device in detected if device.id == name), None)
    fix = f"choose from: {describe([device for device in detected if device.supported])}"
    if device is None:
        raise DeviceError(
            f"there is no {name} on this machine", fix=f"{fix}; `lockstep doctor` says why a GPU is missing"
        )
    if not device.supported:
        raise DeviceError(f"{name} ({device.name}) cannot be used", why=device.note or "not supported yet", fix=fix)
    return device


def describe(devices: Sequence[Device]) -> str:
    """List devices: ``cpu (AMD EPYC), gpu:0 (NVIDIA H200)``, or ``nothing``."""
    return ", ".join(f"{device.id} ({device.name})" for device in devices) or "nothing"
