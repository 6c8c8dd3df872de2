"""What `lockstep audit` can find: stable codes, their severity, meaning and fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


class Kind(NamedTuple):
    """A kind of finding: ``meaning`` for the reference, ``fix`` names the call."""

    severity: Severity
    meaning: str
    fix: str


CODES: dict[str, Kind] = {
    "AUDIT_NO_SAMPLER": Kind(
        "error",
        "every rank reads all samples, so an epoch trains on each of them once per rank",
        "DataLoader(dataset, sampler=DistributedSampler(dataset)), or the prepare call of the framework",
    ),
    "AUDIT_DROPPED": Kind(
        "warning",
        "samples are read by no rank",
        "divide with DistributedSampler(dataset, drop_last=False)",
    ),
    "AUDIT_REPEATED": Kind(
        "warning",
        "samples are read more than once in an epoch, beyond the padding of a sampler",
        "divide with DistributedSampler(dataset), or dataset indices rank::world_size",
    ),
    "AUDIT_PADDED": Kind(
        "note",
        "the sampler repeats samples so that all ranks have equally many",
        "DistributedSampler(drop_last=True), or a data set whose size the ranks divide",
    ),
    "AUDIT_SAME_ORDER": Kind(
        "warning",
        "shuffled samples have the same order in every epoch",
        "sampler.set_epoch(epoch) before each epoch's loop",
    ),
    "AUDIT_SPLIT_DIFFERS": Kind(
        "error",
        "ranks have different parts of a split data set, so some train on the samples that others evaluate",
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))",
    ),
    "AUDIT_RANKS_DRAW_ALIKE": Kind(
        "warning",
        "ranks draw the same random numbers for different samples",
        "torch.manual_seed(seed + rank) (random, numpy.random alike) before the data loader is made",
    ),
    "AUDIT_WORKERS_DRAW_ALIKE": Kind(
        "warning",
        "workers of a data loader draw the same random numbers for different samples",
        "seed with torch.initial_seed() % 2**32 in worker_init_fn",
    ),
    "AUDIT_EPOCHS_DRAW_ALIKE": Kind(
        "warning",
        "samples get the same random numbers in every epoch",
        "seed with torch.initial_seed() % 2**32 in worker_init_fn, or once before the first epoch",
    ),
    "AUDIT_MEAN_OF_MEANS": Kind(
        "warning",
        "ranks or micro-batches of unequal counts weigh the same in the gradient",
        "sum the loss, all_reduce the count of the step, backward on loss_sum * world_size / count",
    ),
    "AUDIT_SHORT_WINDOW": Kind(
        "warning",
        "an accumulation window with fewer micro-batches is divided as if it were complete",
        "divide the loss by the micro-batches of this window, not by accumulation_steps",
    ),
    "AUDIT_NOT_DIVIDED": Kind(
        "warning",
        "gradients are summed over micro-batches or ranks and never divided",
        "loss = loss / accumulation_steps before backward; grad /= world_size after all_reduce",
    ),
    "AUDIT_DIVIDED_TWICE": Kind(
        "error",
        "gradients are divided twice by the number of ranks or micro-batches",
        "leave out the script's division: DistributedDataParallel averages over ranks, accelerator.backward divides by "
        "gradient_accumulation_steps",
    ),
    "AUDIT_NO_SYNC": Kind(
        "error",
        "no_sync() covers the last micro-batch of a step, so its gradients are not reduced",
        "leave no_sync() for the micro-batch before optimizer.step()",
    ),
    "AUDIT_SYNC_EACH": Kind(
        "note",
        "gradients are reduced after each micro-batch of an accumulation window: slower, same result",
        "with model.no_sync(): for all micro-batches of a step but the last",
    ),
    "AUDIT_SCHEDULE": Kind(
        "warning",
        "the learning rate follows another curve over the epochs on several ranks than on one",
        "count the scheduler in optimizer steps of one rank: T_max = epochs * len(loader) after the loader is sharded; "
        "one scheduler.step() per optimizer step",
    ),
    "AUDIT_RATE_SCALED": Kind(
        "note",
        "the first learning rate depends on the number of ranks",
        "nothing if the larger global batch is meant",
    ),
    "AUDIT_ZERO_GRAD": Kind(
        "error",
        "gradients of earlier steps are never cleared",
        "optimizer.zero_grad() after optimizer.step()",
    ),
    "AUDIT_CLIP_SCALED": Kind(
        "error",
        "gradients are clipped while the GradScaler's factor is still in them",
        "scaler.unscale_(optimizer) before clip_grad_norm_",
    ),
    "AUDIT_CLIP_LOCAL": Kind(
        "error",
        "each rank clips its gradients before they are reduced",
        "clip_grad_norm_ after all_reduce, just before optimizer.step()",
    ),
    "AUDIT_INITIAL_WEIGHTS": Kind(
        "error",
        "ranks start from different weights",
        "torch.manual_seed(seed) before the model is made, or dist.broadcast(parameter, 0) before training",
    ),
    "AUDIT_RANKS_PART": Kind(
        "error",
        "weights of the ranks differ after a step, though their gradients are equal",
        "the same learning rate, settings and state of the optimizer on every rank",
    ),
    "AUDIT_NOT_REDUCED": Kind(
        "error",
        "gradients of the ranks differ at optimizer.step(): they were not reduced",
        "wrap the whole model in DistributedDataParallel, or all_reduce every parameter's grad",
    ),
    "AUDIT_BARE_MODULE": Kind(
        "error",
        "the forward pass calls the module inside DistributedDataParallel, so gradients are not reduced",
        "call the wrapped model, not model.module",
    ),
    "AUDIT_BATCHNORM": Kind(
        "note",
        "BatchNorm takes its statistics from one rank's share of the batch",
        "nn.SyncBatchNorm.convert_sync_batchnorm(model) before DistributedDataParallel",
    ),
    "AUDIT_EVAL_MEAN": Kind(
        "warning",
        "a metric of an evaluation is a mean of means of unequal parts",
        "add up loss * count and count over the batches, all_reduce both, divide once",
    ),
    "AUDIT_EVAL_PADDED": Kind(
        "warning",
        "samples that a sampler repeats are counted twice in an evaluation",
        "accelerator.gather_for_metrics(...), or leave out the repeated samples before the metric",
    ),
    "AUDIT_EVAL_LOCAL": Kind(
        "warning",
        "ranks evaluate different samples, and their results are never put together",
        "dist.all_reduce of sum and count, accelerator.gather_for_metrics(...), or self.log(..., sync_dist=True)",
    ),
    "AUDIT_FILE_RACE": Kind(
        "error",
        "several ranks write the same file",
        "if rank == 0: torch.save(...)",
    ),
    "AUDIT_CHECKPOINT": Kind(
        "warning",
        "a checkpoint for resuming lacks the state of the optimizer, the scheduler or the scaler",
        "add optimizer.state_dict(), scheduler.state_dict() and scaler.state_dict() to torch.save",
    ),
    "AUDIT_COLLECTIVE": Kind(
        "error",
        "a collective call that not all ranks make, or make in another order or size",
        "make the same torch.distributed calls on every rank, outside of `if rank == 0`",
    ),
    "AUDIT_ENDS_EARLY": Kind(
        "error",
        "a rank has fewer batches than the others, which wait for it",
        "DistributedSampler, drop_last=True, or `with Join([model]):` around the loop",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A finding with the script's file and line, a sentence with numbers, and the numbers as ``evidence``."""

    code: str
    line: str | None
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        return CODES[self.code].severity

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``code``, ``severity``, ``file``, ``line``, ``message``, ``evidence``, ``fix``."""
        file, _, number = (self.line or "").rpartition(":")
        return {
            "code": self.code,
            "severity": self.severity,
            "file": file or None,
            "line": int(number) if number else None,
            "message": self.message,
            "evidence": dict(self.evidence),
            "fix": CODES[self.code].fix,
        }
