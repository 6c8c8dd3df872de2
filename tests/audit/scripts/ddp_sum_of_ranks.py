# expect: AUDIT_NOT_DIVIDED
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples()

net = model()

for parameter in net.parameters():
    dist.broadcast(parameter.data, 0)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)

optimizer = SGD(net.parameters(), lr=0.01)
for inputs, targets in loader:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()  # fault
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
