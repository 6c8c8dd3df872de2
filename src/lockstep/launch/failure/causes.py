"""Known causes of a failed rank, recognized by its error's text or the signal that killed it, and how to fix them.

The texts are those of torch 2.9–2.13 (c10, gloo, NCCL and the data loader) and of the C library. A new cause is a
pattern in ``_BY_TEXT`` and a section named as its key in docs/troubleshooting.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Cause(NamedTuple):
    """Why ranks fail.

    ``key``: its name in ``--json`` and as a heading of docs/troubleshooting.md. ``check``: how to check that it is this
    one; may be empty.
    """

    key: str
    title: str
    fix: str
    check: str = ""

    @property
    def is_memory(self) -> bool:
        """Whether the cause is too little memory, or may be."""
        return self.key in ("gpu-memory", "memory", "killed")

    @property
    def advice(self) -> str:
        """How to check and how to fix it, in a line."""
        return "; ".join(filter(None, [self.check, self.fix]))


_SHM = "give the container more (docker run --shm-size=8g, or --ipc=host), or use --num-workers 0"
#: How a run needs less memory.
SMALLER = (
    "lockstep resume RUN --set training.batch_size=N with a smaller N, which keeps the global batch; if an evaluation "
    "failed, --set validation.batch_size=N"
)
_FEWER_WORKERS = f"use fewer loader workers (--num-workers), or {SMALLER}"

#: By patterns of the error's text, without regard to case: the first that matches wins.
_BY_TEXT = {
    r"CUDA out of memory|HIP out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDA error: out of memory": Cause(
        "gpu-memory", "the GPU is out of memory", SMALLER, "`lockstep devices` shows which other processes use the GPU"
    ),
    r"insufficient shared memory|Bus error.*(shm|shared memory)|unable to (open|mmap) shared memory"
    r"|unable to allocate shared memory": Cause(
        "shared-memory", "loader workers pass batches through shared memory (/dev/shm), and it is full", _SHM
    ),
    r"DataLoader worker.* (is killed by signal|exited unexpectedly)": Cause(
        "loader-worker",
        "a data loader's worker process was killed, most often because the machine was out of memory",
        "use fewer workers (--num-workers 1, or 0 to see an error in the data set itself)",
    ),
    r"No space left on device|ENOSPC|Errno 28|Disk quota exceeded": Cause(
        "disk-full", "a disk or a quota is full", "free some space, then `lockstep resume` the run"
    ),
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|^MemoryError|Cannot allocate memory|failed to map segment"
    r"|Errno 12|std::bad_alloc": Cause("memory", "the machine is out of memory", _FEWER_WORKERS),
    r"Too many open files|Errno 24|received 0 items of ancdata": Cause(
        "open-files", "the process has reached its limit of open files", "raise it: ulimit -n 65536"
    ),
    r"can't start new thread|(RuntimeError|BlockingIOError): .*Resource temporarily unavailable": Cause(
        "threads",
        "a thread or process could not be started: the user, or the container, has reached its limit of them",
        "raise the limit (ulimit -u 4096; docker run --pids-limit=-1), or use fewer ranks and loader workers",
        "`ps -eLf | wc -l` counts them",
    ),
    r"device-side assert triggered": Cause(
        "device-assert",
        "an index was out of range in a GPU kernel, most often a label that is not below the number of classes",
        "correct that label or index",
        "run with CUDA_LAUNCH_BLOCKING=1, or on --devices cpu, to see the line",
    ),
    r"cannot assign (module|parameters?) before Module.__init__\(\) call": Cause(
        "module-init", "a module's __init__ sets layers too early", "call super().__init__() first in it"
    ),
    r"does not require grad and does not have a grad_fn": Cause(
        "detached-loss",
        "loss() returned a total without a gradient: after .detach(), NumPy or torch.no_grad(), or of a frozen model",
        "return the loss as the tensor that was computed from the model's output",
    ),
    r"Trying to backward through the graph a second time": Cause(
        "second-backward",
        "the backward pass ran already: Task.loss called backward(), or kept a tensor of the step before",
        "remove backward() from the task, which Lockstep calls, and detach() tensors that are kept between steps",
    ),
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver"
    r"|Expected all tensors to be on the same device": Cause(
        "own-device",
        "the task or its model chooses a device with .cuda() or .to()",
        "remove that: Lockstep moves model and batches; make new tensors with device=x.device",
    ),
    r"shapes cannot be multiplied|expected input.* to have \d+ channels|running_mean should contain"
    r"|Given normalized_shape=|must match the size of tensor|must match except in dimension|expected \dD.* input"
    r"|to match target batch_size|must be the same as input size|must be equal to input_size": Cause(
        "shapes",
        "a layer or an operation got a tensor of another shape than it takes",
        "change the size of that layer, or the samples",
        "the traceback has the line: print the .shape of its tensors",
    ),
    r"(must have|expected to have) the same dtype|expected scalar type|Found dtype \w+ but expected": Cause(
        "dtypes",
        "an operation got numbers of different types, such as float64 of NumPy beside the float32 of a model",
        "convert them in the data set or in loss(): x.float() for inputs, y.long() for classes",
    ),
    r"Target -?\d+ is out of bounds|index out of range in self": Cause(
        "labels",
        "a label or an index is not below the number of classes, or of rows of an embedding",
        "count labels from 0, and make the last layer (or the embedding) as large as their number",
    ),
    r"Default process group has not been initialized": Cause(
        "own-group",
        "the task uses torch.distributed, such as DistributedDataParallel, without a process group",
        "return the model itself from model(), which Lockstep distributes; between ranks use lockstep.collectives()",
    ),
    r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes": Cause(
        "uneven-sizes",
        "ranks called a collective with tensors of different sizes: in the last step of an epoch they may "
        "have different numbers of samples",
        "in a loop with a lockstep.Session, call session.gather(rows), which takes any number of rows; in a task that "
        "gathers over the batch, set training.tail=drop, or gather equal shapes",
    ),
    r"EADDRINUSE|address already in use": Cause(
        "port", "another process has the port", "end that process, or choose another port for the rendezvous"
    ),
    r"Expected to have finished reduction|parameters that were not used in producing the loss": Cause(
        "unused-parameters",
        "some parameters were not used in the loss",
        "use all of them, or set distributed.find_unused_parameters=true",
    ),
}

_LOST = Cause(
    "lost-peer",
    "the connection to another rank was lost, and no rank left a reason",
    "look at the other ranks' logs, and at the other nodes",
)
_NCCL = Cause(
    "nccl", "NCCL, the communication library, failed", "run with NCCL_DEBUG=INFO: the rank's log then shows more"
)
_CUDA = Cause("cuda", "a GPU kernel failed", "run with CUDA_LAUNCH_BLOCKING=1 to see which one")

_BY_SIGNAL = {
    "SIGKILL": Cause(
        "killed",
        "another process, or the kernel's out-of-memory killer, ended it",
        f"if memory was the reason, {_FEWER_WORKERS}",
        "`dmesg | grep -i 'killed process'` shows which",
    ),
    "SIGBUS": Cause(
        "shared-memory",
        "it accessed memory that is not mapped: most often shared memory (/dev/shm) is full, or a memory-mapped file "
        "was cut short",
        _SHM,
    ),
    "SIGSEGV": Cause("crash", "native code crashed", "the rank's log shows where in Python it was at that time"),
    "SIGABRT": Cause("crash", "native code aborted", "the rank's log shows why, and where in Python it was"),
    "SIGTERM": Cause("ended", "another process ended it while it was starting or ending", "start it again"),
}

#: For a process killed while the kernel counted such kills.
OOM_KILLED = Cause("memory", "the kernel's out-of-memory killer ended it", _FEWER_WORKERS)

#: Errors of a rank that lost another one; the same words may mean a download's connection elsewhere, hence the types.
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
    """Return whether an error of this qualified type (empty: only a log is known) means a lost rank elsewhere."""
    return bool(_PEER_TYPES.search(type_name) and _PEER_TEXT.search(message))


def expired_s(message: str) -> float | None:
    """Return the time-out of a collective call in the error of a waiting rank; ``None``: another error."""
    match = re.search(r"Timed out waiting (\d+)ms", message)
    return int(match[1]) / 1000 if match else None


def find_cause(text: str, signal_name: str | None = None) -> Cause | None:
    """Find the known cause of a failure. ``text``: ``type: message`` of its error, or the end of its output.

    The first pattern that matches wins, and text comes before the signal.
    """
    for pattern, cause in _BY_TEXT.items():
        if re.search(pattern, text, re.IGNORECASE):
            return cause
    if signal_name in _BY_SIGNAL:
        return _BY_SIGNAL[signal_name]
    type_name, _, message = text.partition(": ")
    if is_lost_peer(type_name, message):
        return _LOST
    if re.search(r"\bNCCL\b|nccl\w+Error", text):
        return _NCCL
    return _CUDA if re.search(r"CUDA error|CUDNN_STATUS|illegal memory access", text) else None


_ALL = (*_BY_TEXT.values(), _LOST, _NCCL, _CUDA, *_BY_SIGNAL.values())
#: The names of all causes; ``hang`` is that of :class:`lockstep.launch.failure.hang.HangReport`.
KEYS = (*dict.fromkeys(cause.key for cause in _ALL), "hang")
