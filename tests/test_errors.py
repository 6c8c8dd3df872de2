"""Errors for people: they say what, why and the fix, and survive the way between processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from lockstep import errors
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LockstepError,
    RunError,
    RunFolderError,
    StorageError,
    UsageError,
    many,
)
from tests.gloo import run_ranks


def kinds(base: type[LockstepError] = LockstepError) -> Iterator[type[LockstepError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


KINDS = sorted({kind for kind in kinds() if kind.__module__ == errors.__name__}, key=lambda kind: kind.__name__)


def test_text_has_what_why_and_fix_on_lines_of_their_own() -> None:
    error = ConfigError("batch_size is 0", why="a batch holds samples", fix="set it to 1 or more")
    assert str(error).splitlines() == ["batch_size is 0", "why: a batch holds samples", "fix: set it to 1 or more"]
    assert str(ConfigError("only this")) == "only this"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_pickle_and_copy(kind: type[LockstepError]) -> None:
    error = kind("what", why="why", fix="fix")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.what, again.why, again.fix) == ("what", "why", "fix")


@pytest.mark.parametrize("kind", KINDS)
def test_exit_code_tells_wrong_usage_from_failure(kind: type[LockstepError]) -> None:
    before_a_run = UsageError, DataError, RunFolderError, CheckpointError
    assert kind.exit_code == (2 if issubclass(kind, before_a_run) else 1)


def test_every_concrete_kind_is_of_one_branch() -> None:
    for kind in KINDS:
        if kind is not LockstepError:
            branches = UsageError, DataError, RunFolderError, CheckpointError, RunError
            assert sum(issubclass(kind, branch) for branch in branches) == 1


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", KINDS)
def test_json_shape(kind: type[LockstepError]) -> None:
    assert kind("a", why="b", fix="c").as_dict() == {"code": kind.code, "message": "a", "why": "b", "fix": "c"}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in KINDS if kind.__name__ not in drawn] == []


def test_a_number_has_its_noun() -> None:
    assert [many(count, noun) for count, noun in ((1, "rank"), (2, "process"), (0, "micro-batch"), (1, "process"))] == [
        "1 rank",
        "2 processes",
        "0 micro-batches",
        "1 process",
    ]


def raise_storage_error(rank: int, size: int) -> None:
    raise StorageError("disk full", why="ENOSPC", fix="free some space")


def test_an_error_of_a_rank_arrives_whole() -> None:
    with pytest.raises(StorageError) as caught:
        run_ranks(raise_storage_error, 1)
    assert caught.value.as_dict() == StorageError("disk full", why="ENOSPC", fix="free some space").as_dict()
