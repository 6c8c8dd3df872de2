"""What is trained: a task's model, and the modules beside it that :meth:`.Task.modules` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lockstep._compat.torch import compiled_in_place
from lockstep.engine.task import Callback, Context, Task
from lockstep.errors import TaskError, UnsupportedError


class Trained(nn.Module):
    """A model and modules beside it, moved, trained and saved together.

    Names of parameters and keys of the state dict are the model's own; those of the others begin with
    ``modules.<name>.``.
    """

    def __init__(self, model: nn.Module, extras: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.extras = nn.ModuleDict(extras)

    def _parts(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Modules with the prefix of their keys."""
        yield prefix, self.model
        for name, module in self.extras.items():
            yield f"{prefix}modules.{name}.", module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for part, module in self._parts(f"{prefix}." if prefix else ""):
            yield from module.named_modules(memo, part.removesuffix("."), remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for prefix, module in self._parts():
            found |= module.state_dict(prefix=prefix, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rest = dict(state_dict)
        for prefix, module in reversed([*self._parts()]):
            own = {key.removeprefix(prefix): rest.pop(key) for key in [*rest] if key.startswith(prefix)}
            module.load_state_dict(own, *args, **kwargs)


def build_model(task: Task) -> nn.Module:
    """``task.model()``, together with ``task.modules()`` where there are any: what is trained and saved."""
    model = task.model()
    extras = dict(task.modules())
    for source, module in {"model()": model, **{f"modules() for {n!r}": m for n, m in extras.items()}}.items():
        what = f"the task's {source} returned {type(module).__name__}"
        if not isinstance(module, nn.Module):
            raise TaskError(f"{what}, not a module", fix="return an nn.Module")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TaskError(
                what,
                why="Lockstep distributes the model over the selected devices; a wrapper would use others, or twice",
                fix="return the module inside; select devices with --devices, and a strategy with --strategy",
            )
    model, extras = compiled_in_place(model), {name: compiled_in_place(extra) for name, extra in extras.items()}
    return Trained(model, extras) if extras else model


def bare(module: nn.Module) -> nn.Module:
    """The task's model itself: what its functions are called with."""
    return module.model if isinstance(module, Trained) else module


def refuse_modules(model: nn.Module, strategy: str) -> None:
    if isinstance(model, Trained):
        what = f"strategy {strategy} divides the model, and cannot train modules beside it: {', '.join(model.extras)}"
        raise UnsupportedError(what, fix="make them part of the model, or use --strategy ddp")


def refuse_meta(model: nn.Module) -> None:
    """Raise :class:`TaskError` where a parameter has no memory, since nothing would be trained."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        fix = "make a new module in each call of model(), or keep it in an attribute of the task"
        raise TaskError(f"the parameter {name} of the task's model is on the meta device", fix=fix)


class Callbacks:
    """The callbacks of a task by the methods that they override, so that others cost no call."""

    def __init__(self, task: Task) -> None:
        self._methods: dict[str, list[Callable[[Context, nn.Module], None]]] = {}
        for callback in task.callbacks():
            for name in (name for name in vars(Callback) if name.startswith("on_")):
                if getattr(type(callback), name, None) not in (None, getattr(Callback, name)):
                    self._methods.setdefault(name, []).append(getattr(callback, name))

    def __len__(self) -> int:
        return len(self._methods)

    def call(self, name: str, context: Context, model: nn.Module) -> None:
        for method in self._methods.get(name, ()):
            method(context, bare(model))

    def caller(self, name: str, context: Context, model: nn.Module) -> Callable[[], None] | None:
        """A function that calls ``name``; ``None`` where no callback has it."""
        return (lambda: self.call(name, context, model)) if name in self._methods else None
