"""Findings about samples: divided among ranks, order, splits, random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Pass, Record, Run

#: Samplers of libraries that pad, so that all ranks have equally many samples.
_DIVIDING = {"DistributedSampler", "UnrepeatedDistributedSampler", "DistributedSamplerWrapper", "BatchSamplerShard"}
_SHUFFLING = _DIVIDING | {"RandomSampler", "SeedableRandomSampler"}


def data_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about the samples that ranks read."""
    undivided = [_undivided(run, passes) for passes in run.training if run.size > 1]
    yield from filter(None, undivided)
    for passes in [*run.training, *run.evaluations] if run.size > 1 else ():
        yield from _uneven(run, passes)
    yield from _same_order(run.training)
    yield from _same_numbers(run.training, is_divided=run.size > 1 and not any(undivided))


def _is_shared(passes: Sequence[Pass]) -> bool:
    """Return whether indices of all ranks mean samples of one data set, which they read without replacement."""
    first = passes[0].about
    datasets = {(data_pass.about["dataset"], data_pass.about["size"]) for data_pass in passes}
    return len(datasets) == 1 and first["size"] is not None and not first["replaces"]


def _undivided(run: Run, passes: Sequence[Pass]) -> Finding | None:
    """Find different splits on the ranks, or ranks that all read all samples."""
    first = passes[0]
    evidence = {"size": first.about["size"], "ranks": run.size}
    if _is_divided(first):
        differ = len({data_pass.about["subset"] for data_pass in passes}) > 1
        return finding("AUDIT_SPLIT_DIFFERS", first.line, evidence) if differ else None
    if not _is_shared(passes) or not all(_covers_all(data_pass) for data_pass in passes):
        return None
    batches = [data_pass.batches[0] for data_pass in passes]
    gradients = [of_rank[0]["gradients"] for of_rank in run.records.of("local").by("rank").values()]
    has_equal_gradients = len(gradients) == run.size == gradients.count(gradients[0])
    if batches.count(batches[0]) == run.size and not has_equal_gradients:
        return None  # each rank may take its part of the batch later
    return finding("AUDIT_NO_SAMPLER", first.line, {**evidence, "batches": batches})


def _is_divided(data_pass: Pass) -> bool:
    return not _DIVIDING.isdisjoint(data_pass.about["samplers"])


def _covers_all(data_pass: Pass) -> bool:
    """Return whether a loader has all samples of its data set, but for a batch that it drops."""
    length = len(data_pass.batches[0] or ())
    number = len(data_pass.indices or ()) or data_pass.about["batches"] * length
    return bool(number > data_pass.about["size"] - (length if data_pass.about["drops"] else 1))


def _uneven(run: Run, passes: Sequence[Pass]) -> Iterator[Finding]:
    """Find samples of a pass that no rank reads, that several read, or that a metric counts twice."""
    first = passes[0]
    size = first.about["size"]
    parts = [data_pass.indices for data_pass in passes if data_pass.indices is not None]
    if len(parts) < len(passes) or not _is_shared(passes) or all(len(set(part)) == size for part in parts):
        return  # unknown, or every rank reads all samples
    counts = Counter(chain.from_iterable(parts))
    missing = sorted(set(range(size)) - counts.keys())
    repeated = sorted(index for index, count in counts.items() if count > 1)
    evidence = {"size": size, "phase": "training" if first.trains else "evaluation"}
    if missing and not (first.trains and first.about["drops"]):
        yield finding("AUDIT_DROPPED", first.line, {**evidence, "number": len(missing), "indices": missing[:20]})
        return
    evidence |= {"number": len(repeated), "indices": repeated[:20]}
    if repeated and not _is_divided(first):
        yield finding("AUDIT_REPEATED", first.line, evidence)
    elif repeated and first.trains:
        yield finding("AUDIT_PADDED", first.line, evidence)
    elif repeated and _counts_padding(run, passes):
        yield finding("AUDIT_EVAL_PADDED", first.about["site"], evidence)


def _counts_padding(run: Run, passes: Sequence[Pass]) -> bool:
    """Return whether calls of the ranks show that a metric counts the repeated samples."""
    calls = passes[0].records.of("call")
    length = len(passes[0].indices or ())
    has_counts = any(length in call["values"] or "all_gather" in call["name"] for call in calls)
    return (has_counts or run.uses_lightning) and not any(call["trims"] for call in calls)


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
    """Find samples that draw equal random numbers: in workers, else in epochs and on ranks."""
    for data_pass, *_ in groups:
        for first, second in pairwise(data_pass.draws.by("worker").values()):
            for of_workers in _alike("AUDIT_WORKERS_DRAW_ALIKE", data_pass.line, first, second):
                yield of_workers
                return  # on every rank and in every epoch, too
    for (before, *_), (after, *_) in pairwise(groups):
        yield from _alike("AUDIT_EPOCHS_DRAW_ALIKE", after.line, before.draws, after.draws)
    for first_rank, second_rank, *_ in groups[:1] if is_divided else ():
        yield from _alike("AUDIT_RANKS_DRAW_ALIKE", first_rank.line, first_rank.draws, second_rank.draws)


def _alike(code: str, line: str | None, first: Sequence[Record], second: Sequence[Record]) -> Iterator[Finding]:
    """Find generators with equal states before all the samples of ``first`` and ``second``."""
    states = [draw["states"].items() & other["states"].items() for draw, other in zip(first, second, strict=False)]
    names = [{name for name, _ in equal} for equal in states]
    if names and (generators := sorted(set.intersection(*names))):
        yield finding(code, line, {"generators": generators})
