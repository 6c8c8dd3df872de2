"""Programs without Lockstep on two ranks of torchrun."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_train import finish, start

_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
_ABORT = "terminate called without an active exception"


def run(program: Path, *arguments: str, cwd: Path) -> str:
    """What ``program`` prints on its way to exit code 0.

    A thread of torch 2.13 that outlives the process group can abort the interpreter behind a program's last line: once
    in some hundred runs on a busy machine. Ranks of Lockstep leave past that; of a plain program there is another try.
    """
    for _ in range(2):
        process = start(str(program), *arguments, module=_TORCHRUN, cwd=cwd)
        try:
            return finish(process)
        except AssertionError as error:
            if _ABORT not in str(error):
                raise
    return finish(start(str(program), *arguments, module=_TORCHRUN, cwd=cwd))
