"""Which trials a sweep trains: a grid with seeds, or points that Optuna chooses."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError, UnsupportedError
from lockstep.lab.sweep.space import Range, Space


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. ``total``: how many there are; ``number``: of a search, the trial's place in its study."""

    values: Mapping[str, Any]
    seed: int
    total: int
    number: int | None = None

    @property
    def label(self) -> str:
        """Its settings by their last names, and its seed: ``lr=0.001 seed=42``."""
        texts = [f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items()]
        return " ".join([*texts, f"seed={self.seed}"])

    def run_id(self, sweep: str) -> str:
        """Return the id of its run: the same whenever the sweep is started again, also with more values or seeds."""
        identity = json.dumps([sweep, self.number, dict(self.values), self.seed], sort_keys=True, default=str)
        return f"run-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


class Search(Protocol):
    """Chooses trials, one after the other, and learns from their results."""

    def next_trial(self) -> Trial | None:
        """Return the next trial to train, or ``None`` when there is none."""

    def should_prune(self, trial: Trial, scores: Sequence[float]) -> bool:
        """Return whether to stop a trial early, with the values of the monitored metric so far."""

    def finish(self, trial: Trial, status: str, score: float) -> None:
        """Take the result of a trial: the status of its run, or ``pruned``, and the best value of its metric."""


class Grid:
    """Every combination of values, each with every seed; values of a setting vary slower than seeds."""

    def __init__(self, space: Space, seeds: Sequence[int]) -> None:
        for key, values in space.items():
            if isinstance(values, Range):
                raise ConfigError(
                    f"{key} is a range, and a grid has values",
                    fix=f"list values, --set {key}=A,B,C, or add --search optuna",
                )
        lists = [list(values) for values in space.values() if not isinstance(values, Range)]
        points = [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
        total = len(points) * len(seeds)
        pairs = itertools.product(points, seeds)
        self._remaining: Iterator[Trial] = (Trial(point, seed, total) for point, seed in pairs)

    def next_trial(self) -> Trial | None:
        return next(self._remaining, None)

    def should_prune(self, trial: Trial, scores: Sequence[float]) -> bool:
        return False

    def finish(self, trial: Trial, status: str, score: float) -> None:
        pass


class OptunaSearch:
    """Points that Optuna chooses; its study is the file ``optuna.log`` in the sweep's folder, and resumes from it.

    Args:
        folder: the sweep's folder.
        seed: of every trial and of Optuna's sampler.
        trials: how many are trained in all, pruned and failed ones included.
        mode: ``min`` or ``max``.
    """

    def __init__(self, space: Space, folder: Path, *, seed: int, trials: int, mode: str) -> None:
        try:
            import optuna
            from optuna.storages import journal
        except ImportError:
            raise UnsupportedError(
                "optuna is not installed", fix="pip install 'lockstep-train[optuna]', or leave --search out for a grid"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = journal.JournalFileBackend(str(folder / "optuna.log"))
        storage = optuna.storages.JournalStorage(backend)
        direction: Any = "maximize" if mode == "max" else "minimize"
        self._study: Any = optuna.create_study(
            study_name=folder.name, storage=storage, load_if_exists=True, direction=direction
        )
        earlier = self._study.get_trials()
        # Trials that run at the same time, and those before and after a restart, must not be drawn at the same point.
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + len(earlier), constant_liar=True)
        self._study.pruner = optuna.pruners.MedianPruner()
        self._states: Any = optuna.trial.TrialState
        self._space = space
        self._seed = seed
        self._total = trials - sum(trial.state in (self._states.COMPLETE, self._states.PRUNED) for trial in earlier)
        self._count = 0
        self._started: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        for left in earlier:
            if left.state == self._states.RUNNING:  # its run resumes: same number, same values
                self._study.tell(left.number, state=self._states.FAIL)
                self._study.enqueue_trial(left.params, user_attrs={"number": _number_of(left)})

    def next_trial(self) -> Trial | None:
        if self._count >= self._total:
            return None
        self._count += 1
        optuna_trial = self._study.ask()
        values = {key: self._suggest(optuna_trial, key) for key in self._space}
        number = _number_of(optuna_trial)
        self._started[number] = optuna_trial
        return Trial(values, self._seed, self._total, number)

    def _suggest(self, optuna_trial: Any, key: str) -> Any:
        values = self._space[key]
        if not isinstance(values, Range):
            by_text = {str(value): value for value in values}  # Optuna keeps no lists
            return by_text[optuna_trial.suggest_categorical(key, list(by_text))]
        kind = "suggest_int" if isinstance(values.low, int) and isinstance(values.high, int) else "suggest_float"
        return getattr(optuna_trial, kind)(key, values.low, values.high, log=values.is_log)

    def should_prune(self, trial: Trial, scores: Sequence[float]) -> bool:
        assert trial.number is not None
        optuna_trial = self._started[trial.number]
        first = self._reported.get(trial.number, 0)
        for step in range(first, len(scores)):
            optuna_trial.report(scores[step], step)
        self._reported[trial.number] = len(scores)
        return len(scores) > first and bool(optuna_trial.should_prune())

    def finish(self, trial: Trial, status: str, score: float) -> None:
        assert trial.number is not None
        optuna_trial = self._started.pop(trial.number)
        if status == "completed" and math.isfinite(score):
            self._study.tell(optuna_trial, score)
        elif status == "pruned":
            self._study.tell(optuna_trial, state=self._states.PRUNED)
        elif status != "stopped":  # a stopped one stays open, and resumes with the sweep
            self._study.tell(optuna_trial, state=self._states.FAIL)


def _number_of(trial: Any) -> int:
    """Return the number of a trial of Optuna's, or of the one that it repeats."""
    return int(trial.user_attrs.get("number", trial.number))
