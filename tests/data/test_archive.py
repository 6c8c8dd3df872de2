from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from lockstep.data.download import extract, put_unpacked
from lockstep.errors import DataError

KINDS = ["zip", "tar.gz"]


def unpacked(archive: Path, target: Path, max_bytes: int = 10**6) -> Path:
    put_unpacked(archive, target, lambda folder: extract(archive, folder / "files", max_bytes=max_bytes))
    return target


def make(path: Path, entries: dict[str, bytes]) -> Path:
    """A zip or a compressed tar archive, by the name of ``path``."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in entries.items():
                packed.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_folders_come_out_and_nothing_is_overwritten(kind: str, tmp_path: Path) -> None:
    archive = make(tmp_path / f"a.{kind}", {"top.txt": b"1", "folder/deep/file.txt": b"2"})
    out = unpacked(archive, tmp_path / "new" / "out")
    assert (out / "top.txt").read_bytes() == b"1"
    assert (out / "folder/deep/file.txt").read_bytes() == b"2"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    (out / "top.txt").write_bytes(b"mine")
    assert (unpacked(archive, out) / "top.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:\\evil.txt"])
def test_an_entry_that_leaves_the_folder_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    archive = make(tmp_path / f"a.{kind}", {"good.txt": b"1", name: b"2"})
    with pytest.raises(DataError, match="has the entry"):
        unpacked(archive, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [archive]


def test_a_link_in_a_zip_archive_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc")
    with pytest.raises(DataError, match="has the entry 'link'"):
        unpacked(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize(("kind", "target"), [(tarfile.SYMTYPE, "/etc"), (tarfile.LNKTYPE, "file")])
def test_a_link_in_a_tar_archive_is_refused(kind: bytes, target: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = kind, target
        archive.addfile(entry)
    with pytest.raises(DataError, match="has the entry 'link'"):
        unpacked(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "large", "missing"])
def test_an_archive_that_cannot_be_used_leaves_nothing(damage: str, kind: str, tmp_path: Path) -> None:
    archive = make(tmp_path / f"a.{kind}", {"file": bytes(range(256)) * 40})
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[60] ^= 0xFF
    archive.write_bytes(b"no archive" if damage == "text" else bytes(content))
    if damage == "missing":
        archive.unlink()
    with pytest.raises(DataError, match="would grow to more than" if damage == "large" else "cannot unpack"):
        unpacked(archive, tmp_path / "out", max_bytes=1000 if damage == "large" else 10**6)
    assert list(tmp_path.iterdir()) == ([] if damage == "missing" else [archive])
