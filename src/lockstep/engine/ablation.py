"""Dropout and batch statistics off, for layers and functions of torch alike: to find where two runs part.

Layers are set to evaluation mode. Those without running statistics stay as they are, except in :func:`quiet`.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep._compat.torch import DropoutNd, NormBase, buffers_of
from lockstep.engine.generators import generators_kept
from lockstep.engine.task import Loss, Task

#: Functions of ``torch.nn.functional`` that drop out, with the name of their rate.
_RATES = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), "p"),
    "multi_head_attention_forward": "dropout_p",
}
#: ``scaled_dot_product_attention`` is built in and has no signature: (query, key, value, mask, rate).
_ATTENTION_RATE = 4
#: Functions that draw random numbers.
_NUMBERS = {
    *("bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_", "poisson"),
    *("rand", "rand_like", "randn", "randn_like"),
}
_INTEGERS = {"randint", "randint_like", "random_"}
DRAWS = {
    *(*_NUMBERS, *_INTEGERS, "randperm", "multinomial", "gumbel_softmax", "rrelu"),
    *("fractional_max_pool2d", "fractional_max_pool3d"),
}


class _Watch(TorchFunctionMode):
    """Records which functions draw random numbers in training, and turns on request off what ``off`` names.

    ``off``: of ``dropout``, ``batchnorm`` (running statistics are used) and ``mixing`` (BatchNorm without running
    statistics leaves its input as it is, and a draw has one value for all rows).
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
        elif name in DRAWS:
            self._draws.add(name.rstrip("_"))
            if self._separates_rows:
                return _without_chance(name, func(*args, **kwargs), args, kwargs)
        return func(*args, **kwargs)

    def _drop(self, arguments: dict[str, Any], rate: str, training: bool) -> None:
        if not training or not arguments.get(rate):
            return
        if self._no_dropout:
            arguments[rate] = 0.0
        else:
            self._draws.add("dropout")


def _without_chance(name: str, drawn: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """``drawn`` by the function ``name``, with one number in place of all, or a permutation in order.

    Draws by weights, and values computed from draws, stay random.
    """
    if name in _NUMBERS:
        drawn.detach().fill_(0.5)
    elif name in _INTEGERS:
        bounds = [value for value in args if isinstance(value, int)]
        drawn.fill_(bounds[0] if len(bounds) > 1 else kwargs.get("low", 0))
    elif name == "randperm":
        drawn.copy_(drawn.sort().values)
    return drawn


def _host_generators() -> dict[str, Any]:
    """The state of the global generators that are not torch's, by module."""
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
        """Watches what of a forward pass is run inside, beside :meth:`loss`."""
        return _Watch(self.draws, self._off)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        with self.watching():
            return self._task.loss(model, batch)


def _as_in_evaluation(module: nn.Module, inputs: Any) -> None:
    module.training = False


@contextmanager
def separate_rows() -> Iterator[None]:
    """Inside, functions of torch compute a row from that row alone: no dropout, batch statistics or draws.

    Afterwards generators are as before.
    """
    with generators_kept(), _Watch(set(), ("dropout", "batchnorm", "mixing")):
        yield


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """As :func:`separate_rows`, for the layers of ``model`` too; afterwards buffers and attributes are as before."""
    attributes = [(layer, dict(vars(layer))) for layer in model.modules()]
    buffers = [(layer, dict(buffers_of(layer))) for layer in model.modules()]
    copies = {id(tensor): tensor.clone() for tensor in model.buffers()}
    try:
        for layer, tensors in buffers:
            for name, tensor in tensors.items():
                buffers_of(layer)[name] = None if tensor is None else copies[id(tensor)]
            if isinstance(layer, (DropoutNd, NormBase, nn.RNNBase)):
                layer.training = False
        with separate_rows():
            yield
    finally:
        for layer, tensors in buffers:
            buffers_of(layer).update(tensors)
        for layer, values in attributes:
            vars(layer).clear()
            vars(layer).update(values)
