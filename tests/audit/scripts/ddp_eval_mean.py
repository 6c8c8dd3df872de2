# expect: AUDIT_EVAL_MEAN
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)

parts = DataLoader(samples(24), batch_size=8, sampler=range(dist.get_rank(), 24, dist.get_world_size()))
for inputs, targets in loader:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()
net.eval()
with torch.no_grad():
    losses = torch.stack([F.mse_loss(net(inputs), targets) for inputs, targets in parts])
mean = losses.mean()
dist.all_reduce(mean)  # fault
mean /= dist.get_world_size()
dist.destroy_process_group()
