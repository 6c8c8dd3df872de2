"""The same as a Task: `python with_lockstep.py [RESULT [cpu,cpu]]`."""

import sys

import problem
import torch
from torch.nn import functional as F

import lockstep


class Digits(lockstep.Task):
    def datasets(self):
        return lockstep.Datasets(train=problem.dataset())

    def model(self):
        return problem.model()

    def loss(self, model, batch):
        data, target = batch
        return lockstep.Loss(F.cross_entropy(model(data), target, reduction="sum"), len(data))

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=problem.LEARNING_RATE)


run = lockstep.train(
    Digits(),
    {"scheduler.name": "constant"},
    devices=sys.argv[2] if sys.argv[2:] else "cpu",
    epochs=problem.EPOCHS,
    global_batch_size=problem.BATCH_SIZE,
    seed=problem.SEED,
    max_grad_norm=None,
    warmup_epochs=0,
)
problem.report([row["train_loss"] for row in run.history])
