"""``lockstep lightning``: LightningCLI, whose parser takes the words after the subcommand."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.errors import ConfigError

EPILOGUE = """\
Its flags are those of LightningCLI, and these:
  --hardware.selected_devices LIST   as in `lockstep train --devices`; [cpu, cpu]: two CPU ranks
  --hardware.precision P             32, 16-mixed, bf16-mixed or bf16-true
  --run_dir DIR                      fit: the run folder; default: a new one in runs/

Examples:
  lockstep lightning fit --help                                # every setting
  lockstep lightning fit -c cli_config.yaml
  lockstep lightning fit -c cli_config.yaml --hardware.selected_devices '[gpu:0, gpu:1]'
  lockstep lightning fit -c cli_config.yaml --print_config     # the whole configuration; starts nothing
  lockstep lightning test -c cli_config.yaml --ckpt_path runs/run-1a2b3c4d

Sections of the configuration: model, data, trainer, optimizer, lr_scheduler, and hardware with selected_devices and
precision."""

#: Help texts of the subcommands.
SUBCOMMANDS = {
    "fit": "Train a LightningModule.",
    "validate": "Run it on its validation data.",
    "test": "Run it on its test data.",
    "predict": "Let it predict.",
}

lightning = App(
    name="lightning", usage="Usage: lockstep lightning {fit,validate,test,predict} [OPTIONS]", help_epilogue=EPILOGUE
)


def run(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int:
    """Hand the arguments to LightningCLI; its exit code."""
    try:
        from lockstep.lightning.cli import run as run_lightning
    except ImportError as error:
        raise ConfigError(
            "Lightning is not installed", why=str(error), fix="pip install 'lockstep-train[lightning]'"
        ) from None
    try:
        return run_lightning(arguments, parser_kwargs={"prog": "lockstep lightning"})
    except SystemExit as end:  # after an error or the help of its parser
        return end.code if isinstance(end.code, int) else 1


for _name, _help in SUBCOMMANDS.items():
    lightning.command(partial(run, _name), name=_name, help=_help, help_flags=(), version_flags=())
