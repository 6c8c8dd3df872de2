"""Private names of torch, except those of :mod:`lockstep._compat.fake_tensors`."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from operator import is_not
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, optimizer

from lockstep._compat import missing

try:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.batchnorm import _NormBase as NormBase  # also of InstanceNorm
    from torch.nn.modules.dropout import _DropoutNd as DropoutNd
    from torch.nn.utils.parametrize import _inject_new_class, _inject_property, is_parametrized
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    foreach_add_: Any = torch._foreach_add_
    foreach_copy_: Any = torch._foreach_copy_
    foreach_mul_: Any = torch._foreach_mul_
    foreach_norm: Any = torch._foreach_norm
    #: Those of ``torch.amp.GradScaler``.
    _amp_unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
    amp_update_scale_: Any = torch._amp_update_scale_
    #: Those of ``torch.optim.Adam`` and ``AdamW`` with ``fused=True``.
    fused_adam_: Any = torch._fused_adam_
    fused_adamw_: Any = torch._fused_adamw_
    _engine: Any = Variable._execution_engine
    _profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
    _HOOKS_OF_ALL = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
except (ImportError, AttributeError) as error:
    raise missing("torch", error) from None

__all__ = ["BatchNorm", "DropoutNd", "NormBase", "TorchDispatchMode", "tree_leaves", "tree_map"]


# Kernels.


def amp_unscale_(gradients: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Multiply by ``factor``; set ``found_inf`` to 1 where a gradient is not finite. Both are of shape ().

    ``found_inf`` is in float32; the ``factor`` is rounded to it for all gradients but those in float64.
    """
    wide = [gradient for gradient in gradients if gradient.dtype == torch.float64]
    if wide:
        _amp_unscale_(wide, found_inf, torch.ones_like(found_inf))
        foreach_mul_(wide, factor.to(found_inf.device))
        gradients = [gradient for gradient in gradients if gradient.dtype != torch.float64]
    factor = factor.float()
    without = [gradient for gradient in gradients if gradient.dtype == torch.bfloat16 and gradient.is_cuda]
    if without:
        unscale_bfloat16_(without, found_inf, factor)
        gradients = [gradient for gradient in gradients if gradient.dtype != torch.bfloat16]
    if gradients:
        _amp_unscale_(gradients, found_inf, factor)


def unscale_bfloat16_(gradients: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Unscale as :func:`amp_unscale_` does, in bfloat16, for which torch has no kernel on GPUs."""
    largest = foreach_norm([gradient for gradient in gradients if gradient.numel()], float("inf"))
    if largest:
        found_inf.logical_or_(~torch.stack(largest).isfinite().all())
    for gradient in gradients:  # a factor of the same shape is not rounded to bfloat16 before
        gradient.mul_(factor.expand_as(gradient))


# Autograd.


def backward(total: Tensor, seed: Tensor) -> None:
    """Call ``total.backward(seed)`` without checks of the seed, which import SymPy and cost a small layer's time."""
    if type(total) is not Tensor:
        total.backward(seed)
    else:
        _engine.run_backward((total,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def saved(node: Any, name: str) -> Any:
    """Return the value that a node of the graph saved for its backward pass as ``name``; ``None`` if it did not."""
    return getattr(node, f"_saved_{name}", None)


# Modules and buffers.


def storage_key(tensor: Tensor) -> int:
    """Return a key that tensors with the same storage share, while it is alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


class ConvertedModule(nn.Module):
    """A module with a method that is called when ``to()`` and its relatives have replaced its tensors."""

    def converted(self) -> None:
        """React to another device or dtype of parameters and buffers."""
        raise NotImplementedError

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        module = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.converted()
        return module


def buffers_of(layer: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the buffers that ``layer`` itself registers, those that are ``None`` included; may be assigned to."""
    return layer._buffers if isinstance(layer._buffers, dict) else _ScriptedBuffers(layer)


class _ScriptedBuffers(UserDict[str, Any]):
    """The buffers of a TorchScript module, whose mapping cannot be iterated over; it takes values as attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.data = dict(layer.named_buffers(recurse=False, remove_duplicate=False))

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self.data[name] = value
        setattr(self.layer, name, value)


def unshared(buffer: Tensor) -> Tensor:
    """Return ``buffer``, or a loadable copy of one in which elements share memory, as after ``expand()``."""
    if is_lazy(buffer) or buffer.is_meta or buffer.layout != torch.strided:
        return buffer
    repeats = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return buffer.clone(memory_format=torch.contiguous_format) if buffer.numel() and repeats else buffer


def is_spectral_norm(layer: nn.Module, attribute: str) -> bool:
    """Return whether a buffer belongs to spectral normalisation, as a parametrization or in the older form."""
    older = attribute[-2:] in {"_u", "_v"} and hasattr(layer, attribute[:-2] + "_orig")
    return older or type(layer).__name__ == "_SpectralNorm"


def reduce_parametrized(value: Any) -> tuple[Any, ...] | None:
    """Return how to pickle a module with parametrizations (``weight_norm``), which torch refuses; ``None``: no such."""
    if not (isinstance(value, nn.Module) and is_parametrized(value)):
        return None
    names = list(value.parametrizations)  # type: ignore[arg-type]
    return _parametrized, (type(value).__bases__[0], names), vars(value)


def _parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Make an empty module of class ``kind`` whose tensors ``names`` are parametrized."""
    module: nn.Module = kind.__new__(kind)
    _inject_new_class(module)
    for name in names:
        _inject_property(module, name)
    return module


def check_input_dim(layer: Any, value: Tensor) -> None:
    """Raise ``ValueError``, as torch does, when ``value`` does not have the dimensions that a BatchNorm takes."""
    layer._check_input_dim(value)


# Optimizers.

#: Methods that torch excludes from compilation, and the attribute for that (torch/_compile.py).
_KEPT_FROM_COMPILER = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
_DISABLED = "__dynamo_disable"
_WRAPPED = "_wrapped_by_lr_sched"


def versions(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
    """Return tensors (of a DTensor the local part) and their version counters (-1: ``None``), for :func:`differ`."""
    local = [t if type(t) is Tensor else getattr(t, "_local_tensor", t) for t in tensors]  # a miss is slow
    return local, [-1 if tensor is None else tensor._version for tensor in local]


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether it has multiplied a loss."""
    return getattr(scaler, "_scale", None) is not None


def differ(before: tuple[list[Any], list[int]], after: tuple[list[Any], list[int]]) -> bool:
    """Return whether a tensor was replaced or written to between two calls of :func:`versions`."""
    tensors_before, counters_before = before
    tensors_after, counters_after = after
    return counters_before != counters_after or any(map(is_not, tensors_before, tensors_after))


def guard_step(made: Any, before: Callable[..., None]) -> Callable[[], None]:
    """Call ``before`` in ``made.step()``, a hook that :func:`needs_own_step` does not count; undone by the result."""
    handle = made.register_step_pre_hook(before)
    made._lockstep_guards = 1

    def undo() -> None:
        handle.remove()
        made._lockstep_guards = 0

    return undo


def needs_own_step(made: Any) -> bool:
    """Return whether ``made.step()`` must be called: for its hooks, or a profiler that shows it."""
    override = vars(made).get("step")
    return bool(
        len(made._optimizer_step_pre_hooks) > getattr(made, "_lockstep_guards", 0)
        or made._optimizer_step_post_hooks
        or any(_HOOKS_OF_ALL)
        # A scheduler of torch's wraps it to note that a step was taken, which note_step() has noted for good.
        or (override is not None and not hasattr(override, _WRAPPED))
        or _profiler_enabled()
    )


def has_scheduler(made: Optimizer) -> bool:
    """Return whether a scheduler of torch's was made for this optimizer."""
    return hasattr(vars(made).get("step"), _WRAPPED)


def note_step(made: Optimizer) -> None:
    """Note a step as a scheduler's wrapper of ``step()`` does, for an optimizer whose kernels are called directly."""
    made._opt_called = True  # type: ignore[attr-defined]


def takes_found_inf(made: Optimizer) -> bool:
    """Return whether the optimizer itself leaves out a step whose ``found_inf`` is 1."""
    return bool(getattr(made, "_step_supports_amp_scaling", False))


def take_step(made: Any) -> None:
    """Call ``made.step()``, if possible without the wrappers in which torch imports its compiler."""
    if (
        needs_own_step(made)
        or not type(made).__module__.startswith("torch.optim.")
        or made.defaults.get("differentiable")
    ):
        made.step()
        return
    with torch.no_grad():
        unwrap(type(made).step)(made)


@contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Make, save or load optimizers in the body without torch's compiler, whose import outlasts many first steps.

    torch imports it to keep it from compiling these methods; until it is imported, nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    methods = [vars(Optimizer)[name].__wrapped__ for name in _KEPT_FROM_COMPILER]
    for method in methods:
        setattr(method, _DISABLED, method)
    try:
        yield
    finally:
        for method in methods:
            delattr(method, _DISABLED)


def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
    """Set it without torch's function, which imports its compiler for a flag: a second and more of every process.

    A compiler that is imported later takes the flag from ``TORCHINDUCTOR_DETERMINISTIC``.
    """
    is_imported = "torch._inductor.config" in sys.modules
    setter: Any = torch.use_deterministic_algorithms if is_imported else torch._C._set_deterministic_algorithms
    setter(mode, warn_only=warn_only)


def watch_compiler(begins: Callable[[Any], None], ends: Callable[[Any], None]) -> None:
    """Call these around each compilation of the process."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)


# Process groups.


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


#: Types that every backend sends; others travel as bytes.
SENT_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def broadcast_module(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, as DDP does. Collective."""
    from torch.distributed.utils import _sync_module_states

    assert dist.group.WORLD is not None
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    unusual = {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype not in SENT_TYPES}
    _sync_module_states(model, dist.group.WORLD, 250 * 2**20, 0, unusual)  # 250 MB at a time
    for tensor in unusual.values():
        sent = tensor.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(sent, 0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def check_shapes(parameters: list[Tensor]) -> None:
    """Raise ``RuntimeError``, as DDP does, where ranks have parameters of different shapes. Collective."""
    from torch.distributed.utils import _verify_param_shape_across_processes

    assert dist.group.WORLD is not None
    if parameters:  # without any, torch 2.13 ends in a segmentation fault
        _verify_param_shape_across_processes(dist.group.WORLD, parameters)


def reset_compiler() -> None:
    """Forget what ``torch.compile`` has compiled, without an import of the compiler, which takes seconds."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the prefix of ``torch.compile(module)``."""
    return name.replace("_orig_mod.", "")


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Return ``model`` without the wrappers of ``torch.compile(module)``: compiled as by ``module.compile()``.

    Then names and types are those of the modules themselves. The wrappers inside are replaced.
    """
    inner = within_wrapper(model)
    if inner is not model:

        def call(*args: Any, **kwargs: Any) -> Any:  # a frame that is compiled even where the module is one of torch's
            return inner._call_impl(*args, **kwargs)

        inner._compiled_call_impl = cast(Any, model).dynamo_ctx(call)
    for module in list(inner.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and within_wrapper(child) is not child:
                module.add_module(name, compiled_in_place(child))
    return cast(nn.Module, inner)


def has_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to the model or a part of it."""
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def within_wrapper(model: nn.Module) -> Any:
    """Return the module inside the wrapper of ``torch.compile(module)``, or ``model`` itself."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    module: Any = model
    while isinstance(module, wrapper):
        module = module._orig_mod
    return module


def fsdp_reduce_scatter() -> Any:
    """FSDP's reduction of gradients: ``allocate(size, dtype, device)`` and a call like ``reduce_scatter_tensor``."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    return DefaultReduceScatter()


# GPUs.


def choose_gpu_again(index: int) -> None:
    """Choose it without ``torch.cuda.set_device``, which takes memory of a GPU that was not used so far."""
    torch.cuda._maybe_exchange_device(index)


# Loaders and memory.


def worker_processes(iterator: Any) -> list[Any]:
    return list(getattr(iterator, "_workers", ()))


def child_handler_set(value: bool | None = None) -> bool:
    """Return whether ``DataLoader`` has installed its handler of SIGCHLD; ``value`` sets its flag."""
    from torch.utils.data._utils import signal_handling

    before: bool = signal_handling._SIGCHLD_handler_set
    if value is not None:
        signal_handling._SIGCHLD_handler_set = value
    return before


def pinned(batch: Any) -> Any:
    """Return ``batch`` with its tensors in page-locked memory, as ``DataLoader(pin_memory=True)`` makes it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
