"""The plan: computed once for each attempt, printed, saved, and read by all ranks."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field

from lockstep.errors import many
from lockstep.events import Note
from lockstep.planning.batch import BatchPlan, OrderPlan, SamplingFacts
from lockstep.planning.decision import Decision, Frozen
from lockstep.planning.schedule import Schedule
from lockstep.precisions import PRECISIONS, PrecisionSpec
from lockstep.strategies import StrategySpec, find_strategy

#: ``min`` if the lowest value of a metric is the best, ``max`` if the highest is.
Mode = Literal["min", "max"]


class TaskFacts(Frozen):
    """Facts about a task for the plan: sizes of its data and traits of its model.

    Attributes:
        whole_batches: a batch is one gather.
        quick_samples: making a sample takes less time than handing it over from another process.
        opens_files: reading opens files or connections, which stay open.
        read_file: an open file whose position would be shared by worker processes.
        lengths: hash of the lengths of the training samples.
        fingerprint: hash of the content of the training samples.
        unstable: parts of the training samples that differ each time they are read.
        sampling: sampling of the training samples, if not all of them once an epoch.
        remarks: remarks of the data sets about themselves.
        array_bytes: size of training data that are arrays in memory.
        sets_batch_size: the task's ``DataLoader`` sets the size of a micro-batch.
        keeps_batches: the batches are those of the task's ``DataLoader``, undivided.
        even_steps: every rank must have the same number of micro-batches in every step.
        validates_itself: the task opens its validation data during training, so ``val_samples`` is 0.
        vectors: parameters of norms and biases.
        joint_bytes: size of the gradients if one message can carry all of them, else 0.
        multiply_adds: of the forward pass of a sample; 0 if unknown.
        optimizer_lr: learning rate of the task's optimizer.
        own_schedule: the task makes a scheduler.
        monitor: metric and mode that select the best evaluation.
        metric_modes: modes of the metrics that state one, by name.
        metrics_remark: remark on compute groups of the metrics.
        similar_methods: methods of the task that Lockstep does not call, with a similar one that it would.
        pads: the task can fill up a smaller batch.
        unrecorded: arguments of the task object that are not saved with the run.
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
    sets_batch_size: bool = False
    keeps_batches: bool = False
    even_steps: bool = False
    validates_itself: bool = False
    optimizer_lr: float | None = None
    own_schedule: bool = False
    unrecorded: tuple[str, ...] = ()
    monitor: tuple[str, Mode] = ("val_loss", "min")
    metric_modes: dict[str, Mode] = Field(default_factory=dict)
    metrics_remark: str | None = None
    similar_methods: tuple[tuple[str, str], ...] = ()
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
        """True if samples are read in order, by one process."""
        return self.sampling is not None and self.sampling.stream


class ResumePoint(Frozen):
    """State at the end of the previous attempt; sizes in samples.

    Attributes:
        position: samples of the running epoch that were used.
        order: order of the samples, which a resume always keeps.
        hold: keep the global batch.
        fingerprint: hash of the training samples of that attempt.
        accept_data: resume on data with another fingerprint.
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
    """Input pipeline of a rank. After the first batches, the loader may start up to ``most_workers`` processes.

    ``persistent_workers`` is ignored.
    """

    num_workers: int
    most_workers: int = 0
    prefetch_factor: int
    persistent_workers: bool = False
    pin_memory: bool


class Plan(Frozen):
    """Everything computed before the first step; sizes in samples.

    ``decisions`` has the automatic choices by key, in reading order: ``plan.decisions["lr"].reason``. The metric
    ``monitor`` selects the best evaluation: the lowest value if ``mode`` is ``min``, else the highest. ``pre_scale``
    multiplies losses before the backward pass. ``accepted_data`` is the fingerprint of the checkpoint's data, if the
    user accepted other data on resume.
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
        """Return the value of a decision that not all plans have."""
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
        """True if each rank writes its part of a checkpoint."""
        return bool(self.value("checkpoints"))

    @property
    def one_message(self) -> bool:
        """True if ddp reduces all gradients in one message after the backward."""
        return bool(self.value("one_message"))

    @property
    def filled_to(self) -> int:
        """Number of samples to which compiled models fill up smaller batches; 0 if they do not."""
        return int(self.value("compiled") or 0)

    @property
    def world_size(self) -> int:
        """Number of processes. Those of a pipeline read the same samples: ``batch`` counts them as one rank."""
        return int(self.placement["world_size"])

    @property
    def steps_per_epoch(self) -> int:
        return self.batch.steps_per_epoch

    @property
    def strategy(self) -> StrategySpec:
        return find_strategy(self.placement["strategy"])

    @property
    def number_format(self) -> PrecisionSpec:
        return PRECISIONS[self.placement["precision"]]

    @property
    def sharded(self) -> bool:
        """True if each rank has a part of every parameter."""
        return self.strategy.state == "sharded"

    @property
    def pipelined(self) -> bool:
        """True if devices have stages of one model and work on the same samples."""
        return self.strategy.state == "staged"

    @property
    def effective_batch_label(self) -> str:
        """Text for users: ``Effective batch size: 64 (32 × 2 GPUs)``."""
        batch = self.batch
        kind = "GPU" if self.placement["accelerator"] == "gpu" else "CPU rank"
        devices = many(batch.ranks * batch.devices_per_rank, kind)
        micro_batches = f" × {batch.accumulate} micro-batches" if batch.accumulate > 1 else ""
        return f"Effective batch size: {batch.global_batch} ({batch.batch_size} × {devices}{micro_batches})"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``plan.json``: the fields, and properties for readers of the file."""
        properties = (
            "total_steps",
            "threads",
            "sync_batchnorm",
            "reproducibility",
            "sharded_checkpoints",
            "steps_per_epoch",
        )
        return {
            **self.model_dump(mode="json"),
            **{name: getattr(self, name) for name in properties},
            "effective_batch": self.effective_batch_label,
        }
