import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, WeightedRandomSampler

dist.init_process_group("gloo")
dataset = samples()
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)

# Each rank takes its part of a batch that all ranks read.
for inputs, targets in DataLoader(dataset, batch_size=8, shuffle=True):
    part = slice(dist.get_rank(), None, dist.get_world_size())
    optimizer.zero_grad()
    F.mse_loss(net(inputs[part]), targets[part]).backward()
    optimizer.step()

# Each rank draws samples by weight, with replacement.
torch.manual_seed(dist.get_rank())
sampler = WeightedRandomSampler(torch.ones(64), 64)
for inputs, targets in DataLoader(dataset, batch_size=4, sampler=sampler):
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()
dist.destroy_process_group()
