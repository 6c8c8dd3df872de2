"""The precisions: number formats of a run. One :class:`PrecisionSpec` each; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """The properties of a precision that other modules ask for. Types are attributes of ``torch``.

    Attributes:
        name: the value of ``hardware.precision``.
        reason: in the plan of a run that sets it.
        epsilon: half the distance from 1 to the next number.
        capability: the lowest CUDA compute capability that has it at full speed ("Compute Capabilities" in CUDA's
            guide); torch emulates it below.
        autocast: the type of the forward pass under autocast; ``None``: that of the model.
        weights: the type of weights, gradients and optimizer state; ``None``: that of the model.
        scales_loss: whether small gradients need a loss scale.
    """

    name: str
    reason: str
    epsilon: float
    capability: tuple[int, int]
    autocast: str | None = None
    weights: str | None = None
    scales_loss: bool = False

    @property
    def is_half(self) -> bool:
        """Products take 16-bit numbers."""
        return self.autocast is not None or self.weights is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, of its gradient and of each number that the optimizer keeps for it."""
        return 4 if self.weights is None else 2


_SPECS = (
    PrecisionSpec(
        name="32",
        reason="the types of the model: single precision unless it sets another",
        epsilon=2.0**-11,  # of TF32, which products may use
        capability=(0, 0),
    ),
    PrecisionSpec(
        name="16-mixed",
        reason="as set: half precision with loss scaling",
        epsilon=2.0**-11,
        capability=(7, 0),
        autocast="float16",
        scales_loss=True,
    ),
    PrecisionSpec(
        name="bf16-mixed",
        reason="as set: bfloat16 for safe operations, single precision for the rest",
        epsilon=2.0**-8,
        capability=(8, 0),
        autocast="bfloat16",
    ),
    PrecisionSpec(
        name="bf16-true",
        reason="as set: bfloat16 for weights, gradients and optimizer too, which halves their memory and rounds",
        epsilon=2.0**-8,
        capability=(8, 0),
        weights="bfloat16",
    ),
)
PRECISIONS = {spec.name: spec for spec in _SPECS}
