"""Buffers that change in training: merged by rule, left alone as declared, or refused with their name.

And whether ranks that should have the same weights have them, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lockstep._compat.torch import NormBase, buffers_of, is_spectral_norm
from lockstep.checkpoint.content import is_dense
from lockstep.data.arrays import as_bytes
from lockstep.data.requests import Window
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import all_reduce, world_size
from lockstep.engine.distributed.sync_batchnorm import SyncedBatchNorm
from lockstep.errors import RanksDifferError, UnsupportedError

#: How a module declares its buffers: ``buffer_reduction = {"name": "mean"}``.
ATTRIBUTE = "buffer_reduction"
REDUCTIONS = ("mean", "sum", "max", "same", "local")
#: Steps of an attempt that end with a check, besides saves and validations: what changes in the second is state.
CHECKED_STEPS = 2


class _Place(NamedTuple):
    """Where a buffer is registered. It is looked up each time, since a forward pass may replace it."""

    name: str
    layer: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor | None:
        return buffers_of(self.layer).get(self.attribute)


class Buffers:
    """The buffers of a model, between micro-batches, lanes and ranks.

    With several ranks, running statistics of normalisation layers are averaged after every step, weighted by samples
    (synchronised BatchNorm agrees already). The vectors of spectral normalisation depend on the weights alone: all
    micro-batches of a step start from the same ones. A module declares any other buffer that changes in training in
    ``buffer_reduction``: after every step it becomes the ``mean`` (weighted by samples), the ``sum`` (of the
    increments of all ranks) or the ``max``; or it is the ``same`` on all ranks by construction, or ``local``, a cache
    without effect on the result. An undeclared buffer may be written once, and grow after that, if all ranks write
    the same.

    Args:
        device: where values are put together that travel between ranks.
        made: where modules are made, and what their names begin with there, for the advice to declare a buffer.
        mode: ``alone`` neither merges nor checks; ``exact`` checks (lanes are merged by their strategy).

    Raises:
        UnsupportedError: a declaration that names no buffer, or no reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        mode: Literal["alone", "ranks", "exact"] = "alone",
        made: tuple[str, str] = ("in model()", "model."),
    ) -> None:
        self._module = module
        self._device = device
        self._mode = mode
        self._made = made
        self._places: dict[str, list[_Place]] = {kind: [] for kind in (*REDUCTIONS, "once", "agreed")}
        self._written: set[str] = set()
        for path, layer in module.named_modules():
            declared = dict(getattr(layer, ATTRIBUTE, {}))
            for attribute in buffers_of(layer):
                kind = _rule(layer, attribute)
                if kind is None and attribute in declared:
                    kind = declared.pop(attribute)
                    if kind not in REDUCTIONS:
                        raise UnsupportedError(
                            f"the buffer {_joined(path, attribute)} cannot be reduced by {kind!r}",
                            fix=f"declare one of {', '.join(REDUCTIONS)}",
                        )
                    kind = kind if mode == "ranks" or kind == "local" else None
                if kind is not None:
                    self._places[kind].append(_Place(_joined(path, attribute), layer, attribute))
            if declared:
                raise UnsupportedError(
                    f"{ATTRIBUTE} of {type(layer).__name__} names {', '.join(declared)}, which it does not have",
                    fix="name buffers of this very module that no other rule merges",
                )
        undeclared = {} if mode == "alone" else self._undeclared()
        self._before: dict[str, Tensor | None] = {name: _clone(tensor) for name, tensor in undeclared.items()}
        self._merges = any(self._places[kind] for kind in ("mean", "sum", "max")) and mode == "ranks"
        self._starts: list[Tensor] = []
        self._once: list[tuple[Tensor, Tensor]] = []
        self.checks_left = 0 if mode == "alone" else CHECKED_STEPS

    def tensors(self, *kinds: str) -> list[Tensor]:
        """Return the buffers of these kinds, shared ones once; ``once`` are those of spectral normalisation."""
        tensors = [slot.tensor for kind in kinds for slot in self._places[kind]]
        return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())

    def ruled(self) -> Iterator[Tensor]:
        """Yield the buffers that change by a rule of torch's layers, or of their module's declaration."""
        for layer in self._module.modules():
            for attribute, tensor in buffers_of(layer).items():
                is_declared = attribute in getattr(layer, ATTRIBUTE, {})
                if tensor is not None and (is_declared or _rule(layer, attribute) is not None):
                    yield tensor

    # Around a step.

    def begin(self) -> None:
        """Keep the values of buffers that a step changes, before it."""
        if self._places["once"]:
            self._once = [(tensor, tensor.clone()) for tensor in self.tensors("once")]
        if self._places["sum"]:
            self._starts = [tensor.clone() for tensor in self.tensors("sum")]

    def rewind(self) -> None:
        """Restore buffers that change once a step, before a micro-batch."""
        for tensor, value in self._once:
            tensor.copy_(value)

    def end(self, window: Window) -> None:
        """End a step of several ranks. Collective."""
        if self._merges or window.irregular:
            self._merge(sum(request.size for request in window.requests if not request.ghost), window.irregular)
        if self.checks_left:
            self.check()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Keep buffers as they are in the body, except that synchronised BatchNorm sees other ranks' samples."""
        buffers = [
            (layer, attribute, tensor)
            for layer in self._module.modules()
            for attribute, tensor in buffers_of(layer).items()
            if _rule(layer, attribute) != "agreed"
        ]
        for layer, attribute, tensor in buffers:  # in copies: a backward pass after the body may need those of the body
            buffers_of(layer)[attribute] = _clone(tensor)
        try:
            yield
        finally:
            for layer, attribute, tensor in buffers:
                buffers_of(layer)[attribute] = tensor

    @torch.no_grad()
    def _merge(self, samples: int, irregular: bool) -> None:
        means, sums, highest = (self.tensors(kind) for kind in ("mean", "sum", "max"))
        # Ranks with fewer micro-batches have advanced them less often. Rank 0 has the most.
        agreed = self.tensors("same", "once") if irregular else []
        flat = self._flat
        is_first = dist.get_rank() == 0
        parts = [flat(buffer, samples > 0) * samples for buffer in means]
        parts += [flat(buffer) - flat(start) for buffer, start in zip(sums, self._starts, strict=True)]
        parts += [flat(buffer, is_first) for buffer in agreed]
        if parts:
            weight = torch.full((1,), samples, dtype=torch.float64, device=self._device)
            total, *reduced = all_reduce(torch.cat([weight, *parts]), None).split([1, *map(len, parts)])
            values = iter(reduced)
            for buffer in means:
                _put(buffer, next(values) / total)
            for buffer, start in zip(sums, self._starts, strict=True):
                _put(buffer, flat(start) + next(values))
            for buffer in agreed:
                _put(buffer, next(values))
        if highest:
            parts = [flat(buffer) for buffer in highest]
            reduced = all_reduce(torch.cat(parts), None, dist.ReduceOp.MAX).split([*map(len, parts)])
            for buffer, value in zip(highest, reduced, strict=True):
                _put(buffer, value)

    def _flat(self, buffer: Tensor, counts: bool = True) -> Tensor:
        """Flatten for a message. Zeros replace values that do not count, which may be infinite."""
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        numbers = real.reshape(-1).to(self._device, torch.float64)
        return numbers if counts else torch.zeros_like(numbers)

    # Checks.

    def check(self) -> None:
        """Compare with the last check, and ranks with each other. Collective.

        Raises :class:`UnsupportedError` on every rank, where an undeclared buffer changed otherwise than a cache does,
        or where ranks differ in what must be the same.
        """
        if self._mode == "alone":
            return
        self.checks_left = max(0, self.checks_left - 1)
        now = self._undeclared()
        changed = [name for name in {**self._before, **now} if not _equal(self._before.get(name), now.get(name))]
        again = [name for name in changed if name in self._written and not _grew(self._before.get(name), now.get(name))]
        agreed = {slot.name: slot.tensor for kind in ("same", "once") for slot in self._places[kind]}
        reports = _gathered((again, [*changed, *agreed]))
        refused = [*dict.fromkeys(name for names, _ in reports for name in names)]
        differs = _differing({name: (now | agreed).get(name) for _, names in reports for name in refused or names})
        if refused or differs is not None:
            raise _refusal(
                refused or [str(differs)], differs in agreed, differs is None, self._mode == "exact", *self._made
            )
        self._before |= {name: _clone(now.get(name)) for name in changed}
        self._written |= {*changed}

    def _undeclared(self) -> dict[str, Tensor]:
        """Return buffers that are registered now, by whomever; one shared with a declared buffer is declared."""
        settled = {id(tensor) for tensor in self.tensors(*self._places)}
        return {
            _joined(path, attribute): tensor
            for path, layer in self._module.named_modules()
            for attribute, tensor in buffers_of(layer).items()
            if tensor is not None and id(tensor) not in settled and _rule(layer, attribute) is None
        }


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _rule(layer: nn.Module, attribute: str) -> str | None:
    """Return the reduction that torch's layers need."""
    if isinstance(layer, NormBase) and attribute in {"running_mean", "running_var", "num_batches_tracked"}:
        if isinstance(layer, SyncedBatchNorm):
            return "agreed"
        return "max" if attribute == "num_batches_tracked" else "mean"
    if isinstance(layer, AveragedModel) and attribute == "n_averaged":
        return "agreed"
    return "once" if is_spectral_norm(layer, attribute) else None


def _refusal(names: list[str], declared: bool, is_equal: bool, exact: bool, site: str, prefix: str) -> UnsupportedError:
    if declared:
        return UnsupportedError(
            f"the buffer {names[0]} is declared the same on all ranks, and is not",
            fix="declare how it is reduced: mean, sum or max",
        )
    modules: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        modules.setdefault(_joined(path, ATTRIBUTE), []).append(attribute)
    kind = "local" if exact else "same" if is_equal else "mean"
    lines = "; ".join(f"{prefix}{path} = {dict.fromkeys(attributes, kind)}" for path, attributes in modules.items())
    summary = f"the buffer{'s' * (len(names) > 1)} {', '.join(names)} changed in training"
    if exact:
        return UnsupportedError(
            f"{summary}, which exact mode cannot reproduce on another number of ranks",
            why="each lane changes it, and no order of merging is fixed for it",
            fix=f"use reproducibility fast, or, if it does not affect the result, declare that {site}: {lines}",
        )
    agreement = "all ranks have the same values so far, which can still depend on the number of ranks"
    return UnsupportedError(
        f"{summary}, and how ranks agree on it is not declared",
        why=agreement if is_equal else "each rank has changed its copy",
        fix=f"declare {site} how it is reduced, for example {lines}. same: by the module itself, over all ranks; "
        "mean, sum or max: by Lockstep, after every step; local: left as it is, since no later batch reads it",
    )


def _put(buffer: Tensor, values: Tensor) -> None:
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    real.copy_(values.view_as(real))


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None or left is right:
        return left is right
    same_form = left.shape == right.shape and left.dtype == right.dtype
    return same_form and torch.allclose(left, right.to(left.device), rtol=0, atol=0, equal_nan=True)


def _grew(before: Tensor | None, now: Tensor | None) -> bool:
    """Return whether a cache became larger or smaller, and is the same in the part that both have."""
    if before is None or now is None:
        return True
    if before.dim() != now.dim() or before.shape == now.shape:
        return False
    common = tuple(map(slice, map(min, before.shape, now.shape)))
    return _equal(before[common], now[common])


def _differing(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Return the first name whose tensors differ between ranks, except in how far they have grown. Collective.

    ``tensors`` have the same names on all ranks; ``None`` is not there yet.
    """
    shapes = _gathered({name: None if t is None else (str(t.dtype), *t.shape) for name, t in tensors.items()})
    hashes: dict[str, str] = {}
    for name, tensor in tensors.items():
        versions = {rank[name] for rank in shapes if rank[name] is not None}
        if len({(len(version), version[0]) for version in versions}) > 1:
            return name
        if tensor is not None:
            common = [slice(min(sizes)) for sizes in zip(*(version[1:] for version in versions), strict=True)]
            content = as_bytes(tensor[tuple(common)].cpu())
            hashes[name] = hashlib.blake2b(content.numpy().tobytes()).hexdigest()
    digests = _gathered(hashes)
    return next((name for name in tensors if len({rank[name] for rank in digests if name in rank}) > 1), None)


def _gathered(value: Any) -> list[Any]:
    """Return every rank's ``value``, by rank. Collective."""
    values = [value] * world_size(None)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(tensors: Mapping[str, Tensor], collectives: Collectives) -> str | None:
    """Name the first of ``tensors`` that is not the same on all ranks, and those ranks. Collective.

    Of each tensor the sum of its bit patterns is compared: it needs no copy, and no order.
    """
    sums = {name: bit_sum(tensor) for name, tensor in tensors.items()}
    device = next((value.device for value in sums.values()), None)
    values = torch.stack([value.to(device) for value in sums.values()]).tolist() if sums else []
    local_sums = dict(zip(sums, values, strict=True))
    if len(set(collectives.all_gather(hashlib.sha256(repr(local_sums).encode()).digest()))) == 1:
        return None
    rank_sums = collectives.all_gather(local_sums)
    for name in dict.fromkeys(chain.from_iterable(rank_sums)):
        differing = [str(rank) for rank, sums in enumerate(rank_sums) if sums.get(name) != rank_sums[0].get(name)]
        if differing:
            return f"{name} of rank{'s' * (len(differing) > 1)} {', '.join(differing)} is not that of rank 0"
    return None


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor's bit patterns, where the tensor is: equal for equal values; shape ()."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.detach().view(_BITS[tensor.itemsize]).sum(dtype=torch.int64)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the saved buffers of ``model`` that all ranks should share."""
    local = {
        _joined(path, name)
        for path, layer in model.named_modules()
        for name, kind in getattr(layer, ATTRIBUTE, {}).items()
        if kind == "local"
    }
    return {name: value for name, value in model.state_dict().items() if name not in local and is_dense(value)}


def check_start(model: nn.Module, collectives: Collectives, *, exact: bool) -> str | None:
    """Compare the weights that ranks begin with; a warning if they differ, or an error if ``exact``. Collective."""
    difference = first_difference(weights_of(model), collectives) if collectives.size > 1 else None
    if difference is None:
        return None
    if exact:
        raise UnsupportedError(
            f"the ranks begin with different weights: {difference}",
            why="model() does not make the same weights on every rank, so no other number of ranks can repeat the run",
            fix="in model(), draw from torch's, NumPy's and Python's global generators, which start from the run's "
            "seed, and read the same files on every rank",
        )
    return f"The ranks began with different weights ({difference}); all of them take those of rank 0."


def check_agreement(model: nn.Module, optimizers: Sequence[Optimizer], collectives: Collectives) -> None:
    """Compare weights and the optimizers' state of all ranks; an error on every rank if they differ. Collective."""
    if collectives.size == 1:
        return
    moments = dict[str, Tensor]()
    for optimizer_number, optimizer in enumerate(optimizers, 1):
        owner = "the optimizer" if len(optimizers) == 1 else f"optimizer {optimizer_number}"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments |= {
            f"{owner}'s {name} of parameter {number}": value
            for number, parameter in enumerate(parameters)
            for name, value in optimizer.state.get(parameter, {}).items()
            if is_dense(value)
        }
    difference = first_difference({**weights_of(model), **moments}, collectives)
    if difference is not None:
        raise RanksDifferError(
            f"the ranks no longer train the same weights: {difference}",
            why="all ranks apply the same gradients, so an optimizer, a hook or a module that initialises itself "
            "in its first forward has drawn random numbers that differ between ranks, or parameters or their gradients "
            "were changed on some ranks only",
            fix="draw from a generator that is seeded alike on every rank (for example by the step), make every change "
            "of parameters on all ranks, and call a model that initialises itself once in model()",
        )
