"""A studio on a machine with three GPUs that are not there, in a process of its own.

``python -m tests.browser.gpus FOLDER`` prints its address and ends when its input does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hardware.machines import gpu, machine
from tests.studio.serving import TOY, studio

DEVICES = [*machine(2), gpu(2, precisions=("32", "16-mixed"))]

if __name__ == "__main__":
    with studio(Path(sys.argv[1]), DEVICES, tasks=[TOY]) as address:
        print(address.url, flush=True)
        sys.stdin.read()
