"""Commands that use the checkpoint of a run: ``evaluate``, ``predict`` and ``export``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, answer, find, flag, print_values, verb
from lockstep.cli.settings import fork_ranks_from_here
from lockstep.errors import UsageError
from lockstep.rundir.remote import is_url

if TYPE_CHECKING:
    from lockstep.rundir.folder import RunDir


def weights_flag(purpose: str) -> Parameter:
    return flag(f"Which weights{purpose}. Default: best.", "best|last|STEP")


def open_checkpoint(run: str, runs_dir: Path, checkpoint: str) -> tuple[RunDir, str | int]:
    """Return the run, and its checkpoint: ``best``, ``last`` or the number of a step."""
    step = int(checkpoint) if checkpoint.isascii() and checkpoint.isdigit() else None
    if step is None and checkpoint not in {"best", "last"}:
        raise UsageError(
            f"invalid value for --checkpoint: {checkpoint!r}", fix="write best, last, or a step such as 1200"
        )
    chosen = checkpoint if step is None else step
    run_dir = find(run, runs_dir)
    if is_url(run):
        from lockstep.api.finished.reopen import fetch_weights

        fetch_weights(run, run_dir, chosen)
    return run_dir, chosen


def _print(result: Mapping[str, Any], as_json: bool) -> None:
    answer(result, partial(print_values, result.items()), as_json)


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """The flags of a command that computes with a checkpoint."""

    checkpoint: Annotated[str, weights_flag(" to use")] = "best"
    devices: Annotated[
        str | None,
        flag("Devices by name, comma-separated: any number gives the same. Default: the first of the run.", "DEVICE,…"),
    ] = None
    runs_dir: RunsDir = DEFAULT_RUNS_DIR


Weights = Annotated[CheckpointFlags, Parameter(name="*")]
BEST = CheckpointFlags()


@verb(
    "RUN [DATA] [OPTIONS]",
    "Examples:\n  lockstep evaluate last val --checkpoint last\n  lockstep evaluate last other.jsonl",
)
def evaluate(
    run: RunRef,
    source: Annotated[
        str | None, Parameter(name="DATA", help="train, val or test, or a file or folder of data. Default: test.")
    ] = None,
    /,
    *,
    split: Annotated[Literal["test", "val"] | None, flag("Another spelling of DATA.")] = None,
    data: Annotated[Path | None, flag("Another spelling of DATA.", "FILE")] = None,
    weights: Weights = BEST,
    as_json: AsJson = False,
) -> None:
    named = [name for name, value in {"DATA": source, "--split": split, "--data": data}.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} both name the data", fix="give one of them")
    run_dir, chosen = open_checkpoint(run, weights.runs_dir, weights.checkpoint)
    from lockstep.api.finished.evaluation import evaluate as evaluate_run

    fork_ranks_from_here(weights.devices)
    result = evaluate_run(run_dir, source or split or data or "test", devices=weights.devices, checkpoint=chosen)
    _print(result if as_json else {**{k: v for k, v in result.items() if k != "metrics"}, **result["metrics"]}, as_json)


@verb("RUN [DATA] [OPTIONS]", "Example:\n  lockstep predict last test --devices cpu,cpu --out predictions.csv")
def predict(
    run: RunRef,
    data: Annotated[
        str | None,
        flag(
            "train, val or test, or a file or folder of data. Default: test; of a LightningModule: predict, for its "
            "predict_dataloader()."
        ),
    ] = None,
    /,
    *,
    out: Annotated[
        Path | None,
        flag(
            "File to write, ending in .csv, .jsonl or .parquet. Default: predictions-DATA.csv, in the run folder or, "
            "of a mirror, here.",
            "FILE",
        ),
    ] = None,
    loss: Annotated[bool, flag("Add a column with the loss of each sample.")] = False,
    weights: Weights = BEST,
    as_json: AsJson = False,
) -> None:
    run_dir, chosen = open_checkpoint(run, weights.runs_dir, weights.checkpoint)
    from lockstep.api.finished.predict import PredictionRequest
    from lockstep.api.finished.predict import predict as write_predictions

    fork_ranks_from_here(weights.devices)
    request = PredictionRequest(data=data, devices=weights.devices, checkpoint=chosen, with_loss=loss)
    _print(write_predictions(run_dir, request, out, folder=Path() if is_url(run) else None), as_json)


@verb("RUN [OPTIONS]", "Example:\n  lockstep export last --out model --no-program")
def export(
    run: RunRef,
    /,
    *,
    out: Annotated[
        Path | None, flag("Folder to write to, new or empty. Default: export, in the run folder or, of a mirror, here.")
    ] = None,
    checkpoint: Annotated[str, weights_flag(" to export")] = "best",
    program: Annotated[
        bool | None,
        flag(
            "Also write the model as a torch.export program, which runs without the task's code. Default: on, "
            "unless it is a LightningModule without example_input_array.",
            negative="--no-program",
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    run_dir, chosen = open_checkpoint(run, runs_dir, checkpoint)
    from lockstep.api.finished.export import export as write_export

    folder = out or (Path("export") if is_url(run) else run_dir.path / "export")
    result = write_export(run_dir, folder, checkpoint=chosen, program=program)
    _print(result if as_json else {**result, "files": ", ".join(result["files"])}, as_json)
