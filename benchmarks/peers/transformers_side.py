"""The experiment with the Trainer of Hugging Face's transformers.

Variants: ``default``: the model returns the mean over its batch; ``num_items_in_batch``: it takes that argument and
returns its sum divided by it, as the library's own models do; the same with ``average_tokens_across_devices=False``.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from peers.probe import LR, SEED, VALIDATION_BATCH, Diary, Job, Probe, Stopped, Values, subject


class Named(Dataset[Any]):
    """A data set whose samples are mappings, as the Trainer expects them."""

    def __init__(self, dataset: Any, names: tuple[str, ...]) -> None:
        self._dataset, self._names = dataset, names

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self._dataset[index]
        return dict(zip(self._names, sample if isinstance(sample, tuple) else (sample,), strict=True))


class Mean(nn.Module):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe

    def forward(self, number: Tensor, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.probe((number, inputs, labels)).mean()}


class Counted(Mean):
    def forward(self, number: Tensor, inputs: Tensor, labels: Tensor, **given: Any) -> dict[str, Tensor]:
        losses = self.probe((number, inputs, labels))
        return {"loss": losses.sum() / given.get("num_items_in_batch", len(losses))}


class Echo(nn.Module):
    """The prediction for a validation sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        return {"logits": value + 0 * self.weight}


class Notes(TrainerCallback):
    def __init__(self, job: Job, diary: Diary, probe: Probe) -> None:
        self._job, self._diary, self._probe = job, diary, probe

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self._diary.note(state.global_step, math.ceil(state.epoch - 1e-6) - 1, logs["loss"], self._probe)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._job.stop_after and not self._job.resume:
            raise Stopped


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def run(job: Job) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=job.folder,
        per_device_train_batch_size=job.batch,
        per_device_eval_batch_size=VALIDATION_BATCH,
        gradient_accumulation_steps=job.accumulate,
        num_train_epochs=job.epochs,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no" if job.stop_after is None else "steps",
        save_steps=job.stop_after or 1,
        seed=SEED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        average_tokens_across_devices="average_tokens_across_devices=False" not in job.variant,
    )
    if job.kind == "validation":
        found = Trainer(Echo(), arguments).predict(Named(Values(), ("value",))).predictions
        return {"count": len(found), "mean": float(found.mean())}
    probe, samples = subject(job.kind, job.samples)
    model = (Mean if job.variant == "default" else Counted)(probe)
    data, diary = Named(samples, ("number", "inputs", "labels")), Diary()
    kind = Trainer if job.shuffle else InOrder
    trainer = kind(model, arguments, train_dataset=data, callbacks=[Notes(job, diary, probe)])
    with contextlib.suppress(Stopped):
        trainer.train(resume_from_checkpoint=job.resume)
    return diary.result(probe)
