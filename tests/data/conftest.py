from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def cache_of_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the copies of these tests' files out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if "LOCKSTEP_CACHE" not in os.environ:
            patch.setenv("LOCKSTEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
