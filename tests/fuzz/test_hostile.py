"""Files from elsewhere, spoilt in every way: each gives a result or one clear error, and none runs anything."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.errors import LockstepError
from lockstep.recipes.speech.audio import read_audio
from lockstep.recipes.speech.manifest import open_manifest
from lockstep.rundir.folder import RunDir
from tests.fuzz import mutators as m
from tests.gloo import ROOT
from tests.recipes.speech_files import sound, write_audio, write_lines

TOY = f"{ROOT / 'tests' / 'toys.py'}:Toy"
LOOK = ("show", "json", "runs")
USE = ("evaluate", "export", "resume")
#: How long a command may take before it counts as hung; generous, on a busy machine.
LIMIT_S = 60
SIZES = ("few", "many")
#: The two checkpoints of the run: the older one must survive what happens to the newer.
OLDER, NEWER = "step-00000004", "step-00000008"
SAVED = f"checkpoints/{NEWER}"


@dataclass(frozen=True)
class Target:
    """A file of a run, how it is spoilt, and which commands then read it."""

    file: str
    mutators: tuple[m.Mutator, ...]
    commands: tuple[str, ...]
    sealed: bool = False


TARGETS = {
    "record": Target("run.json", (*m.JSON, *m.JSON, *m.BYTES), (*LOOK, "evaluate", "resume")),
    "heartbeat": Target("heartbeat.json", (*m.JSON, *m.BYTES), (*LOOK, "resume")),
    "configuration": Target("config.yaml", (*m.YAML, *m.YAML, *m.BYTES), (*LOOK, "evaluate", "export", "resume")),
    "plan": Target("plan.json", (*m.JSON, *m.JSON, *m.BYTES), (*LOOK, "evaluate")),
    "curves": Target("metrics.json", (*m.JSON, *m.BYTES), (*LOOK, "resume")),
    "steps": Target("steps.jsonl", (*m.LINES, *m.BYTES), (*LOOK, "rows", "resume")),
    "placement": Target("attempts/1/placement.json", (*m.JSON, *m.BYTES), (*LOOK, "rows")),
    "manifest": Target(f"{SAVED}/manifest.json", (*m.JSON, *m.JSON, *m.BYTES), ("show", "evaluate", "resume"), True),
    "weights": Target(f"{SAVED}/model.safetensors", (*m.MODEL, *m.BYTES), USE, True),
    "state": Target(f"{SAVED}/trainer.pt", (*m.TRAINER, *m.TRAINER, *m.BYTES), USE, True),
    "pointer": Target("checkpoints/last", (m.not_a_file, m.replaced), ("show", "evaluate", "resume")),
    "folder": Target(SAVED, (m.not_a_file,), ("show", "evaluate", "resume")),
}  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 8 of 14, with a checkpoint at step 4 too."""
    run = tmp_path_factory.mktemp("healthy") / "run"
    flags = ("--devices", "cpu", "--max-steps", "8", "--log-interval", "1", "--set", "checkpoint.every_steps=4")
    code, _, errors = command("train", TOY, "--save-dir", run, *flags, "--set", "telemetry.tensorboard=off")
    assert code == 0, errors
    assert {OLDER, NEWER} <= {path.name for path in (run / "checkpoints").iterdir()}
    for config in run.glob("**/config.yaml"):  # of the run, and of its attempt
        config.write_text(config.read_text().replace("max_steps: 8", "max_steps: 9"))
    return run


def command(*words: str | Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of ``lockstep …`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), alarm():
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """A reader that waits for ever (for a pipe's writer, say) is a failure, not a wait."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def arguments(run: Path, how: str) -> tuple[str | Path, ...]:
    """The command line of one of the readers."""
    found: dict[str, tuple[str | Path, ...]] = {
        "show": ("show", run),
        "json": ("show", run, "--json"),
        "runs": ("runs", "--runs-dir", run.parent),
        "evaluate": ("evaluate", run, "--checkpoint", "last"),
        "export": ("export", run, "--no-program", "--checkpoint", "last", "--out", run.parent / "out"),
        "resume": ("resume", run, "--devices", "cpu"),
    }
    return found[how]


def read(run: Path, how: str) -> None:
    """Use one of the readers; raises when it does anything but succeed or say clearly what is wrong."""
    if how == "rows":
        with contextlib.suppress(LockstepError):
            RunDir(run).steps()
        return
    check(*command(*arguments(run, how)))


def check(code: int, out: str, err: str) -> None:
    assert code in {0, 1, 2}, (code, err)
    assert sum(line.startswith("error: ") for line in err.splitlines()) == (code != 0), err
    assert "Traceback" not in err, err
    assert len(err) < 20_000, err[:2000]


def spoil(target: Target, run: Path, rng: random.Random, canary: Path) -> str:
    """Spoil the file; ``how`` it was done, for the report."""
    file = run / target.file
    choices = (m.not_a_file,) if file.is_dir() and not file.is_symlink() else target.mutators
    if file.is_symlink():
        file.unlink()
        file.write_text(NEWER)
    mutate = rng.choice(choices)
    if file.is_dir():
        shutil.rmtree(file)
        file.write_text("")
    how = f"{mutate.__name__}: {mutate(file, rng, str(canary))}"
    if target.sealed and rng.random() < 0.7:
        m.reseal(file.parent)
        how += ", hashes put right"
    return how


def run_case(name: str, number: int, healthy: Path, folder: Path) -> None:
    target, rng = TARGETS[name], random.Random(f"{name} {number}")
    run, canary = folder / "run", folder / "canary"
    shutil.copytree(healthy, run, symlinks=True)
    (run / "evil.py").write_text(f"import os\nos.system({m.command(str(canary))!r})\n")
    how = target.commands[number % len(target.commands)]
    what = spoil(target, run, rng, canary)
    try:
        read(run, how)
        assert not canary.exists(), "it ran code of the file's"
        assert_nothing_lost(run, target)
    except BaseException as error:
        error.add_note(f"case {name} {number}: {how} with {target.file} {what}")
        raise
    finally:
        shutil.rmtree(folder)


def assert_nothing_lost(run: Path, target: Target) -> None:
    """The older checkpoint is whole, unless the run went on and newer ones took its place."""
    store = CheckpointStore(run / "checkpoints")
    steps = [step for step in store.steps() if step > 8]
    store.verify(max(steps) if steps else 4)


def run_cases(names: Any, numbers: range, healthy: Path, folder: Path) -> None:
    for name in names:
        for number in numbers:
            case = folder / f"{name}-{number}"
            case.mkdir()
            run_case(name, number, healthy, case)


@pytest.mark.parametrize("name", TARGETS)
def test_a_spoilt_run(name: str, healthy: Path, tmp_path: Path) -> None:
    run_cases([name], range(12), healthy, tmp_path)


@pytest.mark.drill
@pytest.mark.parametrize("name", TARGETS)
def test_many_spoilt_runs(name: str, healthy: Path, tmp_path: Path) -> None:
    run_cases([name], range(1000, 1170), healthy, tmp_path)


def planted(healthy: Path, folder: Path) -> tuple[Path, Path]:
    """(run, canary): a run folder with code in it, as a file and as a pickle, that would make the canary."""
    run, canary = folder / "run", folder / "canary"
    shutil.copytree(healthy, run, symlinks=True)
    (run / "evil.py").write_text(f"import os\nos.system({m.command(str(canary))!r})\n")
    for name in ("call.pkl", "result-0.pkl", "result-7.pkl"):
        (run / name).write_bytes(pickle.dumps(m.Payload(os.system, m.command(str(canary)))))
    return run, canary


@pytest.mark.parametrize("how", ["evaluate", "export", "resume"])
def test_a_runs_own_code_is_not_run(how: str, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, canary = planted(healthy, tmp_path)
    monkeypatch.chdir(run)
    config = (run / "config.yaml").read_text()
    for place in (run / "evil.py", "evil.py", "/proc/self/cwd/evil.py", f"{run}/../run/evil.py"):
        (run / "config.yaml").write_text(config.replace(f"name: {TOY}", f"name: {place}:Evil"))
        code, _, error = command(*arguments(run, how))
        assert code == 2
        assert "code in a run folder is not run" in error
    (run / "config.yaml").write_text(config)
    code, _, error = command(*arguments(run, how))
    assert code == 0, error
    assert not canary.exists()


@pytest.mark.drill
def test_ranks_take_no_pickle_that_came_with_a_run(healthy: Path, tmp_path: Path) -> None:
    run, canary = planted(healthy, tmp_path)
    code, _, error = command("resume", run, "--devices", "cpu,cpu")
    assert code == 0, error
    assert not canary.exists()


# --- configurations --------------------------------------------------------------------------------

CONFIG = """\
defaults: [base]
name: a name
training: {epochs: 2, batch_size: 16}
optimizer: {lr: 0.01, betas: [0.9, 0.99]}
hardware: {selected_devices: [cpu]}
"""


def spoilt_configuration(number: int, folder: Path) -> None:
    rng, canary = random.Random(f"config {number}"), folder / "canary"
    (folder / "base.yaml").write_text("training: {seed: 1}\n")
    (folder / "evil.py").write_text(f"import os\nos.system({m.command(str(canary))!r})\n")
    file = folder / "config.yaml"
    file.write_text(CONFIG)
    mutate = rng.choice((*m.YAML, *m.YAML, *m.BYTES))
    spoilt = folder / "base.yaml" if mutate is not m.yaml_value and rng.random() < 0.2 else file
    what = mutate(spoilt, rng, str(canary))
    try:
        check(*command("plan", TOY, "--config", file))
        assert not canary.exists(), "it ran code of the file's"
    except BaseException as error:
        error.add_note(f"configuration {number}: {mutate.__name__}: {what}")
        raise


@pytest.mark.parametrize("numbers", [range(30), pytest.param(range(1000, 1300), marks=pytest.mark.drill)], ids=SIZES)
def test_a_spoilt_configuration(numbers: range, tmp_path: Path) -> None:
    for number in numbers:
        folder = tmp_path / str(number)
        folder.mkdir()
        spoilt_configuration(number, folder)


# --- data ------------------------------------------------------------------------------------------


def spoilt_manifest(file: Path) -> None:
    open_manifest(file, recheck=True)


def spoilt_recording(file: Path) -> None:
    read_audio(file)


READERS: dict[str, tuple[Callable[[Path], None], tuple[m.Mutator, ...]]] = {
    "manifest.jsonl": (spoilt_manifest, (*m.LINES, *m.LINES, *m.BYTES)),
    "good.wav": (spoilt_recording, m.BYTES),
}


def spoilt_file(name: str, number: int, folder: Path) -> None:
    use, choices = READERS[name]
    rng = random.Random(f"{name} {number}")
    write_audio(folder / "good.wav", sound(0.2))
    lines: list[dict[str, Any] | str] = [{"audio_path": "good.wav", "text": "go left", "duration": 0.2}] * 3
    write_lines(folder / "manifest.jsonl", lines)
    mutate = rng.choice(choices)
    what = mutate(folder / name, rng, "canary")
    try:
        with contextlib.suppress(LockstepError), alarm():
            use(folder / name)
    except BaseException as error:
        error.add_note(f"{name} {number}: {mutate.__name__}: {what}")
        raise


@pytest.mark.parametrize("numbers", [range(30), pytest.param(range(1000, 1300), marks=pytest.mark.drill)], ids=SIZES)
@pytest.mark.parametrize("name", READERS)
def test_spoilt_data(name: str, numbers: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in numbers:
        folder = tmp_path / str(number)
        folder.mkdir()
        spoilt_file(name, number, folder)
        shutil.rmtree(folder)
