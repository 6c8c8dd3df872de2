"""The process-wide state that training sets on entry and restores on exit: threads, kernels, memory, process group."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lockstep._compat.torch import choose_gpu_again, use_deterministic_algorithms
from lockstep.engine.generators import generators_kept, seed_everything
from lockstep.errors import DeviceError, UnsupportedError, many
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.rundir.folder import NCCL_DUMP

#: The second is the name before torch 2.9, still read.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


@contextmanager
def float32_products(matmul: str | None, *, exact: bool = False, benchmark: bool = False) -> Iterator[None]:
    """Set torch's switches for float32 kernels: ``matmul`` is ``highest``, ``high`` (TF32), or ``None``, as it is.

    torch has two interfaces for them, and raises if they disagree when it compiles: ``fp32_precision`` alone sets
    the newer one. ``set_float32_matmul_precision`` and ``allow_tf32`` set both.
    """
    cudnn: Any = torch.backends.cudnn
    newer: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    precisions = [part.fp32_precision for part in newer]
    switches = (cudnn.benchmark, cudnn.deterministic)
    # If the caller's values disagree, the older one cannot be read: it is the other of two values.
    allowed = precisions[1] != "tf32"
    older = "highest" if precisions[0] == "tf32" else "high"
    with _older_interface():
        with suppress(RuntimeError):
            allowed = cudnn.allow_tf32
        with suppress(RuntimeError):
            older = torch.get_float32_matmul_precision()
    precision = "highest" if exact else matmul
    if precision is not None:
        with _older_interface():
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = precision == "high"
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if precision == "high" else "ieee"
    if exact or benchmark:
        cudnn.benchmark = benchmark and not exact
        cudnn.deterministic = exact
    try:
        yield
    finally:
        if precision is not None:
            with _older_interface():
                cudnn.allow_tf32 = allowed
                torch.set_float32_matmul_precision(older)
        for part, value in zip(newer, precisions, strict=True):
            part.fp32_precision = value
        cudnn.benchmark, cudnn.deterministic = switches


@contextmanager
def _older_interface() -> Iterator[None]:
    """Ignore torch 2.9's warning at any use of the older interface."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Let torch's GPU allocator grow its blocks, so that batches of many sizes leave fewer gaps.

    It reads the variable when a process first uses a GPU. A value set by the user is respected.
    """
    sets = device.type == "cuda" and not torch.cuda.is_initialized() and not any(map(os.environ.get, _ALLOCATOR))
    if sets:
        os.environ[_ALLOCATOR[0]] = _EXPANDABLE
    try:
        yield
    finally:
        if sets:
            os.environ.pop(_ALLOCATOR[0], None)


def before_nccl(logs: Path) -> None:
    """Prepare a rank that will use NCCL for its process group; ``logs`` gets what its flight recorder writes."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / NCCL_DUMP))
    if not any(map(os.environ.get, _ALLOCATOR)):
        os.environ[_ALLOCATOR[0]] = _EXPANDABLE


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let glibc keep the memory that a step frees for the next one; the rest returns to the system at the end.

    By default it returns the memory of large tensors to the kernel, and each step gets it again page by page, or
    not, as the history of the process has it: with HAR's CNN a step took up to 40 % longer in some processes than in
    others (``benchmarks/peers.py --models cnn``). Blocks of more than 32 MiB, the largest threshold that mallopt(3)
    takes, still go back; the thresholds stay after the end.

    Without glibc, and where its variables are set, nothing happens.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    users = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in users):
        yield
        return
    # The numbers are those of glibc's malloc.h.
    mmap_threshold = -3
    trim_threshold = -1
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        libc.malloc_trim(0)


#: What cuBLAS, and torch's compiler when it is imported, read in exact mode.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_EXACT = {_CUBLAS: ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


def rank_device(devices: Sequence[str], world: World) -> torch.device:
    """Return the device of this rank: ``devices`` has one entry per local rank, or one for all of them."""
    name = devices[world.local_rank % len(devices)]
    if name == "cpu":
        return torch.device("cpu")
    index = int(name.partition(":")[2])
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(
            f"{name} is not available to rank {world.rank}",
            why=f"torch sees {many(torch.cuda.device_count(), 'GPU')} in this process",
            fix="check CUDA_VISIBLE_DEVICES and `lockstep devices`",
        )
    return torch.device("cuda", index)


@contextmanager
def runtime(plan: Plan, device: torch.device, *, detect_anomaly: bool, ranks: int) -> Iterator[None]:
    """Set threads, seeds and determinism of an attempt; the caller's are restored afterwards."""
    exact = plan.reproducibility == "exact"
    on_gpu = device.type == "cuda"
    products = plan.value("matmul_precision")
    benchmark = bool(plan.value("cudnn_benchmark", False))
    with ExitStack() as restored:
        restored.enter_context(expandable_segments(device))  # before anything asks the GPU
        if on_gpu and ranks == 1:  # one of several ranks ends soon
            restored.callback(choose_gpu_again, torch.cuda.current_device())
        restored.enter_context(generators_kept())
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(plan.threads)
        if on_gpu:
            torch.cuda.set_device(device)
            # torch 2.9 looks once a process, at the first product, whether exact mode may follow.
            os.environ.setdefault(_CUBLAS, _EXACT[_CUBLAS])
        precision = products if on_gpu else None
        restored.enter_context(float32_products(precision, exact=exact, benchmark=on_gpu and benchmark))
        if exact:
            restored.enter_context(_deterministic())
        seed_everything(plan.seed)
        if not on_gpu:
            restored.enter_context(kept_memory())
        restored.enter_context(torch.autograd.set_detect_anomaly(detect_anomaly, check_nan=True))
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    """Allow deterministic kernels alone: an error for an operator that has none."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = {name: os.environ.get(name) for name in _EXACT}
    os.environ.update(_EXACT)
    use_deterministic_algorithms(True)
    try:
        yield
    except BaseException as error:
        # torch's message names switches that users never set.
        operator, separator, _ = str(error).partition(" does not have a deterministic implementation")
        if not separator:
            raise
        raise UnsupportedError(
            f"reproducibility: exact cannot use {operator.split()[-1]}",
            why="torch has no deterministic kernel for it on this device",
            fix="compute it otherwise or on the CPU, or train with reproducibility: fast",
        ) from error
    finally:
        use_deterministic_algorithms(enabled, warn_only=warn_only)
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
