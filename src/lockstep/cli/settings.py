"""The flags of ``train`` and ``plan``; ``SHORT_NAMES`` has the setting that each one overrides.

A flag overrides only when it is given; otherwise the configuration files, the task's own defaults and the
general ones decide, in this order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from lockstep.api.settings import weights_folder
from lockstep.cli.output import DEFAULT_RUNS_DIR
from lockstep.config.load import SHORT_NAMES, nested
from lockstep.errors import UsageError
from lockstep.strategies import strategies

_DEVICES = Group("Devices", sort_key=1)
_TRAINING = Group(
    "Training", "A task can have its own defaults: `lockstep plan TASK` shows the settings of the run.", sort_key=2
)
FILES = Group("Data and files", sort_key=3)
_OTHER = Group("Any other setting", sort_key=4)
_ALIASES = Group("Other spellings", sort_key=5)


if TYPE_CHECKING:
    _StrategyName = str
else:
    _StrategyName = Literal[("auto", *strategies())]


def _flag(help: str, group: Group, **more: Any) -> Parameter:
    return Parameter(help=help, group=group, negative="", **more)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the flags say; ``None`` where a flag was not given."""

    devices: Annotated[
        str | None,
        _flag(
            "Devices by name, comma-separated: cpu, gpu:0, or all for every GPU. One named twice carries two ranks "
            "(cpu,cpu). Default: gpu:0 if there is one, else cpu.",
            _DEVICES,
            metavar="DEVICE,...",
        ),
    ] = None
    strategy: Annotated[
        _StrategyName | None,
        _flag("How several devices share the work. Default: auto (single on one device, ddp on several).", _DEVICES),
    ] = None
    precision: Annotated[
        Literal["auto", "32", "16-mixed", "bf16-mixed"] | None,
        _flag(
            "Number format of the forward pass; 16-mixed scales the loss; auto: bf16-mixed on GPUs. Default: 32.",
            _DEVICES,
        ),
    ] = None
    reproducibility: Annotated[
        Literal["fast", "exact"] | None,
        _flag("exact: the same weights bit for bit on 1, 2, 4 or 8 ranks, at some cost. Default: fast.", _DEVICES),
    ] = None
    nodes: Annotated[
        str | None,
        _flag(
            "Train on several machines: start the same command on each. 2, or 1:4 for one to four. Default: this one.",
            _DEVICES,
            metavar="N|MIN:MAX",
        ),
    ] = None
    rdzv: Annotated[
        str | None,
        _flag(
            "Where the nodes meet: the name of one of them, and a port (29400) that is free there. Default: nowhere.",
            _DEVICES,
            metavar="HOST[:PORT]",
        ),
    ] = None
    epochs: Annotated[
        int | None,
        _flag("Passes over the training data. Default: 20.", _TRAINING),
    ] = None
    max_steps: Annotated[
        int | None,
        _flag("Stop after N optimizer steps. Default: no limit.", _TRAINING),
    ] = None
    batch_size: Annotated[
        int | None,
        _flag("Samples per device and micro-batch. Default: 32.", _TRAINING),
    ] = None
    global_batch_size: Annotated[
        int | None,
        _flag(
            "Samples per optimizer step over all devices; batch and accumulation follow from it. "
            "Default: batch size x devices x accumulation.",
            _TRAINING,
        ),
    ] = None
    grad_accum_steps: Annotated[
        int | None,
        _flag("Micro-batches per device and optimizer step. Default: 1.", _TRAINING),
    ] = None
    lr: Annotated[
        float | None,
        _flag(
            "Learning rate per optimizer step; used as it is unless --lr-scaling is given. Default: 0.001.", _TRAINING
        ),
    ] = None
    lr_scaling: Annotated[
        Literal["none", "linear", "sqrt"] | None,
        _flag("Scale the learning rate with the global batch. Default: none.", _TRAINING),
    ] = None
    warmup_epochs: Annotated[
        float | None,
        _flag(
            "Linear warm-up of the learning rate, in epochs (fractions allowed). Default: 2, up to a tenth of the run.",
            _TRAINING,
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        _flag("Weight decay of the optimizer. Default: 0.0001.", _TRAINING),
    ] = None
    max_grad_norm: Annotated[
        float | None,
        _flag(
            "Clip the gradient to this norm; off with --set training.max_grad_norm=null. Default: 1.",
            _TRAINING,
        ),
    ] = None
    early_stopping_patience: Annotated[
        int | None,
        _flag("Evaluations without improvement before the run stops; 0 is off. Default: 7.", _TRAINING),
    ] = None
    seed: Annotated[
        int | None,
        _flag("Seeds parameters, data order, augmentation and dropout. Default: 42.", _TRAINING),
    ] = None
    init_from: Annotated[
        str | None,
        _flag(
            "A run (folder, id or `last`) or a checkpoint folder to take the weights from; training starts at step 0. "
            "Default: weights drawn from the seed.",
            _TRAINING,
            metavar="RUN",
        ),
    ] = None
    fast_dev_run: Annotated[
        bool | None,
        _flag("One training step and one validation batch, to see that all of it runs. Default: off.", _TRAINING),
    ] = None
    data_dir: Annotated[
        Path | None,
        _flag("Folder that holds the task's data. Default: the data that comes with the task.", FILES),
    ] = None
    download: Annotated[
        bool | None,
        _flag("Let the task download its data set into --data-dir. Default: off.", FILES),
    ] = None
    skip_bad: Annotated[
        bool | None,
        _flag("speech: leave out utterances that cannot be used, instead of refusing to start. Default: off.", FILES),
    ] = None
    num_workers: Annotated[
        str | None,
        _flag(
            "Processes that load data, per rank; auto starts them if the first steps show that they are faster. "
            "Default: auto.",
            FILES,
            metavar="INT|auto",
        ),
    ] = None
    save_dir: Annotated[
        Path | None,
        _flag("The run's folder. Default: a new folder in --runs-dir.", FILES),
    ] = None
    runs_dir: Annotated[
        Path | None,
        _flag("Where new run folders are made. Default: runs.", FILES),
    ] = None
    log_interval: Annotated[
        int | None,
        _flag("Optimizer steps between logged values. Default: 50.", FILES),
    ] = None
    profile: Annotated[
        str | None,
        _flag(
            "Record optimizer steps A to B with torch's profiler: a trace for Perfetto and a table in profile/ of "
            "the run. Default: off.",
            FILES,
            metavar="A:B",
        ),
    ] = None
    profile_ranks: Annotated[
        str | None,
        _flag("The ranks that --profile records. Default: 0.", FILES, metavar="N,..."),
    ] = None
    config: Annotated[
        list[Path] | None,
        _flag("A YAML file with settings; later files win. May be repeated.", _OTHER, metavar="FILE"),
    ] = None
    set: Annotated[
        list[str] | None,
        _flag(
            "Set any key of docs/configuration.md, e.g. optimizer.name=sgd. May be repeated.",
            _OTHER,
            metavar="KEY=VALUE",
        ),
    ] = None
    multi_gpu: Annotated[
        Literal["ddp", "dp"] | None,
        _flag("--strategy ddp or dp, on every GPU unless devices are named.", _ALIASES),
    ] = None
    gpu_ids: Annotated[
        str | None,
        _flag("--devices by number: 0,1,3 is gpu:0,gpu:1,gpu:3; commas, no spaces.", _ALIASES, metavar="N,..."),
    ] = None
    mode: Annotated[
        str | None,
        _flag(
            "--set task.mode=...: how the har task turns a window's channels into samples "
            "(joint, flatten, average or first).",
            _ALIASES,
        ),
    ] = None
    no_amp: Annotated[
        bool | None,
        _flag("--precision 32.", _ALIASES, name="--no-amp"),
    ] = None


#: Used where no flag is given.
NO_SETTINGS = Settings()


def flag_table() -> dict[str, str]:
    """Every flag that stands for one setting, and that setting's key: ``{"--epochs": "training.epochs", …}``."""
    return {f"--{name.replace('_', '-')}": key for name, key in SHORT_NAMES.items()}


def all_flags() -> list[str]:
    """Every flag of :class:`Settings`, aliases included."""
    return ["--" + field.name.replace("_", "-") for field in dataclasses.fields(Settings)]


def to_mapping(
    settings: Settings, task: str | None, *, ranks_are_given: bool | None = None
) -> tuple[str, dict[str, Any]]:
    """The task's name, and the nested settings that files, ``--set`` and flags give, later over earlier.

    Args:
        ranks_are_given: whether torchrun or srun has started the ranks; ``None`` reads the environment.

    Raises:
        UsageError: no task, or flags that contradict each other.
        ConfigError: a file or a ``--set`` that cannot be read, an unknown key, or an invalid value.
    """
    from lockstep.config import load, resolve

    if ranks_are_given is None:
        from lockstep.hardware.world import read_world

        ranks_are_given = read_world(os.environ).from_outside
    given = {key: value for name, key in SHORT_NAMES.items() if (value := getattr(settings, name)) is not None}
    given |= _aliases(settings, ranks_are_given)
    overrides = nested({key: str(value) if isinstance(value, Path) else value for key, value in given.items()})
    mapping = load(settings.config or (), settings.set or (), overrides)
    if settings.init_from is not None:
        runs_dir = Path(str(mapping.get("runs_dir", DEFAULT_RUNS_DIR)))
        mapping["init_from"] = weights_folder(settings.init_from, runs_dir)
    section = mapping.get("task")
    name = task or (section.get("name") if isinstance(section, dict) else None)
    if not isinstance(name, str) or not name:
        raise UsageError(
            "no task was named", fix="write for example `lockstep train har`, or set task.name in a --config file"
        )
    if isinstance(section, dict) or section is None:
        mapping["task"] = {**(section or {}), "name": name}
    _refuse_unknown_code(settings.set or (), task, mapping)
    resolve(mapping)  # the task's own defaults are still missing, but what is wrong now is said before torch is loaded
    return name, mapping


def _refuse_unknown_code(sets: Sequence[str], task: str | None, mapping: dict[str, Any]) -> None:
    """Raises :class:`TaskError` when a file names a class that the command line does not, nor has before."""
    from lockstep.config import load
    from lockstep.tasks.trusted_tasks import class_paths, named_in, require_known

    if isinstance(mapping["task"], dict):
        given = class_paths({"name": task}) | class_paths(named_in(load(sets=sets)))
        require_known(named_in(mapping), "the configuration", given)


def _aliases(settings: Settings, ranks_are_given: bool) -> dict[str, Any]:
    """What document 001's spellings mean."""
    result: dict[str, Any] = {}
    if settings.gpu_ids is not None:
        if settings.devices is not None:
            raise _contradiction("--gpu-ids", "--devices", "they both name the devices")
        result["hardware.selected_devices"] = _gpu_names(settings.gpu_ids)
    if settings.multi_gpu is not None:
        if settings.strategy not in (None, settings.multi_gpu):
            raise _contradiction(f"--multi-gpu {settings.multi_gpu}", f"--strategy {settings.strategy}", "")
        result["hardware.strategy"] = settings.multi_gpu
        if settings.devices is None and settings.gpu_ids is None and not ranks_are_given:
            result["hardware.selected_devices"] = "all"
    if settings.no_amp:
        if settings.precision not in (None, "32"):
            raise _contradiction("--no-amp", f"--precision {settings.precision}", "--no-amp means --precision 32")
        result["hardware.precision"] = "32"
    return result


def _gpu_names(numbers: str) -> list[str]:
    names = [number.strip() for number in numbers.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        raise UsageError(
            f"--gpu-ids {numbers!r} is not a list of GPU numbers",
            fix="write for example --gpu-ids 0,1, or --devices gpu:0,gpu:1",
        )
    return [f"gpu:{int(name)}" for name in names]


def _contradiction(one: str, other: str, why: str) -> UsageError:
    return UsageError(f"{one} and {other} contradict each other", why=why, fix="give one of them")
