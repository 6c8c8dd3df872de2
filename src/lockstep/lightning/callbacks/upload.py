"""Uploads checkpoints and logs to any storage, from rank 0, in the background."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.errors import ConfigError
from lockstep.telemetry.upload import Retry, Uploader


class Upload(Callback):
    """Copies ``local_dir`` to ``target`` every N epochs and at the end; only rank 0, in a background thread.

    Other ranks do not wait, and end when they are done; rank 0 waits for the last copy. A failure is retried,
    then reported as a warning; it never ends the training.

    Args:
        local_dir: for instance the folder of checkpoints and logs; ``None``: the run folder, or in a Trainer of your
            own its ``default_root_dir``.
        target: any path or URL that fsspec knows, such as ``s3://bucket/run``.
        every_n_epochs: how often, besides the end.
        retry: how often a file is tried.

    Raises:
        ConfigError: fsspec does not know the target.
    """

    def __init__(
        self,
        local_dir: Path | str | None = None,
        target: str | None = None,
        *,
        every_n_epochs: int = 1,
        retry: Retry | None = None,
    ) -> None:
        if target is None:
            raise ConfigError("Upload has no target", fix="give a path or an address, such as s3://bucket/run")
        self._target, self._every, self._retry = target, every_n_epochs, retry
        if local_dir is not None:
            self.uploader = Uploader(local_dir, target, retry=retry)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(self, "uploader"):
            root = Path(trainer.default_root_dir)
            local_dir = root.parent if (root.parent / "run.json").exists() else root
            self.uploader = Uploader(local_dir, self._target, retry=self._retry)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the start of the next one: an epoch's checkpoint is written after most callbacks have heard of its end.
        if trainer.is_global_zero and trainer.current_epoch and trainer.current_epoch % self._every == 0:
            self.uploader.request()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:
            self.uploader.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The last hook: no rank is in a collective call.
        if trainer.is_global_zero and stage == "fit":
            self.uploader.close()
