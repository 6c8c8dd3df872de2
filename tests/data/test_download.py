from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import DataError
from tests.data.web import Site, serve
from tests.gloo import ROOT

CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
IMPATIENT = {"attempts": 3, "backoff_s": 0.0}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(Site(CONTENT)) as running:
        yield running


def start_process(url: str, target: Path, sha256: str = SHA256) -> subprocess.Popen[str]:
    """A process that downloads, and prints the error's dictionary when that fails."""
    code = (
        "import sys; from pathlib import Path; from lockstep.data.download import download\n"
        "from lockstep.errors import DataError\n"
        "url, target, sha256 = sys.argv[1:]\n"
        "try: download(url, Path(target), sha256, attempts=2, backoff_s=0)\n"
        "except DataError as error: sys.exit(f'DataError: {error}')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, url, str(target), sha256]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_waiter(target: Path, pid: int) -> None:
    """Until the kernel says that process ``pid`` waits for the lock (proc_locks(5): ``->`` marks waiters)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        locks = Path("/proc/locks").read_text().splitlines()
        if any("->" in line and f" {pid} " in line for line in locks):
            return
        time.sleep(0.01)
    pytest.fail("the second process never waited")


def test_a_file_comes_whole_and_nothing_else_stays(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.bin"
    assert download(site.url, target, SHA256) == target
    assert target.read_bytes() == CONTENT
    assert sorted(path.name for path in target.parent.iterdir()) == [".file.bin.lock", "file.bin"]


def test_a_file_that_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(CONTENT)
    download(site.url, target, SHA256)
    assert site.asked == []


def test_a_wrong_file_that_is_there_is_named_and_kept(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(b"something of the user's")
    with pytest.raises(DataError):
        download(site.url, target, SHA256)
    assert target.read_bytes() == b"something of the user's"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drops=st.lists(st.integers(0, 120_000), max_size=5))
def test_dropped_connections_do_not_matter(drops: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("download") / "file.bin"
    with serve(Site(CONTENT, drops=list(drops))) as site:
        download(site.url, target, SHA256, attempts=6, backoff_s=0.0)
    assert target.read_bytes() == CONTENT


def test_a_server_that_never_gets_further_is_given_up(site: Site, tmp_path: Path) -> None:
    site.drops, site.statuses = [1000] + [0] * 10, []
    with pytest.raises(DataError):
        download(site.url, tmp_path / "file.bin", SHA256, **IMPATIENT)
    assert len(site.asked) == 3
    site.drops, site.statuses = [], [503, 503]
    download(site.url, tmp_path / "file.bin", SHA256, **IMPATIENT)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_final_refusal_is_not_tried_again(site: Site, tmp_path: Path) -> None:
    site.statuses = [404]
    with pytest.raises(DataError) as caught:
        download(site.url, tmp_path / "file.bin", SHA256)
    assert "404" in caught.value.why
    assert len(site.asked) == 1


def test_nobody_answers(tmp_path: Path) -> None:
    with serve(Site(CONTENT)) as site:
        gone = site.url
    with pytest.raises(DataError) as caught:
        download(gone, tmp_path / "file.bin", SHA256, **IMPATIENT)
    assert "refused" in caught.value.why


def test_a_wrong_checksum_leaves_no_file(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        download(site.url, tmp_path / "file.bin", "0" * 64)
    assert SHA256 in caught.value.why
    assert [path.name for path in tmp_path.iterdir()] == [".file.bin.lock"]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "har"])
def test_only_web_addresses_are_fetched(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        download(url, tmp_path / "file.bin", SHA256)
    assert caught.value.fix


def test_a_folder_that_cannot_be_made_is_a_clear_error(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError):
        download(site.url, tmp_path / "file" / "x.bin", SHA256)


def test_two_processes_fetch_once(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    site.gate = threading.Event()
    first = start_process(site.url, target)
    assert site.half_sent.wait(60)
    second = start_process(site.url, target)
    wait_for_waiter(target, second.pid)
    site.gate.set()
    assert [first.communicate(timeout=60)[1], second.communicate(timeout=60)[1]] == ["", ""]
    assert target.read_bytes() == CONTENT
    assert len(site.asked) == 1


def test_when_the_downloading_process_is_killed_the_waiting_one_goes_on(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    site.gate = threading.Event()
    first = start_process(site.url, target)
    assert site.half_sent.wait(60)
    second = start_process(site.url, target)
    wait_for_waiter(target, second.pid)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    site.gate.set()
    assert second.communicate(timeout=60)[1] == ""
    assert target.read_bytes() == CONTENT


# Archives


def unpacked(archive: Path, target: Path) -> Path:
    put_unpacked(archive, target, lambda folder: extract(archive, folder / "files"))
    return target


def make(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    return path


def test_files_and_folders_come_out_and_nothing_is_overwritten(tmp_path: Path) -> None:
    archive = make(tmp_path / "a.zip", {"top.txt": b"1", "folder/deep/file.txt": b"2"})
    out = unpacked(archive, tmp_path / "new" / "out")
    assert (out / "top.txt").read_bytes() == b"1"
    assert (out / "folder/deep/file.txt").read_bytes() == b"2"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    (out / "top.txt").write_bytes(b"mine")
    assert (unpacked(archive, out) / "top.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "missing"])
def test_an_archive_that_cannot_be_used_leaves_nothing(damage: str, tmp_path: Path) -> None:
    archive = make(tmp_path / "a.zip", {"file": bytes(range(256)) * 40})
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[60] ^= 0xFF
    archive.write_bytes(b"no archive" if damage == "text" else bytes(content))
    if damage == "missing":
        archive.unlink()
    with pytest.raises(DataError, match=re.escape(str(archive))):
        unpacked(archive, tmp_path / "out")
    assert list(tmp_path.iterdir()) == ([] if damage == "missing" else [archive])
