from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from lockstep.data.archive import extract_tar, extract_zip
from lockstep.errors import DataError


def make_zip(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def test_files_and_folders_come_out(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"top.txt": b"1", "folder/deep/file.txt": b"2"})
    out = extract_zip(archive, tmp_path / "new" / "out")
    assert (out / "top.txt").read_bytes() == b"1"
    assert (out / "folder/deep/file.txt").read_bytes() == b"2"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:\\evil.txt"])
def test_an_entry_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"good.txt": b"1", name: b"2"})
    with pytest.raises(DataError, match="holds the entry"):
        extract_zip(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc")
    with pytest.raises(DataError, match="holds the entry 'link'"):
        extract_zip(tmp_path / "a.zip", tmp_path / "out")


def test_an_archive_that_grows_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"zeros": bytes(10_000)})
    with pytest.raises(DataError, match="would grow to more than 9999 bytes"):
        extract_zip(archive, tmp_path / "out", max_bytes=9_999)


@pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
def test_a_broken_archive_leaves_nothing(damage: str, tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"file": bytes(range(256)) * 40})
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[60] ^= 0xFF
    archive.write_bytes(b"no archive" if damage == "text" else bytes(content))
    with pytest.raises(DataError, match="not a usable zip archive"):
        extract_zip(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"file": b"1"})
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="exists already"):
        extract_zip(archive, tmp_path / "out")


def test_a_missing_archive_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot unpack"):
        extract_zip(tmp_path / "none.zip", tmp_path / "out")


def make_tar(path: Path, entries: dict[str, bytes], **links: str) -> Path:
    """Files, and links of kind ``symbolic`` or ``hard`` to a target."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for kind, target in links.items():
            entry = tarfile.TarInfo("link")
            entry.type, entry.linkname = tarfile.SYMTYPE if kind == "symbolic" else tarfile.LNKTYPE, target
            archive.addfile(entry)
    return path


def test_a_tar_archive_comes_out_whole(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", {"top.txt": b"1", "folder/deep/file.txt": b"2"})
    out = extract_tar(archive, tmp_path / "new" / "out")
    assert (out / "top.txt").read_bytes() == b"1"
    assert (out / "folder/deep/file.txt").read_bytes() == b"2"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    with pytest.raises(DataError, match="exists already"):
        extract_tar(archive, out)


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt"])
def test_a_tar_entry_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", {"good.txt": b"1", name: b"2"})
    with pytest.raises(DataError, match="holds the entry"):
        extract_tar(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz"]


@pytest.mark.parametrize("links", [{"symbolic": "/etc"}, {"hard": "file"}])
def test_a_link_in_a_tar_archive_is_refused(links: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds the entry 'link'"):
        extract_tar(make_tar(tmp_path / "a.tar.gz", {"file": b"1"}, **links), tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "large"])
def test_a_tar_archive_that_cannot_be_used_leaves_nothing(damage: str, tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", {"file": bytes(range(256)) * 40})
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    archive.write_bytes(b"no archive" if damage == "text" else bytes(content))
    with pytest.raises(DataError, match="would grow" if damage == "large" else "not a usable tar archive"):
        extract_tar(archive, tmp_path / "out", max_bytes=1000 if damage == "large" else 10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz"]
