"""``strategy: fsdp`` in a loop: models that are divided in place and keep their type, and optimizers that follow."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.partition import Undivided
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.fsdp import ShardedModel, divide, through
from lockstep.engine.task import Datasets, Task
from lockstep.errors import UnsupportedError

#: Methods that use no values of parameters.
_KEPT = set(dir(nn.Module)) - {"forward"}


class Shards:
    """Models, all in ``module``, divided among the ranks, each alone; ``optimizers`` then have the parts. Collective.

    Raises:
        UnsupportedError: parameters that cannot be divided.
    """

    def __init__(
        self, rank: RankContext, module: nn.Module, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        #: By identity: the parameters before, which a loop may have in a list.
        self._undivided = {id(p): weakref.ref(p) for p in module.parameters()}
        wholes = [Undivided(task=Task(), model=model, datasets=Datasets(None), rank=rank) for model in models]
        self._models = [cast(ShardedModel, divide(whole)) for whole in wholes]
        divided = dict(module.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            state = optimizer.state_dict()
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [divided[names[id(parameter)]] for parameter in group["params"]]
            optimizer.load_state_dict(self._models[0].divided_state(state, optimizer))
        for model in self._models:
            _call_through(model)

    def check_call(self, function: Any, tensors: Iterable[Tensor], options: Mapping[str, Any]) -> None:
        """Raise :class:`UnsupportedError` for a call of the loop that needs whole parameters."""
        if function is torch.autograd.grad and options.get("create_graph"):
            raise self.second_order("torch.autograd.grad(..., create_graph=True)")
        undivided = (self._undivided.get(id(tensor), lambda: None)() is tensor for tensor in tensors)
        if any(undivided):
            raise UnsupportedError(
                "the loop uses a parameter that it has kept since before the first batch",
                why="strategy fsdp has divided the parameters among the ranks since, and trains the parts",
                fix="use --strategy ddp; for a penalty on the weights, weight_decay of the optimizer",
            )

    @staticmethod
    def second_order(call: str) -> UnsupportedError:
        """Make the error that refuses a ``call`` for gradients of gradients."""
        return UnsupportedError(
            f"{call} is incompatible with strategy fsdp",
            why="a gradient of gradients needs parameters that a backward pass has freed",
            fix="use --strategy ddp",
        )

    def of(self, optimizer: Optimizer) -> ShardedModel:
        """Return the part of the models that ``optimizer`` trains, for its update."""
        part = copy.copy(self._models[0])
        part.parameters = lambda: [p for group in optimizer.param_groups for p in group["params"]]  # type: ignore[method-assign]
        return part

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Backward passes inside contribute zeros to the gradients of all ranks."""
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.silent())
            yield


def _call_through(sharded: ShardedModel) -> None:
    """Let calls of the model and of its public methods gather parameters outside blocks, as a call of its root does."""
    model = sharded.module
    depth = 0

    def gathering(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth > 1:
                    return method(*args, **kwargs)
                return through(sharded.root, lambda _, inputs: method(*inputs[0], **inputs[1]), (args, kwargs))
            finally:
                depth -= 1

        return call

    kinds = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.")]
    defined = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    for name in {"forward", *defined} - _KEPT:
        if not name.startswith("_") and name not in vars(model):
            setattr(model, name, gathering(getattr(model, name)))
