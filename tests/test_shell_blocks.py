"""Every shell command of README and docs runs, shortened, on CPU ranks; ``ELSEWHERE`` has the others and their tests.

Those of most pages are drills.

Commands within a sentence or a table are parsed, not run, in ``tests/test_guides.py``.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.gloo import ROOT, clean_environment

#: docs/start is followed command by command, with its output, in tests/test_site.py.
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "start")]
PAGES.sort(key=lambda page: (page.name == "cli.md", page.name != "README.md", page))
#: Blocks between fences, and indented ones.
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", re.M | re.S)
PROGRAM = re.compile(r"(lockstep|python|torchrun|srun|pip|make|source|ray|ssh|curl|scripts/\S+|[A-Z_]+=\S+ \w+) ")
#: What a command that does not run here contains, why, and the test of it, or None.
ELSEWHERE = {
    r"\[OPTIONS\]|\[DATA\]|\{\w+,": ("the form of a command", "tests/test_guides.py"),
    r"^(pip|make) |\.venv": ("installs", "tests/test_makefile.py"),
    r"completion ": ("changes the shell", "tests/cli/test_completion.py"),
    r"^ray ": ("Ray is not installed; the page says where it was tried", None),
    r"^srun ": ("needs SLURM", "tests/launch/slurm"),
    r"^torchrun .*doctor": ("starts its own interpreters", "tests/lab/doctor/test_doctor.py"),
    r"^torchrun .*--nnodes|^TORCH_": ("needs several nodes", "tests/dist/test_nodes.py"),
    r"--nodes 2(?!.*(--on slurm|--print))": ("needs several nodes", "tests/dist/test_nodes.py"),
    r"^torchrun .*script.py": ("starts its own interpreters", "tests/session/test_run.py"),
    r"^torchrun .*train": ("starts its own interpreters", "tests/e2e/test_train.py"),
    r"^(ssh|curl) |lockstep studio": ("serves until it is stopped", "tests/studio/test_security.py"),
    r"^scripts/gpu/(bundle|install)": ("downloads wheels", "tests/test_bundle.py"),
    r"^scripts/gpu/check|gpu_workloads": ("needs a GPU", "tests/test_gpu_check.py"),
    r"^lockstep lightning |my_file\.py:MyModule": ("imports Lightning, for seconds", "tests/lightning/test_cli.py"),
    r"lockstep (transcribe|\w+ speech)|speech |evaluate voice": (
        "makes speech for a minute",
        "tests/e2e/test_speech.py",
    ),
    r"=pictures|other_pictures": ("needs folders of images", "tests/recipes/test_images.py"),
    r"configs/har/two_gpu": ("needs two GPUs", "tests/tasks/test_har_configs.py"),
    r"--data-dir": ("needs data of the reader", "tests/tasks/test_har_tensors.py"),
    r"lockstep bench (loader|comm|scaling|batch-size|lr)": ("measures for longer", "tests/lab/bench/test_bench.py"),
    r"report .*bench-|--tokens": ("needs a run that another page has made", "tests/lab/report"),
    r"lockstep stop": ("needs a run that is training", "tests/cli/test_running.py"),
    r"--interconnect measured": ("measures for longer", "tests/lab/forecast"),
    r"lockstep doctor(?! --quick)": ("starts several trainings", "tests/lab/doctor/test_doctor.py"),
}
#: The others run with these replaced: names that stand for something, devices, and lengths.
SHORTER = [
    (r"\s+#.*", ""),
    (r"\bTASK\b", "my_task.py:MyTask"),
    (r"\bRUN RUN\b", "last my-run"),
    (r"\bRUN\b", "last"),
    (r"(evaluate|predict|export) last", r"\1 run-5e6f7a8b"),  # on cli.md the last run is a script's
    (r"gpu:0,gpu:1,gpu:2,gpu:3|gpu:0,gpu:1|(?<=--devices )all", "cpu,cpu"),
    (r"gpu:\d", "cpu"),
    (r"--on slurm(?!.*--print)", "--on slurm --print"),
    (r"lockstep (train|run)\b(?!.*--on slurm)", r"\g<0> --set training.max_steps=2"),
    (r"lockstep train .*max_steps=2 har", r"\g<0> --set task.source=synthetic --set task.synthetic_samples=64"),
    (r"max_steps=2 script.py(.*)runs/mine", r"max_steps=3 script.py\1runs/loop"),
    (r"(lockstep verify)(.*?)( --steps \d+)?$", r"\1 --steps 2\2"),
    (r"lockstep bench step", r"\g<0> --steps 2 --warm-up 1"),
    (r"lockstep forecast(?!.*--gpu )", r"\g<0> --steps 2 --repeats 1"),
    (r"(lockstep (?:verify|memory|forecast) .*?)har(?!.*(?:pipeline|exact))", r"\1my_task.py:MyTask"),
    (r"memory (\S+) --devices \S+(?!.*pipeline)", r"memory \1 --gpus 8"),
    (r"report last run-1a2b", "report last"),
    (r"(forecast .*) --precision \S+", r"\1"),
    (r" text$", " text --set task.data=corpus.txt"),
    (r"export run$", r"\g<0> --no-program"),
    (r"--gpus [\d,]+", "--gpus 8"),
    (r"--(max-batch \d+|precisions all|compile|memory \d+GB|interconnect \S+|batch-size \d+)", ""),
    (r"(--devices cpu )?--profile 10:15( --profile-ranks 0,1)?", "--profile 1:2"),
]


def shell_commands(page: Path) -> Iterator[str]:
    """The commands of a page's blocks; of a block with prompts, the lines that have one."""
    for language, fenced, indented in BLOCK.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        lines = [line.strip() for line in (fenced or indented).splitlines()]
        prompts = [line[2:] for line in lines if line.startswith("$ ")]
        if language in ("", "console"):
            yield from (" ".join(line.split()) for line in prompts or lines if PROGRAM.match(line))


def covered(command: str) -> str | None:
    """The row of ``ELSEWHERE`` that ``command`` belongs to."""
    return next((pattern for pattern in ELSEWHERE if re.search(pattern, command)), None)


def shorter(command: str) -> str:
    """``command`` with ``SHORTER`` applied."""
    for pattern, replacement in SHORTER:
        command = re.sub(pattern, replacement, command)
    return " ".join(command.split())


def planned(command: str) -> str:
    """A training with other settings whose run no later command reads: ``plan`` reads these settings, too."""
    return re.sub(r"lockstep train (?!.*(--save-dir|--resume|--profile|--on| text ))", "lockstep plan ", command)


#: The commands of each page that no page before it has; those of README.md, the first page, train.
RUN: dict[Path, list[str]] = {}
for _page in PAGES:
    _seen = set(itertools.chain(*RUN.values()))
    _own = dict.fromkeys(shorter(line) for line in shell_commands(_page) if not covered(line))
    _own = dict.fromkeys(map(planned, _own)) if RUN else _own
    RUN[_page] = [line for line in _own if line not in _seen]


#: What the pages name, and the page whose first block it is.
FILES = {
    "my_task.py": "README.md",
    "script.py": "docs/own-loop.md",
    "line.py": "docs/how-to/streams.md",
    "fine_tune.py": "docs/how-to/from-hugging-face.md",
}
#: As the command line, with ranks that are forks of it also where evaluate and predict start them.
MAIN = """
import os, sys
from lockstep.__main__ import main
from lockstep.launch.local.fork_server import fork_server_here
from lockstep.launch.process.environment import set_defaults
set_defaults(os.environ)
fork_server_here()
sys.exit(main())
"""


def run(command: str, folder: Path) -> None:
    """Run ``command`` in a fork of a process that has imported torch; it has to succeed."""
    program, *arguments = shlex.split(command)
    assert program in ("lockstep", "python")
    if program == "lockstep":
        arguments = ["-c", MAIN, *arguments]
    environment = clean_environment(PYTHONPATH=str(ROOT / "src"), COLUMNS="150")
    process = commands.start(*arguments, cwd=folder, env=environment, merged=True, script=True)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, f"{command}\n{output}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and runs that the pages name."""
    folder = tmp_path_factory.mktemp("pages") / "folder"
    folder.mkdir()
    for name, page in FILES.items():
        block = re.search(r"```python[^\n]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
        assert block
        (folder / name).write_text(block[1], encoding="utf-8")
    (folder / "two_gpu.yaml").write_text("training: {batch_size: 64}")
    (folder / "corpus.txt").write_text("One word after the other. " * 4000)
    for name in ("run-1a2b3c4d", "run-5e6f7a8b"):
        run(f"lockstep train my_task.py:MyTask --devices cpu --max-steps 3 --save-dir runs/{name}", folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem in ("README", "own-loop") else pytest.mark.drill)
        for page, lines in RUN.items()
        if lines
    ],
    ids=lambda page: page.stem,
)
def test_commands_run(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(prepared, folder, symlinks=True)
    steps = itertools.count(4)
    for command in RUN[page]:  # each resume has a step to take
        run(re.sub("lockstep resume", f"\\g<0> --set training.max_steps={next(steps)}", command), folder)


def test_what_does_not_run_is_said() -> None:
    used = {covered(line) for page in PAGES for line in shell_commands(page)}
    assert used == {*ELSEWHERE, None}, "rows without a command"
    assert all(test is None or (ROOT / test).exists() for _, test in ELSEWHERE.values())
    assert sum(map(len, RUN.values())) > 50
