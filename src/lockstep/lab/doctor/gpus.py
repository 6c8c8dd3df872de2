"""Checks of devices, versions and GPUs, from detection and NVML without a context on any GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations

from lockstep.hardware.detect import Device, open_nvml
from lockstep.hardware.nvml import GpuHealth, Nvml
from lockstep.hardware.resolve import describe
from lockstep.lab.doctor.report import Check, Finding, guarded


def check_gpus(chosen: Sequence[str], detected: Sequence[Device]) -> Iterator[Finding]:
    """Yield the findings on the devices of this machine and the libraries that use them."""
    gpus = [device for device in detected if device.kind == "gpu" and device.id in chosen]
    nvml = open_nvml()
    with nvml or nullcontext():
        yield from guarded("devices", lambda: check_devices(gather_versions(nvml), detected, chosen))
        if nvml is not None and gpus:
            yield from guarded("GPU health", lambda: check_health(nvml, gpus))
            yield from guarded("peer access", lambda: check_links(nvml, gpus))


def gather_versions(nvml: Nvml | None) -> dict[str, str]:
    """Return the versions of Lockstep, Python, torch with its build, NCCL and the driver (empty: none)."""
    import torch
    from torch import distributed

    from lockstep.rundir.folder import versions

    installed = versions()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    nccl: tuple[int, ...] = torch.cuda.nccl.version() if distributed.is_nccl_available() else ()
    newest = nvml.driver_cuda() if nvml else None
    driver = f"{nvml.driver_version()} (up to CUDA {newest[0]}.{newest[1]})" if nvml and newest else ""
    return {
        **{name: installed[name] for name in ("lockstep", "python", "torch")},
        **{"nccl": ".".join(map(str, nccl)), "build": build, "driver": driver},
    }


def check_devices(versions: Mapping[str, str], detected: Sequence[Device], chosen: Sequence[str]) -> Iterator[Finding]:
    """Check that torch can use every GPU that is here, and connect them."""
    check = Check("devices", "a torch that does not fit the driver finds no GPU; one without NCCL connects no several")
    build = "install the torch build for this driver (https://pytorch.org/get-started/locally/), or a newer driver"
    unusable = [device for device in detected if device.kind == "gpu" and not device.supported]
    usable = [device for device in detected if device.supported]
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    trouble = "; ".join(device.note for device in detected if device.kind == "cpu" and device.note)
    if unusable:
        notes = "; ".join(dict.fromkeys(device.note for device in unusable))
        yield check("fail", f"{describe(unusable)} cannot be used: {notes} ({software})", build)
    elif sum(device.kind == "gpu" for device in usable) > 1 and not versions["nccl"]:
        yield check("fail", f"several GPUs, but torch has no NCCL ({software})", build)
    elif trouble:
        yield check("warn", trouble, "run `python -c 'import torch'` to see the error")
    else:
        yield check("ok", f"found {describe(usable)}; chosen {', '.join(chosen)} ({software})")


def check_health(nvml: Nvml, chosen: Sequence[Device]) -> Iterator[Finding]:
    for gpu in chosen:
        health = nvml.health(gpu.uuid or "")
        yield _check_memory_errors(f"ECC of {gpu.id}", health)
        clocks = Check(
            f"clocks of {gpu.id}",
            "a GPU whose clocks are held back slows down all ranks: each step waits for the slowest",
            "check cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER)",
        )
        heat = "" if health.temperature_c is None else f", {health.temperature_c} °C"
        slowdowns = f"held back: {', '.join(health.slowdowns)}" if health.slowdowns else "not held back"
        yield clocks("warn" if health.slowdowns else "ok", slowdowns + heat)


def _check_memory_errors(name: str, health: GpuHealth) -> Finding:
    check = Check(name, "uncorrected memory errors change weights silently, or kill the process")
    if health.repair == "failed":
        return check("fail", "broken memory rows could not be replaced", "have the GPU exchanged")
    if health.repair == "pending":
        fix = "reset the GPU or restart the machine when it is not in use"
        return check("warn", "broken memory rows will be replaced at the next reset", fix)
    if health.ecc_errors:
        fix = "restart the machine; if it happens again, have the GPU tested (dcgmi diag -r 3)"
        return check("fail", f"{health.ecc_errors} uncorrectable memory errors since the driver began", fix)
    if health.ecc is None:
        return check("skip", "this GPU does not report error correction")
    return check("ok", f"error correction is {'on, no uncorrectable errors' if health.ecc else 'off'}")


def check_links(nvml: Nvml, chosen: Sequence[Device]) -> Iterator[Finding]:
    check = Check(
        "peer access",
        "gradients travel between GPUs in every step; without peer access they are copied through the host's memory",
        "look at `nvidia-smi topo -p2p r`; in the BIOS or hypervisor switch off PCIe access control services (ACS), "
        "and on bare metal the IOMMU",
    )
    links = {(a.id, b.id): nvml.link(a.uuid or "", b.uuid or "") for a, b in combinations(chosen, 2)}
    unconnected = [" and ".join(pair) for pair, link in links.items() if link.peer is False]
    if not links:
        yield check("skip", "fewer than two GPUs are chosen")
    elif unconnected:
        pairs = "; ".join(unconnected[:4]) + ("; …" if len(unconnected) > 4 else "")
        yield check("warn", f"{len(unconnected)} of {len(links)} pairs have none: {pairs}")
    else:
        over_nvlink = sum(link.nvlink for link in links.values())
        text = f"{over_nvlink} over NVLink, {len(links) - over_nvlink} over PCIe"
        unknown = " (the driver does not report peer access)" if any(v.peer is None for v in links.values()) else ""
        yield check("ok", f"{len(links)} pairs of GPUs: {text}{unknown}")
