"""The same training with Lockstep: the loss is a sum and a count, and the plan does the rest.

To run it::

    python with_lockstep.py run-1              one process
    python with_lockstep.py run-2 cpu,cpu      two ranks: the same losses and weights
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


if __name__ == "__main__":
    lockstep.train(
        Accumulated(),
        {"optimizer.name": "sgd", "optimizer.momentum": problem.MOMENTUM, "scheduler.name": "constant"},
        save_dir=sys.argv[1],
        devices=sys.argv[2] if sys.argv[2:] else "cpu",
        epochs=problem.EPOCHS,
        batch_size=problem.MICRO_BATCH,
        # The same on any devices: the plan derives the micro-batches of each rank, and prints them.
        global_batch_size=problem.EFFECTIVE_BATCH,
        seed=problem.SEED,
        lr=problem.LEARNING_RATE,
        weight_decay=0.0,
        warmup_epochs=0,
    )
