"""On the ranks: the time of one device's step, alone on the machine or with others that do the same."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.bench.rank import Rank
from lockstep.bench.summary import summarise
from lockstep.bench.timing import Site, Stopwatch, on_site, training
from lockstep.bench.trials import TIMEOUT_S, Case
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import Group, all_gather_rows, between
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.hardware.world import World

#: Messages in a forward by which it is measured what one costs ranks that share cores.
MEETINGS = 8
#: Steps in which the arrival of every single gradient is noted; the notes cost time, so these are not the timed ones.
WATCHED = 8
_ARRIVAL = "gradient of "


def measure_alone(rank: Rank, together: Case, alone: Case, rounds: int) -> None:
    """Report the step of one device alone and of all at the same time, in turns; and once the gradients.

    Args:
        together: makes the ranks meet; its steps are not taken. alone: one device's case.
    """
    with on_site(rank, together.config, together.plan) as site:
        rank.report(gradients_of(site, alone))
        for _ in range(rounds):
            for row in take_turns(site, alone, synced=together.plan.sync_batchnorm):
                rank.report(row)


def take_turns(site: Site, case: Case, *, synced: bool) -> list[dict[str, Any]]:
    """A row for the first rank while the others wait, and one for all ranks at the same time; the same on each.

    Ranks do not communicate during these steps; on a CPU a third row is of steps with short messages among
    all ranks, ``meetings`` of them, at even distances in the forward. ``step_ms`` and ``parts_ms`` are means without
    hiccups, of several ranks the median. ``times_ms``: of each step, on the first rank.

    Args:
        synced: several ranks compute their BatchNorm as if they synchronised it, which takes longer than torch's own.
    """
    rows = []
    group = dist.new_subgroups(1)[0] if synced and site.collectives.size > 1 else None
    ranks = site.collectives.size
    # Hooks do not run in compiled graphs.
    meet = ranks > 1 and site.device.type == "cpu" and not case.config.training.compile
    for count, meetings in ((1, 0), *([(ranks, 0)] if ranks > 1 else []), *([(ranks, MEETINGS)] if meet else [])):
        site.collectives.barrier()
        lone = group if count > 1 else None
        steps = timed_steps(_by_itself(site), case, lone, meetings) if site.collectives.rank < count else []
        taken = [own for own in site.collectives.all_gather(steps) if own]
        found = [summarise([own], case.plan.batch.global_batch) for own in taken]
        rows.append(
            {
                "count": count,
                "meetings": meetings,
                "step_ms": statistics.median(row["mean_ms"] for row in found),
                "parts_ms": found[0]["parts_ms"],
                "times_ms": [sum(parts.values()) * 1e3 for parts in taken[0]],
            }
        )
    return rows


def _by_itself(site: Site) -> Site:
    """The same rank as if there were no other."""
    world = World()
    return site._replace(rank=replace(site.rank, world=world), collectives=Collectives(world, timeout_s=TIMEOUT_S))


def timed_steps(site: Site, case: Case, synced: Group = None, meetings: int = 0) -> list[dict[str, float]]:
    """Seconds of each part of the steps of ``case`` after its warm-up.

    Args:
        synced: with BatchNorm over this group.
        meetings: short messages among all ranks in each forward.
    """
    watch = Stopwatch(site.device)
    with training(site, case.config, case.plan, watch) as (fit, steps):
        if synced is not None:
            convert(fit.strategy.module, synced)
        _let_meet(fit.strategy.module, meetings)
        for number, _ in zip(range(1, case.plan.total_steps + 1), steps, strict=False):
            site.rank.check()
            if number >= case.warm_up:
                watch.next_step()
    return watch.steps()


def _let_meet(model: nn.Module, meetings: int) -> None:
    """Before layers at even distances in ``model``, all ranks wait for each other."""
    layers = [module for module in model.modules() if not any(module.children())]
    row = torch.zeros(64)

    def meet(*_: object) -> None:
        all_gather_rows(row, None)

    for place in range(meetings):
        layers[place * len(layers) // meetings].register_forward_pre_hook(meet)


def gradients_of(site: Site, case: Case) -> dict[str, Any]:
    """Bytes of each gradient in the order of the backward, and the share of the backward after which it was there."""
    site, watch = _by_itself(site), Stopwatch(site.device)
    with training(site, case.config, case.plan, watch) as (fit, steps):
        trained = {name: p for name, p in fit.strategy.module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: watch.enter(_ARRIVAL + name))
        for _ in zip(range(WATCHED), steps, strict=False):
            pass
    shares: dict[str, list[float]] = {}
    passed: dict[str, float] = {}
    begun: Any = None
    for part, when in watch.marks():
        if part == "backward":
            begun, passed = when, {}
        elif part.startswith(_ARRIVAL):
            passed[part.removeprefix(_ARRIVAL)] = between(begun, when)
        elif part == "optimizer":
            whole = max(passed.values(), default=0.0)
            for name, seconds in passed.items():
                shares.setdefault(name, []).append(seconds / whole if whole > 0 else 1.0)
    ready = {name: statistics.median(found) for name, found in shares.items()}
    order = sorted(ready, key=ready.__getitem__)
    return {"gradients": [trained[name].nbytes for name in order], "ready": [ready[name] for name in order]}
