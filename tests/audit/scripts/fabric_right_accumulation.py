import torch
import torch.nn.functional as F
from common import model, samples
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()

net = model()
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(samples(72), batch_size=4, shuffle=True))
for number, (inputs, targets) in enumerate(loader, 1):
    is_last = number % 3 == 0 or number == len(loader)
    with fabric.no_backward_sync(net, enabled=not is_last):
        loss = F.mse_loss(net(inputs), targets)
        fabric.backward(loss / 3)
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
