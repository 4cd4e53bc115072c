"""Prices of stages on each pool, and of a whole chain: seconds and bytes.

One layer of each kind is priced per pool (tuner/costs/train); the embedding belongs to the first
layer, head and multi-token-prediction layers to the last, so that every stage holds at least one
layer. A chain of p stages, D_s seconds of one micro-batch on stage s, X_c visible seconds of one
send over cut c, m micro-batches, takes

    step = sum D + 2 sum X + (m - 1) (max(max D, max X) + 2 sum X / p) + once

which is the closed form of tuner/costs/train/step.py with stages and cuts of their own; `once`
is the slowest pool's, since every pool reduces the gradients of its own stages over its own links.
Sends inside a pool have the pool's price, sends between pools that of `cluster.links`.

Bytes of a stage are not a sum over its layers: the peak of a backward pass counts once. For the
solver they are split into `without + count * (static + in flight * saved)` by pricing stages of one
and two layers; where kinds of layers differ, the smaller remainder counts, so that nothing that
fits is refused. A chain itself is priced in full.

Letters: C candidates, K kinds of layers in the order of `KINDS_OF_STAGES`, L layers, S stages.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.config.columns import Strategies
from tuner.config.shapes import Stages, taken
from tuner.costs.train.memory import assemble_memory
from tuner.costs.train.memory_units import MemoryUnits
from tuner.costs.train.prices import MemoryPrice
from tuner.costs.train.step import assemble
from tuner.costs.train.units import UnitCosts
from tuner.prices.train.collectives import groups, send_s
from tuner.search.train.candidate_prices import KINDS_OF_STAGES, price_batch, seconds_of_kinds
from tuner.search.train.candidates import Candidates, to_strategies
from tuner.search.train.layouts import to_stages
from tuner.search.train.memory import take_units, unit_memory
from tuner.search.train.options import OptionSpace
from tuner.search.train.pools.space import SEVERAL, stage_devices
from tuner.search.train.problem import TrainProblem
from tuner.spec.cluster import Pool

DENSE, MOE, EMBEDDING, HEAD, MTP = range(len(KINDS_OF_STAGES))

PROBE_STAGES: Final = 4
"""A pipeline of the first stage, a stage of one layer, one of two layers, and the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolMemory:
    """Candidates with their memory on one pool, without times."""

    problem: TrainProblem
    pool: Pool
    strategies: Strategies
    memory: MemoryUnits
    devices_C: Ints
    """Devices of one stage."""

    @property
    def max_stages_C(self) -> Ints:
        """Stages that the pool's devices suffice for."""
        stages_C: Ints = self.pool.num_devices // self.devices_C
        return stages_C


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolPricing(PoolMemory):
    """Candidates with their memory and times on one pool."""

    units: UnitCosts
    seconds_KC: Floats
    """Both passes of one micro-batch, per kind."""

    def taken(self, indices: Ints) -> "PoolPricing":
        """Select some candidates."""
        return replace(
            self,
            strategies=taken(self.strategies, indices),
            units=self.units.taken(indices),
            memory=take_units(self.memory, indices),
            seconds_KC=self.seconds_KC[:, indices],
            devices_C=self.devices_C[indices],
        )

    def send_s(self, *, stages: int) -> Floats:
        """Exposed seconds of one micro-batch from one of so many stages of the pool to the next."""
        several = replace(self.strategies, pipeline=float(stages))
        group = groups(several, self.problem.hardware).boundary
        constants = self.problem.constants
        sent_s = send_s(self.memory.boundary_C, group, self.problem.hardware, constants)
        return np.asarray(sent_s * constants.boundary_exposed_ratio)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes of a stage, split by cause."""

    without_C: Floats
    """Bytes of a stage without layers: context, buffers, the peak of one layer's backward pass."""
    static_KC: Floats
    """Bytes of one layer, embedding or head, for any number of micro-batches in flight."""
    saved_KC: Floats
    """Bytes per micro-batch in flight; what only the last stage has counts as static."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainPrice:
    """Price of a chain; one entry per stage in execution order."""

    step_s: float
    """Seconds of a step by the closed form above."""
    once_s: float
    forward_s_S: tuple[float, ...]
    backward_s_S: tuple[float, ...]
    send_s: tuple[float, ...]
    """Exposed seconds of every cut."""
    bytes_S: tuple[float, ...]
    """Peak of all devices."""
    collectives_s: float
    """Exposed collectives inside layers, per step on the average device."""
    memory_S: tuple[MemoryPrice, ...]
    """Memory by cause, of all stages as each stage's pool prices them."""


def price_on(
    problem: TrainProblem, pool: Pool, options: OptionSpace, candidates: Candidates
) -> PoolPricing:
    """Price one layer of every kind on one pool, for every candidate."""
    batch = price_batch(problem, options, candidates)
    units = batch.times.taken(batch.time_of_C)
    memory, memory_of = unit_memory(problem, batch.strategies, candidates)
    return PoolPricing(
        problem=problem,
        pool=pool,
        strategies=replace(batch.strategies, pipeline=float(SEVERAL)),
        units=units,
        memory=take_units(memory, memory_of),
        seconds_KC=seconds_of_kinds(problem, units, batch.strategies, len(candidates)),
        devices_C=stage_devices(candidates.rows),
    )


def price_memory_on(
    problem: TrainProblem, pool: Pool, options: OptionSpace, candidates: Candidates
) -> tuple[PoolMemory, StageBytes]:
    """Count the bytes of every candidate on one pool, those of each distinct one once."""
    strategies = replace(to_strategies(problem, options, candidates), pipeline=float(SEVERAL))
    units, unit_of = unit_memory(problem, strategies, candidates)
    _, first = np.unique(unit_of, return_index=True)
    devices_C = stage_devices(candidates.rows)
    distinct = PoolMemory(
        problem=problem,
        pool=pool,
        strategies=taken(strategies, first),
        memory=units,
        devices_C=devices_C[first],
    )
    every = replace(
        distinct,
        strategies=strategies,
        memory=take_units(units, unit_of),
        devices_C=devices_C,
    )
    return every, taken(layer_bytes(distinct), unit_of)


def layer_bytes(on: PoolMemory) -> StageBytes:
    """Split the bytes of a stage; see the module."""
    # Send buffers are left to the full price, since a single stage has none.
    memory = replace(on.memory, boundary_C=np.zeros(1))
    kinds = [kind for kind in (DENSE, MOE) if _counts(on.problem)[kind]]
    singles = [_probe(on, memory, kind=kind, in_flight=1) for kind in kinds]
    doubles = [_probe(on, memory, kind=kind, in_flight=2) for kind in kinds]
    num_candidates = len(on.devices_C)
    static_KC = np.zeros((len(KINDS_OF_STAGES), num_candidates))
    saved_KC = np.zeros_like(static_KC)
    rests = []
    for kind, once, twice in zip(kinds, singles, doubles, strict=True):
        saved_KC[kind] = twice[1] - once[1]
        static_KC[kind] = once[2] - once[1] - saved_KC[kind]
        rests.append(once[1] - static_KC[kind] - saved_KC[kind])
    first, last = singles[0], np.min([once[3] - once[1] for once in singles], axis=0)
    saved_KC[EMBEDDING] = (doubles[0][0] - doubles[0][1]) - (first[0] - first[1])
    static_KC[EMBEDDING] = first[0] - first[1] - saved_KC[EMBEDDING]
    # On a single stage a tied head and multi-token prediction share the embedding's table.
    shared = np.maximum(on.memory.is_tied_C, min(float(on.problem.shape.mtp_layers), 1.0))
    table = memory.state_BKC[:3, 2].sum(axis=0) * shared
    static_KC[HEAD] = last - table
    return StageBytes(
        without_C=np.maximum(np.min(rests, axis=0), 0.0),
        static_KC=np.maximum(static_KC, 0.0),
        saved_KC=np.maximum(saved_KC, 0.0),
    )


def chain_price(
    pools: Sequence[PoolPricing],
    *,
    pool_S: Sequence[int],
    layers_S: Sequence[int],
    between_s: Floats,
) -> ChainPrice:
    """Price a chain in full.

    Args:
        pools: one candidate on each pool.
        pool_S: the pool of every stage.
        layers_S: its layers.
        between_s: [P, P] seconds of one micro-batch from pool to pool; the diagonal is not read.
    """
    pipeline, pool_of = len(pool_S), np.array(pool_S)
    stages = to_stages(pools[0].problem.model, np.array(layers_S)[:, None])
    passes_s = np.zeros((2, pipeline))
    memory: list[MemoryPrice] = []
    total_bytes, once_s, collectives_s = np.zeros(pipeline), 0.0, 0.0
    for index in sorted(set(pool_S)):
        on, mask_S = pools[index], pool_of == index
        strategies = replace(on.strategies, pipeline=float(pipeline))
        step = assemble(
            on.problem.shape,
            on.units,
            strategies,
            on.problem.hardware,
            on.problem.constants,
            _only(stages, mask_S),
        )
        passes_s[0, mask_S] = np.broadcast_to(step.forward_s_SC, (pipeline, 1))[mask_S, 0]
        passes_s[1, mask_S] = np.broadcast_to(step.backward_s_SC, (pipeline, 1))[mask_S, 0]
        once_s = max(once_s, _number(step.once_s))
        collectives_s += _number(step.tensor_s + step.context_s + step.expert_s)
        memory.append(assemble_memory(on.memory, strategies, stages))
        total_bytes[mask_S] = memory[-1].total_PC[mask_S, 0]
    by_pool = dict(zip(sorted(set(pool_S)), memory, strict=True))
    sends = _sends_s(pools, pool_S, between_s)
    m = _number(pools[0].strategies.num_microbatches)
    both = passes_s.sum(axis=0)
    pace = max(float(both.max()), *sends, 0.0) + 2.0 * sum(sends) / pipeline
    return ChainPrice(
        step_s=float(both.sum()) + 2.0 * sum(sends) + (m - 1.0) * pace + once_s,
        once_s=once_s,
        forward_s_S=tuple(passes_s[0].tolist()),
        backward_s_S=tuple(passes_s[1].tolist()),
        send_s=sends,
        bytes_S=tuple(total_bytes.tolist()),
        collectives_s=collectives_s,
        memory_S=tuple(by_pool[index] for index in pool_S),
    )


def _sends_s(
    pools: Sequence[PoolPricing], pool_S: Sequence[int], between_s: Floats
) -> tuple[float, ...]:
    inside = {
        index: _number(pools[index].send_s(stages=list(pool_S).count(index)))
        for index in set(pool_S)
    }
    return tuple(
        inside[here] if here == there else float(between_s[here, there])
        for here, there in itertools.pairwise(pool_S)
    )


def _only(stages: Stages, mask_S: npt.NDArray[np.bool_]) -> Stages:
    """Leave the stages of other pools empty."""
    return Stages(
        **{name: np.where(mask_S[:, None], getattr(stages, name), 0.0) for name in KINDS_OF_STAGES}
    )


def _probe(on: PoolMemory, memory: MemoryUnits, *, kind: int, in_flight: int) -> Floats:
    """Bytes of the four stages of a short pipeline of one kind of layers, [4, C]."""
    grids = {name: np.zeros((PROBE_STAGES, 1)) for name in KINDS_OF_STAGES}
    grids[KINDS_OF_STAGES[kind]][:, 0] = (1.0, 1.0, 2.0, 1.0)
    grids["embedding_SC"][0] = 1.0
    grids["head_SC"][-1] = 1.0
    grids["mtp_SC"][-1] = float(on.problem.shape.mtp_layers)
    strategies = replace(
        on.strategies,
        pipeline=float(PROBE_STAGES),
        virtual_pipeline=1.0,
        num_microbatches=float(in_flight),
    )
    total = assemble_memory(memory, strategies, Stages(**grids)).total_PC
    return np.broadcast_to(total, (PROBE_STAGES, len(on.devices_C)))


def _counts(problem: TrainProblem) -> tuple[int, int]:
    """Layers without and with experts."""
    return problem.model.num_layers - problem.model.num_moe_layers, problem.model.num_moe_layers


def counts_K(problem: TrainProblem) -> Floats:
    """Number of layers of each kind in the model."""
    return np.array([*_counts(problem), 1.0, 1.0, float(problem.shape.mtp_layers)])


def _number(value: object) -> float:
    return float(np.asarray(value).ravel()[0])
