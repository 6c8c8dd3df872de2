"""``system-<node>.jsonl`` of a run, and reading the newest row of a file that grows."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lockstep.rundir.files import JsonLines, last_row, read_jsonl
from lockstep.rundir.summary import newest_samples
from lockstep.telemetry.sinks import monitored
from tests.rundir.runs import JSON_VALUES, ON_TMP_PATH


def test_each_node_has_a_file(tmp_path: Path) -> None:
    for node in (0, 1, 0):
        with monitored(tmp_path, ["cpu"], node=node):
            pass
    assert len(read_jsonl(tmp_path / "system-0.jsonl")) == 2, "a resumed run goes on with its file"
    first, second = newest_samples(tmp_path)
    assert first["time"] > second["time"]
    assert first["host"]["cpu"] >= 0


def test_a_folder_that_vanished_ends_nothing(tmp_path: Path) -> None:
    with monitored(tmp_path / "gone", ["cpu"]) as monitor:
        pass
    assert monitor.error is None
    assert not (tmp_path / "gone").exists()
    assert newest_samples(tmp_path / "gone") == []


@ON_TMP_PATH
@given(st.lists(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3)), st.binary(max_size=50))
def test_the_last_row_is_the_last_whole_one(tmp_path: Path, rows: list[dict[str, object]], torn: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.unlink(missing_ok=True)
    lines = JsonLines(file)
    for row in rows:
        lines.append(row)
    with file.open("ab") as opened:
        opened.write(torn.replace(b"\n", b""))
    assert last_row(file) == (read_jsonl(file)[-1] if rows else None)


def test_the_last_row_of_a_long_file_and_of_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text":"' + b"x" * 500_000 + b'"}\n{"n":1}\n{"n":2}\n{"n":')
    assert last_row(file) == {"n": 2}
    assert last_row(tmp_path / "none.jsonl") is None
