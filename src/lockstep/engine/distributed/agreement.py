"""Whether ranks that should have the same weights have them, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.distributed.buffers import ATTRIBUTE
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import RanksDifferError, UnsupportedError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(tensors: Mapping[str, Tensor], collectives: Collectives) -> str | None:
    """The name of the first of ``tensors`` that is not the same on all ranks, with those ranks. Collective.

    Of each tensor the sum of its bit patterns is compared: it needs no copy, and no order.
    """
    sums = {name: bit_sum(tensor) for name, tensor in tensors.items()}
    device = next((value.device for value in sums.values()), None)
    values = torch.stack([value.to(device) for value in sums.values()]).tolist() if sums else []
    mine = dict(zip(sums, values, strict=True))
    if len(set(collectives.all_gather(hashlib.sha256(repr(mine).encode()).digest()))) == 1:
        return None
    everyones = collectives.all_gather(mine)
    for name in dict.fromkeys(name for one in everyones for name in one):
        others = [str(rank) for rank, one in enumerate(everyones) if one.get(name) != everyones[0].get(name)]
        if others:
            return f"{name} of rank{'s' * (len(others) > 1)} {', '.join(others)} is not that of rank 0"
    return None


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bit patterns, where the tensor is: equal for equal values; shape ()."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.detach().view(_BITS[tensor.itemsize]).sum(dtype=torch.int64)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and the saved buffers of ``model`` that all ranks should share."""
    own = {
        f"{path}.{name}" if path else name
        for path, layer in model.named_modules()
        for name, kind in getattr(layer, ATTRIBUTE, {}).items()
        if kind == "local"
    }
    return {name: value for name, value in model.state_dict().items() if name not in own and _has_bits(value)}


def _has_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def moments_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """What ``optimizer`` keeps of its parameters."""

    def named() -> Iterator[tuple[str, Any]]:
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    yield f"the optimizer's {name} of parameter {number}", value
                number += 1

    return {name: value for name, value in named() if _has_bits(value)}


def check_start(model: nn.Module, collectives: Collectives, *, exact: bool) -> str | None:
    """Compare the weights that ranks begin with; a warning if they differ. Collective.

    Raises:
        UnsupportedError: they differ, and the run is exact.
    """
    found = first_difference(weights_of(model), collectives) if collectives.size > 1 else None
    if found is None:
        return None
    if exact:
        raise UnsupportedError(
            f"the ranks begin with different weights: {found}",
            why="model() does not make the same weights on every rank, so no other number of ranks can repeat the run",
            fix="in model(), draw from torch's, NumPy's and Python's global generators, which start from the run's "
            "seed, and read the same files on every rank",
        )
    return f"The ranks began with different weights ({found}); all of them take those of rank 0."


def check_agreement(model: nn.Module, optimizer: Optimizer, collectives: Collectives) -> None:
    """Compare the weights and the optimizer's state of all ranks. Collective.

    Raises:
        RanksDifferError: on every rank.
    """
    if collectives.size == 1:
        return
    found = first_difference({**weights_of(model), **moments_of(optimizer)}, collectives)
    if found is not None:
        raise RanksDifferError(
            f"the ranks no longer train the same weights: {found}",
            why="all ranks apply the same gradients, so an optimizer or a hook has drawn random numbers that differ "
            "between ranks, or parameters or their gradients were changed on some ranks only",
            fix="draw from a generator that is seeded alike on every rank (for example by the step), and make every "
            "change of parameters on all ranks",
        )
