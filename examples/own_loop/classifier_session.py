"""A classifier, trained on any number of devices."""

import torch
from problem import mlp, test_inputs, test_labels, train_set
from torch.nn.functional import cross_entropy

import lockstep

session = lockstep.Session(global_batch_size=64, seed=0)
model = mlp(8, 64, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
session.prepare(model, optimizer)
for _ in session.epochs(5):
    for inputs, labels in session.batches(train_set):
        loss = cross_entropy(model(inputs), labels)
        session.backward(loss, weight=len(labels))
        session.step(optimizer)
    with torch.no_grad():
        print("loss", cross_entropy(model(test_inputs), test_labels).item())
