"""The same training with Lockstep: the loss is a sum and a count, and the plan does the rest.

python with_lockstep.py RUN_FOLDER              one process
python with_lockstep.py RUN_FOLDER cpu,cpu      two ranks: the same losses and weights
"""

import sys

import problem
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Accumulated(lockstep.Task):
    def datasets(self):
        return lockstep.Datasets(train=TensorDataset(*problem.data()))

    def model(self):
        return problem.model()

    def loss(self, model, batch):
        inputs, labels = batch
        return lockstep.Loss(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


def settings(run_folder: str, devices: str) -> dict:
    return {
        "save_dir": run_folder,
        "hardware": {"selected_devices": devices.split(",")},
        "training": {
            "epochs": problem.EPOCHS,
            "batch_size": problem.MICRO_BATCH,
            # Held on any devices: the plan derives the micro-batches of each rank, and prints them.
            "global_batch_size": problem.EFFECTIVE_BATCH,
            "seed": problem.SEED,
        },
        "optimizer": {"name": "sgd", "lr": problem.LEARNING_RATE, "momentum": problem.MOMENTUM, "weight_decay": 0.0},
        "scheduler": {"name": "constant", "warmup_epochs": 0},
    }


if __name__ == "__main__":
    lockstep.train(Accumulated(), settings(sys.argv[1], sys.argv[2] if sys.argv[2:] else "cpu"))
