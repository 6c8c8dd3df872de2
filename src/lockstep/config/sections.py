"""The settings of a run: one frozen section for each owner, composed by :class:`RunConfig`.

Sections hold values and the checks that need nothing but the value. What depends on the machine
or on the data (is this GPU here, does the batch divide) is decided by ``hardware`` and ``planning``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from lockstep.strategies import strategies

Precision = Literal["auto", "32", "tf32", "16-mixed", "bf16-mixed", "bf16-true"]


def _strategy(value: str) -> str:
    names = ("auto", *strategies())
    if value not in names:
        raise ValueError(f"input should be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")
    return value


def _strategy_schema(schema: dict[str, Any]) -> None:
    """The strategies that are known when the schema is read."""
    schema["enum"] = ["auto", *strategies()]
    summaries = "; ".join(f"{name}: {spec.summary}" for name, spec in strategies().items())
    schema["description"] = (
        "how several devices share the work; auto: single on one device, ddp on several, fsdp where the model is too "
        f"large; {summaries}"
    )


Strategy = Annotated[str, AfterValidator(_strategy)]


def _switch(value: object) -> object:
    """YAML reads a bare ``on`` or ``off`` as a boolean; the setting means the word."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _text_of_number(value: object) -> object:
    """YAML reads a bare ``2`` as a number; the setting is a text that may be one."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: object) -> object:
    """``a, b`` as a list, on the command line; a number alone as a list of it."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return (value,) if isinstance(value, int) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


def _only_for(names: str, default: Any, description: str, **limits: Any) -> Any:
    """A setting that only these values of ``name`` use, those of optimizers or schedules; the studio shows it then."""
    applies: dict[str, Any] = {"applies_to": names.split()}
    return Field(default=default, description=description, json_schema_extra=applies, **limits)


class Section(BaseModel):
    """A group of settings: immutable, complete, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _representable(cls, value: object) -> object:
        if isinstance(value, int | float) and abs(value) > 2**63:
            raise ValueError("is larger than 2^63")
        return value


class TaskSection(Section):
    """Which task, and its own settings beside the name (``task.<setting>``)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str = Field(default="har", description="a built-in task, or path/to/file.py:Class, or package.module:Class")

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class HardwareConfig(Section):
    selected_devices: Annotated[tuple[str, ...] | None, BeforeValidator(_listed)] = Field(
        default=None,
        description="devices by name: cpu, gpu:0, …, or all for every GPU; one named twice runs two ranks (cpu,cpu). "
        "Unset: gpu:0 if there is one, else cpu",
    )
    precision: Annotated[Precision, BeforeValidator(_text_of_number)] = Field(
        default="32",
        description="number format: 32, 16-mixed (with loss scaling) or bf16-mixed; auto: bf16-mixed on GPUs that have "
        "it, else 32; tf32: 32 with matmul_precision high; bf16-true: weights, gradients and optimizer as well",
    )
    matmul_precision: Literal["auto", "highest", "high"] = Field(
        default="auto",
        description="float32 products and convolutions on a GPU; high: in TF32; highest: in float32; auto: high where "
        "the GPU has TF32, highest in exact mode",
    )
    cudnn_benchmark: Switch = Field(
        default="auto",
        description="let cuDNN measure its algorithms once for each shape; auto: on a GPU when samples have one length",
    )
    channels_last: Switch = Field(
        default="auto",
        description="weights of 2-D convolutions in channels_last; auto: on GPUs, where it is measured to be faster",
    )
    strategy: Strategy = Field(default="auto", json_schema_extra=_strategy_schema)

    @model_validator(mode="after")
    def _one_format_of_products(self) -> HardwareConfig:
        if self.precision == "tf32" and self.matmul_precision == "highest":
            raise ValueError("precision is tf32 and matmul_precision is highest, without TF32: remove one of them")
        return self


class TrainingConfig(Section):
    epochs: int = Field(default=20, ge=1, description="passes over the training data")
    max_steps: int | None = Field(default=None, ge=1, description="stop after N optimizer steps; unset: no limit")
    max_time_s: float | None = Field(default=None, gt=0, description="stop, with a checkpoint, after N seconds")
    batch_size: int = Field(default=32, ge=1, description="samples per device and micro-batch")
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="samples per optimizer step over all devices; batch size and accumulation per rank follow from it. "
        "Unset: batch size x devices x accumulation",
    )
    accumulate: int = Field(default=1, ge=1, description="micro-batches per rank and optimizer step")
    tail: Literal["spread", "merge", "drop"] = Field(
        default="spread",
        description="the last, smaller batch: split across the ranks, merged into the batch before it, or dropped",
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="clip the gradient to this norm; null: off")
    early_stopping_patience: int = Field(
        default=7, ge=0, description="evaluations without improvement before stopping; 0: off"
    )
    seed: int = Field(default=42, ge=0, lt=2**63, description="seeds parameters, order, augmentation and dropout")
    reproducibility: Literal["fast", "exact"] = Field(
        default="fast", description="exact: the same weights bit for bit on any world size that divides the lanes"
    )
    lanes: int = Field(default=8, ge=1, le=1024, description="virtual ranks of exact mode; a power of two")
    threads: int | None = Field(default=None, ge=1, description="intra-op threads per rank; unset: chosen by the plan")
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default",
        description="with compile: torch.compile's mode; reduce-overhead replays CUDA graphs, for small models on GPUs",
    )
    compile_loss: bool = Field(
        default=False, description="with compile: also compile the task's loss(), for losses of many small operations"
    )
    cuda_graphs: Switch = Field(
        default="off",
        description="on one GPU, record the kernels of a step once and replay them, for small models whose steps wait "
        "for Python; auto: where a step has few operations",
    )
    activation_checkpointing: bool = Field(
        default=False, description="keep only the inputs of each block, and compute the rest again in the backward pass"
    )
    on_oom: Literal["start", "retry", "fail"] = Field(
        default="start",
        description="out of memory: try again with half the micro-batch and the same global batch, up to 4 times: at "
        "the start (in the first 3 steps of an attempt), or whenever it happens (retry); or end the run",
    )
    max_skipped_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="end the run when more than this share of the last 100 steps had no finite gradient",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_engine(cls, values: Any) -> Any:
        """Older configurations may have ``engine: native``."""
        if not isinstance(values, dict) or "engine" not in values:
            return values
        if values["engine"] != "native":
            raise ValueError(
                "the setting training.engine is gone: remove it. A task trains in Lockstep's own loop, "
                "a LightningModule in Lightning's Trainer (`lockstep train FILE.py:MODULE` or `lockstep lightning fit`)"
            )
        return {name: value for name, value in values.items() if name != "engine"}

    @field_validator("lanes")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two (1, 2, 4, 8, …)")
        return value

    @model_validator(mode="after")
    def _mode_of_nothing(self) -> TrainingConfig:
        if self.compile_mode != "default" and not self.compile:
            raise ValueError("compile_mode is set, but compile is off: set compile, or remove compile_mode")
        if self.compile_loss and not self.compile:
            raise ValueError("compile_loss is set, but compile is off: set compile, or remove compile_loss")
        return self


#: Optimizers by name; others are named by their class.
OPTIMIZERS = ("adamw", "adam", "sgd", "muon", "adafactor", "lion")


def _optimizer(value: str) -> str:
    place, _, name = value.rpartition("." if value.startswith("torch.optim.") else ":")
    if value not in OPTIMIZERS and not (place and name.isidentifier()):
        raise ValueError(f"input should be {', '.join(OPTIMIZERS)}, or a class as package.module:Class")
    return value


class OptimizerConfig(Section):
    name: Annotated[str, AfterValidator(_optimizer)] = Field(
        default="adamw",
        description=f"{', '.join(OPTIMIZERS)}, or any class as package.module:Class; muon: for matrices of hidden "
        "layers, adamw for all else. A task may define another",
        json_schema_extra={"enum": list(OPTIMIZERS)},
    )
    lr: float = Field(
        default=1e-3, gt=0, description="learning rate per optimizer step; used unchanged unless lr_scaling is set"
    )
    weight_decay: float = Field(
        default=1e-4,
        ge=0,
        description="weight decay: decoupled from the gradient in adamw, added to it in adam and sgd",
    )
    weight_decay_on: Literal["all", "matrices"] = Field(
        default="all", description="matrices: norms and biases (less than two dimensions) have no weight decay"
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor of the learning rate from each block of the model to the one before it (fine-tuning: 0.65 "
        "to 0.9); 1: one rate for all. The blocks are those of Task.blocks",
    )
    betas: tuple[float, float] = _only_for("adam adamw muon lion", (0.9, 0.999), "adam, adamw, lion, and muon's adamw")
    eps: float = _only_for("adam adamw muon", 1e-8, "adam, adamw, and muon's adamw", gt=0)
    momentum: float = _only_for("sgd muon", 0.9, "sgd and muon", ge=0, lt=1)
    nesterov: bool = _only_for("sgd", False, "sgd")
    options: dict[str, Any] = Field(default={}, description="further arguments of the optimizer's class, by name")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="scale the learning rate with the global batch, relative to base_batch_size"
    )
    base_batch_size: int | None = Field(
        default=None, ge=1, description="the batch that lr was tuned for; unset: training.batch_size"
    )

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each must be at least 0 and below 1")
        return value


class SchedulerConfig(Section):
    name: Literal["cosine", "step", "multistep", "poly", "exponential", "constant", "wsd", "onecycle", "plateau"] = (
        Field(
            default="cosine",
            description="learning-rate schedule after warm-up; wsd: warm-up, stable, decay; plateau: lower when the "
            "monitored metric does not improve",
        )
    )
    warmup_epochs: float | None = Field(
        default=None,
        ge=0,
        description="linear warm-up, in epochs (fractions allowed); unset: 2, at most a tenth of the run",
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="linear warm-up, in optimizer steps; overrides warmup_epochs"
    )
    min_lr: float = Field(
        default=1e-6, ge=0, description="final value of cosine, poly, wsd and onecycle; a lower bound for all"
    )
    step_epochs: float = _only_for("step", 10.0, "step: multiply by gamma every N epochs", gt=0)
    milestones: tuple[float, ...] = _only_for("multistep", (), "multistep: the epochs at which to multiply by gamma")
    gamma: float = _only_for("step multistep plateau", 0.1, "step, multistep and plateau: the factor", gt=0, le=1)
    decay_share: float = _only_for("wsd", 0.2, "wsd: share of the run that decays", gt=0, le=1)
    patience: int = _only_for("plateau", 3, "plateau: evaluations without improvement before the rate is lowered", ge=0)
    power: float = _only_for("poly", 1.0, "poly: the exponent", gt=0)
    decay: float = _only_for("exponential", 0.96, "exponential: the factor per decay_steps", gt=0, le=1)
    decay_steps: int = _only_for("exponential", 10_000, "exponential: optimizer steps per factor", ge=1)

    @field_validator("name", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        others = {None: "constant", "none": "constant", "polynomial": "poly", "one-cycle": "onecycle"}
        return others.get(value, value) if isinstance(value, str | None) else value


class AveragingConfig(Section):
    name: Literal["none", "ema", "swa"] = Field(
        default="none",
        description="averaged weights, which are evaluated, saved and exported; ema: moving average, swa: mean of the "
        "last part of the run",
    )
    decay: float = _only_for("ema", 0.999, "share of the average kept per update", gt=0, lt=1)
    warmup: bool = _only_for(
        "ema", True, "a shorter average at the start: the decay of update n is at most (1 + n) / (10 + n)"
    )
    start_share: float = _only_for("swa", 0.75, "share of the run after which averaging begins", ge=0, lt=1)
    every_steps: int = _only_for("ema swa", 1, "update every N optimizer steps", ge=1)


def _workers(value: object) -> object:
    """One message for a value that is neither."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number is None or number == "auto" or (type(number) is int and number >= 0):
        return number
    raise ValueError("it must be `auto` or a number from 0")


class DataConfig(Section):
    data_dir: Path | None = Field(
        default=None, description="folder of the task's data; unset: the task's embedded data"
    )
    download: bool = Field(default=False, description="let the task download its named data set into data_dir")
    num_workers: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"] | None, BeforeValidator(_workers)] = Field(
        default=None,
        description="loader processes per rank; auto: started when the first steps show that they are faster. "
        "Unset: auto",
    )
    prefetch_factor: int | None = Field(
        default=None, ge=1, description="batches in flight per worker; unset: chosen by the plan"
    )
    persistent_workers: bool | None = Field(
        default=None, description="keep workers between epochs; unset: chosen by the plan"
    )
    pin_memory: bool | None = Field(default=None, description="page-locked host memory; unset: on for GPUs")
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop",
        description="a training sample that cannot be read: stop with its error, or leave it out of its batch and "
        "record it in skipped-rank*.jsonl of the run folder",
    )
    sampling: Literal["auto", "uniform", "weighted", "balanced"] = Field(
        default="auto",
        description="uniform: every sample once an epoch; weighted: by the task's weights; balanced: every class "
        "equally often, by the labels; auto: weighted when the task gives weights",
    )
    replacement: bool | None = Field(
        default=None, description="whether a weighted epoch may have a sample several times; unset: yes"
    )
    epoch_samples: int | None = Field(
        default=None, ge=1, description="samples of an epoch; unset: as many as the training set has"
    )
    device: Literal["auto", "host", "gpu"] = Field(
        default="auto",
        description="where arrays in memory (lockstep.ArrayDataset) are during training; auto: on the GPU if they fill "
        "at most a fifth of its free memory, and steps are measured to be no slower",
    )
    bucketing: Switch = Field(
        default="auto",
        description="order samples by length, which reduces padding; auto: on when the task gives lengths",
    )
    bucket_window: int | None = Field(
        default=None,
        ge=1,
        description="samples sorted by length together; more: less padding, less mixing. Unset: up to 4096",
    )
    bucket_block: int | None = Field(
        default=None,
        ge=1,
        description="samples that stay together, at least a global batch; unset: an eighth of the window",
    )


class DistributedConfig(Section):
    backend: Literal["auto", "nccl", "gloo"] = Field(
        default="auto", description="auto: nccl with a GPU per rank, else gloo"
    )
    find_unused_parameters: bool = Field(
        default=False, description="allow parameters that get no gradient in a step (adds a traversal of the graph)"
    )
    sync_batchnorm: Switch = Field(
        default="auto", description="batch statistics over all ranks; auto: on with several ranks"
    )
    bucket_cap_mb: float | None = Field(
        default=None,
        gt=0,
        description="size of a gradient bucket; unset: torch's default, and one for all of a small model on CPUs",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="timeout of a collective operation, in seconds")


class FsdpConfig(Section):
    sharding: Literal["full", "hybrid"] = Field(
        default="full",
        description="full: divided among all ranks; hybrid: among those of a node, the same on every node",
    )
    activation_checkpointing: bool = Field(
        default=False, description="as training.activation_checkpointing, for this strategy alone"
    )
    cpu_offload: bool = Field(
        default=False, description="keep parameters, gradients and optimizer in host memory (GPUs only)"
    )


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="1f1b: alternates forward and backward passes, for fewer activations; gpipe: forward passes first",
    )
    in_process: bool = Field(
        default=False, description="one process, its layers on the selected devices, one after the other"
    )


class ValidationConfig(Section):
    every_epochs: int = Field(default=1, ge=1, description="evaluate every N epochs")
    every_steps: int | None = Field(default=None, ge=1, description="also evaluate every N optimizer steps")
    batch_size: int | None = Field(default=None, ge=1, description="samples per device; unset: training.batch_size")
    sanity_steps: int = Field(default=1, ge=0, description="validation batches before training, to fail early; 0: off")


class CheckpointConfig(Section):
    every_steps: int | None = Field(
        default=None, ge=1, description="save every N optimizer steps, in addition to each epoch's end"
    )
    every_s: float | None = Field(default=None, gt=0, description="save when N seconds have passed since the last save")
    keep_last: int = Field(
        default=2, ge=1, description="how many of the latest checkpoints to keep; the best is always kept"
    )
    monitor: str | None = Field(
        default=None, description="metric that selects the best checkpoint, e.g. val_loss; unset: the task's choice"
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="unset: min for losses and error rates, else max"
    )
    sharded: Switch = Field(
        default="auto",
        description="strategy fsdp: each rank writes its part of the state; auto: if weights and "
        "optimizer state are 0.5 GB or more",
    )


class TelemetryConfig(Section):
    log_interval: int = Field(default=50, ge=1, description="optimizer steps between rows of steps.jsonl")
    tensorboard: Switch = Field(default="auto", description="auto: on when it is installed")
    progress: Annotated[Literal["auto", "bar", "plain", "off", "silent"], BeforeValidator(_switch)] = Field(
        default="auto",
        description="auto: a bar on a terminal and in a notebook, plain lines elsewhere; off: warnings and the "
        "summary only; silent: nothing",
    )
    upload_to: str | None = Field(
        default=None,
        description="copy the run folder to this path or URL (anything that fsspec knows), in the background",
    )
    upload_every_epochs: int = Field(default=1, ge=1, description="upload every N epochs, besides the end of the run")
    system_metrics: bool = Field(
        default=True, description="sample GPUs and host once a second, on each node, to system-<node>.jsonl"
    )
    csv: bool = Field(default=False, description="also write every logged number to logs/metrics.csv")
    wandb: bool = Field(
        default=False, description="also log to Weights & Biases (`pip install 'lockstep-train[wandb]'`)"
    )
    wandb_project: str = Field(default="lockstep", min_length=1, description="the W&B project")
    wandb_mode: Literal["auto", "online", "offline"] = Field(
        default="auto",
        description="offline: only to logs/wandb, for a later `wandb sync`; online needs `wandb login`; "
        "auto: WANDB_MODE, else online",
    )
    mlflow: bool = Field(default=False, description="also log to MLflow (`pip install 'lockstep-train[mlflow]'`)")
    mlflow_uri: str | None = Field(
        default=None,
        description="an MLflow server or store, such as http://host:5000; unset: MLFLOW_TRACKING_URI, else files in "
        "logs/mlruns",
    )
    mlflow_experiment: str = Field(default="lockstep", min_length=1, description="the MLflow experiment")
    forecast: Path | None = Field(
        default=None,
        description="a report of `lockstep forecast`, kept in the run folder: `lockstep show` compares the run with it",
    )
    profile: str | None = Field(
        default=None,
        description="A:B records steps A to B with torch's profiler: a trace and a table in profile/; unset: off",
    )
    profile_ranks: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field(
        default=(0,), description="the ranks that profile records"
    )
    memory_snapshot: bool = Field(
        default=False,
        description="on a GPU, keep a record of allocations and write it to profile/ when memory runs out",
    )
    record_samples: bool = Field(
        default=False, description="record the sample indices of every step (for audits and tests)"
    )

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
    max_restarts: int = Field(
        default=0, ge=0, description="restarts from the latest valid checkpoint after a rank failed"
    )
    stop_grace_s: float = Field(
        default=30.0, gt=0, description="seconds that ranks may take to end after a stop before they are killed"
    )
    hang_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="seconds without progress of any rank (batches, steps, evaluation, saving) after which the run "
        "counts as hanging and ends or restarts; first step, compiling and metrics over all samples may take longer",
    )
    nodes: Annotated[str | None, BeforeValidator(_text_of_number)] = Field(
        default=None,
        pattern=r"^[1-9]\d*(:[1-9]\d*)?$",
        description="number of nodes: 2, or 1:4 for at least one and at most four; unset: this one",
    )
    rdzv: str | None = Field(
        default=None,
        description="rendezvous address: the name of a node that all others can reach, and a port that is free there; "
        "unset: one node",
    )
    join_timeout_s: float = Field(
        default=120.0, gt=0, description="seconds that a node waits for the others to join, or to rejoin"
    )


class LightningConfig(Section):
    profiler: Literal["simple", "advanced", "pytorch"] | None = Field(
        default=None, description="profile Lightning's Trainer (of a LightningModule); the report goes to logs/"
    )


class DebugConfig(Section):
    fast_dev_run: bool = Field(default=False, description="run one training step and one validation batch, as a check")
    overfit_batches: int | None = Field(default=None, ge=1, description="train on N global batches only, repeatedly")
    detect_anomaly: bool = Field(
        default=False, description="torch's anomaly detection: slow, names the operator that produced a NaN"
    )
    limit_eval_batches: int | None = Field(default=None, ge=1, description="evaluate on N batches of each split only")
    start_position: int = Field(default=0, ge=0, description="begin the first epoch after N of its samples")
    switch_off: tuple[Literal["dropout", "batchnorm"], ...] = Field(
        default=(),
        description="train without dropout, or with BatchNorm's running statistics: to find why two runs differ",
    )
    trace: Annotated[Literal["off", "on", "reversed", "shuffled"], BeforeValidator(_switch)] = Field(
        default="off",
        description="record loss, gradient norm, weights, buffers and sample hashes for `lockstep verify`; "
        "reversed and shuffled rearrange each micro-batch, which changes only rounding",
    )


class RunConfig(Section):
    """Everything that makes a run, resolved and frozen; ``config.yaml`` of a run is this object."""

    name: str | None = Field(default=None, max_length=200, description="a label; Lockstep chooses the run's id")
    save_dir: Path | None = Field(default=None, description="the run folder itself; unset: runs_dir/<run id>")
    runs_dir: Path = Field(default=Path("runs"), description="where run folders are made")
    init_from: Path | None = Field(
        default=None,
        description="a run or checkpoint to take the weights from; training starts at step 0. Unset: weights drawn "
        "from the seed",
    )
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
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    lightning: LightningConfig = Field(default_factory=LightningConfig)
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
