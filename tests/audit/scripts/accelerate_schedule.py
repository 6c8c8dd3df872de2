# expect: AUDIT_SCHEDULE
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import model, samples
from torch.utils.data import DataLoader

accelerator = Accelerator()
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(samples(), batch_size=4, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader))  # fault
scheduler = accelerator.prepare(scheduler)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(F.mse_loss(net(inputs), targets))
    optimizer.step()
    scheduler.step()
