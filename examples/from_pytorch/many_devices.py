"""The same on many devices, by hand: `torchrun --nproc_per_node=2 many_devices.py`."""

import os

import problem
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    rank, ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")  # not RANK: a second node counts anew
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(problem.SEED)  # the same parameters everywhere
    ddp = DistributedDataParallel(problem.model().to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=problem.LEARNING_RATE)

    losses = []
    for epoch in range(problem.EPOCHS):
        sums = torch.zeros(2, device=device, dtype=torch.float64)  # loss, samples
        batches = problem.batches(epoch)
        # Every rank takes its part of every batch: the batch, and so the learning rate, stay what they were.
        own = DataLoader(problem.dataset(), batch_sampler=[batch[rank::ranks] for batch in batches])
        for (data, target), batch in zip(own, batches, strict=True):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            total = F.cross_entropy(ddp(data), target, reduction="sum")
            # DDP averages over ranks; the gradient is to be the mean over the batch, also where parts differ in size.
            (total * ranks / len(batch)).backward()
            optimizer.step()
            sums[0] += total.detach()
            sums[1] += len(data)
        dist.all_reduce(sums)  # a loss of one rank's samples is not the epoch's
        losses.append((sums[0] / sums[1]).item())
    if rank == 0:
        problem.report(losses)
    dist.barrier()  # gloo may abort a process that ends while another one is still in the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
