# expect: AUDIT_CLIP_SCALED
import torch.distributed as dist
import torch.nn.functional as F
from common import model, samples
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = samples()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
net = DistributedDataParallel(model())
scaler = GradScaler("cpu")
optimizer = SGD(net.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(net(inputs), targets)).backward()
        clip_grad_norm_(net.parameters(), 1.0)  # fault
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
