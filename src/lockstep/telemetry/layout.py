"""Where things are in a run folder (the design's table; a test compares the two)."""

from __future__ import annotations

from pathlib import Path


class Layout:
    """Paths of one run folder; whether they exist is another matter."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def cli_config_file(self) -> Path:
        """Of LightningCLI; only its runs have one."""
        return self.path / "cli_config.yaml"

    @property
    def heartbeat_file(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.json"

    @property
    def steps_file(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def evaluations_file(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def ranks_file(self) -> Path:
        return self.path / "ranks.jsonl"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def task_file(self) -> Path:
        return self.path / "task.pkl"

    @property
    def forecast_file(self) -> Path:
        return self.path / "forecast.json"

    @property
    def slurm_file(self) -> Path:
        return self.path / "slurm.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    @property
    def logs(self) -> Path:
        return self.path / "logs"
