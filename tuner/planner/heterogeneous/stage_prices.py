"""Seconds and bytes of stages on each pool, and of a whole chain of them.

One layer of each kind is priced per pool (tuner/costs/analytic); the embedding belongs to the first
layer, head and multi-token-prediction layers to the last, so that every stage holds at least one
layer. A chain of p stages, D_s seconds of one micro-batch on stage s, X_c visible seconds of one
send over cut c, m micro-batches, takes

    step = sum D + 2 sum X + (m - 1) (max(max D, max X) + 2 sum X / p) + once

which is the closed form of tuner/costs/analytic/step.py with stages and cuts of their own; `once`
is the slowest pool's, since every pool sums the gradients of its own stages over its own links.
Sends inside a pool cost what the model says there, sends between pools what `cluster.links` states.

Bytes of a stage are not a sum over its layers: the fullest moment of a backward pass counts once.
For the solver they are taken apart as `without + count * (static + in flight * saved)` by pricing
stages of one and two layers; where kinds of layers differ, the smaller rest counts, so that nothing
that fits is refused. A chain itself is priced in full.

Letters: C columns, K kinds of layers in the order of `KINDS_OF_STAGES`, L layers, S stages.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.steps.config import LayerKind
from tuner.costs.analytic.links import groups, send_s
from tuner.costs.analytic.memory import assemble_memory
from tuner.costs.analytic.memory_units import MemoryUnits
from tuner.costs.analytic.prices import MemoryPrice
from tuner.costs.analytic.shapes import Stages, Strategies, taken
from tuner.costs.analytic.step import assemble
from tuner.costs.analytic.units import UnitCosts
from tuner.formulate.heterogeneous import PoolPrices, card_bytes_per_s
from tuner.planner.analytic.candidate_prices import KINDS_OF_STAGES, batch_of
from tuner.planner.analytic.candidates import Candidates, strategies_of
from tuner.planner.analytic.layouts import stages_of
from tuner.planner.analytic.memory import taken_bytes, unit_memory
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints
from tuner.planner.heterogeneous.space import SEVERAL, stage_devices
from tuner.spec.cluster import Pool

Floats = npt.NDArray[np.float64]

DENSE, MOE, EMBEDDING, HEAD, MTP = range(len(KINDS_OF_STAGES))

PROBE_STAGES: Final = 4
"""A pipeline of the first stage, one layer, two layers, the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOnPool:
    """Columns as they fill the devices of one pool; what they take there in time is not known."""

    question: Question
    pool: Pool
    strategies: Strategies
    memory: MemoryUnits
    devices_C: Ints
    """Of one stage."""

    @property
    def max_stages_C(self) -> Ints:
        """Stages that the pool's devices suffice for."""
        found: Ints = self.pool.num_devices // self.devices_C
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnPool(HeldOnPool):
    """Columns as one pool prices them."""

    units: UnitCosts
    seconds_KC: Floats
    """Both passes of one micro-batch, per kind."""

    def taken(self, column: int) -> "OnPool":
        """Keep one column."""
        return self.kept(np.array([column]))

    def kept(self, columns: Ints) -> "OnPool":
        """Keep some columns."""
        return replace(
            self,
            strategies=taken(self.strategies, columns),
            units=self.units.taken(columns),
            memory=taken_bytes(self.memory, columns),
            seconds_KC=self.seconds_KC[:, columns],
            devices_C=self.devices_C[columns],
        )

    def send_s(self, *, stages: int) -> Floats:
        """Visible seconds of one micro-batch from one of so many stages of the pool to the next."""
        several = replace(self.strategies, pipeline=float(stages))
        group = groups(several, self.question.hardware).boundary
        own = self.question.constants
        sent_s = send_s(self.memory.boundary_C, group, self.question.hardware, own)
        return np.asarray(sent_s * own.boundary_exposed_ratio)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Bytes of a stage, taken apart."""

    without_C: Floats
    """Of a stage before any layer: context, buffers, one layer's moment of its backward pass."""
    static_KC: Floats
    """That one layer, or an end, adds whatever is in flight."""
    saved_KC: Floats
    """Per micro-batch in flight; what the last stage alone has is counted as static."""

    def taken(self, column: int) -> "LayerBytes":
        """Keep one column."""
        return self.kept(np.array([column]))

    def kept(self, columns: Ints) -> "LayerBytes":
        """Keep or repeat some columns."""
        return LayerBytes(
            without_C=self.without_C[columns],
            static_KC=self.static_KC[:, columns],
            saved_KC=self.saved_KC[:, columns],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainPrice:
    """What a chain of stages costs; one entry per stage in execution order."""

    step_s: float
    """From the closed form above."""
    once_s: float
    forward_s_S: tuple[float, ...]
    backward_s_S: tuple[float, ...]
    send_s: tuple[float, ...]
    """Visible seconds of every cut."""
    bytes_S: tuple[float, ...]
    """On the fullest device."""
    collectives_s: float
    """Of the step on the average device: exposed collectives inside layers."""
    memory_S: tuple[MemoryPrice, ...]
    """The same by cause, of all stages as each stage's pool sees them."""


def priced_on(question: Question, pool: Pool, ways: Ways, candidates: Candidates) -> OnPool:
    """Price one layer of every kind on one pool, for every candidate."""
    batch = batch_of(question, ways, candidates)
    units = batch.times.taken(batch.time_of_C)
    memory, memory_of = unit_memory(question, batch.strategies, candidates)
    one_KK = np.eye(len(KINDS_OF_STAGES))[:, :, None]
    kinds = Stages(**dict(zip(KINDS_OF_STAGES, one_KK, strict=True)))
    alone = assemble(
        question.shape,
        units,
        replace(batch.strategies, pipeline=float(len(KINDS_OF_STAGES))),
        question.hardware,
        question.constants,
        kinds,
    )
    shape = (len(KINDS_OF_STAGES), len(candidates))
    return OnPool(
        question=question,
        pool=pool,
        strategies=replace(batch.strategies, pipeline=float(SEVERAL)),
        units=units,
        memory=taken_bytes(memory, memory_of),
        seconds_KC=np.broadcast_to(alone.forward_s_SC + alone.backward_s_SC, shape),
        devices_C=stage_devices(candidates.rows),
    )


def held_on(
    question: Question, pool: Pool, ways: Ways, candidates: Candidates
) -> tuple[HeldOnPool, LayerBytes]:
    """Count the bytes of every candidate on one pool, those of each distinct one once."""
    strategies = replace(strategies_of(question, ways, candidates), pipeline=float(SEVERAL))
    units, unit_of = unit_memory(question, strategies, candidates)
    _, first = np.unique(unit_of, return_index=True)
    devices_C = stage_devices(candidates.rows)
    distinct = HeldOnPool(
        question=question,
        pool=pool,
        strategies=taken(strategies, first),
        memory=units,
        devices_C=devices_C[first],
    )
    every = replace(
        distinct,
        strategies=strategies,
        memory=taken_bytes(units, unit_of),
        devices_C=devices_C,
    )
    return every, layer_bytes(distinct).kept(unit_of)


def layer_bytes(on: HeldOnPool) -> LayerBytes:
    """Take the bytes of a stage apart; see the module."""
    # What one send needs is left to the full price, since a single stage does not have it.
    memory = replace(on.memory, boundary_C=np.zeros(1))
    kinds = [kind for kind in (DENSE, MOE) if _counts(on.question)[kind]]
    one = [_probe(on, memory, kind=kind, in_flight=1) for kind in kinds]
    two = [_probe(on, memory, kind=kind, in_flight=2) for kind in kinds]
    columns = len(on.devices_C)
    static_KC = np.zeros((len(KINDS_OF_STAGES), columns))
    saved_KC = np.zeros_like(static_KC)
    rests = []
    for kind, once, twice in zip(kinds, one, two, strict=True):
        saved_KC[kind] = twice[1] - once[1]
        static_KC[kind] = once[2] - once[1] - saved_KC[kind]
        rests.append(once[1] - static_KC[kind] - saved_KC[kind])
    first, last = one[0], np.min([once[3] - once[1] for once in one], axis=0)
    saved_KC[EMBEDDING] = (two[0][0] - two[0][1]) - (first[0] - first[1])
    static_KC[EMBEDDING] = first[0] - first[1] - saved_KC[EMBEDDING]
    # On a single stage the embedding's table also serves a tied head and multi-token prediction.
    shared = np.maximum(on.memory.is_tied_C, min(float(on.question.shape.mtp_layers), 1.0))
    table = memory.state_BKC[:3, 2].sum(axis=0) * shared
    static_KC[HEAD] = last - table
    return LayerBytes(
        without_C=np.maximum(np.min(rests, axis=0), 0.0),
        static_KC=np.maximum(static_KC, 0.0),
        saved_KC=np.maximum(saved_KC, 0.0),
    )


def pool_prices(on: OnPool, bytes_of: LayerBytes, *, more_s_K: Floats) -> PoolPrices:
    """State a single column as the solver's layers, each with `more_s_K` seconds of its kind."""
    model, mtp = on.question.model, float(on.question.shape.mtp_layers)
    kind_L = np.array([MOE if kind is LayerKind.MOE else DENSE for kind in model.layers])
    time_s_L = on.seconds_KC[kind_L, 0] + more_s_K[kind_L]
    time_s_L[0] += on.seconds_KC[EMBEDDING, 0]
    time_s_L[-1] += on.seconds_KC[HEAD, 0] + mtp * on.seconds_KC[MTP, 0]
    static_L, saved_L = bytes_of.static_KC[kind_L, 0], bytes_of.saved_KC[kind_L, 0]
    static_L[0] += bytes_of.static_KC[EMBEDDING, 0]
    saved_L[0] += bytes_of.saved_KC[EMBEDDING, 0]
    static_L[-1] += bytes_of.static_KC[HEAD, 0]
    limit = on.question.memory_limit_bytes - float(bytes_of.without_C[0])
    return PoolPrices(
        stage_devices=int(on.devices_C[0]),
        time_s_L=time_s_L,
        static_bytes_L=static_L,
        saved_bytes_L=saved_L,
        memory_limit_bytes=max(0, int(limit)),
        card_bytes_per_s=card_bytes_per_s(on.pool),
    )


def chain_price(
    pools: Sequence[OnPool],
    *,
    pool_S: Sequence[int],
    layers_S: Sequence[int],
    between_s: Floats,
) -> ChainPrice:
    """Price a chain in full.

    Args:
        pools: single columns.
        pool_S: the pool of every stage.
        layers_S: its layers.
        between_s: [P, P] seconds of one micro-batch from pool to pool; the diagonal is not read.
    """
    pipeline, pool_of = len(pool_S), np.array(pool_S)
    stages = stages_of(pools[0].question.model, np.array(layers_S)[:, None])
    passes_s = np.zeros((2, pipeline))
    memory: list[MemoryPrice] = []
    total_bytes, once_s, collectives_s = np.zeros(pipeline), 0.0, 0.0
    for index in sorted(set(pool_S)):
        on, own = pools[index], pool_of == index
        strategies = replace(on.strategies, pipeline=float(pipeline))
        step = assemble(
            on.question.shape,
            on.units,
            strategies,
            on.question.hardware,
            on.question.constants,
            _only(stages, own),
        )
        passes_s[0, own] = np.broadcast_to(step.forward_s_SC, (pipeline, 1))[own, 0]
        passes_s[1, own] = np.broadcast_to(step.backward_s_SC, (pipeline, 1))[own, 0]
        once_s = max(once_s, _number(step.once_s))
        collectives_s += _number(step.tensor_s + step.context_s + step.expert_s)
        memory.append(assemble_memory(on.memory, strategies, stages))
        total_bytes[own] = memory[-1].total_PC[own, 0]
    of_pool = dict(zip(sorted(set(pool_S)), memory, strict=True))
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
        memory_S=tuple(of_pool[index] for index in pool_S),
    )


def _sends_s(
    pools: Sequence[OnPool], pool_S: Sequence[int], between_s: Floats
) -> tuple[float, ...]:
    inside = {
        index: _number(pools[index].send_s(stages=list(pool_S).count(index)))
        for index in set(pool_S)
    }
    return tuple(
        inside[here] if here == there else float(between_s[here, there])
        for here, there in itertools.pairwise(pool_S)
    )


def _only(stages: Stages, own: npt.NDArray[np.bool_]) -> Stages:
    """Leave the stages of other pools empty."""
    return Stages(
        **{name: np.where(own[:, None], getattr(stages, name), 0.0) for name in KINDS_OF_STAGES}
    )


def _probe(on: HeldOnPool, memory: MemoryUnits, *, kind: int, in_flight: int) -> Floats:
    """Bytes of the four stages of a short pipeline of one kind of layers, [4, C]."""
    grids = {name: np.zeros((PROBE_STAGES, 1)) for name in KINDS_OF_STAGES}
    grids[KINDS_OF_STAGES[kind]][:, 0] = (1.0, 1.0, 2.0, 1.0)
    grids["embedding_SC"][0] = 1.0
    grids["head_SC"][-1] = 1.0
    grids["mtp_SC"][-1] = float(on.question.shape.mtp_layers)
    strategies = replace(
        on.strategies,
        pipeline=float(PROBE_STAGES),
        virtual_pipeline=1.0,
        num_microbatches=float(in_flight),
    )
    total = assemble_memory(memory, strategies, Stages(**grids)).total_PC
    return np.broadcast_to(total, (PROBE_STAGES, len(on.devices_C)))


def _counts(question: Question) -> tuple[int, int]:
    """Layers without and with experts."""
    return question.model.num_layers - question.model.num_moe_layers, question.model.num_moe_layers


def counts_K(question: Question) -> Floats:
    """How many of each kind the model has."""
    return np.array([*_counts(question), 1.0, 1.0, float(question.shape.mtp_layers)])


def _number(value: object) -> float:
    return float(np.asarray(value).ravel()[0])
