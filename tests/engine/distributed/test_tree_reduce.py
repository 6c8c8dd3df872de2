from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.engine.strategies.exact import Leaf, TreeAllReduce, TreeSum
from tests.gloo import run_ranks

LANES = 8
WORLDS = (1, 2, 4, 8)
#: Which lanes have no samples.
EMPTY: list[set[int]] = [set(), {7}, {4, 5, 6, 7}, {0, 1, 2, 3, 5}, set(range(1, 8)), set(range(8))]


def leaf_of(seed: int, empty: bool = False) -> Leaf:
    """Two types and several shapes, scales from 1e-8 to 1e8, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(17, 3), (), (5,), (0, 2), (31,)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float64]
    leaf = []
    for shape, kind in zip(shapes, kinds, strict=True):
        scale = 10.0 ** torch.randint(-8, 9, shape, generator=generator)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        values = torch.where(torch.rand(shape, generator=generator) < 0.2, values * 0.0, values)
        leaf.append(torch.zeros(shape, dtype=kind) if empty else values.to(kind))
    # Negative zero everywhere: what a leaf of zeros beside it would turn into a positive one.
    leaf[2][0] = 0.0 if empty else -0.0
    return leaf


def recursively(leaves: list[Leaf]) -> Leaf:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return [a + b for a, b in zip(recursively(leaves[:half]), recursively(leaves[half:]), strict=True)]


def bits(leaf: Leaf) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in leaf]


def subtree(rank: int, ranks: int, empty: set[int], seed: int = 0) -> Leaf:
    """The sum of this rank's lanes; zeros if they are all empty."""
    tree, share = TreeSum(), LANES // ranks
    for lane in range(rank * share, (rank + 1) * share):
        tree.push(None if lane in empty else leaf_of(LANES * seed + lane))
    return tree.result() or leaf_of(0, empty=True)


def sums(rank: int, size: int) -> dict[int, list[list[bytes]]]:
    """Per world size: the bits of every case. Ranks beyond a world only help to make its group."""
    found = {}
    for ranks in (n for n in WORLDS if n <= size):
        group = dist.new_group(list(range(ranks))) if ranks > 1 else None
        if rank < ranks:
            reduce = TreeAllReduce(rank, ranks, group)
            found[ranks] = []
            for empty in EMPTY:
                leaf = subtree(rank, ranks, empty)
                reduce(leaf)
                found[ranks].append(bits(leaf))
    return found


def sums_and_other_uses(rank: int, size: int) -> tuple[dict[int, list[list[bytes]]], dict[str, Any]]:
    return sums(rank, size), other_uses(rank, size) if size == 4 else {}


@pytest.fixture(scope="module")
def on_four() -> list[tuple[dict[int, list[list[bytes]]], dict[str, Any]]]:
    return run_ranks(sums_and_other_uses, 4)


def test_one_two_and_four_ranks_get_the_same_bits(on_four: list[Any]) -> None:
    assert_same_bits([found for found, _ in on_four])


@pytest.mark.drill
def test_eight_ranks_get_the_same_bits() -> None:
    assert_same_bits(run_ranks(sums, 8, timeout_s=110))


def assert_same_bits(by_rank: list[dict[int, list[list[bytes]]]]) -> None:
    lanes = [[leaf_of(lane, lane in empty) for lane in range(LANES)] for empty in EMPTY]
    expected = [bits([tensor + 0.0 for tensor in recursively(leaves)]) for leaves in lanes]
    for rank, found in enumerate(by_rank):
        assert list(found) == [ranks for ranks in WORLDS if rank < ranks <= len(by_rank)]
        for ranks, results in found.items():
            assert results == expected, (rank, ranks)


def other_uses(rank: int, ranks: int) -> dict[str, Any]:
    odd = dist.new_group([1, 3])
    own = [torch.full((3,), 2.0**rank)]
    if rank % 2:
        TreeAllReduce(rank // 2, 2, odd)(own)
    reduce = TreeAllReduce(rank, ranks)
    changing = []
    for shape in ((2,), (5, 1), (2,)):
        tensors = [torch.full(shape, float(rank)), torch.full((1,), rank, dtype=torch.int64)]
        reduce(tensors)
        changing.append([tensor.tolist() for tensor in tensors])
    wide = torch.full((4, 6), float(rank))
    strided = wide[:, ::2]
    reduce([strided])
    reduce([])
    return {"odd": own[0].tolist(), "changing": changing, "wide": wide.sum().item()}


def test_groups_layouts_and_strides_are_free(on_four: list[Any]) -> None:
    for rank, (_, found) in enumerate(on_four):
        assert found["odd"] == [10.0 if rank % 2 else 2.0**rank] * 3
        assert found["changing"] == [[[6.0] * 2, [6]], [[[6.0]] * 5, [6]], [[6.0] * 2, [6]]]
        assert found["wide"] == 12 * 6 + 12 * rank


@given(height=st.integers(0, 6), values=st.data())
def test_the_stack_adds_the_pairs_of_the_recursion(height: int, values: st.DataObject) -> None:
    number = 2**height
    drawn = values.draw(st.lists(st.none() | st.floats(width=32, allow_nan=False), min_size=number, max_size=number))
    tree = TreeSum()
    for value in drawn:
        tree.push(None if value is None else [torch.tensor([value])])
        assert len(tree._stack) <= height + 1
    result = tree.result()
    expected = recursively([[torch.tensor([0.0 if value is None else value])] for value in drawn])[0]
    if result is None:
        assert drawn == [None] * number
        return
    TreeAllReduce(0, 1)(result)
    assert np.array_equal(result[0].numpy().view(np.int32), (expected + 0.0).numpy().view(np.int32)) or (
        result[0].isnan().all() and expected.isnan().all()
    )


@given(seed=st.integers(0, 1000), ranks=st.sampled_from([1, 2, 4, 8]), empty=st.sets(st.integers(0, 7)))
def test_subtrees_of_any_size_make_the_same_tree(seed: int, ranks: int, empty: set[int]) -> None:
    whole, share = TreeSum(), LANES // ranks
    for rank in range(ranks):
        lanes = set(range(rank * share, (rank + 1) * share))
        whole.push(None if lanes <= empty else subtree(rank, ranks, empty, seed))
    ours = whole.result() or leaf_of(0, empty=True)
    theirs = subtree(0, 1, empty, seed)
    for leaf in (ours, theirs):
        TreeAllReduce(0, 1)(leaf)
    assert bits(ours) == bits(theirs)


def test_sums_are_made_in_the_leaves_that_were_pushed() -> None:
    leaves: list[list[Tensor]] = [[torch.ones(2)] for _ in range(4)]
    tree = TreeSum()
    for leaf in leaves:
        tree.push(leaf)
    result = tree.result()
    assert result is not None
    assert result[0] is leaves[0][0]
    assert result[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("leaves", [0, 3, 6])
def test_a_number_of_leaves_that_is_no_power_of_two_is_refused(leaves: int) -> None:
    tree = TreeSum()
    for _ in range(leaves):
        tree.push(None)
    with pytest.raises(AssertionError, match="power of two"):
        tree.result()


def test_a_number_of_ranks_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(AssertionError, match="power of two"):
        TreeAllReduce(0, 3)
