"""What happens around the steps of a run, as its folder tells it."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune

import lockstep
from lockstep import Callback, Datasets, Loss, Task
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError, ConfigError, DataError, TaskError
from lockstep.events import Note
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import ROOT, run_ranks
from tests.toys import CLASSES, FEATURES, Toy

STEPS_PER_EPOCH = 13


def trained(folder: Path, log_interval: int = 50, task: type[Task] | Task = Toy, **sections: Any) -> RunDir:
    """Two epochs of thirteen steps in this process."""
    lockstep.train(
        task,
        {
            "save_dir": str(folder),
            "hardware": {"selected_devices": "cpu"},
            "training": {"threads": 1, "early_stopping_patience": 0},
            "telemetry": {
                "log_interval": log_interval,
                "tensorboard": "off",
                "progress": "off",
                "system_metrics": False,
            },
            **sections,
        },
    )
    return RunDir.open(folder)


def resumed(run: RunDir, task: type[Task] | None = None, **sections: Any) -> lockstep.Run:
    return lockstep.Run(run.path).resume(task, sections)


def interval_means(each: Sequence[dict[str, Any]], some: Sequence[dict[str, Any]]) -> list[float]:
    """Means over the items of the intervals that the rows ``some`` end, from ``each`` step's own row."""
    totals, items = [0.0], [0]
    for row in each:
        totals.append(totals[-1] + row["loss"] * (row["samples_seen"] - items[-1]))
        items.append(row["samples_seen"])
    ends = [0, *(row["step"] for row in some)]
    return [(totals[b] - totals[a]) / (items[b] - items[a]) for a, b in itertools.pairwise(ends)]


def test_the_loss_of_an_interval_takes_in_the_steps_before_an_epochs_end(tmp_path: Path) -> None:
    each, some = (trained(tmp_path / str(interval), interval).steps() for interval in (1, 5))
    assert [row["step"] for row in some] == [5, 10, 15, 20, 25, 26], "the third interval is in both epochs"
    assert [row["loss"] for row in some] == pytest.approx(interval_means(each, some), rel=1e-6)


def test_evaluations_between_epochs_are_kept_and_judged(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", validation={"every_steps": 5})
    found, epochs = run.evaluations(), run.epochs()
    assert [(row["epoch"], row["step"], row["attempt"]) for row in found] == [
        (1, 5, 1),
        (1, 10, 1),
        (2, 15, 1),
        (2, 20, 1),
        (2, 25, 1),
    ]
    assert {"val_loss", "val_accuracy"} <= found[0].keys()
    assert found[0]["improved"], "the first of all is the best so far"
    assert [row["step"] for row in epochs] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    best = max([*found, *epochs], key=lambda row: row["val_accuracy"])
    assert run.read().best_metric["val_accuracy"] == best["val_accuracy"]


def test_a_resume_of_a_finished_run_leaves_it_finished(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    result = resumed(run)
    progress = run.progress()
    assert progress is not None
    assert (result.step, progress.step, progress.total) == (26, 26, 26)


class Drawing(Toy):
    """Draws from every generator, in training, in evaluation and for its remarks."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (0.5 + random.random() + float(np.random.rand())), count)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        self.remarks()
        return super().evaluate(model, batch)

    def remarks(self) -> tuple[str, ...]:
        random.random(), np.random.rand(), torch.rand(1)
        return ()


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    often, once = (
        trained(tmp_path / str(every), task=Drawing, validation={"every_steps": every, "sanity_steps": every % 2})
        for every in (1, 100)
    )
    for name, value in weights(often).items():
        assert torch.equal(value, weights(once)[name]), name


def weights(run: RunDir) -> dict[str, Tensor]:
    store = CheckpointStore(run.checkpoints)
    return store.load(store.step_of("last") or 0).model


class Declining(Toy):
    """Its first evaluation is its best. Its state is on a layer that model() makes, and is what evaluations show."""

    monitor = ("val_score", "max")
    evaluations = 0

    def model(self) -> nn.Module:
        model = super().model()
        self.layer: Any = model[0]
        self.layer.steps = 0
        return model

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> None:
            self.layer.steps = result.step

        return [(count, 1)]

    def metrics(self) -> Any:
        self.evaluations += 1
        return self

    def update(self, *rows: Tensor) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {"score": -self.evaluations, "steps": self.layer.steps}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.layer.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layer.steps = state["steps"]


def test_the_best_weights_are_tested_with_the_tasks_state_at_that_time(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", task=Declining)
    assert [row["val_steps"] for row in run.epochs()] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert run.read().final_metrics["test_steps"] == STEPS_PER_EPOCH
    found = lockstep.Run(run.path).evaluate(split="test", devices="cpu", checkpoint="best")
    assert found["test_steps"] == STEPS_PER_EPOCH, "the state is restored after model()"


def test_another_monitor_starts_again_with_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run", task=Declining, training={"threads": 1, "max_steps": 20})
    assert run.read().best_epoch == 1
    changes = {"training": {"max_steps": None}, "checkpoint": {"monitor": "val_loss"}}
    resumed(run, **changes, telemetry={"progress": "plain"})
    assert run.read().best_epoch == 2, "a loss is compared with losses, not with the best score"
    assert re.search(r"val_score \(max\).* val_loss \(min\)", capsys.readouterr().out)


class Level(Toy):
    """Each evaluation is worse than those before."""

    monitor = ("val_level", "max")

    def metrics(self) -> Any:
        return SimpleNamespace(update=lambda *rows: None, compute=lambda: {"level": -self.context.step})


@pytest.mark.slow
@pytest.mark.parametrize("validation", [{}, {"every_steps": 10}, {"every_epochs": 2}])
def test_an_evaluation_at_a_stop_judges_nothing(validation: dict[str, int], tmp_path: Path) -> None:
    training = {"threads": 1, "early_stopping_patience": 2, "epochs": 9}
    sections: dict[str, Any] = {
        "task": Level,
        "validation": validation,
        "scheduler": {"name": "constant", "warmup_steps": 0},
    }
    whole = trained(tmp_path / "whole", training=training, **sections)
    run = trained(tmp_path / "run", training={**training, "max_steps": 5}, **sections)
    record = run.read()
    assert (record.best_epoch, record.status) == (None, "completed")
    assert record.final_metrics["val_level"] == -5, "it is reported"
    for stop in (13, 18, 20, None):
        resumed(run, training={"max_steps": stop})
    ended = [(one.progress().step, one.read().best_metric) for one in (run, whole)]  # type: ignore[union-attr]
    assert ended[0] == ended[1]


class LateMixup(Toy):
    """Draws from Python's and NumPy's generators from its tenth step on."""

    step = 0

    def hooks(self) -> Any:
        def count(result: Any, model: nn.Module) -> None:
            self.step = result.step

        return [(count, 1)]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        drawn = random.random() + float(np.random.rand()) if model.training and self.step >= 9 else 1.0
        return Loss(total * drawn, count)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.slow
def test_what_a_loss_draws_from_pythons_and_numpys_generators_is_resumed(tmp_path: Path) -> None:
    constant = {"scheduler": {"name": "constant", "warmup_steps": 0}}
    whole = weights(trained(tmp_path / "whole", task=LateMixup, **constant))
    for stop in (9, 10, 11):
        training = {"threads": 1, "early_stopping_patience": 0, "max_steps": stop}
        run = trained(tmp_path / str(stop), task=LateMixup, training=training, **constant)
        np.random.rand(), random.random()
        resumed(run, training={"max_steps": None})
        for name, value in weights(run).items():
            assert torch.equal(value, whole[name]), (stop, name)


class Seen(Callback):
    """Notes each call with what the context says, and the norm of the gradients."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.norms: list[float] = []

    def on_epoch_start(self, context: Any, model: nn.Module) -> None:
        self.note("epoch start", context)

    def on_step_start(self, context: Any, model: nn.Module) -> None:
        self.note("step start", context)

    def on_after_backward(self, context: Any, model: nn.Module) -> None:
        self.norms.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        )
        self.note("gradients", context)
        model[0].bias.grad.zero_()

    def on_step_end(self, context: Any, model: nn.Module) -> None:
        self.note("step end", context)

    def on_epoch_end(self, context: Any, model: nn.Module) -> None:
        self.note("epoch end", context)

    def on_evaluation_start(self, context: Any, model: nn.Module) -> None:
        self.note("evaluation", context)

    def on_evaluation_end(self, context: Any, model: nn.Module) -> None:
        assert model.training is False

    def note(self, event: str, context: Any) -> None:
        self.calls.append((event, context.step, context.epoch, context.is_training))


class Called(Toy):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.events: list[tuple[Any, ...]] = []

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.zeros_(model[0].bias)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.events.append(("loss", self.context.step, self.context.epoch, self.context.is_training))
        return super().loss(model, batch)

    def callbacks(self) -> Any:
        self.seen = Seen(self.events)
        return [Callback(), self.seen]


@pytest.mark.parametrize("clipped", [None, 0.01])
def test_callbacks_are_called_around_steps_epochs_and_evaluations(tmp_path: Path, clipped: float | None) -> None:
    task = Called()
    training = {"threads": 1, "early_stopping_patience": 0, "batch_size": 100, "max_grad_norm": clipped}
    run = trained(tmp_path / "run", 1, task, training=training, optimizer={"weight_decay": 0.0})

    def epoch(number: int, first: int) -> list[tuple[Any, ...]]:
        steps = [
            (event, step + (event == "step end"), number, True)
            for step in (first, first + 1)
            for event in ("step start", "loss", "gradients", "step end")
        ]
        end = [("epoch end", first + 2, number, True), ("evaluation", first + 2, number, False)]
        return [("epoch start", first, number, True), *steps, *end, ("loss", first + 2, number, False)]

    sanity = [("evaluation", 0, 0, False), ("loss", 0, 0, False)]
    test = [("evaluation", 4, 2, False), ("loss", 4, 2, False)]
    assert task.events == sanity + epoch(0, 0) + epoch(1, 2) + test
    assert not weights(run)["0.bias"].any(), "a callback's change of the gradient is applied"
    logged = [row["grad_norm"] for row in run.steps()]
    assert all(0 < norm < 10 and after < norm for norm, after in zip(task.seen.norms, logged, strict=True))


def test_the_callbacks_of_the_guide_run_and_are_resumed(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "from-pytorch.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.S) if "class Unfreeze" in block)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.backbone(inputs).relu())

    scope: dict[str, Any] = {"Net": Net}
    exec(code, scope)

    class Guided(scope["Averaged"], Toy):  # type: ignore[misc, name-defined]
        seen: ClassVar[list[dict[str, Tensor]]] = []

        def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
            self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
            return super().evaluate(model, batch)

    training = {"threads": 1, "early_stopping_patience": 0, "epochs": 4, "batch_size": 100}
    constant = {"scheduler": {"name": "constant", "warmup_steps": 0}, "optimizer": {"weight_decay": 0.0}}
    task = Guided()
    run = trained(tmp_path / "run", 1, task, training=training, **constant)
    after = [CheckpointStore(run.checkpoints).load(step).model for step in CheckpointStore(run.checkpoints).steps()]
    assert torch.equal(task.seen[0]["backbone.weight"], task.seen[2]["backbone.weight"]), "frozen for two epochs"
    assert not torch.equal(task.seen[2]["backbone.weight"], task.seen[4]["backbone.weight"])
    assert not torch.equal(task.seen[4]["head.weight"], after[-1]["head.weight"]), "the average is evaluated"


class Refused(Toy):
    """Has no validation data; what it returns and what it keeps are set by the test."""

    returned: Any = None
    kept: Any = 1
    steps = 0

    def datasets(self) -> Datasets:
        return Datasets(super().datasets().train)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        total, count = super().loss(model, batch)
        return self.returned(total, count) if self.returned else Loss(total, count)

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": {"words": [self.kept]}}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda total, count: total / count, "not a lockstep.Loss"),
        (lambda total, count: (total.item(), count), r"\btotal .*\btensor"),
        (lambda total, count: (total / count, count), r"\btotal .*\bmean\b"),
        (lambda total, count: (total, torch.ones(3)), r"\bcount .*\bnumber"),
        (lambda total, count: (total, -count), "count .* -"),
        (lambda total, count: (total, torch.tensor(torch.nan)), "count .* nan"),
    ],
)
def test_a_loss_is_checked_on_the_first_training_batch(tmp_path: Path, returned: Any, words: str) -> None:
    task = Refused()
    task.returned = returned
    with pytest.raises(TaskError, match=words):
        trained(tmp_path / "run", task=task)
    assert task.steps == 1


def test_a_count_of_one_element_is_a_number_and_has_a_rate(tmp_path: Path) -> None:
    task = Refused()
    task.returned = lambda total, count: (total, torch.tensor([3 * count]))
    run = trained(tmp_path / "run", task=task)
    assert run.read().status == "completed"
    for row in run.steps():
        assert row["items_per_s"] == pytest.approx(3 * row["samples_per_s"])


class Uncounted(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(0 * super().loss(model, batch).total, 0)


def test_epochs_in_which_nothing_counts_are_reported(tmp_path: Path) -> None:
    _, events = attempt(Uncounted, tmp_path / "run", training={"epochs": 2})
    notes = [event.text for event in events if isinstance(event, Note) and event.key == "nothing_counted"]
    assert len(notes) == 2


@pytest.mark.parametrize("kept", [Path("words"), np.random.default_rng(0), lambda: 1, torch.zeros(1, device="meta")])
def test_what_cannot_be_saved_is_named_before_the_first_step(tmp_path: Path, kept: Any) -> None:
    task = Refused()
    task.kept = kept
    with pytest.raises(CheckpointError, match=r"at .task. → .vocabulary. → .words. → 0") as caught:
        trained(tmp_path / "run", task=task)
    assert type(kept).__name__ in str(caught.value)
    assert task.steps == 0


class Extra(nn.Linear):
    """Counts its forwards in training, in a state that is no tensor."""

    steps, kind = 0, dict

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return self.kind(steps=self.steps, sizes=[1.0] * self.steps, last=torch.tensor(self.steps))

    def set_extra_state(self, state: Any) -> None:
        assert len(state["sizes"]) == state["steps"] == state["last"]
        self.steps = state["steps"]


class WithExtra(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(Extra(FEATURES, CLASSES), Extra(CLASSES, CLASSES))

    def stages(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


def of_extra(rank: int, size: int, folder: Path, given: list[tuple[str, int]]) -> dict[str, Any]:
    for strategy, steps in given:
        settings: Any = {"training": {"max_steps": steps, "global_batch_size": 20, "batch_size": 10}}
        if size > 1:
            settings["hardware"] = {"strategy": strategy}
        found = attempt(WithExtra, folder, rank, size, resume=steps > 3, **settings)[0]
    return {name: value["steps"] for name, value in found.items() if name.endswith("_extra_state")}


@pytest.mark.slow
def test_what_a_model_keeps_besides_tensors_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = run_ranks(of_extra, 2, folder, [("ddp", 3), ("fsdp", 6), ("pipeline", 9)])
    done = 3 + 3 + 3 * 2  # forwards: with the pipeline a step has two micro-batches, and keeps them
    assert found == 2 * [dict.fromkeys(("0._extra_state", "1._extra_state"), done)]
    assert set(of_extra(0, 1, folder, [("auto", 12)]).values()) == {done + 6}
    assert lockstep.Run(folder).load_model("last", task=WithExtra)[1].steps == done + 6
    lockstep.Run(folder).export(tmp_path / "out", checkpoint="last", program=False, task=WithExtra)
    said = subprocess.run([sys.executable, tmp_path / "out" / "load_example.py"], capture_output=True, text=True)
    assert said.stdout.startswith("4 tensors") and not said.stderr
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    weights |= torch.load(tmp_path / "out" / "extra_state.pt", weights_only=True)
    WithExtra().model().load_state_dict(weights)


def test_what_a_model_keeps_that_runs_code_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Extra, "kind", SimpleNamespace)
    with pytest.raises(CheckpointError, match=r"at .extra_state. → .0\._extra_state(.|\n)*get_extra_state\(\)"):
        trained(tmp_path / "run", task=WithExtra)
    assert not (tmp_path / "run" / "steps.jsonl").exists()


class Showing(Toy):
    """Evaluates the loss alone, and shows what its model makes of some samples."""

    evaluate, metrics = Task.evaluate, Task.metrics
    monitor = ("val_loss", "min")

    def remarks(self, model: nn.Module) -> tuple[str, ...]:  # type: ignore[override]
        assert not model.training and not torch.is_grad_enabled()
        return (f"{model(torch.zeros(1, FEATURES)).shape}",)

    def pictures(self, model: nn.Module) -> dict[str, Any]:  # type: ignore[override]
        return {"first": np.zeros((2, len(model)), np.uint8)}


def test_a_task_without_metrics_evaluates_its_loss_and_shows_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = {"log_interval": 50, "tensorboard": "off", "progress": "plain", "system_metrics": False}
    run = trained(tmp_path / "run", task=Showing, telemetry=telemetry)
    assert {"val_loss"} == {name for name in run.epochs()[0] if name.startswith("val_")}
    assert "torch.Size([1, 3])" in capsys.readouterr().out
    assert list((run.path / "pictures").rglob("*first*"))
    said = [row["remarks"] for row in run.remarks()]
    assert said == [[{"text": "torch.Size([1, 3])"}]] * len(run.epochs())


class Scheduled(Toy):
    """Loss and gradients depend on where the run is; a callback freezes the first layer in the first epoch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert self.context.is_training == model.training
        total, count = super().loss(model, batch)
        return Loss(total * (1 + self.context.step % 3 + self.context.epoch), count)

    def callbacks(self) -> Any:
        return [Halve()]


class Halve(Callback):
    def on_epoch_start(self, context: Any, model: nn.Module) -> None:
        self.kept = model[0].bias.detach().clone()

    def on_after_backward(self, context: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5

    def on_step_end(self, context: Any, model: nn.Module) -> None:
        if context.epoch == 0:
            with torch.no_grad():
                model[0].bias.copy_(self.kept)


def exactly(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    training = {"early_stopping_patience": 0, "reproducibility": "exact", "global_batch_size": 48, "max_grad_norm": 0.1}
    return attempt(Scheduled, folder / f"of {ranks}", rank, ranks, training=training)[0]


@pytest.mark.slow
def test_context_and_callbacks_on_two_ranks_in_exact_mode(tmp_path: Path) -> None:
    alone, (two, _) = exactly(0, 1, tmp_path), run_ranks(exactly, 2, tmp_path)
    assert two.keys() == alone.keys() and all(torch.equal(two[name], value) for name, value in alone.items())


class SeveralSets(Toy):
    def datasets(self) -> Datasets:
        given = super().datasets()
        return Datasets(given.train, {"clean": given.val, "noisy": given.test})


class NamedAsASet(SeveralSets):
    def metrics(self) -> Any:
        return SimpleNamespace(update=lambda *rows: None, compute=lambda: {"noisy_loss": 1.0, "accuracy": 0.5})


class BadName(Toy):
    def datasets(self) -> Datasets:
        return Datasets(super().datasets().train, {"a b": super().datasets().val})


def test_several_validation_sets_are_reported_by_name_and_can_be_monitored(tmp_path: Path) -> None:
    run = trained(tmp_path / "several", task=SeveralSets, checkpoint={"monitor": "val_noisy_accuracy", "mode": "max"})
    rows = run.epochs()
    alone = trained(tmp_path / "alone").epochs()
    for row, same in zip(rows, alone, strict=True):
        assert row["val_loss"] == row["val_clean_loss"] == same["val_loss"]
        assert row["val_noisy_loss"] != row["val_loss"]
        assert [name for name in row if name.startswith("val_") and name.endswith("_loss")] == [
            "val_clean_loss", "val_noisy_loss", "val_loss"
        ]  # fmt: skip
        assert 0 <= row["val_noisy_accuracy"] <= 1
    assert run.read().best_metric["val_noisy_accuracy"] == max(row["val_noisy_accuracy"] for row in rows)
    with pytest.raises(ConfigError, match=r"(?s)val_noisy_acuracy.*fix: .*\bval_noisy_accuracy\?"):
        trained(tmp_path / "mistyped", task=SeveralSets, checkpoint={"monitor": "val_noisy_acuracy", "mode": "max"})
    assert RunDir.open(tmp_path / "mistyped").steps() == [], "before the first step"
    with pytest.raises(TaskError, match="val_noisy_loss"):
        trained(tmp_path / "twice", task=NamedAsASet)
    with pytest.raises(DataError, match="'a b'"):
        lockstep.plan(BadName())


class Dropping(Toy):
    """Draws in its loss, and has statistics; without clipping, in double precision."""

    dtype = torch.float32

    def model(self) -> nn.Module:
        layers = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        return nn.Sequential(*layers).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch[0].to(self.dtype), batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return model(batch[0].to(self.dtype)), batch[1]


class InDouble(Dropping):
    dtype = torch.float64


LOOKS: list[dict[str, Any]] = [
    {"telemetry": {"log_interval": 1}},
    {"telemetry": {"log_interval": 7, "record_samples": True, "system_metrics": True}},
    {"telemetry": {"log_interval": 50, "profile": "3:5"}},
    {"telemetry": {"log_interval": 50}, "debug": {"trace": "on"}},
    {"telemetry": {"log_interval": 50}, "validation": {"every_steps": 3, "sanity_steps": 0}},
    {"telemetry": {"log_interval": 50}, "validation": {"every_epochs": 2, "batch_size": 5, "sanity_steps": 3}},
    {"telemetry": {"log_interval": 50}, "checkpoint": {"every_steps": 2}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "training", "optimizer"),
    [(Dropping, {}, {"name": "adamw"}), (InDouble, {"max_grad_norm": None}, {"name": "sgd", "lr": 0.3})],
    ids=["clipped", "double"],
)
def test_settings_that_only_look_change_no_bit(
    tmp_path: Path, task: type[Task], training: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    run: dict[str, Any] = {"training": {"epochs": 2, "global_batch_size": 24, **training}, "optimizer": optimizer}
    expected, _ = attempt(task, tmp_path / "none", telemetry={"log_interval": 50}, **run)
    for number, look in enumerate(LOOKS):
        weights, _ = attempt(task, tmp_path / str(number), **run, **look)
        assert all(torch.equal(weights[name], value) for name, value in expected.items()), look


class OneCycle(Toy):
    made_for = 26

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.made_for)


class RunsOut(Toy):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        rates = [1.0] * 5
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])


def test_a_scheduler_with_too_few_steps_is_refused_before_the_first_one(tmp_path: Path) -> None:
    run = trained(tmp_path / "whole", task=OneCycle())
    assert run.status() == "completed"
    short = OneCycle()
    short.made_for = 25
    with pytest.raises(TaskError, match=r"\b25 .*\b26\b"):
        trained(tmp_path / "short", task=short)
    assert not RunDir.open(tmp_path / "short").steps()
    with pytest.raises(TaskError, match=r"\b26 .*\b39\b"):
        resumed(run, OneCycle, training={"epochs": 3})
    with pytest.raises(TaskError, match=r"LambdaLR .*\b5\b") as caught:
        trained(tmp_path / "lambda", task=RunsOut())
    assert "IndexError" in caught.value.why


class Wide(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, [batch[0].double(), batch[1]])

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return super().evaluate(model, [batch[0].double(), batch[1]])


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_float64_as_the_default_of_torch_trains_in_float64(mode: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        weights = [
            attempt(
                Wide,
                tmp_path / str(parts),
                training={"epochs": 1, "batch_size": 16 // parts, "accumulate": parts, "reproducibility": mode},
            )[0]
            for parts in (1, 2)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in weights[0].items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(weights[1][name], value, rtol=1e-10, atol=1e-10)


class Late(Toy):
    """Its first forward pass makes a parameter."""

    class Net(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Parameter(torch.ones(CLASSES))
            return super().forward(inputs) * self.late

    def model(self) -> nn.Module:
        return self.Net(FEATURES, CLASSES)


class Pruned(Toy):
    """A callback replaces a weight by two others."""

    class Prune(Callback):
        def on_epoch_start(self, context: Any, model: nn.Module) -> None:
            if context.epoch == 1:
                prune.l1_unstructured(model[0], "weight", 0.5)

    def callbacks(self) -> Sequence[Callback]:
        return [self.Prune()]


@pytest.mark.parametrize(("task", "name", "steps"), [(Late, "late", 1), (Pruned, "0.weight_mask", 2 * STEPS_PER_EPOCH)])
def test_weights_that_no_resume_could_load_end_the_run(task: type[Task], name: str, steps: int, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=rf"gained .*\b{name}\b"):
        attempt(task, tmp_path / "run", training={"epochs": 3, "batch_size": 16})
    checkpoints = CheckpointStore(RunDir.open(tmp_path / "run").checkpoints)
    assert checkpoints.step_of("last") == (None if steps == 1 else steps - STEPS_PER_EPOCH)


class Half(Toy):
    """Its losses are in half precision: each is in range, their sum over a global batch is not."""

    returns_values = True

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        values = (4e3 + nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")).half()
        return Loss(values if self.returns_values else values.sum(), len(values))


def test_values_in_half_precision_are_summed_in_single_and_a_sum_out_of_range_is_named(tmp_path: Path) -> None:
    run: dict[str, Any] = {"training": {"epochs": 1, "batch_size": 20, "max_grad_norm": None}}
    weights, events = attempt(Half, tmp_path / "values", **run)
    row = RunDir.open(tmp_path / "values").epochs()[-1]
    assert 4e3 <= row["train_loss"] < 4.01e3 and 4e3 <= row["val_loss"] < 4.01e3
    assert not any(isinstance(event, Note) and event.key == "loss_out_of_range" for event in events)
    split: dict[str, Any] = {"training": {**run["training"], "batch_size": 5, "accumulate": 4}}
    again, _ = attempt(Half, tmp_path / "split", **split)
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, rtol=1e-3, atol=1e-4)

    class Summed(Half):
        returns_values = False

    skipped = {"training": {**run["training"], "max_skipped_share": 1.0}}
    _, events = attempt(Summed, tmp_path / "sums", **skipped)
    notes = [event for event in events if isinstance(event, Note) and event.key == "loss_out_of_range"]
    assert len(notes) == 1 and "Loss(" in notes[0].text
