"""The strategies: how several devices share the work of a step. One :class:`StrategySpec` each; imports no torch.

Settings, flags, plan, forecast and page read the specs. What trains is in the module that a spec names, which defines
``build`` or, for a model that is divided, ``divide`` (:mod:`lockstep.engine.strategies.build` calls them).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from lockstep.errors import ConfigError, LockstepError, UnsupportedError

#: Entry points of installed packages: each one is a :class:`StrategySpec`.
GROUP = "lockstep.strategies"
#: Modules, comma-separated, that register a strategy when they are imported. Child processes inherit it.
MODULES = "LOCKSTEP_STRATEGIES"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """The properties of a strategy that other modules ask for.

    Attributes:
        name: the value of ``hardware.strategy``. ``summary``: for help and reasons.
        module: import path of the module with ``build(replica, config, plan)``, which returns a
            :class:`lockstep.engine.strategies.base.Strategy`; where ``state`` is not ``replicated``, with
            ``divide(undivided)``, which returns a :class:`lockstep.engine.partition.Divided`.
        one_process: one process uses all devices; else each device has its process.
        state: each device has all parameters (``replicated``), a part of every one (``sharded``), or some of the
            model's stages, so that all devices work on the same samples (``staged``).
        forward_is_collective: ranks communicate in each forward pass, so all must make the same number of them.
        messages: content of a step's messages, gradients by ``all-reduce``, or blocks by ``gather``; ``None``: its
            speed is not forecast.
        settings: keys that no other strategy reads; the name of a section stands for all of its keys.
        note: printed in the plan of a run that uses it.
        refuses: called with the devices of this node; raises a :class:`LockstepError` if it cannot use them.
        memory: called with the bytes by kind (parameters, gradients, …) of a step on one device, and the number of
            devices; returns the bytes by kind on each of them. ``None``: follows from ``state``.
    """

    name: str
    summary: str
    module: str
    devices: Literal["one", "many"] = "many"
    one_process: bool = False
    state: Literal["replicated", "sharded", "staged"] = "replicated"
    forward_is_collective: bool = False
    messages: Literal["all-reduce", "gather"] | None = None
    supports_exact: bool = False
    settings: tuple[str, ...] = ()
    note: str | None = None
    refuses: Callable[[tuple[str, ...]], None] | None = None
    memory: Callable[[Mapping[str, float], int], Mapping[str, float]] | None = None

    @property
    def scatters(self) -> bool:
        """One process scatters each micro-batch over several devices."""
        return self.one_process and self.devices == "many"

    @property
    def has_buckets(self) -> bool:
        """Gradients are reduced in DistributedDataParallel's buckets, unless one message carries them all."""
        return "distributed.bucket_cap_mb" in self.settings

    @property
    def exchanges_inside(self) -> bool:
        """Devices communicate within forward and backward, so that the time of it is not measured separately."""
        return self.forward_is_collective or self.scatters

    @property
    def divides(self) -> bool:
        """No device has the whole model."""
        return self.state != "replicated"


def _refuse_repeated(strategy: str, devices: tuple[str, ...], reason: str) -> None:
    if devices[0] != "cpu" and len(set(devices)) < len(devices):
        raise UnsupportedError(
            f"strategy {strategy} cannot use a GPU twice ({', '.join(devices)})",
            why=reason,
            fix="name each GPU once, or use --strategy ddp",
        )


def _refuse_for_fsdp(devices: tuple[str, ...]) -> None:
    reason = "two ranks on one GPU communicate over gloo, which cannot scatter gradients on a GPU"
    _refuse_repeated("fsdp", devices, reason)


def _refuse_for_dp(devices: tuple[str, ...]) -> None:
    if devices[0] == "cpu":
        raise UnsupportedError(
            "strategy dp needs GPUs",
            why="it copies the model to several GPUs from one process; a CPU is one device",
            fix="use --strategy ddp, for example with --devices cpu,cpu",
        )
    _refuse_repeated("dp", devices, "it has one process, and a repeated device stands for two")


_ENGINE = "lockstep.engine.strategies"
_KNOWN = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="single",
            summary="one process on one device",
            module=f"{_ENGINE}.build",
            devices="one",
            one_process=True,
            messages="all-reduce",
            supports_exact=True,
        ),
        StrategySpec(
            name="dp",
            summary="one process copies the model to all selected GPUs in every step",
            module=f"{_ENGINE}.data_parallel",
            one_process=True,
            note="ddp is faster than dp: dp copies the model to every GPU in every step, from one process",
            refuses=_refuse_for_dp,
        ),
        StrategySpec(
            name="ddp",
            summary="one process for each device, gradients averaged by all-reduce",
            module=f"{_ENGINE}.ddp",
            messages="all-reduce",
            supports_exact=True,
            settings=("distributed.bucket_cap_mb", "distributed.find_unused_parameters"),
        ),
        StrategySpec(
            name="fsdp",
            summary="one process for each device, with a shard of parameters, gradients and optimizer state",
            module=f"{_ENGINE}.fsdp",
            state="sharded",
            forward_is_collective=True,
            messages="gather",
            settings=("fsdp",),
            refuses=_refuse_for_fsdp,
        ),
        StrategySpec(
            name="pipeline",
            summary="each device has some of the model's stages",
            module=f"{_ENGINE}.pipeline",
            state="staged",
            forward_is_collective=True,
            settings=("pipeline",),
        ),
    )
}


def strategies() -> Mapping[str, StrategySpec]:
    """Return all strategies by name: those of Lockstep, of installed packages, and registered ones."""
    _load()
    return _KNOWN


def find_strategy(name: str) -> StrategySpec:
    """Find the strategy of that name. Raises :class:`ConfigError`."""
    if name not in strategies():
        raise ConfigError(
            f"there is no strategy {name[:100]!r}",
            why=f"there are {', '.join(strategies())}",
            fix=f"install the package that brings it, or name its module in {MODULES}",
        )
    return _KNOWN[name]


def auto_strategy(ranks: int, *, fits: bool = True) -> str:
    """Choose for ``strategy: auto``; ``fits``: parameters, gradients and optimizer state fit on one device."""
    return "single" if ranks == 1 else "ddp" if fits else "fsdp"


def register_strategy(spec: StrategySpec) -> None:
    """Make a strategy known in this process and in those that it starts, ranks included.

    Call it where ``spec.module`` is imported: that module is named in the environment variable
    ``LOCKSTEP_STRATEGIES``, and child processes import it. Raises :class:`ConfigError` where the name is taken, or the
    module is a script, which other processes cannot import.
    """
    if spec.name == "auto" or _KNOWN.get(spec.name, spec) != spec:
        raise ConfigError(f"the strategy {spec.name!r} exists already", fix="choose another name")
    if spec.module == "__main__":
        raise ConfigError(
            f"the strategy {spec.name!r} is defined in a script",
            why="ranks import its module by name",
            fix="move it to a separate module and import that",
        )
    _KNOWN[spec.name] = spec
    modules = [module for module in os.environ.get(MODULES, "").split(",") if module]
    if not spec.module.startswith("lockstep.") and spec.module not in modules:
        os.environ[MODULES] = ",".join([*modules, spec.module])


@cache
def _load() -> None:
    """Import what packages and ``LOCKSTEP_STRATEGIES`` bring, once."""
    from importlib.metadata import EntryPoint, entry_points

    modules = filter(None, os.environ.get(MODULES, "").split(","))
    for point in (*(EntryPoint(module, module, GROUP) for module in modules), *entry_points(group=GROUP)):
        try:
            spec = point.load()
            if isinstance(spec, StrategySpec):
                _KNOWN.setdefault(spec.name, spec)
        except LockstepError:
            raise
        except Exception as error:  # any error of the package's code
            raise ConfigError(
                f"the strategy of {point.value} cannot be imported", why=f"{type(error).__name__}: {error}"
            ) from error
