"""Private names of Lightning's command line."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class OpenCLI(LightningCLI):
    """``LightningCLI`` with public names for the private methods that Lockstep overrides or calls."""

    def read_checkpoint_settings(self) -> None:
        """Take the model's arguments from the hyper-parameters of ``--ckpt_path``."""
        super()._parse_ckpt_path()

    def run_subcommand(self, subcommand: str) -> None:
        super()._run_subcommand(subcommand)

    def setting(self, name: str, *, instantiated: bool = False) -> Any:
        """Return the value of the subcommand's setting; ``instantiated``: with objects in place of their arguments."""
        return self._get(self.config_init if instantiated else self.config, name)

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        return self._parser(subcommand)

    def _parse_ckpt_path(self) -> None:
        self.read_checkpoint_settings()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)
