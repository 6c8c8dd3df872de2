"""``lockstep studio`` itself."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.test_architecture import heavy_after


def test_a_port_that_is_taken_and_tasks_that_are_none(run_cli: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_cli("studio", "--no-browser", "--port", port)
    assert result.code == 2
    assert f"port {port} is taken" in result.err
    for task in ("nothing", "missing.py:Task", "os.system(1):x y"):
        result = run_cli("studio", "--no-browser", "--task", task)
        assert result.code == 2, task
        assert "fix:" in result.err
        assert "Traceback" not in result.err
    (tmp_path / "runs").write_text("a file")
    result = run_cli("studio", "--no-browser", "--port", "0")
    assert result.code in {1, 2}
    assert "Traceback" not in result.err


def test_the_server_loads_no_torch() -> None:
    assert heavy_after("import lockstep.studio.server, lockstep.cli.studio") == []
