"""Every Python block of the documentation runs, page by page; excerpts are run by the tests of their examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import ROOT, clean_environment

#: An HTML comment ``<!-- before: code -->`` in a page has what its next block takes for granted.
PIECE = re.compile(r"<!-- (excerpt): .*?-->\n```.*?^```|<!-- before:(.*?)-->|^```python[^\n]*\n(.*?)^```", re.M | re.S)
#: docs/start is followed command by command in tests/test_site.py; notebooks.md has no other test.
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text(encoding="utf-8")
    and (page.parent.name != "start" or page.name == "notebooks.md")
    and page.name != "bench.md"  # tests/lab/bench has the profiler
]
#: Pages are forks of a process that has imported what they use, and their ranks are forks of theirs.
RUN = """
import os, runpy, sys, tempfile
import matplotlib
matplotlib.use("agg")
import lightning, matplotlib.pyplot, torch, torchmetrics, lockstep
from lockstep.launch.local.launcher_process import fork_launcher_ahead
failed = 0
for name in sys.argv[1:]:
    folder = tempfile.mkdtemp(dir=".")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for _ in range(8):  # a page starts fewer runs with ranks
            fork_launcher_ahead()
        sys.path.insert(0, "")
        try:
            runpy.run_path(name, run_name="__main__")
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("FAILED", name, file=sys.stderr)
        failed = 1
sys.exit(failed)
"""


def script(page: Path) -> str:
    """All blocks of a page, one after the other."""
    pieces = [
        before or code for excerpt, before, code in PIECE.findall(page.read_text(encoding="utf-8")) if not excerpt
    ]
    return "\n".join(pieces)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_python_block_runs(tmp_path: Path) -> None:
    files = []
    for number, page in enumerate(PAGES):
        files.append(tmp_path / f"page{number}_{page.stem.replace('-', '_')}.py")
        files[-1].write_text(script(page), encoding="utf-8")
    environment = clean_environment(PYTHONPATH=str(ROOT / "src"))
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, files)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
