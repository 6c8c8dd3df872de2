# expect: AUDIT_RANKS_DRAW_ALIKE
import random

import torch.distributed as dist
import torch.nn.functional as F
from common import Noisy, model
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
random.seed(0)
dataset = Noisy()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)  # fault
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
