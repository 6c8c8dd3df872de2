"""Count the modules of Lockstep that calls pass from a command to the first optimizer step, by kind of process.

    python scripts/trace_modules.py                              # lockstep train har --devices cpu,cpu
    python scripts/trace_modules.py train har --devices cpu

Every Python process of the command loads a ``sitecustomize`` that this script writes; it notes the first call of a
function in each module of the package. What runs while a module is imported does not count. A module counts until
every rank has done its first optimizer step (a return from ``STEP``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "lockstep"
#: Module and function whose first return ends the count.
STEP = ("lockstep.engine.optim.step", "apply")
DEFAULT = ("train", "har", "--devices", "cpu,cpu")

HOOK = """
import os, sys, threading, time

folder, package, step = {folder!r}, {package!r}, {step!r}
seen = dict()

def note(line):
    with open(f"{{folder}}/{{os.getpid()}}", "a") as file:
        file.write(f"{{time.time()}} {{line}}\\n")

def importing(frame):
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and name.startswith("lockstep"):
            return True
        frame = frame.f_back
    return False

def watch(frame, event, argument):
    code = frame.f_code
    file = code.co_filename
    if not file.startswith(package):
        return
    module = file[len(package) + 1 : -3].replace("/", ".").removesuffix(".__init__")
    if event == "call" and seen.get(module) != os.getpid() and not importing(frame):
        seen[module] = os.getpid()
        note("module lockstep." + module)
    elif event == "return" and ("lockstep." + module, code.co_name) == step:
        sys.setprofile(None)
        threading.setprofile(None)
        note("step -")

sys.setprofile(watch)
threading.setprofile(watch)
note("process " + " ".join(sys.orig_argv[1:]))
"""


def trace(arguments: list[str], folder: Path) -> None:
    """Run ``lockstep ARGUMENTS`` with every process noting the modules that it passes in ``folder``."""
    hook, notes, run = folder / "hook", folder / "notes", folder / "run"
    for path in (hook, notes):
        path.mkdir()
    text = HOOK.format(folder=str(notes), package=str(PACKAGE), step=STEP)
    (hook / "sitecustomize.py").write_text(text, encoding="utf-8")
    path = [str(hook), str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "lockstep", *arguments, "--save-dir", str(run), "--set", "training.max_steps=2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, check=True)


def kind_of(command: str) -> str:
    """``caller``, ``launcher`` or ``rank``, from a process's command line."""
    for name in ("launcher", "rank", "worker"):
        if f"launch.local.{name} " in command or f"launch.local.train_{name} " in command:
            return name.replace("worker", "rank")
    return "caller"


def passed(notes: Path) -> dict[str, set[str]]:
    """The modules by kind of process, up to the last of the ranks' first steps."""
    rows = [
        (float(time), kind, text, file.name)
        for file in notes.iterdir()
        for time, kind, text in (line.split(" ", 2) for line in file.read_text(encoding="utf-8").splitlines())
    ]
    steps: dict[str, float] = {}
    for time, kind, _, process in sorted(rows):
        if kind == "step":
            steps.setdefault(process, time)
    if not steps:
        raise SystemExit(f"no process returned from {STEP[0]}.{STEP[1]}: correct STEP in {__file__}")
    kinds = {process: kind_of(text) for _, kind, text, process in rows if kind == "process"}
    found: dict[str, set[str]] = defaultdict(set)
    for time, kind, text, process in rows:
        if kind == "module" and time <= max(steps.values()):
            found[kinds.get(process, "forked")].add(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the modules too")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of lockstep; default: " + " ".join(DEFAULT))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-trace-") as folder:
        trace(options.arguments or list(DEFAULT), Path(folder))
        found = passed(Path(folder) / "notes")
    for kind, modules in sorted(found.items()):
        print(f"{kind}: {len(modules)} modules")
    every = set().union(*found.values())
    if options.list:
        for module in sorted(every):
            print(f"  {module} ({', '.join(kind for kind in sorted(found) if module in found[kind])})")
    print(f"{len(every)} modules in {len(found)} kinds of process")


if __name__ == "__main__":
    main()
