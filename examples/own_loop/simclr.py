"""SimCLR: each view's negatives are all others of the batch, trained on one device."""

import torch
from problem import Views, mlp, nt_xent
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = mlp(8, 64, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
views = Views()
loader = DataLoader(views, batch_size=64, shuffle=True)
for _ in range(5):
    for one, two in loader:
        one, two = model(one), model(two)
        loss = nt_xent(one, two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        one, two = zip(*(views[index] for index in range(100)), strict=True)
        print("loss", nt_xent(model(torch.stack(one)), model(torch.stack(two))).item())
