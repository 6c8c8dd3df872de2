# expect: AUDIT_NOT_REDUCED
import torch
import torch.nn.functional as F
from common import model, samples
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()

body = torch.nn.Linear(4, 4)
head = model()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
fabric.seed_everything(0, verbose=False)
for parameter in body.parameters():
    torch.nn.init.constant_(parameter, 0.1)
head, optimizer = fabric.setup(head, optimizer)
loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4, shuffle=True))
for inputs, targets in loader:
    optimizer.zero_grad()
    fabric.backward(F.mse_loss(head(body(inputs)), targets))
    optimizer.step()  # fault
