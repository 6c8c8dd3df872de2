"""One rank of one contestant: ``python -m pace.worker WORKLOAD``."""

from __future__ import annotations

import importlib
import sys

import torch

from pace.workload import read_workload


def main() -> None:
    torch.set_num_threads(1)
    workload = read_workload(sys.argv[1])
    side = workload.side.rstrip("012")  # loader processes, in the contest of data sets
    home = f"{side}_side" if side in ("lightning", "fabric", "accelerate", "transformers", "lockstep") else "by_hand"
    importlib.import_module(f"pace.{home}").run(workload)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
