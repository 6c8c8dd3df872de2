"""Lightning's state in the checkpoints of a run, and such a checkpoint as Lightning reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.content import saveable
from lockstep.checkpoint.store import Snapshot
from lockstep.checkpoint.writer import HostBuffers
from lockstep.engine.run_log import RunLog
from lockstep.errors import CheckpointError
from lockstep.lightning.dataloaders import used_batches
from lockstep.lightning.run_callback import KEPT_STATE, RUN_CHECKPOINTS
from lockstep.planning import BatchPlan

#: Entries of no use without the run: ``load_from_checkpoint`` reads the rest, and entries of the module.
_OF_THE_RUN = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
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
        batch: BatchPlan,
        log: RunLog,
        snapshot: Snapshot | None,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._batch = batch
        self._log = log
        self._snapshot = snapshot
        self._write = write
        self.trainer: Trainer | None = None
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
        if dropped:
            text = "Not in the checkpoints, since only unpickling code could read it again"
            rest_of_text = "A resume calls on_load_checkpoint without it."
            self._log.note_once("not_saved", f"{text}: {', '.join(dropped)}. {rest_of_text}")
        self._write(checkpoint["state_dict"], {**saved, **needed})

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != RUN_CHECKPOINTS:
            return super().load_checkpoint(path, *args, **kwargs)
        assert self._snapshot is not None and self.trainer is not None
        rest = deepcopy(self._snapshot.trainer["lightning"])
        loops = {"fit_loop": self._loops(self.trainer, rest["global_step"])}
        return {**rest, "state_dict": dict(self._snapshot.model), "loops": loops}

    def _loops(self, trainer: Trainer, global_step: int) -> dict[str, Any]:
        """Return the progress of the Trainer's loops at the run's epoch and position, for this number of ranks."""
        state = self._log.state
        batch = self._batch
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
    """Set the progress of one of a Trainer's loops, as its checkpoints have it."""
    progress["total"].update(counters)
    progress["current"].update(counters)


def as_file(snapshot: Snapshot) -> dict[str, Any]:
    """Convert a checkpoint of a module's run to the form that ``LightningModule.load_from_checkpoint`` reads."""
    state = snapshot.trainer["lightning"]
    entries = {key: value for key, value in state.items() if key not in _OF_THE_RUN}
    return {**entries, "state_dict": dict(snapshot.model)}


def check_classes(content: Mapping[str, Any], config: Any) -> None:
    """Refuse hyper-parameters that name classes which ``config`` does not name: LightningCLI would import them.

    Raises:
        CheckpointError: they name another class.
    """
    unnamed = set(_classes(content.get("hyper_parameters"))) - set(_classes(config))
    if unnamed:
        raise CheckpointError(
            f"the checkpoint names a class that the configuration does not name: {min(unnamed)[:200]}",
            why="its hyper-parameters would have it imported, and code of others run",
            fix="if you trust it, name the class as model.class_path",
        )


def _classes(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        yield from (str(value) for key, value in values.items() if key in ("class_path", "_class_path"))
        values = list(values.values())
    for value in values if isinstance(values, list | tuple) else ():
        yield from _classes(value)


@contextmanager
def module_fits(run: Path) -> Iterator[None]:
    """Raise :class:`CheckpointError` where the weights of ``run`` do not fit the module that a Trainer restores."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        lines = [line.strip()[:300] for line in str(error).splitlines()[1:2]]
        fix = "name the module, and its arguments, with which the run was trained"
        raise CheckpointError(f"the weights of {run} do not fit the module", why=" ".join(lines), fix=fix) from error
