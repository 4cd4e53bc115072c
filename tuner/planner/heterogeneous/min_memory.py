"""Columns that need least memory, to say what would fit where nothing does.

Rows with their smallest micro-batch, each in the few ways that keep least: whatever else fits needs
no less, up to ways that are lean in one row and not in another. The partition of the most promising
ones is solved, so that what is said to fit does.

Letters: C columns, J positions from the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.option_table import WayTable
from tuner.planner.analytic.rules import Ints, Mask
from tuner.planner.heterogeneous.bounds import (
    can_fit,
    least_pace_s,
    least_step_s,
    once_parts,
    positions,
    room_alone,
    rooms,
    spare_layers,
)
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.chains import Chain, Column, solved
from tuner.planner.heterogeneous.space import PoolsSpace
from tuner.planner.heterogeneous.stage_prices import (
    DENSE,
    MOE,
    Floats,
    LayerBytes,
    OnPool,
    layer_bytes,
    priced_on,
)
from tuner.spec.cluster import Cluster

IN_FLIGHT: Final = (1.0, 4.0, 16.0, 64.0)
"""Micro-batches in flight for each of which the leanest way is kept."""

MOST_TRIED: Final = 8
"""Columns whose partition is solved for one answer, the fastest and as many of the roomiest."""

SOLVE_S: Final = 5.0
"""For one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """With what partitions are solved, and until when."""

    method: str
    """A partition solver of solvers/registry.py."""
    clock: Callable[[], float]
    end_s: float
    """By the clock."""

    @property
    def left_s(self) -> float:
        """Seconds until the end; none or less when it has come."""
        return self.end_s - self.clock()


Change = Callable[[OnPool], OnPool]
"""What is given up: a pool's limit on memory, or its number of nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeanColumns:
    """Columns of one table of ways, priced on every pool."""

    candidates: Candidates
    pools: tuple[OnPool, ...]
    bytes_of: tuple[LayerBytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Promising:
    """A column that may fit once something is given up."""

    bound_s: float
    spare_layers: float
    part: LeanColumns
    pools: tuple[OnPool, ...]
    index: int


def lean_columns(question: PoolsQuestion, space: PoolsSpace) -> tuple[LeanColumns, ...]:
    """Price the leanest columns of a space."""
    found = []
    for table, rows in space.tables():
        if len(table.ways_TA):
            lean = _leanest_ways(question, space, table, rows[:1])
            some = _smallest_micro_batches(space, rows)
            found.append(_priced(question, space, space.columns(table, some, lean)))
    return tuple(found)


def fit_anywhere(columns: Sequence[LeanColumns], change: Change) -> bool:
    """Whether any may fit once something is given up."""
    return any(bool(_fits(part, change).any()) for part in columns)


def best_chain(
    columns: Sequence[LeanColumns], change: Change, *, cluster: Cluster, deadline: Deadline
) -> Chain | None:
    """Solve the most promising ones; None where none of these fits, or none was solved in time."""
    found: list[_Promising] = []
    for part in columns:
        pools = tuple(change(on) for on in part.pools)
        rooms_P = _rooms(pools, part.bytes_of)
        bound_s_C, spare_C = least_step_s(pools, rooms_P), spare_layers(pools, rooms_P)
        fits = np.flatnonzero(np.isfinite(bound_s_C))
        # The fastest may have room in the bound's eyes alone; the roomiest are slow.
        fastest = fits[np.argsort(bound_s_C[fits], kind="stable")[:MOST_TRIED]]
        roomiest = fits[np.argsort(-spare_C[fits], kind="stable")[:MOST_TRIED]]
        found += [
            _Promising(
                bound_s=float(bound_s_C[index]),
                spare_layers=float(spare_C[index]),
                part=part,
                pools=pools,
                index=int(index),
            )
            for index in np.union1d(fastest, roomiest)
        ]
    by_time = sorted(found, key=lambda one: one.bound_s)[:MOST_TRIED]
    by_room = sorted(found, key=lambda one: -one.spare_layers)[:MOST_TRIED]
    best: Chain | None = None
    for one in (*by_time, *by_room):
        if best is not None and one.bound_s >= best.price.step_s:
            continue
        left_s = deadline.left_s
        if left_s <= 0.0:
            break
        column = _column(one.part, one.pools, one.index)
        limit_s = min(SOLVE_S, left_s)
        chain = solved(column, cluster, method=deadline.method, time_limit_s=limit_s).chain
        if chain is not None and (best is None or chain.price.step_s < best.price.step_s):
            best = chain
    return best


def most_layers(columns: Sequence[LeanColumns], num_pools: int) -> tuple[int, ...]:
    """Common layers that each pool has room for, of the column with most room in all."""
    best = np.zeros(num_pools)
    for part in columns:
        room_PC = np.stack(
            [room_alone(on, own) for on, own in zip(part.pools, part.bytes_of, strict=True)]
        )
        most_PC = room_PC[:, room_PC.sum(axis=0).argmax()]
        best = most_PC if most_PC.sum() > best.sum() else best
    return tuple(int(layers) for layers in best)


def _leanest_ways(question: PoolsQuestion, space: PoolsSpace, table: WayTable, rows: Ints) -> Ints:
    """The ways that keep least on a row, for several numbers of micro-batches in flight."""
    every = _priced(question, space, space.columns(table, rows, table.ways_TA))
    kind = MOE if question.alike.model.num_moe_layers else DENSE
    chosen = {
        int((own.without_C + own.static_KC[kind] + held * own.saved_KC[kind]).argmin())
        for own in every.bytes_of
        for held in IN_FLIGHT
    }
    return table.ways_TA[sorted(chosen)]


def _smallest_micro_batches(space: PoolsSpace, rows: Ints) -> Ints:
    """Of all rows that differ in the micro-batch alone the one with the smallest."""
    names = [name for name in space.rows_N if name != "micro_batch"]
    order = rows[np.argsort(space.rows_N["micro_batch"][rows], kind="stable")]
    keys = np.stack([space.rows_N[name][order] for name in names])
    _, first = np.unique(keys, axis=1, return_index=True)
    return order[np.sort(first)]


def _priced(question: PoolsQuestion, space: PoolsSpace, candidates: Candidates) -> LeanColumns:
    pools = tuple(
        priced_on(own, pool, space.ways, candidates)
        for own, pool in zip(question.of_pool, question.cluster.pools, strict=True)
    )
    return LeanColumns(
        candidates=candidates, pools=pools, bytes_of=tuple(layer_bytes(on) for on in pools)
    )


def _fits(part: LeanColumns, change: Change) -> Mask:
    pools = tuple(change(on) for on in part.pools)
    return can_fit(pools, _rooms(pools, part.bytes_of))


def _rooms(pools: Sequence[OnPool], bytes_of: Sequence[LayerBytes]) -> list[Floats]:
    longest = positions(pools)
    return [rooms(on, own, positions=longest) for on, own in zip(pools, bytes_of, strict=True)]


def _column(part: LeanColumns, pools: Sequence[OnPool], index: int) -> Column:
    one = tuple(on.taken(index) for on in pools)
    bytes_of = tuple(own.taken(index) for own in part.bytes_of)
    return Column(
        candidate=part.candidates.taken(np.array([index])),
        chosen=tuple(range(len(pools))),
        pools=one,
        bytes_of=bytes_of,
        once_of=tuple(once_parts(on) for on in one),
        least_pace_s=float(least_pace_s(one, _rooms(one, bytes_of))[0]),
    )
