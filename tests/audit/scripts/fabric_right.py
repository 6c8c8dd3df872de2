import torch
import torch.nn.functional as F
from common import model, samples
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()

net = model()
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4, shuffle=True))
for inputs, targets in loader:
    optimizer.zero_grad()
    fabric.backward(F.mse_loss(net(inputs), targets))
    optimizer.step()
