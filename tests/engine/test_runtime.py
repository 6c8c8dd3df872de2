"""Memory that a step frees serves the next one, and goes back to the system at the end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, os, random, resource, torch
from pathlib import Path
from lockstep.engine.runtime import kept_memory

dice = random.Random(0)
sizes = [dice.randrange(1, 30) << 18 for _ in range(12)]

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        held = [torch.ones(size) for size in sizes]
        dice.shuffle(held)
        while held:
            held.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

ctypes.CDLL(None).mallopt(-3, 128 * 1024)  # else the beginning depends on what was freed before
found = {"usual": faults(2)}
os.environ["MALLOC_TOP_PAD_"] = "0"
with kept_memory():
    found |= {"users": faults(2)}
del os.environ["MALLOC_TOP_PAD_"]
with kept_memory():
    faults(3)
    found |= {"kept": faults(2), "held": resident()}
print(json.dumps(found | {"left": resident()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_step_finds_the_memory_of_the_one_before_unless_the_user_has_set_something_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={})
    found = json.loads(done.stdout)
    assert found["users"] > found["usual"] / 2, "the user's own setting holds"
    assert found["kept"] < found["usual"] / 5
    assert found["left"] < found["held"] - 100e6
