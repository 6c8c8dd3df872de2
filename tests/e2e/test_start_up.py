"""What a run imports: libraries that take longer than many first steps stay out unless the plan needs them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.e2e.test_train import finish, start

#: Needed by nothing that a built-in task does on CPUs, from the first line to the last.
UNUSED = {"lightning", "matplotlib", "pandas", "scipy", "sklearn", "sympy", "torch._dynamo", "torchmetrics", "wandb"}


@pytest.mark.parametrize(
    ("devices", "processes"),
    [pytest.param("cpu", ["caller"], marks=pytest.mark.drill), ("cpu,cpu", ["0", "1", "caller"])],
)
def test_a_run_imports_nothing_slow_that_it_does_not_use(devices: str, processes: list[str], tmp_path: Path) -> None:
    task = tmp_path / "told.py"
    task.write_text(
        textwrap.dedent(
            """
            import atexit, json, os, sys
            from pathlib import Path
            from lockstep.tasks.har.task import HarTask

            class Told(HarTask):
                pass

            def tell():
                file = Path(__file__).with_name(f"imported-{os.environ.get('RANK', 'caller')}.json")
                file.write_text(json.dumps(sorted(sys.modules)))

            atexit.register(tell)
            """
        )
    )
    finish(start("train", f"{task}:Told", "--devices", devices, "--max-steps", "2", cwd=tmp_path, fresh=True))
    imported = {process: json.loads((tmp_path / f"imported-{process}.json").read_text()) for process in processes}
    assert {process: sorted(UNUSED.intersection(names)) for process, names in imported.items()} == {
        process: [] for process in processes
    }
    assert all("torch" in names for names in imported.values())
