"""Completion scripts, in the real shell where it is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.conftest import RunCli, cli_environment


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_verbs_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "evaluate" in script and "early-stopping-patience" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "expected"), [("lockstep tr", "train"), ("lockstep train --early", "--early-stopping-patience")]
)
def test_bash_completes(line: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "lockstep").write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
    (tmp_path / "lockstep").chmod(0o755)
    words = line.split()
    program = f"""
        source {tmp_path}/script
        COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE={line!r}; COMP_POINT={len(line)}
        function_name=$(complete -p lockstep | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        "$function_name" lockstep {words[-1]} {words[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = cli_environment(PATH=f"{tmp_path}:/usr/bin:/bin")
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert expected in result.stdout.split(), result


def test_the_shell_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 0
    assert "complete -c lockstep" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2
    assert "fix: lockstep completion bash" in capsys.readouterr().err


def test_installing_writes_into_the_home(run_cli: RunCli, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    result = run_cli("completion", "bash", "--install", env={"HOME": str(home)})
    assert result.code == 0, result.err
    written = Path(result.out.removeprefix("written to ").split(";")[0])
    assert written.is_relative_to(home) and "lockstep" in written.read_text()


def test_a_home_that_cannot_be_written(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    result = run_cli("completion", "bash", "--install", env={"HOME": str(tmp_path / "home")})
    assert result.code == 2
    assert "cannot be installed" in result.err and "fix:" in result.err
