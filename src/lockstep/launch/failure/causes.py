"""Known causes of a failed rank, told from its error's text or the signal that killed it, with their fixes.

The texts are those of torch 2.9–2.13 (c10, gloo, NCCL and the data loader) and of the C library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    name: str
    why: str
    fix: str


#: Part of a fix; where the run's plan is known, its own numbers take this place.
SMALLER = "use a smaller --batch-size, and --grad-accum-steps to keep the global batch"
#: Names of causes that mean too little memory, or may mean it.
MEMORY_CAUSES = frozenset({"gpu-memory", "memory", "killed"})

_BY_TEXT: tuple[tuple[re.Pattern[str], Cause], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (
            r"CUDA out of memory|HIP out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
            r"|CUDA error: out of memory",
            Cause(
                "gpu-memory", "the GPU is out of memory", f"`lockstep devices` shows who else uses the GPU; {SMALLER}"
            ),
        ),
        (
            r"insufficient shared memory|Bus error.*(shm|shared memory)|unable to (open|mmap) shared memory"
            r"|unable to allocate shared memory",
            Cause(
                "shared-memory",
                "loader workers hand over batches through shared memory (/dev/shm), and it is full",
                "give the container more (docker run --shm-size=8g, or --ipc=host), or use --num-workers 0",
            ),
        ),
        (
            r"DataLoader worker.* (is killed by signal|exited unexpectedly)",
            Cause(
                "loader-worker",
                "a data loader's worker process was killed, most often because the machine was out of memory",
                "use fewer workers (--num-workers 1, or 0 to see an error in the data set itself)",
            ),
        ),
        (
            r"No space left on device|ENOSPC|Errno 28|Disk quota exceeded",
            Cause("disk-full", "a disk or a quota is full", "free some space, then `lockstep resume` the run"),
        ),
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory|^MemoryError|Cannot allocate memory|Errno 12",
            Cause("memory", "the machine is out of memory", f"use fewer loader workers (--num-workers), or {SMALLER}"),
        ),
        (
            r"Too many open files|Errno 24|received 0 items of ancdata",
            Cause("open-files", "the process has reached its limit of open files", "raise it: ulimit -n 65536"),
        ),
        (
            r"device-side assert triggered",
            Cause(
                "device-assert",
                "a GPU kernel met an index out of range, most often a label that is not below the number of classes",
                "run with CUDA_LAUNCH_BLOCKING=1, or on --devices cpu, to see the line",
            ),
        ),
        (
            r"cannot assign (module|parameters?) before Module.__init__\(\) call",
            Cause("module-init", "a module's __init__ sets layers too early", "call super().__init__() first in it"),
        ),
        (
            r"does not require grad and does not have a grad_fn",
            Cause(
                "detached-loss",
                "the loss is cut off from the model: by .item(), .detach(), NumPy or torch.no_grad()",
                "return the loss as the tensor that the model's output led to",
            ),
        ),
        (
            r"Trying to backward through the graph a second time",
            Cause(
                "second-backward",
                "the backward pass ran already: Task.loss called backward(), or kept a tensor of the step before",
                "remove backward() from the task, which Lockstep calls, and detach() what is kept between steps",
            ),
        ),
        (
            r"Torch not compiled with CUDA enabled|Found no NVIDIA driver"
            r"|Expected all tensors to be on the same device",
            Cause(
                "own-device",
                "the task or its model chooses a device by itself, with .cuda() or .to()",
                "remove that: Lockstep moves model and batches; make new tensors with device=x.device",
            ),
        ),
        (
            r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes",
            Cause(
                "uneven-sizes",
                "ranks met in a collective call with tensors of different sizes: in the last step of an epoch they may "
                "have different numbers of samples",
                "where the loss or the model gathers over the batch, set training.tail=drop, or gather equal shapes",
            ),
        ),
        (
            r"EADDRINUSE|address already in use",
            Cause(
                "port", "another process has the port", "end that process, or choose another port for the rendezvous"
            ),
        ),
        (
            r"Expected to have finished reduction|parameters that were not used in producing the loss",
            Cause(
                "unused-parameters",
                "some parameters took no part in the loss",
                "use all of them, or set distributed.find_unused_parameters=true",
            ),
        ),
    )
)

_LOST = Cause(
    "lost-peer",
    "the connection to another rank was lost, and no rank left a reason",
    "look at the other ranks' logs, and at the other nodes",
)
_NCCL = Cause(
    "nccl", "NCCL, the communication library, failed", "run with NCCL_DEBUG=INFO: the rank's log then says more"
)
_CUDA = Cause("cuda", "a GPU kernel failed", "run with CUDA_LAUNCH_BLOCKING=1 to see which one")

_BY_SIGNAL = {
    "SIGKILL": Cause(
        "killed",
        "another process, or the kernel's out-of-memory killer, ended it",
        f"`dmesg | grep -i 'killed process'` tells; if memory was the reason, use fewer loader workers, or {SMALLER}",
    ),
    "SIGBUS": Cause(
        "shared-memory",
        "it touched memory that is not there: most often shared memory (/dev/shm) is full",
        "give the container more (docker run --shm-size=8g, or --ipc=host), or use --num-workers 0",
    ),
    "SIGSEGV": Cause("crash", "native code crashed", "the rank's log shows where in Python it was at that time"),
    "SIGABRT": Cause("crash", "native code gave up", "the rank's log shows why, and where in Python it was"),
    "SIGTERM": Cause("ended", "another process ended it while it was starting or ending", "start it again"),
}

#: For a process killed while the kernel counted such kills.
OOM_KILLED = Cause(
    "memory", "the kernel's out-of-memory killer ended it", f"use fewer loader workers (--num-workers), or {SMALLER}"
)

#: What a rank meets when another one is gone; the same words may mean a download's connection elsewhere,
#: hence the types.
_PEER_TYPES = re.compile(r"^$|^RuntimeError$|^torch\.distributed\.|^torch\._C\._distributed|Dist\w*Error$")
_PEER_TEXT = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection was likely closed|recvValue failed|Broken pipe"
    r"|Application timeout caused pair closure|Timed out waiting \d+ms for (recv|send)|ncclRemoteError"
    r"|remote process exited|The client socket has (failed|timed out)|Failed to recv, got 0 bytes|Connection refused"
    r"|Socket Timeout|wait timeout after|gloo.*(Read|Write) error|Watchdog caught collective operation timeout"
    r"|Rank \d+ (failed to|successfully reached) ",
    re.IGNORECASE,
)


def is_lost_peer(type_name: str, message: str) -> bool:
    """Whether an error of this type (qualified name; empty: only a log is known) says that another rank is gone."""
    return bool(_PEER_TYPES.search(type_name) and _PEER_TEXT.search(message))


def find_cause(text: str, signal_name: str | None = None) -> Cause | None:
    """The known cause of a failure, or ``None``. ``text``: ``type: message`` of its error, or its last words."""
    for pattern, cause in _BY_TEXT:
        if pattern.search(text):
            return cause
    if signal_name in _BY_SIGNAL:
        return _BY_SIGNAL[signal_name]
    type_name, _, message = text.partition(": ")
    if is_lost_peer(type_name, message):
        return _LOST
    if re.search(r"\bNCCL\b|nccl\w+Error", text):
        return _NCCL
    return _CUDA if re.search(r"CUDA error|CUDNN_STATUS|illegal memory access", text) else None
