"""The command line: `python -m lightning_trainer {fit,validate,test,predict} -c config/cli_config.yaml`."""

import sys

from src.data.lightning_datamodule import DigitsDataModule
from src.model.lightning_module import AutoencoderModule

from lockstep.errors import LockstepError
from lockstep.lightning.cli import run

if __name__ == "__main__":
    try:
        sys.exit(run(model_class=AutoencoderModule, datamodule_class=DigitsDataModule))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
