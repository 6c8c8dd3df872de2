"""SimCLR: each view's negatives are all others of the batch of all ranks, trained on any number of devices."""

import torch
from problem import Views, mlp, nt_xent

import lockstep

session = lockstep.Session(global_batch_size=64, seed=0)
model = mlp(8, 64, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
views = Views()
session.prepare(model, optimizer)
for _ in session.epochs(5):
    for one, two in session.batches(views):
        one, two = session.gather(model(one)), session.gather(model(two))
        loss = nt_xent(one, two)
        session.backward(loss, weight=len(one))
        session.step(optimizer)
    with torch.no_grad():
        one, two = zip(*(views[index] for index in range(100)), strict=True)
        print("loss", nt_xent(model(torch.stack(one)), model(torch.stack(two))).item())
