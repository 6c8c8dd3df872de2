import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples(70)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)

for number, (inputs, targets) in enumerate(loader):
    if number % 2 == 0:
        with net.no_sync():
            (F.mse_loss(net(inputs), targets) / 2).backward()
    else:
        (F.mse_loss(net(inputs), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
