"""Findings about samples: divided among ranks, order, splits, random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Pass, RankTrace, RunTrace

#: Samplers of libraries that pad, so that all ranks have equally many samples.
_DIVIDING = {"DistributedSampler", "UnrepeatedDistributedSampler", "DistributedSamplerWrapper", "BatchSamplerShard"}
_SHUFFLING = _DIVIDING | {"RandomSampler", "SeedableRandomSampler"}


def data_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about the samples that ranks read."""
    training = run.passes(training=True)
    undivided = [_undivided(run, group) for group in training if run.size > 1]
    is_divided = run.size > 1 and not any(undivided)
    yield from filter(None, undivided)
    for group in training if is_divided else ():
        yield from _uneven(run, group)
    for group in run.passes(training=False) if run.size > 1 else ():
        yield from _uneven(run, group)
    yield from _same_order(training)
    yield from _same_numbers(run, training, is_divided=is_divided)


def _is_shared(group: list[Pass]) -> bool:
    """Whether indices of all ranks mean samples of one data set."""
    first = group[0].about
    is_same = all(walk.about[key] == first[key] for walk in group for key in ("dataset", "size"))
    return is_same and bool(first["size"] and first["dataset"])


def _undivided(run: RunTrace, group: list[Pass]) -> Finding | None:
    """Return that the ranks read different splits, or all of them all samples."""
    about = group[0].about
    subsets = {walk.about["subset"] for walk in group}
    if None not in subsets and len(subsets) > 1 and not _DIVIDING.isdisjoint(about["samplers"]):
        return Finding("AUDIT_SPLIT_DIFFERS", group[0].line, {"size": about["size"]})
    if not _is_shared(group) or not all(_covers_all(walk) for walk in group):
        return None
    batches = [walk.batches[0] for walk in group]
    first_steps = next(iter(run.aligned_steps()), [])
    gradients = [local["gradients"] for step in first_steps for local in step.of("local")[:1]]
    has_equal_gradients = len(gradients) == run.size == gradients.count(gradients[0])
    if batches.count(batches[0]) == run.size and not has_equal_gradients:
        return None  # each rank may take its part of the batch later
    return Finding("AUDIT_NO_SAMPLER", group[0].line, {"size": about["size"], "ranks": run.size, "batches": batches})


def _covers_all(walk: Pass) -> bool:
    """Whether a loader, without replacement, has all samples of its data set in several batches."""
    length = len(walk.batches[0] or ())
    size = walk.about["size"]
    return not walk.about["replaces"] and size > length > 0 and walk.about["batches"] * length > size - length


def _uneven(run: RunTrace, group: list[Pass]) -> Iterator[Finding]:
    """Yield samples of a pass that no rank reads, that several read, and those that a metric counts twice."""
    first = group[0]
    size = first.about["size"]
    parts = [walk.indices for walk in group]
    is_known = _is_shared(group) and None not in parts and all(walk.is_whole for walk in group)
    has_all = all(len(set(part or ())) == size for part in parts)
    if not is_known or first.about["replaces"] or (has_all and not first.trains):
        return
    counts = Counter(index for part in parts for index in part or ())
    missing = sorted(set(range(size)) - counts.keys())
    repeated = sorted(index for index, count in counts.items() if count > 1)
    is_padding = not _DIVIDING.isdisjoint(first.about["samplers"])
    is_padding = is_padding and counts.total() - size <= len(group) * max(1, len(first.batches[0] or ()))
    evidence = {"size": size, "phase": "training" if first.trains else "evaluation"}
    if missing and not (first.trains and first.about["drops"]):
        yield Finding("AUDIT_DROPPED", first.line, {**evidence, "number": len(missing), "indices": missing[:20]})
        return
    evidence |= {"number": len(repeated), "indices": repeated[:20]}
    if repeated and not is_padding:
        yield Finding("AUDIT_REPEATED", first.line, evidence)
    elif repeated and first.trains:
        yield Finding("AUDIT_PADDED", first.line, evidence)
    elif repeated and _counts_padding(run, group):
        yield Finding("AUDIT_EVAL_PADDED", first.about["site"], evidence)


def _counts_padding(run: RunTrace, group: list[Pass]) -> bool:
    """Whether calls of the ranks show that a metric counts the repeated samples."""
    calls = group[0].of("call")
    has_counts = all(any(len(walk.indices or ()) in call["values"] for call in walk.of("call")) for walk in group)
    joins = [call for call in calls if call["is_float"] and (run.uses_lightning or "all_gather" in call["name"])]
    return bool(has_counts or joins) and not any(call["trims"] for call in calls)


def _same_order(groups: list[list[Pass]]) -> Iterator[Finding]:
    for (first, *_), (second, *_) in pairwise(groups):
        length = min(len(first.batches), len(second.batches))
        batches = first.batches[:length]
        order = [index for batch in batches for index in batch or ()]
        is_same_loader = (first.line, first.about["dataset"]) == (second.line, second.about["dataset"])
        is_shuffled = order != sorted(order) and not _SHUFFLING.isdisjoint(first.about["samplers"])
        if is_same_loader and is_shuffled and length > 1 and len(order) > 5 and batches == second.batches[:length]:
            yield Finding("AUDIT_SAME_ORDER", second.about["site"], {"indices": order[:20]})


#: States of generators by name, for each worker and fetch.
Draws = dict[Any, dict[str, str]]


def _draws(rank: RankTrace, walk: Pass) -> Draws:
    """Return the states from which samples of a pass draw."""
    draws = [draw for draw in rank.draws if draw["loader_pass"] == walk.about["loader_pass"]]
    return {(draw["worker"], draw["fetch"]): draw["states"] for draw in draws}


def _alike(code: str, line: str | None, first: Draws, second: Draws) -> Iterator[Finding]:
    """Yield that some generators have equal states in all common fetches."""
    states = [first[key].items() & second[key].items() for key in first.keys() & second.keys()]
    names = [{name for name, _ in equal} for equal in states]
    if names and (generators := sorted(set.intersection(*names))):
        yield Finding(code, line, {"generators": generators})


def _same_numbers(run: RunTrace, training: list[list[Pass]], *, is_divided: bool) -> Iterator[Finding]:
    """Yield different samples with equal random numbers: in workers, else in epochs and on ranks."""
    walks = [group[0] for group in training]
    for walk in walks:
        draws = _draws(run.first, walk)
        workers = sorted({worker for worker, _ in draws if worker is not None})
        of_workers = [{fetch: draws[w, fetch] for w, fetch in draws if w == worker} for worker in workers]
        for first, second in pairwise(of_workers):
            for finding in _alike("AUDIT_WORKERS_DRAW_ALIKE", walk.line, first, second):
                yield finding
                return  # on every rank and in every epoch, too
    for before, after in pairwise(walks):
        yield from _alike("AUDIT_EPOCHS_DRAW_ALIKE", after.line, _draws(run.first, before), _draws(run.first, after))
    for group in training[:1] if is_divided else ():
        if group[0].batches[0] != group[1].batches[0]:
            of_ranks = [_draws(rank, walk) for rank, walk in zip(run.ranks[:2], group[:2], strict=True)]
            yield from _alike("AUDIT_RANKS_DRAW_ALIKE", group[0].line, *of_ranks)
