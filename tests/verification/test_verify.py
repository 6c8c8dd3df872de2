"""Two real ranks against one: agreement to rounding is seen as such, and every built-in fault is called by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep.errors import DataError, ResultsDifferError, StorageError, UsageError
from lockstep.verification import VerifyReport, verify
from lockstep.verification.report import write_report
from lockstep.verification.trajectory import ROUNDING
from tests.e2e.test_train import finish, start
from tests.toys import CLASSES, FEATURES, Toy
from tests.verification import parting

TWO: dict[str, Any] = {"hardware": {"selected_devices": ["cpu", "cpu"]}}
NORM = {"task": {"batchnorm": True}}


def run(kind: type[Toy], tmp_path: Path, sections: dict[str, Any]) -> VerifyReport:
    return verify(kind, {**TWO, "runs_dir": str(tmp_path), **sections}, steps=16)


@pytest.mark.parametrize(
    ("sections", "outcomes"),
    [
        pytest.param({}, {"identical", "equal"}, marks=pytest.mark.drill),
        ({"task": {"batchnorm": True, "dropout": 0.3, "dataset": "augmented"}}, {"equal without dropout"}),
        ({**NORM, "training": {"reproducibility": "exact"}}, {"identical"}),
        pytest.param({**NORM, "training": {"accumulate": 2}}, {"identical", "equal"}, marks=pytest.mark.drill),
        pytest.param(
            {"hardware": {**TWO["hardware"], "precision": "bf16-mixed"}}, {"equal in float32"}, marks=pytest.mark.drill
        ),
    ],
    ids=["plain", "batchnorm and dropout", "exact", "accumulation", "bf16"],
)
def test_what_agrees_is_called_equal(tmp_path: Path, sections: dict[str, Any], outcomes: set[str]) -> None:
    report = run(Toy, tmp_path, sections)
    assert report.outcome in outcomes
    assert (report.exit_code, report.causes) == (0, ())
    report.raise_if_different()
    assert len(report.comparison.gap["loss"]) == 16
    # 200 samples in windows of 32 or 64: the short last one and the start of the next epoch are among the steps.
    assert {8, report.global_batch} <= set(report.comparison.one.samples.tolist())
    (file,) = write_report(report, tmp_path / "report")
    assert json.loads(file.read_text())["outcome"] == report.outcome
    with pytest.raises(StorageError, match="not a folder"):
        write_report(report, file)


class BiasBeforeNorm(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


@pytest.mark.slow
def test_weights_that_rounding_alone_moves_are_named_and_hide_no_other(tmp_path: Path) -> None:
    report = run(BiasBeforeNorm, tmp_path, {})
    assert report.outcome == "equal"
    assert sum("0.bias" in note for note in report.notes) == 1
    gap = report.comparison.gap["weights"].max()
    assert gap < 30 * report.floor["weights"].max() < 0.01
    assert report.as_dict()["steps"][0]["weights_noise"] == report.floor["weights"][0]
    assert f"{report.floor['weights'][-1]:.1e}" in str(report)


@pytest.mark.parametrize(
    ("task", "sections", "cause"),
    [
        (Toy, {**NORM, "distributed": {"sync_batchnorm": "off"}}, "batchnorm"),
        (parting.WrongCountAndDraws, {"task": {"samples": 203}}, "denominator"),
        # All but the last run are the same for these two: test_diagnose.py has what is decided from them.
        pytest.param(parting.UnseededAugmentation, {}, "unseeded-data", marks=pytest.mark.drill),
        pytest.param(parting.KeptGenerator, {}, "stateful-data", marks=pytest.mark.slow),
        pytest.param(parting.UnseededDropout, {}, "unseeded-forward", marks=pytest.mark.drill),
        pytest.param(parting.RankDropout, {}, "random-draws", marks=pytest.mark.drill),
        pytest.param(parting.ScaledRate, {}, "learning-rate", marks=pytest.mark.drill),
        pytest.param(parting.HandMadeNorm, {}, "grouping", marks=pytest.mark.drill),
        pytest.param(
            parting.RankValidation, {"training": {"reproducibility": "exact"}}, "validation", marks=pytest.mark.slow
        ),
        pytest.param(parting.OwnStart, {}, "initial-weights", marks=pytest.mark.drill),
        pytest.param(parting.OptimizerNoise, {}, "ranks-diverge", marks=pytest.mark.drill),
        pytest.param(parting.HookNoise, {}, "ranks-diverge", marks=pytest.mark.slow),
        pytest.param(parting.WrongMerge, {}, "buffers", marks=pytest.mark.slow),
        pytest.param(parting.Forgetful, {}, "resume", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_parts_is_called_by_its_cause(
    tmp_path: Path, task: type[Toy], sections: dict[str, Any], cause: str
) -> None:
    report = run(task, tmp_path, sections)
    assert report.outcome == "different"
    assert report.exit_code == 1
    assert report.causes[0].code == cause
    assert report.verdict.startswith("DIFFERENT: ")
    with pytest.raises(ResultsDifferError, match="DIFFERENT: ") as caught:
        report.raise_if_different()
    assert (caught.value.why, caught.value.fix) == (report.causes[0].what, report.causes[0].fix)
    assert caught.value.exit_code == 1


@pytest.mark.slow
def test_ranks_that_read_other_samples_are_refused_before_they_train(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank 1 .*\btrain\b.* rank 0"):
        run(parting.PaddingSampler, tmp_path, {})


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(parting.GlobalDraws, marks=pytest.mark.slow),
        pytest.param(parting.Frozen, marks=pytest.mark.drill),
        pytest.param(parting.Split, marks=pytest.mark.drill),
        pytest.param(parting.ThawingAll, marks=pytest.mark.drill),
        pytest.param(parting.InstanceNormed, marks=pytest.mark.drill),
        pytest.param(parting.StateInGroups, marks=pytest.mark.drill),
    ],
)
def test_ordinary_code_is_equal(tmp_path: Path, task: type[Toy]) -> None:
    report = verify(task, {**TWO, "runs_dir": str(tmp_path)}, steps=6)
    assert report.outcome in {"identical", "equal"}, report.findings()
    assert report.notes == ()
    assert str(report).count("\n") >= 7 and len(repr(report)) < 200, "a line for each step and the verdict"


@pytest.mark.slow
def test_no_number_in_both_runs_is_not_equality_and_the_report_is_written_and_printed(tmp_path: Path) -> None:
    flags = ("--devices", "cpu,cpu", "--steps", "6", "--json", "--save-dir", "report")
    process = start("verify", "tests.verification.parting:NotANumber", *flags, cwd=tmp_path)
    output = finish(process, code=1)
    printed = json.loads(output[output.index("{") :])
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert printed["causes"] == written["causes"]
    assert (written["outcome"], written["same"]) == ("not finite", False)
    assert [cause["code"] for cause in written["causes"]] == ["not-finite"]
    assert "step 3" in written["causes"][0]["what"]
    assert [row["step"] for row in written["steps"]] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob("runs*")), "the runs that were compared are gone"


@pytest.mark.slow
def test_exact_mode_allows_no_rounding(tmp_path: Path) -> None:
    flags = ("tests.verification.parting:LastBits", "--devices", "cpu,cpu", "--steps", "4", "--json")
    output = finish(start("verify", *flags, cwd=tmp_path))
    fast = json.loads(output[output.index("{") :])
    assert (fast["outcome"], fast["same"], fast["causes"]) == ("equal", True, [])
    output = finish(start("verify", *flags, "--reproducibility", "exact", cwd=tmp_path), code=1)
    exact = json.loads(output[output.index("{") :])
    assert (exact["outcome"], exact["same"], exact["reproducibility"]) == ("different", False, "exact")
    assert [cause["code"] for cause in exact["causes"]] == ["unknown"]
    assert "exact" not in exact["causes"][0]["fix"], "the mode is on"
    assert "step 1" in exact["causes"][0]["what"]
    for row in exact["steps"]:
        assert 0 < row["loss_gap"] < exact["factor"] * ROUNDING
        assert (row["loss_noise"], row["grad_norm_noise"], row["weights_noise"]) == (0.0, 0.0, 0.0)


def test_one_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fix: .*--devices"):
        verify(Toy, {"hardware": {"selected_devices": ["cpu"]}, "runs_dir": str(tmp_path)})
