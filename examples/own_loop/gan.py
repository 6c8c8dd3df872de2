"""A GAN whose two optimizers take turns, trained on one device."""

import torch
from problem import mlp, ring_set
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

torch.manual_seed(0)
generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
loader = DataLoader(ring_set, batch_size=64, shuffle=True)
for _ in range(5):
    for real, noise in loader:
        fake = generator(noise)
        c_loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).mean()
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
        g_loss = softplus(-critic(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
    with torch.no_grad():
        real, noise = ring_set.tensors
        print("loss", softplus(-critic(real)).mean().item(), softplus(-critic(generator(noise))).mean().item())
