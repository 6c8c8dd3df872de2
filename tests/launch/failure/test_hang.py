"""When no rank moves: what counts as moving, who is behind, and where."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.failure.hang import HangReport, Standstill
from lockstep.launch.process import rank_log
from tests.gloo import ROOT

WAITING = f"{ROOT}/src/lockstep/engine/strategies/base.py:1 in _backward"


def standstill(rank: int, step: int, *stack: str, ahead: bool = True, doing: str = "step 4") -> Standstill:
    inside = bool(stack) and "/lockstep/" in stack[0]
    return Standstill(rank=rank, step=step, ahead=ahead, doing=doing, stack=stack, in_framework=inside, silent_s=60)


def test_who_is_behind() -> None:
    def behind(*ranks: Standstill) -> list[int]:
        return [rank.rank for rank in HangReport(timeout_s=60, ranks=ranks).behind]

    own = "/home/me/task.py:3 in loss"
    assert behind(standstill(0, 3, WAITING), standstill(1, 3, own)) == [1]
    assert behind(standstill(0, 3, WAITING), standstill(1, 2, WAITING)) == [1]
    assert behind(standstill(0, 3, WAITING, ahead=False), standstill(1, 3, WAITING)) == [0]
    assert behind(standstill(0, 3, WAITING), standstill(1, 3, WAITING)) == []
    assert behind(standstill(0, 3, own), standstill(1, 3, own)) == []
    waiting = standstill(1, 3, WAITING).model_copy(update={"waits_for_data": True})
    assert behind(standstill(0, 3, WAITING), waiting) == [1]
    waiting = standstill(1, 3, WAITING).model_copy(update={"waits_for_save": True})
    assert behind(standstill(0, 3, WAITING), waiting) == [0]
    assert behind(standstill(0, 3, own)) == [0]
    assert behind(standstill(0, 3), standstill(1, 3, WAITING)) == [0]


@given(
    st.lists(
        st.builds(
            Standstill,
            rank=st.integers(0, 9),
            step=st.integers(0, 9),
            doing=st.just("step 4"),
            ahead=st.booleans(),
            waits_for_data=st.booleans(),
            waits_for_save=st.booleans(),
            state=st.sampled_from(["running", "stopped", "blocked"]),
            in_framework=st.booleans(),
            stack=st.sampled_from([(), (WAITING,)]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_report_has_a_headline_a_reason_a_fix_and_every_rank(ranks: list[Standstill]) -> None:
    report = HangReport(timeout_s=60, ranks=tuple(ranks))
    assert report.headline
    assert report.cause.title
    assert report.cause.advice
    assert all(f"rank {rank.rank}" in report.table() for rank in ranks)
    assert HangReport.model_validate(report.model_dump()) == report


def test_the_stack_of_the_thread_that_the_signal_came_to(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        faulthandler.dump_traceback(log)
        log.seek(0)
        stack = rank_log.parse_stack(log.read())
    assert stack[0].function == "test_the_stack_of_the_thread_that_the_signal_came_to"
    assert rank_log.place_of(stack).startswith(f"{__file__}:{stack[0].line} in test_the_stack")
    assert rank_log.parse_stack("nothing") == ()


def test_a_file_whose_name_is_not_ascii(tmp_path: Path) -> None:
    name, scope = f"{tmp_path}/für \U0001f600.py", dict[str, Any]()
    exec(compile("def läuft(log): dump(file=log)", name, "exec"), scope | {"dump": faulthandler.dump_traceback}, scope)
    with (tmp_path / "log").open("w+") as log:
        scope["läuft"](log)
        log.seek(0)
        assert rank_log.parse_stack(log.read())[0] == rank_log.Frame(name, 1, "läuft")


def test_the_users_line_is_the_place() -> None:
    frames = [
        ("/x/site-packages/torch/distributed/distributed_c10d.py", "barrier"),
        ("/x/site-packages/torch/distributed/c10d_logger.py", "wrapper"),
        ("/home/me/task.py", "loss"),
        (f"{ROOT}/src/lockstep/engine/strategies/base.py", "forward"),
        (f"{ROOT}/src/lockstep/launch/api.py", "run_rank"),
        ("<frozen runpy>", "_run_code"),
    ]
    stack = tuple(rank_log.Frame(file, line, function) for line, (file, function) in enumerate(frames, 1))
    assert rank_log.place_of(stack) == "/home/me/task.py:3 in loss, in barrier"
    assert rank_log.place_of(stack[3:]) == f"{frames[3][0]}:4 in forward"
    assert rank_log.own_part(stack) == stack[:4]
