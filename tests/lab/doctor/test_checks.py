"""What each check says of facts that are made up."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.hardware.nvml import GpuHealth, GpuLink, NvmlGpu
from lockstep.lab.doctor.gpus import (
    check_devices,
    check_health,
    check_links,
    gather_versions,
)
from lockstep.lab.doctor.machine import (
    RunFolder,
    check_open_files,
    check_run_folder,
    check_shared_memory,
    probe_run_folder,
    shared_memory,
)
from lockstep.lab.doctor.ranks import check_meeting
from lockstep.lab.doctor.report import AllReduce, Check, Finding, Meeting, RankFacts, guarded, merged
from tests.fakes import FakeNvml
from tests.hardware.machines import CPU, broken_gpu, gpu, machine

GOOD = {"lockstep": "0.1.0", "torch": "2.13.0+cu130", "nccl": "2.28.9", "driver": "580.65.06 (up to CUDA 13.0)"}


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = {finding.name: finding for finding in findings}
    assert all(finding.why for finding in found.values())
    assert all(finding.fix for finding in found.values() if finding.status in {"warn", "fail"})
    return found


def statuses(findings: Iterable[Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in by_name(findings).items()}


def fake(*healths: GpuHealth, links: dict[tuple[int, int], GpuLink] | None = None) -> FakeNvml:
    gpus = [NvmlGpu(f"GPU-{index}", "NVIDIA Test", (9, 0), 80, 80) for index in range(4)]
    return FakeNvml(
        gpus,
        health={f"GPU-{index}": health for index, health in enumerate(healths)},
        links={(f"GPU-{a}", f"GPU-{b}"): link for (a, b), link in (links or {}).items()},
    )


def test_devices_that_can_be_used() -> None:
    finding = only(check_devices(GOOD, machine(2), ["gpu:0", "gpu:1"]))
    assert finding.status == "ok"
    assert "gpu:1" in finding.what and "nccl 2.28.9" in finding.what and "CUDA 13.0" in finding.what
    searched = replace(CPU, note="the search for accelerators failed: no answer")
    assert statuses(check_devices(GOOD, [searched], ["cpu"])) == {"devices": "warn"}
    assert only(check_devices({**GOOD, "nccl": ""}, machine(1), ["gpu:0"])).status == "ok", "one GPU needs no NCCL"
    assert only(check_devices(gather_versions(None), machine(0), ["cpu"])).status == "ok"


def test_a_torch_that_fits_neither_driver_nor_gpus() -> None:
    old_driver = only(check_devices(GOOD, [CPU, broken_gpu(0)], ["cpu"]))
    assert (old_driver.status, "the driver is too old" in old_driver.what) == ("fail", True)
    assert only(check_devices({**GOOD, "nccl": ""}, machine(2), ["gpu:0"])).status == "fail"


@pytest.mark.parametrize(
    ("health", "ecc", "clocks"),
    [
        (GpuHealth(temperature_c=40, ecc=True, ecc_errors=0), "ok", "ok"),
        (GpuHealth(), "skip", "ok"),
        (GpuHealth(ecc=True, ecc_errors=3), "fail", "ok"),
        (GpuHealth(ecc=True, repair="pending"), "warn", "ok"),
        (GpuHealth(ecc=True, repair="failed"), "fail", "ok"),
        (GpuHealth(ecc=True, temperature_c=91, slowdowns=("hot",)), "ok", "warn"),
    ],
)
def test_ecc_and_throttling(health: GpuHealth, ecc: str, clocks: str) -> None:
    found = statuses(check_health(fake(health), [gpu(0)]))
    assert found == {"ECC of gpu:0": ecc, "clocks of gpu:0": clocks}


def test_peer_access() -> None:
    near = GpuLink(peer=True, nvlink=True)
    far = GpuLink(peer=False, nvlink=False)
    nvml = fake(links={(0, 1): near, (0, 2): far, (1, 2): far})
    assert statuses(check_links(nvml, [gpu(0)])) == {"peer access": "skip"}
    joined = by_name(check_links(nvml, [gpu(0), gpu(1)]))["peer access"]
    assert (joined.status, "NVLink" in joined.what) == ("ok", True)
    apart = by_name(check_links(nvml, [gpu(0), gpu(1), gpu(2)]))["peer access"]
    assert apart.status == "warn"
    assert re.search(r"2 of 3 pairs.*gpu:1 .*gpu:2", apart.what)


@pytest.mark.parametrize(
    ("shared", "status"),
    [
        ((8_000_000_000, 8_000_000_000), "ok"),
        ((67_108_864, 67_000_000), "warn"),
        ((67_108_864, 1_000_000), "fail"),
        ((0, 0, "No such file or directory"), "fail"),
    ],
)
def test_shared_memory(shared: tuple[Any, ...], status: str) -> None:
    assert statuses(check_shared_memory(*shared)) == {"shared memory": status}


def test_limits() -> None:
    assert only(check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4)).status == "ok"
    assert only(check_open_files(4096, 4096, 4)).status == "ok"
    assert "ulimit -n" in only(check_open_files(256, 1_000_000, 4)).fix
    few = only(check_open_files(256, 256, 4))
    assert (few.status, "administrator" in few.fix) == ("warn", True)


def test_what_this_machine_really_has() -> None:
    assert shared_memory()[0] > 0
    assert shared_memory(Path("/no/such/folder"))[2]


def test_a_run_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    folder = probe_run_folder(tmp_path / "not" / "there")
    assert (folder.error, folder.atomic) == ("", True)
    assert folder.fsync_s > 0 and folder.free > 0
    assert list(tmp_path.iterdir()) == []
    assert statuses(check_run_folder(replace(folder, fsync_s=0.01, free=10**10))) == dict.fromkeys(
        ("run folder", "atomic rename", "disk speed", "free space"), "ok"
    )
    bad = statuses(check_run_folder(RunFolder(tmp_path, "", False, 0.5, 1_000)))
    assert bad == {"run folder": "ok", "atomic rename": "fail", "disk speed": "warn", "free space": "fail"}


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    finding = by_name(check_run_folder(probe_run_folder(tmp_path / "file" / "runs")))["run folder"]
    assert finding.status == "fail"
    assert "Not a directory" in finding.what and "--runs-dir" in finding.fix
    assert (tmp_path / "file").read_text() == "mine"


RANKS = tuple(RankFacts(rank=rank, host=f"n{rank}", device="gpu:0") for rank in range(2))
ROWS = (AllReduce(bytes=4096, seconds=5e-5, bus_gb_s=0.1), AllReduce(bytes=64 << 20, seconds=1e-3, bus_gb_s=67.1))
MEETING = Meeting(backend="nccl", ranks=RANKS, all_reduce=ROWS)


def test_ranks_that_met_well() -> None:
    found = by_name(check_meeting(MEETING))
    assert {name: finding.status for name, finding in found.items()} == {
        "ranks": "ok",
        "all-reduce": "ok",
        "bandwidth": "ok",
    }
    assert "0 on gpu:0 of n0" in found["ranks"].what


def test_sums_that_are_wrong_or_slow() -> None:
    rows = (ROWS[0], ROWS[1].model_copy(update={"wrong": (1,), "bus_gb_s": 0.5}))
    found = by_name(check_meeting(MEETING.model_copy(update={"all_reduce": rows})))
    assert found["all-reduce"].status == "fail" and "rank 1 at 64 MiB" in found["all-reduce"].what
    assert found["bandwidth"].status == "warn"


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Iterable[Finding]:
        yield Finding("first", "ok", "said before", "it matters")
        raise ZeroDivisionError("a mistake of ours")

    finding = by_name(guarded("limits", broken))["limits"]
    assert (finding.status, "a mistake of ours" in finding.what) == ("warn", True)


def test_an_error_keeps_its_own_fix() -> None:
    check = Check("ranks", "they train together")
    assert check.failed(DataError("gone", fix="fetch it"), "look").fix == "fetch it"
    known = check.failed(RuntimeError("CUDA out of memory"), "look")
    assert "devices" in known.fix
    assert check.failed(RuntimeError("never seen"), "look").fix == "look"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["n1", "n2", "n3"]))))
def test_what_nodes_say_alike_is_said_once(said: list[tuple[str, str]]) -> None:
    findings = [Finding(name, "ok", "what", "why", node=node) for name, node in said]
    together = merged(findings)
    assert len(together) == len({name for name, _ in said})
    for finding in together:
        assert set(finding.node.split(", ")) == {node for name, node in said if name == finding.name}
