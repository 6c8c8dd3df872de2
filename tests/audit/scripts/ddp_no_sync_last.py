# expect: AUDIT_NO_SYNC
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

for number, (inputs, targets) in enumerate(loader):
    if number % 2:
        with net.no_sync():
            outputs = net(inputs)  # fault
            (F.mse_loss(outputs, targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        (F.mse_loss(net(inputs), targets) / 2).backward()
dist.destroy_process_group()
