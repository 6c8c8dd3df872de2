"""An actor and a critic that learn from episodes, trained on one device."""

import torch
from problem import mlp, play
from torch.utils.data import DataLoader

torch.manual_seed(0)
actor, critic = mlp(1, 16, 2), mlp(1, 16, 1)
a_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
loader = DataLoader(range(120), batch_size=16, shuffle=True)
for _ in range(3):
    for seeds in loader:
        states, chosen, returns = map(torch.cat, zip(*(play(actor, seed) for seed in seeds.tolist()), strict=True))
        advantages = returns - critic(states).squeeze(1)
        a_loss = -(chosen * advantages.detach()).mean()
        a_optimizer.zero_grad()
        a_loss.backward()
        a_optimizer.step()
        c_loss = advantages.square().mean()
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
    with torch.no_grad():
        print("loss", *(-play(actor, seed)[2][0].item() for seed in range(1000, 1008)))
