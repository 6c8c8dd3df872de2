"""How long a run takes, before it is made: after a few steps, and at the speed of an earlier run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import main
from tests.studio.serving import TOY


def seconds(text: str) -> float:
    """Those of ``12.3 s``, ``4:05`` and ``1:04:05``."""
    total = 0.0
    for part in text.removesuffix(" s").split(":"):
        total = 60 * total + float(part)
    return total


def test_an_estimate_after_three_steps_and_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [TOY, "--devices", "cpu", "--epochs", "40", "--batch-size", "2", "--num-workers", "0"]
    assert main(["plan", *settings]) == 0
    assert "--fast-dev-run" in capsys.readouterr().out

    assert main(["train", *settings, "--fast-dev-run"]) == 0
    printed = "".join(capsys.readouterr())
    found = re.search(
        r"An epoch takes about ([\d.:]+(?: s)?) and 40 epochs ([\d.:]+(?: s)?).* (\d+) steps of ([\d.e+]+) ms", printed
    )
    assert found is not None, printed
    steps = lockstep.Run().plan.batch.steps_per_epoch
    assert (lockstep.Run().step, int(found[3])) == (3, steps) and steps == 100
    epoch_s = steps * float(found[4]) / 1e3
    assert seconds(found[1]) == pytest.approx(epoch_s, abs=0.6)
    assert seconds(found[2]) == pytest.approx(40 * epoch_s, rel=0.02, abs=0.6)

    # The plan knows the time from these steps, and how long they waited for input.
    measured = lockstep.Run()
    speed = measured.history[0]["samples_per_s"]
    assert steps * 2 / speed == pytest.approx(epoch_s, rel=0.02)
    assert main(["plan", *settings]) == 0
    printed = capsys.readouterr().out
    found = re.search(rf"about ([\d.:]+(?: s)?) and the run .* of {measured.id}, .* input (\d+)% of the time", printed)
    assert found is not None, printed
    assert seconds(found[1]) == pytest.approx(epoch_s, abs=0.6)
    assert int(found[2]) == round(100 * measured.steps[-1]["data_wait_share"])

    assert main(["train", *settings[:4], "1", *settings[5:], "--save-dir", "runs/earlier"]) == 0
    speed = lockstep.Run("earlier").history[0]["samples_per_s"]
    capsys.readouterr()
    assert main(["plan", *settings]) == 0
    found = re.search(r"about ([\d.:]+(?: s)?) and the run ([\d.:]+(?: s)?).* of earlier", capsys.readouterr().out)
    assert found is not None
    samples = lockstep.Run("earlier").plan.batch.samples
    assert seconds(found[1]) == pytest.approx(samples / speed, abs=0.6)
    assert seconds(found[2]) == pytest.approx(40 * samples / speed, rel=0.02, abs=0.6)
