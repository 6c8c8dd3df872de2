import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import samples
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import Linear, Sequential
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
flat = FullyShardedDataParallel(Sequential(Linear(4, 8), Linear(8, 1)), device_id=torch.device("cpu"))
sharded = fully_shard(Sequential(Linear(4, 8), Linear(8, 1)))
for epoch, net in enumerate((flat, sharded)):
    sampler.set_epoch(epoch)
    optimizer = SGD(net.parameters(), lr=0.01)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
