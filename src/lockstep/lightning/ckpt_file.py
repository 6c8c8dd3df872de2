"""Lightning's state in the checkpoints of a run, and checkpoint files of Lightning; one error for broken ones."""

from __future__ import annotations

import pickle
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.content import saveable
from lockstep.checkpoint.store import Snapshot
from lockstep.checkpoint.writer import HostBuffers
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import restoring
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError, LockstepError
from lockstep.lightning.dataloaders import used_batches
from lockstep.lightning.run_callback import KEPT_STATE, RUN_CHECKPOINTS
from lockstep.planning import BatchPlan

#: Entries of no use without the run: ``load_from_checkpoint`` reads the rest, and entries of the module.
_OF_THE_RUN = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
_FIX = "--ckpt_path takes a run's folder, one of its checkpoints, or a file; without it `fit` starts a new training"
#: Where errors about a file's content are raised: never in the user's code.
_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), str(Path(torch.__file__).parents[1]), "<")
_CONNECTOR = "trainer/connectors/checkpoint_connector.py"
_RESTORING = ("resume", "restore", "_restore")
#: The loops are made again from the state of the run; the types of hyper-parameters would need pickle.
_NOT_KEPT = ("loops", "hparams_type", "datamodule_hparams_type", "state_dict")
#: Without them a resumed training would be another one: an error, if they cannot be saved.
_OPTIMIZERS = ("optimizer_states", "lr_schedulers")
#: Where Lightning keeps what ``save_hyperparameters()`` of module and data module took.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class StoreIO(TorchCheckpointIO):
    """Saves under :data:`RUN_CHECKPOINTS` to the run's checkpoints, and loads that of the run; other paths are files.

    ``write`` takes weights and the rest of Lightning's state; called on rank 0.
    """

    def __init__(
        self,
        rank: RankContext,
        state: TrainState,
        snapshot: Snapshot | None,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._rank = rank
        self._state = state
        self._snapshot = snapshot
        self._write = write
        self.trainer: Trainer | None = None
        self._warned = False
        self._kept: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if path == KEPT_STATE:
            self._kept = HostBuffers().copy(checkpoint)
            return
        if path != RUN_CHECKPOINTS:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        checkpoint = self._kept or checkpoint
        rest = {key: value for key, value in checkpoint.items() if key not in _NOT_KEPT}
        # What module and callbacks add may be any object. The module has its hyper-parameters already: no warning.
        parts = {key: rest.pop(key) for key in (*_HYPER_PARAMETERS, "callbacks") if key in rest}
        needed = {key: rest.pop(key) for key in _OPTIMIZERS if key in rest}
        saved, dropped = saveable(rest)
        for key, part in parts.items():
            saved[key], within = saveable(part)
            dropped += within if key == "callbacks" else []
        if dropped and not self._warned:
            self._warned = True
            text = "Not in the checkpoints, since only unpickling code could read it again"
            rest_of_text = "A resume calls on_load_checkpoint without it."
            self._rank.note("not_saved", f"{text}: {', '.join(dropped)}. {rest_of_text}", "warning")
        self._write(checkpoint["state_dict"], {**saved, **needed})

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != RUN_CHECKPOINTS:
            return super().load_checkpoint(path, *args, **kwargs)
        assert self._snapshot is not None and self.trainer is not None
        rest = deepcopy(self._snapshot.trainer["lightning"])
        loops = {"fit_loop": self._loops(self.trainer, rest["global_step"])}
        return {**rest, "state_dict": dict(self._snapshot.model), "loops": loops}

    def _loops(self, trainer: Trainer, global_step: int) -> dict[str, Any]:
        """The progress of the Trainer's loops at the run's epoch and position, for this number of ranks."""
        state = self._state
        batch = self._rank.plan.batch
        loops = deepcopy(trainer.fit_loop.state_dict())
        started_epochs = state.epoch + (state.position > 0)
        set_progress(
            loops["epoch_progress"],
            ready=started_epochs,
            started=started_epochs,
            processed=state.epoch,
            completed=state.epoch,
        )
        done = used_batches(state, batch)
        progress = loops["epoch_loop.batch_progress"]
        batches = state.step * batch.accumulate
        set_progress(progress, ready=batches, started=batches, processed=batches, completed=batches)
        progress["current"] = dict.fromkeys(progress["current"], done)
        loops["epoch_loop.state_dict"][STEPPED] = state.step
        automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
        for progress in (automatic, manual):
            set_progress(progress, ready=global_step, completed=global_step)
            progress["current"] = dict.fromkeys(progress["current"], done // batch.accumulate)
        return loops


def set_progress(progress: dict[str, Any], **counters: int) -> None:
    """Of one of a Trainer's loops, as its checkpoints have it."""
    progress["total"].update(counters)
    progress["current"].update(counters)


def read_file(file: Path, *, weights_only: bool = True) -> Snapshot:
    """The content of a file; ``weights_only``: without running code that is in it. Raises :class:`CheckpointError`."""
    with cannot_load(file):
        content = torch.load(file, map_location="cpu", weights_only=weights_only)
        return Snapshot(content["global_step"], content.pop("state_dict"), {"lightning": content}, {})


def imported_state(snapshot: Snapshot, batch: BatchPlan, source: Path) -> TrainState:
    """Where the training of a file stood, in the order of this run.

    Raises :class:`CheckpointError` if the file does not say it, or it stood in mid-epoch at another global batch.
    """
    with restoring(source):
        content = snapshot.trainer["lightning"]
        loops = content.pop("loops")["fit_loop"]
        callbacks = content.get("callbacks") or {}
        order = callbacks.pop("RunLogCallback", None)
        if order:
            epoch, position, global_batch = (int(order[name]) for name in ("epoch", "position", "global_batch"))
            if position and global_batch != batch.global_batch:
                raise CheckpointError(
                    f"{source} was saved in mid-epoch at a global batch of {global_batch}, "
                    f"and it is {batch.global_batch} now",
                    fix="train on as many devices as before",
                )
        else:
            epochs = loops["epoch_progress"]["current"]
            batches = loops["epoch_loop.batch_progress"]
            done = 0 if batches["is_last_batch"] else batches["current"]["completed"]
            # An epoch that max_steps ended counts as completed there.
            epoch = int(epochs["ready"]) - (done > 0)
            position = done // batch.accumulate * batch.global_batch
        if batch.window(position) is None:
            epoch = epoch + 1
            position = 0
        step = int(loops["epoch_loop.state_dict"].get(STEPPED, snapshot.step))
        return TrainState(step, step * batch.accumulate, epoch, position, epoch * batch.samples + position)


def as_file(snapshot: Snapshot) -> dict[str, Any]:
    """A checkpoint of a module's run as ``LightningModule.load_from_checkpoint`` reads one."""
    state = snapshot.trainer["lightning"]
    entries = {key: value for key, value in state.items() if key not in _OF_THE_RUN}
    return {**entries, "state_dict": dict(snapshot.model)}


def check_file(path: object, config: Any) -> None:
    """Refuse a file whose reading would never end (a named pipe, a device), or would run code of others.

    Its hyperparameters may name classes, which LightningCLI would import: those of ``config`` only; ``None``: any.
    Addresses, folders and Lightning's words pass.
    """
    if not isinstance(path, str | Path) or not Path(path).exists() or Path(path).is_dir():
        return
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is not a checkpoint", why="it is not a regular file", fix=_FIX)
    if config is None:
        return
    content = torch.load(path, weights_only=True, map_location="cpu")
    named = set(_classes(content.get("hyper_parameters") if isinstance(content, dict) else None))
    unnamed = named - set(_classes(config))
    if unnamed:
        raise CheckpointError(
            f"{path} names a class that the configuration does not name: {min(unnamed)[:200]}",
            why="its hyperparameters would have it imported, and code of others run",
            fix="if you trust it, name the class as model.class_path, or add --weights_only false",
        )


def _classes(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        yield from (str(value) for key, value in values.items() if key in ("class_path", "_class_path"))
        values = list(values.values())
    for value in values if isinstance(values, list | tuple) else ():
        yield from _classes(value)


@contextmanager
def cannot_load(path: object) -> Iterator[None]:
    """Raise errors of the body over the content of a checkpoint as :class:`CheckpointError`."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:  # of any class, by the file's content
        lines = [line for line in str(error).splitlines() if line.strip()]
        fix = _FIX
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
            lines = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines
            fix = "if you trust whoever made it, add --weights_only false: it may then run code; else " + _FIX
        reason = ": ".join([type(error).__name__, *(line.strip()[:300] for line in lines[:1])])
        raise CheckpointError(f"cannot load {path}", why=reason, fix=fix) from error


@contextmanager
def trainer_loads(path: object) -> Iterator[None]:
    """As :func:`cannot_load` for a Trainer that restores ``path`` in the body; other errors are raised unchanged."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        restores = any(at.filename.endswith(_CONNECTOR) and at.name.startswith(_RESTORING) for at in frames)
        if path is None or not restores or not frames[-1].filename.startswith(_LIBRARIES):
            raise  # of the training, or of the user's hooks
        with cannot_load(path):
            raise
