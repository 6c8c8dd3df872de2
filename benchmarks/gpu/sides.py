"""Other trainers of a workload; each is a function that trains and calls ``tick()`` after each step.

Batches of all of them lie ready on the device: they are compared by their loops, not by their loaders. ``eager`` alone
reads its loss every 50 steps, as hand-written loops do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from gpu.catalogue import LR, MAX_NORM, Spec

Tick = Callable[[], None]
#: The package that a side needs.
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


def ready(spec: Spec, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """A few batches on the device, in turn, without end."""
    inputs, labels = spec.sample(min(4 * spec.batch, spec.samples), torch.Generator().manual_seed(0))
    pairs = [
        (x.to(device), y.to(device)) for x, y in zip(inputs.split(spec.batch), labels.split(spec.batch), strict=True)
    ]
    return cycle([pair for pair in pairs if len(pair[0]) == spec.batch])


def autocast(spec: Spec, device: torch.device) -> Any:
    kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return torch.autocast(device.type, kinds[spec.precision]) if spec.precision in kinds else contextlib.nullcontext()


def by_hand(spec: Spec, device: torch.device, tick: Tick, *, compiled: bool) -> None:
    """``bare``, compiled: the floor. ``eager``: as it is usually written."""
    model = spec.build().to(device)
    forward: Any = torch.compile(model, mode=spec.mode) if compiled and spec.mode else model
    optimizer, count = spec.optimizer_of(model.parameters()), spec.batch * spec.items
    for step, batch in enumerate(ready(spec, device), start=1):
        with autocast(spec, device):
            loss = forward(*batch) / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if not compiled and step % 50 == 0:
            loss.item()
        tick()


def accelerate(spec: Spec, device: torch.device, tick: Tick) -> None:
    from accelerate import Accelerator

    kind = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(spec.precision, "no")
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=kind)
    model = spec.build()
    optimizer = spec.optimizer_of(model.parameters())
    model, optimizer = accelerator.prepare(model.to(device), optimizer)
    forward: Any = torch.compile(model, mode="default") if spec.mode == "default" else model
    for batch in ready(spec, device):
        loss = forward(*batch) / (spec.batch * spec.items)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        tick()


class _Endless(IterableDataset[Any]):
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def lightning(spec: Spec, device: torch.device, tick: Tick) -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = spec.build()

        def setup(self, stage: str) -> None:
            if spec.mode == "default":
                self.model.compile()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(*batch) / (spec.batch * spec.items)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return spec.optimizer_of(self.parameters())

    class Ticks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    trainer = pl.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.type == "cpu" else [device.index],
        precision={"32": "32-true"}.get(spec.precision, spec.precision),
        max_steps=10**9,
        gradient_clip_val=MAX_NORM,
        callbacks=[Ticks()],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(Module(), DataLoader(_Endless(ready(spec, device)), batch_size=None))


def transformers(spec: Spec, device: torch.device, tick: Tick) -> None:
    from tempfile import mkdtemp

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = spec.build()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.model(inputs, labels) / (spec.batch * spec.items)}

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tick()

    inputs, labels = spec.sample(min(512, spec.samples), torch.Generator().manual_seed(0))
    rows = [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=mkdtemp(),
        max_steps=10**6,
        per_device_train_batch_size=spec.batch,
        bf16=spec.precision == "bf16-mixed",
        use_cpu=device.type == "cpu",
        torch_compile=spec.mode == "default",
        optim="adamw_torch_fused",
        learning_rate=LR,
        max_grad_norm=MAX_NORM,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(Wrapped(), arguments, train_dataset=rows, callbacks=[Ticks()]).train()


def sides_of(spec: Spec, device: torch.device) -> tuple[dict[str, Callable[[Tick], None]], list[str]]:
    """The bare loop and the sides of ``spec`` whose package is here; and what is left out."""
    missing = [name for name in spec.sides if name in NEEDS and find_spec(NEEDS[name]) is None]
    made: dict[str, Callable[[Tick], None]] = {"bare": partial(by_hand, spec, device, compiled=True)}
    for name in (name for name in spec.sides if name not in missing):
        train = partial(by_hand, compiled=False) if name == "eager" else globals()[name]
        made[name] = partial(train, spec, device)
    return made, [f"{name} is not installed" for name in missing]
