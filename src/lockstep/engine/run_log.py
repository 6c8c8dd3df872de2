"""The log of an attempt: rows, the best evaluation, early stopping, and why the run ended.

The native loop (:mod:`lockstep.engine.fit`) and Lightning's callback (:mod:`lockstep.lightning.run_callback`)
drive the same object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep.checkpoint.store import Snapshot
from lockstep.checkpoint.writer import Steady
from lockstep.data.requests import BatchRequest, Window
from lockstep.engine.diagnostics.stragglers import RankWatch, Throughput
from lockstep.engine.rank_context import RankContext, pins
from lockstep.engine.resume import manifest_of
from lockstep.engine.save_policy import SavePolicy, retained
from lockstep.engine.state import EndedBy, RunResult, TrainState, judge
from lockstep.engine.strategies.reducers import Flags
from lockstep.errors import ConfigError, NonFiniteError, many
from lockstep.events import EpochEnded, Evaluated, Note, RunEnded, RunStarted, StepLogged
from lockstep.rundir.files import JsonLines, read_jsonl
from lockstep.rundir.heartbeat import Activity, pulse
from lockstep.telemetry.console import duration
from lockstep.telemetry.loggers import monitored, row_name


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert logged values to numbers; a tensor has one value."""
    return {name: float(v.detach().item() if isinstance(v, Tensor) else v) for name, v in values.items()}


def unreported(monitor: str, reported: Collection[str]) -> ConfigError:
    """Make the error for evaluations without the monitored metric; ``reported``: the names of theirs."""
    close = get_close_matches(monitor, reported, 1)
    choice = "set checkpoint.monitor to one of these, with checkpoint.mode=min or max, or report it"
    return ConfigError(
        f"evaluations do not report {monitor!r}, the metric that judges the run (checkpoint.monitor)",
        why=f"they report {', '.join(reported) or 'no metric'}",
        fix=f"did you mean {close[0]}? Else {choice}" if close else choice,
    )


class LossMeter:
    """Sums of loss and count over an epoch, without a host sync on a GPU and without tensor work on a CPU.

    A step whose loss is not finite counts neither in the sum nor in the count.
    """

    def __init__(self, device: torch.device, total: float = 0.0, count: float = 0.0) -> None:
        self._on_host = device.type == "cpu"
        self._total = total
        self._count = count
        self._device_sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total: Tensor | float, count: Tensor | float) -> None:
        if self._on_host or not isinstance(total, Tensor):
            value = float(total)
            if math.isfinite(value):
                self._total += value
                self._count += float(count)
            return
        # Filled in there: to copy a number from the host, it would wait for all that the GPU has to do.
        if isinstance(count, Tensor):
            items = count.to(total.device, torch.float64)
        else:
            items = torch.full_like(total, count, dtype=torch.float64)
        self._device_sums += torch.where(torch.isfinite(total), torch.stack((total.double(), items)), 0.0)

    def read(self) -> tuple[float, float]:
        """Sum and count so far; synchronises with a GPU."""
        if self._on_host:
            return self._total, self._count
        total, count = self._device_sums.tolist()
        return self._total + total, self._count + count

    def reset(self) -> None:
        self._total = self._count = 0.0
        self._device_sums.zero_()


def record_samples(
    rank: RankContext, state: TrainState, indices: Callable[[BatchRequest], NDArray[np.int64]]
) -> Callable[..., None]:
    """Make a function that appends the indices of a window's samples, and other ``fields``, to this rank's file."""
    file = JsonLines(rank.run_dir.samples_file(rank.world.rank))

    def record(window: Window, **fields: Any) -> None:
        numbers = [i for request in window.requests if not request.ghost for i in indices(request).tolist()]
        position = {"attempt": rank.attempt, "step": state.step + 1, "epoch": window.epoch + 1, **fields}
        file.append({**position, "indices": numbers})

    return record


class RunLog:
    """One per rank. Its decisions rest on values that are equal on all ranks, so all of them stop and save together.

    ``losses`` sums those of the current epoch; the driver adds to it. ``ended_by`` is why the run ends after the
    current step; ``None`` while it continues. ``timed``: the parameters whose gradients show when a rank's work of a
    step is done. ``peak_share``: the part of the devices' peak arithmetic that one sample a second is.

    Counting is paused until :meth:`start`, and between :meth:`pause` and :meth:`unpause`.
    """

    def __init__(
        self,
        rank: RankContext,
        state: TrainState,
        timed: Callable[[], Iterable[nn.Parameter]],
        *,
        peak_share: float | None = None,
        ends_at_total: bool = True,
    ) -> None:
        checkpoint = rank.config.checkpoint
        self.state = state
        self.total = rank.plan.total_steps
        self.losses = LossMeter(rank.device, state.epoch_loss, state.epoch_count)
        self.ended_by: EndedBy | None = None
        self._evaluation: dict[str, float] = {}
        self._rank = rank
        self._peak_share = peak_share
        self._ends_at_total = ends_at_total
        self._patience = rank.config.training.early_stopping_patience
        self._policy = SavePolicy(checkpoint.every_steps, checkpoint.every_s, step=state.step)
        self._pins = pins(rank.device, rank.plan)
        self._started = time.monotonic()
        self._earlier_s = state.elapsed_s
        self._speed = Throughput()
        self._interval = self._epoch = self._speed.mark()
        self._epoch_speed = self._speed.since(self._epoch)
        self._interval_sums = self.losses.read()
        self._skipped_before = state.step, state.skipped_steps
        self._first_step = state.step + 1
        self._noted = set[str]()
        self._left_out = 0
        self._ranks = RankWatch(rank, timed, self._speed, state.step)
        self.pause()

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier attempts included."""
        return self._earlier_s + time.monotonic() - self._started

    def is_logged(self, step: int) -> bool:
        return step % self._rank.config.telemetry.log_interval == 0 or step == self.total

    def start(self, notes: Iterable[Note] = ()) -> None:
        """Report that the attempt starts; where nothing is left to train, ``ended_by`` is set."""
        rank = self._rank
        state = self.state
        rank.heartbeat(state.step, self.total)
        plan = rank.plan.as_dict()
        rank.sink.emit(
            RunStarted(
                run_dir=rank.run_dir.path,
                attempt=rank.attempt,
                step=state.step,
                total_steps=self.total,
                plan=plan,
                position=lambda: state.step,
                length=lambda: self.total,
            )
        )
        for note in (*rank.plan.notes, *notes):
            rank.sink.emit(note)
        # Every step, or until early stopping, in an earlier attempt.
        if (self._ends_at_total and state.step >= self.total) or 0 < self._patience <= state.evaluations_without_gain:
            self.ended_by = EndedBy.COMPLETED
            rank.note(
                "nothing_left",
                f"Nothing is left to train: the run ended at step {state.step}. To train on, raise training.epochs "
                "or max_steps (lockstep resume RUN --epochs N --max-steps N), or early_stopping_patience.",
            )

    def pause(self) -> None:
        """Leave the time from now on out of every speed: evaluation is not training."""
        self._speed.pause()

    def unpause(self) -> None:
        self._speed.unpause()

    def note_once(self, key: str, text: str, level: Literal["info", "warning"] = "warning") -> None:
        """Note something the first time that it happens in an attempt."""
        if key not in self._noted:
            self._noted.add(key)
            self._rank.note(key, text, level)

    def _report_skipped(self) -> None:
        """Note how many samples have been left out so far, if that has changed (``data.on_bad_row``)."""
        files = self._rank.run_dir.path.glob("skipped-rank*.jsonl") if self._rank.world.is_main else ()
        count = len({row["index"] for file in files for row in read_jsonl(file)})
        if count != self._left_out:
            self._left_out = count
            text = f"{many(count, 'training sample')} could not be read and left out: see skipped-rank*.jsonl"
            self._rank.note("samples_skipped", text, "warning")

    # Steps.

    def requests(self, step: int) -> Flags:
        """Return this rank's requests, which travel with the sums of ``step``; clocks are rank 0's alone."""
        stop = float(self._rank.stop_signal() is not None)
        if not self._rank.collectives.is_main:
            return Flags(stop)
        limit = self._rank.config.training.max_time_s
        time_up = float(limit is not None and time.monotonic() - self._started > limit)
        return Flags(stop, time_up, float(self._policy.due(step)))

    def step(self, samples: int, waited_s: float) -> None:
        """Count a step: ``samples`` over all ranks, ``waited_s`` seconds of it spent waiting for input."""
        self._speed.add(samples, waited_s)
        if self._rank.config.debug.fast_dev_run and self._first_step < self.total:
            self._leave_first_step_out()
        self._rank.heartbeat(self.state.step, self.total)
        pulse.at(Activity.HOOKS, self.state.step)

    def _leave_first_step_out(self) -> None:
        """Begin every measurement of speed after the first step, which is slower, and end it with the last step."""
        if self._rank.device.type == "cuda":
            torch.cuda.synchronize(self._rank.device)
        if self.state.step == self._first_step:
            self._epoch = self._interval = self._speed.mark()
        elif self.state.step == self.total:
            self.pause()

    def time_own_work(self) -> None:
        """Time the step that starts now, which will be logged."""
        self._ranks.before_logged_step()

    def log_step(
        self,
        lr: float,
        grad_norm: float | None,
        scalars: Mapping[str, float],
        *,
        skipped: int = 0,
        without_items: float | None = math.nan,
        is_empty: bool = False,
    ) -> None:
        """Emit the row of a log interval. Collective.

        Args:
            skipped: steps so far without a finite gradient, over all ranks.
            without_items: the loss of an interval without items.
            is_empty: the last step had no items either: then there is no row.
        """
        state = self.state
        epoch = self.state.epoch + 1
        sums = self.losses.read()
        loss, items = (now - before for now, before in zip(sums, self._interval_sums, strict=True))
        speed = self._speed.since(self._interval)
        counts_more = speed.seconds > 0 and items > 1.001 * speed.samples_per_s * speed.seconds
        self._warn_of_skipped(skipped)
        state.skipped_steps = skipped
        if items or not is_empty:
            row = StepLogged(
                attempt=self._rank.attempt,
                step=state.step,
                epoch=epoch,
                samples_seen=state.samples_seen,
                loss=loss / items if items else without_items,
                lr=lr,
                grad_norm=grad_norm,
                samples_per_s=speed.samples_per_s,
                data_wait_share=speed.data_wait_share,
                skipped_steps=skipped,
                scalars=scalars,
                items_per_s=items / speed.seconds if counts_more else None,
                mfu=None if self._peak_share is None else self._peak_share * speed.samples_per_s,
            )
            self._rank.sink.emit(row)
        self._ranks.log(state.step, epoch)
        self._interval = self._speed.mark()
        self._interval_sums = sums
        if self._rank.writer is not None:
            self._rank.writer.poll()
        self._check_skipped()

    def _warn_of_skipped(self, skipped: int) -> None:
        """Warn of skipped steps; those of a scaled loss are expected until its scale fits."""
        new = skipped - self.state.skipped_steps
        if new and not self._rank.plan.number_format.scales_loss:
            text = f"{many(new, 'step')} skipped without a finite gradient: the loss, or an input, is NaN or infinite."
            self.note_once("steps_skipped", f"{text} --set debug.detect_anomaly=true finds the operator.")

    def _check_skipped(self) -> None:
        """Refuse to continue when too many steps had no finite gradient. Equal on all ranks: all raise, or none."""
        step, skipped = self._skipped_before
        state = self.state
        steps = state.step - step
        if steps < min(100, self.total):
            return
        self._skipped_before = state.step, state.skipped_steps
        share = (state.skipped_steps - skipped) / steps
        if share > self._rank.config.training.max_skipped_share:
            raise NonFiniteError(
                f"{share:.0%} of the last {steps} steps had no finite gradient and were skipped",
                why="the loss or its gradient is NaN or infinite",
                fix="lower the learning rate, "
                + ("use bf16-mixed or 32, " if self._rank.plan.number_format.scales_loss else "")
                + "or find the operator with --set debug.detect_anomaly=true",
            )

    def agreed(self, flags: Flags | None) -> None:
        """Set why the run ends after this step, if it does; ``flags``: sums over ranks of :meth:`requests`, if read."""
        if self.ended_by is not None:
            return
        if self._ends_at_total and self.state.step >= self.total:
            self.ended_by = EndedBy.COMPLETED
        elif flags and flags.stop:
            self.ended_by = EndedBy.SIGNAL
        elif flags and flags.time_up:
            self.ended_by = EndedBy.TIME

    def end_step(self, flags: Flags | None, save: Callable[[], None] | None) -> None:
        """Carry out the requests that the ranks agreed on; ``save``: ``None`` at the end of an epoch, which saves."""
        if flags is not None and flags.save and save is not None:
            save()
        self.agreed(flags)
        if self.ended_by is None and self.is_logged(self.state.step + 1):
            self.time_own_work()

    def flush(self) -> None:
        """Emit what ranks have gathered and not emitted yet."""
        self._ranks.flush()

    # Epochs and evaluations.

    def sum_epoch(self) -> float:
        """Return the epoch's mean training loss so far, NaN without items; emit the state of the ranks. Collective."""
        if self._rank.config.data.on_bad_row == "skip":
            self._report_skipped()
        total, count = self.losses.read()
        self._epoch_speed = self._speed.since(self._epoch)
        self._ranks.end_epoch(self.state.step, self.state.epoch + 1)
        return total / count if count else math.nan

    def epoch_numbers(self, lr: float) -> dict[str, float]:
        """Return learning rate, speed and duration of an epoch, after :meth:`sum_epoch`; ``lr``: of the last step."""
        speed = self._epoch_speed
        return {"lr": lr, "samples_per_s": speed.samples_per_s, "duration_s": speed.seconds}

    def end_epoch(
        self,
        metrics: Mapping[str, float],
        lr: float,
        *,
        ended: bool,
        judged: Mapping[str, float] | None,
        uses_patience: bool = True,
    ) -> bool:
        """Judge an epoch and emit its row, after :meth:`sum_epoch`; return whether its evaluation is the best so far.

        Args:
            metrics: of the epoch, with its ``train_loss``.
            lr: of the last step.
            ended: whether the next epoch follows; else the run ends within this one.
            judged: metrics for :meth:`judge`, equal on all ranks; ``None`` if the epoch is not judged.
            uses_patience: as for :meth:`judge`.
        """
        improved = judged is not None and self.judge(judged, uses_patience=uses_patience)
        state = self.state
        epoch = self.state.epoch + 1
        if ended:
            total, count = self.losses.read()
            before_total, before_count = self._interval_sums
            self._interval_sums = before_total - total, before_count - count  # the next interval includes their rest
            self.losses.reset()
            state.epoch = epoch
            state.position = 0
        self._epoch = self._speed.mark()
        self._evaluation = {name: value for name, value in metrics.items() if name.startswith("val_")}
        row = {**metrics, **self.epoch_numbers(lr)}
        self._rank.sink.emit(
            EpochEnded(self._rank.attempt, epoch, state.step, row, improved, state.samples_seen, is_complete=ended)
        )
        return improved

    def evaluated(self, metrics: Mapping[str, float], improved: bool) -> None:
        state = self.state
        attempt = self._rank.attempt
        epoch = state.epoch + 1
        self._rank.sink.emit(Evaluated(attempt, epoch, state.step, metrics, improved, state.samples_seen))

    def judge(self, metrics: Mapping[str, float], *, uses_patience: bool = True) -> bool:
        """Return whether an evaluation is the best so far; without improvement for too long, the run ends.

        Args:
            metrics: the same on all ranks; those of the validation are kept with the best.
            uses_patience: whether an evaluation without improvement counts towards the end.
        """
        plan = self._rank.plan
        state = self.state
        patience = self._patience
        name, value = monitored(metrics, plan.monitor) or ("", math.nan)
        if name not in (plan.monitor, row_name(plan.monitor)):
            self._note_monitor(name, metrics)
        without_gain = state.evaluations_without_gain
        if not name or judge(state, metrics, value, plan.mode, state.epoch + 1):
            return bool(name)
        if not uses_patience:
            state.evaluations_without_gain = without_gain
        elif 0 < patience <= state.evaluations_without_gain:
            self.ended_by = EndedBy.COMPLETED
            text = f"Early stopping: {plan.monitor} has not improved for {patience} evaluations."
            self._rank.note("early_stopping", text)
        return False

    def _note_monitor(self, name: str, metrics: Mapping[str, float]) -> None:
        """Note once that evaluations do not report the monitored metric; ``name``: of the one in its place, if any."""
        stops_early = self._patience > 0
        error = unreported(self._rank.plan.monitor, [name for name in metrics if row_name(name).startswith("val_")])
        effect = "no checkpoint is the best one" + ", and the run does not stop early" * stops_early
        text = f"{error.what[:1].upper()}{error.what[1:]}, so {effect}: {error.why}; {error.fix}."
        if name:
            text = f"There are several validation loaders: {name} is monitored. checkpoint.monitor sets another name."
        self.note_once("monitor_missing", text, "warning" if stops_early and not name else "info")

    @property
    def final_evaluation(self) -> dict[str, float]:
        """The metrics of the best evaluation, or else those of the last epoch's row."""
        return dict(self.state.best_metric) or self._evaluation

    # Checkpoints, and the end.

    def saved(self) -> None:
        """Note that the current step is being saved: the next timed save is due ``checkpoint.every_s`` from now."""
        self._policy.saved(self.state.step)

    def current_state(self) -> dict[str, Any]:
        self.state.epoch_loss, self.state.epoch_count = self.losses.read()
        self.state.elapsed_s = self.elapsed_s
        return self.state.state_dict()

    def write(self, content: dict[str, Any], *, best: bool, steady: Steady | None = None) -> None:
        """Start to write a checkpoint of the current step; on ranks with a writer.

        ``content``: ``model``, ``trainer``, ``frozen`` and, of a shard, ``rows``; see :class:`Snapshot`.
        """
        rank = self._rank
        state = self.state
        writer = self._rank.writer
        assert writer is not None
        copy = writer.to_host(content, steady)
        keep = retained([*writer.store.steps(), state.step], rank.config.checkpoint.keep_last, state.best_step)
        manifest = manifest_of(rank.config, rank.plan, state, rank.attempt, self._pins)
        snapshot = Snapshot(
            step=state.step,
            model=copy["model"],
            trainer=copy["trainer"],
            manifest=manifest,
            rows=copy.get("rows", {}),
            frozen=copy["frozen"],
        )
        writer.submit(snapshot, best=best, keep=keep)

    def finish(self, final: dict[str, float]) -> RunResult:
        """Emit the end of the run; ``final``: the metrics that it ends with."""
        state = self.state
        ended = self.ended_by or EndedBy.COMPLETED
        rank = self._rank
        rank.heartbeat(state.step, self.total)
        if rank.config.debug.fast_dev_run:
            rank.note("estimate", self._estimate())
        rank.sink.emit(RunEnded(ended.status, state.step, final, state.best_epoch, state.best_metric, self.elapsed_s))
        code = 128 + (rank.stop_signal() or 15) if ended is EndedBy.SIGNAL else 0
        best = dict(state.best_metric)
        return RunResult(ended.status, code, rank.run_dir.path, state.step, final, state.best_epoch, best)

    def _estimate(self) -> str:
        """Describe how long an epoch and the run take, at the speed of the last epoch's steps after the first."""
        timed = self.state.step - self._first_step
        if timed < 1:
            return "No estimate: an epoch has a single step, and the first one is slower than the others."
        speed = self._epoch_speed
        steps = self._rank.plan.batch.steps_per_epoch
        epochs = self._rank.config.training.epochs
        step_s = speed.seconds / timed
        epoch_s = steps * step_s
        whole = f"An epoch takes about {duration(epoch_s)} and {many(epochs, 'epoch')} {duration(epochs * epoch_s)}"
        waited_s = speed.data_wait_share * step_s
        parts = f"{steps} steps of {1e3 * step_s:.3g} ms, of which {1e3 * waited_s:.2g} ms wait for input"
        return f"{whole}, without evaluations: {parts} (mean of {many(timed, 'step')} after the first)."
