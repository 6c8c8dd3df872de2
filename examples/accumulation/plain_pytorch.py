"""Gradient accumulation with DistributedDataParallel, by hand.

To run it::

    python plain_pytorch.py [RESULT.pt]                          one process
    torchrun --nproc_per_node=2 plain_pytorch.py [RESULT.pt]     two ranks: the same losses and weights
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from problem import EFFECTIVE_BATCH, EPOCHS, LEARNING_RATE, MICRO_BATCH, MOMENTUM, SEED, data, model, order
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_with_accumulation(ddp: DistributedDataParallel) -> list[dict]:
    """Train for ``EPOCHS``; one row an epoch: mean loss, optimizer steps, and their effective batch sizes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, labels = data()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    history = []
    for epoch in range(EPOCHS):
        # A window is what one optimizer step sees. The last one of an epoch is short: it is stepped all the
        # same, or its gradients would leak into the next epoch.
        windows = order(epoch).split(EFFECTIVE_BATCH)
        epoch_loss = torch.zeros((), dtype=torch.float64)
        for window in windows:
            # A rank without samples gets one empty micro-batch: it must take part in the all-reduce, too.
            micro_batches = window[rank::ranks].split(MICRO_BATCH)
            for number, part in enumerate(micro_batches, 1):
                # The forward belongs inside no_sync(): that is where DDP decides whether backward will reduce.
                with nullcontext() if number == len(micro_batches) else ddp.no_sync():
                    loss = nn.functional.cross_entropy(ddp(inputs[part]), labels[part], reduction="sum")
                    # Σ loss / Σ count of the whole window. Dividing means by the number of micro-batches would
                    # be wrong for every short one. DDP divides by the number of ranks; take that back.
                    (loss * ranks / len(window)).backward()
                epoch_loss += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(epoch_loss)
        sizes = [len(window) for window in windows]
        history.append({"loss": epoch_loss.item() / sum(sizes), "steps": len(sizes), "effective_batch": sizes})
    return history


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(SEED)
    ddp = DistributedDataParallel(model())
    history = train_with_accumulation(ddp)
    if dist.get_rank() == 0:
        for epoch, row in enumerate(history, 1):
            print(f"epoch {epoch}: loss {row['loss']:.6f}, {row['steps']} steps of {row['effective_batch']} samples")
        if sys.argv[1:]:
            torch.save({"losses": [row["loss"] for row in history], "weights": ddp.module.state_dict()}, sys.argv[1])
    dist.barrier()  # gloo may abort a process that ends while another one is still in the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
