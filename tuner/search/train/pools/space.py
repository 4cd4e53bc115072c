"""The search space over pools: legal degrees and options of a stage, and the others by rule.

    tensor, context, expert_tensor    divisors of what every node's devices have in common
    data, micro_batch                 divisors of the global batch
    expert                            divisors of the experts
    options                           zero_stage 0 and 1, every recomputation, overlaps; of the
                                      other axes of options.py the default choice, or what the
                                      user's limits name

A stage takes TP x CP x DP devices, the same in every pool; the partition decides how many stages
there are and which pool runs them. Rules are those of one pool (rules.py, options.py) for a
pipeline of several stages, and three more: TP x CP lies inside a node, a stage is whole nodes or an
even part of one, some pool has as many devices.

Letters: N rows of degrees. Not covered: interleaved and zero-bubble schedules; data parallelism
that differs between pools.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.arrays import Ints
from tuner.config.knobs import OFFLOADS
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Table, filter_legal, take_rows
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import RANK_ORDERS, SHARDINGS, Choice, OptionSpace, option_space
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.rules import (
    Rule,
    dense_rules,
    divisors,
    expert_rules,
    schedule_rules,
)
from tuner.search.train.space_size import OptionTables, by_facts
from tuner.spec.search import Search

SEVERAL: Final = 2
"""Placeholder for the number of stages where rules only test whether there are several."""

PLAIN: Final[Mapping[str, tuple[Choice, ...]]] = {
    "zero_stage": (0, 1),
    "chunks": (1,),
    **dict.fromkeys(OFFLOADS, (False,)),
}
"""Choices that are searched on an axis without a limit from the user."""

Pools = tuple[int, ...]
"""Positions of the pools that may run stages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsSpace:
    """Legal decisions in two parts, degrees and options; each may run on any choice of pools."""

    rows_N: Table
    options: OptionSpace
    pools: tuple[Pools, ...]
    """Every choice of at least one pool."""
    illegal: Mapping[str, int]
    """Decisions by the first rule that they break."""
    num_legal: int
    tables: tuple[tuple[OptionTable, Ints], ...]
    """Options with the rows that allow them, those of each kind of degrees together."""

    def candidates(self, table: OptionTable, rows: Ints, options_TA: Ints) -> Candidates:
        """Some options of some rows, rows outermost."""
        repeated = np.repeat(rows, len(options_TA))
        return Candidates(
            rows=take_rows(self.rows_N, repeated),
            options=table.columns(np.tile(options_TA, (len(rows), 1))),
        )


def pools_space(problem: PoolsProblem) -> PoolsSpace:
    """Split all combinations into legal ones and counted refusals."""
    options = _searched_options(problem)
    pools = tuple(
        itertools.chain.from_iterable(
            itertools.combinations(range(problem.num_pools), count)
            for count in range(1, problem.num_pools + 1)
        )
    )
    rows, broken = _legal_rows(problem)
    illegal = Counter({text: n * options.num_options * len(pools) for text, n in broken.items()})
    num_legal = 0
    for facts, at in by_facts(rows):
        count, refused = options.count_legal(facts)
        num_legal += count * len(at) * len(pools)
        for text, refusals in refused.items():
            illegal[text] += refusals * len(at) * len(pools)
    return PoolsSpace(
        rows_N=rows,
        options=options,
        pools=pools,
        illegal=dict(sorted(illegal.items())),
        num_legal=num_legal,
        tables=tuple(OptionTables(options=options).by_kind(rows)),
    )


def _searched_options(problem: PoolsProblem) -> OptionSpace:
    """The options of one pool, with the axes of `PLAIN` reduced unless the user names choices."""
    options, limits = option_space(problem.any_pool), problem.any_pool.limits
    cut = {
        axis: tuple(choice for choice in choices if choice in options.choices[axis])
        for axis, choices in PLAIN.items()
        if _is_free(limits, axis)
    }
    fixed: dict[str, tuple[Choice, ...]] = {
        "schedule": ("1f1b",),
        "rank_order": RANK_ORDERS[:1],
        "sharding": SHARDINGS[:1],
    }
    return replace(options, choices={**options.choices, **cut, **fixed})


def _is_free(limits: Search, axis: str) -> bool:
    return getattr(limits, axis) is None


def _legal_rows(problem: PoolsProblem) -> tuple[Table, Mapping[str, int]]:
    """Return the legal combinations, and of the others how many break which rule first.

    Degrees are joined in the order of their rules, so that what a rule excludes is counted and not
    listed: a batch of 2**31 sequences has too many divisors for a table of all combinations.
    """
    any_pool = problem.any_pool
    inside = divisors(math.gcd(*(pool.devices_per_node for pool in problem.cluster.pools)))
    batches = divisors(any_pool.global_batch_size)
    experts = (
        divisors(any_pool.model.moe.num_experts) if any_pool.model.moe else np.ones(1, np.int64)
    )
    split = inside if any_pool.model.moe else np.ones(1, np.int64)
    stages: tuple[tuple[dict[str, Ints], list[Rule]], ...] = (
        (
            {"tensor": inside, "context": inside, "data": batches},
            [*_stage_rules(problem), *dense_rules(any_pool)],
        ),
        ({"micro_batch": batches}, list(schedule_rules(any_pool))),
        (
            {"expert": experts, "expert_tensor": split},
            [*expert_rules(any_pool), _experts_in_a_stage()],
        ),
    )
    rows: dict[str, Ints] = {
        "pipeline": np.array([SEVERAL], dtype=np.int64),
        "virtual_pipeline": np.ones(1, dtype=np.int64),
    }
    illegal: Counter[str] = Counter()
    left = math.prod(len(values) for joined, _ in stages for values in joined.values())
    for joined, rules in stages:
        for name, values in joined.items():
            left //= len(values)
            length = len(rows["pipeline"])
            rows = {known: np.repeat(column, len(values)) for known, column in rows.items()}
            rows[name] = np.tile(values, length)
        weight = np.full(len(rows["pipeline"]), left)
        legal = filter_legal(rows, weight=weight, rules=rules, illegal=illegal)
        rows = take_rows(rows, legal)
    return rows, illegal


def _stage_rules(problem: PoolsProblem) -> Iterator[Rule]:
    """Yield the rules on the devices of one stage."""
    per_node = [pool.devices_per_node for pool in problem.cluster.pools]
    max_devices = max(pool.num_devices for pool in problem.cluster.pools)
    common = math.gcd(*per_node)
    yield Rule(
        text="tensor_model_parallel_size * context_parallel_size leaves a node",
        broken=lambda c: common % (c["tensor"] * c["context"]) != 0,
    )
    yield Rule(
        text="a stage takes more devices than any pool has",
        broken=lambda c: stage_devices(c) > max_devices,
    )
    for size in sorted(set(per_node)):
        yield Rule(
            text=f"a stage is neither whole nodes of {size} devices nor an even part of one",
            broken=lambda c, size=size: (  # type: ignore[misc] # bound now, not when called
                (stage_devices(c) % size != 0) & (size % stage_devices(c) != 0)
            ),
        )


def _experts_in_a_stage() -> Rule:
    return Rule(
        text="expert_model_parallel_size * expert_tensor_parallel_size does not divide a stage",
        broken=lambda c: stage_devices(c) % (c["expert"] * c["expert_tensor"]) != 0,
    )


def stage_devices(rows: Mapping[str, Ints]) -> Ints:
    """Devices that one stage takes, in whichever pool."""
    devices: Ints = rows["tensor"] * rows["context"] * rows["data"]
    return devices
