"""Lightning's state in Lockstep's checkpoints: hashed, atomic, written beside training, read on any ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.store import Snapshot
from lockstep.engine.state import TrainState

#: What stands for the run's own checkpoints where Lightning wants a path.
OWN = "lockstep"
#: The loops are made again from the run's own state; the types of hyper-parameters would need pickle.
_NOT_KEPT = ("loops", "hparams_type", "datamodule_hparams_type")
#: Where Lightning keeps what ``save_hyperparameters()`` of module and data module took.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
#: What ``load_from_checkpoint`` wants, besides the weights.
_OF_A_FILE = (
    "pytorch-lightning_version",
    "epoch",
    "global_step",
    "hparams_name",
    "datamodule_hparams_name",
    *_HYPER_PARAMETERS,
)
_SCALARS = (bool, int, float, str, type(None))


class StoreIO(TorchCheckpointIO):
    """Saves under :data:`OWN` what ``write`` takes, and loads ``snapshot``; other paths are files, as ever.

    Args:
        write: takes weights and the rest of Lightning's state; called on rank 0.
        restored: the checkpoint to resume from.
        micro_batches: of this epoch that are done, and of one step.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
        restored: Snapshot | None,
        state: TrainState,
        micro_batches: tuple[int, int],
    ) -> None:
        super().__init__()
        self._write, self._restored, self._state = write, restored, state
        self._done, self._per_step = micro_batches
        self.trainer: Trainer | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if path != OWN:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in (*_NOT_KEPT, "state_dict")}
        rest |= {key: plain_values(rest[key]) for key in _HYPER_PARAMETERS if key in rest}
        self._write(checkpoint["state_dict"], rest)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != OWN:
            return super().load_checkpoint(path, *args, **kwargs)
        assert self._restored is not None and self.trainer is not None
        rest = deepcopy(self._restored.trainer["lightning"])
        loops = {"fit_loop": self._loops(self.trainer, rest["global_step"])}
        return {**rest, "state_dict": dict(self._restored.model), "loops": loops}

    def _loops(self, trainer: Trainer, global_step: int) -> dict[str, Any]:
        """The progress of the Trainer's loops at the run's epoch and position, for this number of ranks."""
        loops = deepcopy(trainer.fit_loop.state_dict())
        epoch, begun = self._state.epoch, self._state.epoch + (self._state.position > 0)
        set_progress(loops["epoch_progress"], ready=begun, started=begun, processed=epoch, completed=epoch)
        steps = self._done // self._per_step
        total = self._state.step * self._per_step
        set_progress(
            loops["epoch_loop.batch_progress"], **dict.fromkeys(("ready", "started", "processed", "completed"), total)
        )
        for counter in loops["epoch_loop.batch_progress"]["current"]:
            loops["epoch_loop.batch_progress"]["current"][counter] = self._done
        loops["epoch_loop.state_dict"][STEPPED] = self._state.step
        automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
        for progress in (automatic, manual):
            set_progress(progress, ready=global_step, completed=global_step)
            progress["current"] = dict.fromkeys(progress["current"], steps)
        return loops


def plain_values(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, text, or lists, tuples and mappings of such: what is read again without pickle."""
    return {str(name): _plain(value) for name, value in hyper_parameters.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(type(key) in _SCALARS and _is_plain(part) for key, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _SCALARS


def _plain(value: Any) -> Any:
    """With every mapping as a ``dict``."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def checkpoint_file(snapshot: Snapshot) -> dict[str, Any]:
    """A checkpoint of a module's run as ``LightningModule.load_from_checkpoint`` reads one."""
    state = snapshot.trainer["lightning"]
    return {**{key: state[key] for key in _OF_A_FILE if key in state}, "state_dict": dict(snapshot.model)}


def set_progress(progress: dict[str, Any], **counters: int) -> None:
    """Of one of a Trainer's loops, as its checkpoints have it."""
    progress["total"].update(counters)
    progress["current"].update(counters)


def save(trainer: Trainer) -> None:
    """Collective: rank 0 saves Lightning's whole state in the run's checkpoints."""
    trainer.save_checkpoint(OWN, weights_only=False)
