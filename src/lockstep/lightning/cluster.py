"""Lightning's Trainer among ranks that Lockstep has started: their numbers, devices and process group.

Imported only where a Trainer is made, since it imports Lightning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import distributed
from torch.distributed import ReduceOp

from lockstep._compat.lightning import LaunchedDdp
from lockstep._compat.lightning_results import agree_on_names, end_names, evaluation_samplers
from lockstep._compat.torchmetrics import unequal_lists
from lockstep.config.sections import DistributedConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.fingerprint import check_same_data
from lockstep.engine.runtime import rank_device
from lockstep.engine.task import Datasets
from lockstep.errors import UnsupportedError, many
from lockstep.hardware.world import World
from lockstep.lightning.dataloaders import SharedBatches


class RankedDdp(LaunchedDdp):
    """Lightning's DDP in a process group that exists, for ranks with different numbers of evaluation batches.

    Evaluation goes past the DDP wrapper, whose forward may broadcast buffers; they are broadcast once, when
    validation begins.
    """

    #: Whether an evaluation step is running.
    _in_batch = False

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers, as DDP does before each forward pass of training."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            distributed.broadcast(buffer, 0)

    def pre_backward(self, closure_loss: Any) -> None:
        """Agree on the logged names before ranks exchange gradients; the rest as Lightning's."""
        assert self.lightning_module is not None
        end_names(self.lightning_module.trainer)
        super().pre_backward(closure_loss)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._in_batch = True
        try:
            with self.precision_plugin.val_step_context():
                return self.lightning_module.validation_step(*args, **kwargs)
        finally:
            self._in_batch = False

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather as Lightning's does, but not in an evaluation step that some ranks make once more than others."""
        if self._in_batch:
            check_even(self.lightning_module.trainer)  # type: ignore[union-attr]
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce as Lightning's does, but do not round the mean of whole numbers down.

        ``self.log(…, sync_dist=True)`` divides by the mean of the ranks' samples: for 3 and 2 that is 2.5, not 2.
        """
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def check_loaders(collectives: Collectives, *, train: Any = None, val: Any = None) -> None:
    """Raise :class:`DataError` where a rank's loader has other data than that of rank 0. Collective."""
    train, val = (getattr(loader, "dataset", None) for loader in (train, val))
    if all(dataset is None or isinstance(dataset, Sized) for dataset in (train, val)):
        check_same_data(Datasets(train=train, val=val), collectives)


@contextmanager
def agreed_logging(trainer: Trainer) -> Iterator[None]:
    """Allow ranks of ``trainer`` to log other names, and to have list states of other lengths, in the body."""
    if trainer.world_size == 1:
        yield
        return
    agree_on_names(trainer)
    with unequal_lists():
        yield


def check_even(trainer: Trainer) -> None:
    """Raise :class:`UnsupportedError` where some ranks evaluate a batch more than others."""
    for sampler in evaluation_samplers(trainer):
        if isinstance(sampler, SharedBatches) and not sampler.is_even:
            raise UnsupportedError(
                "self.all_gather() in an evaluation step needs the same number of batches on every rank",
                why=f"the loader's batches do not divide by {many(trainer.world_size, 'rank')}, so some have one more",
                fix="gather in on_validation_epoch_end(); or choose a batch_size that gives a multiple of that number",
            )


class RankEnvironment(LightningEnvironment):
    """Declares that the ranks exist already, so that Lightning starts none and does not run the caller again."""

    creates_processes_externally = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.set_world_size(world.size)
        self.set_global_rank(world.rank)

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node_rank

    def teardown(self) -> None:
        """Leave the process's variables alone."""


def planned_strategy(devices: tuple[str, ...], ranks: int) -> Strategy:
    """Return the strategy that a Trainer on ``ranks`` of these devices has, not set up."""
    used = [torch.device(name.replace("gpu", "cuda")) for name in devices]
    return RankedDdp(parallel_devices=used) if ranks > 1 else SingleDeviceStrategy(device=used[0])


def rank_arguments(
    placement: Mapping[str, Any], world: World, distributed: DistributedConfig | None = None
) -> dict[str, Any]:
    """Return a ``Trainer``'s arguments for this rank: accelerator, devices, strategy, nodes, precision, cluster.

    Args:
        placement: :meth:`.Placement.as_dict`.
    """
    ranks = [World(local_rank=rank, local_size=world.local_size) for rank in range(world.local_size)]
    devices = [rank_device(tuple(placement["devices"]), rank) for rank in ranks]
    environment = RankEnvironment(world)
    distributed = distributed or DistributedConfig()
    on_cpu = devices[0].type == "cpu"
    strategy: RankedDdp | str = "auto"
    if world.size > 1:
        strategy = RankedDdp(
            parallel_devices=devices,
            cluster_environment=environment,
            process_group_backend=placement["backend"],
            timeout=timedelta(seconds=distributed.timeout_s),
            find_unused_parameters=distributed.find_unused_parameters,
            bucket_cap_mb=distributed.bucket_cap_mb,
        )
    precision = placement["precision"]
    if precision == "16-mixed" and on_cpu:
        precision = "bf16-mixed"  # as Lightning would, with a warning; the plan says so
    return {
        "accelerator": "cpu" if on_cpu else "cuda",
        # A GPU that carries two ranks is named once here; the strategy knows the device of each rank.
        "devices": len(devices) if on_cpu else sorted({device.index for device in devices}),
        "num_nodes": world.nodes,
        "precision": "32-true" if precision == "32" else precision,
        "strategy": strategy,
        "plugins": [environment] if strategy == "auto" else [],
        "use_distributed_sampler": False,
    }


@contextmanager
def quiet_trainer() -> Iterator[None]:
    """Suppress Lightning's informational messages: the plan shows the devices, and rank 0 reports through the sinks.

    Also suppressed are warnings about Lightning's use of deprecated functions of torch, about resuming and SLURM,
    which Lockstep handles, about an optimizer of LightningCLI's configuration in place of the module's, and about
    loaders without indices: their rows are numbered.
    """
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    before = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    for logger, _ in before:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*LeafSpec.*",
                ".*dataloader is.*not resumable.*",
                ".*than the logging interval.*",
                "The `srun` command is available.*",
                "Couldn't infer the batch indices.*",
                ".*configure_optimizers` will be overridden.*",
            ):
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
