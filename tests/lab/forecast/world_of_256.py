"""A process that is rank 0 of 256 by torch's fake process group: what DDP and FSDP2 really send and hold, as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.config import RunConfig
from lockstep.lab.forecast.collectives import cluster_of
from lockstep.lab.forecast.footprint import StepCounter
from lockstep.lab.forecast.memory import device_memory
from lockstep.lab.forecast.scaling import Setting, Step, buckets, bytes_sent

WORLD, WIDTH, BLOCKS, BATCH = 256, 1024, 3, 8
#: Width of the layers around the blocks: 50 MB of parameters, more than all blocks together.
AROUND = 4096


class Row(nn.Module):
    """Equal blocks of 12.6 MB of parameters each, between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(WIDTH, AROUND), nn.Linear(AROUND, WIDTH), nn.Linear(WIDTH, AROUND)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 1536), nn.ReLU(), nn.Linear(1536, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.narrow(self.wide(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden)
        return output


class Blocks(Task):
    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(torch.zeros(BATCH, WIDTH)))

    def model(self) -> Row:
        return Row()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


class Messages(TorchDispatchMode):
    """The bytes of the largest tensor of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.sizes.append(max(tensor.numel() * tensor.element_size() for tensor in tensors))
        return result


def ddp(task: Blocks, batch: tuple[Tensor]) -> list[int]:
    """Bytes of DDP's messages in a step after the first, when its buckets have settled."""
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    sizes: list[int] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch compares the annotations, and strings are not types
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    for _ in range(3):
        sizes.clear()
        model(batch[0]).square().sum().backward()
    return sizes


def fsdp(task: Blocks, batch: tuple[Tensor]) -> dict[str, Any]:
    """FSDP2's collectives of a step, the bytes of each whole message, and the most that is held."""
    model = task.model()
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True)  # as lockstep.engine.strategies.fsdp does
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        task.loss(model, batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counting, messages = CommDebugMode(), Messages()
    with counting:
        step()
    with messages:
        step()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(batch)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    held = sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    collectives = sum(counting.get_comm_counts().values())
    return {"collectives": collectives, "sizes": messages.sizes, "held": held}


def main() -> None:
    task, batch = Blocks(), (torch.zeros(BATCH, WIDTH),)
    counted = StepCounter(task, RunConfig(), BATCH, keep_gradients=True).count(batch)
    ready = tuple((place + 1) / len(counted.ready) for place in range(len(counted.ready)))
    step = Step(BATCH, 1.0, 2.0, 0.0, counted.gradients, ready, blocks=counted.blocks)
    cluster = cluster_of("nvlink", 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    result = {
        "ddp": ddp(task, batch),
        "ddp_predicted": [bucket.size for bucket in buckets(counted.gradients, ready)],
        "fsdp": fsdp(task, batch),
        "fsdp_sent_predicted": bytes_sent(step, WORLD, Setting(cluster, strategy="fsdp")),
        "fsdp_held_predicted": sum(device_memory(counted, "fsdp", WORLD, on_gpu=False).values()),
        "blocks": counted.blocks,
    }
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
