"""``lockstep studio`` itself."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import TaskError
from lockstep.studio.settings import offered_tasks
from tests.gloo import heavy_after


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_runs_folder_that_is_a_file(run_cli: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_cli("studio", "--no-browser", "--port", port)
    assert result.code == 2
    assert f"port {port} " in result.err
    (tmp_path / "runs").write_text("a file")
    result = run_cli("studio", "--no-browser", "--port", "0")
    assert result.code in {1, 2}
    assert "Traceback" not in result.err


BROWSER = """#!{python}
import json, os, signal, socket, stat, sys, urllib.parse
door = urllib.parse.unquote(urllib.parse.urlsplit(sys.argv[1]).path)
text = open(door).read()
url = urllib.parse.urlsplit(text.partition('url=')[2].partition('"')[0])
socket.create_connection(("127.0.0.1", url.port)).close()
seen = {{"words": sys.argv[1:], "url": url.geturl(), "mode": stat.S_IMODE(os.stat(door).st_mode)}}
json.dump(seen, open({seen!r}, "w"))
os.kill(os.getppid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_the_browser_is_given_a_private_file_and_finds_a_listener(run_cli: Any, tmp_path: Path) -> None:
    """Every user of the machine can read the words of a command."""
    browser, seen = tmp_path / "browser", tmp_path / "seen.json"
    browser.write_text(BROWSER.format(python=sys.executable, seen=str(seen)))
    browser.chmod(0o700)
    result = run_cli("studio", "--port", "0", env={"BROWSER": str(browser)})
    assert result.code == 130, result.err
    told = json.loads(seen.read_text())
    token = (tmp_path / "runs" / ".studio" / "token").read_text()
    assert token not in " ".join(told["words"])
    assert told["url"] in result.out
    assert told["url"].endswith(f"/#token={token}")
    assert told["mode"] == 0o600
    result = run_cli("studio", "--port", "0", "--new-token", env={"BROWSER": str(browser)})
    assert result.code == 130, result.err
    assert token not in seen.read_text(), "the old token is worth nothing"


def test_tasks_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.touch()
    for text in ("nothing", "missing.py:Task", "os.system(1):x y", f"{file}:Net+", f"{file}:Net+data"):
        with pytest.raises(TaskError) as refused:
            offered_tasks([text])
        assert refused.value.fix
    with pytest.raises(TaskError, match=r"Net.* two\b"):
        offered_tasks([f"{file}:Net+{file}:One", f"{file}:Net+{file}:Two"])
    assert offered_tasks([f"{file}:Net+{file}:One"])[f"{file}:Net"] == f"{file}:One"


@pytest.mark.slow
def test_the_server_loads_no_torch(tmp_path: Path) -> None:
    imports = "import lockstep.studio.server, lockstep.studio.command"
    assert heavy_after({"studio": imports}, tmp_path) == {"studio": ["numpy"]}
