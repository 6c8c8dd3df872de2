"""Where things are in a run folder (the design's table; a test compares the two)."""

from __future__ import annotations

from pathlib import Path


class _In:
    """The path of a name in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Layout, kind: type[Layout]) -> Path:
        return layout.path / self._name


class Layout:
    """Paths of one run folder; they need not exist."""

    run_file = _In("run.json")
    config_file = _In("config.yaml")
    #: Of LightningCLI; only its runs have one.
    cli_config_file = _In("cli_config.yaml")
    heartbeat_file = _In("heartbeat.json")
    metrics_file = _In("metrics.json")
    steps_file = _In("steps.jsonl")
    evaluations_file = _In("evaluations.jsonl")
    ranks_file = _In("ranks.jsonl")
    profile = _In("profile")
    plan_file = _In("plan.json")
    task_file = _In("task.pkl")
    forecast_file = _In("forecast.json")
    slurm_file = _In("slurm.json")
    attempts = _In("attempts")
    checkpoints = _In("checkpoints")
    pictures = _In("pictures")
    logs = _In("logs")

    def __init__(self, path: Path) -> None:
        self.path = path

    def samples_file(self, rank: int) -> Path:
        """Where ``rank`` writes ``{"attempt", "step", "epoch" (from 1), "indices"}``, a line before each step."""
        return self.path / f"samples-rank{rank}.jsonl"
