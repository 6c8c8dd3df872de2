"""Trains the module from Python: `python lightning_train.py [CONFIG]`. No main guard is needed, on any devices."""

import sys
from pathlib import Path

import yaml
from lightning import seed_everything
from src.data.lightning_datamodule import DigitsDataModule
from src.model.lightning_module import AutoencoderModule
from src.model.lightning_picture import ReconstructionPicture

from lockstep.lightning import fit
from lockstep.lightning.callbacks import Upload

config = yaml.safe_load(Path(sys.argv[1] if sys.argv[1:] else "config/config.yaml").read_text())
seed_everything(config["seed"], workers=True)
result = fit(
    AutoencoderModule(**config["model"]),
    DigitsDataModule(seed=config["seed"], **config["data"]),
    hardware=config["hardware"],
    config={
        "runs_dir": config["runs_dir"],
        "training": {**config["training"], "seed": config["seed"]},
    },
    trainer={"callbacks": [ReconstructionPicture(), Upload(target=config["upload_to"])]},
)
print(f"{result.run_dir}: best epoch {result.best_epoch}: {result.best_metric}")
