"""examples/own_loop: the loops of one device and of a session compute the same, and few lines differ."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.gloo import ROOT
from tests.session.scripts import finish, start

FOLDER = ROOT / "examples" / "own_loop"
#: Lines of the session's version that the other one does not have, at most.
MOST = {"classifier": 8, "gan": 11, "simclr": 10, "actor_critic": 12}
#: Runs a script whose DataLoader takes the order of a session with seed 0.
IN_ORDER = """
import runpy, sys, torch
import torch.utils.data as data
import lockstep

class Loader:
    def __init__(self, dataset, batch_size, shuffle):
        self.dataset, self.batch_size, self.epoch = dataset, batch_size, 0

    def __iter__(self):
        indices = lockstep.Order(len(self.dataset), 0).slice(self.epoch, 0, len(self.dataset)).tolist()
        self.epoch += 1
        for start in range(0, len(indices), self.batch_size):
            samples = [self.dataset[i] for i in indices[start : start + self.batch_size]]
            yield data.default_collate(samples)

data.DataLoader = Loader
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
runpy.run_path(sys.argv[1])
"""


def printed(output: str) -> list[float]:
    return [float(word) for line in output.splitlines() if line.startswith("loss ") for word in line.split()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_one_process_and_two_ranks_compute_what_the_original_does(name: str, tmp_path: Path) -> None:
    script, in_order = str(FOLDER / f"{name}_session.py"), tmp_path / "in_order.py"
    in_order.write_text(IN_ORDER)
    commands = (
        (str(in_order), str(FOLDER / f"{name}.py")),
        (script,),
        ("-m", "lockstep", "run", script, "--devices", "cpu,cpu"),
    )
    if name == "gan":  # the window in four parts, too, and in lanes
        parts_of_a_window = ("training.batch_size=16", "training.reproducibility=exact")
        commands = (*commands, *(("-m", "lockstep", "run", script, "--set", setting) for setting in parts_of_a_window))
    expected, alone, ranks, *parts = (
        printed(finish(started)) for started in [start(*c, cwd=tmp_path) for c in commands]
    )
    assert len(expected) >= 3
    assert len(parts) == 2 * (name == "gan")
    assert all(losses == pytest.approx(expected, abs=1e-5) for losses in parts)
    assert alone == pytest.approx(expected, abs=1e-5)
    assert ranks == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", MOST)
def test_few_lines_differ(name: str) -> None:
    versions = [(FOLDER / f"{name}{end}.py").read_text().splitlines()[1:] for end in ("", "_session")]
    changed = [line[2:] for line in difflib.ndiff(*versions) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= MOST[name], changed
