"""The command line of `lockstep audit`: its forms, bad input, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.audit.launcher import Script, read_command
from lockstep.errors import UsageError
from tests.conftest import RunCli

SCRIPTS = Path(__file__).with_name("scripts")
BAD = {
    "TASK_NOT_USABLE": ("raise ValueError('of the script')", "ValueError: of the script"),
    "NOT_SUPPORTED": ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)", "script.py:2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", BAD)
def test_script_that_cannot_be_judged(code: str, run_cli: RunCli, tmp_path: Path) -> None:
    source, shown = BAD[code]
    (tmp_path / "script.py").write_text(f"import torch\n{source}\n".replace("import torch\nimport", "import"))
    result = run_cli("audit", "--ranks", "1", "script.py", fresh=True)
    assert result.code == 2
    assert shown in result.err
    assert result.out == ""


def test_report_and_exit_code(run_cli: RunCli, tmp_path: Path) -> None:
    """One run of a faulty script on one rank, through `torchrun`: JSON, Markdown, `--fail-on`.

    Its process aborts while the interpreter ends, after the script, as with a process group that is not destroyed.
    """
    script = tmp_path / "train.py"
    source = (SCRIPTS / "ddp_no_zero_grad.py").read_text(encoding="utf-8")
    script.write_text(f"import atexit\nimport os\n\natexit.register(os.abort)\n{source}", encoding="utf-8")
    shutil.copy(SCRIPTS / "common.py", tmp_path)
    options = ("--ranks", "1", "--fail-on", "never", "--json", "report.json", "--markdown", "report.txt")
    result = run_cli("audit", *options, "--", "torchrun", "--nproc_per_node", "4", script, fresh=True)
    assert result.code == 0, result.err
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["ranks"] == [1]
    assert [finding["code"] for finding in report["findings"]] == ["AUDIT_ZERO_GRAD"]
    assert report["findings"][0].keys() == {"code", "severity", "file", "line", "message", "evidence", "fix"}
    rows = report["steps"]["1"]
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert [row["samples"] for row in rows] == [4] * 16
    assert {row["lr"] for row in rows} == {0.01}
    assert all(row["grad_norm"] > 0 and row["loss"] > 0 for row in rows)
    text = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "AUDIT_ZERO_GRAD" in text


def test_forms_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    plain = Script((str(script), "--lr", "1"), "train.py")
    words = [str(script), "--lr", "1"]
    assert read_command(words[0], words[1:], is_module=False) == plain
    assert read_command("torchrun", ["--nproc_per_node=2", *words], is_module=False) == plain
    assert read_command("accelerate", ["launch", "--cpu", "--num_processes", "2", *words], is_module=False) == plain
    assert read_command("package.module", ["--lr", "1"], is_module=True).words == ("-m", "package.module", "--lr", "1")
    module = Script(("-m", "package.module", "--lr", "1"), "package.module")
    assert read_command("torchrun", ["--nproc_per_node", "2", *module.words], is_module=False) == module
    with pytest.raises(UsageError):
        read_command(str(tmp_path / "missing.py"), [], is_module=False)


OWN_ITERATOR = """
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

class Batches(_BaseDataLoaderIter):
    def __init__(self):  # without that of torch
        self.left = 4

    def _next_data(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.ones(4, 2)

    _profile_name, _sampler_iter, _num_yielded = "batches", (), 0
    _dataset_kind, _IterableDataset_len_called = None, None

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in Batches():
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_an_iterator_made_without_torchs_constructor_is_left_alone(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_ITERATOR)
    result = run_cli("audit", "--ranks", "1", "--json", "report.json", "train.py", fresh=True)
    assert result.code == 0, result.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"] == []
    assert [row["samples"] for row in next(iter(report["steps"].values()))] == [None] * 4
