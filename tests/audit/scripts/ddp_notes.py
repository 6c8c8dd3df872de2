# notes: AUDIT_BATCHNORM AUDIT_PADDED AUDIT_RATE_SCALED AUDIT_SYNC_EACH
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn import BatchNorm1d, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples(63)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
net = DistributedDataParallel(Sequential(model(), BatchNorm1d(1)))
optimizer = SGD(net.parameters(), lr=0.01 * dist.get_world_size())
for number, (inputs, targets) in enumerate(loader):
    (F.mse_loss(net(inputs), targets) / 2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
