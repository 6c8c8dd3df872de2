"""What 'best' means in a run: the metric that evaluations are judged by, and its direction."""

from __future__ import annotations

import re

from lockstep.config import CheckpointConfig
from lockstep.planning.decision import Decision
from lockstep.planning.plan import Mode

#: Words of a metric's name that is better the lower it is.
_LOWER_IS_BETTER = {
    "bce", "brier", "cer", "cost", "deviance", "distance", "divergence", "ece", "eer", "entropy", "fid", "kl", "kld",
    "losses", "mase", "mcd", "mer", "perplexity", "ppl", "regret", "ter", "wer", "wil",
}  # fmt: skip
#: And what such words end with: ``rmse``, ``smape``.
_LOWER_ENDINGS = ("loss", "error", "errors", "mae", "mape", "mse", "msle", "nll")


def natural_mode(monitor: str) -> Mode:
    """``min`` for losses, errors and their rates, else ``max``; by the words of the name, as ``val_cer`` has two."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", monitor)
    lower = any(
        word in _LOWER_IS_BETTER or word.startswith("error") or word.endswith(_LOWER_ENDINGS)
        for word in map(str.lower, words)
    )
    return "min" if lower else "max"


def resolve_monitor(config: CheckpointConfig, own: tuple[str, Mode], *, judged: bool) -> tuple[str, Mode, Decision]:
    """The metric and the mode of a run, and the decision.

    Args:
        own: the task's metric and its mode.
        judged: whether there is data to evaluate on.
    """
    monitor = config.monitor or own[0]
    by_name = config.mode is None and monitor != own[0]
    mode = config.mode or (natural_mode(monitor) if by_name else own[1])
    better = "lower" if mode == "min" else "higher"
    reason = "as configured" if config.monitor or config.mode else "the task's own"
    if by_name:
        reason += f"; by its name, {better} is better (checkpoint.mode says otherwise)"
    if not judged:
        return monitor, mode, Decision("monitor", "monitor", None, "no validation data: no checkpoint is marked best")
    return monitor, mode, Decision("monitor", "monitor", monitor, reason, f"{monitor} ({mode})")
