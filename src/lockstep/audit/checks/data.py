"""Findings about samples: divided among ranks, order, splits, random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Pass, Record, Run

#: Samplers of libraries that pad, so that all ranks have equally many samples.
_DIVIDING = {"DistributedSampler", "UnrepeatedDistributedSampler", "DistributedSamplerWrapper", "BatchSamplerShard"}
_SHUFFLING = _DIVIDING | {"RandomSampler", "SeedableRandomSampler"}


def data_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about the samples that ranks read."""
    undivided = [_undivided(run, group) for group in run.training if run.size > 1]
    yield from filter(None, undivided)
    is_divided = run.size > 1 and not any(undivided)
    for group in [*(run.training if is_divided else []), *run.evaluations] if run.size > 1 else ():
        yield from _uneven(run, group)
    yield from _same_order(run.training)
    yield from _same_numbers(run.training, is_divided=is_divided)


def _is_shared(group: Sequence[Pass]) -> bool:
    """Whether indices of all ranks mean samples of one data set."""
    datasets = {(walk.about["dataset"], walk.about["size"]) for walk in group}
    return len(datasets) == 1 and all(datasets.pop())


def _undivided(run: Run, group: Sequence[Pass]) -> Finding | None:
    """Return that the ranks read different splits, or all of them all samples."""
    first = group[0]
    size = first.about["size"]
    subsets = {walk.about["subset"] for walk in group}
    if None not in subsets and len(subsets) > 1 and not _DIVIDING.isdisjoint(first.about["samplers"]):
        return finding("AUDIT_SPLIT_DIFFERS", first.line, {"size": size})
    if not _is_shared(group) or not all(_covers_all(walk) for walk in group):
        return None
    batches = [walk.batches[0] for walk in group]
    locals_of_ranks = run.steps[0].of("local").by("rank").values() if run.steps else ()
    gradients = [of_rank[0]["gradients"] for of_rank in locals_of_ranks]
    has_equal_gradients = len(gradients) == run.size == gradients.count(gradients[0])
    if batches.count(batches[0]) == run.size and not has_equal_gradients:
        return None  # each rank may take its part of the batch later
    return finding("AUDIT_NO_SAMPLER", first.line, {"size": size, "ranks": run.size, "batches": batches})


def _covers_all(walk: Pass) -> bool:
    """Whether a loader, without replacement, has all samples of its data set in several batches."""
    length = len(walk.batches[0] or ())
    size = walk.about["size"]
    return not walk.about["replaces"] and size > length > 0 and walk.about["batches"] * length > size - length


def _uneven(run: Run, group: Sequence[Pass]) -> Iterator[Finding]:
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
        yield finding("AUDIT_DROPPED", first.line, {**evidence, "number": len(missing), "indices": missing[:20]})
        return
    evidence |= {"number": len(repeated), "indices": repeated[:20]}
    if repeated and not is_padding:
        yield finding("AUDIT_REPEATED", first.line, evidence)
    elif repeated and first.trains:
        yield finding("AUDIT_PADDED", first.line, evidence)
    elif repeated and _counts_padding(run, group):
        yield finding("AUDIT_EVAL_PADDED", first.about["site"], evidence)


def _counts_padding(run: Run, group: Sequence[Pass]) -> bool:
    """Whether calls of the ranks show that a metric counts the repeated samples."""
    calls = [walk.records.of("call") for walk in group]
    lengths = [len(walk.indices or ()) for walk in group]
    has_counts = all(any(n in call["values"] for call in of_rank) for n, of_rank in zip(lengths, calls, strict=True))
    joins = [call for call in calls[0] if call["is_float"] and (run.uses_lightning or "all_gather" in call["name"])]
    return bool(has_counts or joins) and not any(call["trims"] for call in calls[0])


def _same_order(groups: Sequence[Sequence[Pass]]) -> Iterator[Finding]:
    for (first, *_), (second, *_) in pairwise(groups):
        length = min(len(first.batches), len(second.batches))
        batches = first.batches[:length]
        order = [index for batch in batches for index in batch or ()]
        is_same_loader = (first.line, first.about["dataset"]) == (second.line, second.about["dataset"])
        is_shuffled = order != sorted(order) and not _SHUFFLING.isdisjoint(first.about["samplers"])
        if is_same_loader and is_shuffled and length > 1 and len(order) > 5 and batches == second.batches[:length]:
            yield finding("AUDIT_SAME_ORDER", second.about["site"], {"indices": order[:20]})


def _same_numbers(groups: Sequence[Sequence[Pass]], *, is_divided: bool) -> Iterator[Finding]:
    """Yield samples that draw equal random numbers: in workers, else in epochs and on ranks."""
    for walk, *_ in groups:
        for first, second in pairwise(walk.draws.by("worker").values()):
            for of_workers in _alike("AUDIT_WORKERS_DRAW_ALIKE", walk.line, first, second):
                yield of_workers
                return  # on every rank and in every epoch, too
    for (before, *_), (after, *_) in pairwise(groups):
        yield from _alike("AUDIT_EPOCHS_DRAW_ALIKE", after.line, before.draws, after.draws)
    for first_rank, second_rank, *_ in groups[:1] if is_divided else ():
        if first_rank.batches[0] != second_rank.batches[0]:
            yield from _alike("AUDIT_RANKS_DRAW_ALIKE", first_rank.line, first_rank.draws, second_rank.draws)


def _alike(code: str, line: str | None, first: Sequence[Record], second: Sequence[Record]) -> Iterator[Finding]:
    """Yield that some generators have equal states before all the samples of ``first`` and ``second``."""
    states = [draw["states"].items() & other["states"].items() for draw, other in zip(first, second, strict=False)]
    names = [{name for name, _ in equal} for equal in states]
    if names and (generators := sorted(set.intersection(*names))):
        yield finding(code, line, {"generators": generators})
