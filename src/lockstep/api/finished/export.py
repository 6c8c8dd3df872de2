"""Weights and a program of a run, for use without Lockstep."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep._compat.torch import tree_map
from lockstep.api.finished.reopen import find_checkpoint
from lockstep.checkpoint.content import by_file
from lockstep.engine.model_inputs import Inputs
from lockstep.engine.resume import restore_weights
from lockstep.engine.runner import runner_of
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model
from lockstep.errors import RunFolderError, UnsupportedError
from lockstep.launch.run_claim import task_again
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir

EXAMPLE = '''"""Loads what `lockstep export` wrote; needs torch{extra}, not Lockstep."""
from pathlib import Path

import torch
{imports}
here = Path(__file__).parent
{body}'''

PROGRAM_BODY = """program = torch.export.load(here / "model.pt2").module()
inputs = torch.load(here / "example_inputs.pt", weights_only=True)
with torch.no_grad():
    output = program(*inputs["args"], **inputs["kwargs"])
shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
print("output:", {name: tuple(value.shape) for name, value in output.items()} if isinstance(output, dict) else shape)
"""

WEIGHTS_BODY = """weights = load_file(here / "weights.safetensors")
print(len(weights), "tensors,", sum(w.numel() for w in weights.values()), "values")
# model = YourModel(…); model.load_state_dict(weights)
"""

EXTRA_LINE = """weights |= torch.load(here / "extra_state.pt", weights_only=True)  # of get_extra_state()
"""


def export(
    run: RunDir,
    out: Path,
    *,
    checkpoint: str | int = "best",
    program: bool | None = None,
    task: Task | type[Task] | None = None,
) -> dict[str, Any]:
    """Write ``weights.safetensors``, ``model.pt2`` (torch.export), metadata and ``load_example.py`` to ``out``.

    The program's first dimension is dynamic: any batch size. The run of a ``LightningModule`` has a
    ``module.ckpt``, too, for its ``load_from_checkpoint``, and without ``example_input_array`` no program unless that
    is asked for. See :meth:`lockstep.Run.export`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(
            f"{out} is not empty", why="an export never overwrites", fix="give another folder with --out"
        )
    built = task_again(run, run.config(), task)
    snapshot = find_checkpoint(run, checkpoint)
    building = out.with_name(out.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        tensors, extra_states = by_file(snapshot.model)
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, building / "weights.safetensors")
        for name, state in extra_states.items():
            torch.save(state, building / f"{name}.pt")  # extra_state.pt
        trained = build_model(built)
        restore_weights(built, trained, snapshot, run.path)  # raises where the checkpoint is of another model
        model = bare(trained.eval())
        if program is not False:
            inputs = runner_of(built).model_inputs(model, run.config(), required=bool(program))
            program = inputs is not None
            if inputs is not None:
                _write_program(model, inputs, building)
        runner_of(built).export(model, snapshot, building)
        if not (building / "pretrained").exists():
            _write_pretrained(model, built, building / "pretrained")
        record = run.read()
        metadata = {
            "run": record.id,
            "task": record.task,
            "step": snapshot.step,
            "versions": record.versions,
            "metrics": snapshot.manifest.get("best", {}),
            "task_settings": run.config().task.model_dump(mode="json"),
            "task_state": _listed(snapshot.trainer.get("task", {})),
        }
        write_json(building / "metadata.json", metadata)
        # safetensors makes the file readable for its owner only.
        (building / "weights.safetensors").chmod((building / "metadata.json").stat().st_mode)
        _write_example(building, bool(program))
        if out.exists():
            out.rmdir()
        building.rename(out)
    except OSError as error:
        raise RunFolderError(f"cannot write {out}", why=str(error), fix="choose another --out") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return {"out": str(out), "step": snapshot.step, "files": sorted(file.name for file in out.iterdir())}


def _write_pretrained(model: nn.Module, task: Task, folder: Path) -> None:
    """Write a model of transformers or peft as ``from_pretrained`` reads it: of peft, the adapter alone.

    It may be a part of the task's model: each outermost one gets a folder of its name. The task's ``tokenizer`` or
    ``processor`` is written beside it.
    """
    models: dict[str, Any] = {}
    for name, module in model.named_modules():
        if callable(getattr(module, "save_pretrained", None)) and not any(
            name.startswith(f"{outer}.") or not outer for outer in models
        ):
            models[name] = module
    for name, module in models.items():
        target = folder / name if len(models) > 1 else folder
        module.save_pretrained(target)
        for attribute in ("tokenizer", "processor"):
            save = getattr(getattr(task, attribute, None), "save_pretrained", None)
            if callable(save):
                save(target)


def _listed(state: Any) -> Any:
    """Convert tensors to lists, such as mean, deviation and classes of the data, for people without torch."""
    if isinstance(state, dict):
        return {key: _listed(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _write_program(model: nn.Module, inputs: Inputs, folder: Path) -> None:
    """Write the program of ``model`` and the ``inputs`` that it was exported with."""
    args, kwargs = inputs

    def plain(_model: nn.Module, _args: Any, output: Any) -> Any:
        """Replace a library's type (transformers' ``ModelOutput``), for which a program would need that library."""
        if not isinstance(output, dict) or type(output) is dict:
            return None
        return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}

    def first(value: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.dim() else None

    hook = model.register_forward_hook(plain)
    try:
        # Any size of each tensor's first dimension, by the names of forward's arguments.
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        shapes = {name: tree_map(first, value) for name, value in bound.arguments.items()}
        exported = torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has many error types
        raise UnsupportedError(
            "torch cannot export this model as a program",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            fix="export only the weights (--no-program)",
        ) from error
    finally:
        hook.remove()
    torch.export.save(exported, folder / "model.pt2")
    torch.save({"args": args, "kwargs": kwargs}, folder / "example_inputs.pt")


def _write_example(folder: Path, program: bool) -> None:
    extra = ""
    imports = ""
    body = PROGRAM_BODY
    if not program:
        extra = " and safetensors"
        imports = "from safetensors.torch import load_file\n"
        body = WEIGHTS_BODY
        if (folder / "extra_state.pt").exists():
            body = body.replace("# model", f"{EXTRA_LINE}# model")
    text = EXAMPLE.format(extra=extra, imports=imports, body=body)
    (folder / "load_example.py").write_text(text, encoding="utf-8")
