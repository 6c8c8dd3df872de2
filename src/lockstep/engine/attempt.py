"""One attempt of one rank, from top to bottom: set up, train, evaluate, record."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lockstep._compat.torch import compiler_not_imported
from lockstep.checkpoint.reader import BROKEN
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.config import RunConfig
from lockstep.data.loader import make_loader
from lockstep.data.requests import Source, Window, windows
from lockstep.engine.checkpoint_writer import writing
from lockstep.engine.diagnostics.ablation import Watched
from lockstep.engine.diagnostics.profiler import memory_snapshot, profiled
from lockstep.engine.diagnostics.step_trace import Trace, trace_file
from lockstep.engine.distributed.agreement import check_start
from lockstep.engine.distributed.collectives import Collectives, shared
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.evaluate import train_mode
from lockstep.engine.fit import Fit, TimedBatches
from lockstep.engine.inspection import refuse_meta
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.loop import training_steps
from lockstep.engine.optim.groups import check_optimizer, check_sparse, untrained
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update, build_optimizer, scheduler_of
from lockstep.engine.process.determinism import check_pins, pins, rank_device, runtime, seed_everything
from lockstep.engine.result import RunResult
from lockstep.engine.resume import (
    check_fits,
    check_moments,
    freeze_again,
    judge_afresh,
    load_initial_weights,
    load_shared,
    load_weights,
    restoring,
)
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.build import build_strategy
from lockstep.engine.strategies.partition import divide
from lockstep.engine.task import Context, Datasets, Scheduler, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import open_data, training_source
from lockstep.errors import LockstepError, TaskError
from lockstep.events import Fanout, Note, RunEnded, Sink
from lockstep.hardware.world import World
from lockstep.plan import Plan
from lockstep.telemetry.files import JsonLines, write_json
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.rundir import Heartbeat, RunDir
from lockstep.telemetry.system import monitored

if TYPE_CHECKING:
    from lockstep.engine.lightning.module_fit import ModuleFit


def run_attempt(
    run_dir: RunDir,
    world: World,
    task: Task,
    config: RunConfig,
    plan: Plan,
    *,
    attempt: int,
    sink: Sink,
    stop_signal: Callable[[], int | None],
    datasets: Datasets | None = None,
    keeper: bool | None = None,
) -> RunResult:
    """Train until the plan is fulfilled, or a stop is agreed on. Called once per rank.

    Args:
        sink: where events go; used on keepers only.
        stop_signal: the signal that asked this process to stop, if any.
        datasets: already opened ones (in the process that made the plan).
        keeper: whether this rank writes the run folder that it sees, one rank for each folder; default: rank 0 does.

    Raises:
        LockstepError: what went wrong; on rank 0 the run folder says so too.
    """
    keeper = world.is_main if keeper is None else keeper
    sink = sink if keeper else Fanout()
    device = rank_device(tuple(plan.placement["devices"]), world)
    heartbeat = Heartbeat()
    fit: Fit | ModuleFit | None = None
    with contextlib.closing(sink), contextlib.ExitStack() as ending:
        ending.callback(heartbeat.stop)
        try:
            with (
                _joined(run_dir, world, config, plan, device) as collectives,
                writing(run_dir, world, config, plan, collectives, keeper, sink) as writer,
            ):
                if writer is not None:
                    ending.callback(writer.close)
                if keeper:
                    heartbeat.start(run_dir.heartbeat_file, total=plan.total_steps)
                attempt = collectives.broadcast(attempt)  # rank 0 may have begun a new one after others had looked
                if isinstance(task, ModuleTask):
                    from lockstep.engine.lightning.module_fit import ModuleFit

                    fit = ModuleFit(
                        *(task, config, plan, run_dir, world, collectives, device),
                        *(_newest(run_dir, collectives, sink), attempt, sink, writer, stop_signal, heartbeat.beat),
                    )
                    return fit.run()
                # No name for the snapshot here: it would keep its memory, or its files, until the end.
                fit = assemble(
                    *(run_dir, world, task, config, plan, datasets or open_data(task, config, collectives)),
                    *(device, collectives, _newest(run_dir, collectives, sink, in_pieces=_reads_pieces(writer))),
                )
                fit.attempt, fit.sink, fit.writer, fit.heartbeat = attempt, sink, writer, heartbeat.beat
                return _train_and_finish(fit, run_dir, world, stop_signal)
        except BaseException as error:
            _record_failure(sink, fit, error)
            raise


@contextlib.contextmanager
def _joined(
    run_dir: RunDir, world: World, config: RunConfig, plan: Plan, device: torch.device
) -> Iterator[Collectives]:
    """This process as a rank among the others; a node's first one also samples what its machine does. Collective."""
    timeout_s = config.distributed.timeout_s
    watches = config.telemetry.monitor and world.local_rank == 0
    devices = plan.placement["devices"]
    with (
        runtime(plan, device, world, timeout_s, detect_anomaly=config.debug.detect_anomaly),
        shared(world, timeout_s),
        monitored(run_dir.path, devices, node=world.node_rank) if watches else contextlib.nullcontext(),
    ):
        yield Collectives(world, timeout_s=timeout_s)


def _reads_pieces(writer: BackgroundWriter | None) -> bool:
    """Who writes its own part of a checkpoint can read it, too."""
    return writer is not None and writer.store.takes_parts


def _newest(run_dir: RunDir, collectives: Collectives, sink: Sink, *, in_pieces: bool = False) -> Snapshot | None:
    store = CheckpointStore(run_dir.checkpoints)
    step: int | None = None
    if collectives.is_main:
        store.clean_temporary()
        step = store.newest_verified(lambda message: sink.emit(Note("checkpoint_damaged", message, "warning")))
        for broken in store.set_aside_after(step):
            place = store.path_of(broken).with_name(store.path_of(broken).name + BROKEN)
            text = f"{place} was set aside; remove it to free its space"
            sink.emit(Note("checkpoint_set_aside", text, "warning"))
    step = collectives.broadcast(step)
    return None if step is None else load_shared(store, step, collectives, in_pieces=in_pieces)


def assemble(
    run_dir: RunDir,
    world: World,
    task: Task,
    config: RunConfig,
    plan: Plan,
    datasets: Datasets,
    device: torch.device,
    collectives: Collectives,
    snapshot: Snapshot | None,
) -> Fit:
    """Model, strategy and update of one rank as the plan says, from ``snapshot`` or anew; collective."""
    state = TrainState(position=config.debug.start_position)
    if snapshot is not None:
        check_fits(snapshot.manifest, plan)
        with restoring(run_dir.path):
            state = TrainState.from_state_dict(snapshot.trainer["state"])
    task.context = Context(state)
    seed_everything(plan.seed)  # whatever the data drew before
    model = build_model(task)
    refuse_meta(model)
    if snapshot is None:
        load_initial_weights(model, config.init_from, collectives)
    if plan.sync_batchnorm:
        model = convert(model, None)
    divided = None
    if plan.sharded or plan.pipelined:
        divided = divide(task, model, config, plan, datasets, device, world, collectives)
    else:
        model = model.to(device)
    precision = Precision(plan.placement["precision"], device, plan.pre_scale)
    optimizer, scheduler = _optimizer(task, model, config, plan)
    if scheduler is not None and scheduler.interval == "metric" and datasets.val is None:
        raise TaskError(
            "the task's scheduler steps by a metric, and there is no validation data",
            why="the monitored metric is computed at evaluations",
            fix="return validation data from datasets(), or a scheduler that steps by step or epoch",
        )
    if divided is not None:
        divided.adopt(optimizer)
    max_norm = config.training.max_grad_norm
    update = Update(model, optimizer, plan.schedule, precision, max_norm, divided, scheduler)
    here = pins(device, plan)
    remarks = () if divided is None else divided.remarks
    if snapshot is not None:
        _restore(snapshot, plan, here, task, model, update, run_dir)
        notes = judge_afresh(state, snapshot.manifest, plan), freeze_again(model, state.frozen)
        remarks += tuple(note for note in notes if note is not None)
    warning = None
    if divided is None and config.debug.trace == "off":  # a trace compares them itself
        warning = check_start(model, collectives, exact=plan.reproducibility == "exact")
    debug, watched = config.debug, task
    draws: set[str] = set()
    if debug.trace != "off" or debug.switch_off:
        watched = Watched(task, model, debug.switch_off)
        draws = watched.draws
    return Fit(
        task=task,
        config=config,
        plan=plan,
        datasets=datasets,
        strategy=build_strategy(watched, model, config, plan, precision, device, world, divided),
        update=update,
        precision=precision,
        state=state,
        collectives=collectives,
        device=device,
        sink=Fanout(),
        writer=None,
        attempt=1,
        run_dir=run_dir.path,
        stop_requested=lambda: False,
        heartbeat=lambda step, total: None,
        pins=here,
        trace=Trace(debug, trace_file(run_dir.path, world.rank), world.is_main, update, model, draws, divided),
        remarks=(*remarks, *_untrained(optimizer, model, max_norm)),
        warnings=() if warning is None else (warning,),
    )


def _optimizer(task: Task, model: torch.nn.Module, config: RunConfig, plan: Plan) -> tuple[Optimizer, Scheduler | None]:
    """The task's own, or those that the run configures."""
    with compiler_not_imported():
        own = task.optimizer(bare(model))
        optimizer = own or build_optimizer(config.optimizer, model, plan.schedule.base_lr)
    check_optimizer(optimizer, model)
    several = not plan.strategy.one_process
    check_sparse(model, reduced=several or plan.reproducibility == "exact")
    if type(task).scheduler is not Task.scheduler:
        for group in optimizer.param_groups:
            group["lr"] *= plan.schedule.scale
    return optimizer, scheduler_of(task, optimizer)


def _untrained(optimizer: Optimizer, model: torch.nn.Module, max_norm: float | None) -> tuple[str, ...]:
    names = untrained(optimizer, model)
    if not names:
        return ()
    some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    clipped = "" if max_norm is None else "; their gradients count in the norm that training.max_grad_norm limits"
    return (f"{len(names)} parameter(s) are in no group of the optimizer and not trained: {some}{clipped}",)


def _restore(
    snapshot: Snapshot,
    plan: Plan,
    here: dict[str, Any],
    task: Task,
    model: torch.nn.Module,
    update: Update,
    run_dir: RunDir,
) -> None:
    """Task, model and update become what they were. ``here``: this machine's pins."""
    if plan.reproducibility == "exact":
        check_pins(snapshot.manifest["pins"], here)
    load_weights(model, snapshot.model, run_dir.path)
    with restoring(run_dir.path):
        update.load_state_dict(snapshot.trainer["update"])
        check_moments(update.optimizer)
        task.load_state_dict(snapshot.trainer["task"])


def _train_and_finish(fit: Fit, run_dir: RunDir, world: World, stop_signal: Callable[[], int | None]) -> RunResult:
    fit.stop_requested = lambda: stop_signal() is not None
    fit.start()
    if fit.is_over:
        fit.remark(
            f"Nothing is left to train: the run ended at step {fit.state.step}. To train on, raise training.epochs "
            "(lockstep resume RUN --set training.epochs=N), or training.max_steps or early_stopping_patience."
        )
        fit.ended_by = "completed"
    else:
        _train(fit, run_dir, world)
    completed = fit.ended_by == "completed"
    fit.save()
    with pulse.during(Activity.SAVING if fit.writer is not None else Activity.AWAITING_SAVE):
        if fit.writer is not None:
            fit.writer.wait()
            pulse.at(Activity.AWAITING_SAVE)
        fit.collectives.broadcast(None)  # nobody goes on alone
    final = {name: value for name, value in fit.state.best_metric.items() if not completed}
    if completed:
        final = _test_the_best(fit, run_dir)
    pulse.at(Activity.ENDING)
    status = "completed" if completed else "stopped"
    state = fit.state
    fit.sink.emit(RunEnded(status, state.step, final, state.best_epoch, state.best_metric, fit.elapsed_s))
    signal_number = stop_signal() or 0
    exit_code = 0 if completed or fit.ended_by == "time is up" else 128 + (signal_number or 15)
    return RunResult(status, exit_code, run_dir.path, state.step, final, state.best_epoch, dict(state.best_metric))


def _train(fit: Fit, run_dir: RunDir, world: World) -> None:
    plan, state, trace = fit.plan, fit.state, fit.trace
    source = trace.source(training_source(fit.task, fit.datasets.train, plan))
    start: dict[str, int] = {"epoch": state.epoch, "position": state.position}
    requests = chain.from_iterable(window.requests for window in walk(plan, world, **start))
    largest = plan.batch.batch_size
    loader = make_loader(source, requests, plan.loader, world.rank, largest=largest, settled=fit.settle_loader)
    batches = TimedBatches(trace.batches(iter(loader)))
    train_mode(fit.strategy.module)
    fit.task.context.is_training = True
    waited_s = 0.0

    telemetry = fit.config.telemetry
    place: dict[str, Any] = {"rank": world.rank, "device": fit.device, "remark": fit.remark}
    with contextlib.closing(loader), memory_snapshot(telemetry, run_dir.profile, **place):
        steps = training_steps(
            fit.before_steps(_recorded(walk(plan, world, **start), fit, run_dir, world, source)),
            batches,
            fit.strategy,
            fit.update,
            state,
            epoch_over=lambda stop: plan.batch.window(stop) is None,
            requested=fit.requested,
            norm_every=fit.config.telemetry.log_interval,
        )
        with profiled(steps, telemetry, run_dir.profile, ranks=world.size, step=state.step, **place) as watched:
            for result in watched:
                trace.after_update(result)
                fit.after_step(result, batches.waited_s - waited_s)
                trace.after_hooks(result, merged=fit.saved_at == result.step)
                waited_s = batches.waited_s
                if fit.ended_by is not None:
                    break
    trace.write()


def walk(plan: Plan, world: World, *, epoch: int = 0, position: int = 0) -> Iterator[Window]:
    """What this rank takes part in, from ``position`` of ``epoch`` to the end of the run."""
    return windows(
        plan.batch,
        rank=0 if plan.pipelined else world.rank,
        epoch=epoch,
        position=position,
        epochs=plan.epochs,
        ghosts=plan.sync_batchnorm or plan.sharded,
    )


def _recorded(steps: Iterator[Window], fit: Fit, run_dir: RunDir, world: World, source: Source) -> Iterator[Window]:
    """``steps``; with ``telemetry.record_samples``, this rank's sample indices are written down before each.

    Before, since a step needs all ranks: so what a checkpoint holds is in every rank's file, whoever dies when.
    """
    if not fit.config.telemetry.record_samples or (fit.plan.pipelined and not world.is_main):
        yield from steps
        return
    file = JsonLines(run_dir.samples_file(world.rank))
    for window in steps:
        indices: list[int] = []
        for request in window.requests:
            if not request.ghost:
                indices += source.indices(request).tolist()
        step = fit.state.step + 1
        file.append({"attempt": fit.attempt, "step": step, "epoch": window.epoch + 1, "indices": indices})
        yield window


def _test_the_best(fit: Fit, run_dir: RunDir) -> dict[str, float]:
    """Final metrics: those of the best weights on the test set, beside the best validation's."""
    store = CheckpointStore(run_dir.checkpoints)
    best = fit.collectives.broadcast(store.step_of("best") if fit.collectives.is_main else None)
    step = fit.state.step if best is None else best
    if step != fit.state.step and fit.datasets.test is not None:
        snapshot = load_shared(store, step, fit.collectives, in_pieces=_reads_pieces(fit.writer))
        load_weights(fit.strategy.module, snapshot.model, run_dir.path)
        with restoring(f"the checkpoint of step {step}"):
            fit.task.load_state_dict(snapshot.trainer["task"])
    numbers, tables = fit.test(step)
    if tables and fit.collectives.is_main:
        names = getattr(fit.task, "class_names", None)
        write_json(run_dir.path / "tables.json", tables | ({"class_names": list(names)} if names else {}))
    return {**fit.state.best_metric, **numbers}


def _record_failure(sink: Sink, fit: Fit | ModuleFit | None, error: BaseException) -> None:
    text = str(error) if isinstance(error, LockstepError) else "".join(traceback.format_exception(error))
    step = fit.state.step if fit else 0
    elapsed = fit.elapsed_s if fit else 0.0
    # The folder may be what failed; then the first error is the one to tell.
    with contextlib.suppress(LockstepError):
        sink.emit(RunEnded("failed", step, {}, None, {}, elapsed, error=text))
