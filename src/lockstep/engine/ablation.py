"""Dropout and batch statistics off, for layers and functions of torch alike: to find where two runs part.

Layers are set to evaluation mode. Those without running statistics stay as they are, except in :func:`separate_rows`.
Functional calls are met by a ``TorchFunctionMode``, which also notes every random function that a forward pass
draws from.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep._compat.torch import DropoutNd, NormBase, TorchDispatchMode, buffers_of
from lockstep.engine.task import Loss, Task

#: Functions of ``torch.nn.functional`` that drop out, with the name of their rate.
_RATES = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), "p"),
    "multi_head_attention_forward": "dropout_p",
}
#: ``scaled_dot_product_attention`` is built in and has no signature: (query, key, value, mask, rate).
_ATTENTION_RATE = 4
#: Functions that draw random numbers.
DRAWS = {
    *("bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_", "poisson", "binomial"),
    *("geometric_", "cauchy_", "log_normal_", "_standard_gamma", "_sample_dirichlet"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random_", "randperm", "multinomial"),
    *("gumbel_softmax", "rrelu", "fractional_max_pool2d", "fractional_max_pool3d"),
}
_OPERATORS = {name.strip("_") for name in DRAWS}


class _Watch(TorchFunctionMode):
    """Records which functions draw random numbers in training, and turns on request off what ``off`` names.

    ``off``: of ``dropout``, ``batchnorm`` (running statistics are used) and ``mixing`` (BatchNorm without running
    statistics leaves its input as it is, and slopes are not drawn).
    """

    def __init__(self, draws: set[str], off: Sequence[str]) -> None:
        super().__init__()
        self._draws = draws
        self._no_dropout = "dropout" in off
        self._no_batchnorm = "batchnorm" in off
        self._separates_rows = "mixing" in off

    def __enter__(self) -> _Watch:
        self._before = _host_generators()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._draws |= {name for name, state in _host_generators().items() if state != self._before[name]}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if func is F.batch_norm and self._no_batchnorm:
            call = signature(func).bind(*args, **kwargs)
            if call.arguments.get("running_mean") is not None:
                call.arguments["training"] = False
            elif self._separates_rows:
                return call.arguments["input"]
            return func(*call.args, **call.kwargs)
        if name in _RATES and getattr(F, name) is func:
            call = signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            self._drop(call.arguments, _RATES[name], call.arguments["training"])
            return func(*call.args, **call.kwargs)
        if func is F.scaled_dot_product_attention:
            if len(args) > _ATTENTION_RATE:
                kwargs["dropout_p"] = args[_ATTENTION_RATE]
                args = [*args[:_ATTENTION_RATE], *args[_ATTENTION_RATE + 1 :]]
            self._drop(kwargs, "dropout_p", True)
        elif func is F.rrelu and self._separates_rows:
            call = signature(func).bind(*args, **kwargs)
            call.arguments["training"] = False
            return func(*call.args, **call.kwargs)
        elif name in DRAWS:
            self._draws.add(name.rstrip("_"))
        return func(*args, **kwargs)

    def _drop(self, arguments: dict[str, Any], rate: str, training: bool) -> None:
        if not training or not arguments.get(rate):
            return
        if self._no_dropout:
            arguments[rate] = 0.0
        else:
            self._draws.add("dropout")


class _WithoutChance(TorchDispatchMode):
    """What torch draws is the same in all rows: numbers differ along the last dimension, permutations are in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.strip("_") not in _OPERATORS:
            return drawn
        if name == "randperm":
            drawn.copy_(torch.arange(len(drawn)))
        elif name == "multinomial":
            by_weight = args[0].argsort(-1, descending=True)
            drawn.copy_(by_weight[..., torch.arange(drawn.shape[-1]) % by_weight.shape[-1]])
        elif drawn.is_floating_point():
            columns = torch.arange(drawn.shape[-1] if drawn.dim() > 1 else 1)
            drawn.copy_(0.05 + 0.9 * ((0.5 + 0.618 * columns) % 1))
        elif drawn.dtype == torch.bool:
            drawn.fill_(True)
        else:
            bounds = [value for value in args if isinstance(value, int)]
            drawn.fill_(bounds[0] if len(bounds) > 1 else 0)
        return drawn


def _host_generators() -> dict[str, Any]:
    """Return the state of the global generators that are not torch's, by module."""
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}


class Watched(Task):
    """A task of which only the loss is asked, in a forward pass that is watched.

    ``off``: of ``dropout`` and ``batchnorm`` (normalisation layers use their running statistics); ``model``, which will
    be trained, is changed for good. ``draws``: the random functions that have been called so far, ``dropout`` among
    them. What threads of DataParallel call is not seen; layers are, everywhere.
    """

    def __init__(self, task: Task, model: nn.Module, off: Sequence[str]) -> None:
        super().__init__(task.config)
        self._task = task
        self.draws: set[str] = set()
        layers = [m for m in model.modules() if isinstance(m, DropoutNd) and m.p]
        recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase) and m.dropout]
        self._off = off
        quiet = list[nn.Module]()
        if "dropout" in off:
            for module in recurrent:
                module.dropout = 0.0
            quiet += layers
        elif layers or recurrent:
            self.draws.add("dropout")
        if "batchnorm" in off:
            quiet += [m for m in model.modules() if isinstance(m, NormBase)]
        for layer in quiet:
            layer.register_forward_pre_hook(_as_in_evaluation)

    def watching(self) -> TorchFunctionMode:
        """Return a mode that watches a forward pass in its body, beside :meth:`loss`."""
        return _Watch(self.draws, self._off)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        with self.watching():
            return self._task.loss(model, batch)


def _as_in_evaluation(module: nn.Module, inputs: Any) -> None:
    module.training = False


@contextmanager
def separate_rows(draws: set[str], *modules: nn.Module) -> Iterator[None]:
    """Make torch compute a row from that row alone: no dropout, batch statistics or different random numbers.

    So do the layers of ``modules``, whose buffers and attributes are afterwards as before.

    Args:
        draws: gets the modules ``random`` and ``numpy.random`` if their global generators are drawn from.
    """
    functions = set[str]()
    layers = [layer for module in modules for layer in module.modules()]
    attributes = [(layer, dict(vars(layer))) for layer in layers]
    buffers = [(layer, dict(buffers_of(layer))) for layer in layers]
    copies = {id(tensor): tensor.clone() for module in modules for tensor in module.buffers()}
    try:
        for layer, tensors in buffers:
            for name, tensor in tensors.items():
                buffers_of(layer)[name] = None if tensor is None else copies[id(tensor)]
            if isinstance(layer, (DropoutNd, NormBase, nn.RNNBase)):
                layer.training = False
        with _Watch(functions, ("dropout", "batchnorm", "mixing")), _WithoutChance():  # type: ignore[no-untyped-call]
            yield
    finally:
        draws |= functions & _host_generators().keys()
        for layer, tensors in buffers:
            buffers_of(layer).update(tensors)
        for layer, values in attributes:
            vars(layer).clear()
            vars(layer).update(values)
