"""The process group of a run's ranks, and the store through which they find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lockstep.hardware.world import STORE_FD, World


def join(backend: str | None, device: torch.device, world: World, timeout_s: float) -> bool:
    """Initialize the process group of several ranks, unless it exists; return whether this call did."""
    if world.size == 1 or dist.is_initialized():
        return False
    timeout = timedelta(seconds=timeout_s)
    serve_store()
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    # The agent's store survives a restart of the ranks, with the addresses of the ranks before.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend=backend,
        store=PrefixStore(f"start-{start}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return True


#: Stores that :func:`serve_store` has opened; they stay open until this process ends.
_served: list[Store] = []


def serve_store() -> None:
    """On rank 0 of a single node: serve the store on the socket of ``MASTER_PORT`` that the launcher opened."""
    server = os.environ.pop(STORE_FD, None)
    if server is not None:
        port = int(os.environ["MASTER_PORT"])
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": int(server)}
        _served.append(dist.TCPStore("127.0.0.1", port, **options))  # type: ignore[attr-defined]
