"""Lightning's DDP for evaluation whose samples are shared out without padding: ranks may have unequal numbers of them.

Imported only where a Trainer is made, since it imports Lightning.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from torch import distributed
from torch.distributed import ReduceOp


class SharedDDPStrategy(DDPStrategy):
    """Lightning's DDP for ranks with different numbers of evaluation samples and batches.

    Evaluation goes past the DDP wrapper, whose forward may broadcast buffers; they are broadcast once, when
    validation begins.
    """

    def on_validation_start(self) -> None:
        """Gives all ranks rank 0's buffers, as DDP does before each forward pass of training."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            distributed.broadcast(buffer, 0)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """As Lightning's, but the mean of whole numbers is not rounded down.

        ``self.log(…, sync_dist=True)`` divides by the mean of the ranks' samples: for 3 and 2 that is 2.5, not 2.
        """
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def shared_ddp(strategy: Strategy | str, ranks: int) -> Strategy | str:
    """:class:`SharedDDPStrategy` for Lightning's DDP by name (``ddp``, ``ddp_find_unused_parameters_true``, …).

    ``auto`` means it, too, on several ranks. Other strategies, objects, and DDP that starts processes itself
    (``ddp_spawn``) stay what they are.
    """
    name = "ddp" if strategy == "auto" and ranks > 1 else strategy
    known = StrategyRegistry[name] if isinstance(name, str) and name in StrategyRegistry else None
    if known is None or known["strategy"] is not DDPStrategy or known["init_params"]["start_method"] != "popen":
        return strategy
    return SharedDDPStrategy(**known["init_params"])
