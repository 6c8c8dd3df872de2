"""One loop on one device, on the ranks of ``lockstep run`` and of torchrun; killed, and resumed on other numbers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig
from lockstep.rundir.folder import RunDir
from lockstep.verification.script import ScriptReport, print_script_report
from tests.session.scripts import CLASSIFIER, numbers, run, start

LOCKSTEP = ("-m", "lockstep")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session")
    (folder / "script.py").write_text(CLASSIFIER)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> str:
    return run("script.py", cwd=folder)


@pytest.fixture(scope="module")
def on_two(folder: Path) -> str:
    return run(*LOCKSTEP, "run", "script.py", "--devices", "cpu,cpu", "--save-dir", "two", cwd=folder)


def losses(run: RunDir) -> list[float]:
    return [row["loss"] for row in run.steps()]


def test_the_numbers_of_one_process_are_those_of_two_ranks(folder: Path, alone: str, on_two: str) -> None:
    one, two = RunDir.open(next((folder / "runs").iterdir())), RunDir.open(folder / "two")
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    assert len(losses(one)) == 18
    for word in ("weights", "average"):
        assert numbers(alone, word) == pytest.approx(numbers(on_two, word), abs=1e-5)
    assert [row["val_accuracy"] for row in one.epochs()] == [row["val_accuracy"] for row in two.epochs()]


@pytest.mark.slow
def test_its_run_folder_is_that_of_any_run(folder: Path, on_two: str) -> None:
    record, plan = RunDir.open(folder / "two").read(), RunDir.open(folder / "two").plan()
    assert (record.status, record.task, record.best_epoch is None) == ("completed", "script.py", False)
    assert plan["decisions"]["global_batch"]["value"] == 16
    assert plan["decisions"]["sync_batchnorm"]["value"] is True
    assert plan["decisions"]["threads"]["reason"] == "OMP_NUM_THREADS"
    assert "weights" in on_two
    assert "val_accuracy" in run(*LOCKSTEP, "show", "two", cwd=folder)
    assert "script.py" in run(*LOCKSTEP, "runs", "--runs-dir", ".", cwd=folder)
    assert "Nothing is left to train" in run(*LOCKSTEP, "resume", "two", "--devices", "cpu", cwd=folder)
    two = RunDir.open(folder / "two")
    beat = two.progress()
    assert (two.read().status, beat is not None and beat.step) == ("completed", 18)


AFTER = """
import sys, lockstep, torch
session = lockstep.Session(global_batch_size=16)
model = torch.nn.Linear(1, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for epoch in session.epochs(2):
    for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(20, 1))):
        session.backward(model(x).sum(), count=len(x))
        session.step(optimizer)
    seen = epoch
session.print("last", seen)
assert len(sys.argv) == 1
"""


@pytest.mark.slow
def test_a_finished_run_ends_the_script_and_one_that_failed_after_its_loop_runs_the_rest(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AFTER)
    command = (*LOCKSTEP, "run", "script.py", "--devices", "cpu,cpu", "--save-dir", "run")
    run(*command, "--", "fails", cwd=tmp_path, code=1)
    assert RunDir.open(tmp_path / "run").read().status == "failed"
    said, error = (resumed := start(*command, "--resume", cwd=tmp_path)).communicate(timeout=100)
    assert resumed.returncode == 1
    assert "What follows the loop runs, without the variables of the loop" in said
    assert re.search("NameError: .*'seen'", error)
    (tmp_path / "script.py").write_text(AFTER.replace('session.print("last", seen)', 'print("rest")'))
    assert "rest" in run(*command, "--resume", cwd=tmp_path)
    assert RunDir.open(tmp_path / "run").read().status == "completed"
    for again in ((*LOCKSTEP, "resume", "run"), (*command, "--resume"), (*command, "--resume", "--devices", "cpu")):
        said = run(*again, cwd=tmp_path)
        assert "The script ends here" in said
        assert "rest" not in said
    assert RunDir.open(tmp_path / "run").read().status == "completed"


@pytest.mark.slow
def test_a_second_session_of_a_run_is_refused(tmp_path: Path) -> None:
    """Its checkpoints would be those that a resume gives to the first."""
    (tmp_path / "script.py").write_text(AFTER + AFTER)
    error = run(*LOCKSTEP, "run", "script.py", "--save-dir", "refused", cwd=tmp_path, code=2)
    assert re.search(r"^error: .*lockstep\.Session\b", error, re.MULTILINE)
    run("script.py", cwd=tmp_path)
    assert [RunDir.open(path).status() for path in (tmp_path / "runs").iterdir()] == ["completed"] * 2


@pytest.mark.slow
def test_a_run_of_a_task_is_not_resumed_by_a_script(folder: Path) -> None:
    made = RunDir.create(folder / "task", RunConfig(), run_id="run-task", command=[])
    made.update(status="completed")
    files = sorted(made.path.iterdir())
    error = run(*LOCKSTEP, "run", "script.py", "--save-dir", "task", "--resume", cwd=folder, code=2)
    assert re.search(r"^error: .*task .*\bhar\b", error, re.MULTILINE)
    assert sorted(made.path.iterdir()) == files


@pytest.mark.slow
def test_torchrun_on_two_ranks(folder: Path, alone: str) -> None:
    output = run(*TORCHRUN, "script.py", cwd=folder)
    assert numbers(output, "weights") == pytest.approx(numbers(alone, "weights"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "error"),
    [("sys.exit(3)", "SystemExit: 3\n"), ("raise SystemExit(3)", "SystemExit: raised before the end of the loop")],
)
def test_a_script_that_exits_with_a_status_has_failed(ends: str, error: str, folder: Path) -> None:
    exits = CLASSIFIER.replace("    assert rows == 40\n", f"    {ends}\n")
    (folder / "exits.py").write_text(exits.replace("seed=3", f"seed=3, save_dir={ends!r}"))
    run("exits.py", cwd=folder, code=3)
    record = RunDir.open(folder / ends).read()
    assert record.status == "failed"
    assert (record.error or "").startswith(error)


@pytest.mark.slow
def test_settings_that_a_session_cannot_follow_are_refused(folder: Path) -> None:
    command = (*LOCKSTEP, "run", "script.py", "--devices", "cpu,cpu", "--save-dir", "refused")
    output = run(*command, "--set", "launch.max_restarts=2", cwd=folder, code=2)
    assert "error: launch.max_restarts " in output
    assert not (folder / "refused").exists()


@pytest.mark.slow
def test_verify_compares_one_device_with_two(folder: Path) -> None:
    command = ("verify", "script.py", "--devices", "cpu,cpu", "--steps", "6", "--json")
    found = json.loads(run(*LOCKSTEP, *command, "--set", "training.reproducibility=exact", cwd=folder))
    assert (found["steps"], found["verdict"], found["first_step"]) == (6, "identical", None)
    assert set(found["differences"].values()) == {0.0}, "every lane is computed alone, and sums are made in one order"
    # A counter of bodies, which moves the loss by less than rounding would be allowed to.
    counted = CLASSIFIER.replace("pause =", "calls, pause = 0,").replace(
        "session.backward(", "calls += 1; session.backward((1 + 1e-7 * calls) * "
    )
    (folder / "counted.py").write_text(counted)
    command = ("verify", "counted.py", "--devices", "cpu,cpu", "--steps", "2", "--json", "--reproducibility", "exact")
    ended = start(*LOCKSTEP, *command, cwd=folder)
    said, _ = ended.communicate(timeout=100)
    assert ended.returncode == 1
    found = json.loads(said)
    assert (found["verdict"], found["reproducibility"], found["identical"]) == ("different", "exact", False)
    assert 0 < found["differences"]["loss"] < 2.8e-5
    said = run(*LOCKSTEP, "verify", "script.py", "--devices", "cpu,cpu", "--", "--none", cwd=folder, code=1)
    assert "'--none'" in said, "what follows -- is the script's"


@pytest.mark.slow
def test_verify_finds_means_that_weigh_the_same_by_the_noise_of_the_script(folder: Path) -> None:
    mean = "F.cross_entropy(model(x), y), weight=1.0)"
    (folder / "mean.py").write_text(
        CLASSIFIER.replace('F.cross_entropy(model(x), y, reduction="sum"), count=len(y))', mean)
    )
    command = ("--devices", "cpu,cpu", "--steps", "8", "--json")
    found = json.loads(run(*LOCKSTEP, "verify", "script.py", *command, cwd=folder))
    assert (found["verdict"], found["notes"]) == ("equal to rounding", [])
    assert 0 < max(found["differences"].values()) < found["factor"] * max(found["noise"].values()) < 1e-3
    said, _ = (ended := start(*LOCKSTEP, "verify", "mean.py", *command, cwd=folder)).communicate(timeout=100)
    assert ended.returncode == 1
    assert json.loads(said)["first_step"] == 6, "the last batch of the epoch has 3 samples: 2 and 1"


@pytest.mark.slow
def test_verify_finds_a_state_that_is_carried_as_a_number(folder: Path) -> None:
    """The mean of the last batch shifts the next one: on two ranks it is that of half a batch."""
    carried = CLASSIFIER.replace("pause =", "shift, pause = 0.0,").replace(
        "session.backward(F.cross_entropy(model(x), y",
        "shifted = x + shift; shift = x.mean().item()\n        session.backward(F.cross_entropy(model(shifted), y",
    )
    assert carried.count("shift") == 5
    (folder / "carried.py").write_text(carried)
    command = ("verify", "carried.py", "--devices", "cpu,cpu", "--steps", "6", "--json")
    said, _ = (ended := start(*LOCKSTEP, *command, cwd=folder)).communicate(timeout=100)
    found = json.loads(said)
    assert (ended.returncode, found["verdict"], found["first_step"]) == (1, "different", 2)


def seen(run: RunDir, ranks: int, attempt: int) -> list[tuple[int, int]]:
    """(epoch, sample) of every sample that an attempt's checkpoint, or its end, counts."""
    last = run.resumed_from().get(attempt + 1, 10**6)
    rows = [json.loads(line) for rank in range(ranks) for line in run.samples_file(rank).read_text().splitlines()]
    return [(r["epoch"], i) for r in rows if r["attempt"] == attempt and r["step"] <= last for i in r["indices"]]


@pytest.mark.slow
def test_stopped_on_two_ranks_it_resumes_on_three_and_killed_there_on_one(folder: Path, alone: str) -> None:
    path = folder / "killed"
    command = (*LOCKSTEP, "run", "script.py", "0.15", "--save-dir", "killed", "--set", "checkpoint.every_steps=1")
    first = start(*command, "--devices", "cpu,cpu", cwd=folder)
    wait_for_step(path, 4)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 143
    first.communicate()
    run_dir = RunDir.open(path)
    stopped = CheckpointStore(run_dir.checkpoints).steps()[-1]
    assert run_dir.read().status == "stopped"

    second = start(*LOCKSTEP, "resume", "killed", "--devices", "cpu,cpu,cpu", cwd=folder)
    wait_for_step(path, stopped + 4)
    beat = run_dir.progress()
    assert beat is not None
    os.kill(beat.pid, signal.SIGKILL)
    assert second.wait(60) == 1
    second.communicate()

    output = run(*LOCKSTEP, "resume", "killed", "--devices", "cpu", "--set", "checkpoint.every_steps=5", cwd=folder)
    assert run_dir.read().status == "completed"
    found = Counter(seen(run_dir, 2, 1) + seen(run_dir, 3, 2) + seen(run_dir, 1, 3))
    assert found == Counter({(epoch, sample): 1 for epoch in (1, 2, 3) for sample in range(83)})
    for word in ("weights", "average"):
        assert numbers(output, word) == pytest.approx(numbers(alone, word), abs=1e-5)


def wait_for_step(path: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and (CheckpointStore(RunDir(path).checkpoints).steps() or [0])[-1] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint of step {step}")


ROLLOUTS = """
import sys
import torch
from torch.utils.data import TensorDataset
import lockstep

session = lockstep.Session(global_batch_size=8, seed=0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.prepare(model, optimizer)
for epoch in session.epochs(3):
    rows = torch.rand(16 + (session.rank if sys.argv[1] == "other" and epoch else 0), 4)
    for (x,) in session.batches(TensorDataset(rows)):
        torch.rand(session.rank + 1)
        session.backward(model(x).sum(), count=len(x))
        session.step(optimizer)
        if sys.argv[1] == "fails" and session.rank == 1:
            raise ValueError("of the loop")
        if sys.argv[1] == "gathers" and session.rank == 1 and session.step_count == 4:
            session.gather(x)
    if sys.argv[1] == "evaluates" and session.is_main:
        session.all_reduce(torch.ones(1))
    print("rows", f"{rows.sum().item():.7f}", f"{torch.rand(()).item():.7f}", f"{model.bias.item():.7f}")
"""


@pytest.mark.slow
def test_what_a_loop_draws_outside_its_bodies_is_alike_on_any_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ROLLOUTS)
    found = []
    for devices in ("cpu", "cpu,cpu", "cpu,cpu,cpu"):
        # Options may stand before the script, as with torchrun.
        out = run(*LOCKSTEP, "run", "--devices", devices, "script.py", "alike", cwd=tmp_path)
        found.append(
            [float(word) for line in out.splitlines() if line.startswith("rows ") for word in line.split()[1:]]
        )
    assert len(found[0]) == 9
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert found[2] == pytest.approx(found[0], abs=1e-5)


BESIDE = """
import torch
from pathlib import Path
import lockstep
rows = torch.arange(float(Path("rows.txt").read_text()))[:, None]
session = lockstep.Session(global_batch_size=8, seed=0)
model = torch.nn.Linear(1, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
for _ in session.epochs(1):
    for x in session.batches(rows):
        session.backward(model(x).sum(), count=len(x))
        session.step(optimizer)
"""


@pytest.mark.slow
def test_a_resume_from_another_folder_runs_the_script_in_its_own(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "script.py").write_text(BESIDE)
    (tmp_path / "here" / "rows.txt").write_text("32")
    mirror = tmp_path / "mirror"
    options = ("--devices", "cpu,cpu", "--save-dir", "run", "--mirror", mirror.as_uri())
    run(*LOCKSTEP, "run", "script.py", *options, "--set", "training.max_steps=2", cwd=tmp_path / "here")
    saved = "checkpoints/step-00000002/model.safetensors"
    assert (mirror / saved).read_bytes() == (tmp_path / "here" / "run" / saved).read_bytes()
    more = ("--set", "training.max_steps=4")
    out = run(*LOCKSTEP, "resume", str(tmp_path / "here" / "run"), "--devices", "cpu,cpu", *more, cwd=tmp_path)
    assert "completed" in out


WITHOUT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
joins = len(sys.argv) > 1
if joins:
    dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(2):
    optimizer.step()
Path("trained").touch()
if joins:
    total = torch.ones(1)
    dist.all_reduce(total)
    print("ranks", total.item(), flush=True)
"""


@pytest.mark.slow
def test_a_script_without_a_session(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITHOUT)
    on_two = ("script.py", "--devices", "cpu,cpu")
    run(*LOCKSTEP, "verify", *on_two, cwd=tmp_path, code=2)
    assert not (tmp_path / "trained").exists(), "refused at its first step"
    said = run(*LOCKSTEP, "run", *on_two, cwd=tmp_path, code=2)
    warning, error = re.findall(r"^(?:warning|error): .*lockstep\.Session\b", said, re.MULTILINE)
    assert (warning[:8], error[:6]) == ("warning:", "error:"), "the warning is given once, and first"
    said = run(*LOCKSTEP, "run", *on_two, "--save-dir", "joined", "--", "joins", cwd=tmp_path)
    assert numbers(said, "ranks") == [2.0]
    assert RunDir.open(tmp_path / "joined").read().status == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("other", 2, ("rank 1 gave batches() other data than rank 0", "length")),
        ("fails", 1, ('script.py", line 18', "of the loop")),  # the traceback reaches the line of the script
        # By the hang report, not after distributed.timeout_s.
        ("gathers", 1, ("script.py:16 in <module>, in step", "script.py:20 in <module>, in gather")),
        (
            "evaluates",
            1,
            ("0 all_reduce() of float32 [1] (call 3, script.py:22)", "1 the end of an epoch (call 3, script"),
        ),
    ],
)
def test_what_fails_on_one_rank_is_explained(kind: str, code: int, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ROLLOUTS)
    limit = ("--set", "launch.hang_timeout_s=15")
    said = run(*LOCKSTEP, "run", "script.py", kind, "--devices", "cpu,cpu", *limit, cwd=tmp_path, code=code)
    assert all(word in said for word in words), said


WRAPPED = """
import time
import torch
import lockstep
session = lockstep.Session(global_batch_size=8)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
try:
    for _ in session.epochs(1):
        next(iter(session.batches(torch.ones(8, 1))))
except BaseException:
    time.sleep(session.rank == 0)
    raise
"""


@pytest.mark.slow
def test_an_error_of_all_ranks_is_reported_whichever_ends_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRAPPED)
    said = run(*LOCKSTEP, "run", "script.py", "--devices", "cpu,cpu", cwd=tmp_path, code=2)
    assert "DistributedDataParallel" in said and "model()" in said


@pytest.mark.parametrize(("first", "grown"), [(1, False), (3, True)])
def test_rounding_that_grew_is_a_cause_where_the_first_steps_agree(first: int, grown: bool) -> None:
    far, noise = {"loss": 0.1, "weights": 0.1}, {"loss": 1e-7, "weights": 1e-7}
    found = ScriptReport("script.py", ("cpu", "cpu"), 4, far, noise, first)
    print_script_report(found, text := io.StringIO())
    assert ("rounding that grew" in text.getvalue()) == grown
    assert "--reproducibility exact" in text.getvalue()
    print_script_report(replace(found, reproducibility="exact"), text := io.StringIO())
    assert "--reproducibility" not in text.getvalue(), "the mode that is on is no advice"
