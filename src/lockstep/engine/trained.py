"""A task as it is trained: its model with the modules beside it, its parameters and its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep._compat.torch import buffers_of, compiled_in_place, unshared
from lockstep.engine.task import Callback, Context, Task
from lockstep.errors import TaskError, UnsupportedError


class Trained(nn.Module):
    """Modules that are moved, trained and saved together.

    Names of parameters and keys of the state dict begin with the prefix by which each module is given. That of a task's
    model is empty, and those of modules beside it are ``modules.<name>.``.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.prefixes = tuple(modules)
        self.parts = nn.ModuleList(modules.values())

    def _parts(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        return ((prefix + part, module) for part, module in zip(self.prefixes, self.parts, strict=True))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for part, module in self._parts(f"{prefix}." if prefix else ""):
            yield from module.named_modules(memo, part.removesuffix("."), remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = {}
        for prefix, module in self._parts():
            state |= module.state_dict(prefix=prefix, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rest = dict(state_dict)
        for prefix, module in reversed([*self._parts()]):
            part_state = {key.removeprefix(prefix): rest.pop(key) for key in [*rest] if key.startswith(prefix)}
            module.load_state_dict(part_state, *args, **kwargs)


class TrainedParameters:
    """Parameters of a step by name, and those among them that are trained (``trained``).

    Args:
        divided_by: the strategy that has divided them among ranks, if any.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], divided_by: str | None) -> None:
        self._named = named
        self._divided_by = divided_by
        self.follow()

    def follow(self) -> None:
        """Set ``trained`` to the parameters that require a gradient now."""
        self._requires_grad = [parameter.requires_grad for parameter in self._named.values()]
        self.trained = [parameter for parameter in self._named.values() if parameter.requires_grad]

    def have_changed(self) -> bool:
        """Return whether parameters were frozen or unfrozen since :meth:`follow`.

        Raises:
            UnsupportedError: they were, and are divided among ranks.
        """
        if [parameter.requires_grad for parameter in self._named.values()] == self._requires_grad:
            return False
        if self._divided_by is not None:
            named = zip(self._named.items(), self._requires_grad, strict=True)
            name = next(name for (name, parameter), before in named if parameter.requires_grad != before)
            raise UnsupportedError(
                f"strategy {self._divided_by} cannot freeze or unfreeze parameters during training, as {name}",
                why="they are divided among the ranks as they were at the start",
                fix="call requires_grad_() before training starts (in the task's model()), or use --strategy ddp",
            )
        return True


def build_model(task: Task) -> nn.Module:
    """Build the trained and saved modules: ``task.model()``, with ``task.modules()`` if there are any."""
    model = task.model()
    extras = dict(task.modules())
    for source, module in {"model()": model, **{f"modules() for {n!r}": m for n, m in extras.items()}}.items():
        returned = f"the task's {source} returned {type(module).__name__}"
        if isinstance(module, type):
            raise TaskError(
                f"the task's {source} returned the class {module.__name__}", fix=f"call it: {module.__name__}(…)"
            )
        if not isinstance(module, nn.Module):
            raise TaskError(f"{returned}, not a module", fix="return an nn.Module")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TaskError(
                returned,
                why="Lockstep distributes the model over the selected devices; a wrapper would use others, or twice",
                fix="return the module inside; select devices with --devices, and a strategy with --strategy",
            )
    model = compiled_in_place(model)
    extras = {name: compiled_in_place(extra) for name, extra in extras.items()}
    beside = {f"modules.{name}.": module for name, module in extras.items()}
    trained = Trained({"": model, **beside}) if beside else model
    separate_elements(trained)
    return trained


def separate_elements(model: nn.Module) -> None:
    """Give buffers that ``expand()`` has made memory for each element, as a move to another device does."""
    separate: dict[int, Tensor] = {}
    for layer in model.modules():
        buffers = buffers_of(layer)
        for name, buffer in buffers.items():
            if buffer is not None and unshared(buffer) is not buffer:
                buffers[name] = separate.setdefault(id(buffer), unshared(buffer))


def bare(module: nn.Module) -> nn.Module:
    """Return the task's model itself, with which its functions are called."""
    return module.parts[0] if isinstance(module, Trained) else module


def refuse_modules(model: nn.Module, strategy: str) -> None:
    if isinstance(model, Trained):
        names = ", ".join(prefix.split(".")[1] for prefix in model.prefixes[1:])
        raise UnsupportedError(
            f"strategy {strategy} divides the model, and cannot train modules beside it: {names}",
            fix="make them part of the model, or use --strategy ddp",
        )


def refuse_meta(model: nn.Module) -> None:
    """Raise :class:`TaskError` where a parameter has no memory, since nothing would be trained."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise TaskError(
            f"the parameter {name} of the task's model is on the meta device",
            fix="make a new module in each call of model(), or keep it in an attribute of the task",
        )


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
        """Return a function that calls ``name``; ``None`` where no callback has it."""
        return (lambda: self.call(name, context, model)) if name in self._methods else None


def train_mode(model: nn.Module) -> None:
    """Call ``model.train()``, except for modules that the task has put in evaluation mode.

    Two kinds stay in evaluation mode: a layer without children whose parent is in training mode (a frozen BatchNorm),
    and a module whose parameters are all frozen (a backbone). Many libraries return a whole model in evaluation mode.
    """
    kept_in_eval: list[nn.Module] = []
    for parent in model.modules():
        for module in parent.children():
            is_layer = parent.training and next(module.children(), None) is None
            parameters = list(module.parameters())
            if not module.training and (is_layer or (parameters and not any(p.requires_grad for p in parameters))):
                kept_in_eval.append(module)
    model.train()
    for module in kept_in_eval:
        module.eval()
