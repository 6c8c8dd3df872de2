"""Find out on a machine with a GPU what works and how fast: one command, one report.

::

    scripts/gpu/check.sh [MINUTES] [--device gpu:0] [--out FOLDER] [--only NAME,...] [--resume] [--list]
    scripts/gpu/check_many.sh [MINUTES]                 # for several cards
    scripts/gpu/check.sh --device cpu --quick           # a dry run without a GPU

Steps run in the order of their importance, each in a process with a time limit, within MINUTES (default 9) in all.
After each step its JSON and Markdown are in FOLDER, with its output, and ``report.md`` has the table so far. A failed
step does not end the check; its row has the command that repeats it. ``--resume`` leaves out what is ``ok`` in FOLDER.
Exit code: 0 all steps that ran are ok, 1 one failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a step may take to end after it was asked to.
GRACE_S = 10.0
#: Seconds before its limit at which a contest ends itself.
END_S = 25.0


@dataclass(frozen=True)
class Step:
    """A command. ``seconds``: its limit; ``json_option``: it writes its results to the file that follows.

    ``ends_itself``: it takes ``--seconds``, after which it ends with what it has found so far.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: float
    json_option: str | None = None
    allowed: tuple[int, ...] = (0,)
    ends_itself: bool = False


@dataclass
class Result:
    name: str
    title: str
    status: str
    command: str
    seconds: float = 0.0
    returncode: int | None = None
    detail: str = ""
    log: str = ""
    report: Any = field(default=None)


def steps_for_one(device: str, quick: bool, out: Path) -> list[Step]:
    """What is checked on one device, most important first."""
    lockstep = (sys.executable, "-m", "lockstep")
    two = f"{device},{device}"
    short = ("--max-steps", "3") if quick else ("--epochs", "5")
    quickly = ("--quick",) if quick else ()
    verify = ("verify", "har", "--devices", two, "--json")
    peers = ("--device", device, "--ranks", "1", "--clip", "on", "--out", str(out / "peers"))
    peers += (
        ("--models", "mlp", "--quick", "--sides", "floor,lockstep") if quick else ("--models", "mlp", "--rounds", "4")
    )
    # Each side of a contest is compiled, which takes up to a minute where nothing is in the compiler's cache.
    limits = {"gpt2": 360.0, "exact": 300.0, "checkpoint": 240.0, "forecast": 240.0}
    contests = (
        "gpt2",
        "har_cnn",
        "exact",
        "vit",
        "resnet50",
        "checkpoint",
        "mlp",
        "har30",
        "lmu_base",
        "lmu_tiny",
    )
    workloads = ("mlp", "checkpoint") if quick else (*contests, "forecast")
    return [
        # First: ranks are forks, which cannot use a GPU that the process before them has asked.
        train("ranks", f"Ranks on {two}", two, out, "--max-steps", "3"),
        Step("devices", "Detection", (*lockstep, "devices", "--json"), 60),
        Step("doctor", "Doctor", (*lockstep, "doctor", "--devices", two, "--json", *quickly), 90),
        # 5: nothing was collected, as where all of a file is skipped
        Step("tests", "Tests with a GPU", pytest_of_gpu(), 300, allowed=(0, 5)),
        train("train_one", f"make train on {device}", device, out, *short),
        train("train_two", f"make train on {two}", two, out, *short),
        Step("verify", "verify, fast", (*lockstep, *verify), 120),
        Step("verify_exact", "verify, exact", (*lockstep, *verify, "--reproducibility", "exact"), 120),
        Step("peers", "Against the peers", (sys.executable, "benchmarks/peers.py", *peers), 120),
        *(
            Step(
                f"workload_{name.replace(' --', '_')}",
                f"Workload {name}",
                (sys.executable, "benchmarks/gpu_workloads.py", *name.split(), "--device", device, *quickly),
                limits.get(name, 180.0),
                "--json",
                ends_itself=name.split()[0] not in ("exact", "checkpoint", "forecast", "har30"),
            )
            for name in workloads
        ),
    ]


def steps_for_many(devices: str, quick: bool, out: Path) -> list[Step]:
    """What needs several cards: NCCL, peer access, every strategy between them."""
    lockstep = (sys.executable, "-m", "lockstep")
    short = ("--max-steps", "3") if quick else ("--epochs", "5")
    on_cpu, few = devices.startswith("cpu"), ("--max-mb", "1") if quick else ()
    strategies = () if quick else ("fsdp",) if on_cpu else ("fsdp", "dp")
    verify = ("verify", "har", "--devices", devices, "--json")
    return [
        train("ranks", f"Ranks on {devices}", devices, out, "--max-steps", "3"),
        Step("devices", "Detection", (*lockstep, "devices", "--json"), 60),
        Step("doctor", "Doctor", (*lockstep, "doctor", "--devices", devices, "--json", *(("--quick",) * quick)), 120),
        Step("comm", "Collectives and links", (*lockstep, "bench", "comm", "--devices", devices, "--json", *few), 120),
        Step("tests", "Tests with GPUs", pytest_of_gpu(), 300, allowed=(0, 5)),
        train("train_ddp", f"DDP on {devices}", devices, out, *short),
        *(
            train(f"train_{name}", f"{name} on {devices}", devices, out, *short, "--strategy", name)
            for name in strategies
        ),
        Step("verify", "verify, fast", (*lockstep, *verify), 180),
        Step("verify_exact", "verify, exact", (*lockstep, *verify, "--reproducibility", "exact"), 180),
        *(
            []
            if quick
            else [Step("scaling", "Scaling", (*lockstep, "bench", "scaling", "har", "--devices", devices), 180)]
        ),
    ]


def pytest_of_gpu() -> tuple[str, ...]:
    """Every test marked gpu; those of parts, which take seconds, before whole runs in ``tests/gpu``."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    marked = sorted(marked, key=lambda path: (path.parent.name == "gpu", path))
    paths = [str(path.relative_to(ROOT)) for path in marked]
    # -v: what an interruption leaves says which tests have passed.
    return (sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", *paths)


def train(name: str, title: str, devices: str, out: Path, *more: str) -> Step:
    """As ``make train`` does. A folder of an earlier check may be there, so runs have their own names."""
    folder = ("--runs-dir", str(out / "runs"))
    return Step(
        name, title, (sys.executable, "-m", "lockstep", "train", "har", "--devices", devices, *folder, *more), 120
    )


def run_step(step: Step, out: Path, limit_s: float) -> Result:
    """Run it for at most ``limit_s``; its output goes to a file."""
    log, report = out / f"{step.name}.log", out / f"{step.name}.report.json"
    report.unlink(missing_ok=True)
    command = [*step.command, *([step.json_option, str(report)] if step.json_option else [])]
    command += ["--seconds", f"{max(5.0, limit_s - END_S):.0f}"] if step.ends_itself else []
    result = Result(step.name, step.title, "failed", shlex.join(step.command), log=log.name)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
    }
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_check,
        )
        try:
            result.returncode = process.wait(timeout=limit_s)
            result.status = "ok" if result.returncode in step.allowed else "failed"
        except subprocess.TimeoutExpired:
            result.status = "timeout"
            result.detail = f"not done after {limit_s:.0f} s"
        finally:  # an interruption of the check, too: nothing is left on the card
            end(process)
    result.seconds = round(time.monotonic() - started, 1)
    text = log.read_text(errors="replace")
    if report.exists():
        result.report = json.loads(report.read_text())
    elif step.command[-1] == "--json" or "--json" in step.command:
        result.report = _json_in(text)
    found = detail_of(result, text)
    result.detail = f"{result.detail}: {found}" if result.detail and found else result.detail or found
    return result


def end_with_check() -> None:
    """In a step: it is asked to end when the check is killed, so that nothing is left on the card (prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a step, all of which are in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=GRACE_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def _json_in(text: str) -> Any:
    """The JSON document of a command; warnings may stand before it."""
    for start in (
        place for place, letter in enumerate(text) if letter in "{[" and text[place - 1 : place] in ("", "\n")
    ):
        try:
            return json.JSONDecoder().raw_decode(text[start:])[0]
        except json.JSONDecodeError:
            continue
    return None


def detail_of(result: Result, text: str) -> str:
    """One line: the ratios of a contest, a verdict, or the last line of the output."""
    report = result.report if isinstance(result.report, dict) else {}
    if "sides" in report:
        own = report["sides"]["lockstep"]
        found = [f"{own.get('per_s', 0):,} {report['unit']}/s"]
        for name, row in report["sides"].items():
            ratio = row["to_lockstep"]["ratio"] if "to_lockstep" in row else None
            found += [] if name == "lockstep" else [f"{name} {'failed' if ratio is None else f'{ratio:.2f} ×'}"]
        return ", ".join(found)
    for key in ("error", "detail", "outcome", "verdict"):
        if isinstance(report.get(key), str):
            return str(report[key])[:300]
    told = re.findall(r"^(test_accuracy|time|samples/s) +(.+?) *$", text, re.MULTILINE)
    if told:
        return ", ".join(f"{name} {value}" for name, value in told)
    if isinstance(report.get("devices"), list):
        return ", ".join(str(device.get("name", device)) for device in report["devices"])
    lines = [line.strip() for line in text.splitlines() if line.strip() and not set(line.strip()) <= set("`{}[]|-= ")]
    return lines[-1][:300] if lines else ""


def write(result: Result, results: Sequence[Result], out: Path, head: dict[str, Any]) -> None:
    """Files of the step, and the table so far."""
    (out / f"{result.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    lines = [
        f"## {result.title}: {result.status}",
        "",
        f"`{result.command}`",
        "",
        f"{result.seconds} s. {result.detail}",
    ]
    if result.log and (out / result.log).exists():
        tail = (out / result.log).read_text(errors="replace").splitlines()[-60:]
        lines += ["", "```", *tail, "```"]
    (out / f"{result.name}.md").write_text("\n".join(lines) + "\n")
    (out / "report.md").write_text(table(results, head))


def table(results: Sequence[Result], head: dict[str, Any]) -> str:
    lines = [f"# Check of {head['device']}, {head['date']}", "", f"{head['machine']}. `{head['command']}`", ""]
    lines += ["| step | result | seconds | |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.title} | {r.status} | {r.seconds:.0f} | {r.detail.replace('|', '/')} |" for r in results]
    again = [result for result in results if result.status != "ok"]
    if again:
        lines += ["", "To repeat what is not ok, in the repository:", ""]
        lines += [f"    {result.command}" for result in again]
    return "\n".join(lines) + "\n"


def machine() -> str:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; c = torch.cuda; print(torch.__version__, torch.version.cuda, "
            "*([c.get_device_name(i) for i in range(c.device_count())] or ['no GPU']), sep=', ')",
        ],
        capture_output=True,
        text=True,
    )
    return f"Python {platform.python_version()}, torch {found.stdout.strip() or 'is missing'}"


#: Prints all GPUs, as ``--device`` takes them.
GPUS = "import lockstep; print(*('gpu:%(index)d' % gpu for gpu in lockstep.get_available_gpus()), sep=',')"


def default_devices() -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, env=environment)
    return done.stdout.strip()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=9.0)
    parser.add_argument("--device", help="gpu:N or cpu; with --many a list. Default: gpu:0, all GPUs")
    parser.add_argument("--many", action="store_true", help="what needs several cards")
    parser.add_argument("--quick", action="store_true", help="the least of each step")
    parser.add_argument("--out", type=Path, help="default: gpu-check/DATE")
    parser.add_argument("--only", help="names of steps, comma-separated")
    parser.add_argument("--resume", action="store_true", help="leave out what is ok in the folder")
    parser.add_argument("--list", action="store_true", help="print steps and commands, and run nothing")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error("MINUTES must be more than 0")
    if options.device is None:
        options.device = (default_devices() or "gpu:0,gpu:1") if options.many else "gpu:0"
    if options.many and "," not in options.device:
        options.device = f"{options.device},{options.device}"
    options.out = (options.out or ROOT / "gpu-check" / f"{date.today()}{'-many' * options.many}").resolve()
    return options


def chosen_steps(options: argparse.Namespace) -> list[Step]:
    make = steps_for_many if options.many else steps_for_one
    steps = make(options.device, options.quick, options.out)
    if options.only is None:
        return steps
    known = {step.name: step for step in steps}
    unknown = [name for name in options.only.split(",") if name not in known]
    if unknown:
        print(f"error: there is no step {unknown[0]}. fix: one of {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    return [known[name] for name in options.only.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through what ends the step
    steps, out = chosen_steps(options), options.out
    if options.list:
        print("\n".join(f"{step.name:20} {step.seconds:4.0f} s  {shlex.join(step.command)}" for step in steps))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.minutes * 60
    head = {"device": options.device, "date": str(date.today()), "machine": machine()}
    head["command"] = shlex.join(["scripts/gpu/check.py", *(sys.argv[1:] if argv is None else argv)])
    results: list[Result] = []
    for step in steps:
        before = out / f"{step.name}.json"
        if options.resume and before.exists() and (known := json.loads(before.read_text()))["status"] == "ok":
            results.append(Result(**known))
            continue
        left = until - time.monotonic() - GRACE_S
        if left < 5:
            results.append(Result(step.name, step.title, "no time", shlex.join(step.command)))
        else:
            print(f"{step.title} ...", end=" ", flush=True)
            results.append(run_step(step, out, min(step.seconds, left)))
            print(f"{results[-1].status} ({results[-1].seconds:.0f} s) {results[-1].detail[:120]}", flush=True)
            if results[-1].status != "ok":
                print(f"    again: {results[-1].command}", flush=True)
        write(results[-1], results, out, head)
    print(f"\n{table(results, head)}\nAll files are in {out}")
    return int(any(result.status in ("failed", "timeout") for result in results))


if __name__ == "__main__":
    sys.exit(main())
