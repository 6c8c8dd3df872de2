import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
sampler = range(36) if dist.get_rank() == 0 else range(36, 64)
loader = DataLoader(samples(), batch_size=4, sampler=sampler)
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)
for _ in range(2):
    with Join([net]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
dist.destroy_process_group()
