"""Parts of a step whose kernels are recorded once and replayed: CUDA graphs.

To start a kernel takes Python and torch 5 to 10 µs, and a small model's step has hundreds of kernels that are shorter
than that. A graph starts all of them at once. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep._compat.torch import abandon_recording


class Recording:
    """What ``body`` computes, from tensors that keep their place in memory, into tensors that keep theirs.

    ``body`` must do the same in each call: what it reads from Python's objects is read at the recording only. It must
    have run before, in the same shapes. On a CPU nothing is recorded, and a replay calls it.
    """

    def __init__(self, body: Callable[[], list[Tensor]], device: torch.device) -> None:
        self._body, self._graph = body, None
        self.outputs: list[Tensor] = []
        if device.type == "cuda":
            self._graph, self.outputs = _recorded(body, device)

    def replay(self) -> list[Tensor]:
        """Compute again; the results are in the same tensors each time."""
        if self._graph is not None:
            self._graph.replay()
        elif not self.outputs:
            self.outputs = [value.clone() for value in self._body()]
        else:
            for kept, value in zip(self.outputs, self._body(), strict=True):
                kept.copy_(value)
        return self.outputs


def _recorded(body: Callable[[], list[Tensor]], device: torch.device) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[device.index or 0]
    kept, pool, stream = generator.clone_state(), torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    try:
        with (
            # torch.cuda.graph stays on its stream where the recording cannot be ended.
            torch.cuda.stream(torch.cuda.current_stream(device)),
            # Other threads copy checkpoints and batches meanwhile.
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            outputs = body()
    except BaseException:
        # A recording that failed leaves generator and allocator as if it still ran.
        generator.graphsafe_set_state(kept)
        abandon_recording(graph, device, pool)
        raise
    return graph, outputs
