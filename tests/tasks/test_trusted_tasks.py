"""A class that only a file names is not imported; one that the user has named is."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.tasks.trusted_tasks import remember
from tests.conftest import RunCli
from tests.gloo import ROOT

IMPORTS = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

TASK = """
from pathlib import Path
from tests.toys import Toy
Path({canary!r}).touch()
class Mine(Toy):
    pass
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASK.format(canary=str(tmp_path / "canary")))
    return f"{tmp_path / 'mine.py'}:Mine"


def test_a_class_in_a_file_needs_to_have_been_named_by_the_user(run_cli: RunCli, tmp_path: Path, task: str) -> None:
    (tmp_path / "config.yaml").write_text(f"task:\n  name: {task}\n")
    canary = tmp_path / "canary"
    stranger = {"XDG_STATE_HOME": str(tmp_path / "stranger"), **IMPORTS}
    own = {"XDG_STATE_HOME": str(tmp_path / "own"), **IMPORTS}

    refused = run_cli("plan", "--config", "config.yaml", env=stranger)
    assert (refused.code, "lockstep plan" in refused.err, canary.exists()) == (2, True, False)
    trained = run_cli("train", task, "--config", "config.yaml", "--max-steps", "2", "--save-dir", "run", env=own)
    assert trained.code == 0, trained.err
    assert run_cli("plan", "--config", "config.yaml", env=own).code == 0, "once named, a file may name it too"
    assert run_cli("evaluate", "run", "--split", "val", env=own).code == 0

    canary.unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "sent", symlinks=True)
    for verb in (["resume", "sent"], ["evaluate", "sent"], ["export", "sent"], ["transcribe", "sent", "x.wav"]):
        refused = run_cli(*verb, env=stranger)
        assert refused.code == 2, verb
        assert "which you have not trained on this machine" in refused.err, verb
        assert "Traceback" not in refused.err
        assert not canary.exists(), verb
    assert run_cli("show", "sent", env=stranger).code == 0, "looking at a run needs none of its code"


def test_the_fix_for_an_unknown_module_and_its_data_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "lightning" / "own.py", folder / "theirs.py")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    module, data = (f"{folder / 'theirs.py'}:{name}" for name in ("Classifier", "Numbered"))
    Path("config.yaml").write_text(f"task:\n  name: {module}\n  datamodule: {data}\n")
    remember({module})
    assert main(["plan", "--config", "config.yaml"]) == 2
    fix = capsys.readouterr().err.partition("say so once: ")[2].strip()
    assert shlex.split(fix) == ["lockstep", "plan", module, "--set", f"task.datamodule={data}"]
    assert main([*shlex.split(fix)[1:], "--config", "config.yaml"]) == 0, "what the command line names is named"
    assert main(["plan", "--config", "config.yaml"]) == 0, "and remembered"
    assert main(["plan", data]) == 2
    assert f"--set task.datamodule={data}" in capsys.readouterr().err, "alone it is no task"
