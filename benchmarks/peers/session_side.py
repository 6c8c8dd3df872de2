"""The experiment in a loop with ``lockstep.Session``, as docs/own-loop.md writes it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

import lockstep
from peers.probe import LR, SEED, VALIDATION_BATCH, Diary, Job, Probe, Samples, Stopped, Values, subject


def run(job: Job) -> dict[str, Any]:
    settings = {"checkpoint.every_steps": job.stop_after, "telemetry.progress": "silent", "training.threads": 1}
    diary, (model, samples) = Diary(), subject(job.kind, job.samples)
    with (
        contextlib.suppress(Stopped),
        lockstep.Session(
            settings,
            batch_size=job.batch,
            grad_accum_steps=job.accumulate,
            seed=SEED,
            save_dir=Path(job.folder) / "run",
            resume=job.resume,
        ) as session,
    ):
        if job.kind == "validation":
            rows = session.evaluate(Values(), lambda batch: batch, batch_size=VALIDATION_BATCH)
            values = torch.cat([row for (row,) in rows])
            return {"count": len(values), "mean": values.mean().item()}
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        _train(session, job, model, samples, optimizer, diary)
    return diary.result(model)


def _train(session: lockstep.Session, job: Job, model: Probe, samples: Samples, optimizer: Any, diary: Diary) -> None:
    total, count = 0.0, 0
    for epoch in session.epochs(job.epochs):
        for batch in session.batches(samples):
            if job.stop_after == session.step_count and not job.resume:
                raise Stopped
            losses = model(batch)
            session.backward(losses.sum(), count=len(losses))
            total, count = total + losses.sum().item(), count + len(losses)
            if session.step(optimizer):
                loss = session.all_reduce(total) / session.all_reduce(float(count))
                diary.note(session.step_count + 1, epoch, loss, model)
                total, count = 0.0, 0
    if job.stop_after and not job.resume and job.stop_after == session.step_count:
        raise Stopped
