"""Signs of progress from one process, read by another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.telemetry.progress_board import PULSES, Activity, Pulse, PulseBoard, Sign
from tests.gloo import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

RANK = """
import os
from lockstep.telemetry.progress_board import Activity, pulse
pulse.connect(os.environ)
pulse.at(Activity.FIRST_STEP, 4)
pulse.at(Activity.WAITING_FOR_DATA)
pulse.at(Activity.STEP)
assert pulse.activity is Activity.FIRST_STEP, "the first step lasts until something else begins"
pulse.at(Activity.HOOKS, 5)
pulse.at(Activity.STEP)
with pulse.during(Activity.SAVING):
    pulse.goes_on()
    pulse.writes_in(41)
"""


def test_a_rank_is_seen_by_its_launcher() -> None:
    board = PulseBoard(3)
    try:
        assert board.read() == [Sign()] * 3
        environ = {**os.environ, PULSES: board.path, "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT / "src")}
        subprocess.run([sys.executable, "-c", RANK], env=environ, check=True)
        assert board.read() == [Sign(), Sign(8, 5, Activity.STEP, 41), Sign()]
        board.clear()
        assert board.read() == [Sign()] * 3
    finally:
        board.close()


def test_nobody_is_told_where_nobody_watches() -> None:
    pulse = Pulse()
    pulse.connect({})
    pulse.connect({PULSES: "/proc/0/fd/0"})
    pulse.at(Activity.STEP, 3)
    assert not pulse.is_watched


def test_every_activity_has_words() -> None:
    assert Activity.STEP.phrase(3) == "step 4"
    assert Activity.WAITING_FOR_DATA.phrase(3) == "step 4, waiting for data"
    assert Activity.HOOKS.phrase(3) == "hooks and logging after step 3"
    assert all(activity.phrase(0) for activity in Activity)
