"""Every private name of torch that Lockstep uses, called on the installed version."""

from __future__ import annotations

import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lockstep import _compat
from lockstep._compat import fake_tensors
from lockstep._compat import torch as compat
from lockstep.errors import UnsupportedError
from tests.gloo import run_ranks


def numbers() -> list[torch.Tensor]:
    return [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]


def test_kernels_for_lists() -> None:
    values = numbers()
    compat.foreach_add_(values, numbers())
    compat.foreach_add_(values, 1)
    compat.foreach_mul_(values, 2.0)
    compat.foreach_mul_(values, torch.tensor(0.5))
    assert torch.cat(values).tolist() == [3.0, 5.0, 7.0]
    compat.foreach_copy_(values, numbers())
    assert torch.cat(values).tolist() == [1.0, 2.0, 3.0]
    assert torch.stack(list(compat.foreach_norm(values, 2.0))).tolist() == pytest.approx([5**0.5, 3.0])


def test_kernels_of_the_scaler() -> None:
    values, found = numbers(), torch.zeros(())
    compat.amp_unscale_(values, found, torch.tensor(0.5))
    assert (values[1].item(), found.item()) == (1.5, 0.0)
    scale, good = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    compat.amp_update_scale_(scale, good, torch.tensor(1.0), 2.0, 0.5, 10)
    assert scale.item() == 4.0


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_bfloat16_is_unscaled_as_the_kernel_does(bad: float | None) -> None:
    """The CPU has the kernel that GPUs lack."""
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((7, 5), (), (0, 3), (64,))]
    if bad is not None:
        values[0][2, 3] = bad
    factor = torch.tensor(1 / 3)
    found = [([value.clone() for value in values], torch.zeros(())) for _ in "ab"]
    compat.amp_unscale_(*found[0], factor)
    compat.unscale_bfloat16_(*found[1], factor)
    assert found[0][1] == found[1][1] == float(bad is not None)
    for kernel, own in zip(found[0][0], found[1][0], strict=True):
        assert own.dtype == torch.bfloat16
        torch.testing.assert_close(own, kernel, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fused_kernels_step_as_the_optimizer(kind: type[torch.optim.Adam]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.5)
    made = kind([parameter], lr=0.1, fused=True)
    weights = parameter.detach().clone()
    kernel = compat.fused_adamw_ if kind is torch.optim.AdamW else compat.fused_adam_
    state = [[torch.zeros(3)], [torch.zeros(3)], [], [torch.ones(())]]
    group = made.param_groups[0]
    kernel(
        *([weights], [parameter.grad], *state),
        **{"amsgrad": False, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": group["weight_decay"]},
        **{"eps": group["eps"], "maximize": False, "grad_scale": None, "found_inf": None},
    )
    made.step()
    assert torch.equal(weights, parameter.detach())


def test_optimizers_and_their_hooks() -> None:
    made = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert compat.takes_found_inf(made) and not compat.needs_own_step(made) and not compat.has_scheduler(made)
    for register in (made.register_step_pre_hook, made.register_step_post_hook):
        handle = register(lambda *_: None)
        assert compat.needs_own_step(made)
        handle.remove()
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert compat.needs_own_step(made)
        handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert compat.needs_own_step(made)
    scheduler = StepLR(made, 1)
    assert compat.has_scheduler(made) and not compat.needs_own_step(made)
    compat.note_step(made)
    scheduler.step()  # without torch's warning that no step was taken
    with compat.compiler_not_imported():
        made.load_state_dict(made.state_dict())


def test_a_step_without_its_wrappers() -> None:
    weight = nn.Parameter(torch.ones(2))
    made, heard = torch.optim.SGD([weight], 0.5), []
    for _ in range(2):
        weight.grad = torch.ones(2)
        compat.take_step(made)
        made.register_step_post_hook(lambda *_: heard.append(weight.tolist()))
    assert heard == [[0.0, 0.0]]


def test_a_step_of_an_optimizer_that_is_never_differentiable() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2).to_sparse()
    compat.take_step(torch.optim.SparseAdam([weight], 0.5))
    assert torch.allclose(weight, torch.full((2, 2), 0.5))


def test_deterministic_algorithms() -> None:
    compat.use_deterministic_algorithms(True, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    compat.use_deterministic_algorithms(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_backward_and_what_nodes_saved() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    compat.backward((weight * 3).sum(), torch.tensor(2.0))
    assert weight.grad is not None and weight.grad.tolist() == [6.0, 6.0]
    node: Any = nn.functional.mse_loss(weight, torch.zeros(2), reduction="sum").grad_fn
    assert compat.saved(node, "reduction") == 2
    node = weight.mean().grad_fn
    assert compat.saved(node, "self_sym_sizes") == (2,)
    node = (weight.sum() * 4).grad_fn
    assert compat.saved(node, "other") is not None and compat.saved(node, "nothing") is None
    assert compat.saved(weight.sum(dim=0).grad_fn, "dim") is not None


def test_layers_and_buffers() -> None:
    norm, dropout = nn.BatchNorm1d(3), nn.Dropout2d()
    assert isinstance(norm, compat.BatchNorm) and isinstance(dropout, compat.DropoutNd)
    assert isinstance(nn.InstanceNorm1d(3), compat.NormBase)
    assert set(compat.buffers_of(norm)) == {"running_mean", "running_var", "num_batches_tracked"}
    with pytest.raises(ValueError):
        compat.check_input_dim(norm, torch.zeros(3))
    with warnings.catch_warnings():  # deprecated (FutureWarning since torch 2.15), and still in many packages
        warnings.simplefilter("ignore")
        scripted: Any = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))[0]
    assert compat.buffers_of(scripted).keys() == compat.buffers_of(norm).keys()
    compat.buffers_of(scripted)["running_mean"] = torch.ones(3)
    assert scripted.running_mean.tolist() == [1.0, 1.0, 1.0]
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    parts = [(part, name) for part in layer.modules() for name in compat.buffers_of(part)]
    assert parts and all(compat.is_spectral_norm(part, name) for part, name in parts)
    assert compat.tree_leaves(compat.tree_map(lambda value: value + 1, {"a": [1, 2]})) == [2, 3]

    class Watching(compat.ConvertedModule):
        conversions = 0

        def converted(self) -> None:
            self.conversions += 1

    assert Watching().double().conversions == 1


def test_models_without_memory() -> None:
    seen = []

    class Watch(fake_tensors.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((str(fake_tensors.overload_packet(func)), fake_tensors.is_mutable(func)))
            return func(*args, **(kwargs or {}))

    with fake_tensors.FakeTensorMode() as fake:
        with fake_tensors.unset_fake_temporarily():
            model = nn.Linear(2, 2)
        fake_tensors.replace_tensors(model, fake.from_tensor)
        assert type(model.weight.data) is not torch.Tensor or fake.from_tensor(model.weight) is not None
    with Watch():
        value = torch.zeros(2).add_(1)
    assert ("aten.add_", True) in seen
    assert compat.storage_key(value) == compat.storage_key(value[1:])


class Whole(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_loader_workers() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    was_set = compat.child_handler_set()
    iterator = iter(DataLoader(Whole(), num_workers=1))
    assert compat.child_handler_set() is True
    [process] = compat.worker_processes(iterator)
    assert process.is_alive()
    list(iterator)
    del iterator
    signal.signal(signal.SIGCHLD, before)
    compat.child_handler_set(was_set)


def in_ranks(rank: int, size: int) -> tuple[list[float], bool, list[float]]:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank + 1))
    compat.check_shapes(list(model.parameters()))
    compat.broadcast_module(model)
    compat.default_store().set(f"from-{rank}", "here")
    reduce = compat.fsdp_reduce_scatter()
    output = reduce.allocate((2,), dtype=torch.float32, device=torch.device("cpu"))
    reduce(output, torch.arange(4.0), dist.group.WORLD, dist.ReduceOp.SUM)
    return model.weight.flatten().tolist(), compat.default_store().check([f"from-{rank}"]), output.tolist()


@pytest.mark.slow
def test_process_groups() -> None:
    first, second = run_ranks(in_ranks, 2)
    assert first == ([1.0, 1.0], True, [0.0, 2.0])
    assert second == ([1.0, 1.0], True, [4.0, 6.0])


@pytest.mark.slow
def test_the_compiler_announces_what_it_compiles() -> None:
    from torch._dynamo.callback import callback_handler

    lists = (callback_handler.start_callbacks, callback_handler.end_callbacks)
    before = [len(callbacks) for callbacks in lists]
    compat.watch_compiler(lambda _: None, lambda _: None)
    assert [len(callbacks) - 1 for callbacks in lists] == before
    for callbacks in lists:
        callbacks.pop()


def test_an_elastic_agent_has_processes() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing import SubprocessContext

    assert "_pcontext" in local_elastic_agent.LocalElasticAgent.__init__.__code__.co_names
    assert "subprocess_handlers" in SubprocessContext.__init__.__code__.co_names


def test_a_name_that_is_missing_is_named_with_the_version() -> None:
    error = _compat.missing("torch", "torch._gone_")
    assert isinstance(error, UnsupportedError)
    assert f"torch {torch.__version__.split('+')[0]}" in error.what and "torch._gone_" in error.what
    assert callable(_compat.run_exit_functions)


def test_parametrized_modules_are_reduced_to_their_class_names_and_state() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert compat.reduce_parametrized(nn.Linear(3, 2)) is None
    make, arguments, state = compat.reduce_parametrized(layer) or pytest.fail("is parametrized")
    again = make(*arguments)
    again.__setstate__(state)
    inputs = torch.randn(4, 3)
    assert torch.equal(again(inputs), layer(inputs))
