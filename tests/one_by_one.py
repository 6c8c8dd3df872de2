"""A strategy outside the package, in one file: gradients are summed one parameter after the other."""

from __future__ import annotations

from typing import Any

from lockstep import StrategySpec, register_strategy

SPEC = StrategySpec(
    name="one-by-one",
    summary="one process for each device, gradients summed one parameter after the other",
    module="one_by_one",
    memory=lambda kinds, ranks: {**kinds, "mailbox": ranks * 1e9},
)
register_strategy(SPEC)


def build(replica: Any, config: Any, plan: Any) -> Any:
    import torch
    import torch.distributed as dist

    from lockstep.engine.strategies.base import Flags, Reduced, Strategy

    class OneByOne(Strategy):
        def gradients(self, window: Any, batches: Any, step: int, flags: Flags) -> Reduced:
            own = super().gradients(window, batches, step, flags)
            sums = torch.tensor([float(own.total), float(own.count), *flags], dtype=torch.float64)
            for tensor in (sums, *(parameter.grad for parameter in self.module.parameters())):
                dist.all_reduce(tensor)
            return Reduced(sums[0], sums[1], 1.0, Flags(*sums[2:].tolist()))

    print("one by one")
    return OneByOne(replica)
