"""Finds every command line of the documents, and says how each is typed by tests.

:data:`ELSEWHERE` has those that cannot run on any machine, each with its reason; tests parse their flags.
:data:`SHORTER` makes the others small enough for CPU ranks.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.gloo import ROOT

#: Where documents are: pages, notebooks, headers of configurations, and docstrings.
PATTERNS = (
    "README.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "examples/**/*.ipynb",
    "examples/**/*.yaml",
    "examples/**/*.py",
    "benchmarks/*.md",
    "benchmarks/*.py",
    "configs/**/*.yaml",
    "scripts/**/*.py",
    "src/lockstep/**/*.py",
)
#: Blocks between fences, and indented ones.
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
#: What follows a command in its line.
REMARK = re.compile(r"\s+#|\s{3,}")
PROGRAM = re.compile(r"(lockstep|python|torchrun|srun|pip|make|source|ray|ssh|curl|scripts/\S+|[A-Z_]+=\S+ \w+) ")
#: What a command that does not run here contains, why, and the test of it, or None.
ELSEWHERE = {
    r"\[OPTIONS\]|\{\w+,|\b[a-z]+\|[a-z]|\b(MODULE|VERB|STEP|DIR|FILE|FOLDER|PATH|JOB|URL|KEY)\b|--gpus N\b|…": (
        "the form of a command",
        "tests/test_guides.py",
    ),
    r"^lockstep \w+ --(?!quick|json|devices)|^lockstep (bench|lightning) \S+$|path arguments$": (
        "flags of a verb, or a verb",
        "tests/test_guides.py",
    ),
    r"^(pip|make) |\.venv|--download|^scripts/gpu/(bundle|install)": ("needs a network", "tests/test_bundle.py"),
    r"^lockstep audit ": ("a script of the reader's", "tests/audit/test_scripts.py"),
    r"^ray |--on ray": ("needs a Ray cluster", "tests/launch/engines/test_ray.py"),
    r"^srun ": ("needs SLURM", "tests/launch/engines/test_slurm.py"),
    r"--nnodes|--nodes 2(?!.*--on (slurm|k8s))": ("needs several nodes", "tests/dist/test_nodes.py"),
    r"^scripts/gpu/check|gpu_workloads|--gpu-ids|--strategy dp\b": ("needs GPUs", "tests/test_gpu_check.py"),
    r"^(ssh|curl) |lockstep studio": ("serves until it is stopped", "tests/studio/test_security.py"),
    r"s3://": ("needs a bucket", "tests/rundir/test_mirror.py"),
    r"lockstep stop": ("needs a run that is training", "tests/cli/test_running.py"),
    r"^python (-m )?(benchmarks|scripts|pace)[./]": ("measures for minutes, or needs files", "tests/benchmarks"),
    r"main(_multi_gpu)?\.py|[ /]train(_\w+)?\.py|test_distributed_setup": ("is the script of another guide", None),
    r"LOCKSTEP_STRATEGIES": ("needs the page's strategy", "tests/test_strategies.py"),
    r"lockstep\.(launch|studio|tasks|lab\.sweep)\.": ("is started by Lockstep itself", None),
}
#: The others run with these replaced: names that stand for something, devices, and lengths.
SHORTER = [
    (r"\s\[[A-Z][^]]*\]+", ""),  # what may be left out
    (r"\bTASK\b", "my_task.py:MyTask"),
    (r"\bRUN RUN\b", "run-1a2b3c4d run-5e6f7a8b"),
    (r"\bRUN\b", "last"),
    (r"--seed S\b", "--seed 1"),
    (r"lockstep sweep (har|my_task.py:MyTask)", "lockstep sweep my_task.py:MyTask --set training.max_steps=2"),
    (r"=(1e-4,3e-4,1e-3|3e-4,1e-3,3e-3)", "=1e-3"),
    (r"--seeds 5", "--seeds 2"),
    (r"--trials 30", "--trials 2"),
    (r"(evaluate|predict|export) last", r"\1 run-5e6f7a8b"),  # on cli.md the last run is a script's
    (r"evaluate run-5e6f7a8b (--data|other)", r"evaluate speech-1 \1"),
    (r"generate last", "generate text-1"),
    (r"transcribe last", "transcribe speech-1"),
    (r"--ckpt_path runs/run-1a2b3c4d", "--ckpt_path runs/lightning-1"),
    (r"predict run-5e6f7a8b other_pictures", "predict images-1 other_pictures"),
    (r"gpu:0,gpu:1,gpu:2,gpu:3|gpu:0,gpu:1|(?<=--devices )all", "cpu,cpu"),
    (r"gpu:0, gpu:1", "cpu, cpu"),
    (r"gpu:\d", "cpu"),
    (
        r"speech --config configs",
        "speech --set task.train_manifest=train.jsonl --set task.val_manifest=val.jsonl --config configs",
    ),
    (r"(--config \S+_gpu.yaml)(?!.*--devices)", r"\1 --devices cpu,cpu --precision 32"),
    (r"--multi-gpu \w+", r"\g<0> --devices cpu,cpu"),
    (r"--nproc[-_]per[-_]node=\d", "--nproc-per-node=2"),
    (r"--on (slurm|k8s)(?!.*--print)", r"\g<0> --print"),
    (r"lockstep (train|run)\b(?!.*--on (slurm|k8s))", r"\g<0> --set training.max_steps=2"),
    (
        r"lockstep train .*max_steps=2 har(?!.*(--data-dir|_gpu.yaml))",
        r"\g<0> --set task.source=synthetic --set task.synthetic_samples=64",
    ),
    (r"max_steps=2 script.py(.*)runs/mine", r"max_steps=3 script.py\1runs/loop"),
    (r"(lockstep verify)(.*?)( --steps \d+)?( -- .*)?$", r"\1 --steps 2\2\4"),
    (r"lockstep bench (step|scaling)(?!.*--warm-up)", r"\g<0> --warm-up 1"),
    (r"lockstep bench (step|scaling)(?!.*--steps)", r"\g<0> --steps 2"),
    (r"lockstep bench scaling(?!.*--repeats)", r"\g<0> --repeats 1"),
    (r"lockstep bench batch-size(?!.*--max-batch)", r"\g<0> --max-batch 64"),
    (r"lockstep bench loader", r"\g<0> --seconds 0.1 --workers 0,1"),
    (r"lockstep bench comm", r"\g<0> --max-mb 1"),
    (r"lockstep forecast(?!.*--gpu )", r"\g<0> --steps 2 --repeats 1"),
    (r"(lockstep (?:verify|memory|forecast) .*?)har(?!.*(?:pipeline|exact))", r"\1my_task.py:MyTask"),
    (r"memory (\S+) --devices \S+(?!.*pipeline)", r"memory \1 --gpus 8"),
    (r"report last run-1a2b", "report last"),
    (r"(forecast .*) --precision \S+", r"\1"),
    (r" text$", " text --set task.data=corpus.txt"),
    (r"export run$", r"\g<0> --no-program"),
    (r"--gpus [\d,]+", "--gpus 8"),
    (r"--max-batch \d+", "--max-batch 64"),
    (r"(--steps|--repeats|--warm-up) \d+", r"\1 2"),
    (r"lockstep bench lr", r"\g<0> --steps 10"),
    (r"--(precisions all|compile|memory \d+GB|interconnect \S+|batch-size \d+)", ""),
    (r"(--devices cpu )?--profile 10:15( --profile-ranks 0,1)?", "--profile 1:2"),
    (r"lightning(_trainer)? fit(?!.*--help)", r"\g<0> --trainer.max_epochs 2"),
]


class Command(NamedTuple):
    """A command of a document; ``is_line``: it has a line of its own, and is not part of a sentence or a table."""

    text: str
    is_line: bool

    @property
    def is_mention(self) -> bool:
        """Whether the text speaks of a program or a verb."""
        words = [word for word in self.text.split() if not word.startswith("-")]
        return not self.is_line and len(words) < (3 if words[0] == "lockstep" else 2)

    @property
    def elsewhere(self) -> str | None:
        """The row of :data:`ELSEWHERE` that the command belongs to."""
        return next((pattern for pattern in ELSEWHERE if re.search(pattern, self.text)), None)

    @property
    def shorter(self) -> str:
        """The command with :data:`SHORTER` applied."""
        text = self.text
        for pattern, replacement in SHORTER:
            text = re.sub(pattern, replacement, text)
        return " ".join(text.split())


def documents() -> list[Path]:
    """Every document, README.md first."""
    paths = dict.fromkeys(path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)))
    return [path for path in paths if commands(path)]


@functools.cache
def commands(document: Path) -> list[Command]:
    """The commands of a document, in order; of a block with prompts, the lines that have one."""
    return list(_commands(re.sub(r"\\\n\s*", " ", _text(document))))


def _commands(text: str) -> Iterator[Command]:
    end = 0
    for block in BLOCK.finditer(text):
        yield from _in_sentences(text[end : block.start()])
        language, fenced, indented = block.groups()
        lines = [line.strip() for line in (fenced or indented).splitlines()]
        prompts = [line[2:] for line in lines if line.startswith("$ ")]
        if language in (None, "", "console"):
            yield from (Command(REMARK.split(line)[0], True) for line in prompts or lines if PROGRAM.match(line + " "))
        end = block.end()
    yield from _in_sentences(text[end:])


def _in_sentences(text: str) -> Iterator[Command]:
    words = (" ".join(code.split()) for code in INLINE.findall(text))
    yield from (Command(code, False) for code in words if PROGRAM.match(code + " "))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module or statement and the statements in it, at any depth: a tenth of the nodes of :func:`ast.walk`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


def _text(document: Path) -> str:
    """The prose of a document, with commands in blocks or between backticks."""
    content = document.read_text(encoding="utf-8")
    if document.suffix == ".ipynb":
        cells = json.loads(content)["cells"]
        prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        shell = re.findall(r"^!(.*)$", "\n".join("".join(cell["source"]) for cell in cells), re.M)
        return "\n\n".join([*prose, *(f"    {line}\n" for line in shell)])
    if document.suffix == ".yaml":
        header = re.findall(r"\A(?:#.*\n)*", content)[0]
        lines = (line.lstrip("# ") for line in header.splitlines())
        return "".join(f"    {line}\n" if PROGRAM.match(line) else f"{line}\n" for line in lines)
    if document.suffix == ".py":
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in statements(ast.parse(content)) if isinstance(node, owners))
        return "\n\n".join(ast.get_docstring(node) or "" for node in nodes).replace("``", "`") + "\n"
    return content
