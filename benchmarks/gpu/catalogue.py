"""What is trained: model, data, batch and settings of every workload, and what the field reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu.models import Classified, Gpt2, ResNet50, Transcribed, ViT, Wide
from lockstep.recipes.speech.recogniser import Recogniser
from lockstep.tasks.har.models import Cnn, Mlp

#: Rounds that are not counted, at the start: compilation, allocation, CUDA graphs.
WARM_UP = 2
MAX_NORM, LR = 1.0, 3e-4


@dataclass(frozen=True)
class Spec:
    """A workload. ``sample``: makes inputs and labels of n samples; ``items``: what a sample counts in ``unit``.

    ``block`` steps make a turn, of which there are ``rounds``; ``mode``: torch.compile's, ``None``: not compiled.
    ``published``: what others reach; ``sides``: what Lockstep is compared with, besides the bare compiled loop.
    """

    title: str
    model: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    batch: int
    unit: str = "samples"
    items: int = 1
    precision: str = "bf16-mixed"
    mode: str | None = "default"
    optimizer: str = "adamw"
    block: int = 10
    rounds: int = 12
    channels_last: bool = False
    sides: tuple[str, ...] = ()
    published: str = ""
    goal: str = ""

    @property
    def samples(self) -> int:
        """Of a run that is one epoch long: its end saves a checkpoint, which is not what is measured."""
        return self.block * (self.rounds + WARM_UP + 1) * self.batch

    def data(self) -> tuple[Tensor, Tensor]:
        """All inputs and labels, in host memory; few distinct samples, since nothing is learned."""
        inputs, labels = self.sample(min(512, self.samples), torch.Generator().manual_seed(0))
        times = -(-self.samples // len(inputs))
        parts = (t.repeat(times, *[1] * (t.dim() - 1))[: self.samples] for t in (inputs, labels))
        return next(parts), next(parts)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=LR, momentum=0.9, fused=True)
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=1e-4, fused=True)


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def make(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, vocabulary, (number, length + 1), generator=generator)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return make


def _labelled(
    classes: int, *shape: int, dtype: torch.dtype = torch.float32
) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def make(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, classes, (number,), generator=generator)
        if dtype == torch.uint8:
            return torch.randint(0, 256, (number, *shape), generator=generator, dtype=dtype), labels
        return torch.randn(number, *shape, generator=generator), labels

    return make


def _speech(frames: int, symbols: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def make(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        texts = torch.randint(1, 29, (number, symbols), generator=generator)
        return torch.randn(number, frames, 80, generator=generator), texts

    return make


_OTHERS = ("eager", "accelerate", "lightning")
SPECS: dict[str, Spec] = {
    "gpt2": Spec(
        **{"title": "GPT-2 124M, 1,024 tokens", "model": Gpt2, "sample": _tokens(50304, 1024), "batch": 64},
        **{"unit": "tokens", "items": 1024, "block": 5, "rounds": 10},
        sides=("accelerate", "lightning", "transformers"),
        published="468,000 tokens/s an H100 (llm.c, 8-GPU run); 462,000 (modded-nanogpt, torch 2.5)",
        goal="460,000 tokens/s on an H200, 0.99 of the bare loop, ahead of the others",
    ),
    "vit": Spec(
        **{"title": "ViT-S/16, 224 px", "model": ViT, "sample": _labelled(1000, 3, 224, 224, dtype=torch.uint8)},
        **{"batch": 256, "unit": "images"},
        published="8,003 images/s an H100, compiled (NVIDIA nvSubquadratic)",
        goal="8,000 images/s",
    ),
    "resnet50": Spec(
        **{"title": "ResNet-50, channels_last", "model": ResNet50, "batch": 256, "unit": "images"},
        **{"sample": _labelled(1000, 3, 224, 224, dtype=torch.uint8), "optimizer": "sgd", "channels_last": True},
        published="2,470 images/s an A100 (NVIDIA DeepLearningExamples)",
        goal="3,950 images/s (1.6 times that)",
    ),
    "har_cnn": Spec(
        **{"title": "HAR CNN, batch 64", "model": lambda: Classified(Cnn(9, 6, 128)), "batch": 64},
        **{"sample": _labelled(6, 9, 128), "precision": "32", "mode": "reduce-overhead", "block": 50, "sides": _OTHERS},
        goal="5 times faster than eager by hand, Accelerate and Lightning",
    ),
    "mlp": Spec(
        **{"title": "MLP 561-128-6, batch 32", "model": lambda: Classified(Mlp(1, 6, 561)), "batch": 32},
        **{"sample": _labelled(6, 1, 561), "precision": "32", "mode": "reduce-overhead", "block": 50, "sides": _OTHERS},
        goal="5 times faster than eager by hand, Accelerate and Lightning",
    ),
    "lmu_tiny": Spec(
        **{"title": "LMU recogniser, tiny", "batch": 16, "sample": _speech(100, 10), "precision": "32", "block": 20},
        model=lambda: Transcribed(Recogniser(80, 29, width=64, layers=2, heads=2, memory_size=32, form="parallel")),
        **{"mode": "reduce-overhead", "sides": ("eager",)},
        goal="5 times faster than eager by hand",
    ),
    "lmu_base": Spec(
        **{"title": "LMU recogniser, base, 500 frames", "batch": 16, "sample": _speech(500, 40), "block": 5},
        **{"model": lambda: Transcribed(Recogniser(80, 29, form="parallel")), "precision": "32", "mode": None},
        published="1.1 s a batch (document 004)",
        goal="20 times faster: 55 ms a batch",
    ),
}
#: The same shapes, small enough for a CPU: to see that all of it works.
_SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model": lambda: Gpt2(64, 16, 64, 1), "sample": _tokens(64, 16), "items": 16},
    "vit": {"model": lambda: ViT(32, 16, 64, 1, 10), "sample": _labelled(10, 3, 32, 32, dtype=torch.uint8)},
    "resnet50": {"model": lambda: ResNet50((1, 1), 8, 10), "sample": _labelled(10, 3, 32, 32, dtype=torch.uint8)},
    "har_cnn": {},
    "mlp": {},
    "lmu_tiny": {"sample": _speech(20, 4)},
    "lmu_base": {
        "model": lambda: Transcribed(Recogniser(80, 29, width=16, layers=1, heads=2, memory_size=8, form="parallel")),
        "sample": _speech(20, 4),
    },
}


def spec_of(name: str, *, quick: bool = False, batch: int | None = None) -> Spec:
    """``quick``: small, in float32, not compiled, three turns of two steps."""
    spec = SPECS[name]
    changes: dict[str, Any] = {} if batch is None else {"batch": batch}
    if quick:
        changes |= {**_SMALL[name], "batch": 4, "precision": "32", "mode": None, "block": 2, "rounds": 3}
    return Spec(**{**{field: getattr(spec, field) for field in Spec.__dataclass_fields__}, **changes})


def wide(quick: bool) -> nn.Module:
    """1.5 billion parameters: 18 GB with AdamW's state in float32."""
    return Wide(64, 2) if quick else Wide(8192, 22)
