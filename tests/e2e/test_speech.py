"""Speech as a user trains it: from a manifest, on one and on two ranks, and what comes after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.rundir.folder import RunDir
from tests.e2e.test_exact import fingerprint
from tests.e2e.test_train import finish, losses, start
from tests.gloo import ROOT
from tests.recipes.speech_files import make_recordings, write_lines

TINY = ("--set", "task.size=tiny", "--set", "task.width=16", "--set", "task.downsample=2", "--epochs", "1")
SHARED = ("--global-batch-size", "8", "--batch-size", "8", "--set", "telemetry.tensorboard=off")


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return make_recordings(tmp_path / "recordings", 21)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command in this process, where what speech needs is imported once; its output."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(arguments) == code
        found = capsys.readouterr()
        return found.out if "--json" in arguments else found.out + found.err

    return run


def flags(manifest: Path) -> tuple[str, ...]:
    return ("--set", f"task.train_manifest={manifest}", "--set", f"task.val_manifest={manifest}", *TINY, *SHARED)


@pytest.mark.slow
def test_two_ranks_train_what_one_trains_and_recordings_are_transcribed(
    tmp_path: Path, manifest: Path, run: Callable[..., str]
) -> None:
    for name, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        arguments = ("--save-dir", name, "--devices", devices, "--set", "task.dropout=0", *flags(manifest))
        output = finish(start("train", "speech", *arguments, cwd=tmp_path))
        assert output.count("said: ") == 3
    one, two = (losses(tmp_path / run)[0] for run in ("one", "two"))
    for key in ("train_loss", "val_loss"):
        assert one[key] == pytest.approx(two[key], rel=1e-5)
    assert one["val_wer"] == two["val_wer"]
    metrics = json.loads(run("evaluate", "two", "--data", str(manifest), "--json"))["metrics"]
    assert metrics["test_cer"] == two["val_cer"]
    assert "no.jsonl" in run("evaluate", "two", "--data", "no.jsonl", code=2)
    recordings = [str(manifest.parent / f"{index}.wav") for index in (0, 1)]
    heard = json.loads(run("transcribe", "two", *recordings, "--json"))
    assert [row["file"] for row in heard["transcripts"]] == recordings
    refused = run("transcribe", "two", "missing.wav", code=2)
    assert "missing.wav" in refused
    assert "Traceback" not in refused


@pytest.mark.drill
def test_exact_mode_gives_the_same_weights_on_one_and_two_ranks(tmp_path: Path, manifest: Path) -> None:
    for run, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        arguments = ("--save-dir", run, "--devices", devices, "--reproducibility", "exact", *flags(manifest))
        finish(start("train", "speech", *arguments, cwd=tmp_path))
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")


@pytest.mark.slow
def test_bad_lines_are_all_told_before_training_or_left_out_on_request(
    tmp_path: Path, manifest: Path, run: Callable[..., str]
) -> None:
    bad = [
        {"audio_path": "nowhere.wav", "text": "ON"},
        {"audio_path": "0.wav", "text": "[H]"},
        {"audio_path": "1.wav", "text": "FAR TOO LONG FOR SO SHORT A RECORDING AS THIS ONE " * 3},
        "{no json",
    ]
    good = [json.loads(line) for line in manifest.read_text().splitlines()]
    mixed = write_lines(manifest.parent / "mixed.jsonl", [*good, *bad])
    refused = run("train", "speech", "--save-dir", "run", *flags(mixed), code=2)
    assert "4 of 25 " in refused
    assert all(f"line {number}:" in refused for number in (22, 23, 24, 25))
    assert "Traceback" not in refused
    assert not (tmp_path / "run").exists()
    output = finish(start("train", "speech", "--save-dir", "run", "--skip-bad", *flags(mixed), cwd=tmp_path))
    assert "4 of 25 " in output
    assert RunDir.open(tmp_path / "run").plan()["task"]["train_samples"] == 21


@pytest.mark.drill
def test_the_documents_configuration_runs_under_torchrun(tmp_path: Path, manifest: Path) -> None:
    arguments = ("--config", str(ROOT / "configs" / "speech" / "multi_gpu.yaml"), "--devices", "cpu,cpu", *TINY)
    data = ("--set", f"task.train_manifest={manifest}", "--max-steps", "1", "--save-dir", "run")
    module = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep")
    finish(start("train", "speech", *arguments, *data, module=module, cwd=tmp_path))
    plan = RunDir.open(tmp_path / "run").plan()
    assert (plan["batch"]["global_batch"], plan["batch"]["ranks"], plan["schedule"]["lr"]) == (32, 2, 2e-3)
