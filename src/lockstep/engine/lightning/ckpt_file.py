"""Lightning's own checkpoint files: starting a run from one, writing one, and one clear error for a broken one."""

from __future__ import annotations

import pickle
import stat
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep._compat.lightning import STEPPED
from lockstep.checkpoint.store import Snapshot
from lockstep.engine.resume import restoring
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError
from lockstep.planning import BatchPlan

#: What is of no use without the run: ``load_from_checkpoint`` wants the rest, the module's own entries included.
_OF_THE_RUN = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
_CONNECTOR = "lightning/pytorch/trainer/connectors/checkpoint_connector.py"
_RESTORING = ("resume", "restore", "_restore", "read_checkpoint_settings")
_CLASS_KEYS = ("class_path", "_class_path")
_CLI = ("lightning/pytorch/cli.py", "lockstep/lightning/cli.py")
_LIBRARIES = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "<")
_FIX = "--ckpt_path takes a run's folder, one of its checkpoints, or a file; without it `fit` starts a new training"


def read_file(file: Path, *, weights_only: bool = True) -> Snapshot:
    """The content of a file; ``weights_only``: without running code that is in it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=weights_only)
        return Snapshot(content["global_step"], content.pop("state_dict"), {"lightning": content}, {})
    except Exception as error:  # whatever is wrong with the file
        raise _told(file, error) from error


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
    kept = {key: value for key, value in state.items() if key not in _OF_THE_RUN}
    return {**kept, "state_dict": dict(snapshot.model)}


def check_is_file(path: object) -> None:
    """Raises :class:`CheckpointError` for a file whose reading would never end: a named pipe, a device."""
    if not isinstance(path, str | Path):
        return
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # an address, one of Lightning's words, or nothing: Lightning says so
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is not a checkpoint", why="it is not a regular file", fix=_FIX)


def refuse_other_classes(path: object, config: Any) -> None:
    """A checkpoint's hyperparameters may name classes, which LightningCLI would import: those of ``config`` only.

    Raises:
        CheckpointError: it names another one.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return
    content = torch.load(path, weights_only=True, map_location="cpu")
    named = set(_classes(content.get("hyper_parameters") if isinstance(content, dict) else None))
    others = named - set(_classes(config))
    if others:
        raise CheckpointError(
            f"{path} names a class that the configuration does not name: {sorted(others)[0][:200]}",
            why="its hyperparameters would have it imported, and code of others run",
            fix="if you trust it, name the class as model.class_path, or add --weights_only false",
        )


def _classes(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key in _CLASS_KEYS:
                yield str(value)
            yield from _classes(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _classes(value)


@contextmanager
def told_clearly(path: object) -> Iterator[None]:
    """What torch or Lightning raises over the content of a checkpoint becomes a :class:`CheckpointError`.

    An error of the user's own hooks stays what it is, and so does one of the training.
    """
    try:
        yield
    except Exception as error:
        if path is None or not _is_about_loading(error):
            raise
        raise _told(path, error) from error


def _is_about_loading(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    loads = any(at.filename.endswith((_CONNECTOR, *_CLI)) and at.name.startswith(_RESTORING) for at in frames)
    last = frames[-1].filename
    return loads and ("site-packages" in last or last.startswith(_LIBRARIES))


def _told(path: object, error: Exception) -> CheckpointError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    fix = _FIX
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        lines = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines
        fix = "if you trust whoever made it, add --weights_only false: it may then run code; else " + _FIX
    why = f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__
    return CheckpointError(f"cannot load {path}", why=why, fix=fix)
