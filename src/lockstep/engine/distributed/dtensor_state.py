"""State that ``strategy: fsdp`` has divided among ranks: gather it, or divide it again.

A divided tensor is a ``DTensor``: this rank's rows of it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep.arithmetic import ceil_div
from lockstep.checkpoint.content import Pieces, Place, mark, walked


def gathered(state: Any, *, keep: bool) -> Any:
    """Return ``state`` with whole tensors in place of divided ones. Collective; the same on one device.

    One tensor at a time is whole on the device; on a rank that does not ``keep`` them, none stays.
    """

    def leaf(value: Any, _: Place) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = _whole(value)
        return whole.cpu() if keep else None

    return walked(state, leaf)


def _whole(divided: DTensor) -> Tensor:
    """Gather a divided tensor. Collective: through the ranks' devices, even from host memory."""
    on_device = cast(DTensor, divided.detach().to(divided.device_mesh.device_type))
    return on_device.full_tensor()


def own_part(state: dict[str, Any], *, is_main: bool) -> dict[str, Any]:
    """Return this rank's part of a checkpoint's content: its rows, which share their memory, and on rank 0 all else.

    Collective for tensors that are divided otherwise than by rows.
    """
    model = {name: _rows(value) for name, value in state["model"].items()}
    rows: dict[str, Tensor] = {}

    def marked(value: Any, path: Place) -> Any:
        if not _by_rows(value):
            return _rows(value)
        name = ".".join(map(str, path))
        rows[name] = _rows(value)
        return mark(name)

    # The task's state is small, and may be any object.
    trainer = walked({key: value for key, value in state["trainer"].items() if key != "task"}, marked)
    trainer["task"] = gathered(state["trainer"]["task"], keep=is_main)
    if is_main:
        return {"model": model, "trainer": trainer, "rows": rows}
    divided = {name: part for name, part in model.items() if _by_rows(state["model"][name])}
    return {"model": divided, "trainer": {}, "rows": rows}


def _by_rows(value: Any) -> bool:
    if not isinstance(value, DTensor):
        return False
    *outer, inner = value.placements
    return inner == Shard(0) and all(placement == Replicate() for placement in outer)


def _rows(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return cast(DTensor, value.detach()).to_local() if _by_rows(value) else _whole(value)


def restored(value: Any, parameter: Tensor) -> Any:
    """Return a value of the whole optimizer state of ``parameter``, as that of this rank."""
    if isinstance(value, Tensor | Pieces) and value.shape == parameter.shape:
        return divided_like(value, parameter)
    return value.whole() if isinstance(value, Pieces) else value


def divided_like(whole: Tensor | Pieces, like: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, which every rank has, divided as ``like`` is. Not collective.

    Of a tensor that lies in the shards of a checkpoint only these rows are read.
    """
    if isinstance(whole, Pieces) and not _by_rows(like):
        whole = whole.whole()
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return cast(Tensor, whole)
    mesh = like.device_mesh
    if isinstance(whole, Tensor):
        return distribute_tensor(whole.to(mesh.device_type, like.dtype), mesh, like.placements, src_data_rank=None)
    # As torch.chunk divides: the last ranks may have fewer rows, or none.
    count = like.shape[0]
    last = mesh.ndim - 1
    each = ceil_div(count, mesh.size(last))
    start = min(count, each * mesh.get_local_rank(last))
    rows = whole.rows(start, min(count, start + each)).to(mesh.device_type, like.dtype)
    return DTensor.from_local(rows, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
