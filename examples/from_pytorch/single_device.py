"""One device: the loop that everybody starts with. `python single_device.py`."""

import problem
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(problem.SEED)
model = problem.model().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=problem.LEARNING_RATE)

losses = []
for epoch in range(problem.EPOCHS):
    total, count = torch.zeros((), device=device), 0
    for data, target in DataLoader(problem.dataset(), batch_sampler=problem.batches(epoch)):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(data)
        count += len(data)
    losses.append(total.item() / count)
problem.report(losses)
