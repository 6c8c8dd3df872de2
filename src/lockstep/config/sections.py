"""The settings of a run: one frozen section for each owner, composed by :class:`RunConfig`.

Sections check what needs nothing but the value; what depends on the machine or on the data is decided by ``hardware``
and ``planning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from lockstep.strategies import strategies


def setting(default: Any, description: str, *, of: str = "", **limits: Any) -> Any:
    """Make a field of a section.

    Args:
        of: values of ``name`` (optimizers, schedules) that use the setting; the studio shows it for these only.
        limits: constraints of the value, and other arguments of pydantic's ``Field``.
    """
    if of:
        limits["json_schema_extra"] = {"applies_to": of.split()}
    return Field(default=default, description=description, **limits)


def _word(value: object) -> object:
    """Convert booleans to ``on`` and ``off``: YAML reads the bare words as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _text_of_number(value: object) -> object:
    """Convert integers to text: YAML reads a bare ``2`` as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def listed(value: object) -> object:
    """Split ``a, b`` of the command line; a single number becomes a text, which is refused as the name of a device."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return (str(value),) if isinstance(value, int) else value


def expanded(value: object) -> object:
    """Replace ``~`` or ``~user`` at the beginning of a path by the home folder; return other values unchanged."""
    try:
        return value.expanduser() if isinstance(value, Path) else value
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _strategy(value: str) -> str:
    names = ("auto", *strategies())
    if value not in names:
        raise ValueError(f"input should be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")
    return value


def _strategy_schema(schema: dict[str, Any]) -> None:
    schema["enum"] = ["auto", *strategies()]
    summaries = "; ".join(f"{name}: {spec.summary}" for name, spec in strategies().items())
    schema["description"] = (
        f"how several devices share the work; auto: single on one device, ddp on several; {summaries}"
    )


#: Optimizers by name; others are named by their class.
OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor")


def _optimizer(value: str) -> str:
    module, _, name = value.rpartition("." if value.startswith("torch.optim.") else ":")
    if value not in OPTIMIZERS and not (module and name.isidentifier()):
        raise ValueError(f"input should be {', '.join(OPTIMIZERS)}, or a class as package.module:Class")
    return value


#: Maximum loader processes of a rank; more are a typing error.
MAX_WORKERS = 1024


def _workers(value: object) -> object:
    """Accept ``auto`` or a number, with one message for any other value."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number is None or number == "auto" or (type(number) is int and 0 <= number <= MAX_WORKERS):
        return number
    raise ValueError(f"it must be `auto` or a number from 0 to {MAX_WORKERS}")


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_word)]
Precision = Literal["auto", "32", "tf32", "16-mixed", "bf16-mixed", "bf16-true"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Strategy = Annotated[str, AfterValidator(_strategy)]
Workers = Annotated[Annotated[int, Field(ge=0, le=MAX_WORKERS)] | Literal["auto"] | None, BeforeValidator(_workers)]


class Section(BaseModel):
    """A group of settings: immutable, complete, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _representable(cls, value: object) -> object:
        if isinstance(value, int | float) and abs(value) > 2**63:
            raise ValueError("is larger than 2^63")
        return value

    @field_validator("*")
    @classmethod
    def _in_home(cls, value: object) -> object:
        return expanded(value)


class TaskSection(Section):
    """The task by its name, and its settings (``task.<setting>``)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str = setting("har", "a built-in task, or path/to/file.py:Class, or package.module:Class")
    unrecorded: tuple[str, ...] = setting((), "set by Lockstep: arguments of a task object that are no plain values")

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if key != "unrecorded" or value}

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class HardwareConfig(Section):
    selected_devices: Annotated[tuple[str, ...] | None, BeforeValidator(listed)] = setting(
        None,
        "devices by name: cpu, gpu:0, …, or all for every GPU; one named twice runs two ranks (cpu,cpu). Unset: gpu:0 "
        "if there is one, else cpu",
    )
    precision: Annotated[Precision, BeforeValidator(_text_of_number)] = setting(
        "32",
        "number format: 32, 16-mixed (with loss scaling) or bf16-mixed; auto: bf16-mixed on GPUs that have it, else "
        "32; tf32: 32 with matmul_precision high; bf16-true: weights, gradients and optimizer as well",
    )
    matmul_precision: Literal["auto", "highest", "high"] = setting(
        "auto", "float32 products on a GPU; high: in TF32; highest: in float32; auto: high, but highest in exact mode"
    )
    cudnn_benchmark: Switch = setting("auto", "cuDNN measures algorithms; auto: on a GPU when samples have one length")
    channels_last: Switch = setting("auto", "channels_last 2-D convolutions; auto: on GPUs in 16-bit precision")
    strategy: Strategy = Field(default="auto", json_schema_extra=_strategy_schema)

    @model_validator(mode="after")
    def _one_format_of_products(self) -> HardwareConfig:
        if self.precision == "tf32" and self.matmul_precision == "highest":
            raise ValueError("precision is tf32 and matmul_precision is highest, without TF32: remove one of them")
        return self


class TrainingConfig(Section):
    epochs: int = setting(20, "passes over the training data", ge=1)
    max_steps: int | None = setting(
        None,
        "stop after N optimizer steps; a stop within an epoch is evaluated, but is never the best; unset: no limit",
        ge=1,
    )
    max_time_s: float | None = setting(None, "stop, with a checkpoint, after N seconds", gt=0)
    batch_size: int = setting(
        32, "samples per device and micro-batch; where only global_batch_size is set, a device's share of it", ge=1
    )
    global_batch_size: int | None = setting(
        None, "samples per optimizer step, over all devices. Unset: batch size x devices x accumulation", ge=1
    )
    accumulate: int = setting(1, "micro-batches per rank and optimizer step", ge=1)
    tail: Literal["spread", "merge", "drop"] = setting(
        "spread", "the last, smaller batch: split across the ranks, merged into the batch before it, or dropped"
    )
    max_grad_norm: float | None = setting(1.0, "clip the gradient to this norm; null: off", gt=0)
    early_stopping_patience: int = setting(7, "evaluations without improvement before stopping; 0: off", ge=0)
    seed: int = setting(42, "seeds parameters, order, augmentation and dropout", ge=0, lt=2**63)
    reproducibility: Literal["fast", "exact"] = setting(
        "fast", "exact: the same weights bit for bit on any world size that divides the lanes"
    )
    lanes: int = setting(8, "virtual ranks of exact mode; a power of two", ge=1, le=1024)
    threads: int | None = setting(None, "intra-op threads per rank; unset: chosen by the plan", ge=1)
    compile: bool = setting(False, "compile the model with torch.compile")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = setting(
        "default", "torch.compile's mode; reduce-overhead replays CUDA graphs, for small models on GPUs"
    )
    compile_loss: bool = setting(False, "also compile the task's loss(), for one of many small operations")
    activation_checkpointing: bool = setting(
        False, "keep only the inputs of each block, and compute the rest again in the backward pass"
    )
    on_oom: Literal["start", "retry", "fail"] = setting(
        "start",
        "out of memory: try again with half the micro-batch and the same global batch, up to 4 times: at the start "
        "(in the first 3 steps of an attempt), or whenever it happens (retry); or end the run",
    )
    max_skipped_share: float = setting(
        0.5, "end the run when more than this share of the last 100 steps had no finite gradient", gt=0, le=1
    )

    @field_validator("lanes")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two (1, 2, 4, 8, …)")
        return value

    @model_validator(mode="after")
    def _mode_of_nothing(self) -> TrainingConfig:
        for name, is_set in (("compile_mode", self.compile_mode != "default"), ("compile_loss", self.compile_loss)):
            if is_set and not self.compile:
                raise ValueError(f"{name} is set, but compile is off: set compile, or remove {name}")
        return self


class OptimizerConfig(Section):
    name: Annotated[str, AfterValidator(_optimizer)] = setting(
        "adamw",
        f"{', '.join(OPTIMIZERS)}, or any class as package.module:Class. A task may define another",
        json_schema_extra={"enum": list(OPTIMIZERS)},
    )
    lr: float = setting(1e-3, "learning rate per optimizer step; used unchanged unless lr_scaling is set", gt=0)
    weight_decay: float = setting(
        1e-4, "weight decay, decoupled from the gradient in adamw, added to it in adam and sgd", ge=0
    )
    weight_decay_on: Literal["all", "matrices"] = setting(
        "all", "matrices: norms and biases (less than two dimensions) have no weight decay"
    )
    betas: tuple[Beta, Beta] = setting((0.9, 0.999), "adam and adamw", of="adam adamw")
    eps: float = setting(1e-8, "adam and adamw", of="adam adamw", gt=0)
    momentum: float = setting(0.9, "sgd", of="sgd", ge=0, lt=1)
    nesterov: bool = setting(False, "sgd", of="sgd")
    options: dict[str, Any] = setting({}, "further arguments of the optimizer's class, by name")
    lr_scaling: Literal["none", "linear", "sqrt"] = setting(
        "none", "scale the learning rate with the global batch, relative to base_batch_size"
    )
    base_batch_size: int | None = setting(None, "the batch that lr was tuned for; unset: training.batch_size", ge=1)


ScheduleName = Literal["cosine", "step", "multistep", "poly", "exponential", "constant", "wsd", "onecycle", "plateau"]


class SchedulerConfig(Section):
    name: ScheduleName = setting(
        "cosine", "schedule after warm-up; wsd: warm-up, stable, decay; plateau: lower when the monitored metric stalls"
    )
    warmup_epochs: float | None = setting(None, "linear warm-up, in epochs; unset: 2, at most a tenth of the run", ge=0)
    warmup_steps: int | None = setting(None, "linear warm-up, in optimizer steps; overrides warmup_epochs", ge=0)
    min_lr: float = setting(1e-6, "final value of cosine, poly, wsd and onecycle; a lower bound for all", ge=0)
    step_epochs: float = setting(10.0, "step: multiply by gamma every N epochs", of="step", gt=0)
    milestones: tuple[float, ...] = setting((), "multistep: the epochs at which to multiply by gamma", of="multistep")
    gamma: float = setting(0.1, "step, multistep and plateau: the factor", of="step multistep plateau", gt=0, le=1)
    decay_share: float = setting(0.2, "wsd: share of the run that decays", of="wsd", gt=0, le=1)
    patience: int = setting(3, "plateau: evaluations without improvement before lowering the rate", of="plateau", ge=0)
    power: float = setting(1.0, "poly: the exponent", of="poly", gt=0)
    decay: float = setting(0.96, "exponential: the factor per decay_steps", of="exponential", gt=0, le=1)
    decay_steps: int = setting(10_000, "exponential: optimizer steps per factor", of="exponential", ge=1)

    @field_validator("name", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        aliases = {None: "constant", "none": "constant", "polynomial": "poly", "one-cycle": "onecycle"}
        return aliases.get(value, value) if isinstance(value, str | None) else value


class AveragingConfig(Section):
    name: Literal["none", "ema", "swa"] = setting(
        "none", "averaged weights are evaluated, saved, exported; ema: moving average, swa: mean of the run's last part"
    )
    decay: float = setting(0.999, "share of the average kept per update", of="ema", gt=0, lt=1)
    warmup: bool = setting(
        True, "shorter at the start: the decay of update n, from 0, is at most (1 + n) / (10 + n)", of="ema"
    )
    start_share: float = setting(0.75, "share of the run after which averaging begins", of="swa", ge=0, lt=1)
    every_steps: int = setting(1, "update every N optimizer steps", of="ema swa", ge=1)


class DataConfig(Section):
    data_dir: Path | None = setting(None, "folder of the task's data; unset: the task's embedded data")
    download: bool = setting(False, "let the task download its named data set into data_dir")
    num_workers: Workers = setting(
        None, "loader processes per rank; auto: started when the first steps show that they are faster. Unset: auto"
    )
    prefetch_factor: int | None = setting(None, "batches in flight per worker; unset: chosen by the plan", ge=1)
    persistent_workers: bool | None = setting(
        None, "has no effect: workers start again in each epoch, so that they see changes of the data set"
    )
    pin_memory: bool | None = setting(None, "page-locked host memory; unset: on for GPUs")
    on_bad_row: Literal["stop", "skip"] = setting(
        "stop", "a sample that cannot be read: stop, or leave it out and record it in the run's skipped-rank*.jsonl"
    )
    sampling: Literal["auto", "uniform", "weighted", "balanced"] = setting(
        "auto",
        "uniform: every sample once an epoch; weighted: by the task's weights; balanced: every class equally often, "
        "by the labels; auto: weighted when the task gives weights",
    )
    label_column: str | None = setting(
        None, "column (or key of a sample) with the classes of data.sampling=balanced; unset: targets, labels or label"
    )
    replacement: bool | None = setting(None, "whether a weighted epoch may have a sample several times; unset: yes")
    epoch_samples: int | None = setting(None, "samples of an epoch; unset: as many as the training set has", ge=1)
    device: Literal["auto", "host", "gpu"] = setting(
        "auto", "where lockstep.ArrayDataset is; auto: on the GPU if it fills at most a fifth of its free memory"
    )
    bucketing: Switch = setting("auto", "order samples by length: less padding; auto: when the task gives lengths")
    bucket_window: int | None = setting(None, "samples sorted by length together; unset: up to 4096", ge=1)
    bucket_block: int | None = setting(None, "samples that stay together; unset: an eighth of the window", ge=1)


class DistributedConfig(Section):
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", "auto: nccl with a GPU per rank, else gloo")
    find_unused_parameters: bool = setting(False, "allow parameters that get no gradient in a step (slower)")
    sync_batchnorm: Switch = setting("auto", "batch statistics over all ranks; auto: on with several ranks")
    bucket_cap_mb: float | None = setting(
        None, "size of a gradient bucket; unset: torch's, or one bucket of a small model on CPUs", gt=0
    )
    timeout_s: float = setting(600.0, "timeout of a collective operation, in seconds", gt=0)


class FsdpConfig(Section):
    sharding: Literal["full", "hybrid"] = setting(
        "full", "full: divided among all ranks; hybrid: among those of a node, the same on every node"
    )
    activation_checkpointing: bool = setting(False, "as training.activation_checkpointing, with this strategy alone")
    cpu_offload: bool = setting(False, "keep parameters, gradients and optimizer in host memory (GPUs only)")


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b"] = setting(
        "1f1b", "1f1b: alternates forward and backward passes, for fewer activations; gpipe: forward passes first"
    )


class ValidationConfig(Section):
    every_epochs: int = setting(1, "evaluate every N epochs", ge=1)
    every_steps: int | None = setting(None, "also evaluate every N optimizer steps", ge=1)
    batch_size: int | None = setting(None, "samples per device; unset: training.batch_size", ge=1)
    sanity_steps: int = setting(1, "validation batches before training, to fail early; 0: off", ge=0)


class CheckpointConfig(Section):
    every_steps: int | None = setting(None, "save every N optimizer steps, in addition to each epoch's end", ge=1)
    every_s: float | None = setting(None, "save when N seconds have passed since the last save", gt=0)
    keep_last: int = setting(2, "how many of the latest checkpoints to keep; the best is always kept", ge=1)
    monitor: str | None = setting(None, "metric that selects the best checkpoint, e.g. val_loss; unset: the task's")
    mode: Literal["min", "max"] | None = setting(
        None, "unset: as the metric's higher_is_better says, else by a known name: min for losses, max for scores"
    )
    sharded: Switch = setting(
        "auto", "fsdp: each rank writes its part of the state; auto: if weights and optimizer are 0.5 GB or more"
    )


class StorageConfig(Section):
    mirror: str | None = setting(
        None, "copy the run folder to this URL of fsspec while it grows, such as s3://bucket/run; unset: no mirror"
    )
    mirror_wait_s: float = setting(600.0, "seconds that the end of a run waits for its mirror", gt=0)

    @field_validator("mirror")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.partition("://")[1]:
            raise ValueError("must be a URL, such as s3://bucket/run or file:///disk/run")
        return value


class TelemetryConfig(Section):
    log_interval: int = setting(50, "optimizer steps between rows of steps.jsonl", ge=1)
    tensorboard: Switch = setting("auto", "auto: on when it is installed")
    progress: Annotated[Literal["auto", "bar", "plain", "off", "silent"], BeforeValidator(_word)] = setting(
        "auto", "auto: a bar on terminals, else lines; off: warnings and summary; silent: nothing"
    )
    system_metrics: bool = setting(True, "sample GPUs and host once a second, on each node, to system-<node>.jsonl")
    wandb: bool = setting(False, "also log to Weights & Biases (`pip install 'lockstep-train[wandb]'`)")
    wandb_project: str = setting("lockstep", "the W&B project", min_length=1)
    wandb_mode: Literal["auto", "online", "offline"] = setting(
        "auto", "offline: to logs/wandb, for `wandb sync`; online needs `wandb login`; auto: WANDB_MODE, else online"
    )
    mlflow: bool = setting(False, "also log to MLflow (`pip install 'lockstep-train[mlflow]'`)")
    mlflow_uri: str | None = setting(
        None, "an MLflow server or store, as http://host:5000; unset: MLFLOW_TRACKING_URI, else files in logs/mlruns"
    )
    mlflow_experiment: str = setting("lockstep", "the MLflow experiment", min_length=1)
    profile: str | None = setting(None, "A:B records steps A to B with torch's profiler, in profile/; unset: off")
    profile_ranks: Annotated[tuple[int, ...], BeforeValidator(listed)] = setting((0,), "ranks that profile records")
    record_samples: bool = setting(False, "record the sample indices of every step (for audits and tests)")

    @field_validator("profile", mode="before")
    @classmethod
    def _steps(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError("must be in quotes: YAML takes 10:15 for a number of base 60; or use --profile 10:15")
        if isinstance(value, str):
            first, colon, last = value.partition(":")
            numbers = all(part.isascii() and part.isdigit() for part in (first, last))
            if not colon or not numbers or not 1 <= int(first) <= int(last):
                raise ValueError("must be FIRST:LAST, two optimizer steps counted from 1, such as 10:15")
        return value


class LaunchConfig(Section):
    max_restarts: int = setting(0, "restarts from the latest valid checkpoint after a rank failed", ge=0)
    stop_grace_s: float = setting(
        30.0, "seconds that several ranks may take to end after a stop before they are killed", gt=0
    )
    hang_timeout_s: float = setting(
        60.0,
        "seconds without progress of any rank (batches, steps, evaluation, saving) after which the run counts as "
        "hanging and ends or restarts; the first step may take five times as long, and starting, compiling and metrics "
        "over all samples longer",
        gt=0,
    )
    nodes: Annotated[str | None, BeforeValidator(_text_of_number)] = setting(
        None, "number of nodes: 2, or 1:4 for one to four; unset: this one", pattern=r"^[1-9]\d*(:[1-9]\d*)?$"
    )
    rdzv: str | None = setting(None, "rendezvous address: a node that all can reach, and a free port; unset: one node")
    join_timeout_s: float = setting(120.0, "seconds that a node waits for the others to join, or to rejoin", gt=0)


class DebugConfig(Section):
    fast_dev_run: bool = setting(
        False, "run up to three training steps and one validation batch, as a check with an estimate of the run's time"
    )
    overfit_batches: int | None = setting(None, "train on N global batches only, repeatedly", ge=1)
    detect_anomaly: bool = setting(False, "torch's anomaly detection: slow, names the operator that produced a NaN")
    limit_eval_batches: int | None = setting(None, "evaluate on N batches of each split only", ge=1)
    start_position: int = setting(0, "begin the first epoch after N of its samples", ge=0)
    switch_off: tuple[Literal["dropout", "batchnorm"], ...] = setting(
        (), "train without dropout, or with BatchNorm's running statistics: to find why two runs differ"
    )
    trace: Annotated[Literal["off", "on", "reversed", "shuffled"], BeforeValidator(_word)] = setting(
        "off",
        "record loss, gradient norm, weights, buffers and sample hashes for `lockstep verify`; reversed and shuffled "
        "rearrange each micro-batch, which changes only rounding",
    )


class RunConfig(Section):
    """All settings of a run, resolved and frozen; ``config.yaml`` of a run is this object."""

    name: str | None = setting(None, "a label; Lockstep chooses the run's id", max_length=200)
    tags: Annotated[tuple[str, ...], BeforeValidator(listed)] = setting(
        (), "labels that several runs share, such as the name of their sweep", max_length=20
    )
    save_dir: Path | None = setting(None, "the run folder itself; unset: runs_dir/<run id>")
    runs_dir: Path = setting(Path("runs"), "where run folders are made")
    init_from: Path | None = setting(None, "run or checkpoint whose weights to start from; unset: drawn from the seed")
    task: TaskSection = Field(default_factory=TaskSection)
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    averaging: AveragingConfig = Field(default_factory=AveragingConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)

    @model_validator(mode="after")
    def _one_way_to_fix_the_batch(self) -> RunConfig:
        t = self.training
        if t.global_batch_size is not None and t.accumulate != 1:
            raise ValueError(
                "training.global_batch_size and training.accumulate are both set: the global batch fixes the "
                "accumulation; remove one of them"
            )
        return self

    def with_values(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with other values, by section; they are valid, and not validated again."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    def recomputes_activations(self, strategy: str) -> bool:
        """Return whether blocks are computed again in the backward pass, with the strategy of this name."""
        return self.training.activation_checkpointing or (strategy == "fsdp" and self.fsdp.activation_checkpointing)
