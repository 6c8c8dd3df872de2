"""Findings about samples: divided among ranks, order, splits, random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Pass, RankTrace, RunTrace, counts_of

#: Samplers of libraries that pad, so that all ranks have equally many samples.
_DIVIDING = ("DistributedSampler", "UnrepeatedDistributedSampler", "DistributedSamplerWrapper")
#: Accelerate's samplers of batches, which pad too.
_SHARDS = ("BatchSamplerShard",)


def data_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about the samples that ranks read."""
    training = run.passes(training=True)
    is_divided = run.size > 1
    if run.size > 1:
        split = next(filter(None, map(_different_split, training)), None)
        shared = None if split else next(filter(None, (_same_samples(run, group) for group in training)), None)
        yield from filter(None, (split, shared))
        is_divided = split is None and shared is None
        if is_divided:
            yield from _uneven(training, evaluates=False)
        yield from _uneven(run.passes(training=False), evaluates=True)
    yield from _same_order(training)
    # Workers that are seeded alike draw alike on every rank and in every epoch, too.
    workers = list(_workers_alike(run.first))
    yield from workers
    if not workers:
        yield from _epochs_alike(run.first)
        if is_divided:
            yield from _ranks_alike(run, training)


def _is_comparable(group: list[Pass]) -> bool:
    """Whether indices of all ranks mean samples of one data set."""
    first = group[0].about
    is_same = all(walk.about[key] == first[key] for walk in group for key in ("content", "size", "dataset"))
    return is_same and first["size"] is not None


def _is_divided(walk: Pass) -> bool:
    return walk.about["sampler"] in _DIVIDING or walk.about["batch_sampler"] in _SHARDS


def _different_split(group: list[Pass]) -> Finding | None:
    subsets = [walk.about["subset"] for walk in group]
    if None in subsets or all(subset == subsets[0] for subset in subsets) or not _is_divided(group[0]):
        return None
    size = group[0].about["size"]
    message = f"the ranks have different subsets of {size} samples, and the sampler divides each of them"
    evidence: dict[str, Any] = {"size": size}
    if all(isinstance(subset, list) for subset in subsets):
        evidence["common"] = len(set.intersection(*map(set, subsets)))
        message += f"; {evidence['common']} samples are in all"
    return Finding("AUDIT_SPLIT_DIFFERS", group[0].line, message, evidence)


def _same_samples(run: RunTrace, group: list[Pass]) -> Finding | None:
    size = group[0].about["size"]
    if not _is_comparable(group) or not size or any(walk.about["subset"] != group[0].about["subset"] for walk in group):
        return None
    for walk in group:
        batch = walk.batches[0] if walk.batches else None
        batches = walk.about["batches"]
        if (
            not batch
            or walk.about["replaces"]
            or (batches or 0) * len(batch) <= size - len(batch)
            or size <= len(batch)
        ):
            return None
    if all(walk.batches[0] == group[0].batches[0] for walk in group) and not _equal_local_gradients(run):
        return None  # each rank may take its part of the batch later
    evidence = {"size": size, "ranks": run.size, "first_batches": [walk.batches[0] for walk in group]}
    message = f"each of {run.size} ranks reads all {size} samples in an epoch"
    return Finding("AUDIT_NO_SAMPLER", group[0].line, message, evidence)


def _equal_local_gradients(run: RunTrace) -> bool:
    for steps in run.aligned_steps()[:1]:
        gradients = [local and local["grad"] for step in steps for _, local in step.micro_batches[:1]]
        return len(gradients) == run.size and all(gradient == gradients[0] for gradient in gradients)
    return False


def _uneven(groups: list[list[Pass]], *, evaluates: bool) -> Iterator[Finding]:
    phase = "evaluation" if evaluates else "training"
    dropped_before: list[int] = []
    for group in groups:
        about = group[0].about
        size = about["size"]
        counts = counts_of(group)
        is_shared = _is_comparable(group) and all(walk.about["subset"] == about["subset"] for walk in group)
        is_whole = all(walk.is_whole and walk.batches for walk in group)
        if counts is None or not is_shared or not is_whole or about["replaces"]:
            continue
        if evaluates and all(len(set(walk.indices or ())) == size for walk in group):
            continue  # each rank evaluates all of them
        missing = sorted(set(range(size)) - counts.keys())
        repeated = sorted(index for index, count in counts.items() if count > 1)
        batch = len(group[0].batches[0] or ())
        is_padding = _is_divided(group[0]) and counts.total() - size <= len(group) * max(batch, 1)
        # Samples of the last batch are dropped by choice; the same ones in each epoch are not.
        is_choice = not evaluates and about["drops"] and missing != dropped_before
        dropped_before = missing or dropped_before
        evidence: dict[str, Any] = {"size": size, "phase": phase}
        if missing and not is_choice:
            message = f"{len(missing)} of {size} samples of the {phase} are read by no rank"
            evidence |= {"dropped": len(missing), "indices": missing[:20]}
            yield Finding("AUDIT_DROPPED", group[0].line, message, evidence)
            return
        evidence |= {"repeated": len(repeated), "indices": repeated[:20]}
        if repeated and not is_padding:
            message = f"{len(repeated)} of {size} samples of the {phase} are read more than once"
            yield Finding("AUDIT_REPEATED", group[0].line, message, evidence)
            return
        message = (
            f"{len(repeated)} of {size} samples are {'evaluated twice' if evaluates else 'read twice in an epoch'}"
        )
        if repeated and not evaluates:
            yield Finding("AUDIT_PADDED", group[0].line, message, evidence)
        elif repeated and _counts_padding(group):
            yield Finding("AUDIT_EVAL_PADDED", about["site"], message, evidence)


def _counts_padding(group: list[Pass]) -> bool:
    """Whether the metric is seen to count the repeated samples."""
    about = group[0].about
    calls = [call for call in group[0].calls if "values" in call or "rows" in call]
    if any(call.get("trims") for call in calls):
        return False
    if "lightning" in about["through"] or "pytorch_lightning" in about["through"] or about["batch_sampler"] in _SHARDS:
        return any("float" in call.get("dtype", "") or call["kind"].startswith("all_gather") for call in calls)
    read = [len(walk.indices or ()) for walk in group]
    return all(
        any(call["kind"] in ("all_reduce", "reduce") and number in call.get("values", ()) for call in walk.calls)
        for walk, number in zip(group, read, strict=True)
    )


def _same_order(groups: list[list[Pass]]) -> Iterator[Finding]:
    for before, after in pairwise(groups):
        first = before[0]
        second = after[0]
        if (first.line, first.about["content"]) != (second.line, second.about["content"]):
            continue
        length = min(len(first.batches), len(second.batches))
        batches = first.batches[:length]
        flat = [index for batch in batches for index in batch or ()]
        if length < 2 or None in batches or len(flat) < 6 or batches != second.batches[:length]:
            continue
        if flat == sorted(flat) or first.about["sampler"] not in (*_DIVIDING, "RandomSampler", "SeedableRandomSampler"):
            continue
        message = f"the shuffled order of two epochs is the same: {flat[:6]}…"
        yield Finding("AUDIT_SAME_ORDER", second.about["site"], message, {"first_indices": flat[:20]})


Draws = dict[tuple[int | None, int], dict[str, str]]


def _draws(rank: RankTrace, walk: int) -> Draws:
    """Return, by worker and fetch, the states of generators from which samples of pass ``walk`` draw."""
    return {(draw["worker"], draw["fetch"]): draw["states"] for draw in rank.draws if draw["pass"] == walk}


def _alike(first: Draws, second: Draws) -> set[str]:
    """Return generators with equal states in all common fetches."""
    names: set[str] | None = None
    for key in first.keys() & second.keys():
        equal = {name for name, state in first[key].items() if second[key].get(name) == state}
        names = equal if names is None else names & equal
    return names or set()


def _ranks_alike(run: RunTrace, training: list[list[Pass]]) -> Iterator[Finding]:
    for group in training[:1]:
        draws = [_draws(rank, walk.number) for rank, walk in zip(run.ranks, group, strict=True)]
        names = sorted(set.intersection(*(_alike(draws[0], of_rank) for of_rank in draws[1:])))
        if names and group[0].batches[0] != group[1].batches[0]:
            message = f"samples of different ranks draw the same random numbers ({', '.join(names)})"
            yield Finding("AUDIT_RANKS_DRAW_ALIKE", group[0].line, message, {"generators": names})


def _workers_alike(rank: RankTrace) -> Iterator[Finding]:
    for walk in (walk for walk in rank.passes if walk.trains):
        by_worker: dict[int, Draws] = {}
        for (worker, fetch), states in _draws(rank, walk.number).items():
            if worker is not None:
                by_worker.setdefault(worker, {})[None, fetch] = states
        first, *rest = by_worker.values() or [{}]
        names = sorted(set.union(set(), *(_alike(first, of_worker) for of_worker in rest)))
        if names:
            message = f"workers of the data loader draw the same random numbers ({', '.join(names)})"
            evidence = {"workers": len(by_worker), "generators": names}
            yield Finding("AUDIT_WORKERS_DRAW_ALIKE", walk.line, message, evidence)


def _epochs_alike(rank: RankTrace) -> Iterator[Finding]:
    walks = [walk for walk in rank.passes if walk.trains]
    for first, second in pairwise(walks):
        names = sorted(_alike(_draws(rank, first.number), _draws(rank, second.number)))
        if names:
            message = f"two epochs draw the same random numbers ({', '.join(names)})"
            yield Finding("AUDIT_EPOCHS_DRAW_ALIKE", second.line, message, {"generators": names})
