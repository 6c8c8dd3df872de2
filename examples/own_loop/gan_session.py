"""A GAN whose two optimizers take turns, trained on any number of devices."""

import torch
from problem import mlp, ring_set
from torch.nn.functional import softplus

import lockstep

session = lockstep.Session(global_batch_size=64, seed=0)
generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
session.prepare(generator, critic, g_optimizer, c_optimizer)
for _ in session.epochs(5):
    for real, noise in session.batches(ring_set):
        fake = generator(noise)
        c_loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).mean()
        session.backward(c_loss, weight=len(real))
        if session.step(c_optimizer):  # the critic has seen the whole batch
            for real, noise in session.again():
                g_loss = softplus(-critic(generator(noise))).mean()
                session.backward(g_loss, weight=len(real), models=[generator])
            session.step(g_optimizer)
    with torch.no_grad():
        real, noise = ring_set.tensors
        print("loss", softplus(-critic(real)).mean().item(), softplus(-critic(generator(noise))).mean().item())
