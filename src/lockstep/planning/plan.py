"""The plan: one object, computed once an attempt, printed, saved, and used by all."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field

from lockstep.errors import many
from lockstep.events import Note
from lockstep.planning.batch import BatchPlan, OrderPlan, SamplingFacts
from lockstep.planning.decision import Decision, Frozen
from lockstep.planning.schedule import Schedule
from lockstep.strategies import StrategySpec, find_strategy

#: Whether the lowest or the highest value of a metric is the best.
Mode = Literal["min", "max"]


class LoaderFacts(Frozen):
    """The user's ``DataLoader``.

    ``whole_steps``: the module optimizes manually, so every batch is a step. ``batches``: of an epoch of a loader that
    keeps its own order, on one device.
    """

    batch_size: int
    shuffle: bool
    drop_last: bool = False
    whole_steps: bool = False
    batches: int | None = None


class TaskFacts(Frozen):
    """What the plan must know of a task: sizes of its data and traits of its model.

    Of the data: ``whole_batches``: a batch is one gather. ``quick_samples``: one is made in less time than another
    process needs to hand it over. ``opens_files``: reading opens files or connections, which stay open; ``read_file``:
    one whose position worker processes would move for each other. ``lengths``, ``fingerprint``: hashes of the lengths
    and of the content of the training samples; ``unstable``: the parts that differ each time they are read.
    ``sampling``: how they are chosen. ``remarks``: what the data sets say of themselves. ``array_bytes``: of training
    data that are arrays in memory. ``loader``: that of a ``LightningModule``.

    Of the model: ``vectors``: parameters of norms and biases. ``joint_bytes``: of gradients that one message can carry.
    ``multiply_adds``: of a sample's forward pass; 0: not known. ``optimizer_lr``: of the task's own optimizer.
    ``own_schedule``: the task makes a scheduler. ``monitor``: its metric of evaluations. ``metric_modes``: of the
    metrics that state it, by name; ``metrics_remark``: on how they are made. ``pads``: it can fill up a smaller batch.
    ``unrecorded``: arguments of the task object that later commands lack.
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
    unrecorded: tuple[str, ...] = ()
    monitor: tuple[str, Mode] = ("val_loss", "min")
    metric_modes: dict[str, Mode] = Field(default_factory=dict)
    metrics_remark: str | None = None
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


class ResumePoint(Frozen):
    """Where an earlier attempt stopped; sizes in samples. ``hold``: keep its global batch. Its order always stays.

    ``accept_data``: resume on other data than that of ``fingerprint``.
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


class LoaderPlan(Frozen):
    """Input pipeline of a rank: after its first batches the loader may start up to ``most_workers`` processes.

    ``persistent_workers`` is not read.
    """

    num_workers: int
    most_workers: int = 0
    prefetch_factor: int
    persistent_workers: bool = False
    pin_memory: bool


class Plan(Frozen):
    """Everything computed before the first step. ``position`` and sizes are in samples, ``lr`` per step.

    ``decisions``: every automatic choice by its key, in reading order: ``plan.decisions["lr"].reason``. ``monitor``,
    ``mode``: by which metric an evaluation is the best, and whether the lowest or the highest value is.
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

    def value(self, key: str, default: Any = None) -> Any:
        """Of a decision that only some plans have."""
        return self.decisions[key].value if key in self.decisions else default

    @property
    def total_steps(self) -> int:
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
        return cast(str, self.decisions["reproducibility"].value)

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether each rank writes its part of a checkpoint."""
        return bool(self.value("checkpoints"))

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
        batch, devices = self.batch, self.batch.ranks * self.batch.devices_per_rank
        kind = "GPU" if self.placement["accelerator"] == "gpu" else "CPU rank"
        parts = f" × {batch.accumulate} micro-batches" if batch.accumulate > 1 else ""
        return f"Effective batch size: {batch.global_batch} ({batch.batch_size} × {many(devices, kind)}{parts})"

    def as_dict(self) -> dict[str, Any]:
        """As ``plan.json`` has it: with what follows from its fields, for readers of the file."""
        followed = ("total_steps", "threads", "sync_batchnorm", "reproducibility", "sharded_checkpoints")
        return {
            **self.model_dump(mode="json"),
            **{name: getattr(self, name) for name in (*followed, "steps_per_epoch")},
            "effective_batch": self.effective_batch_label,
        }
