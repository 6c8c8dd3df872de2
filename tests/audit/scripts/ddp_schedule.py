# expect: AUDIT_SCHEDULE
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples()

sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)
scheduler = CosineAnnealingLR(optimizer, T_max=len(dataset) // 4)  # fault
for inputs, targets in loader:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
