# expect: AUDIT_ENDS_EARLY
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
dataset = samples()
sampler = range(36) if dist.get_rank() == 0 else range(36, 64)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)
for _ in range(2):
    for inputs, targets in loader:  # fault
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
