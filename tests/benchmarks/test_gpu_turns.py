"""The loops of ``benchmarks/gpu_workloads.py`` that take turns."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from tests.gloo import ROOT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is imported
def test_a_thread_has_the_graphs_of_its_own_compiled_code() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpu.turns import own_graphs
    finally:
        sys.path.pop(0)
    from torch._inductor import cudagraph_trees as trees

    found = list[Any]()

    def look() -> None:
        own_graphs()
        found.append(trees.get_container(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found
    assert found[0] is not trees.get_container(0)
