"""``system-<node>.jsonl`` of a run: what :mod:`lockstep.hardware.monitor` samples on each node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import StorageError
from lockstep.hardware.monitor import INTERVAL_S, Monitor, SystemSource
from lockstep.telemetry.files import JsonLines, last_row


@contextmanager
def monitored(
    folder: Path, devices: Iterable[str], *, node: int = 0, interval_s: float = INTERVAL_S
) -> Iterator[Monitor]:
    """Sample this node into ``folder`` while the body runs. For the first rank of a node.

    Args:
        devices: ids of the devices that the run uses; the GPUs among them are sampled, beside the host.
        node: the node's number in the run.
    """
    lines = JsonLines(folder / f"system-{node}.jsonl")

    def write(sample: Mapping[str, Any]) -> None:
        with contextlib.suppress(StorageError):  # a full disk is for the run's own record to report
            lines.append(sample)

    with Monitor(SystemSource(devices), write, interval_s=interval_s) as monitor:
        yield monitor


def newest_samples(folder: Path) -> list[dict[str, Any]]:
    """The last sample of each node, by file name."""
    rows = [last_row(file) for file in sorted(folder.glob("system-*.jsonl"))]
    return [row for row in rows if row is not None]
