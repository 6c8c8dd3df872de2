"""The private names through which `lockstep audit` observes torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import Linear
from torch.utils.data import DataLoader

from lockstep._compat.observation import NEXT_INDEX, RESET, LoaderIterator, MapFetcher, is_shard, loss_term

INPUTS = torch.arange(12.0).reshape(4, 3)
LABELS = torch.tensor([0, 1, -100, 2])


def losses() -> list[tuple[torch.Tensor, object]]:
    inputs = INPUTS.clone().requires_grad_()
    return [
        (F.cross_entropy(inputs, LABELS), (1.0, 3.0, "mean")),
        (F.cross_entropy(inputs, LABELS, reduction="sum") * 2 / 4, (0.5, 3.0, "sum")),
        (F.mse_loss(inputs, INPUTS) / torch.tensor(4.0), (0.25, 12.0, "mean")),
        ((inputs**2).sum() / 4, (0.25, 12.0, "sum")),
        ((inputs**2).mean() + inputs.abs().mean(), (None, 12.0, "mean")),
        (inputs.mean() + inputs[:2].mean(), None),
        (inputs.mean() * inputs.sum(), None),
    ]


@pytest.mark.parametrize("number", range(len(losses())))
def test_terms_of_losses(number: int) -> None:
    loss, term = losses()[number]
    assert loss_term(loss) == term


def test_iterators_of_loaders() -> None:
    iterator = iter(DataLoader(list(range(4)), batch_size=2))
    assert isinstance(iterator, LoaderIterator)
    assert getattr(iterator, NEXT_INDEX)() == [0, 1]
    assert callable(getattr(LoaderIterator, RESET))
    assert MapFetcher(["a", "b"], True, list, False).fetch([1, 0]) == ["b", "a"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_shards() -> None:
    assert not any(map(is_shard, Linear(2, 1).parameters()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for original in (True, False):
            model = FullyShardedDataParallel(Linear(2, 1), device_id=torch.device("cpu"), use_orig_params=original)
            assert all(map(is_shard, model.parameters()))
        assert all(map(is_shard, fully_shard(Linear(2, 1)).parameters()))
    finally:
        dist.destroy_process_group()
