"""Checkpoints: whole or not there, proved by hashes, never code."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.checkpoint.manifest import Digest, folder_name, read_manifest, step_in
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.errors import CheckpointError, StorageError, UnreadableError
from lockstep.rundir.files import read_json, write_json
from tests.disks import make_read_only, small_disk

FILES = ["model.safetensors", "trainer.pt", "manifest.json"]


def snapshot(step: int, value: float | None = None, size: int = 100) -> Snapshot:
    filled = float(step) if value is None else value
    return Snapshot(
        step,
        {"w": torch.full((size,), filled), "b": torch.tensor(filled)},
        {"value": filled, "moments": [torch.full((size,), filled)]},
        {"epoch": step, "note": f"é {filled}"},
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_whole(store: CheckpointStore, step: int, value: float | None = None) -> None:
    expected, found = snapshot(step, value), store.load(step)
    assert found.manifest == expected.manifest and found.trainer["value"] == expected.trainer["value"]
    assert all(torch.equal(found.model[name], tensor) for name, tensor in expected.model.items())
    assert torch.equal(found.trainer["moments"][0], expected.trainer["moments"][0])


# Saving and loading.


def test_what_is_saved_is_loaded(store: CheckpointStore) -> None:
    path = store.save(snapshot(123))
    assert path == store.path_of(123) == store.folder / "step-00000123" and names_in(path) == set(FILES)
    assert_whole(store, 123)
    assert store.manifest(123) == snapshot(123).manifest
    manifest = read_json(path / "manifest.json")
    assert (manifest["format_version"], manifest["step"], manifest["epoch"]) == (1, 123, 123)
    for name in FILES[:2]:
        assert manifest["files"][name].keys() == {"size", "sha256"}
        assert manifest["files"][name]["size"] == (path / name).stat().st_size


def frozen(step: int, value: float = 0.0) -> Snapshot:
    """With a tied pair of a megabyte that training does not change, unless ``value`` differs."""
    base = torch.full((512, 512), value)
    model = {**snapshot(step).model, "base": base, "tied": base}
    return replace(snapshot(step), model=model, frozen=("base", "tied", "absent"))


def test_frozen_weights_are_written_once_and_every_checkpoint_has_them(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        store.save(frozen(step))
    files = [store.path_of(step) / "frozen.safetensors" for step in (1, 2, 3)]
    assert len({file.stat().st_ino for file in files}) == 1
    changing = sum(file.stat().st_size for file in store.path_of(3).iterdir() if file != files[2])
    assert changing < 20_000 < files[0].stat().st_size
    assert read_json(store.path_of(3) / "manifest.json")["format_version"] == 3
    store.retain([3])
    store.save(frozen(4, value=1.0))  # it was changed after all
    store.save(replace(frozen(5), frozen=()))
    store.save(frozen(6, value=1.0))
    assert (store.path_of(6) / "frozen.safetensors").stat().st_nlink == 2
    shutil.copytree(store.path_of(4), tmp_path / "other" / store.path_of(4).name)  # whole without the others
    for place, step, value in (
        (store, 3, 0),
        (store, 4, 1),
        (store, 5, 0),
        (CheckpointStore(tmp_path / "other"), 4, 1),
    ):
        found = place.load(step).model
        assert found["tied"] is found["base"] and torch.equal(found["base"], torch.full((512, 512), float(value)))
        assert torch.equal(found["w"], snapshot(step).model["w"]) and found.keys() == {"w", "b", "base", "tied"}
    content = bytearray(files[2].read_bytes())
    content[-1] ^= 1
    files[2].write_bytes(content)
    with pytest.raises(CheckpointError, match=r"frozen\.safetensors"):
        store.load(3)


def test_a_file_system_without_hard_links_gets_copies(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(Path, "hardlink_to", refuses)
    store.save(frozen(1))
    store.save(frozen(2))
    assert (store.path_of(2) / "frozen.safetensors").stat().st_nlink == 1
    assert torch.equal(store.load(2).model["base"], torch.zeros(512, 512))


def test_last_and_best_are_relative_links_that_move(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.step_of("last") is store.step_of("best") is None and store.steps() == []
    store.save(snapshot(1), best=True)
    store.save(snapshot(2))
    assert (store.step_of("last"), store.step_of("best"), store.step_of("../last")) == (2, 1, None)
    assert (store.folder / "last").readlink() == Path("step-00000002")
    store.folder.rename(tmp_path / "moved")
    moved = CheckpointStore(tmp_path / "moved")
    assert moved.step_of("best") == 1 and (moved.folder / "best" / "manifest.json").exists()


def test_a_copy_of_the_folder_that_followed_links_goes_on(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(snapshot(1), best=True)
    store.save(snapshot(2))
    copy = CheckpointStore(tmp_path / "copy")
    shutil.copytree(store.folder, copy.folder)
    assert not (copy.folder / "last").is_symlink()
    assert (copy.step_of("last"), copy.step_of("best")) == (2, 1)
    copy.save(snapshot(3))
    assert (copy.step_of("last"), copy.step_of("best")) == (3, 1) and (copy.folder / "last").is_symlink()
    copy.retain([3])
    copy.save(snapshot(4), best=True)
    assert copy.step_of("best") == 4
    assert names_in(copy.folder) == {*map(folder_name, (1, 3, 4)), "last", "best"}


def test_without_symbolic_links_text_files_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **how: Any) -> None:
        raise OSError(95, os.strerror(95))

    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as without_links:
        without_links.setattr(Path, "symlink_to", refuses)
        store.save(snapshot(1), best=True)
        store.save(snapshot(2))
    assert (store.step_of("last"), store.step_of("best")) == (2, 1) and not (tmp_path / "last").is_symlink()
    store.retain(set())
    assert store.steps() == [1, 2]
    CheckpointStore(tmp_path).save(snapshot(3))
    assert store.step_of("last") == 3 and (tmp_path / "last").is_symlink()


@pytest.mark.parametrize("content", ["step-00000009", "../../etc", "step-1", "", "\xff"])
def test_a_pointer_to_nowhere_is_no_checkpoint(store: CheckpointStore, content: str) -> None:
    store.save(snapshot(1))
    (store.folder / "last").unlink()
    (store.folder / "last").write_bytes(content.encode("latin-1"))
    assert store.step_of("last") is None


def test_a_folder_whose_name_is_not_unicode(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / os.fsdecode(b"caf\xe9: 'a b'\n"))
    store.save(snapshot(1))
    assert_whole(store, 1)


def test_the_same_content_again_is_left_alone(store: CheckpointStore) -> None:
    before = store.save(snapshot(1)).stat().st_ino
    assert store.save(snapshot(1), best=True).stat().st_ino == before and store.step_of("best") == 1
    assert store.save(snapshot(1, 7.0)).stat().st_ino != before
    assert_whole(store, 1, 7.0)
    assert names_in(store.folder) == {"step-00000001", "last", "best"}


def test_the_same_content_over_a_broken_checkpoint_mends_it(store: CheckpointStore) -> None:
    flip(store.save(snapshot(1)) / "trainer.pt", 40)
    store.save(snapshot(1))
    assert_whole(store, 1)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()),
        max_size=5,
    )
)
def test_any_dense_tensors_survive(kinds: dict[str, tuple[torch.dtype, list[int], bool]]) -> None:
    model: dict[str, Tensor] = {}
    for name, (dtype, shape, transposed) in kinds.items():
        tensor = (torch.rand(shape) * 8).to(dtype)
        model[name] = tensor.mT if transposed and len(shape) >= 2 else tensor
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        path = store.save(Snapshot(1, model, {}, {}))
        for loaded in (store.load(1).model, load_file(path / "model.safetensors")):
            assert loaded.keys() == model.keys()
            for name, tensor in model.items():
                assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_tied_weights_are_written_once_and_stay_tied(store: CheckpointStore) -> None:
    embed = nn.Embedding(100, 8)
    head = nn.Linear(8, 100, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    path = store.save(Snapshot(1, model.state_dict(), {}, {}))
    assert (path / "model.safetensors").stat().st_size < 2 * 100 * 8 * 4
    loaded = store.load(1).model
    assert loaded["head.weight"] is loaded["embed.weight"] and torch.equal(loaded["head.weight"], embed.weight)
    assert read_json(path / "manifest.json")["aliases"] == {"head.weight": "embed.weight"}
    model.load_state_dict(loaded)


def test_views_of_one_storage_are_written_separately(store: CheckpointStore) -> None:
    flat = torch.arange(12.0)
    model = {"whole": flat, "part": flat[3:6], "matrix": flat.view(3, 4), "turned": flat.view(3, 4).T}
    store.save(Snapshot(1, model, {}, {}))
    loaded = store.load(1).model
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128), torch.empty(2, device="meta")]
)
def test_a_tensor_without_a_form_is_refused_by_name(store: CheckpointStore, tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"layer\.odd") as caught:
        store.save(Snapshot(1, {"layer.odd": tensor}, {}, {}))
    assert caught.value.why and caught.value.fix and names_in(store.folder) == set()


@pytest.mark.parametrize("odd", [Path("x"), snapshot(1)], ids=["path", "object"])
def test_a_state_that_could_not_be_loaded_is_not_saved(store: CheckpointStore, odd: Any) -> None:
    with pytest.raises(CheckpointError, match=r".task. → 0") as caught:
        store.save(Snapshot(1, {}, {"task": [odd]}, {}))
    assert type(odd).__name__ in caught.value.why and names_in(store.folder) == set()


def test_numpy_values_are_kept(store: CheckpointStore) -> None:
    values = [np.arange(3), np.empty(0), b"", np.float32(0.5), np.array(["a", "bc"]), np.bool_(True)]
    values += [np.datetime64("2026-11-23")]
    path = store.save(Snapshot(1, {}, {"task": values}, {}))
    assert [str(value) for value in store.load(1).trainer["task"]] == [str(value) for value in values]
    with pytest.raises(CheckpointError, match=r".task. → 0"):
        store.save(Snapshot(2, {}, {"task": [np.array([Path("x")])]}, {}))
    assert names_in(store.folder) == {path.name, "last"}


def test_loading_runs_no_code(store: CheckpointStore, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    path = store.save(snapshot(1))
    (path / "trainer.pt").write_bytes(pickle.dumps({"state": Evil()}))
    forge_hashes(path)
    with pytest.raises(CheckpointError, match=r"trainer\.pt"):
        store.load(1)
    assert not (tmp_path / "owned").exists()


def forge_hashes(path: Path) -> None:
    """Make a manifest that fits the files in ``path``."""
    contents = {name: (path / name).read_bytes() for name in FILES[:2]}
    files = {name: Digest(len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}
    write_json(path / "manifest.json", replace(read_manifest(path), files=files).as_json())


def test_a_newer_format_asks_for_an_upgrade(store: CheckpointStore) -> None:
    path = store.save(snapshot(1))
    write_json(path / "manifest.json", {**read_json(path / "manifest.json"), "format_version": 99})
    for read in (lambda: store.load(1), lambda: store.newest_verified(pytest.fail)):
        with pytest.raises(CheckpointError, match=path.name) as caught:
            read()
        assert "upgrade" in caught.value.fix


def test_a_missing_step_says_what_there_is(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"\bstep 3\b") as caught:
        store.load(3)
    assert "holds none" in caught.value.why
    store.save(snapshot(7))
    with pytest.raises(CheckpointError) as caught:
        store.verify(3)
    assert "7" in caught.value.why


# Damage.


def flip(path: Path, position: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first bit": lambda path: flip(path, 0, 0),
    "a middle bit": lambda path: flip(path, path.stat().st_size // 2),
    "a late bit": lambda path: flip(path, path.stat().st_size - 9),
    # (The last byte of a manifest is a line feed that nobody misses.)
    "two bytes short": lambda path: os.truncate(path, path.stat().st_size - 2),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_named_and_fallen_back_from(store: CheckpointStore, name: str, damage: str) -> None:
    for step in (1, 2, 3):
        store.save(snapshot(step))
    DAMAGE[damage](store.path_of(3) / name)
    with pytest.raises(CheckpointError, match=name):
        store.load(3)
    heard: list[str] = []
    assert store.newest_verified(heard.append) == 2
    assert len(heard) == 1 and "step 3" in heard[0] and name in heard[0]
    assert store.set_aside_after(2) == [3] and store.steps() == [1, 2] and store.step_of("last") is None
    store.save(snapshot(3))
    assert_whole(store, store.newest_verified(pytest.fail) or 0)


def test_any_flipped_bit_of_a_manifest_is_found(store: CheckpointStore) -> None:
    path = store.save(snapshot(1))
    good = (path / "manifest.json").read_bytes()
    for position in range(len(good)):
        flip(path / "manifest.json", position, position % 8)
        with pytest.raises(CheckpointError):
            read_manifest(path)
        (path / "manifest.json").write_bytes(good)


def test_when_all_are_broken_each_is_told(store: CheckpointStore) -> None:
    for step in (1, 2):
        (store.save(snapshot(step)) / "model.safetensors").unlink()
    heard: list[str] = []
    assert store.newest_verified(heard.append) is None and len(heard) == 2


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_cannot_be_read_now_is_not_taken_for_broken(store: CheckpointStore, name: str) -> None:
    for step in (1, 2):
        store.save(snapshot(step))
    newest = store.path_of(2)
    manifest = read_manifest(newest)
    write_json(newest / "manifest.json", replace(manifest, files={**manifest.files, name: Digest(0, "")}).as_json())
    (newest / name).unlink()
    (newest / name).symlink_to("/proc/self/mem")  # an empty file whose reading fails with EIO
    for read in (lambda: store.verify(2), lambda: store.newest_verified(pytest.fail)):
        with pytest.raises(UnreadableError, match=name) as caught:
            read()
        assert os.strerror(errno.EIO) in caught.value.why and caught.value.fix


def test_what_is_set_aside_stays_until_training_has_passed_it(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(snapshot(step))
    assert store.set_aside_after(1) == [2, 3] and store.steps() == [1]
    store.save(snapshot(2))
    store.retain([1, 2])
    assert names_in(store.folder) == {"step-00000001", "step-00000002", "step-00000003.broken", "last"}
    assert store.set_aside_after(None) == [1, 2] and store.steps() == []
    store.save(snapshot(2, 7.0))
    assert store.set_aside_after(None) == [2], "a second one of a step takes the first one's place"
    store.save(snapshot(4))
    store.retain([4])
    assert names_in(store.folder) == {"step-00000004", "last"}


def test_a_renamed_checkpoint_is_not_taken_for_another_step(store: CheckpointStore) -> None:
    store.save(snapshot(1)).rename(store.path_of(9))
    with pytest.raises(CheckpointError, match="step-00000009"):
        store.load(9)


# Keeping.


@settings(deadline=None, max_examples=60)
@given(
    steps=st.sets(st.integers(0, 30), max_size=8),
    keep=st.sets(st.integers(0, 30), max_size=4),
    pointers=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_retention_keeps_what_is_asked_for_and_what_is_pointed_at(
    steps: set[int], keep: set[int], pointers: tuple[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        for step in steps:
            store.path_of(step).mkdir()
        for name, step in zip(("last", "best"), pointers, strict=True):
            (store.folder / name).symlink_to(folder_name(step))
        store.retain(keep)
        assert store.steps() == sorted(steps & {*keep, *pointers})
        assert names_in(store.folder) == {"last", "best", *map(folder_name, store.steps())}


@given(st.integers(0, 10**14))
def test_folder_names_sort_and_come_back(step: int) -> None:
    assert step_in(folder_name(step)) == step


@pytest.mark.parametrize("name", ["step-1", "step-٠٠٠٠٠٠٠١", "step-00000001.tmp", "xstep-00000001", "step-000000001"])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert step_in(name) is None


def test_a_pipe_in_place_of_a_checkpoint_is_removed_without_waiting_for_its_writer(store: CheckpointStore) -> None:
    store.save(snapshot(1))
    os.mkfifo(store.path_of(2))
    store.set_aside_after(1)
    store.save(snapshot(2))
    store.retain([2])
    assert names_in(store.folder) == {"step-00000002", "last"}


def test_cleaning_leaves_checkpoints_and_foreign_files(store: CheckpointStore) -> None:
    store.save(snapshot(1), best=True)
    (store.folder / ".step-00000002.tmp-1-abcd").mkdir()
    (store.folder / ".last.tmp-1-abcd").symlink_to("step-00000002")
    (store.folder / "notes.txt").write_text("mine")
    store.clean_temporary()
    assert names_in(store.folder) == {"step-00000001", "last", "best", "notes.txt"}
    CheckpointStore(store.folder / "missing").clean_temporary()


# Readers beside the writer.


@pytest.mark.slow
def test_readers_always_find_a_whole_checkpoint_while_one_is_written(store: CheckpointStore) -> None:
    store.save(snapshot(1, 0.0))
    done = threading.Event()
    broken: list[object] = []
    values: set[float] = set()

    def read() -> None:
        reader = CheckpointStore(store.folder)
        while not done.is_set():
            try:
                step = reader.newest_verified(broken.append)
                assert step is not None
                found = reader.load(step)
                value = found.trainer["value"]
                assert found.manifest == snapshot(step, value).manifest
                assert torch.equal(found.model["w"], torch.full((100,), value))
                values.add(value)
            except CheckpointError as error:
                if step in reader.steps():  # else it was retired between the two calls, as it may
                    broken.append(error)
            except Exception as error:
                broken.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(60):  # each step is replaced twice before the next, and the old ones go
        store.save(snapshot(n // 3 + 1, float(n)))
        store.retain(store.steps()[-2:])
    done.set()
    for reader in readers:
        reader.join()
    assert broken == [] and len(values) > 1


# Storage that refuses.


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over"])
def test_a_disk_that_fills_up_at_any_point_leaves_the_older_one(tmp_path: Path, over: bool) -> None:
    kib, size = 1024, 3000
    with small_disk(tmp_path / "disk", "96k") as disk:
        store = CheckpointStore(disk / "checkpoints")
        store.save(snapshot(1, size=size))
        before = names_in(store.folder)
        filler, outcomes = disk / "filler", []
        for free in range(0, 60, 4):
            statistics = os.statvfs(disk)
            filler.write_bytes(bytes(max(0, statistics.f_bavail * statistics.f_frsize - free * kib)))
            try:
                store.save(snapshot(1 if over else 2, 2.0, size=size))
                outcomes.append(True)
                break
            except StorageError as error:
                assert "space" in error.what and error.fix and error.exit_code == 1
                outcomes.append(False)
            assert store.newest_verified(pytest.fail) == 1 and store.load(1).trainer["value"] == 1.0
            assert names_in(store.folder) == before, "nothing temporary stays"
            filler.unlink()
        assert len(outcomes) > 4 and outcomes[-1], "some failed, and with enough space it works"
        assert store.newest_verified(pytest.fail) == (1 if over else 2)


@pytest.mark.parametrize("limit", [100, 1000, 5000, 13_000])
def test_a_file_size_limit_is_a_full_disk(store: CheckpointStore, limit: int) -> None:
    store.save(snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError):
            store.save(snapshot(2, size=3000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(store.folder) == {"step-00000001", "last"} and store.newest_verified(pytest.fail) == 1


def test_a_folder_that_becomes_read_only_can_still_be_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = CheckpointStore(disk)
        store.save(snapshot(1))
        store.save(snapshot(2))
        make_read_only(disk)
        for refused in (lambda: store.save(snapshot(3)), lambda: store.retain(()), lambda: store.set_aside_after(0)):
            with pytest.raises(StorageError) as caught:
                refused()
            assert "--save-dir" in caught.value.fix
        assert store.newest_verified(pytest.fail) == 2
