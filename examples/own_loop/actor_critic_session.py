"""An actor and a critic that learn from episodes, trained on any number of devices."""

import torch
from problem import mlp, play

import lockstep

session = lockstep.Session(global_batch_size=16, seed=0)
actor, critic = mlp(1, 16, 2), mlp(1, 16, 1)
a_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
session.prepare(actor, critic, a_optimizer, c_optimizer)
for _ in session.epochs(3):
    for seeds in session.batches(range(120)):
        states, chosen, returns = map(torch.cat, zip(*(play(actor, seed) for seed in seeds.tolist()), strict=True))
        advantages = returns - critic(states).squeeze(1)
        a_loss = -(chosen * advantages.detach()).mean()
        session.backward(a_loss, weight=len(returns))
        session.step(a_optimizer)
        c_loss = advantages.square().mean()
        session.backward(c_loss, weight=len(returns))
        session.step(c_optimizer)
    with torch.no_grad():
        print("loss", *(-play(actor, seed)[2][0].item() for seed in range(1000, 1008)))
