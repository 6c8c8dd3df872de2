from __future__ import annotations

import copy
import pickle
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engine.distributed.sync_batchnorm import SyncedBatchNorm, convert, ghost, has_batchnorm
from lockstep.errors import RunError, UnsupportedError
from tests.gloo import run_ranks

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"eps": 0.1},
]


def layer_of(dims: int, **settings: Any) -> nn.Module:
    layer = KINDS[dims](4, **settings).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(-1, 2 + number, 4))
    return layer


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 5


def largest_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max((float((a.detach() - b.detach()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def split(ranks: int, draw: random.Random) -> list[int]:
    """Samples a rank, uneven, none among them; at least two in all."""
    sizes = [draw.choice([0, 1, 2, 5]) for _ in range(ranks)]
    return sizes if sum(sizes) >= 2 else split(ranks, draw)


def steps_beside_one_process(rank: int, ranks: int, dims: int, settings: dict[str, Any], draw: random.Random) -> float:
    """Three steps of a synchronised layer, and of nn.BatchNorm on all ranks' samples: the largest difference."""
    alone, synced = layer_of(dims, **settings), convert(layer_of(dims, **settings))
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(3):
        sizes = split(ranks, draw)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        shape = (sum(sizes), 4, *[2] * (dims - 2))
        whole = noise(*shape, seed=draw.randrange(2**30)).requires_grad_()
        grad = noise(*shape, seed=draw.randrange(2**30))
        part = whole.detach()[mine].clone().requires_grad_()
        alone.zero_grad()
        synced.zero_grad()
        expected, output = alone(whole), synced(part)
        expected.backward(grad)
        output.backward(grad[mine])
        assert whole.grad is not None
        assert part.grad is not None
        pairs += [(output, expected[mine]), (part.grad, whole.grad[mine])]
        for ours, theirs in zip(synced.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(ours.grad)
            pairs.append((ours.grad, theirs.grad))
        # Clones, since the next step changes the buffers.
        pairs += [(a.clone(), b.clone()) for a, b in zip(synced.buffers(), alone.buffers(), strict=True)]
    return largest_error(pairs)


def compare(rank: int, ranks: int) -> list[float]:
    draw = random.Random(ranks)
    return [
        steps_beside_one_process(rank, ranks, dims, settings, draw)
        for dims in KINDS
        for settings in SETTINGS
        for _ in "ab"
    ]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.drill), 3])
def test_any_split_equals_one_process_on_the_whole_batch(ranks: int) -> None:
    errors = run_ranks(compare, ranks)
    assert len(errors[0]) == 40
    assert max(max(by_rank) for by_rank in errors) < 1e-10


def single_value(rank: int, samples: int) -> str:
    try:
        convert(nn.BatchNorm1d(3))(torch.ones(samples, 3))
    except RunError as error:
        return str(error)
    return "no error"


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.second = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm2d(2))
        self.third = nn.InstanceNorm1d(3, track_running_stats=True)


def special_cases(rank: int, ranks: int) -> dict[str, Any]:
    """What the tests below look at; one start of processes for all of them."""
    found: dict[str, Any] = {}
    # A ghost: rank 0 holds a sample that must not count, full of infinities.
    layer, alone = convert(layer_of(2)), layer_of(2)
    whole = noise(6, 4, seed=1).requires_grad_()
    part = whole.detach()[3 * (rank - 1) : 3 * rank].clone() if rank else torch.full_like(whole[:1], float("inf"))
    part = part.detach()
    part.requires_grad_()
    if rank == 0:
        with ghost(layer):
            output = layer(part)
    else:
        output = layer(part)
    output.square().sum().backward()
    expected = alone(whole)
    expected.square().sum().backward()
    found["ghost output"] = output.detach()
    found["ghost gradients"] = [part.grad, *(p.grad for p in layer.parameters())]
    found["ghost buffers"] = largest_error(list(zip(layer.buffers(), alone.buffers(), strict=True)))
    assert whole.grad is not None
    assert part.grad is not None
    if rank:
        mine = slice(3 * (rank - 1), 3 * rank)
        found["beside a ghost"] = largest_error([(output, expected[mine]), (part.grad, whole.grad[mine])])
    # Nobody has a sample.
    before = [buffer.clone() for buffer in layer.buffers()]
    with ghost(layer):
        empty = layer(part.detach())
    found["all ghosts"] = (bool(empty.isfinite().all()), largest_error(list(zip(layer.buffers(), before, strict=True))))
    # One value in the whole group, and two.
    found["one value"] = single_value(rank, 1 if rank == 1 else 0)
    found["two values"] = single_value(rank, 1 if rank < 2 else 0)
    # A mean far from zero, in float32.
    far = noise(64, 4, seed=2 + rank).float() + 10_000
    output = convert(nn.BatchNorm1d(4))(far)
    found["far"] = output.detach()
    # Half precision under float32 parameters, as under autocast.
    half = noise(16, 4, 8, seed=5 + rank).bfloat16().requires_grad_()
    output = convert(nn.BatchNorm1d(4))(half)
    output.float().square().sum().backward()
    found["half"] = (output.dtype, output.detach(), None if half.grad is None else half.grad.dtype)
    # Evaluation on one rank alone would hang if it were collective.
    if rank == 1:
        layer.eval()(part.detach())
    return found


@pytest.fixture(scope="module")
def special() -> list[dict[str, Any]]:
    return run_ranks(special_cases, 3)


def test_a_ghost_counts_for_nothing_whatever_its_input_is(special: list[dict[str, Any]]) -> None:
    assert torch.isfinite(special[0]["ghost output"]).all()
    assert all(not gradient.any() for gradient in special[0]["ghost gradients"])
    assert max(found["ghost buffers"] for found in special) < 1e-12
    assert max(found["beside a ghost"] for found in special[1:]) < 1e-12


def test_a_step_without_any_sample_changes_nothing(special: list[dict[str, Any]]) -> None:
    assert [found["all ghosts"] for found in special] == [(True, 0.0)] * 3


def test_one_value_in_the_group_is_refused_on_every_rank(special: list[dict[str, Any]]) -> None:
    for found in special:
        assert re.match(r"BatchNorm .*\b3 ranks\b", found["one value"])
        assert "skipped-rank*.jsonl" in found["one value"]
        assert found["two values"] == "no error"


def test_a_mean_far_from_zero_does_not_cancel(special: list[dict[str, Any]]) -> None:
    far = torch.cat([noise(64, 4, seed=2 + rank).float() + 10_000 for rank in range(3)]).double()
    expected = nn.BatchNorm1d(4).double()(far).detach()
    torch.testing.assert_close(torch.cat([found["far"] for found in special]).double(), expected, rtol=0, atol=2e-3)


def test_half_precision_keeps_its_type_and_sums_in_float32(special: list[dict[str, Any]]) -> None:
    whole = torch.cat([noise(16, 4, 8, seed=5 + rank).bfloat16() for rank in range(3)]).double()
    expected = nn.BatchNorm1d(4).double()(whole).detach()
    for found in special:
        assert found["half"][0] is found["half"][2] is torch.bfloat16
    output = torch.cat([found["half"][1] for found in special]).double()
    torch.testing.assert_close(output, expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dims", KINDS)
def test_gradients_are_those_of_the_formula(dims: int, settings: dict[str, Any]) -> None:
    layer = convert(layer_of(dims, **settings))
    input = noise(3, 4, *[2] * (dims - 2), seed=dims).requires_grad_()
    parameters = tuple(layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x).tanh(), (input, *parameters), fast_mode=True)


def test_inputs_and_gradients_may_lie_in_any_order_in_memory() -> None:
    alone, synced = layer_of(4), convert(layer_of(4))
    results = []
    for layer in (alone, synced):
        input = noise(3, 5, 6, 4, seed=1).permute(0, 3, 1, 2).requires_grad_()
        output = layer(input)
        layer.zero_grad()
        (output.transpose(2, 3).contiguous().square().sum() + output.sum()).backward()
        results.append([output, input.grad, *(p.grad for p in layer.parameters())])
    assert largest_error(list(zip(*results, strict=True))) < 1e-12


def test_an_input_without_gradient_still_trains_the_parameters() -> None:
    results = []
    for layer in (layer_of(2), convert(layer_of(2))):
        layer(noise(5, 4, seed=1)).square().sum().backward()
        results.append([p.grad for p in layer.parameters()])
    assert largest_error(list(zip(*results, strict=True))) < 1e-12


def test_conversion_keeps_everything_that_others_hold_on_to() -> None:
    model = Norms()
    model.first.eval()
    model.again = model.first
    layers, parameters, keys = list(model.modules()), list(model.parameters()), list(model.state_dict())
    calls: list[str] = []
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    assert convert(model) is model
    assert all(a is b for a, b in zip(model.modules(), layers, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert isinstance(model.first, SyncedBatchNorm)
    assert isinstance(model.first, nn.BatchNorm1d)
    assert not isinstance(model.third, SyncedBatchNorm)
    assert (model.first.training, model.second[1].training) == (False, True)
    model.first(torch.ones(2, 3))
    assert calls == ["hook"]
    assert convert(model).first is model.first


def test_a_layer_alone_can_be_converted_copied_and_pickled() -> None:
    layer = convert(layer_of(2))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert largest_error([(other(noise(5, 4, seed=1)), layer_of(2)(noise(5, 4, seed=1)))]) < 1e-12


def test_wrong_input_is_refused_as_torch_refuses_it() -> None:
    for dims, kind in KINDS.items():
        wrong = torch.ones(2, *[4] * 5) if dims == 5 else torch.ones(2, 4, 1, 1, 1)
        with pytest.raises(ValueError, match="expected") as torchs:
            kind(4)(wrong)
        with pytest.raises(ValueError, match="expected") as ours:
            convert(kind(4))(wrong)
        assert str(ours.value) == str(torchs.value)


def test_torchs_own_synchronised_layer_is_replaced() -> None:
    layer = convert(nn.SyncBatchNorm(4).double())
    assert torch.allclose(layer(noise(5, 4, seed=1)), nn.BatchNorm1d(4).double()(noise(5, 4, seed=1)))


class Named(nn.BatchNorm1d):
    """A class of the user's that computes what torch's does."""

    label = "norm"


def test_a_class_that_inherits_its_forward_is_synchronised() -> None:
    layer = convert(Named(3))
    assert isinstance(layer, Named)
    assert isinstance(layer, SyncedBatchNorm)
    assert layer.label == "norm"
    assert type(convert(Named(3))) is type(convert(layer)) is type(copy.deepcopy(layer))
    assert largest_error([(layer(noise(5, 3, seed=1).float()), Named(3)(noise(5, 3, seed=1).float()))]) < 1e-5


class Gated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("layer", [Gated(3), nn.LazyBatchNorm1d()])
def test_a_layer_that_computes_something_else_is_refused_by_name(layer: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(layer))
    with pytest.raises(UnsupportedError, match=rf"'1\.0' .*{type(layer).__name__}") as caught:
        convert(model)
    assert "sync_batchnorm" in caught.value.fix
    assert type(model[0]) is nn.BatchNorm1d


def test_a_ghost_is_one_only_inside_the_body() -> None:
    model = convert(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(KeyError), ghost(model):
        assert model[0].ghost
        raise KeyError
    assert not model[0].ghost


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Norms(), True),
        (nn.Sequential(nn.Linear(1, 1), nn.InstanceNorm1d(1), nn.LayerNorm(1)), False),
        (nn.SyncBatchNorm(1), True),
        (Gated(1), True),
    ],
)
def test_has_batchnorm(model: nn.Module, expected: bool) -> None:
    assert has_batchnorm(model) is expected
