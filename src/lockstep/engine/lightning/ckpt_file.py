"""Lightning's own checkpoint files: starting a run from one, and writing one of a run's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.store import Snapshot
from lockstep.engine.resume import restoring
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError
from lockstep.planning import BatchPlan

#: What ``load_from_checkpoint`` wants, besides the weights.
_OF_A_FILE = (
    *("pytorch-lightning_version", "epoch", "global_step", "hparams_name", "datamodule_hparams_name"),
    *("hyper_parameters", "datamodule_hyper_parameters"),
)


def read_file(file: Path, *, weights_only: bool = True) -> Snapshot:
    """The content of a file; ``weights_only``: without running code that is in it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=weights_only)
        return Snapshot(content["global_step"], content.pop("state_dict"), {"lightning": content}, {})
    except Exception as error:  # whatever is wrong with the file
        raise CheckpointError(
            f"cannot load {file}",
            why=f"{type(error).__name__}: {str(error).strip()[:300]}",
            fix="choose another checkpoint; if it has other objects than tensors and you trust it, use "
            "`lockstep lightning … --ckpt_path FILE --weights_only false`, which may run code of the file",
        ) from error


def imported_state(snapshot: Snapshot, batch: BatchPlan, source: Path) -> TrainState:
    """Where the training of a file stood, in the order of this run.

    Raises:
        CheckpointError: the file does not say it, or it stood in mid-epoch at another global batch.
    """
    with restoring(source):
        content = snapshot.trainer["lightning"]
        loops = content.pop("loops")["fit_loop"]
        callbacks = content.get("callbacks") or {}
        # The latter: written by `lockstep lightning fit` until it had checkpoints as other runs have.
        order = callbacks.pop("RunLogCallback", None) or callbacks.pop("TrainingOrder", None)
        if order:
            epoch, position, global_batch = (int(order[name]) for name in ("epoch", "position", "global_batch"))
            if position and global_batch != batch.global_batch:
                raise CheckpointError(
                    f"{source} was saved in mid-epoch at a global batch of {global_batch}, "
                    f"and it is {batch.global_batch} now",
                    fix="train on as many devices as before",
                )
        else:
            epochs, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
            done = 0 if batches["is_last_batch"] else batches["current"]["completed"]
            # An epoch that max_steps ended counts as completed there.
            epoch, position = int(epochs["ready"]) - (done > 0), done // batch.accumulate * batch.global_batch
        if batch.window(position) is None:
            epoch, position = epoch + 1, 0
        step = int(loops["epoch_loop.state_dict"].get(STEPPED, snapshot.step))
        seen = epoch * batch.samples + position
        return TrainState(step, step * batch.accumulate, epoch, position, seen)


def as_file(snapshot: Snapshot) -> dict[str, Any]:
    """A checkpoint of a module's run as ``LightningModule.load_from_checkpoint`` reads one."""
    state = snapshot.trainer["lightning"]
    return {**{key: state[key] for key in _OF_A_FILE if key in state}, "state_dict": dict(snapshot.model)}
