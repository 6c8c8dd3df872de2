"""The plan: one object, computed once an attempt, printed, saved, and used by all."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import model_validator

from lockstep.events import Note
from lockstep.planning.batch import BatchPlan
from lockstep.planning.decision import Decision, Frozen, upgraded
from lockstep.planning.order import OrderPlan, SamplingFacts
from lockstep.planning.schedule import Schedule
from lockstep.strategies import StrategySpec, find_strategy

#: Keys of the decisions that are measured on the devices when a run starts.
LAYOUT, DATA_DEVICE = MEASURED = "channels_last", "data_device"
#: Whether the lowest or the highest value of a metric is the best.
Mode = Literal["min", "max"]


class LoaderFacts(Frozen):
    """The user's ``DataLoader``: samples per device, whether it shuffles, whether it leaves out a short last batch.

    ``whole_steps``: the module optimizes manually, so that every batch is a step: there is no accumulation.
    ``batches``: of an epoch of a loader that keeps its own order, on one device.
    """

    batch_size: int
    shuffle: bool
    drop_last: bool = False
    whole_steps: bool = False
    batches: int | None = None


class TaskFacts(Frozen):
    """What the plan must know of a task: sizes of its data and traits of its model.

    ``whole_batches``: a batch is one gather. ``quick_samples``: of data that reading opens, a sample is made in less
    time than another process needs to hand it over. ``lengths``: a hash of the lengths of the training samples, if the
    task gives them. ``sampling``: how they are chosen. ``remarks``: what their data sets say of themselves.
    ``loader``: the training loader that a ``LightningModule`` brings.
    ``optimizer_lr``: the learning rate of the task's own optimizer, if it has one: of the first group whose is not 0.
    ``own_schedule``: the task makes a scheduler for its optimizer.
    ``monitor``: the task's metric that evaluations are judged by, and its mode. ``fingerprint``: length and content of
    the training data; ``unstable``: the parts of samples that it leaves out, as they differ each time they are read.
    ``read_file``: a file that the data set has open, whose position moves when a sample is read, so that worker
    processes would move it for each other. ``opens_files``: reading samples has opened files or connections,
    which stay open.
    ``vectors``: parameters that are no part of a matrix, as those of norms and biases.
    ``joint_bytes``: of the gradients, where one message can carry them; else 0.
    ``pads``: the task can fill up a smaller batch. ``convolutions``: the model has 2-D convolutions.
    ``array_bytes``: of training data that are arrays in memory; else 0.
    ``multiply_adds``: of a sample's forward pass, rather too many; 0: not known.
    """

    name: str
    train_samples: int
    val_samples: int = 0
    test_samples: int = 0
    parameters: int = 0
    vectors: int = 0
    frozen: int = 0
    has_batchnorm: bool = False
    whole_batches: bool = False
    quick_samples: bool = False
    lengths: str | None = None
    sampling: SamplingFacts | None = None
    remarks: tuple[str, ...] = ()
    loader: LoaderFacts | None = None
    optimizer_lr: float | None = None
    own_schedule: bool = False
    monitor: tuple[str, Mode] = ("val_loss", "min")
    fingerprint: str = ""
    unstable: tuple[str, ...] = ()
    read_file: str | None = None
    multiply_adds: int = 0
    joint_bytes: int = 0
    opens_files: bool = False
    pads: bool = False
    convolutions: bool = False
    array_bytes: int = 0

    @property
    def streams(self) -> bool:
        """Whether samples are read in order, by one process."""
        return self.sampling is not None and self.sampling.stream


class Measured(Frozen):
    """Choices that an earlier attempt has measured, and on which devices; ``gpu``: the first one's model."""

    devices: tuple[str, ...]
    gpu: str
    decisions: dict[str, Decision]


class ResumePoint(Frozen):
    """Where an earlier attempt stopped; sizes in samples. ``hold``: keep its global batch. Its order always stays.

    ``fingerprint``: of the data it was trained on. ``accept_data``: resume on other data of the same length.
    ``measured``: what was measured then, which stays on the same devices.
    """

    step: int
    epoch: int
    position: int
    samples_seen: int
    global_batch: int
    order: OrderPlan = OrderPlan()
    hold: bool = True
    fingerprint: str | None = None
    accept_data: bool = False
    measured: Measured | None = None


class LoaderPlan(Frozen):
    """Input pipeline of one rank.

    ``most_workers``: with more than ``num_workers`` of them the loader may start processes after its first batches.
    """

    num_workers: int
    most_workers: int = 0
    prefetch_factor: int
    persistent_workers: bool
    pin_memory: bool


class Plan(Frozen):
    """Everything computed before the first step. ``position`` and sizes are in samples, ``lr`` per step.

    ``decisions``: every automatic choice by its key, in reading order: ``plan.decisions["lr"].reason``.
    ``monitor`` and ``mode``: by which metric an evaluation is the best, and whether the lowest or the highest value is.
    ``accepted_data``: the fingerprint of other data that the run resumes from, as the user asked for it.
    """

    task: TaskFacts
    placement: dict[str, Any]
    batch: BatchPlan
    order: OrderPlan = OrderPlan()
    schedule: Schedule
    loader: LoaderPlan
    epochs: int
    eval_batch_size: int
    pre_scale: float
    seed: int
    overfit_samples: int | None = None
    monitor: str = "val_loss"
    mode: Mode = "min"
    accepted_data: str | None = None
    decisions: dict[str, Decision]
    notes: tuple[Note, ...]

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, values: Any) -> Any:
        return upgraded(values) if isinstance(values, dict) else values

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return cast(int, self.decisions["steps"].value)

    @property
    def threads(self) -> int:
        """Intra-op threads of a rank."""
        return cast(int, self.decisions["threads"].value)

    @property
    def sync_batchnorm(self) -> bool:
        return bool(self.decisions["sync_batchnorm"].value)

    @property
    def reproducibility(self) -> str:
        """``fast`` or ``exact``."""
        return cast(str, self.decisions["reproducibility"].value)

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether each rank writes its part of a checkpoint."""
        return bool(self.value("checkpoints"))

    @property
    def to_measure(self) -> tuple[str, ...]:
        """Keys of the decisions that are still to be measured."""
        return tuple(key for key in MEASURED if self.value(key, "") is None)

    @property
    def measured(self) -> Measured:
        """The measured choices that are settled."""
        found = {key: self.decisions[key] for key in MEASURED if self.value(key) is not None}
        placed = self.placement
        return Measured(devices=tuple(placed["devices"]), gpu=placed.get("gpu", ""), decisions=found)

    def settled(self, *decisions: Decision) -> Plan:
        """The plan with these decisions, in the places of those with their keys."""
        return self.model_copy(update={"decisions": self.decisions | {each.key: each for each in decisions}})

    def value(self, key: str, default: Any = None) -> Any:
        """Of a decision that only some plans have."""
        return self.decisions[key].value if key in self.decisions else default

    @property
    def one_message(self) -> bool:
        """Whether ddp reduces all gradients in one message after the backward."""
        return bool(self.value("one_message"))

    @property
    def filled_to(self) -> int:
        """Samples that smaller batches are filled up to, for compiled code; 0: they are not."""
        return int(self.value("compiled") or 0)

    @property
    def world_size(self) -> int:
        """Processes. A pipeline's all read the same samples, so to ``batch`` they are one rank."""
        return int(self.placement["world_size"])

    @property
    def steps_per_epoch(self) -> int:
        return self.batch.steps_per_epoch

    @property
    def strategy(self) -> StrategySpec:
        """The properties of the strategy that the plan names."""
        return find_strategy(self.placement["strategy"])

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of every parameter."""
        return self.strategy.state == "sharded"

    @property
    def pipelined(self) -> bool:
        """Whether devices have stages of one model, so that all of them work on the same samples."""
        return self.strategy.state == "staged"

    @property
    def effective_batch_label(self) -> str:
        """As document and page word it: ``Effective batch size: 64 (32 × 2 GPUs)``."""
        devices = self.batch.ranks * self.batch.devices_per_rank
        kind = "GPUs" if self.placement["accelerator"] == "gpu" else "CPU ranks"
        factors = f"{self.batch.batch_size} × {devices} {kind if devices > 1 else kind.rstrip('s')}"
        if self.batch.accumulate > 1:
            factors += f" × {self.batch.accumulate} micro-batches"
        return f"Effective batch size: {self.batch.global_batch} ({factors})"

    def as_dict(self) -> dict[str, Any]:
        """As ``plan.json`` has it: with what follows from its fields, for readers of the file."""
        followed = ("total_steps", "threads", "sync_batchnorm", "reproducibility", "sharded_checkpoints")
        return {
            **self.model_dump(mode="json"),
            **{name: getattr(self, name) for name in (*followed, "steps_per_epoch")},
            "effective_batch": self.effective_batch_label,
        }
