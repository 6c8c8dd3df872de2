import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import model, samples
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(samples(), batch_size=4, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for inputs, targets in loader:
    with accelerator.accumulate(net):
        loss = F.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
