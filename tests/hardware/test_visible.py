"""``CUDA_VISIBLE_DEVICES`` as the driver reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.hardware.visible import visible_gpus

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("+1", [1]),
        ("1gpu,0", [1, 0]),
        ("0,-1,2", [0]),
        ("0,7,2", [0]),
        ("0,,2", [0]),
        ("1,1", []),
        ("GPU-bb33", [2]),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-b", [2]),
        ("GPU-aa", []),
        ("GPU-bb33,GPU-zz", [2]),
        ("GPU-bb33,0", [2]),
        ("GPU-bb33,GPU-bb", []),
        ("MIG-aa11", None),
        ("MIG-GPU-aa11/1/0", None),
    ],
)
def test_examples(variable: str | None, expected: list[int] | None) -> None:
    assert visible_gpus(variable, UUIDS) == expected


@given(st.text(alphabet="0123456789,- +GPUMIabx", max_size=20), st.integers(0, 4))
def test_any_text_gives_distinct_positions_that_exist(variable: str, count: int) -> None:
    found = visible_gpus(variable, [f"GPU-{index}" for index in range(count)])
    assert found is None or (len(set(found)) == len(found) and set(found) <= set(range(count)))
