"""Devices, versions, and the state of the GPUs: facts from detection and NVML, no context on any GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lockstep.doctor.finding import Finding
from lockstep.hardware.device import Device, describe
from lockstep.hardware.nvml import GpuHealth, Nvml
from lockstep.hardware.resolve import describe_users

#: The oldest torch that Lockstep works with.
OLDEST_TORCH = (2, 9)
#: A GPU with less free memory (1e9 bytes) has no room for a context, NCCL's buffers and a small model.
LEAST_FREE_GB = 2.0


@dataclass(frozen=True, slots=True)
class Versions:
    """What must fit together; ``None`` and empty where there is none. ``driver_cuda``: the newest that it supports."""

    lockstep: str
    python: str
    torch: str
    cuda: str | None = None
    hip: str | None = None
    nccl: str = ""
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None


def gather_versions(nvml: Nvml | None) -> Versions:
    """Imports torch, and starts nothing on a GPU."""
    import torch

    return Versions(
        **own_versions(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        driver=nvml.driver_version() if nvml else "",
        driver_cuda=nvml.driver_cuda() if nvml else None,
    )


def own_versions() -> dict[str, str]:
    """``lockstep``, ``python``, ``torch`` and ``nccl``, which is empty where torch has none."""
    import torch
    from torch import distributed

    from lockstep.telemetry.records import versions

    known = versions()
    nccl: tuple[int, ...] = torch.cuda.nccl.version() if distributed.is_nccl_available() else ()
    return {**{name: known[name] for name in ("lockstep", "python", "torch")}, "nccl": ".".join(map(str, nccl))}


def check_devices(detected: Sequence[Device], chosen: Sequence[str]) -> Iterator[Finding]:
    why = "training runs on the devices that are found here and chosen"
    here = describe([device for device in detected if device.supported])
    chosen_text = ", ".join(chosen)
    trouble = [f"{device.id}: {device.note}" for device in detected if device.kind == "cpu" and device.note]
    if trouble:
        yield Finding("devices", "warn", "; ".join(trouble), why, "run `python -c 'import torch'` to see the error")
    else:
        yield Finding("devices", "ok", f"found {here}; chosen {chosen_text}", why)


def check_versions(versions: Versions, detected: Sequence[Device]) -> Iterator[Finding]:
    why = "a torch that does not fit the driver finds no GPU, and one without NCCL cannot connect several"
    gpus = [device for device in detected if device.kind == "gpu"]
    unusable = [device for device in gpus if not device.supported]
    usable = len(gpus) - len(unusable)
    text = _versions_text(versions)
    release = tuple(map(int, re.findall(r"\d+", versions.torch)[:2]))  # 2.13.0+cpu → (2, 13)
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding("versions", "fail", text, f"Lockstep needs torch {oldest}", f"pip install 'torch>={oldest}'")
    elif unusable:
        notes = "; ".join(dict.fromkeys(device.note for device in unusable))
        fix = "install the torch build for this driver (https://pytorch.org/get-started/locally/), or a newer driver"
        yield Finding("versions", "fail", f"{describe(unusable)} cannot be used: {notes} ({text})", why, fix)
    elif usable > 1 and not versions.nccl:
        fix = "install a torch build with NCCL (https://pytorch.org/get-started/locally/)"
        yield Finding("versions", "fail", f"{usable} GPUs, but torch has no NCCL ({text})", why, fix)
    else:
        yield Finding("versions", "ok", text, why)


def check_memory(chosen: Sequence[Device]) -> Iterator[Finding]:
    """One finding for each chosen GPU."""
    why = "a GPU that other processes use is slower, and runs out of memory when they need more"
    for gpu in chosen:
        name = f"memory of {gpu.id}"
        free = "free memory unknown" if gpu.free_gb is None else f"{gpu.free_gb:g} of {gpu.memory_gb:g} GB free"
        users = f"in use by {describe_users(gpu)}" if gpu.users else "no other process uses it"
        fix = "wait for these processes, end those that are yours, or choose another device"
        if gpu.free_gb is not None and gpu.free_gb < LEAST_FREE_GB:
            yield Finding(name, "fail", f"{free}; {users}", "a context, NCCL and a small model need more", fix)
        elif gpu.users:
            yield Finding(name, "warn", f"{free}; {users}", why, fix)
        else:
            yield Finding(name, "ok", f"{free}; {users}", why)


def check_health(nvml: Nvml, chosen: Sequence[Device]) -> Iterator[Finding]:
    """Findings for each chosen GPU: error correction and throttling."""
    for gpu in chosen:
        health = nvml.health(gpu.uuid or "")
        yield _check_memory_errors(f"ECC of {gpu.id}", health)
        yield _check_clocks(f"clocks of {gpu.id}", health)


def _check_memory_errors(name: str, health: GpuHealth) -> Finding:
    why = "uncorrected memory errors change weights silently, or kill the process"
    if health.repair == "failed":
        return Finding(name, "fail", "broken memory rows could not be replaced", why, "have the GPU exchanged")
    if health.repair == "pending":
        fix = "reset the GPU or restart the machine when it is not in use"
        return Finding(name, "warn", "broken memory rows will be replaced at the next reset", why, fix)
    if health.ecc_errors:
        fix = "restart the machine; if it happens again, have the GPU tested (dcgmi diag -r 3)"
        what = f"{health.ecc_errors} uncorrectable memory errors since the driver began"
        return Finding(name, "fail", what, why, fix)
    if health.ecc is None:
        return Finding(name, "skip", "this GPU does not report error correction", why)
    state = "on, no uncorrectable errors" if health.ecc else "off"
    return Finding(name, "ok", f"error correction is {state}", why)


def _check_clocks(name: str, health: GpuHealth) -> Finding:
    why = "a GPU whose clocks are held back slows down all ranks: each step waits for the slowest"
    heat = "" if health.temperature_c is None else f", {health.temperature_c} °C"
    if health.slowdowns:
        fix = "check cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER)"
        return Finding(name, "warn", f"held back: {', '.join(health.slowdowns)}{heat}", why, fix)
    return Finding(name, "ok", f"not held back{heat}", why)


def check_links(nvml: Nvml, chosen: Sequence[Device]) -> Iterator[Finding]:
    """How each pair of the chosen GPUs is connected."""
    links = {(a.id, b.id): nvml.link(a.uuid or "", b.uuid or "") for a, b in combinations(chosen, 2)}
    why = "gradients travel between GPUs in every step; without peer access they are copied through the host's memory"
    apart = [f"{one} and {other}" for (one, other), link in links.items() if link.peer is False]
    if not links:
        yield Finding("peer access", "skip", "fewer than two GPUs are chosen", why)
    elif apart:
        pairs = "; ".join(apart[:4]) + ("; …" if len(apart) > 4 else "")
        fix = (
            "look at `nvidia-smi topo -p2p r`; in the BIOS or hypervisor switch off PCIe access control services "
            "(ACS), and on bare metal the IOMMU"
        )
        yield Finding("peer access", "warn", f"{len(apart)} of {len(links)} pairs have none: {pairs}", why, fix)
    else:
        ways = Counter("NVLink" if link.nvlink else link.path or "unknown path" for link in links.values())
        text = ", ".join(f"{count} over {way}" for way, count in ways.items())
        unknown = " (the driver does not report peer access)" if any(v.peer is None for v in links.values()) else ""
        yield Finding("peer access", "ok", f"{len(links)} pairs of GPUs: {text}{unknown}", why)


def _versions_text(versions: Versions) -> str:
    build = f"CUDA {versions.cuda}" if versions.cuda else f"ROCm {versions.hip}" if versions.hip else "CPU build"
    words = [f"torch {versions.torch} ({build})", f"Python {versions.python}", f"Lockstep {versions.lockstep}"]
    words += [f"NCCL {versions.nccl}"] if versions.nccl else []
    if versions.driver_cuda:
        newest = ".".join(map(str, versions.driver_cuda))
        words.append(f"driver {versions.driver or 'of unknown version'} (up to CUDA {newest})")
    return ", ".join(words)
