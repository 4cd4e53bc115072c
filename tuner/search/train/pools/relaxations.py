"""Why nothing fits over several pools, and relaxations that would make it fit.

Every relaxation is solved: one of the user's limits, memory in all pools or in one, the number of
nodes of one pool, or options that only the user may enable (offloading of optimizer state and the
like). The decisions are legal and fit, but need not be optimal.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from tuner.bisection import bisect
from tuner.plans.train import Relaxation
from tuner.search.change import Change, first_solution
from tuner.search.reasons import MEMORY_LIMIT, MemoryOffer, memory_words, nearest_value
from tuner.search.settings import Deadline, SearchSettings
from tuner.search.train.memory_risk import SMALL
from tuner.search.train.options import option_space
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain
from tuner.search.train.pools.headroom_search import MORE_RATIOS, limit_to_chance
from tuner.search.train.pools.min_memory import (
    MinMemoryCandidates,
    best_chain,
    fit_anywhere,
    min_memory_candidates,
    most_layers,
)
from tuner.search.train.pools.search import PoolsSearchOutcome
from tuner.search.train.pools.space import PLAIN, PoolsSpace, pools_space
from tuner.search.train.pools.to_plan import (
    SimulatedChain,
    simulate_chain,
    to_decision,
    to_prediction,
)
from tuner.search.train.rules import COLUMN_OF_LIMIT
from tuner.spec.cluster import Cluster
from tuner.spec.search import Search as Limits

MOST_DOUBLINGS: Final = 6
"""Largest power of two of the present memory or nodes that is tried."""

HALVINGS: Final = 12
"""Bisection steps for the least memory: to about a percent of the present one."""


def infeasibility_reason(outcome: PoolsSearchOutcome) -> str:
    """Explain infeasibility: memory pool by pool, or the rule that excludes most decisions."""
    if not outcome.space.num_legal:
        rule, _ = max(outcome.space.illegal.items(), key=lambda item: item[1])
        return rule
    problem = outcome.problem
    rooms = most_layers(min_memory_candidates(problem, outcome.space), problem.num_pools)
    room_of_pools = ", ".join(
        f"pool {pool.name!r} has room for {room}"
        for pool, room in zip(problem.cluster.pools, rooms, strict=True)
    )
    return (
        f"memory_per_device: of {problem.any_pool.model.num_layers} layers, "
        f"{room_of_pools} at the least"
    )


def relaxations(outcome: PoolsSearchOutcome, settings: SearchSettings) -> tuple[Relaxation, ...]:
    """Return relaxations of an infeasible problem; more nodes come first."""
    problem, deadline = outcome.problem, settings.begin()
    if not outcome.space.num_legal:
        return _until_deadline(_limit_relaxations(problem, deadline=deadline), deadline)
    offers = itertools.chain(
        *_larger_pools(problem, outcome.space, deadline=deadline),
        _unsearched_relaxations(problem, deadline=deadline),
    )
    return _until_deadline(offers, deadline)


def _until_deadline(offers: Iterator[Relaxation], deadline: Deadline) -> tuple[Relaxation, ...]:
    """Return the relaxations solved in time, with a note if there may be more."""
    relaxed = [*offers]
    if not deadline.left_s:
        change = "the time for relaxations was used up; more of it may find others"
        relaxed.append(Relaxation(limit="--time-limit", change=change))
    return tuple(relaxed)


def headroom_relaxations(
    outcome: PoolsSearchOutcome, settings: SearchSettings, *, full: SimulatedChain
) -> tuple[Relaxation, ...]:
    """Return the nodes, then the memory in every pool, with which something has headroom.

    For plans whose every decision runs out of memory more likely than not; relaxations are solved
    under the memory limits at which running out is unlikely.

    Args:
        outcome: of the main search.
        settings: of it.
        full: the chain that is planned.
    """
    problem = limit_to_chance(outcome.problem, full, chance=SMALL)
    if problem is None:
        return ()
    nodes, memory = _larger_pools(problem, outcome.space, deadline=settings.begin())
    return (*nodes, *itertools.islice(memory, 1))


def _limit_relaxations(problem: PoolsProblem, *, deadline: Deadline) -> Iterator[Relaxation]:
    """Each limit of the user that excludes everything by itself, with the nearest legal value."""
    limits = problem.any_pool.limits
    stated = {name: getattr(limits, name) for name in Limits.model_fields}
    requested = [(name, values) for name, values in stated.items() if values is not None]
    named = False
    for name, values in deadline.before_end(requested):
        freed = _with_limits(problem, limits.model_copy(update={name: None}))
        space = pools_space(freed)
        if space.num_legal:
            named = True
            listed = ", ".join(map(str, values))
            words = f"{listed} leaves nothing legal{_nearest(space, name, values)}"
            yield _solve_relaxation(f"search.{name}", words, freed, space, deadline=deadline)
    if not named and deadline.left_s:
        freed = _with_limits(problem, Limits())
        space = pools_space(freed)
        if space.num_legal:
            yield _solve_relaxation(
                "search", "the limits leave nothing legal together", freed, space, deadline=deadline
            )


def _nearest(space: PoolsSpace, name: str, requested: Collection[Any]) -> str:
    if name not in COLUMN_OF_LIMIT:
        return ""
    legal = [int(value) for value in np.unique(space.rows_N[COLUMN_OF_LIMIT[name]])]
    return f"; the nearest legal value is {nearest_value(legal, requested)}"


def _unsearched_relaxations(problem: PoolsProblem, *, deadline: Deadline) -> Iterator[Relaxation]:
    """Options that are searched only if the user names them."""
    limits = problem.any_pool.limits
    for axis, plain in deadline.before_end(PLAIN.items()):
        more = tuple(
            choice
            for choice in _choices(problem, axis)
            if choice not in plain and getattr(limits, axis) in (None, plain)
        )
        if not more:
            continue
        freed = _with_limits(problem, limits.model_copy(update={axis: more}))
        space = pools_space(freed)
        relaxation = _solve_relaxation(
            f"search.{axis}", f"{list(more)} fits", freed, space, deadline=deadline
        )
        if relaxation.decision is not None:
            yield relaxation


def _choices(problem: PoolsProblem, axis: str) -> tuple[Any, ...]:
    """All choices of an axis that the targets can launch."""
    limits = problem.any_pool.limits.model_copy(update={axis: None})
    return tuple(option_space(replace(problem.any_pool, limits=limits)).choices[axis])


def _larger_pools(
    problem: PoolsProblem, space: PoolsSpace, *, deadline: Deadline
) -> tuple[Iterator[Relaxation], Iterator[Relaxation]]:
    """Find the fewest nodes of every pool, and the least memory, with which a chain fits."""
    candidates = min_memory_candidates(problem, space)

    def solve(change: Change[PoolsProblem]) -> Relaxation | None:
        larger = change.apply(problem)
        chain = best_chain(candidates, larger, deadline=deadline)
        if chain is None:
            return None
        return _relaxation(change.limit, change.words, chain, larger, space)

    nodes, memory = (
        (
            first_solution(deadline.before_end(ladder), solve)
            for ladder in deadline.before_end(ladders)
        )
        for ladders in (_more_nodes(problem, candidates), _more_memory(problem, candidates))
    )
    return filter(None, nodes), filter(None, memory)


def _more_memory(
    problem: PoolsProblem, candidates: tuple[MinMemoryCandidates, ...]
) -> Iterator[list[Change[PoolsProblem]]]:
    """Yield more and more memory in every pool, and in each one."""
    every = tuple(range(problem.num_pools))
    for some in dict.fromkeys((every, *((index,) for index in every))):
        limit = max(problem.by_pool[index].memory_limit_bytes for index in some)
        enough = _least_more(problem, candidates, some, limit)
        steps = [] if enough is None else [enough + ratio * limit for ratio in MORE_RATIOS]
        yield [
            Change(
                limit=MEMORY_LIMIT,
                words=_memory_words(problem, _having_memory(problem, some, more), some),
                apply=partial(_having_memory, some=some, more=more),
            )
            for more in steps
        ]


def _having_memory(problem: PoolsProblem, some: Collection[int], more: float) -> PoolsProblem:
    """Add usable bytes per device in some pools, and so to their capacity."""
    return problem.changed(
        {"memory_limit_bytes": on.memory_limit_bytes + more * (index in some)}
        for index, on in enumerate(problem.by_pool)
    )


def _memory_words(problem: PoolsProblem, larger: PoolsProblem, some: Sequence[int]) -> str:
    """Format the capacity that a device of each pool needs."""
    return memory_words(
        MemoryOffer(
            larger.by_pool[index].capacity_bytes,
            problem.by_pool[index].capacity_bytes,
            pool=problem.cluster.pools[index].name,
        )
        for index in some
    )


def _least_more(
    problem: PoolsProblem,
    candidates: tuple[MinMemoryCandidates, ...],
    some: Sequence[int],
    limit: float,
) -> float | None:
    """Least additional bytes per device of these pools that make the layers fit; None: too many."""

    def is_enough(more: float) -> bool:
        return fit_anywhere(candidates, _having_memory(problem, some, more))

    # The missing memory is usually of the order of the limit: search its logarithm first.
    enough = next(
        filter(
            is_enough, (2.0**power * limit for power in range(-MOST_DOUBLINGS, MOST_DOUBLINGS + 1))
        ),
        None,
    )
    return None if enough is None else bisect(is_enough, 0.0, enough, halvings=HALVINGS)


def _more_nodes(
    problem: PoolsProblem, candidates: tuple[MinMemoryCandidates, ...]
) -> Iterator[list[Change[PoolsProblem]]]:
    """Yield more and more nodes of each pool."""
    for index, pool in enumerate(problem.cluster.pools):
        fewest = _fewest_nodes(problem, candidates, index)
        counts = [] if fewest is None else [math.ceil(fewest * (1.0 + r)) for r in MORE_RATIOS]
        yield [
            Change(
                limit="nodes",
                words=f"pool {pool.name!r}: {nodes} working nodes instead of {pool.nodes}",
                apply=partial(_having_nodes, index=index, nodes=nodes),
            )
            for nodes in dict.fromkeys(counts)
        ]


def _having_nodes(problem: PoolsProblem, index: int, nodes: int) -> PoolsProblem:
    """Change the working nodes of one pool."""
    pools = list(problem.cluster.pools)
    pools[index] = pools[index].model_copy(update={"nodes": nodes})
    return replace(problem, cluster=Cluster(pools=tuple(pools), links=problem.cluster.links))


def _fewest_nodes(
    problem: PoolsProblem, candidates: tuple[MinMemoryCandidates, ...], index: int
) -> int | None:
    """The fewest nodes of a pool with which the layers may fit."""

    def is_enough(nodes: int) -> bool:
        return fit_anywhere(candidates, _having_nodes(problem, index, nodes))

    present = problem.cluster.pools[index].nodes
    enough = next(
        filter(is_enough, (2**power * present for power in range(MOST_DOUBLINGS + 1))), None
    )
    if enough is None:
        return None
    some = range(max(present, enough // 2), enough)
    return some.start + bisect_left(some, True, key=is_enough)


def _with_limits(problem: PoolsProblem, limits: Limits) -> PoolsProblem:
    return problem.changed([{"limits": limits}] * problem.num_pools)


def _solve_relaxation(
    limit: str, change: str, problem: PoolsProblem, space: PoolsSpace, *, deadline: Deadline
) -> Relaxation:
    """Solve a relaxed problem."""
    candidates = min_memory_candidates(problem, space)
    chain = best_chain(candidates, problem, deadline=deadline)
    if chain is None:
        return Relaxation(limit=limit, change=change)
    return _relaxation(limit, change, chain, problem, space)


def _relaxation(
    limit: str, change: str, chain: Chain, problem: PoolsProblem, space: PoolsSpace
) -> Relaxation:
    return Relaxation(
        limit=limit,
        change=change,
        decision=to_decision(chain, problem, space.options),
        predicted=to_prediction(simulate_chain(chain), problem),
    )
