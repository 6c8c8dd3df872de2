import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import sentences, tagger
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
dataset = sentences(63)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
net = DistributedDataParallel(tagger())
optimizer = SGD(net.parameters(), lr=0.01)

for tokens, labels in loader:
    optimizer.zero_grad()
    count = torch.tensor(float((labels != -100).sum()))
    dist.all_reduce(count)
    total = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    (total * dist.get_world_size() / count).backward()
    optimizer.step()
net.eval()
for tokens, labels in DataLoader(dataset, batch_size=32):
    with torch.no_grad():
        loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten())
dist.destroy_process_group()
