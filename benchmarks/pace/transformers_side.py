"""The Trainer of Hugging Face's transformers: neither bar nor checkpoints; the loss is logged every 50 steps."""

from __future__ import annotations

from typing import Any

from peers.transformers_side import Named, Trainer, TrainerCallback, TrainingArguments
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pace.pacer import Pacer
from pace.workload import INTERVAL, LR, MAX_NORM, Workload


class WithLoss(nn.Module):
    """A model that returns its loss, as the Trainer expects it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(inputs), labels)}


class Paced(TrainerCallback):
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._pacer: Pacer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pacer = Pacer(self._workload, speaks=state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % INTERVAL == 0 and self._pacer is not None:
            self._pacer.tick(state.global_step)


def run(workload: Workload) -> None:
    arguments = TrainingArguments(
        output_dir=workload.folder,
        per_device_train_batch_size=workload.batch,
        max_steps=workload.total_steps,
        learning_rate=LR,
        weight_decay=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=MAX_NORM if workload.clip else 0,
        logging_steps=INTERVAL,
        save_strategy="no",
        use_cpu=workload.device == "cpu",
        ddp_backend=None if workload.ranks == 1 else "gloo" if workload.device == "cpu" else "nccl",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = Named(TensorDataset(*workload.data()), ("inputs", "labels"))
    Trainer(WithLoss(workload.build()), arguments, train_dataset=data, callbacks=[Paced(workload)]).train()
