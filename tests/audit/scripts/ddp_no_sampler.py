# expect: AUDIT_NO_SAMPLER
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
dataset = samples()

loader = DataLoader(dataset, batch_size=4, shuffle=True)  # fault
net = DistributedDataParallel(model())
optimizer = SGD(net.parameters(), lr=0.01)

torch.manual_seed(dist.get_rank())
for inputs, targets in loader:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()
dist.destroy_process_group()
