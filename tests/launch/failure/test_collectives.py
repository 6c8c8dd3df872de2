"""NCCL's flight recorder in the failure report; the files are as torch 2.9 to 2.13 write them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.failure.collectives import missing_ranks


def entry(number: int, name: str = "all_reduce", state: str = "completed", **changes: Any) -> dict[str, Any]:
    return {
        **{"record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number},
        **{
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 17,
            "duration_ms": 1.0,
        },
        **{"input_sizes": ((1024, 8),), "input_dtypes": ["Float"], "output_sizes": ((1024, 8),), "state": state},
        **{"output_dtypes": ["Float"], "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": False},
        "frames": [
            {"name": "all_reduce", "filename": "/usr/lib/torch/distributed/distributed_c10d.py", "line": 3000},
            {"name": "loss", "filename": "/home/me/task.py", "line": 42},
        ],
        **changes,
    }


def dump(logs: Path, rank: int, *entries: dict[str, Any]) -> None:
    content = {
        "version": "2.10",
        "comm_lib_version": "2.29.3",
        "pg_config": {},
        "pg_status": {},
        "entries": list(entries),
    }
    (logs / f"nccl-rank-{rank}").write_bytes(pickle.dumps(content, protocol=2))


def test_a_rank_that_has_not_called_the_collective(tmp_path: Path) -> None:
    dump(tmp_path, 0, entry(117), entry(118, state="started"), entry(119, state="scheduled"))
    dump(tmp_path, 1, entry(116), entry(117))
    dump(tmp_path, 2, entry(117), entry(118, state="started"))
    assert missing_ranks(tmp_path).splitlines() == [
        "NCCL's flight recorder:",
        "  ranks 0, 2 called all_reduce of 1024×8 (number 118) at /home/me/task.py:42",
        "  rank 1 has not called number 118; its last is all_reduce of 1024×8 (number 117)",
    ]


def test_ranks_that_call_different_collectives(tmp_path: Path) -> None:
    dump(tmp_path, 0, entry(5, state="started"))
    dump(tmp_path, 1, entry(5, "broadcast", "started", input_sizes=((),), frames=[]))
    text = missing_ranks(tmp_path)
    assert "rank 0 called all_reduce of 1024×8 (number 5)" in text
    assert "rank 1 called broadcast of 1 (number 5)\n" in text
    assert "the ranks called different collectives" in text


def test_all_called_it(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, entry(4), entry(5, state="started"), entry(9, "send", "scheduled", is_p2p=True))
    assert "ranks 0, 1 called all_reduce" in missing_ranks(tmp_path)
    assert "all ranks called it" in missing_ranks(tmp_path)


def test_nothing_to_say(tmp_path: Path) -> None:
    assert missing_ranks(tmp_path) == ""
    dump(tmp_path, 0, entry(4))
    assert missing_ranks(tmp_path) == ""


class _Command:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


def test_damaged_files_and_code_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump(tmp_path, 0, entry(5, state="started"))
    (tmp_path / "nccl-rank-1").write_bytes(b"\x80\x02}q\x00")
    (tmp_path / "nccl-rank-2").write_bytes(pickle.dumps({"entries": [_Command()]}))
    (tmp_path / "nccl-rank-3").write_bytes(pickle.dumps({"entries": [{"profiling_name": "nccl:x"}]}))
    (tmp_path / "nccl-rank-x").write_bytes(b"")
    assert missing_ranks(tmp_path).splitlines()[1:] == [
        "  rank 0 called all_reduce of 1024×8 (number 5) at /home/me/task.py:42",
        "  all ranks called it: the connection between them, or a GPU, does not continue",
    ]
    assert not (tmp_path / "made").exists()
