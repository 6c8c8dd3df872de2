"""The calls of a session in one process, and their errors; on two ranks, what they compute together."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.api.session_join import with_settings_of_launch
from lockstep.checkpoint.store import CheckpointStore
from lockstep.engine.session.saving import Made
from lockstep.errors import CheckpointError, ConfigError, LockstepError, RankFailed, TaskError, UnsupportedError
from lockstep.hardware import World
from lockstep.launch.local.worker import Rank
from lockstep.launch.process.signals import StopRequest
from lockstep.launch.session.started import Started
from lockstep.rundir.folder import RunDir

QUIET = {"telemetry.progress": "silent", "telemetry.system_metrics": False}


def data(samples: int = 33) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[lockstep.Session]:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / "run") as session:
        yield session


def prepared(session: lockstep.Session) -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer


def batches(session: lockstep.Session, **how: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in session.epochs(1):
        yield from session.batches(data(), **how)


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).squeeze(1), y, reduction="sum")


def test_accumulation_is_the_same_step(tmp_path: Path) -> None:
    weights = []
    for accumulate in (1, 3):
        with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / str(accumulate)) as session:
            model, optimizer = prepared(session)
            stepped = []
            for x, y in batches(session, accumulate=accumulate):
                session.backward(squares(model, x, y), count=len(y))
                stepped.append(session.step(optimizer))
            assert sum(stepped) == session.step_count == 5
            assert len(stepped) > 5 or accumulate == 1
            weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_mean_with_weight_penalty_with_count_0_and_reduce_before_step(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    losses = 0.0
    for x, y in batches(session):
        twin = nn.Linear(4, 1)
        twin.load_state_dict(model.state_dict())
        loss = F.mse_loss(twin(x).squeeze(1), y) + 0.5 * twin.weight.square().sum() / len(y)
        loss.backward()
        losses += loss.item() * len(y)
        session.backward(F.mse_loss(model(x).squeeze(1), y), weight=len(y))
        session.backward(0.5 * model.weight.square().sum(), count=0)
        assert session.reduce(optimizer)
        torch.testing.assert_close(model.weight.grad, twin.weight.grad)
        session.step(optimizer)
        torch.testing.assert_close(model.weight, twin.weight - 0.1 * twin.weight.grad)  # type: ignore[operator]
    assert RunDir.open(session.folder).epochs()[0]["train_loss"] == pytest.approx(losses / 33, rel=1e-5)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


class Targets:
    """Targets of many kinds for outputs of shape [rows, 3], from inputs of shape [rows, 4]."""

    def __init__(self, x: Tensor) -> None:
        self.labels = (x[:, 0] > 0).long() + (x[:, 1] > 0)
        self.some = self.labels.where(x[:, 2] > -0.3, -100)
        self.numbers = x[:, :3]
        self.shares = x[:, :3].softmax(1)
        self.weights = x[:, 1:].abs()
        self.signs = x[:, :3].sign()
        self.sign = x[:, 0].sign()


def pixels(o: Tensor, y: Targets) -> tuple[Tensor, Tensor]:
    return o[:, :, None].expand(-1, -1, 2), torch.stack([y.labels, y.some], 1)


def of_each(o: Tensor, y: Targets) -> Tensor:
    return F.cross_entropy(o, y.labels, reduction="none")


def ctc(o: Tensor, y: Targets) -> Tensor:
    lengths = torch.full_like(y.labels, 7)
    return F.ctc_loss(o[None].expand(7, -1, -1).log_softmax(2), y.labels[:, None] % 2 + 1, lengths, 0 * lengths + 1)


#: Means of torch, and the numbers that docs/own-loop.md has for them.
NUMBERS: list[tuple[Callable[[Tensor, Targets], Tensor], Callable[[Targets], Any]]] = [
    (lambda o, y: F.cross_entropy(o, y.some), lambda y: (y.some != -100).sum()),
    (lambda o, y: F.cross_entropy(*pixels(o, y)), lambda y: (y.some != -100).sum() + len(y.labels)),
    (lambda o, y: F.nll_loss(o.log_softmax(1), y.some), lambda y: (y.some != -100).sum()),
    (
        lambda o, y: F.cross_entropy(o, y.some, weight=CLASS_WEIGHTS, label_smoothing=0.1),
        lambda y: CLASS_WEIGHTS[y.some[y.some != -100]].sum(),
    ),
    (lambda o, y: F.cross_entropy(o, y.shares, weight=CLASS_WEIGHTS), lambda y: len(y.shares)),
    *(
        (loss, lambda y: y.numbers.numel())
        for loss in (
            lambda o, y: F.mse_loss(o, y.numbers),
            lambda o, y: F.l1_loss(o, y.numbers),
            lambda o, y: F.smooth_l1_loss(o, y.numbers),
            lambda o, y: F.huber_loss(o, y.numbers),
            lambda o, y: F.binary_cross_entropy(o.sigmoid(), y.shares, weight=y.weights),
            lambda o, y: F.binary_cross_entropy_with_logits(o, y.shares, pos_weight=CLASS_WEIGHTS),
            lambda o, y: F.poisson_nll_loss(o, y.weights),
            lambda o, y: F.gaussian_nll_loss(o, y.numbers, y.weights),
            lambda o, y: F.hinge_embedding_loss(o, y.signs),
            lambda o, y: F.soft_margin_loss(o, y.signs),
            lambda o, y: F.kl_div(o.log_softmax(1), y.shares, reduction="none").mean(),
        )
    ),
    (lambda o, y: F.mse_loss(o, y.numbers), lambda y: len(y.labels)),
    (lambda o, y: F.mse_loss(o, y.numbers, weight=y.weights), lambda y: y.weights.sum()),
    (lambda o, y: F.l1_loss(o, y.numbers, weight=y.weights), lambda y: y.weights.sum()),
    *(
        (loss, lambda y: len(y.labels))
        for loss in (
            lambda o, y: F.kl_div(o.log_softmax(1), y.shares, reduction="batchmean"),
            ctc,
            lambda o, y: F.multi_margin_loss(o, y.labels, weight=CLASS_WEIGHTS),
            lambda o, y: F.multilabel_margin_loss(o, F.pad(y.labels[:, None], (0, 2), value=-1)),
            lambda o, y: F.multilabel_soft_margin_loss(o, (y.signs > 0).float()),
            lambda o, y: F.cosine_embedding_loss(o, y.numbers, y.sign),
            lambda o, y: F.margin_ranking_loss(o[:, 0], o[:, 1], y.sign),
            lambda o, y: F.triplet_margin_loss(o, y.numbers, y.weights),
        )
    ),
    (lambda o, y: (of_each(o, y) * (y.labels == 1)).sum() / (y.labels == 1).sum(), lambda y: (y.labels == 1).sum()),
]


def test_means_of_torch_with_their_numbers_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    inputs = data()
    with lockstep.Session(QUIET, global_batch_size=33, seed=0, save_dir=tmp_path / "run") as session:
        model = nn.Linear(4, 3)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in session.epochs(len(NUMBERS)):
            loss, items = NUMBERS[number]
            twin = copy.deepcopy(model)
            loss(twin(inputs.tensors[0]), Targets(inputs.tensors[0])).backward()
            for x, _ in session.batches(inputs, accumulate=5):
                targets = Targets(x)
                session.backward(loss(model(x), targets), weight=items(targets))
                if session.reduce(optimizer):
                    torch.testing.assert_close(model.weight.grad, twin.weight.grad, msg=lambda m, n=number: f"{n}: {m}")
                    session.step(optimizer)


def test_sharpness_aware_steps_are_those_of_any_accumulation(tmp_path: Path) -> None:
    weights = []
    for accumulate in (1, 3):
        with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / str(accumulate)) as session:
            model, optimizer = prepared(session)
            for x, y in batches(session, accumulate=accumulate):
                session.backward(squares(model, x, y), count=len(y))
                if session.reduce(optimizer):
                    before = [p.detach().clone() for p in model.parameters()]
                    with torch.no_grad():
                        for p in model.parameters():
                            assert p.grad is not None
                            p += 0.05 * p.grad / p.grad.norm()
                    optimizer.zero_grad()
                    for again_x, again_y in session.again():
                        session.backward(squares(model, again_x, again_y), count=len(again_y))
                    with torch.no_grad():
                        for p, value in zip(model.parameters(), before, strict=True):
                            p.copy_(value)
                    assert session.step(optimizer)
            assert session.step_count == 5
            weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_between_backward_calls_do_not_count(session: lockstep.Session, to_none: bool) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        twin = nn.Linear(4, 1)
        twin.load_state_dict(model.state_dict())
        (squares(twin, x, y) / len(y)).backward()
        for clears in (optimizer, model):
            session.backward(3 * squares(model, x, y), count=len(y))
            clears.zero_grad(set_to_none=to_none)
        session.backward(3 * squares(model, x, y), count=len(y))
        session.reduce(optimizer)
        model.zero_grad(set_to_none=to_none)
        session.backward(squares(model, x, y), count=len(y))
        session.step(optimizer)
        torch.testing.assert_close(model.weight, twin.weight - 0.1 * twin.weight.grad)  # type: ignore[operator]


def test_a_loop_left_after_a_step_counts_it(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    seen = []
    for _ in session.epochs(2):
        for number, (x, y) in enumerate(session.batches(data())):
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
            seen.append(len(y))
            if number == 1:
                break
    assert seen == [8] * 4
    assert session.step_count == 4
    assert [row["step"] for row in RunDir.open(session.folder).epochs()] == [2, 4]


class Centre(nn.Module):
    """A criterion with a state, as a centre loss has."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))

    def forward(self, found: Tensor) -> Tensor:
        self.centre.lerp_(found.detach().mean(0), 0.1)
        return (found - self.centre).square().sum()


@pytest.mark.parametrize("kept", ["", "prepared", "registered"])
def test_what_no_checkpoint_keeps_and_that_none_is_the_best_is_said(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lockstep.Session(global_batch_size=8, seed=0, save_dir=tmp_path / "run") as session:
        model, optimizer = prepared(session)
        criterion, frozen, metric = Centre(), nn.BatchNorm1d(1), nn.Linear(1, 1)
        if kept == "prepared":
            session.prepare(criterion)
        elif kept == "registered":
            session.checkpoint(criterion=criterion)
        for _ in session.epochs(2):
            for x, _ in session.batches(data()):
                session.backward(criterion(model(x)) + 0 * metric(model(x)).sum() + 0 * len(frozen.weight), len(x))
                session.step(optimizer)
            session.log(accuracy=1.0)
    said = "".join(capsys.readouterr())
    assert said.count("criterion (Centre) ") == (not kept)
    assert said.count("is in no checkpoint") == (not kept), "and nothing else is named"
    assert said.count("they report val_accuracy") == 1
    assert "are not saved with the run" not in said, "a loop has no task with arguments"


@pytest.mark.parametrize("how", ["break", "patience"])
def test_a_loop_that_stops_early(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = QUIET | {"training.early_stopping_patience": 2 * (how == "patience")}
    bodies = []
    for resume in (False, True):
        ends = pytest.raises(SystemExit, match="0") if resume and how == "patience" else contextlib.nullcontext()
        with (
            ends,
            lockstep.Session(
                settings, resume=resume, global_batch_size=8, seed=0, save_dir=tmp_path / "run"
            ) as session,
        ):
            model, optimizer = prepared(session)
            for epoch in session.epochs(5):
                for x, y in session.batches(data(16)):
                    session.backward(squares(model, x, y), len(y))
                    session.step(optimizer)
                bodies.append(epoch)
                session.log(loss=1.0 + (epoch > 0))
                if how == "break" and epoch in (2, 3):
                    break
            session.log(accuracy=1.0)  # after the training: of a test
            epochs = [row["val_loss"] for row in RunDir.open(session.folder).epochs()]
    assert bodies == ([0, 1, 2, 3] if how == "break" else [0, 1, 2])
    assert epochs == [1.0, 2.0, 2.0]  # the row of an epoch that is left by a break is written at the end
    rows = RunDir.open(tmp_path / "run").epochs()
    assert [row["val_loss"] for row in rows] == [1.0] + [2.0] * (len(bodies) - 1)
    record = RunDir.open(tmp_path / "run").read()
    assert (record.status, record.best_epoch) == ("completed", 1)
    beat = RunDir.open(tmp_path / "run").progress()
    assert beat is not None and beat.step == 2 * len(bodies)
    assert beat.total == (beat.step if how == "break" else 10)
    assert ("Nothing is left to train: the run has stopped early" in capsys.readouterr().out) == (how == "patience")


def test_a_run_that_max_steps_ends_within_an_epoch_resumes_there(tmp_path: Path) -> None:
    seen: list[float] = []
    for steps in (2, 8):
        settings = QUIET | {"training.max_steps": steps}
        with lockstep.Session(settings, resume=True, global_batch_size=8, seed=0, save_dir=tmp_path / "run") as session:
            model, optimizer = prepared(session)
            for _ in session.epochs(2):
                for x, y in session.batches(data()):
                    seen += y.tolist()
                    session.backward(squares(model, x, y), len(y))
                    session.step(optimizer)
                session.log(loss=10.0 / steps)
        record = RunDir.open(tmp_path / "run").read()
        assert record.best_epoch == (None if steps == 2 else 1), "only whole epochs are judged"
        assert record.final_metrics["val_loss"] == {2: 5.0, 8: 1.25}[steps]
    assert sorted(seen[:33]) == sorted(data().tensors[1].tolist())
    assert len(seen) == 33 + 3 * 8


def averaging(name: str, folder: str, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Outputs of the evaluations, with torch's own averages and with the model; the weights at the end."""
    how = {"averaging.warmup": False, "averaging.decay": 0.8} if name == "ema" else {"averaging.start_share": 0.4}
    given = QUIET | {"averaging.name": name} | how
    options: dict[str, Any] = {"resume": True, "global_batch_size": 8, "seed": 0, "save_dir": folder}
    found = []
    with lockstep.Session(given | {"training.max_steps": steps}, **options) as session:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        multi_avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8) if name == "ema" else None
        own = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=True).eval()
        if name == "ema":
            own.n_averaged += 1  # as of the first weights
        session.checkpoint(own=own)
        for _ in session.epochs(4):
            for x, y in session.batches(data(36)):
                session.backward(squares(model, x, y), len(y))
                session.step(optimizer)
                if name == "ema" or session.step_count >= 0.4 * 20:
                    own.update_parameters(model)
            before = [value.clone() for value in model.state_dict().values()]
            rows = list(session.evaluate(data(), lambda batch: (own(batch[0]), model(batch[0]))))
            assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
            found.append([torch.cat(column) for column in zip(*rows, strict=True)])
            session.log(loss=float(found[-1][1].mean()))
        return found, [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_averaged_weights_are_evaluated_saved_and_resumed(name: str, tmp_path: Path) -> None:
    evaluated, weights = averaging(name, str(tmp_path / "whole"), 20)
    for own, averaged in evaluated[2:]:
        torch.testing.assert_close(averaged, own)
        assert averaged.std() > 0
    store = CheckpointStore(RunDir(tmp_path / "whole").checkpoints)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    saved = store.load(store.step_of("last") or 0).model
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    torch.testing.assert_close(model(data().tensors[0]), evaluated[-1][1])
    if name == "swa":  # begins at a share of the steps, which are others until the run is resumed
        return
    averaging(name, str(tmp_path / "parts"), 12)
    again, resumed = averaging(name, str(tmp_path / "parts"), 20)
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))
    assert torch.equal(again[-1][1], evaluated[-1][1])


def test_activations_are_computed_again_for_the_same_weights(tmp_path: Path) -> None:
    weights, calls = [], []

    class Block(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            calls.append(self.training)
            return super().forward(values).tanh()

    for recompute in (False, True):
        given = QUIET | {"training.activation_checkpointing": recompute}
        with lockstep.Session(given, global_batch_size=8, seed=0, save_dir=tmp_path / str(recompute)) as session:
            model = nn.Sequential(nn.Sequential(*(nn.ModuleList(Block(4, 4) for _ in range(2)))), nn.Linear(4, 1))
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in batches(session):
                session.backward(squares(model, x, y), len(y))
                session.step(optimizer)
            weights.append(model[1].weight.detach().clone())
    assert torch.equal(*weights)
    assert len(calls) == 5 * 2 * (1 + 2)


def test_a_resume_into_which_the_checkpoint_does_not_fit_has_failed(tmp_path: Path) -> None:
    def train(steps: int, outputs: int) -> None:
        given = QUIET | {"training.max_steps": steps}
        with lockstep.Session(given, resume=True, global_batch_size=8, save_dir=tmp_path / "run") as session:
            model = nn.Linear(4, outputs)
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, _ in batches(session):
                session.backward(model(x).square().sum(), len(x))
                session.step(optimizer)

    train(1, outputs=1)
    run = RunDir(tmp_path / "run")
    run.update(status="running")  # as one that was killed
    with pytest.raises(LockstepError):
        train(2, outputs=3)
    assert run.read().status == "failed"


def test_a_body_that_fails_after_its_step_is_repeated_whole(tmp_path: Path) -> None:
    settings = QUIET | {"checkpoint.every_steps": 1}

    def train(*, fails: bool) -> int:
        with lockstep.Session(settings, resume=True, global_batch_size=8, save_dir=tmp_path / "run") as session:
            model, optimizer = prepared(session)
            average = torch.optim.swa_utils.AveragedModel(model)
            session.checkpoint(average=average)
            for x, y in batches(session):
                session.backward(squares(model, x, y), len(y))
                session.step(optimizer)
                if fails and session.step_count == 2:
                    raise ValueError("between the step and its average")
                average.update_parameters(model)
        return int(average.n_averaged)

    with pytest.raises(ValueError, match="between"):
        train(fails=True)
    assert train(fails=False) == 5


@pytest.mark.parametrize("number", [33, 60])
def test_weighted_samples_are_drawn_alike_on_any_ranks_and_after_a_resume(number: int, tmp_path: Path) -> None:
    rows = torch.arange(33.0)[:, None].expand(33, 4)
    train, other = TensorDataset(rows, rows.sum(1)), data(16)

    def drawn(folder: str, **how: Any) -> list[list[float]]:
        found: list[list[float]] = []
        with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / folder, **how) as session:
            sampler = torch.utils.data.WeightedRandomSampler([0.0] * 10 + [1.0] * 22 + [50.0], number)
            model, optimizer = prepared(session)
            for _ in session.epochs(2):
                found.append([])
                for again in (sampler, None):
                    for x, y in session.batches(train if again else other, weights=again):
                        found[-1] += session.gather(x[:, :1]).flatten().tolist() if again else []
                        session.backward(0 * squares(model, x, y), len(y))
                        session.step(optimizer)
        return found

    alone = drawn("alone")
    assert [len(epoch) for epoch in alone] == [number, number]
    assert alone[0] != alone[1]
    assert min(alone[0]) >= 10
    assert alone[0].count(32.0) > number / 3
    first = drawn("resumed", max_steps=3)
    rest = drawn("resumed", resume=True)
    assert [first[0] + rest[0], *rest[1:]] == alone


def test_settings_that_a_loop_has_no_use_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)training\.compile = True .*fix: "):
        lockstep.Session(QUIET | {"training.compile": True}, save_dir=tmp_path / "refused")
    given = QUIET | {"scheduler.name": "cosine", "validation.every_epochs": 2, "training.on_oom": "retry"}
    with lockstep.Session(given, lr=0.5, global_batch_size=8, save_dir=tmp_path / "run") as session:
        model, optimizer = prepared(session)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)
        for x, y in batches(session):
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
    said = capsys.readouterr().err
    assert said.count("optimizer.lr, scheduler.name, training.on_oom, validation.every_epochs ") == 1
    assert RunDir(tmp_path / "run").plan()["decisions"]["lr"]["value"] == 0.1, "its own, after the warm-up"


def test_a_frame_is_the_same_rows_in_every_epoch(tmp_path: Path) -> None:
    import pandas

    frame, seen = pandas.DataFrame({"x": [0.5] * 9, "y": range(9)}, index=[5] * 9), list[float]()
    with lockstep.Session(QUIET, global_batch_size=3, save_dir=tmp_path / "run") as session:
        model, optimizer = prepared(session)
        for _ in session.epochs(2):
            for batch in session.batches(frame):
                seen += batch["y"].tolist()
                session.backward(model(batch["x"][:, None].float().expand(-1, 4)).square().sum(), len(batch["x"]))
                session.step(optimizer)
    assert sorted(seen) == sorted([*range(9)] * 2)


def test_bf16_true_casts_the_prepared_model(tmp_path: Path) -> None:
    with lockstep.Session(QUIET, precision="bf16-true", global_batch_size=8, save_dir=tmp_path / "run") as session:
        model, optimizer = prepared(session)
        before = model.weight.detach().clone()
        for x, y in batches(session):
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
    assert model.weight.dtype == torch.bfloat16
    assert not torch.equal(model.weight, before)


def test_rows_follow_the_loop(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(1):
        for accumulate in (1, 2):
            for x, y in session.batches(data(16), accumulate=accumulate):
                assert session.rows == slice(0, len(y))
                session.backward(squares(model, x, y), len(y))
                session.step(optimizer)


class Cached(nn.Linear):
    """Has a table that the first call makes."""

    table: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0).cos().type_as(values)
        return super().forward(values * self.table)


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}], ids=["whole", "parts"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_what_the_body_may_keep_between_batches(
    how: dict[str, int], is_kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, sums for a message, averages after the step and clipped weights; a state if the step has one part."""

    class State:
        value = torch.zeros(1)

        def state_dict(self) -> dict[str, Tensor]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Tensor]) -> None:
            self.value = state["value"]

    with lockstep.Session({"telemetry.system_metrics": False}, global_batch_size=8, save_dir=tmp_path) as session:
        model, state, total = Cached(4, 1), State(), torch.zeros(())
        average = torch.optim.swa_utils.AveragedModel(model)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        session.checkpoint(average=average, **({"state": state} if is_kept else {}))
        for x, y in batches(session, **how):
            loss = squares(model, x, y)
            if not how:
                loss = loss + (model(x) - state.value).square().sum()
                state.value = model(x).detach().mean(0)
            session.backward(loss, len(y))
            total += loss.detach()
            if session.step(optimizer):
                average.update_parameters(model)
            model.weight.data.clamp_(-1, 1)
            model.bias.data.add_(0.5)  # and back, as for adversarial weights
            model.bias.data.sub_(0.5)
        assert int(average.n_averaged) == session.step_count == 5
    is_missed = "float32 tensor of shape (1,) that the body keeps" in "".join(capsys.readouterr())
    assert is_missed == (not how and not is_kept)


class Pair:
    """A batch of a class of its own."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = map(torch.stack, zip(*rows, strict=True))


def state_of_batch_objects(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    state = torch.zeros(1)
    for pair in batches(session, accumulate=2, collate=Pair):
        session.backward(squares(model, pair.x, pair.y) + (model(pair.x) - state).square().sum(), len(pair.y))
        session.step(optimizer)
        state = model(pair.x).detach().mean(0)


def state_from_the_second_epoch_on(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    state = torch.zeros(1)
    for epoch in session.epochs(2):
        for x, y in session.batches(data(), accumulate=2):
            loss = squares(model, x, y)
            session.backward(loss + (model(x) - state).square().sum() if epoch else loss, len(y))
            session.step(optimizer)
            state = model(x).detach().mean(0)


def average_in_a_dict(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in batches(session, accumulate=2):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        average = {name: 0.9 * average[name] + 0.1 * value for name, value in model.state_dict().items()}


def average_that_is_loaded(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    average = copy.deepcopy(model)
    for x, y in batches(session, accumulate=2):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        values = model.state_dict()
        average.load_state_dict(
            {name: 0.9 * value + 0.1 * values[name] for name, value in average.state_dict().items()}
        )


def weights_that_decay_in_each_part(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session, accumulate=2):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        with torch.no_grad():
            model.weight.mul_(0.9)


def noise_on_weights(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session, accumulate=2):
        torch._foreach_add_([p.data for p in model.parameters()], 0.1)
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)


class Recurrent(nn.Linear):
    """Carries a state in a buffer, and counts in another one."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("state", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        output = super().forward(x) + self.state
        self.state = output.detach().mean(0)
        return output


def state_in_a_buffer(session: lockstep.Session) -> None:
    model = Recurrent()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match=r"\bstate\b") as caught:
        for x, y in batches(session, accumulate=2):
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
    assert "buffer_reduction = {'state': 'mean'}" in caught.value.fix
    raise caught.value


def rows_of_other_samples(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    table = torch.zeros(33)
    for index, (x, y) in indexed(session, accumulate=2):
        table[index] = y
        session.backward(squares(model, x, table[(index + 1) % 33]), len(y))
        session.step(optimizer)


@pytest.mark.parametrize(
    "loop",
    [
        state_of_batch_objects,
        state_from_the_second_epoch_on,
        average_in_a_dict,
        average_that_is_loaded,
        state_in_a_buffer,
        rows_of_other_samples,
        weights_that_decay_in_each_part,
        noise_on_weights,
    ],
)
def test_what_a_part_leaves_for_another_is_refused(
    loop: Callable[[lockstep.Session], None], session: lockstep.Session
) -> None:
    with pytest.raises(UnsupportedError, match="several micro-batches"):
        loop(session)


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return 33

    def __getitem__(self, index: int) -> tuple[int, tuple[Tensor, Tensor]]:
        return index, data()[index]


def indexed(session: lockstep.Session, accumulate: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    for _ in session.epochs(2):
        yield from session.batches(Indexed(), accumulate=accumulate)


class Statistics(Recurrent):
    """Keeps a mean of its inputs that the loss does not read, and one that it declares."""

    buffer_reduction: ClassVar = {"state": "local"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return F.linear(self.norm(x[:, None])[:, 0], self.weight) + 0 * super().forward(x).detach()


@pytest.mark.parametrize("model", [nn.Linear(4, 1), Statistics()], ids=["tensors", "statistics"])
def test_memory_that_is_written_by_part_is_read_by_part(model: nn.Module, tmp_path: Path) -> None:
    weights = []
    for accumulate in (1, 2):
        with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / str(accumulate)) as session:
            trained = copy.deepcopy(model)
            trained, optimizer = session.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
            rows, averages, targets = torch.zeros(8, 4), torch.zeros(33), torch.zeros(33)
            for index, (x, y) in indexed(session, accumulate):
                rows[: len(x)] = x
                averages[index] = 0.5 * averages[index] + 0.5 * y
                targets.index_copy_(0, index, averages[index])
                session.backward(squares(trained, rows[: len(x)].clone(), targets[index]), len(y))
                session.step(optimizer)
            weights.append(trained.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_functions_of_torch_func_in_a_body(tmp_path: Path) -> None:
    weights = []
    for accumulate in (1, 2):
        with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / str(accumulate)) as session:
            model, optimizer = prepared(session)
            for x, y in batches(session, accumulate=accumulate):
                slopes = torch.func.vmap(torch.func.jacrev(model))(x)
                difference = torch.func.vmap(lambda row, model=model: row.clone().mul_(2) @ model.weight[0])(x)
                session.backward(squares(model, x, y) + slopes.square().sum() + difference.square().sum(), len(y))
                session.step(optimizer)
            weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_a_loop_that_is_left_within_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"telemetry.system_metrics": False}
    for bodies in (3, 4):
        with lockstep.Session(settings, global_batch_size=8, save_dir=tmp_path / str(bodies)) as session:
            model, optimizer = prepared(session)
            for _ in session.epochs(1):
                for number, (x, y) in enumerate(session.batches(data(), accumulate=2), start=1):
                    session.backward(squares(model, x, y), len(y))
                    session.step(optimizer)
                    if number == bodies:
                        break
            assert session.step_count == bodies // 2
    said = "".join(capsys.readouterr())
    assert len(re.findall(r"micro-batch 1 of 2 .*\b2, ", said)) == 1
    assert len(re.findall(r"micro-batch \d of \d", said)) == 1


def penalty_on_a_list(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    parameters = list(model.parameters())
    for x, y in batches(session):
        session.backward(squares(model, x, y) + sum(p.square().sum() for p in parameters), len(y))
        session.step(optimizer)


def gradient_penalty(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        slopes = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        session.backward(squares(model, x, y) + slopes[0].square().sum(), len(y))
        session.step(optimizer)


@pytest.mark.parametrize("loop", [pytest.param(penalty_on_a_list, marks=pytest.mark.slow), gradient_penalty])
def test_what_needs_whole_parameters_is_refused_under_fsdp(
    loop: Callable[[lockstep.Session], None], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="fsdp"):
        lockstep.Session.launch(in_a_session, loop, devices="cpu,cpu", strategy="fsdp", save_dir=tmp_path / "run")


def two_passes(reproducibility: str, norm: type[nn.Module], **how: Any) -> list[list[float]]:
    """SAM for one optimizer, then a second one whose loss reads the new weights."""
    settings = QUIET | {"training.reproducibility": reproducibility}
    with lockstep.Session(settings, global_batch_size=16, seed=0) as session:
        torch.manual_seed(1)
        one, two = nn.Sequential(nn.Linear(4, 4), norm(4)), nn.Linear(4, 1)
        first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
        session.prepare(one, two, first, second)
        for x, y in batches(session, **how):
            session.backward(squares(two, one(x), y), len(y), models=[one])
            if session.reduce(first):
                before = [p.detach().clone() for p in one.parameters()]
                with torch.no_grad():
                    for p in one.parameters():
                        assert p.grad is not None
                        p += 0.05 * p.grad
                first.zero_grad()
                for x, y in session.again():
                    session.backward(squares(two, one(x), y), len(y), models=[one])
                with torch.no_grad():
                    for p, value in zip(one.parameters(), before, strict=True):
                        p.copy_(value)
                session.step(first)
                for x, y in session.again():
                    session.backward(squares(two, one(x).detach(), y), len(y))
                session.step(second)
        return [value.flatten().tolist() for module in (one, two) for value in module.state_dict().values()]


@pytest.mark.slow
def test_second_passes_are_exact_on_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exact = two_passes("exact", nn.BatchNorm1d)
    place: dict[str, Any] = {"devices": "cpu,cpu", "save_dir": tmp_path / "two"}
    assert lockstep.Session.launch(two_passes, "exact", nn.BatchNorm1d, **place) == exact
    whole = two_passes("fast", nn.LayerNorm)
    for other in (two_passes("exact", nn.LayerNorm), two_passes("fast", nn.LayerNorm, accumulate=3)):
        assert other == [pytest.approx(value, abs=1e-5) for value in whole]


def used_in_both_passes(reproducibility: str) -> int:
    """The second optimizer's step has gradients of both passes."""
    with lockstep.Session(QUIET | {"training.reproducibility": reproducibility}, global_batch_size=16) as session:
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
        session.prepare(one=one, two=two, first=first, second=second)
        for x, y in batches(session):
            session.backward(squares(two, one(x), y), len(y))
            if session.step(first):
                for again_x, again_y in session.again():
                    session.backward(squares(two, one(again_x).detach(), again_y), len(again_y))
                session.step(second)
        return session.step_count


def test_a_sum_of_two_passes_is_refused_where_lanes_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match="second"):
        used_in_both_passes("exact")
    assert used_in_both_passes("fast") == 3


def test_parts_of_a_loss_for_some_models(session: lockstep.Session) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    session.prepare(one=one, two=two, first=first, second=second)
    for x, y in batches(session):
        loss = F.mse_loss(two(one(x)).squeeze(1), y, reduction="sum")
        session.backward(loss, len(y), models=[one], retain_graph=True)
        assert two.weight.grad is None
        session.step(first)
        session.backward(two(one(x).detach()).square().sum(), len(y))
        session.step(second)
    assert session.step_count == 5


def without_backward(session: lockstep.Session) -> None:
    _, optimizer = prepared(session)
    for _ in batches(session):
        session.step(optimizer)


def foreign_parameters(session: lockstep.Session) -> None:
    session.prepare(nn.Linear(4, 1), torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1))
    next(batches(session))


def unprepared_optimizer(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        session.step(torch.optim.SGD(model.parameters(), lr=0.1))


def mean_with_count_1(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for x, y in batches(session):
        session.backward(F.mse_loss(model(x).squeeze(1), y), count=1)


def mean_with_its_count(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for x, y in batches(session):
        session.backward(F.mse_loss(model(x).squeeze(1), y), count=len(y))


def mean_with_weight_0(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for x, y in batches(session):
        session.backward(F.mse_loss(model(x).squeeze(1), y), weight=len(y))
        session.backward(0 * model(x).mean(), weight=0)  # nothing to weigh
        session.backward(model(x).abs().mean(), weight=0)


def left_over_gradients(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))


def cleared_gradients(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        optimizer.zero_grad()
        session.step(optimizer)


def cleared_in_the_middle_of_a_step(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session, accumulate=2):
        optimizer.zero_grad()
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)


def gradients_after_reduce(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        session.reduce(optimizer)
        session.backward(squares(model, x, y), len(y))


def own_step(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        optimizer.step()


def reduce_of_another(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    for _ in batches(session):
        session.reduce(torch.optim.SGD(model.parameters(), lr=0.1))


def name_with_a_dot(session: lockstep.Session) -> None:
    session.prepare(**{"net.body": nn.Linear(4, 1)})


class Numbers(IterableDataset[Tensor]):
    """0, 1, 2, …, 19, with a cursor."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 20:
            self.at += 1
            yield torch.tensor([self.at - 1.0])
        self.at = 0

    def __len__(self) -> int:
        return 20

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def two_streams(session: lockstep.Session) -> None:
    prepared(session)
    for _ in session.epochs(1):
        for _ in range(2):
            session.batches(Numbers())


def a_loader(session: lockstep.Session) -> None:
    session.prepare(DataLoader(data()))


def batches_of_a_loader(session: lockstep.Session) -> None:
    prepared(session)
    for _ in session.epochs(1):
        session.batches(DataLoader(data()))


def other_weights(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(2):
        for x, y in session.batches(train := data(16), weights=[1.0] * 16):
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
        for _ in session.batches(train):
            pass


def made_of_an_object(session: lockstep.Session) -> None:
    prepared(session)
    for _ in session.epochs(1):
        session.once(lambda: {"x": object()})


def outside_epochs(session: lockstep.Session) -> None:
    prepared(session)
    session.batches(data())


def new_parameters(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def scheduler_stepped_twice(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    scheduler = session.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        scheduler.step()


def scaled(session: lockstep.Session) -> None:
    model, _ = prepared(session)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches(session):
        session.backward(scaler.scale(squares(model, x, y)), len(y))


def stepped_weights(session: lockstep.Session) -> None:
    """The order of a GAN: the second loss reads weights that the first step changes."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    session.prepare(one, two, first, second)
    for number, (x, y) in enumerate(batches(session, accumulate=2)):
        session.backward(squares(two, one(x), y), len(y), models=[one])
        session.step(first)
        if number > 5:  # in a later step
            with torch.no_grad():
                features = one(x)
            session.backward(squares(two, features, y), len(y))
            session.step(second)


def carried_state(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    state = torch.zeros(1)
    for x, y in batches(session, accumulate=2):
        output = model(x) + state[: len(x)]
        state = output.detach().mean(0)
        session.backward((output.squeeze(1) - y).square().sum(), len(y))
        session.step(optimizer)


def average_of_each_micro_batch(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    average = copy.deepcopy(model)
    for x, y in batches(session, accumulate=2):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.copy_(0.9 * mean.data + 0.1 * parameter.data)


def scaled_gradients(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        if session.step_count:
            session.reduce(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        session.step(optimizer)


def closure(session: lockstep.Session) -> None:
    session.prepare(torch.optim.LBFGS(nn.Linear(4, 1).parameters()))


class Warmed:
    """An optimizer in a class that sets its rate, as of many a Transformer's repository."""

    def __init__(self) -> None:
        self.inner = torch.optim.Adam(nn.Linear(4, 1).parameters())


def an_optimizer_in_another_object(session: lockstep.Session) -> None:
    session.prepare(Warmed())


@pytest.mark.parametrize(
    ("loop", "kind", "words"),
    [
        (scaled, TaskError, "GradScaler"),
        (scaled_gradients, TaskError, "changed between backward"),
        (closure, UnsupportedError, "LBFGS"),
        (stepped_weights, UnsupportedError, r"\bweights .*step\(optimizer\)"),
        (carried_state, UnsupportedError, r"\bfloat32 .*\(1,\) "),
        (average_of_each_micro_batch, UnsupportedError, "average"),
        (an_optimizer_in_another_object, TaskError, r"(?s)\bWarmed\b.*\.inner, .*session\.step"),
        (without_backward, TaskError, "without a backward"),
        (foreign_parameters, TaskError, "no prepared model"),
        (unprepared_optimizer, TaskError, "was not prepared"),
        (mean_with_count_1, TaskError, r"\bmean .*\b8 samples, .*\b1\b"),
        (mean_with_its_count, TaskError, "the loss is a mean"),
        (mean_with_weight_0, TaskError, "weight=0"),
        (left_over_gradients, TaskError, "left from an earlier batch"),
        (cleared_gradients, TaskError, "without a backward"),
        (cleared_in_the_middle_of_a_step, TaskError, "cleared in the middle of a step"),
        (gradients_after_reduce, TaskError, r"reduce\(optimizer\)"),
        (own_step, TaskError, r"optimizer\.step\(\) "),
        (reduce_of_another, TaskError, r"^reduce\(\) .*\bSGD"),
        (name_with_a_dot, TaskError, r"'net\.body'"),
        (two_streams, UnsupportedError, "iterable"),
        (a_loader, TaskError, "DataLoader"),
        (batches_of_a_loader, TaskError, "DataLoader"),
        (other_weights, UnsupportedError, "other weights than in the first loop"),
        (outside_epochs, TaskError, "session.epochs"),
        (made_of_an_object, CheckpointError, "session.once.*'x'"),
        (lambda session: session.log(name="best"), TaskError, r"session\.log\(name=…\) .*\bstr\b"),
        (lambda session: session.log(weights=torch.ones(3)), TaskError, r"\bTensor .*\(3,\)"),
        (new_parameters, UnsupportedError, "changed after prepare"),
        (scheduler_stepped_twice, TaskError, "stepped"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_goes_wrong_is_one_error(
    loop: Callable[[lockstep.Session], None], kind: type[LockstepError], words: str, session: lockstep.Session
) -> None:
    with pytest.raises(kind, match=words) as caught:
        loop(session)
    assert caught.value.fix
    session.close(caught.value)


@pytest.mark.parametrize("kept", ["prepared", "registered", "not at all"])
def test_a_scheduler_is_shown_in_the_plan_or_missed(
    kept: str, session: lockstep.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    _, optimizer = prepared(session)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    if kept == "prepared":
        session.prepare(scheduler)
    elif kept == "registered":
        session.checkpoint(scheduler=scheduler)
    next(batches(session))
    reason = RunDir.open(session.folder).plan()["decisions"]["schedule"]["reason"]
    assert ("StepLR" in reason) == (kept == "prepared")
    assert ("scheduler of optimizer " in capsys.readouterr().err) == (kept == "not at all")


def test_an_evaluation_takes_a_micro_batch_of_one_device_at_once(session: lockstep.Session) -> None:
    prepared(session)
    assert [len(rows) for (rows,) in session.evaluate(data(20), lambda batch: batch[0])] == [8, 8, 4]
    next(batches(session, accumulate=2))
    assert [len(rows) for (rows,) in session.evaluate(data(9), lambda batch: batch[0])] == [4, 4, 1]


def test_many_ranks_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\b2 devices.*\b1 process") as caught:
        lockstep.Session(devices="cpu,cpu", runs_dir=tmp_path)
    assert "lockstep run" in caught.value.fix
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_SIZE\b.*\b4\b"):
        lockstep.Session(runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_of_the_launcher_are_refused_in_a_script_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"launch": {"stop_grace_s": 5.0}}
    rank = Started(Rank(RunDir(tmp_path), World(), StopRequest()), given, resumes=False)
    assert with_settings_of_launch({"launch": {"hang_timeout_s": 9}}) == {"launch": {"hang_timeout_s": 9}}
    monkeypatch.setattr("lockstep.api.session_join.started", [rank])
    script = {"launch": {"stop_grace_s": 9.0, "hang_timeout_s": 60}}
    assert with_settings_of_launch(script)["launch"] == {"stop_grace_s": 5.0, "hang_timeout_s": 60}
    with pytest.raises(ConfigError, match=r"launch\.hang_timeout_s = 9\b") as caught:
        lockstep.Session({"launch.hang_timeout_s": 9})
    assert "lockstep run script.py --set launch.hang_timeout_s=9" in caught.value.fix


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, also where ranks have parts of it."""
    found: Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return found


def on_ranks(bucket_cap_mb: float | None = None) -> dict[str, Any]:
    """A contrastive loss over 33 samples in batches of 8: the last one has one sample, and a rank has none."""
    found: dict[str, Any] = {}
    settings = QUIET | {"distributed.bucket_cap_mb": bucket_cap_mb}
    with lockstep.Session(settings, global_batch_size=8, seed=0) as session:
        model, extra = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), nn.Linear(2, 2)
        optimizer = torch.optim.Adam([*model.parameters(), *extra.parameters()], lr=0.01, weight_decay=0.1)
        session.prepare(model, extra, nn.ReLU(), optimizer)  # a model may have no parameters
        before = extra.weight.detach().clone()
        for x, y in batches(session):
            z, everyone = model(x), session.gather(model(x))
            logits = z @ everyone.T
            targets = torch.arange(len(everyone))[session.rows]
            loss = F.cross_entropy(logits, targets, reduction="sum") if len(targets) else logits.sum()
            session.backward(loss + 0 * y.sum(), count=len(targets))
            session.step(optimizer)
        found["weights"] = [whole(p).tolist() for p in model.parameters()]
        found["untouched"] = torch.equal(whole(extra.weight), before)
        found["rows"] = [row for (row,) in session.evaluate(data(10), lambda batch: batch[1], batch_size=3)]
        found["gathered"] = [session.gather(torch.full((session.rank + n, 2), n)).tolist() for n in (1, 1, 3, 0)]
        found["sum"] = session.all_reduce(1.0), session.all_reduce(torch.tensor([2.0]), "max").item()
        found["broadcast"] = session.broadcast(f"from {session.rank}")
        with session.main_first():
            found["size"] = session.size
    return found


@pytest.mark.slow
def test_gather_ghosts_and_evaluation_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = on_ranks()
    two = lockstep.Session.launch(on_ranks, devices="cpu,cpu", save_dir=tmp_path / "two")
    buckets = lockstep.Session.launch(on_ranks, 1e-4, devices="cpu,cpu", save_dir=tmp_path / "buckets")
    sharded = lockstep.Session.launch(on_ranks, devices="cpu,cpu", strategy="fsdp", save_dir=tmp_path / "sharded")
    for one, *others in zip(*(found["weights"] for found in (alone, two, buckets, sharded)), strict=True):
        for other in others:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)
    assert buckets["untouched"]
    assert sharded["untouched"]
    assert alone["untouched"]
    assert two["untouched"], "no rank has a gradient for it, so it is not decayed"
    assert torch.equal(torch.cat(alone["rows"]), torch.cat(two["rows"]))
    assert torch.equal(torch.cat(two["rows"]), data(10).tensors[1])
    assert two["gathered"] == [[[n, n]] * (2 * n + 1) for n in (1, 1, 3, 0)]
    assert (two["sum"], two["broadcast"], two["size"]) == ((2.0, 2.0), "from 0", 2)


def with_prepared_average(session: lockstep.Session) -> list[float]:
    model = nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, average, optimizer = session.prepare(model, average, optimizer)
    for x, y in batches(session):
        session.backward(squares(model, x, y), count=len(y))
        session.step(optimizer)
        average.update_parameters(model)
    assert int(average.n_averaged) == 5
    return average.module.weight.flatten().tolist()  # type: ignore[union-attr,operator]


@pytest.mark.slow
def test_an_average_of_weights_may_be_prepared(tmp_path: Path) -> None:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0, save_dir=tmp_path / "one") as session:
        alone = with_prepared_average(session)
    two = lockstep.Session.launch(average_of_ranks, devices="cpu,cpu", save_dir=tmp_path / "two")
    assert two == pytest.approx(alone)


def average_of_ranks() -> list[float]:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0) as session:
        return with_prepared_average(session)


def freezing() -> list[float]:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0) as session:
        model, optimizer = prepared(session)
        for x, y in batches(session):
            model.bias.requires_grad_(session.step_count % 2 == 0)
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)
        return [float(value) for p in model.parameters() for value in p.detach().flatten()]


@pytest.mark.slow
def test_a_body_may_freeze_parameters_on_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = freezing()
    assert lockstep.Session.launch(freezing, devices="cpu,cpu", save_dir=tmp_path / "two") == pytest.approx(alone)


def freezing_on_one_rank() -> None:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0) as session:
        model, optimizer = prepared(session)
        for x, y in batches(session):
            model.bias.requires_grad_(session.rank == 0 or session.step_count < 2)
            session.backward(squares(model, x, y), len(y))
            session.step(optimizer)


@pytest.mark.slow
def test_parameters_frozen_on_one_rank_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="1 of 2 ranks"):
        lockstep.Session.launch(freezing_on_one_rank, devices="cpu,cpu", save_dir=tmp_path / "two")


def routed() -> list[float]:
    """A rare expert, which most ranks' shares of a batch do not reach; its gradient is a mean over the whole batch."""
    with lockstep.Session(QUIET, global_batch_size=8, seed=0) as session:
        torch.manual_seed(1)
        common, rare = nn.Linear(4, 1), nn.Linear(4, 1)
        first, second = torch.optim.SGD(common.parameters(), lr=0.1), torch.optim.SGD(rare.parameters(), lr=0.1)
        session.prepare(common=common, rare=rare, first=first, second=second)
        for x, y in batches(session):
            total = squares(common, x, y)
            is_rare = x[:, 0] > 0.9
            if is_rare.any():
                total = total + squares(rare, x[is_rare], y[is_rare])
            session.backward(total, len(y))
            session.step(first)
            session.step(second)
        return [float(value) for p in (*common.parameters(), *rare.parameters()) for value in p.detach().flatten()]


@pytest.mark.slow
def test_a_model_that_few_ranks_reach_gets_the_gradient_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for devices in ("cpu,cpu", "cpu,cpu,cpu"):
        place: dict[str, Any] = {"devices": devices, "save_dir": tmp_path / devices}
        assert lockstep.Session.launch(routed, **place) == pytest.approx(routed(), abs=1e-6)


def with_second_order() -> list[float]:
    with lockstep.Session(QUIET, global_batch_size=8, seed=0) as session:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        session.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in batches(session):
            session.backward(squares(model, x, y), len(y), create_graph=True)
            assert all(p.grad is not None and p.grad.requires_grad for p in model.parameters())
            slopes = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
            session.backward(slopes[0].square().sum(), count=0)
            session.step(optimizer)
        return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")  # torch says once a process that this makes a cycle
def test_second_order_gradients_are_those_of_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_two = lockstep.Session.launch(with_second_order, devices="cpu,cpu", save_dir=tmp_path / "two")
    assert on_two == pytest.approx(with_second_order(), abs=1e-6)


def streamed(epochs: int, stop: int = 0) -> list[list[float]]:
    """The items of each step, over all ranks, until the run ends or the loop raises after ``stop`` steps."""
    numbers, seen = Numbers(), list[list[float]]()
    with lockstep.Session(QUIET | {"checkpoint.every_steps": 1}, global_batch_size=8, seed=0) as session:
        model = nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        for _ in session.epochs(epochs):
            for items in session.batches(numbers):
                seen.append(session.gather(items).flatten().tolist())
                session.backward(model(items).sum(), len(items))
                session.step(optimizer)
                if stop and session.step_count == stop:
                    raise InterruptedError
    return seen


@pytest.mark.slow
def test_a_stream_is_read_once_on_any_ranks_and_resumed(tmp_path: Path) -> None:
    steps = [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    place = {"save_dir": tmp_path / "run"}
    with pytest.raises(RankFailed, match="InterruptedError"):
        lockstep.Session.launch(streamed, 2, 2, devices="cpu,cpu", strategy="fsdp", **place)  # type: ignore[arg-type]
    assert lockstep.Session.launch(streamed, 2, devices="cpu", resume=True, **place) == (steps * 2)[2:]  # type: ignore[arg-type]


class State:
    value = torch.zeros(4, 1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


def predicted(model: nn.Module, items: Tensor, state: State) -> Tensor:
    """An output for each row, which is its state in the next batch."""
    output: Tensor = model(torch.cat([items / 20, state.value[: len(items)]], 1))
    state.value = output.detach().tanh()
    return output


def carrying(is_kept: bool, stop: int = 0, mode: str = "fast", **options: Any) -> list[float]:
    """The weights after two epochs in which each row of a batch follows that row of the batch before."""
    numbers, state = Numbers(), State()
    settings = QUIET | {"checkpoint.every_steps": 1, "training.reproducibility": mode}
    with lockstep.Session(settings, global_batch_size=4, seed=0, **options) as session:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_kept:
            session.checkpoint(state=state)
        for _ in session.epochs(2):
            for items in session.batches(numbers):
                session.backward((predicted(model, items, state) - items / 10).square().sum(), len(items))
                session.step(optimizer)
                if stop and session.step_count == stop:
                    raise InterruptedError
            state.value = torch.zeros(4, 1)
        return model.weight.flatten().tolist()


@pytest.mark.slow
def test_a_state_is_carried_by_row_on_any_ranks_and_kept_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fast mode; exact mode, whose parts of a batch have other rows, is refused."""
    torch.manual_seed(1)
    plain = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        state = State()
        for start in range(0, 20, 4):
            items = torch.arange(start, start + 4.0)[:, None]
            optimizer.zero_grad()
            (predicted(plain, items, state) - items / 10).square().mean().backward()
            optimizer.step()
    expected = pytest.approx(plain.weight.flatten().tolist(), abs=1e-6)
    monkeypatch.chdir(tmp_path)
    assert lockstep.Session.launch(carrying, False, devices="cpu,cpu", save_dir=tmp_path / "two") == expected
    with pytest.raises(UnsupportedError, match=r"(?s)\bloss\b.*docs/own-loop\.md"):
        carrying(True, mode="exact")
    with pytest.raises(InterruptedError):
        carrying(True, stop=7, save_dir=tmp_path / "run")
    assert carrying(True, save_dir=tmp_path / "run", resume=True) == expected


def leaves_early(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    for x, y in batches(session):
        session.backward(squares(model, x, y), len(y))
        session.step(optimizer)
        if session.rank == 1 and session.step_count == 1:
            break
    session.evaluate(data(), lambda batch: batch[1])


def gathers_unevenly(session: lockstep.Session) -> None:
    prepared(session)
    for x, _ in batches(session):
        session.gather(x[:, session.rank :])


def evaluates_other_data(session: lockstep.Session) -> None:
    for _ in session.evaluate(data(10 + session.rank), lambda batch: batch[1]):
        pass


def in_a_session(loop: Callable[[lockstep.Session], None]) -> None:
    loop(lockstep.Session(QUIET | {"distributed.timeout_s": 5}, global_batch_size=8, seed=0))


@pytest.mark.parametrize(
    ("loop", "what", "fix"),
    [
        (leaves_early, r"rank 0 did not reach the end of an epoch", "differs between ranks"),
        pytest.param(cleared_gradients, r"without a backward", "", marks=pytest.mark.slow),
        pytest.param(
            evaluates_other_data, r"rank 1 gave evaluate\(\) other data than rank 0", "", marks=pytest.mark.slow
        ),
        (gathers_unevenly, r"rank 0 gather\(\) of float32 \[\*, 4\].*rank 1 gather\(\) of float32 \[\*, 3\]", ""),
    ],
)
def test_a_rank_that_differs_from_the_others_is_named(
    tmp_path: Path, loop: Callable[[lockstep.Session], None], what: str, fix: str
) -> None:
    with pytest.raises(LockstepError) as caught:
        lockstep.Session.launch(in_a_session, loop, devices="cpu,cpu", save_dir=tmp_path / "run")
    assert re.search(what, caught.value.what)
    assert fix in (caught.value.fix or "")


def test_every_loop_of_the_last_epoch_runs_and_a_changed_accumulation_is_taken(session: lockstep.Session) -> None:
    model, optimizer = prepared(session)
    bodies = []
    for epoch in session.epochs(2):
        for number, samples in enumerate((16, 24 if epoch else 8, 8)):
            bodies.append(0)
            for x, y in session.batches(data(samples), accumulate=2 if epoch and number == 1 else 1):
                session.backward(squares(model, x, y), count=len(y))
                session.step(optimizer)
                bodies[-1] += 1
    assert bodies == [2, 1, 1, 2, 6, 1]
    assert session.step_count == 4 + 6


def test_the_run_has_the_steps_of_all_loops_and_names_of_groups_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"telemetry.log_interval": 1, "telemetry.system_metrics": False}
    with lockstep.Session(settings, global_batch_size=8, seed=0, save_dir=tmp_path / "run") as session:
        model, optimizer = prepared(session)
        for _ in session.epochs(2):
            for samples in (16, 24):
                for x, y in session.batches(data(samples)):
                    session.backward(squares(model, x, y), count=len(y))
                    session.step(optimizer)
            session.log(loss=0.5, **{"rollout/reward": 2.0})
    printed = "".join(capsys.readouterr())
    assert [f"step {step}/{total} " in printed for step, total in ((2, 4), (3, 10), (10, 10))] == [True] * 3
    for row in lockstep.Run(tmp_path / "run").history:
        assert (row["val_loss"], row["rollout/reward"]) == (0.5, 2.0) and "val_rollout/reward" not in row


@pytest.mark.parametrize("model", [nn.LazyLinear(2), nn.Linear(4, 2, device="meta")], ids=["lazy", "meta"])
def test_a_parameter_without_values_is_refused(session: lockstep.Session, model: nn.Module) -> None:
    with pytest.raises(TaskError, match=r"\bweight\b.* (Lazy)?Linear\b"):
        session.prepare(model)


def test_loops_inside_each_other_are_refused(session: lockstep.Session) -> None:
    prepared(session)
    with pytest.raises(TaskError, match=r"\bbatches\(\)"):
        for _ in session.epochs(1):
            for _ in zip(session.batches(data()), session.batches(data(20)), strict=False):
                pass


def trained_on_made_data(folder: Path, steps: int, made: Callable[[lockstep.Session, Any], Any]) -> tuple[Tensor, str]:
    """Two epochs of three loops over 16 targets that the model has made; its weights, and its samples by loop."""
    settings = QUIET | {"training.max_steps": steps, "telemetry.record_samples": True}
    with lockstep.Session(settings, resume=True, global_batch_size=8, seed=0, save_dir=folder) as session:
        model, optimizer = prepared(session)

        def make(shift: float) -> tuple[Tensor, Tensor]:
            x = torch.rand(16, 4)
            return x, model(x).detach() + shift

        for _ in session.epochs(2):
            rows = made(session, make)
            for _ in range(3):
                for x, y in session.batches(TensorDataset(*rows)):
                    session.backward(squares(model, x, y.squeeze(1)), len(y))
                    session.step(optimizer)
    return model.weight.detach(), RunDir(folder).samples_file(0).read_text()


def once(session: lockstep.Session, make: Any) -> Any:
    return session.once(make, 1.0)


def every_time(session: lockstep.Session, make: Any) -> Any:
    return make(1.0)


def numbered(session: lockstep.Session, make: Any) -> Any:
    make(1.0)
    return torch.arange(64.0).view(16, 4), torch.ones(16, 1)


@pytest.mark.slow
def test_what_an_epoch_makes_once_is_kept_for_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, samples = trained_on_made_data(tmp_path / "whole", 12, once)
    for stop in (3, 6, 10):  # within the first epoch, at its end, within the last one
        folder = tmp_path / str(stop)
        trained_on_made_data(folder, stop, once)
        torch.testing.assert_close(trained_on_made_data(folder, 12, once)[0], whole)
    orders = {tuple(row["indices"]) for row in map(json.loads, samples.splitlines()) if row["epoch"] == 1}
    assert len(orders) == 6, "the loops of an epoch are in different orders"
    assert "session.once" not in capsys.readouterr().err

    trained_on_made_data(tmp_path / "new", 3, every_time)
    with pytest.raises(CheckpointError) as caught:
        trained_on_made_data(tmp_path / "new", 12, every_time)
    assert "session.once" in caught.value.fix
    trained_on_made_data(tmp_path / "numbers", 3, numbered)
    capsys.readouterr()
    trained_on_made_data(tmp_path / "numbers", 12, numbered)
    assert "session.once" in capsys.readouterr().err


def test_what_an_epoch_without_batches_has_made_is_not_kept() -> None:
    made, device = Made(), torch.device("cpu")
    for epoch in range(3):
        made.begin_epoch()
        assert made.once(lambda number: number, (epoch,), device) == epoch
        assert made.values == [(False, epoch)]


def test_optimizers_may_share_parameters(session: lockstep.Session) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    twins = copy.deepcopy(one), copy.deepcopy(two)
    both = [*one.parameters(), *two.parameters()]
    first, whole = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(both, lr=0.05)
    by_hand = torch.optim.SGD(twins[0].parameters(), lr=0.1)
    both_by_hand = torch.optim.SGD([*twins[0].parameters(), *twins[1].parameters()], lr=0.05)
    session.prepare(one, two, first, whole)
    for x, y in batches(session):
        session.backward(squares(two, one(x), y), len(y))
        session.step(first)
        if session.step_count == 4:
            with pytest.raises(TaskError, match=r"step\(optimizer_2\) .*step\(optimizer\)") as caught:
                session.step(whole)
            assert "optimizer_2.zero_grad()" in caught.value.fix
        whole.zero_grad()
        session.backward(squares(two, one(x), 2 * y), len(y))
        session.step(whole)
        for optimizer, target in ((by_hand, y), (both_by_hand, 2 * y)):
            both_by_hand.zero_grad()
            F.mse_loss(twins[1](twins[0](x)).squeeze(1), target).backward()
            optimizer.step()
    for ours, theirs in zip(both, [*twins[0].parameters(), *twins[1].parameters()], strict=True):
        torch.testing.assert_close(ours, theirs)


class Torn(Dataset[tuple[Tensor, Tensor]]):
    """Six samples of 24 cannot be read, all of a micro-batch among them."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise ValueError("torn")
        return torch.full((4,), index / 24), torch.tensor(float(index))


def test_samples_that_cannot_be_read_are_left_out(session: lockstep.Session, tmp_path: Path) -> None:
    session.close()
    order, settings = list[float](), QUIET | {"data.on_bad_row": "skip"}
    for _ in range(2):
        bad = {int(number) for number in (*order[:4], *order[5:10:4])}
        found, counted = list[float](), 0
        with lockstep.Session(settings, global_batch_size=4, save_dir=tmp_path / str(len(bad))) as session:
            model, optimizer = prepared(session)
            for _ in session.epochs(1):
                for loop in range(2):  # the data of the second one are others than those of the plan
                    for x, y in session.batches(Torn(bad)):
                        before = model.weight.detach().clone()
                        session.backward(squares(model, x, y), count=len(y))
                        session.step(optimizer)
                        counted += not torch.equal(before, model.weight)
                        found += [] if loop else y.tolist()
                        if bad:
                            with pytest.raises(UnsupportedError, match="on_bad_row"):
                                _ = session.rows
            order = order or found
        file = session.folder / "skipped-rank0.jsonl"
        assert (
            {json.loads(line)["index"] for line in file.read_text().splitlines()} == bad if bad else not file.exists()
        )
    assert len(bad) == 6
    assert set(found) >= set(order) - bad
    assert counted < 12, "a step without a readable sample changes nothing"


def test_a_resume_compares_what_changes_bits_and_is_judged_by_its_metric(tmp_path: Path) -> None:
    def train(epochs: int, **settings: Any) -> dict[str, Any]:
        config = QUIET | {"training.reproducibility": "exact"} | settings
        with lockstep.Session(
            config, resume=True, global_batch_size=8, seed=0, save_dir=tmp_path / "run", epochs=epochs
        ) as session:
            model, optimizer = prepared(session)
            for epoch in session.epochs(epochs):
                for x, y in session.batches(data()):
                    session.backward(squares(model, x, y), count=len(x))
                    session.step(optimizer)
                session.log(loss=1.0 + epoch, score=10.0 + epoch)
        return lockstep.Run(tmp_path / "run").best_metric

    assert train(2)["val_loss"] == 1.0
    with pytest.raises(CheckpointError) as caught:
        train(3, **{"training.threads": torch.get_num_threads() + 1})
    assert "threads" in caught.value.why
    judged = {"checkpoint.monitor": "val_score", "checkpoint.mode": "min"}
    assert train(3, **judged)["val_score"] == 12.0, "the best of the epochs that this metric has judged"
