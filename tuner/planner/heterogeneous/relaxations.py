"""What stands in the way over several pools, and what would have to give.

Every answer is solved with one thing given up: a limit of the user's, memory in every pool or in
one, the number of one pool's nodes, or what only the user may ask for (optimizer state in host
memory and the like). The decisions are legal and fit, and need not be the best there are.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tuner.plan import Relaxation
from tuner.planner.analytic.memory_risk import SMALL
from tuner.planner.analytic.options import ways_of
from tuner.planner.analytic.relaxations import MEMORY_LIMIT
from tuner.planner.analytic.rules import DENSE_NAMES, EXPERT_NAMES, SCHEDULE_NAMES
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.chains import Chain
from tuner.planner.heterogeneous.headroom_search import MORE_RATIOS, with_chance
from tuner.planner.heterogeneous.min_memory import (
    Change,
    Deadline,
    LeanColumns,
    best_chain,
    fit_anywhere,
    lean_columns,
    most_layers,
)
from tuner.planner.heterogeneous.search import Search, Settings
from tuner.planner.heterogeneous.space import PLAIN, PoolsSpace, pools_space
from tuner.planner.heterogeneous.stage_prices import OnPool
from tuner.planner.heterogeneous.to_plan import Played, decision_of, played, prediction_of
from tuner.planner.memory_offer import MemoryOffer, memory_words
from tuner.spec.cluster import Cluster
from tuner.spec.search import Search as Limits

MOST_TIMES: Final = 64
"""More memory or more nodes than this many times what there is are not looked for."""

HALVINGS: Final = 12
"""Of the range in which the least memory lies: to a percent or so of what there is."""

SIZES: Final = {
    name: column
    for names in (DENSE_NAMES, EXPERT_NAMES, SCHEDULE_NAMES)
    for column, name in names.items()
}
"""Columns of a row by the limit that is stated on them."""


def in_the_way(found: Search) -> str:
    """Name what rules out everything: pool by pool where it is memory, else the commonest rule."""
    if not found.space.num_legal:
        rule, _ = max(found.space.illegal.items(), key=lambda item: item[1])
        return rule
    question = found.question
    rooms = most_layers(lean_columns(question, found.space), question.num_pools)
    each = ", ".join(
        f"pool {pool.name!r} has room for {room}"
        for pool, room in zip(question.cluster.pools, rooms, strict=True)
    )
    return f"memory_per_device: of {question.alike.model.num_layers} layers, {each} at the leanest"


def relaxations(found: Search, settings: Settings) -> tuple[Relaxation, ...]:
    """Say what would have to give for a question without an answer: more nodes come first."""
    question, deadline = found.question, _deadline(settings)
    if not found.space.num_legal:
        return _in_time(_of_limits(question, deadline=deadline), deadline)
    columns = lean_columns(question, found.space)
    offers = itertools.chain(
        _of_nodes(question, found.space, columns, deadline=deadline),
        _of_memory(question, found.space, columns, deadline=deadline),
        _of_unasked(question, deadline=deadline),
    )
    return _in_time(offers, deadline)


def _deadline(settings: Settings) -> Deadline:
    """All ways out together take no longer than the search itself may."""
    end_s = settings.clock() + settings.time_limit_s
    return Deadline(method=settings.method, clock=settings.clock, end_s=end_s)


def _in_time(offers: Iterator[Relaxation], deadline: Deadline) -> tuple[Relaxation, ...]:
    """Return the offers that are found in time, and say so where there may be more."""
    found = []
    for one in offers:
        found.append(one)
        if deadline.left_s <= 0.0:
            break
    if deadline.left_s <= 0.0:
        change = "the time for ways out was used up; more of it may find others"
        found.append(Relaxation(limit="--time-limit", change=change))
    return tuple(found)


def more_room(found: Search, settings: Settings, *, full: Played) -> tuple[Relaxation, ...]:
    """Say with which nodes, then with which memory in every pool, something hardly runs out.

    For where every decision found runs out more likely than not; what is offered is what would fit
    were predicted peaks allowed only what hardly runs out.

    Args:
        found: the search that was made.
        settings: of it.
        full: the chain that is planned.
    """
    question = with_chance(found.question, full, chance=SMALL)
    if question is None:
        return ()
    space, deadline = found.space, _deadline(settings)
    columns = lean_columns(question, space)
    memory = _of_memory(question, space, columns, deadline=deadline)
    nodes = _of_nodes(question, space, columns, deadline=deadline)
    return tuple(itertools.chain(nodes, itertools.islice(memory, 1)))


def _of_limits(question: PoolsQuestion, *, deadline: Deadline) -> Iterator[Relaxation]:
    """Each limit of the user's that alone leaves nothing legal, with the nearest legal value."""
    limits = question.alike.limits
    stated = [name for name in Limits.model_fields if getattr(limits, name) is not None]
    named = False
    for name in stated:
        if deadline.left_s <= 0.0:
            return
        free = _asking(question, limits.model_copy(update={name: None}))
        space = pools_space(free)
        if space.num_legal:
            named = True
            asked = ", ".join(str(value) for value in getattr(limits, name))
            change = f"{asked} leaves nothing legal{_nearest(space, name, getattr(limits, name))}"
            yield _told(f"search.{name}", change, free, space, deadline=deadline)
    if not named:
        free = _asking(question, Limits())
        space = pools_space(free)
        if space.num_legal:
            yield _told(
                "search", "the limits leave nothing legal together", free, space, deadline=deadline
            )


def _nearest(space: PoolsSpace, name: str, asked: Iterable[Any]) -> str:
    if name not in SIZES:
        return ""
    legal = [int(value) for value in np.unique(space.rows_N[SIZES[name]])]
    near = min(legal, key=lambda value: (min(abs(value - one) for one in asked), value))
    return f"; the nearest legal value is {near}"


def _of_unasked(question: PoolsQuestion, *, deadline: Deadline) -> Iterator[Relaxation]:
    """What is searched only where the user names it."""
    limits = question.alike.limits
    for axis, plain in PLAIN.items():
        if deadline.left_s <= 0.0:
            return
        more = tuple(
            choice
            for choice in _choices(question, axis)
            if choice not in plain and getattr(limits, axis) in (None, plain)
        )
        if not more:
            continue
        freed = _asking(question, limits.model_copy(update={axis: more}))
        space = pools_space(freed)
        told = _told(f"search.{axis}", f"{list(more)} fits", freed, space, deadline=deadline)
        if told.decision is not None:
            yield told


def _choices(question: PoolsQuestion, axis: str) -> tuple[Any, ...]:
    """All that the targets can launch on an axis."""
    limits = question.alike.limits.model_copy(update={axis: None})
    return tuple(ways_of(replace(question.alike, limits=limits)).choices[axis])


def _of_memory(
    question: PoolsQuestion,
    space: PoolsSpace,
    columns: tuple[LeanColumns, ...],
    *,
    deadline: Deadline,
) -> Iterator[Relaxation]:
    """More memory in every pool, and in each alone."""
    every = tuple(range(question.num_pools))
    for some in dict.fromkeys((every, *((index,) for index in every))):
        if deadline.left_s <= 0.0:
            return
        names = {question.cluster.pools[index].name for index in some}
        limit = max(question.of_pool[index].memory_limit_bytes for index in some)
        least = _least_more(columns, names, limit)
        if least is None:
            continue
        for ratio in MORE_RATIOS:
            if deadline.left_s <= 0.0:
                return
            more = least + ratio * limit
            change = _with_memory(names, more)
            chain = best_chain(columns, change, cluster=question.cluster, deadline=deadline)
            if chain is not None:
                asked = _having_memory(question, some, more)
                said = _memory_words(question, asked, some)
                yield _relaxation(MEMORY_LIMIT, said, chain, asked, space)
                break


def _having_memory(question: PoolsQuestion, some: Iterable[int], more: float) -> PoolsQuestion:
    """Ask with more usable bytes per device of some pools, whose devices then have more in all."""
    return replace(
        question,
        of_pool=tuple(
            replace(own, memory_limit_bytes=own.memory_limit_bytes + more) if index in some else own
            for index, own in enumerate(question.of_pool)
        ),
    )


def _memory_words(question: PoolsQuestion, asked: PoolsQuestion, some: Sequence[int]) -> str:
    """Say what a device of each pool must have in all."""
    return memory_words(
        MemoryOffer(
            asked.of_pool[index].capacity_bytes,
            question.of_pool[index].capacity_bytes,
            pool=question.cluster.pools[index].name,
        )
        for index in some
    )


def _least_more(columns: tuple[LeanColumns, ...], names: set[str], limit: float) -> float | None:
    """Bytes per device of these pools without which the layers have no room; None: too many."""
    low, high = 0.0, MOST_TIMES * limit
    if not fit_anywhere(columns, _with_memory(names, high)):
        return None
    # Most that is missing is of the order of the limit: by its logarithm first.
    high = next(
        times * limit
        for times in (2.0**power for power in range(-6, 7))
        if fit_anywhere(columns, _with_memory(names, times * limit))
    )
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if fit_anywhere(columns, _with_memory(names, middle)):
            high = middle
        else:
            low = middle
    return high


def _with_memory(names: set[str], more: float) -> Change:
    def change(on: OnPool) -> OnPool:
        if on.pool.name not in names:
            return on
        usable = on.question.memory_limit_bytes + more
        return replace(on, question=replace(on.question, memory_limit_bytes=usable))

    return change


def _of_nodes(
    question: PoolsQuestion,
    space: PoolsSpace,
    columns: tuple[LeanColumns, ...],
    *,
    deadline: Deadline,
) -> Iterator[Relaxation]:
    """More nodes of one pool."""
    for index, pool in enumerate(question.cluster.pools):
        if deadline.left_s <= 0.0:
            return
        fewest = _fewest_nodes(columns, pool.name, pool.nodes)
        counts = [] if fewest is None else [math.ceil(fewest * (1.0 + r)) for r in MORE_RATIOS]
        for nodes in dict.fromkeys(counts):
            larger = pool.model_copy(update={"nodes": nodes})
            pools = tuple(
                larger if other == index else own
                for other, own in enumerate(question.cluster.pools)
            )
            cluster = Cluster(pools=pools, links=question.cluster.links)
            chain = best_chain(
                columns, _with_nodes(pool.name, nodes), cluster=cluster, deadline=deadline
            )
            if chain is not None:
                change = f"pool {pool.name!r}: {nodes} working nodes instead of {pool.nodes}"
                asked = replace(question, cluster=cluster)
                yield _relaxation("nodes", change, chain, asked, space)
                break


def _fewest_nodes(columns: tuple[LeanColumns, ...], name: str, nodes: int) -> int | None:
    """The fewest nodes of a pool with which the layers may have room."""
    low, high = nodes, nodes
    while not fit_anywhere(columns, _with_nodes(name, high)):
        low, high = high, 2 * high
        if high > MOST_TIMES * nodes:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if fit_anywhere(columns, _with_nodes(name, middle)):
            high = middle
        else:
            low = middle
    return high


def _with_nodes(name: str, nodes: int) -> Change:
    def change(on: OnPool) -> OnPool:
        if on.pool.name != name:
            return on
        return replace(on, pool=on.pool.model_copy(update={"nodes": nodes}))

    return change


def _asking(question: PoolsQuestion, limits: Limits) -> PoolsQuestion:
    return replace(question, of_pool=tuple(replace(own, limits=limits) for own in question.of_pool))


def _told(
    limit: str, change: str, question: PoolsQuestion, space: PoolsSpace, *, deadline: Deadline
) -> Relaxation:
    """Solve a question that is asked differently."""
    columns = lean_columns(question, space)
    chain = best_chain(columns, lambda on: on, cluster=question.cluster, deadline=deadline)
    if chain is None:
        return Relaxation(limit=limit, change=change)
    return _relaxation(limit, change, chain, question, space)


def _relaxation(
    limit: str, change: str, chain: Chain, question: PoolsQuestion, space: PoolsSpace
) -> Relaxation:
    return Relaxation(
        limit=limit,
        change=change,
        decision=decision_of(chain, question, space.ways),
        predicted=prediction_of(played(chain), question),
    )
