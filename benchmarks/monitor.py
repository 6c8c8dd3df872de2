"""What the monitor costs a node: the processor time of its thread, sampling once a second as beside a training.

    python benchmarks/monitor.py [--seconds 60] [--devices gpu:0,gpu:1] [--json FILE]

Nothing is trained. The share is of one core: what the thread used between its first sample (opening the driver is
before it) and its last, by the time between them; samples go to ``system-0.jsonl`` as those of a run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from report import header, write_json

from lockstep import detect_devices
from lockstep.hardware.monitor import INTERVAL_S
from lockstep.rundir.files import read_jsonl
from lockstep.telemetry.sinks import monitored


def measure(devices: list[str], seconds: float) -> dict[str, Any]:
    """Processor seconds of the monitor's thread, by wall seconds and by sample."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with monitored(folder, devices) as monitor:
            while monitor.cpu_s == 0.0 and monitor.error is None:
                time.sleep(INTERVAL_S / 100)
            begin, begin_cpu = time.monotonic(), monitor.cpu_s
            time.sleep(seconds)
            cpu, wall = monitor.cpu_s - begin_cpu, time.monotonic() - begin
        if monitor.error is not None:
            raise monitor.error
        samples = read_jsonl(folder / "system-0.jsonl")
    return {
        "seconds": round(wall, 1),
        "samples": len(samples) - 2,  # the first began the measurement, the last came after it
        "gpus": len(samples[0]["devices"]),
        "cpu_s": round(cpu, 4),
        "share_of_a_core": round(cpu / wall, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--devices", help="default: all of this machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    devices = options.devices.split(",") if options.devices else [device.id for device in detect_devices()]
    report = {**header(), "interval_s": INTERVAL_S, **measure(devices, options.seconds)}
    print(
        f"{report['cpu_s']:.4f} s of a processor in {report['seconds']:.0f} s, {report['samples']} samples of the host "
        f"and {report['gpus']} GPU(s): {report['share_of_a_core']:.3%} of a core"
    )
    write_json(options.json, report)


if __name__ == "__main__":
    main()
