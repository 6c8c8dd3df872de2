"""The same experiment with Lockstep's tasks and sessions and with other trainers; arithmetic says what is right.

::

    pip install -c constraints.txt -e '.[peers]'
    python benchmarks/same_result.py [--json FILE] [--markdown FILE] [--sides lockstep,transformers,…]

On one and two ranks of the CPU, over gloo:

validation     5 samples: how many are counted, and their mean
accumulation   10 micro-batches of 2 at accumulate 4, the last full or of one sample: each sample's weight
tokens         10 micro-batches of 2 sequences of 1 to 8 tokens, padded, at accumulate 1 and 4: each token's weight
resume         24 shuffled samples, a failure after the 3rd of 6 steps or in the second epoch: repeats and losses
1 against 2    96 shuffled samples, global batch 8: the samples and loss of each step, and the final weights

``peers/probe.py`` explains how the weights tell what each sample did. Every trainer is used as its documentation
says; where it documents a setting that bears on the result, that is run too, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peers import verdict
from peers.probe import Job, read_jobs
from peers.verdict import Verdict
from report import header, write_json

SIDES = {
    "lockstep": ("lockstep-train",),
    "session": ("lockstep-train",),
    "lightning": ("lightning", "torchdata"),
    "accelerate": ("accelerate", "torchdata"),
    "transformers": ("transformers", "accelerate"),
}
SEEDABLE, STATEFUL = "use_seedable_sampler=True", "use_stateful_dataloader=True"
COUNTED = "num_items_in_batch"
#: What each trainer is run with, by question.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lockstep": {
        "validation": ("default",),
        "accumulation": ("default",),
        "tokens": ("default",),
        "resume": ("default",),
        "equal": ("default", "reproducibility=exact"),
    },
    "session": dict.fromkeys(("validation", "accumulation", "tokens", "resume", "equal"), ("default",)),
    "lightning": {
        "validation": ("default", "use_distributed_sampler=False"),
        "accumulation": ("default",),
        "tokens": ("default",),
        "resume": ("default", "StatefulDataLoader", "StatefulDataLoader, StatefulDistributedSampler"),
        "equal": ("default",),
    },
    "accelerate": {
        "validation": ("default", "gather"),
        "accumulation": ("default", "variable-size guide", "variable-size guide, even_batches=False"),
        "tokens": ("default", "variable-size guide"),
        "resume": ("default", SEEDABLE, STATEFUL, f"{STATEFUL}, {SEEDABLE}"),
        "equal": ("default", f"split_batches=True, {SEEDABLE}"),
    },
    "transformers": {
        "validation": ("default",),
        "accumulation": ("default", COUNTED),
        "tokens": ("default", COUNTED, f"{COUNTED}, average_tokens_across_devices=False"),
        "resume": ("default",),
        "equal": ("default",),
    },
}
#: What goes on with another number of ranks: of the ways that resume rightly on the same number, the first.
ON_OTHER_RANKS = {
    "lockstep": "default",
    "session": "default",
    "lightning": "StatefulDataLoader, StatefulDistributedSampler",
    "accelerate": SEEDABLE,
    "transformers": "default",
}
ACCUMULATE, BATCH, MICRO_BATCHES = 4, 2, 10
RESUME_SAMPLES, RESUME_BATCH, RESUME_STOPS = 24, 4, (3, 9)
EQUAL_SAMPLES, EQUAL_BATCH = 96, 8


def jobs_of(side: str, folder: Path) -> Iterator[Job]:
    """Everything one trainer has to do. A job that resumes comes after the one that it resumes."""
    for kind, variants in VARIANTS[side].items():
        for variant in variants:
            for ranks in (1, 2):
                yield from _jobs(kind, variant, ranks, folder / side)
    for stop in RESUME_STOPS:
        for before, after in ((1, 2), (2, 1)):
            yield from _interrupted(ON_OTHER_RANKS[side], before, after, stop, folder / side)


def _jobs(kind: str, variant: str, ranks: int, folder: Path) -> Iterator[Job]:
    if kind == "validation":
        yield _job(folder, kind, variant, ranks)
    elif kind == "accumulation":
        full = MICRO_BATCHES * BATCH * ranks
        for samples in (full, full - 1):
            what = "full" if samples == full else "ragged"
            yield _job(folder, kind, variant, ranks, what, samples=samples, batch=BATCH, accumulate=ACCUMULATE)
    elif kind == "tokens":
        for accumulate in (1, ACCUMULATE):
            sizes = {"samples": MICRO_BATCHES * BATCH * ranks, "batch": BATCH, "accumulate": accumulate}
            yield _job(folder, kind, variant, ranks, str(accumulate), **sizes)
    elif kind == "resume":
        for stop in RESUME_STOPS:
            yield from _interrupted(variant, ranks, ranks, stop, folder)
    else:
        yield _job(folder, kind, variant, ranks, samples=EQUAL_SAMPLES, batch=EQUAL_BATCH // ranks, shuffle=True)


def _interrupted(variant: str, before: int, after: int, stop: int, folder: Path) -> Iterator[Job]:
    """A training that fails after step ``stop``, and the one that goes on with it, maybe on other ranks."""
    for ranks, resume in ((before, False), (after, True)):
        yield Job(
            f"resume/{variant}/{before}-{after}/{stop}/{'second' if resume else 'first'}",
            "resume",
            variant,
            ranks,
            samples=RESUME_SAMPLES,
            batch=RESUME_BATCH // ranks,
            epochs=-(-stop * RESUME_BATCH // RESUME_SAMPLES),
            shuffle=True,
            stop_after=stop,
            resume=resume,
            folder=str(folder / f"resume-{variant}-{before}-{after}-{stop}"),
        )


def _job(folder: Path, kind: str, variant: str, ranks: int, *more: str, **settings: Any) -> Job:
    name = "/".join((kind, variant, str(ranks), *more))
    return Job(name, kind, variant, ranks, **settings, folder=str(folder / name.replace("/", "-")))


def run_side(side: str) -> dict[str, Any]:
    """All jobs of one trainer; results by job name. Resuming happens in fresh processes."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = sorted(jobs_of(side, Path(folder)), key=lambda job: (job.resume, job.ranks))
        for job in jobs:
            Path(job.folder).mkdir(parents=True, exist_ok=True)
        # Lockstep starts its ranks itself.
        for key, group in groupby(jobs, key=lambda job: (job.resume, 1 if side == "lockstep" else job.ranks)):
            results |= _in_processes(side, key[1], list(group), Path(folder))
    return results


def _in_processes(side: str, ranks: int, jobs: list[Job], folder: Path) -> dict[str, Any]:
    todo, out = folder / "jobs.json", folder / "results.json"
    todo.write_text(json.dumps([job.as_dict() for job in jobs]))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--jobs", str(todo), "--side", side, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")))
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{side} on {ranks} rank(s) failed:\n{done.stdout}{done.stderr}")
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def work(side: str, todo: Path, out: Path) -> None:
    """Body of a process that :func:`_in_processes` started: one rank of every job."""
    module = importlib.import_module(f"peers.{side}_side")
    results = {}
    for job in read_jobs(todo):
        with contextlib.redirect_stdout(io.StringIO()):
            results[job.name] = module.run(job)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        gc.collect()  # models that still hold the process group would outlive it and abort the process at its end
        torch.distributed.destroy_process_group()


def judge(side: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table."""
    rows: list[dict[str, Any]] = []

    def add(question: str, ranks: str, variant: str, found: Verdict) -> None:
        rows.append({"question": question, "ranks": ranks, "side": side, "variant": variant, **found._asdict()})

    for name, result in results.items():
        kind, variant, ranks, *more = name.split("/")
        if kind == "validation":
            add("validation", ranks, variant, verdict.validation(result))
        elif kind == "accumulation":
            add(f"accumulation, last micro-batch {more[0]}", ranks, variant, verdict.accumulation(result))
        elif kind == "tokens":
            add(f"tokens, accumulate {more[0]}", ranks, variant, verdict.accumulation(result, "token"))
        elif kind == "resume" and more[1] == "first":
            second, stop = results[name.replace("/first", "/second")], int(more[0])
            question = f"resume in epoch {-(-stop * RESUME_BATCH // RESUME_SAMPLES)}"
            add(question, ranks.replace("-", " → "), variant, verdict.resume(result, second, stop, RESUME_BATCH))
        elif kind == "equal" and ranks == "1":
            add("1 rank against 2", "1, 2", variant, verdict.equal(result, results[f"equal/{variant}/2"]))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, which a terminal shows well enough."""
    lines = ["| question | ranks | trainer | used as | observed | right |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        right = "yes" if row["right"] else "**no**"
        cells = (row["question"], row["ranks"], row["side"], row["variant"], row["observed"], right)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def versions(sides: list[str]) -> dict[str, str]:
    try:
        return {package: version(package) for side in sides for package in SIDES[side]}
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: pip install -c constraints.txt -e '.[peers]'") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", default=",".join(SIDES), help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    # What a process of this script is started with by itself.
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work(options.side, options.jobs, options.out)
        return
    sides = options.sides.split(",")
    report: dict[str, Any] = {**header(), "versions": versions(sides)}
    rows = [row for side in sides for row in judge(side, run_side(side))]
    rows.sort(key=lambda row: (row["question"], row["ranks"]))
    print(table(rows))
    write_json(options.json, {**report, "rows": rows})
    if options.markdown:
        head = f"{report['date']}, {report['machine']}, torch {report['torch']}, "
        head += ", ".join(f"{package} {number}" for package, number in report["versions"].items())
        options.markdown.write_text(f"{head}\n\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
