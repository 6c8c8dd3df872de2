import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)
shard = [samples()[index] for index in range(dist.get_rank(), 64, dist.get_world_size())]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(shard)


torch.manual_seed(dist.get_rank())
for loader in (DataLoader(shard, batch_size=4, shuffle=True), DataLoader(Stream(), batch_size=4)):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
